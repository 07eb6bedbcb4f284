"""Σ_j ‖x_:j‖² ‖W_:j‖²: what independent masks on the input x of a layer add to its output, for compiled code.

As an operator, so that the compiler does not make the input of the layer a second time, in float32. Its gradients are
in plain torch: pointwise, so the compiler makes them a part of whatever adds gradients there.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy, plain
from explicit_dropout.kernels.inlining import inlined


def serves_incoherent(x: Tensor, weight: Tensor) -> bool:
    """Whether the operator is for such a layer in compiled code."""
    return energy.serves_compiled(x) and energy.serves_compiled(weight)


def incoherent(x: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """‖x_:j‖² ‖W_:j‖² for every column j, over the rows of x that count; x as autocast gives it to the layer."""
    lower = energy.lowered(x)
    energies, _, _ = torch.ops.explicit_dropout.incoherent(x if lower is None else x.to(lower), weight, mask)
    return cast("Tensor", energies)


@torch.library.custom_op("explicit_dropout::incoherent", mutates_args=())
def incoherent_operator(x: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """‖x_:j‖² ‖W_:j‖² for every column and, for the way back, its factors."""
    if x.is_cuda and energy.serves_compiled(x):
        from explicit_dropout.kernels.triton_incoherent import incoherent_of

        return incoherent_of(x, weight, None if mask is None else mask.reshape(-1).view(torch.uint8))
    columns, norms = plain.columns(x, None, mask), plain.columns(weight)
    return columns * norms, columns, norms


inlined(incoherent_operator, energy.serves_compiled)


@incoherent_operator.register_fake
def _(x: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    del mask
    of_input, of_weight = (torch.promote_types(tensor.dtype, torch.float32) for tensor in (x, weight))
    columns, norms = (x.new_empty(x.shape[-1], dtype=dtype) for dtype in (of_input, of_weight))
    return x.new_empty(x.shape[-1], dtype=torch.promote_types(of_input, of_weight)), columns, norms


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, mask = inputs
    _, columns, norms = output
    ctx.save_for_backward(x, weight, mask, columns, norms)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, of_energies: Tensor | None, of_columns: Tensor | None, of_norms: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, mask, columns, norms = ctx.saved_tensors
    if of_energies is not None:
        of_columns = of_energies * norms if of_columns is None else of_columns + of_energies * norms
        of_norms = of_energies * columns if of_norms is None else of_norms + of_energies * columns
    of_x = None if of_columns is None else (2 * of_columns * plain.deviation(x, None, mask)).to(x.dtype)
    of_weight = None if of_norms is None else (2 * of_norms * plain.wide(weight)).to(weight.dtype)
    return of_x, of_weight, None


incoherent_operator.register_autograd(_backward, setup_context=_keep)
