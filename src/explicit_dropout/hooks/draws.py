"""A draw of dropout that was not made: what it would have dropped from, and what the model does with the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.hooks.told import Known

Kind = Literal["linear", "attention_weights", "drop_head", "hidden", "drop_path"]
AttentionParts = tuple[Tensor, Tensor, Tensor, Tensor | None, bool, float | None]
"""Queries, keys and values, (*batch, heads, token, width); what is added to scores, or may be seen; whether causal
order is asked for; the scale."""
Versions = tuple[int | None, ...]
"""How often tensors were changed in place; None where that cannot be known, in code that was compiled."""


@dataclass(eq=False)
class Use:
    """One thing that a model does with a dropped tensor: a linear map of it, or anything else (None)."""

    kind: Kind | None
    x: Tensor | None = None
    other: Tensor | None = None
    """The weight of a linear layer, or the values that attention weights are multiplied with."""
    versions: Versions = ()
    masks: bool = False
    """Whether something that is learnt is multiplied with what nothing learns: ones, mostly."""

    def __post_init__(self) -> None:
        self.versions = versions(self.x, self.other)

    @property
    def changed(self) -> bool:
        """Whether the model has changed one of them in place since."""
        return changed(self.versions, self.x, self.other)


@dataclass(eq=False)
class Draw:
    """A call of a dropout function: where, at which rate, what it would have dropped from, and what it returned."""

    path: str
    rate: float
    told: Known
    """What was known of padding and of samples."""
    x: Tensor
    passed: Tensor
    kind: Kind | None = None
    """What it is whatever the model does with the result; None where that decides."""
    rescaled: bool = True
    """Whether what is left is divided by 1 − p."""
    axis: int | None = None
    """That of the width, where the function tells."""
    weights: bool = False
    """Whether it is attention weights that are dropped from: a softmax."""
    uses: list[Use] = field(default_factory=list)
    versions: Versions = ()

    def __post_init__(self) -> None:
        self.versions = versions(self.x, self.passed)

    @classmethod
    def of(cls, path: str, rate: float, told: Known, x: Tensor, *, in_place: bool = False, **facts: Any) -> Draw:
        """A draw whose result is a tensor of its own, as that of dropout is, unless it is asked to be none."""
        kept = x.clone() if in_place or torch.compiler.is_compiling() else x  # versions cannot be read there
        return cls(path, rate, told, kept, x if in_place else x.clone(), **facts)

    @property
    def untouched(self) -> bool:
        """Whether the model has left the result as it was."""
        return not changed(self.versions[1:], self.passed)

    def clean(self) -> Tensor:
        """What would have been dropped from, from whichever tensor still holds it."""
        if self.untouched and self.versions[1] is not None:
            return self.passed
        if not changed(self.versions[:1], self.x):
            return self.x
        raise UnsupportedSiteError(
            f"{self.path or 'the model'}: the model changes both the input and the result of this dropout in place, so "
            "what would have been dropped from is lost. Let it write a new tensor instead."
        )


@dataclass(eq=False)
class Weighed:
    """A call of fused attention that would have dropped from its weights."""

    path: str
    rate: float
    told: Known
    call: Callable[[], AttentionParts]
    tensors: tuple[Tensor, ...]
    """What these are made of."""
    versions: Versions = ()

    def __post_init__(self) -> None:
        self.versions = versions(*self.tensors)

    @property
    def changed(self) -> bool:
        return changed(self.versions, *self.tensors)


def kind_of(draw: Draw | Weighed) -> Kind:
    """Where a draw is measured: at the one linear map that its result goes to, or else at the result itself."""
    if isinstance(draw, Weighed):
        return "attention_weights"
    if draw.weights:
        return "drop_head" if draw.kind == "drop_head" else "attention_weights"
    if draw.kind:
        return draw.kind
    alone = sole_use(draw)
    if alone == "attention_weights" and draw.uses[0].x is not None and draw.uses[0].x.ndim == 3:
        alone = None  # a stack of matrices, of experts perhaps
    return alone or "hidden"


def is_product(draw: Draw) -> bool:
    """Whether attention weights are multiplied with values, and nothing else is done with them."""
    if draw.axis is not None:
        return False  # whole channels of them
    alone = sole_use(draw)
    return alone == "attention_weights" or (alone == "linear" and draw.weights and draw.passed.ndim == 2)  # of one head


def sole_use(draw: Draw) -> Kind | None:
    """What becomes of a result that is used once, and as it is."""
    return draw.uses[0].kind if len(draw.uses) == 1 and draw.untouched else None


def versions(*tensors: Tensor | None) -> Versions:
    compiling = torch.compiler.is_compiling()
    return tuple(None if compiling or tensor is None else tensor._version for tensor in tensors)


def changed(before: Versions, *tensors: Tensor | None) -> bool:
    """Whether one of the tensors was changed in place since, as far as that can be known."""
    pairs = zip(before, versions(*tensors), strict=True)
    return any(old is not None and new is not None and old != new for old, new in pairs)
