"""‖W_:j‖² for every column of many weights, end to end, as one node of the graph.

Column energies of a layer's input are multiplied by these. A model has one weight for each site, all of them at hand
when the penalty is read, and taking them together costs less than asking autograd for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import torch_energy


def norms(weights: Sequence[Tensor]) -> Tensor:
    """‖W_:j‖² of weights (out, in) that the kernels serve, float32, those of one weight after those of another."""
    return cast("Tensor", _Norms.apply(*weights))  # type: ignore[no-untyped-call]


class _Norms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        return torch.cat([_squares(weight) for weight in weights], 1).view(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weights = ctx.saved_tensors
        if gradients[0] is None:
            return (None,) * len(weights)
        slopes = (2 * gradients[0]).split_with_sizes([weight.shape[1] for weight in weights])
        wanted = zip(weights, slopes, ctx.needs_input_grad, strict=True)
        return tuple([_product(weight, slope) if needed else None for weight, slope, needed in wanted])


def _product(weight: Tensor, slope: Tensor) -> Tensor:
    """W diag(s) in the precision of the weight."""
    product: Tensor = weight * slope
    return product if product.dtype == weight.dtype else product.to(weight.dtype)


def _squares(weight: Tensor) -> Tensor:
    """The norms of one weight, (1, in)."""
    if weight.stride(0) == 1 or not weight.is_cpu:  # columns along memory, as in the Conv1D of GPT-2, or any on a GPU
        lengths: Tensor = torch.linalg.vector_norm(weight, dim=0, keepdim=True, dtype=torch.float32)
        return lengths.square_()
    return torch_energy.energies_of(weight, None, None, None, True)[0]
