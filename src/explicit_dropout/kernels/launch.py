"""Launching Triton kernels with as little between the caller and the driver as there can be.

Triton looks at every argument of every launch, to find the compiled form that is meant. That takes longer than most of
the kernels here run, and the answer is always the same for the same numbers, precisions and alignments. So a launch is
made once for all tensors of a kind, and has its compiled forms at hand.

A compiled model does not even come here: torch's compiler, as it looks into an operator, is handed the kernel instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache, reduce, wraps
from operator import or_
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import wrap_triton

_Made = TypeVar("_Made")


class Launch:
    """A kernel with all that it is told but its tensors, whose shapes, strides and precisions are always the same.

    Args:
        kernel: what `triton.jit` made.
        grid: how many programs there are.
        numbers: what the kernel takes after its tensors, in order, constants included.
    """

    def __init__(self, kernel: Any, grid: tuple[int, int, int], numbers: tuple[Any, ...], warps: int = 4) -> None:
        self.kernel, self.grid, self.numbers, self.warps = kernel, grid, numbers, warps
        self.forms: dict[Hashable, Any] = {}

    def __call__(self, *tensors: Tensor) -> None:
        if type(tensors[0]) is FunctionalTensor:  # the compiler's
            wrap_triton(self.kernel)[self.grid](*tensors, *self.numbers, num_warps=self.warps)
            return
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():  # Triton knows of no other
            with torch.cuda.device(device):
                self(*tensors)
            return
        pointers = [tensor.data_ptr() for tensor in tensors]
        # Triton makes use of pointers that are multiples of 16. Nearly all are, those of some views are not.
        aligned = not reduce(or_, pointers) % 16
        key = device.index if aligned else (device.index, *[pointer % 16 == 0 for pointer in pointers])
        form = self.forms.get(key)
        if form is None:
            if not all(self.grid):
                return
            compiled = self.kernel[self.grid](*tensors, *self.numbers, num_warps=self.warps)
            if hasattr(compiled, "run"):  # nothing is compiled where Triton interprets
                self.forms[key] = compiled[self.grid]
            return
        form(*pointers, *self.numbers, stream=torch._C._cuda_getCurrentRawStream(device.index))


def remembered(make: Callable[..., _Made]) -> Callable[..., _Made]:
    """`lru_cache`, except that nothing is kept for the symbols that a compiler has in the place of numbers."""
    kept = lru_cache(4096)(make)

    @wraps(make)
    def found(*given: Any) -> _Made:
        try:
            return kept(*given)
        except TypeError:  # symbols have no hash
            return make(*given)

    return found
