"""A checked batch: its shape, its padding, the precision of its sums, and how one penalty is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec

import torch
from torch import Tensor

from explicit_dropout import checks
from explicit_dropout.errors import InputError
from explicit_dropout.noise import Noise

Reduction = Literal["token", "sample", "none"]
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Batch:
    """What all forms share. Inside, a batch of any leading shape is one axis: (batch, token, width).

    Attributes:
        shape: the leading shape that the caller gave.
        mask: real tokens, (batch, token), or None when all are.
        counted: the number of real tokens.
    """

    shape: torch.Size
    mask: Tensor | None
    counted: int | Tensor
    dtype: torch.dtype
    device: torch.device
    reduction: Reduction
    strength: float

    @classmethod
    def of(
        cls,
        x: Tensor,
        noise: Noise,
        reduction: Reduction,
        strength: float,
        mask: Tensor | None,
        *,
        required: Mapping[str, Tensor] | None = None,
        tokens: Sequence[int] | None = None,
        **optional: Tensor | None,
    ) -> Batch:
        """Check what all forms take alike. `tokens` is (*batch, token) of the output where it is not that of x."""
        if not isinstance(noise, Noise):
            raise InputError("noise", "a Noise: paper(p), bernoulli(p), inverted(p) or gaussian(std)", repr(noise))
        checks.choice("reduction", reduction, Reduction)
        strength = checks.number("strength", strength, "a finite number ≥ 0", low=0)
        dtype = checks.floating({"x": x, **(required or {})}, optional)
        if tokens is None:
            checks.tokens("x", x)
        shape = torch.Size(x.shape[:-1] if tokens is None else tokens)
        checks.boolean("mask", mask, shape, "(*batch, token)", x.device)
        counted: int | Tensor = shape.numel() if mask is None else mask.sum()
        flat = flat_mask(mask, shape[:-1].numel())
        return cls(shape[:-1], flat, counted, dtype, x.device, reduction, strength)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def zero(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype)

    def flat(self, tensor: Tensor, trailing: int = 2) -> Tensor:
        """The tensor in the working precision, its leading shape made one axis."""
        return self.cast(tensor).reshape(self.size, *tensor.shape[tensor.ndim - trailing :])

    def tokens(self, x: Tensor, *, less: Tensor | None = None) -> Tensor:
        """x (less a bias) as (batch, token, width), padded tokens zeroed."""
        flat = self.flat(x)
        return rows_zeroed(flat if less is None else flat - self.cast(less), self.mask)

    def reduce(self, energy: Tensor) -> Tensor:
        """½ λ times the energies of the samples, reduced as the caller asked."""
        penalty = 0.5 * self.strength * energy
        if self.reduction == "none":
            return penalty.reshape(self.shape)
        count = self.size if self.reduction == "sample" else self.counted
        return penalty.sum() / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def coherent_part_needed(noise: Noise) -> bool:
    """At p = 0 the coherent part is computed too, times zero: the result stays differentiable."""
    return bool(noise.mean) or not noise.variance


def rows_zeroed(x: Tensor, mask: Tensor | None) -> Tensor:
    """x with the rows that do not count replaced by zeros: nothing of them, NaN included, passes on."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)


def flat_mask(mask: Tensor | None, size: int) -> Tensor | None:
    return None if mask is None else mask.reshape(size, mask.shape[-1])


def per_sample(values: Tensor) -> Tensor:
    return values.flatten(1).sum(1)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would put energies back into the half precision that they overflow. (It knows no meta device.)"""
    return nullcontext() if x.device.type == "meta" else torch.autocast(x.device.type, enabled=False)


def outside_autocast(form: Callable[_Arguments, Tensor]) -> Callable[_Arguments, Tensor]:
    """The form, computed without autocast."""

    @wraps(form)
    def wrapped(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Tensor:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(x, Tensor):  # refused later
            return form(*args, **kwargs)
        with without_autocast(x):
            return form(*args, **kwargs)

    return wrapped
