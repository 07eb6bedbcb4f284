"""What is incoherent in causal scores: Σ_a Σ_c Y_ac Σ_h (o_ah · W_h:c)², Y_a the sum of the squares x_i² that reach a.

Dropout before the query projection reaches a key a from the queries i ≥ a, and o are the keys; dropout before the key
projection reaches a query a from the keys i ≤ a, and o are the queries. Dropout before both adds Σ_a Y_aᵀ B y_a², with
B_cd = Σ_h (W_h:c · V_h:d)². Plain autograd keeps o W for every head. Here nothing is kept but what the model keeps:
sums and products are made again in the backward pass. Sums Y and matrices are bfloat16, as precise as the sides are.
The compiler does not look into the operators: it would find the same sums in both passes, and keep them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy, plain
from explicit_dropout.kernels.plain import tokens_by_head, weight_by_head
from explicit_dropout.kernels.spreads import exactly, refuse_second, serves_spread

LATER, ALONE, EARLIER = -1, 0, 1
"""What is summed for a token: it and those after it, it alone, or it and those before it."""


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_reach

    return triton_reach


@cache
def _triton_along() -> Any:
    from explicit_dropout.kernels import triton_along

    return triton_along


def serves_reach(others: Tensor, x: Tensor, heads: int) -> bool:
    """Whether `reach` takes this side of attention and this input here and now: in half precision, on a GPU."""
    if x.ndim != 3 or x.dtype == torch.float32 or not serves_spread(others, heads):
        return False
    return torch.compiler.is_compiling() or energy.by_triton(others)


def reach(others: Tensor, weight: Tensor, x: Tensor, heads: int, later: bool) -> Tensor:
    """Σ_a Σ_c Y_ac Σ_h (o_ah · W_h:c)² for every sample.

    Args:
        others: o, the side that is not dropped, (batch, token, feature), heads side by side.
        weight: of the side that is, (feature, in).
        x: the input of that side, (batch, token, in).
        later: the squares of a token and those after it reach it; else those of the token and before it.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.explicit_dropout.reach(others, weight, x, heads, later)
    else:
        found = _Reach.apply(others, weight, x, heads, later)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


def joint_reach(weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int) -> Tensor:
    """Σ_a Y_aᵀ B y_a² for every sample, Y_a = Σ_{i ≥ a} x_i²: what dropout on both sides at once adds.

    Args:
        weight, x: of the queries, (feature, in) and (batch, token, in).
        other, y: of the keys.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.explicit_dropout.joint_reach(weight, x, other, y, heads)
    else:
        found = _JointReach.apply(weight, x, other, y, heads)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, others: Tensor, weight: Tensor, x: Tensor, heads: int, later: bool) -> Tensor:
        ctx.save_for_backward(others, weight, x)
        ctx.told = heads, later
        return _reach(others, weight, x, heads, later)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        (others, weight, x), (heads, later) = ctx.saved_tensors, ctx.told
        return *_reach_gradients(others, weight, x, heads, later, slopes[0]), None, None


class _JointReach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int) -> Tensor:
        ctx.save_for_backward(weight, x, other, y)
        ctx.heads = heads
        return _joint_reach(weight, x, other, y, heads)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        weight, x, other, y = ctx.saved_tensors
        return *_joint_reach_gradients(weight, x, other, y, ctx.heads, slopes[0]), None


# ---------------------------------------------------------------------------------------------- how they are made


def _reach(others: Tensor, weight: Tensor, x: Tensor, heads: int, later: bool) -> Tensor:
    with exactly(others):
        return _energies(plain.even(others), weight.to(others.dtype), _sums(x, later), heads)


def _reach_gradients(
    others: Tensor, weight: Tensor, x: Tensor, heads: int, later: bool, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    with exactly(others):
        others, low = plain.even(others), weight.to(others.dtype)
        of_others, of_weight = _gradients(others, low, _sums(x, later), slopes, heads)
        of_x = _of_input(x, _squares(others, low, heads), slopes, EARLIER if later else LATER)
        return of_others, of_weight.to(weight.dtype), of_x


def _joint_reach(weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int) -> Tensor:
    with exactly(x):
        matrix, sums, squares = _joint_parts(weight, x, other, y, heads)
        return (sums * (squares @ matrix)).sum((1, 2), dtype=torch.float32)


def _joint_reach_gradients(
    weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    with exactly(x):
        matrix, sums, squares = _joint_parts(weight, x, other, y, heads)
        weighted = squares * slopes[:, None, None].to(squares.dtype)
        of_matrix = weighted.flatten(0, 1).mT @ sums.flatten(0, 1)
        one = slopes.new_ones(1)
        rows, low = _as_rows(other), weight.to(torch.bfloat16)
        of_rows, of_weight = _gradients(rows, low, of_matrix[None], one, heads)
        of_other = of_rows[0].mT.to(other.dtype).contiguous()
        of_x = _of_input(x, squares @ matrix, slopes, EARLIER)
        of_y = _of_input(y, sums @ matrix.mT, slopes, ALONE)
        return of_weight.to(weight.dtype), of_x, of_other, of_y


def _joint_parts(weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Bᵀ, (in of the keys, in of the queries), Y and y², in bfloat16."""
    matrix = _squares(_as_rows(other), weight.to(torch.bfloat16), heads)[0].to(torch.bfloat16)
    squares = y.square() if y.dtype == torch.bfloat16 else plain.wide(y).square().to(torch.bfloat16)
    return matrix, _sums(x, True), squares


def _as_rows(weight: Tensor) -> Tensor:
    """The columns of a weight as the rows of one sample, (1, in, feature)."""
    return weight.mT.to(torch.bfloat16).contiguous()[None]


def _sums(x: Tensor, later: bool) -> Tensor:
    """Sums of squares over a token and all after it, or all before it, (batch, token, column), in bfloat16."""
    if energy.by_triton(x) and x.numel():
        return cast("Tensor", _triton_along().sums(plain.even(x), later))
    return _summed(plain.wide(x).square(), LATER if later else EARLIER).to(torch.bfloat16)


def _of_input(x: Tensor, of_sums: Tensor, slopes: Tensor, order: int) -> Tensor:
    """The gradient of x, without gaps, given those of what its squares are in, summed in this order."""
    if energy.by_triton(x) and x.numel():
        found = _triton_along().of_inputs(plain.even(of_sums), plain.even(x), slopes.float().contiguous(), order)
        return cast("Tensor", found)
    summed = _summed(plain.wide(of_sums), order)
    return (2 * slopes[:, None, None] * plain.wide(x) * summed).to(x.dtype).contiguous()


def _summed(values: Tensor, order: int) -> Tensor:
    """Sums along tokens, (batch, token, column)."""
    if order == LATER:
        return values.flip(1).cumsum(1).flip(1)
    return values.cumsum(1) if order == EARLIER else values


def _energies(rows: Tensor, weight: Tensor, sums: Tensor, heads: int) -> Tensor:
    if energy.by_triton(rows) and rows.numel() and sums.numel():
        return cast("Tensor", _triton().energies(rows, weight.contiguous(), sums, heads))
    return (sums.float() * _squares(rows, weight, heads)).sum((1, 2))


def _squares(rows: Tensor, weight: Tensor, heads: int) -> Tensor:
    if energy.by_triton(rows) and rows.numel() and weight.numel():
        return cast("Tensor", _triton().squares(rows, weight.contiguous(), heads))
    return _products(rows, weight, heads).square().sum(1)


def _gradients(rows: Tensor, weight: Tensor, sums: Tensor, slopes: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Of the rows, and in float32 of the weight."""
    if energy.by_triton(rows) and rows.numel() and sums.numel():
        found = _triton().gradients(rows, weight.contiguous(), sums, slopes.float().contiguous(), heads)
        return cast("tuple[Tensor, Tensor]", found)
    steep = 2 * (slopes[:, None, None] * sums.float())[:, None] * _products(rows, weight, heads)
    of_rows = steep @ weight_by_head(weight, heads).mT
    of_weight = torch.einsum("bhae,bhac->hec", tokens_by_head(rows, heads), steep)
    return of_rows.transpose(1, 2).flatten(2).to(rows.dtype), of_weight.flatten(0, 1)


def _products(rows: Tensor, weight: Tensor, heads: int) -> Tensor:
    """o_h W_h, (batch, head, token, column)."""
    return tokens_by_head(rows, heads) @ weight_by_head(weight, heads)


# ---------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("explicit_dropout::reach", mutates_args=())
def reach_operator(others: Tensor, weight: Tensor, x: Tensor, heads: int, later: bool) -> Tensor:
    """Σ_a Σ_c Y_ac Σ_h (o_ah · W_h:c)² for every sample."""
    return _reach(others, weight, x, heads, later)


@torch.library.custom_op("explicit_dropout::reach_gradients", mutates_args=())
def reach_gradients_operator(
    others: Tensor, weight: Tensor, x: Tensor, heads: int, later: bool, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the other side, the weight and the input."""
    return _reach_gradients(others, weight, x, heads, later, slopes)


@torch.library.custom_op("explicit_dropout::joint_reach", mutates_args=())
def joint_reach_operator(weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int) -> Tensor:
    """Σ_a Y_aᵀ B y_a² for every sample."""
    return _joint_reach(weight, x, other, y, heads)


@torch.library.custom_op("explicit_dropout::joint_reach_gradients", mutates_args=())
def joint_reach_gradients_operator(
    weight: Tensor, x: Tensor, other: Tensor, y: Tensor, heads: int, slopes: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of both weights and both inputs."""
    return _joint_reach_gradients(weight, x, other, y, heads, slopes)


@reach_operator.register_fake
def _(others: Tensor, *rest: object) -> Tensor:
    del rest
    return others.new_empty(others.shape[0], dtype=torch.float32)


@reach_gradients_operator.register_fake
def _(others: Tensor, weight: Tensor, x: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    del rest
    return plain.like(others), plain.like(weight), plain.like(x)


@joint_reach_operator.register_fake
def _(weight: Tensor, x: Tensor, *rest: object) -> Tensor:
    del weight, rest
    return x.new_empty(x.shape[0], dtype=torch.float32)


@joint_reach_gradients_operator.register_fake
def _(weight: Tensor, x: Tensor, other: Tensor, y: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del rest
    return plain.like(weight), plain.like(x), plain.like(other), plain.like(y)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    tensors = [given for given in inputs if isinstance(given, Tensor)]
    ctx.save_for_backward(*tensors)
    ctx.told = inputs[len(tensors) :]


def _reach_backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    found = torch.ops.explicit_dropout.reach_gradients(*ctx.saved_tensors, *ctx.told, slopes)
    return *found, None, None


def _joint_reach_backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.explicit_dropout.joint_reach_gradients(*ctx.saved_tensors, *ctx.told, slopes), None


reach_operator.register_autograd(_reach_backward, setup_context=_keep)
joint_reach_operator.register_autograd(_joint_reach_backward, setup_context=_keep)
