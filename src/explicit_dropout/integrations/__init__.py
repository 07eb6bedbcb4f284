"""Training frameworks: `integrations.huggingface` and `integrations.lightning`, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from explicit_dropout.attached import LayerLevel
from explicit_dropout.errors import InputError

__all__ = ["Journal", "by_component", "check_inside", "checked"]


class Journal:
    """What to log of a regulariser: means since the last reading, kept on the device until then.

    `penalty` is the term that was added to the loss; `penalty/<component>` the unweighted J of a component, summed over
    its sites; `strength/<component>` its λ, averaged over them.
    """

    def __init__(self, regulariser: LayerLevel) -> None:
        self.regulariser = regulariser
        self.sums: dict[str, Tensor | float] = {}
        self.count = 0

    def penalty(self) -> Tensor:
        """Call the regulariser and note its terms."""
        strengths = self.regulariser.strengths()
        penalty = self.regulariser()
        self.note({"penalty": penalty.detach(), **by_component(self.regulariser, strengths)})
        return penalty

    def note(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count += 1

    def read(self) -> dict[str, float]:
        """The means since the last reading, as plain numbers; the one place that waits for a GPU."""
        means = {name: float(total) / max(self.count, 1) for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means


def by_component(regulariser: LayerLevel, strengths: Mapping[str, float]) -> dict[str, Tensor | float]:
    """The terms of the last call and the strengths they had, gathered by component."""
    terms = regulariser.terms()
    found: dict[str, Tensor | float] = {}
    for component in dict.fromkeys(site.component for site in regulariser.sites):
        names = [site.name for site in regulariser.sites if site.component == component]
        fired = [terms[name] for name in names if name in terms]
        if fired:
            found[f"penalty/{component}"] = torch.stack(fired).sum()
        known = [strengths[name] for name in names if name in strengths]  # twins show in the first pass
        if known:
            found[f"strength/{component}"] = sum(known) / len(known)
    return found


def checked(regulariser: object) -> LayerLevel:
    """A regulariser that a training loop can call by itself, after each forward pass."""
    if not isinstance(regulariser, LayerLevel):
        raise InputError(
            "regulariser",
            "an ExplicitDropout, or what convert_dropout returned, of the model",
            type(regulariser).__name__,
        )
    return regulariser


def check_inside(model: nn.Module, regulariser: LayerLevel, expected: str) -> None:
    """A regulariser on another model would never see a forward pass of this one."""
    if not any(module is regulariser.model for module in model.modules()):
        raise InputError("regulariser", expected, f"one attached to another {type(regulariser.model).__name__}")
