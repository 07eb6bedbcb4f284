"""⟨KᵀK, W diag(s) Wᵀ⟩ summed over heads: the incoherent energy of scores, with every pair of tokens allowed.

For a head of width e and an input of width d the matrix W diag(s) Wᵀ costs e² d for each sample. All samples and heads
at once it is one matrix product with the products P of pairs of rows of W, P_(ef)c = W_ec W_fc, which no sample enters:

    t = vec(KᵀK) P,   energy = s · t,   and in the backward pass   ∂s = t,   ∂K = 2 K mat(s Pᵀ),   ∂P = vec(KᵀK)ᵀ s.

Matrices are bfloat16, sums over them float32. Only t is kept, one row for each sample. In compiled code KᵀK is an
operator and the rest is plain torch, which the compiler differentiates and fuses; there KᵀK is kept.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy, plain
from explicit_dropout.kernels.gram import serves_scores
from explicit_dropout.kernels.inlining import inlined


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
        with exactly(others):
            along = torch.ops.explicit_dropout.grams(others, heads) @ _differentiable_pairs(weight, heads)
            return cast("Tensor", (squares * along.float()).sum(1))
    return cast("Tensor", _Spread.apply(others, weight, squares, heads))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> Tensor:
        others = plain.even(others)
        with exactly(others):
            along: Tensor = (_triton().grams(others, heads) @ _pairs(weight, heads)).float()
            ctx.save_for_backward(others, weight, squares, along)
            ctx.heads = heads
            return (squares * along).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        others, weight, squares, along = ctx.saved_tensors
        each = gradients[0][:, None]
        with exactly(others):
            weighted = (each * squares).to(torch.bfloat16)
            pairs = _pairs(weight, ctx.heads)
            of_others = _triton().products(others, weighted @ pairs.mT, ctx.heads)
            of_pairs = torch.mm(_triton().grams(others, ctx.heads).mT, weighted)
            return of_others, _of_weight(of_pairs, weight, ctx.heads), each * along, None


def joint_spread(weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int) -> Tensor:
    """Σ_h ⟨W_h diag(s) W_hᵀ, V_h diag(u) V_hᵀ⟩ for every sample: what dropout on both sides at once adds."""
    if torch.compiler.is_compiling():
        with exactly(squares):
            matrices = other_squares.to(torch.bfloat16) @ _differentiable_pairs(other, heads).mT
            return (squares * (matrices @ _differentiable_pairs(weight, heads)).float()).sum(1)
    found = _JointSpread.apply(weight, squares, other, other_squares, heads)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


class _JointSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int) -> Tensor:
        with exactly(squares):
            matrices = other_squares.to(torch.bfloat16) @ _pairs(other, heads).mT
            along = (matrices @ _pairs(weight, heads)).float()
            ctx.save_for_backward(weight, squares, other, other_squares, along)
            ctx.heads = heads
            return (squares * along).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second()
        weight, squares, other, other_squares, along = ctx.saved_tensors
        each, heads, dtype = gradients[0][:, None], ctx.heads, torch.bfloat16
        with exactly(squares):
            weighted, low = (each * squares).to(dtype), other_squares.to(dtype)
            other_pairs = _pairs(other, heads)
            of_weight = _of_weight(torch.mm((low @ other_pairs.mT).mT, weighted), weight, heads)
            matrices = weighted @ _pairs(weight, heads).mT
            of_other = _of_weight(torch.mm(matrices.mT, low), other, heads)
            return of_weight, each * along, of_other, (matrices @ other_pairs).float(), None


def exactly(x: Tensor) -> Any:
    """No autocast inside: it would lower sums, and take bfloat16 for float16, whose range energies leave."""
    return torch.autocast(x.device.type, enabled=False)


def refuse_second() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the penalty of attention scores has no second derivative in half precision on a GPU; use float32"
        )


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """P, (head · width · width, in): products of pairs of rows of a head's weight."""
    return cast("Tensor", _triton().pairs(weight.detach(), heads))


def _differentiable_pairs(weight: Tensor, heads: int) -> Tensor:
    """P for the compiler, which knows its gradient and never has the products in float32."""
    rows = torch.unflatten(weight, 0, (heads, -1))
    return (rows[:, :, None] * rows[:, None]).to(torch.bfloat16).flatten(0, 2)


def _of_weight(of_pairs: Tensor, weight: Tensor, heads: int) -> Tensor:
    """What the gradient of P makes of the weight."""
    return cast("Tensor", _triton().weight_gradient(of_pairs, weight, heads))


# ---------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("explicit_dropout::grams", mutates_args=())
def grams_operator(side: Tensor, heads: int) -> Tensor:
    """XᵀX of every head, (batch, head · width · width) in bfloat16."""
    if energy.by_triton(side):
        return cast("Tensor", _triton().grams(plain.even(side), heads))
    by_head = torch.unflatten(side.float(), -1, (heads, -1)).transpose(1, 2)
    return (by_head.mT @ by_head).flatten(1).to(torch.bfloat16)


@torch.library.custom_op("explicit_dropout::gram_products", mutates_args=())
def gram_products_operator(side: Tensor, matrices: Tensor, heads: int) -> Tensor:
    """2 X M for the symmetric matrix M of every head."""
    if energy.by_triton(side):
        return cast("Tensor", _triton().products(plain.even(side), matrices, heads))
    by_head = torch.unflatten(side.float(), -1, (heads, -1)).transpose(1, 2)
    width = by_head.shape[-1]
    products = 2 * by_head @ torch.unflatten(matrices.float(), 1, (heads, width, width))
    return products.transpose(1, 2).flatten(2).to(side.dtype)


inlined(grams_operator, energy.serves_compiled)
inlined(gram_products_operator, energy.serves_compiled)


@grams_operator.register_fake
def _(side: Tensor, heads: int) -> Tensor:
    batch, _, features = side.shape
    return side.new_empty((batch, features * (features // heads)), dtype=torch.bfloat16)


@gram_products_operator.register_fake
def _(side: Tensor, matrices: Tensor, heads: int) -> Tensor:
    del matrices, heads
    return plain.like(side)


def _keep(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    del output
    side, ctx.heads = inputs
    ctx.save_for_backward(side)


def _grams_backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
    (side,) = ctx.saved_tensors
    width = side.shape[-1] // ctx.heads
    matrices = torch.unflatten(slopes, 1, (ctx.heads, width, width))
    symmetric = (0.5 * (matrices + matrices.mT)).flatten(1).to(torch.bfloat16)
    return torch.ops.explicit_dropout.gram_products(side, symmetric, ctx.heads), None


grams_operator.register_autograd(_grams_backward, setup_context=_keep)
