"""Strengths λ: one for each component and layer, constant or following a schedule over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from explicit_dropout.checks import choice, count, number
from explicit_dropout.errors import InputError

Shape = Literal["linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A strength that moves from `start` to `end` over the first `steps` calls of the regulariser, then stays.

    Made by `constant`, `linear`, `cosine` and `warm_up`.
    """

    start: float
    end: float
    steps: int
    shape: Shape = "linear"

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            object.__setattr__(self, name, number(name, getattr(self, name), "a finite number ≥ 0", low=0))
        count("steps", self.steps)
        choice("shape", self.shape, Shape)

    def at(self, step: int) -> float:
        """The strength at the call of this number, counted from 0."""
        progress = min(step / self.steps, 1.0)
        if self.shape == "cosine":
            progress = (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * progress

    @property
    def is_off(self) -> bool:
        """Whether it is 0 at every step."""
        return self.start == 0 == self.end


Strength = float | Schedule | Sequence[float | Schedule] | Mapping[int, float | Schedule]
"""One for all layers, one for each layer in order, or by layer index (0 for layers not named)."""


def constant(strength: float) -> Schedule:
    """The same strength at every step."""
    return Schedule(strength, strength, 1)


def linear(start: float, end: float, steps: int) -> Schedule:
    """A straight line from start to end."""
    return Schedule(start, end, steps)


def cosine(start: float, end: float, steps: int) -> Schedule:
    """Half a cosine wave from start to end: slow, fast, slow."""
    return Schedule(start, end, steps, "cosine")


def warm_up(strength: float, steps: int) -> Schedule:
    """From 0 to the strength in a straight line."""
    return Schedule(0.0, strength, steps)


def by_layer(component: str, strength: Strength, layers: int) -> list[Schedule]:
    """The strength of a component as one schedule for each layer."""
    if isinstance(strength, Mapping):
        outside = [index for index in strength if isinstance(index, bool) or index not in range(layers)]
        if outside:
            raise InputError(component, f"a mapping from layer indices 0 to {layers - 1}", f"layer {outside[0]!r}")
        return [_schedule(component, strength.get(index, 0.0)) for index in range(layers)]
    if isinstance(strength, Sequence) and not isinstance(strength, str | bytes):
        if len(strength) != layers:
            raise InputError(component, f"one strength for each of the {layers} layers", f"{len(strength)} of them")
        return [_schedule(component, value) for value in strength]
    return [_schedule(component, strength)] * layers


def _schedule(component: str, strength: object) -> Schedule:
    if isinstance(strength, Schedule):
        return strength
    value = number(component, strength, "a strength: a finite number ≥ 0, a schedule, or one for each layer", low=0)
    return constant(value)
