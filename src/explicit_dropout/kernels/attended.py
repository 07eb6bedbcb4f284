"""Σ_a (Σ_i A_ia²) Σ_j X_aj² ‖W_:j‖²: what is incoherent in attended values, without keeping attention weights.

A model whose attention is fused never has A = softmax(s Q Kᵀ). Plain autograd would make it, keep it and some matrices
of its size besides. Here it is made a part at a time, used and forgotten, and made again in the backward pass:

    c_a = Σ_i A_ia²,   slope of s Q Kᵀ at (i, a):  2 A_ia (g_a A_ia − Σ_b g_b A_ib²)

On a GPU these are Triton kernels, which make a block of pairs at a time; elsewhere, and for very wide heads, plain
torch, which makes some heads at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy
from explicit_dropout.kernels.plain import wide

PART, PART_ON_CPU = 2**24, 2**20
"""Attention weights that are made at once; on a CPU as many as its caches have room for."""

WIDEST = 128
"""Features of a head, and heads of a model, that a program of Triton's still has room for."""


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_attended

    return triton_attended


def attended_spread(
    values: Tensor, weight: Tensor, queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool
) -> Tensor:
    """The incoherent energy of every sample's attended values, (batch), heads added up.

    Args:
        values: what the value projection is given, (batch, context, in).
        weight: of the value projection, (heads · width, in).
        queries, keys: (batch, token or context, heads · width), heads side by side.
        scale: of the scores.
        causal: token i attends to tokens up to i only.
    """
    norms = torch.unflatten(wide(weight), 0, (heads, -1)).square().sum(1)
    columns = cast("Tensor", _Columns.apply(queries, keys, heads, scale, causal))  # type: ignore[no-untyped-call]
    energies = cast("Tensor", _Squares.apply(values, norms))  # type: ignore[no-untyped-call]
    return (columns.mT * energies).sum((1, 2))


class _Columns(torch.autograd.Function):
    """c_a of every sample and head, (batch, head, context)."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool) -> Tensor:
        ctx.heads, ctx.scale, ctx.causal = heads, scale, causal
        if _columns_by_triton(queries, keys, heads):
            columns, levels = _triton().columns(_even(queries), _even(keys), heads, scale, causal)
            ctx.save_for_backward(queries, keys, levels)
            return cast("Tensor", columns)
        ctx.save_for_backward(queries, keys)
        parts = [weights.square_().sum(1) for weights, _, _ in _parts(queries, keys, heads, scale, causal)]
        return torch.unflatten(torch.cat(parts), 0, (-1, heads))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, *levels = ctx.saved_tensors
        heads, scale, causal = ctx.heads, ctx.scale, ctx.causal
        if torch.is_grad_enabled():  # somebody goes on to differentiate this
            columns = _softmax(_by_head(queries, heads), _by_head(keys, heads), scale, causal).square().sum(1)
            weighted = columns * gradients[0].flatten(0, 1)
            return *torch.autograd.grad(weighted.sum(), (queries, keys), create_graph=True), None, None, None
        if levels:
            made = _triton().column_gradients
            found = made(_even(queries), _even(keys), heads, scale, causal, levels[0], gradients[0])
            return *found, None, None, None
        given = gradients[0].flatten(0, 1)[:, None]
        slopes: tuple[list[Tensor], list[Tensor]] = [], []
        done = 0
        for weights, left, right in _parts(queries, keys, heads, scale, causal):
            g = given[done : done + len(weights)]
            done += len(weights)
            slope = weights.square().mul_(g)
            slope.addcmul_(weights, slope.sum(2, keepdim=True), value=-1).mul_(2 * scale)
            slopes[0].append(slope @ right)
            slopes[1].append(slope.mT @ left)
        first, second = (torch.unflatten(torch.cat(s), 0, (-1, heads)).transpose(1, 2).flatten(2) for s in slopes)
        return first.to(queries.dtype), second.to(keys.dtype), None, None, None


class _Squares(torch.autograd.Function):
    """Σ_j x_aj² n_hj for every token and head, (batch, token, head)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: Tensor) -> Tensor:
        ctx.save_for_backward(x, norms)
        if _squares_by_triton(x, norms):
            return cast("Tensor", _triton().squares(_even(x), norms.contiguous()))
        return wide(x).square() @ norms.mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, norms = ctx.saved_tensors
        (g,) = gradients
        if _squares_by_triton(x, norms) and not torch.is_grad_enabled():
            return cast("tuple[Tensor, Tensor]", _triton().square_gradients(_even(x), norms.contiguous(), g))
        # as it can be differentiated again, for whoever goes on to
        return (2 * wide(x) * (g @ norms)).to(x.dtype), g.flatten(0, 1).mT @ wide(x).square().flatten(0, 1)


def _columns_by_triton(queries: Tensor, keys: Tensor, heads: int) -> bool:
    narrow = queries.shape[-1] <= WIDEST * heads
    return narrow and energy.by_triton(queries) and queries.dtype == keys.dtype and queries.dtype in energy.DTYPES


def _squares_by_triton(x: Tensor, norms: Tensor) -> bool:
    few = len(norms) <= WIDEST
    return few and energy.by_triton(x) and x.dtype in energy.DTYPES and norms.dtype == torch.float32


def _even(side: Tensor) -> Tensor:
    """Features next to each other, as kernels read them."""
    return side if side.stride(-1) == 1 else side.contiguous()


def _parts(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Attention weights, queries and keys of some heads after the other, (head of sample, token, ·)."""
    left, right = _by_head(queries, heads), _by_head(keys, heads)
    most = PART_ON_CPU if queries.is_cpu else PART
    size = max(1, most // max(1, left.shape[1] * right.shape[1]))
    for part in zip(torch.split(left, size), torch.split(right, size), strict=True):
        q, k = map(wide, part)
        yield _softmax(q, k, scale, causal), q, k


def _softmax(queries: Tensor, keys: Tensor, scale: float, causal: bool) -> Tensor:
    scores = scale * wide(queries) @ wide(keys).mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1)


def _by_head(side: Tensor, heads: int) -> Tensor:
    """(batch, token, heads · width) as (batch · head, token, width)."""
    return torch.unflatten(side, -1, (heads, -1)).transpose(1, 2).flatten(0, 1)
