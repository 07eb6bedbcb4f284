"""⟨KᵀK, W diag(s) Wᵀ⟩ summed over heads: the incoherent energy of scores, with every pair of tokens allowed.

For a head of width e and an input of width d the matrix W diag(s) Wᵀ costs e² d for each sample. All samples and heads
at once it is one matrix product with the products P of pairs of rows of W, P_(ef)c = W_ec W_fc, which no sample enters:

    t = vec(KᵀK) P,   energy = s · t,   and in the backward pass   ∂s = t,   ∂K = 2 K mat(s Pᵀ),   ∂P = vec(KᵀK)ᵀ s.

Matrices are bfloat16, sums over them float32. Only t is kept, one row for each sample. The compiler does not look into
the operators: it would find KᵀK and P in both passes, and keep them.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy, plain
from explicit_dropout.kernels.gram import serves_scores


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_spread

    return triton_spread


def serves_spread(side: Tensor, heads: int) -> bool:
    """Whether `spread` takes this side of attention here and now: in half precision, where float32 is not expected."""
    return side.dtype != torch.float32 and serves_scores(side, side, heads)


def spread(others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> Tensor:
    """Σ_h ⟨O_hᵀO_h, W_h diag(s) W_hᵀ⟩ for every sample.

    Args:
        others: the side that is not dropped, (batch, token, feature), heads side by side.
        weight: of the side that is, (feature, in).
        squares: s, the column energies of that side's input, (batch, in).
    """
    if torch.compiler.is_compiling():
        found, _ = torch.ops.explicit_dropout.spread(others, weight, squares, heads)
    else:
        found = _Spread.apply(others, weight, squares, heads)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


def joint_spread(weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int) -> Tensor:
    """Σ_h ⟨W_h diag(s) W_hᵀ, V_h diag(u) V_hᵀ⟩ for every sample: what dropout on both sides at once adds."""
    if torch.compiler.is_compiling():
        found, _ = torch.ops.explicit_dropout.joint_spread(weight, squares, other, other_squares, heads)
    else:
        found = _JointSpread.apply(weight, squares, other, other_squares, heads)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> Tensor:
        energies, along = _spread(others, weight, squares, heads)
        ctx.save_for_backward(others, weight, squares, along)
        ctx.heads = heads
        return energies

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        return *_spread_gradients(slopes[0], ctx.heads, *ctx.saved_tensors), None


class _JointSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int) -> Tensor:
        energies, along = _joint_spread(weight, squares, other, other_squares, heads)
        ctx.save_for_backward(weight, squares, other, other_squares, along)
        ctx.heads = heads
        return energies

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        return *_joint_spread_gradients(slopes[0], ctx.heads, *ctx.saved_tensors), None


def exactly(x: Tensor) -> Any:
    """No autocast inside: it would lower sums, and take bfloat16 for float16, whose range energies leave."""
    return torch.autocast(x.device.type, enabled=False)


def refuse_second() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the penalty of attention scores has no second derivative in half precision on a GPU; use float32"
        )


# ---------------------------------------------------------------------------------------------- how they are made


def _spread(others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The energies, and t."""
    with exactly(others):
        along = (_grams(others, heads) @ _pairs(weight, heads)).float()
        return (squares * along).sum(1), along


def _spread_gradients(
    slopes: Tensor, heads: int, others: Tensor, weight: Tensor, squares: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    each = slopes[:, None]
    with exactly(others):
        weighted = (each * squares).to(torch.bfloat16)
        of_others = _products(others, weighted @ _pairs(weight, heads).mT, heads)
        of_pairs = torch.mm(_grams(others, heads).mT, weighted)
        return of_others, _of_weight(of_pairs, weight, heads), each * along


def _joint_spread(
    weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    with exactly(squares):
        matrices = other_squares.to(torch.bfloat16) @ _pairs(other, heads).mT
        along = (matrices @ _pairs(weight, heads)).float()
        return (squares * along).sum(1), along


def _joint_spread_gradients(
    slopes: Tensor, heads: int, weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    each = slopes[:, None]
    with exactly(squares):
        weighted, low = (each * squares).to(torch.bfloat16), other_squares.to(torch.bfloat16)
        other_pairs = _pairs(other, heads)
        of_weight = _of_weight(torch.mm((low @ other_pairs.mT).mT, weighted), weight, heads)
        matrices = weighted @ _pairs(weight, heads).mT
        of_other = _of_weight(torch.mm(matrices.mT, low), other, heads)
        return of_weight, each * along, of_other, (matrices @ other_pairs).float()


def _grams(side: Tensor, heads: int) -> Tensor:
    """XᵀX of every head, (batch, head · width · width) in bfloat16."""
    if energy.by_triton(side):
        return cast("Tensor", _triton().grams(plain.even(side), heads))
    by_head = _by_head(side, heads)
    return (by_head.mT @ by_head).flatten(1).to(torch.bfloat16)


def _products(side: Tensor, matrices: Tensor, heads: int) -> Tensor:
    """2 X M for the symmetric matrix M of every head."""
    if energy.by_triton(side):
        return cast("Tensor", _triton().products(plain.even(side), matrices, heads))
    by_head = _by_head(side, heads)
    width = by_head.shape[-1]
    products = 2 * by_head @ torch.unflatten(matrices.float(), 1, (heads, width, width))
    return products.transpose(1, 2).flatten(2).to(side.dtype)


def _by_head(side: Tensor, heads: int) -> Tensor:
    return torch.unflatten(side.float(), -1, (heads, -1)).transpose(1, 2)


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """P, (head · width · width, in): products of pairs of rows of a head's weight."""
    if energy.by_triton(weight):
        return cast("Tensor", _triton().pairs(weight.detach(), heads))
    rows = torch.unflatten(weight.detach(), 0, (heads, -1))
    return (rows[:, :, None] * rows[:, None]).to(torch.bfloat16).flatten(0, 2)


def _of_weight(of_pairs: Tensor, weight: Tensor, heads: int) -> Tensor:
    """What the gradient of P, which is symmetric, makes of the weight."""
    if energy.by_triton(weight):
        return cast("Tensor", _triton().weight_gradient(of_pairs, weight, heads))
    rows = torch.unflatten(weight, 0, (heads, -1)).float()
    slopes = torch.unflatten(of_pairs.float(), 0, (*rows.shape[:2], rows.shape[1]))
    return (2 * (slopes * rows[:, None]).sum(2)).flatten(0, 1).to(weight.dtype)


# ---------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("explicit_dropout::spread", mutates_args=())
def spread_operator(others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Σ_h ⟨O_hᵀO_h, W_h diag(s) W_hᵀ⟩ for every sample, and t."""
    return _spread(others, weight, squares, heads)


@torch.library.custom_op("explicit_dropout::spread_gradients", mutates_args=())
def spread_gradients_operator(
    slopes: Tensor, heads: int, others: Tensor, weight: Tensor, squares: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the other side, the weight and the squares."""
    return _spread_gradients(slopes, heads, others, weight, squares, along)


@torch.library.custom_op("explicit_dropout::joint_spread", mutates_args=())
def joint_spread_operator(
    weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Σ_h ⟨W_h diag(s) W_hᵀ, V_h diag(u) V_hᵀ⟩ for every sample, and what its squares are weighted by."""
    return _joint_spread(weight, squares, other, other_squares, heads)


@torch.library.custom_op("explicit_dropout::joint_spread_gradients", mutates_args=())
def joint_spread_gradients_operator(
    slopes: Tensor, heads: int, weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of both weights and both squares."""
    return _joint_spread_gradients(slopes, heads, weight, squares, other, other_squares, along)


@spread_operator.register_fake
def _(others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    del others, weight, heads
    return squares.new_empty(squares.shape[0]), plain.like(squares)


@spread_gradients_operator.register_fake
def _(
    slopes: Tensor, heads: int, others: Tensor, weight: Tensor, squares: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    del slopes, heads, along
    return plain.like(others), plain.like(weight), plain.like(squares)


@joint_spread_operator.register_fake
def _(weight: Tensor, squares: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    del weight, rest
    return squares.new_empty(squares.shape[0]), plain.like(squares)


@joint_spread_gradients_operator.register_fake
def _(
    slopes: Tensor, heads: int, weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, along: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del slopes, heads, along
    return plain.like(weight), plain.like(squares), plain.like(other), plain.like(other_squares)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.heads = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, output[1])


def _spread_backward(ctx: Any, slopes: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *torch.ops.explicit_dropout.spread_gradients(slopes, ctx.heads, *ctx.saved_tensors), None


def _joint_spread_backward(ctx: Any, slopes: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    return *torch.ops.explicit_dropout.joint_spread_gradients(slopes, ctx.heads, *ctx.saved_tensors), None


spread_operator.register_autograd(_spread_backward, setup_context=_keep)
joint_spread_operator.register_autograd(_joint_spread_backward, setup_context=_keep)
