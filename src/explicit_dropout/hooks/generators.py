"""Where generators of random numbers stand, to tell whether somebody has drawn in between."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch
from torch import Tensor


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
