"""Every random number of a run is a function of seed, epoch and purpose: nothing has to be saved to resume."""

from __future__ import annotations

import hashlib
from typing import Literal

import torch

Purpose = Literal["weights", "order", "augment", "masks"]


def mixed(seed: int, epoch: int, purpose: Purpose, rank: int = 0) -> int:
    """A seed of 63 bits for one purpose of one epoch (and one process of several)."""
    digest = hashlib.sha256(f"{seed} {epoch} {purpose} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(
    seed: int, epoch: int, purpose: Purpose, device: torch.device | str = "cpu", rank: int = 0
) -> torch.Generator:
    """A generator that starts from that seed."""
    return torch.Generator(device).manual_seed(mixed(seed, epoch, purpose, rank))
