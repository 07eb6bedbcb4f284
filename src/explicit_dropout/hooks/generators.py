"""Generators of random numbers, watched during a pass: whether somebody draws where torch does not let one look."""

from __future__ import annotations

import random
import sys
import threading
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import UnsupportedSiteError

CHECKED = 16
"""Every so many passes generators are looked at, and in the first ones."""
PATIENCE = 4
"""Passes in a row that have to have drawn where another thread may have."""


class Watch:
    """Looks at generators before and after passes of a model, and refuses one that has drawn."""

    def __init__(self) -> None:
        self.before: tuple[Any, ...] | None = None
        self.passes = self.suspicious = 0

    def begin(self, model: nn.Module) -> None:
        if self.passes < CHECKED or self.passes % CHECKED == 0 or self.suspicious:
            self.before = dice_thrown(device_of(model))
        self.passes += 1

    def abandon(self) -> None:
        """Of a pass that failed, or collected nothing, nothing is asked."""
        self.before = None

    def end(self, model: nn.Module) -> None:
        before, self.before = self.before, None
        if before is None:
            return
        if same_states(before, dice_thrown(device_of(model))):
            self.suspicious = 0
            return
        self.suspicious += 1
        if threading.active_count() == 1 or self.suspicious == PATIENCE:
            raise UnsupportedSiteError(
                f"{type(model).__name__} has drawn random numbers in its forward pass where torch does not let one "
                "look: by Python or numpy, by an extension (flash attention, xformers), by torch.ops, by an LSTM or "
                "GRU; or another thread of the program has. Build it with rate 0 there, or let it: others='keep'."
            )


def dice_thrown(device: torch.device) -> tuple[Any, ...]:
    """Where generators stand: those of torch, of Python and, where it is used, of numpy."""
    states: list[Any] = [torch.get_rng_state(), hash(random.getstate())]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    numbers = sys.modules.get("numpy.random")
    if numbers is not None:
        _, words, position, *_ = numbers.get_state()
        states += [words.tobytes(), position]
    return tuple(states)


def same_states(before: tuple[Any, ...], after: tuple[Any, ...]) -> bool:
    """Whether nothing was drawn in between."""
    pairs = zip(before, after, strict=False)  # while a graph is captured there is one less
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
