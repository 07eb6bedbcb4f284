"""Launching Triton kernels without asking Triton every time which of its compiled forms is meant.

Triton looks at every argument of every launch. That takes longer than most of the kernels here run, and the answer is
always the same for the same shapes, precisions and alignments: it is kept.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor


class Launcher:
    """A kernel and its compiled forms, each under a key that has all that Triton's choice depends on."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}

    def __call__(
        self, key: Hashable, device: torch.device, grid: tuple[int, int, int], *arguments: Any, warps: int = 4
    ) -> None:
        """Launch on a device; `arguments` are all that the kernel takes, in order, constants included."""
        if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton knows of no other
            with torch.cuda.device(device):
                self(key, device, grid, *arguments, warps=warps)
            return
        found = self.compiled.get((key, device.index))
        if found is not None:
            found[grid](*arguments)
            return
        found = self.kernel[grid](*arguments, num_warps=warps)
        if hasattr(found, "run"):  # nothing is compiled where Triton interprets
            self.compiled[key, device.index] = found


def aligned(*tensors: Tensor | None) -> tuple[bool, ...]:
    """Whether each starts at a multiple of 16 bytes, which Triton makes use of. Views need not."""
    return tuple([tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors])
