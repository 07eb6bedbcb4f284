"""Σ_a (Σ_i A_ia²) Σ_j X_aj² ‖W_:j‖²: what is incoherent in attended values, without keeping attention weights.

With the values of a head in the place of X Wᵀ it is Σ_ia A_ia² ‖v_a‖², which dropout of attention weights adds.

A model whose attention is fused never has A = softmax(s Q Kᵀ). Plain autograd would make it, keep it and some matrices
of its size besides. Here it is made a part at a time, used and forgotten, and made again in the backward pass (on a
CPU it is kept where it is no larger than what it is made of):

    c_a = Σ_i A_ia²,   slope of s Q Kᵀ at (i, a):  2 A_ia (g_a A_ia − Σ_b g_b A_ib²)

On a GPU these are Triton kernels, which make a block of pairs at a time; elsewhere, and for very wide heads, plain
torch, which makes some heads at a time. Compiled code has the kernels as operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy
from explicit_dropout.kernels.inlining import inlined
from explicit_dropout.kernels.plain import even, like, wide

PART, PART_ON_CPU = 2**24, 2**20
"""Attention weights that are made at once; on a CPU as many as its caches have room for."""

WIDEST = 128
"""Features of a head, and heads of a model, that a program of Triton's still has room for."""


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_attended

    return triton_attended


def serves_attended(values: Tensor, queries: Tensor, keys: Tensor, heads: int) -> bool:
    """Whether `attended_spread` and `weights_spread` take these, (batch, token, ·) each, here and now."""
    if values.ndim != 3 or queries.ndim != 3:
        return False
    if torch.compiler.is_compiling():
        there = energy.serves_compiled(values) and energy.serves_compiled(queries)
        return there and _narrow(queries, keys, heads) and heads <= WIDEST
    return energy.serves(values) and energy.serves(queries)


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
    return _spread(values, norms, queries, keys, heads, scale, causal)


def weights_spread(values: Tensor, queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool) -> Tensor:
    """Σ_ia A_ia² ‖v_a‖² of every sample, (batch), heads added up: of values by head, (batch, context, heads · width).

    They are their own projection, so what belongs to a head are its own features.
    """
    own = torch.eye(heads, dtype=torch.float32, device=values.device)
    norms = own.repeat_interleave(values.shape[-1] // heads, 1)
    return _spread(values, norms, queries, keys, heads, scale, causal)


def _spread(
    values: Tensor, norms: Tensor, queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool
) -> Tensor:
    if torch.compiler.is_compiling():
        columns, _ = torch.ops.explicit_dropout.attended_columns(queries, keys, heads, scale, causal)
        squares = torch.ops.explicit_dropout.attended_squares(values, norms)
    else:
        columns = _Columns.apply(queries, keys, heads, scale, causal)  # type: ignore[no-untyped-call]
        squares = _Squares.apply(values, norms)  # type: ignore[no-untyped-call]
    return cast("Tensor", (columns * squares).sum((1, 2)))


class _Columns(torch.autograd.Function):
    """c_a of every sample and head, (batch, head, context)."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool) -> Tensor:
        columns, kept = _columns(queries, keys, heads, scale, causal)
        ctx.save_for_backward(queries, keys, *kept)
        ctx.heads, ctx.scale, ctx.causal = heads, scale, causal
        return columns

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, *kept = ctx.saved_tensors
        heads, scale, causal = ctx.heads, ctx.scale, ctx.causal
        if torch.is_grad_enabled():  # somebody goes on to differentiate this
            columns = _softmax(_by_head(queries, heads), _by_head(keys, heads), scale, causal).square().sum(1)
            weighted = columns * gradients[0].flatten(0, 1)
            return *torch.autograd.grad(weighted.sum(), (queries, keys), create_graph=True), None, None, None
        return *_column_gradients(queries, keys, heads, scale, causal, kept, gradients[0]), None, None, None


class _Squares(torch.autograd.Function):
    """Σ_j x_aj² n_hj for every head and token, (batch, head, token)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, norms: Tensor) -> Tensor:
        ctx.save_for_backward(x, norms)
        return _squares(x, norms)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, norms = ctx.saved_tensors
        made = _plain_square_gradients if torch.is_grad_enabled() else _square_gradients
        return made(x, norms, gradients[0])


# ---------------------------------------------------------------------------------------------- where they are made


def _columns(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """c_a of every sample and head, and what is kept for the backward pass: levels of rows, weights, or nothing."""
    if _columns_by_triton(queries, keys, heads):
        columns, levels = _triton().columns(even(queries), even(keys), heads, scale, causal)
        return columns, (levels,)
    keep, found, kept = _few(queries, keys, heads), [], []
    for weights, _, _ in _parts(queries, keys, heads, scale, causal):
        found.append((weights.square() if keep else weights.square_()).sum(1))
        kept += [weights] if keep else []
    return torch.unflatten(_joined(found), 0, (-1, heads)), tuple(kept)


def _column_gradients(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool, kept: Sequence[Tensor], slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """Those of queries and keys, `slopes` (batch, head, context) being those of the columns."""
    if _columns_by_triton(queries, keys, heads):
        found = _triton().column_gradients(even(queries), even(keys), heads, scale, causal, kept[0], slopes)
        return cast("tuple[Tensor, Tensor]", found)
    given = (2 * scale * slopes).flatten(0, 1)[:, None]
    results: tuple[list[Tensor], list[Tensor]] = [], []
    done = 0
    for weights, left, right in _parts(queries, keys, heads, scale, causal, kept):
        slope = weights.square().mul_(given[done : done + len(weights)])
        done += len(weights)
        slope.addcmul_(weights, slope.sum(2, keepdim=True), value=-1)
        results[0].append(slope @ right)
        results[1].append(slope.mT @ left)
    first, second = (torch.unflatten(_joined(r), 0, (-1, heads)).transpose(1, 2).flatten(2) for r in results)
    return first.to(queries.dtype), second.to(keys.dtype)


def _squares(x: Tensor, norms: Tensor) -> Tensor:
    if _squares_by_triton(x, norms):
        return cast("Tensor", _triton().squares(even(x), norms.contiguous()))
    return norms @ wide(x).square().mT


def _square_gradients(x: Tensor, norms: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Those of x and of the norms, `slopes` (batch, head, token) being those of the squares."""
    if _squares_by_triton(x, norms):
        return cast("tuple[Tensor, Tensor]", _triton().square_gradients(even(x), norms.contiguous(), slopes))
    return _plain_square_gradients(x, norms, slopes)


def _plain_square_gradients(x: Tensor, norms: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """The same as it can be differentiated again."""
    of_x = (2 * wide(x) * (slopes.mT @ norms)).to(x.dtype)
    return of_x, slopes.transpose(0, 1).flatten(1) @ wide(x).square().flatten(0, 1)


def _columns_by_triton(queries: Tensor, keys: Tensor, heads: int) -> bool:
    return energy.by_triton(queries) and _narrow(queries, keys, heads)


def _narrow(queries: Tensor, keys: Tensor, heads: int) -> bool:
    alike = queries.dtype == keys.dtype and queries.dtype in energy.DTYPES
    return alike and queries.shape[-1] <= WIDEST * heads


def _squares_by_triton(x: Tensor, norms: Tensor) -> bool:
    few = len(norms) <= WIDEST
    return few and energy.by_triton(x) and x.dtype in energy.DTYPES and norms.dtype == torch.float32


def _few(queries: Tensor, keys: Tensor, heads: int) -> bool:
    """Whether the weights of a head are so few that it pays to keep them: on a CPU, where making them takes longer."""
    tokens, context, width = queries.shape[1], keys.shape[1], queries.shape[2] // heads
    return queries.is_cpu and tokens * context <= 2 * (tokens + context) * width


def _parts(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool, kept: Sequence[Tensor] = ()
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Attention weights, queries and keys of some heads after the other, (head of sample, token, ·)."""
    left, right = _by_head(queries, heads), _by_head(keys, heads)
    most = PART_ON_CPU if queries.is_cpu else PART
    size = max(1, most // max(1, left.shape[1] * right.shape[1]))
    for number, part in enumerate(zip(torch.split(left, size), torch.split(right, size), strict=True)):
        q, k = map(wide, part)
        yield kept[number] if kept else _softmax(q, k, scale, causal), q, k


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _softmax(queries: Tensor, keys: Tensor, scale: float, causal: bool) -> Tensor:
    scores = scale * wide(queries) @ wide(keys).mT
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1)


def _by_head(side: Tensor, heads: int) -> Tensor:
    """(batch, token, heads · width) as (batch · head, token, width)."""
    return torch.unflatten(side, -1, (heads, -1)).transpose(1, 2).flatten(0, 1)


# ---------------------------------------------------------------------------------------------- operators


@torch.library.custom_op("explicit_dropout::attended_columns", mutates_args=())
def columns_operator(queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """c_a of every sample and head, and what the backward pass needs besides queries and keys."""
    columns, kept = _columns(queries, keys, heads, scale, causal)
    return columns, kept[0] if _columns_by_triton(queries, keys, heads) else queries.new_empty(0, dtype=torch.float32)


@torch.library.custom_op("explicit_dropout::attended_column_gradients", mutates_args=())
def column_gradients_operator(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool, levels: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """Of queries and keys."""
    kept = (levels,) if _columns_by_triton(queries, keys, heads) else ()
    return _column_gradients(queries, keys, heads, scale, causal, kept, slopes)


@torch.library.custom_op("explicit_dropout::attended_squares", mutates_args=())
def squares_operator(x: Tensor, norms: Tensor) -> Tensor:
    """Σ_j x_aj² n_hj for every head and token."""
    return _squares(x, norms)


@torch.library.custom_op("explicit_dropout::attended_square_gradients", mutates_args=())
def square_gradients_operator(x: Tensor, norms: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Of x and of the norms."""
    return _square_gradients(x, norms, slopes)


for _operator in (columns_operator, column_gradients_operator, squares_operator, square_gradients_operator):
    inlined(_operator, energy.serves_compiled)


@columns_operator.register_fake
def _(queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    del scale, causal
    (batch, tokens, _), context = queries.shape, keys.shape[1]
    columns = queries.new_empty((batch, heads, context), dtype=torch.promote_types(queries.dtype, torch.float32))
    kept = (batch, heads, tokens) if _columns_by_triton(queries, keys, heads) else 0
    return columns, queries.new_empty(kept, dtype=torch.float32)


@column_gradients_operator.register_fake
def _(queries: Tensor, keys: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    del others
    return like(queries), like(keys)


@squares_operator.register_fake
def _(x: Tensor, norms: Tensor) -> Tensor:
    return norms.new_empty((x.shape[0], norms.shape[0], x.shape[1]))


@square_gradients_operator.register_fake
def _(x: Tensor, norms: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    del slopes
    return like(x), like(norms)


def _keep_columns(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    queries, keys, ctx.heads, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(queries, keys, output[1])


def _columns_backward(ctx: Any, slopes: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    queries, keys, levels = ctx.saved_tensors
    operator = torch.ops.explicit_dropout.attended_column_gradients
    return *operator(queries, keys, ctx.heads, ctx.scale, ctx.causal, levels, slopes), None, None, None


def _keep_squares(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _squares_backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, Tensor]:
    found = torch.ops.explicit_dropout.attended_square_gradients(*ctx.saved_tensors, slopes)
    return cast("tuple[Tensor, Tensor]", found)


columns_operator.register_autograd(_columns_backward, setup_context=_keep_columns)
squares_operator.register_autograd(_squares_backward, setup_context=_keep_squares)
