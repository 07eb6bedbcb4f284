"""Noise laws: dropout seen through its moments.

Dropout replaces x by x ⊙ (1 − ε) with ε i.i.d. per element. The energy of any linear map of the deviation x ⊙ ε
depends on two moments of ε alone, its mean μ and its variance v; so a law of noise is that pair. Its name is kept
beside them, because drawing masks and the joint form with one shared mask need the law itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from explicit_dropout.checks import choice, number, rate
from explicit_dropout.errors import InputError

Law = Literal["paper", "bernoulli", "inverted", "gaussian", "moments"]


@dataclass(frozen=True, slots=True)
class Noise:
    """The moments of ε, the relative deviation that dropout causes: x̃ = x ⊙ ε.

    JSON both ways: `Noise(**json.loads(json.dumps(dataclasses.asdict(noise))))` equals `noise`.

    Args:
        mean: μ = E[ε].
        variance: v = Var[ε].
        law: the distribution behind the moments; "moments" where nothing else is known about it.
    """

    mean: float
    variance: float
    law: Law = "moments"

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean", number("mean", self.mean, "a finite number"))
        object.__setattr__(self, "variance", number("variance", self.variance, "a finite number ≥ 0", low=0))
        choice("law", self.law, Law)
        if not self._moments_fit_law():
            raise InputError(
                "law",
                "a law that has these moments; use the constructors paper, bernoulli, inverted and gaussian, "
                "or law='moments'",
                f"law={self.law!r} with mean={self.mean} and variance={self.variance}",
            )

    def _moments_fit_law(self) -> bool:
        match self.law:
            case "paper":
                return 0 <= self.mean < 1 and self.variance == 0
            case "bernoulli":
                return 0 <= self.mean < 1 and math.isclose(self.variance, self.mean * (1 - self.mean))
            case "inverted" | "gaussian":
                return self.mean == 0
            case _:
                return True

    def __str__(self) -> str:
        """As it was made: inverted(0.2)."""
        if self.law == "moments":
            return f"Noise({self.mean:g}, {self.variance:g})"
        return f"{self.law}({math.sqrt(self.variance) if self.law == 'gaussian' else self.rate:g})"

    @property
    def rate(self) -> float:
        """The drop rate p behind a `paper`, `bernoulli` or `inverted` law."""
        match self.law:
            case "paper" | "bernoulli":
                return self.mean
            case "inverted":
                return self.variance / (1 + self.variance)
            case _:
                raise InputError("noise", "a law with a drop rate: paper, bernoulli or inverted", self)

    @property
    def higher_moments(self) -> tuple[float, float]:
        """Third and fourth central moments of ε: E[(ε − μ)³] and E[(ε − μ)⁴]."""
        match self.law:
            case "paper":
                return 0.0, 0.0
            case "bernoulli" | "inverted":
                p = self.rate
                shrink = 1 - p if self.law == "inverted" else 1.0
                third = p * (1 - p) * (1 - 2 * p)
                fourth = p * (1 - p) * (1 - 3 * p * (1 - p))
                return third / shrink**3, fourth / shrink**4
            case "gaussian":
                return 0.0, 3 * self.variance**2
            case _:
                raise InputError(
                    "noise",
                    "a named law (paper, bernoulli, inverted, gaussian), since third and fourth moments are needed",
                    self,
                )

    def draw(
        self,
        shape: Sequence[int],
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """A random mask 1 − ε of the given shape: x ⊙ mask is what dropout makes of x.

        `law="moments"` draws a Gaussian with its mean and variance; any law with the same two would do.
        """
        options = {"dtype": dtype, "device": device}
        match self.law:
            case "paper":
                raise InputError(
                    "noise",
                    "a law that random masks can have (bernoulli, inverted, gaussian): the paper sets "
                    "E[(1 − m)²] = p² on the diagonal too, where a mask m ∈ {0, 1} has p, so no mask has its moments",
                    self,
                )
            case "bernoulli" | "inverted":
                p = self.rate
                keep = torch.full(tuple(shape), 1 - p, **options)  # type: ignore[arg-type]
                mask = torch.bernoulli(keep, generator=generator)
                return mask / (1 - p) if self.law == "inverted" else mask
            case _:
                normal = torch.randn(tuple(shape), generator=generator, **options)  # type: ignore[arg-type]
                return 1 - self.mean - math.sqrt(self.variance) * normal


def paper(p: float) -> Noise:
    """The paper's moments (Eqs. 13, 46, 92): μ = p, v = 0.

    It counts the mask as independent of itself, so it keeps E[ε²] = p² where a mask has p; see `bernoulli`.
    """
    return Noise(rate(p), 0.0, "paper")


def bernoulli(p: float) -> Noise:
    """The mask that the paper defines, m ∈ {0, 1} without rescaling, taken exactly: μ = p, v = p(1 − p)."""
    p = rate(p)
    return Noise(p, p * (1 - p), "bernoulli")


def inverted(p: float) -> Noise:
    """`torch.nn.Dropout(p)`, masks m/(1 − p), taken exactly: μ = 0, v = p/(1 − p)."""
    p = rate(p)
    return Noise(0.0, p / (1 - p), "inverted")


def gaussian(std: float) -> Noise:
    """Multiplicative Gaussian dropout, x ⊙ N(1, std²): μ = 0, v = std²."""
    std = number("std", std, "a finite number ≥ 0", low=0)
    return Noise(0.0, std**2, "gaussian")
