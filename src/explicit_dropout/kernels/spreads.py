"""⟨KᵀK, W diag(s) Wᵀ⟩ summed over heads: the incoherent energy of scores, with every pair of tokens allowed.

For a head of width e and an input of width d the matrix W diag(s) Wᵀ costs e² d for each sample. All samples and heads
at once it is one matrix product with the products P of pairs of rows of W, P_(ef)c = W_ec W_fc, which no sample enters:

    t = vec(KᵀK) P,   energy = s · t,   and in the backward pass   ∂s = t,   ∂K = 2 K mat(s Pᵀ),   ∂P = vec(KᵀK)ᵀ s.

Matrices are bfloat16, sums over them float32. Only t is kept, one row for each sample.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels.gram import serves_scores


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_spread

    return triton_spread


def serves_spread(side: Tensor, heads: int) -> bool:
    """Whether `spread` takes this side of attention here and now: in half precision, where float32 is not expected."""
    if torch.compiler.is_compiling() or side.dtype == torch.float32:
        return False
    return serves_scores(side, side, heads)


def spread(others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> Tensor:
    """Σ_h ⟨O_hᵀO_h, W_h diag(s) W_hᵀ⟩ for every sample.

    Args:
        others: the side that is not dropped, (batch, token, feature), heads side by side.
        weight: of the side that is, (feature, in).
        squares: s, the column energies of that side's input, (batch, in).
    """
    return cast("Tensor", _Spread.apply(others, weight, squares, heads))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> Tensor:
        others = others if others.stride(-1) == 1 else others.contiguous()
        along: Tensor = (_triton().grams(others, heads) @ _pairs(weight, heads)).float()
        ctx.save_for_backward(others, weight, squares, along)
        ctx.heads = heads
        return (squares * along).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second()
        others, weight, squares, along = ctx.saved_tensors
        each = gradients[0][:, None]
        weighted = (each * squares).to(torch.bfloat16)
        pairs = _pairs(weight, ctx.heads)
        of_others = _triton().products(others, weighted @ pairs.mT, ctx.heads)
        of_pairs = torch.mm(_triton().grams(others, ctx.heads).mT, weighted)
        return of_others, _of_weight(of_pairs, weight, ctx.heads), each * along, None


def joint_spread(weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int) -> Tensor:
    """Σ_h ⟨W_h diag(s) W_hᵀ, V_h diag(u) V_hᵀ⟩ for every sample: what dropout on both sides at once adds."""
    found = _JointSpread.apply(weight, squares, other, other_squares, heads)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


class _JointSpread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, squares: Tensor, other: Tensor, other_squares: Tensor, heads: int) -> Tensor:
        matrices = other_squares.to(torch.bfloat16) @ _pairs(other, heads).mT
        along = (matrices @ _pairs(weight, heads)).float()
        ctx.save_for_backward(weight, squares, other, other_squares, along)
        ctx.heads = heads
        return (squares * along).sum(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_second()
        weight, squares, other, other_squares, along = ctx.saved_tensors
        each, heads, dtype = gradients[0][:, None], ctx.heads, torch.bfloat16
        weighted, low = (each * squares).to(dtype), other_squares.to(dtype)
        other_pairs = _pairs(other, heads)
        of_weight = _of_weight(torch.mm((low @ other_pairs.mT).mT, weighted), weight, heads)
        matrices = weighted @ _pairs(weight, heads).mT
        of_other = _of_weight(torch.mm(matrices.mT, low), other, heads)
        return of_weight, each * along, of_other, (matrices @ other_pairs).float(), None


def _refuse_second() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the penalty of attention scores has no second derivative in half precision on a GPU; use float32"
        )


def _pairs(weight: Tensor, heads: int) -> Tensor:
    """P, (head · width · width, in): products of pairs of rows of a head's weight."""
    rows = torch.unflatten(weight.detach(), 0, (heads, -1))
    shape = (heads, rows.shape[1], rows.shape[1], rows.shape[2])
    pairs = torch.empty(shape, dtype=torch.bfloat16, device=weight.device)
    return torch.mul(rows[:, :, None], rows[:, None], out=pairs).flatten(0, 2)


def _of_weight(of_pairs: Tensor, weight: Tensor, heads: int) -> Tensor:
    """What the gradient of P makes of the weight: 2 Σ_f ∂P_(ef)c W_fc, since both are symmetric in e and f."""
    rows = torch.unflatten(weight, 0, (heads, -1))
    folded = torch.unflatten(of_pairs, 0, (heads, rows.shape[1], rows.shape[1]))
    return (2 * (folded * rows[:, None].to(folded.dtype)).sum(2, dtype=torch.float32)).flatten(0, 1).to(weight.dtype)
