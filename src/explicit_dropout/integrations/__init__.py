"""Training frameworks: `integrations.huggingface` and `integrations.lightning`, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from explicit_dropout.attached import LayerLevel
from explicit_dropout.errors import InputError

__all__ = ["by_component", "called", "check_inside", "checked"]


def called(regulariser: LayerLevel) -> tuple[Tensor, dict[str, Tensor | float]]:
    """The penalty of a regulariser, which this calls, and what to log of it.

    `penalty` is the term that is added to the loss; `penalty/<component>` the unweighted J of a component, summed over
    its sites; `strength/<component>` its λ, averaged over them.
    """
    strengths = regulariser.strengths()
    penalty = regulariser()
    return penalty, {"penalty": penalty.detach(), **by_component(regulariser, strengths)}


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
