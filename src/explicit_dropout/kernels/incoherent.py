"""‖x_:j‖² and ‖W_:j‖², for compiled code: independent masks on the input x of a layer add their product to its output.

What they add to scores is made of ‖x_:j‖² of every sample. Both are operators, so that the compiler does not make the
input of the layer a second time, in float32. Their gradients are in plain torch: pointwise, so the compiler makes them
a part of whatever adds gradients there, as long as that does not read from too many places. So the norms of x and W are
multiplied elsewhere: then the gradient of x is one vector times x.
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


def squares(x: Tensor) -> Tensor:
    """Σ_i x_sij² for every sample s and column j of x (sample, token, column), which is as the model keeps it."""
    if energy.serves_compiled(x):
        return cast("Tensor", torch.ops.explicit_dropout.squares(x))
    return plain.squares(x)


def incoherent(x: Tensor, weight: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """‖x_:j‖² over the rows of x that count, and ‖W_:j‖², for every column j; x as the model keeps it."""
    return cast("tuple[Tensor, Tensor]", torch.ops.explicit_dropout.incoherent(x, weight, mask))


@torch.library.custom_op("explicit_dropout::incoherent", mutates_args=())
def incoherent_operator(x: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖x_:j‖² and ‖W_:j‖² for every column."""
    if x.is_cuda and energy.serves_compiled(x):
        from explicit_dropout.kernels.triton_incoherent import incoherent_of

        return incoherent_of(x, weight, None if mask is None else mask.reshape(-1).view(torch.uint8))
    return plain.columns(x, None, mask), plain.columns(weight)


inlined(incoherent_operator, energy.serves_compiled)


@incoherent_operator.register_fake
def _(x: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    del mask
    of_input, of_weight = (torch.promote_types(tensor.dtype, torch.float32) for tensor in (x, weight))
    return x.new_empty(x.shape[-1], dtype=of_input), x.new_empty(x.shape[-1], dtype=of_weight)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: tuple[Tensor, Tensor]) -> None:
    del output
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, of_columns: Tensor | None, of_norms: Tensor | None
) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, mask = ctx.saved_tensors
    of_x = None if of_columns is None else (2 * of_columns * plain.deviation(x, None, mask)).to(x.dtype)
    of_weight = None if of_norms is None else (2 * of_norms * plain.wide(weight)).to(weight.dtype)
    return of_x, of_weight, None


incoherent_operator.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("explicit_dropout::squares", mutates_args=())
def squares_operator(x: Tensor) -> Tensor:
    """Σ_i x_sij² for every sample and column."""
    if x.is_cuda and energy.serves_compiled(x):
        from explicit_dropout.kernels.triton_incoherent import squares_of

        return squares_of(x)
    return plain.squares(x)


inlined(squares_operator, energy.serves_compiled)


@squares_operator.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[2]), dtype=torch.promote_types(x.dtype, torch.float32))


def _keep_input(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _squares_backward(ctx: Any, gradient: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return (2 * gradient.unsqueeze(1) * plain.wide(x)).to(x.dtype)


squares_operator.register_autograd(_squares_backward, setup_context=_keep_input)
