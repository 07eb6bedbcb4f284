"""Triton: column energies of attention weights that stay in registers, and squares of rows weighted for every head.

One program has one block of tokens of one head of one sample. Attention weights are made from scores in powers of two
and from the level of their row, the logarithm of the sum of its exponentials: A_ia = 2^(s_ia − level_i). The forward
pass finds the levels and keeps them. The weights are made again for each of these, a block of pairs at a time:

    c_a  = Σ_i A_ia²
    dQ_i = 2s (Σ_b g_b A_ib² K_b − r_i Σ_b A_ib K_b),   r_i = Σ_b g_b A_ib²
    dK_a = 2s Σ_i A_ia (g_a A_ia − r_i) Q_i
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels import triton_short
from explicit_dropout.kernels.energy import interpreted
from explicit_dropout.kernels.launch import Launch, remembered
from explicit_dropout.kernels.triton_gram import _put

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

ROWS = 32
PROGRAMS = 512
"""About how many programs share the rows in the backward pass of squares: there are as many partial sums."""


@triton.jit
def _block(side, start, tokens, token_stride, width, LIFT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """A block of tokens of a head as it is, zeros beyond its edges."""
    token, feature = start + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    value = tl.load(side + token.to(tl.int64)[:, None] * token_stride + feature[None, :], inside, 0.0)
    if LIFT:
        value = value.to(tl.float32)
    return value


@triton.jit
def _scores(left, right, token, key, context, factor, CAUSAL: tl.constexpr, EXACT: tl.constexpr):
    """Scores in powers of two, −∞ where nothing is attended to; token and key lie along the axes they number."""
    factor = tl.cast(factor, tl.float32)  # in compiled code it comes in float64
    seen = key < context
    if CAUSAL:
        seen = seen & (key <= token)
    precision: tl.constexpr = "ieee" if EXACT == "ieee" else "tf32"
    return tl.where(seen, factor * tl.dot(left, tl.trans(right), input_precision=precision), float("-inf"))


@triton.jit
def _cut(value, EXACT: tl.constexpr):
    """What tensor cores read of a float32 number: bfloat16, its first ten binary digits after the point, or all of it.

    float16 has too small a range for slopes.
    """
    if EXACT == "bf16":
        value = value.to(tl.bfloat16).to(tl.float32)
    elif EXACT == "tf32":
        value = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _add(sums, value, side, EXACT: tl.constexpr):
    """The product of float32 numbers with a block as it is, added to sums."""
    if EXACT == "bf16":
        sums = tl.dot(value.to(side.dtype), side, sums)  # float32 where Triton interprets
    else:
        sums = tl.dot(value, side.to(tl.float32), sums, input_precision=EXACT)
    return sums


@triton.jit(do_not_specialize=["tokens", "context", "blocks", "heads"])
def _attended_columns(
    queries, keys, columns, levels, factor,
    tokens, context, query_sample, query_token, key_sample, key_token, blocks, heads, width,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, LIFT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # All blocks of a head one after the other, so that they find its keys in the cache.
    program = tl.program_id(0)
    owner, block = (program // blocks).to(tl.int64), program % blocks
    queries += owner // heads * query_sample + owner % heads * width
    keys += owner // heads * key_sample + owner % heads * width
    columns += program.to(tl.int64) * context
    order = tl.arange(0, TOKENS)
    token = block * TOKENS + order
    end = context
    if CAUSAL:
        end = tl.minimum(context, (block + 1) * TOKENS)
    left = _block(queries, block * TOKENS, tokens, query_token, width, LIFT, TOKENS, WIDTH)
    most = tl.full((TOKENS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    for start in range(0, end, TOKENS):
        right = _block(keys, start, context, key_token, width, LIFT, TOKENS, WIDTH)
        scores = _scores(left, right, token[:, None], (start + order)[None, :], context, factor, CAUSAL, EXACT)
        higher = tl.maximum(most, tl.max(scores, 1))
        total = total * tl.exp2(most - higher) + tl.sum(tl.exp2(scores - higher[:, None]), 1)
        most = higher
    level = most + tl.log2(total)
    tl.store(levels + owner * tokens + token, level, token < tokens)
    level = tl.where(token < tokens, level, float("inf"))  # rows beyond the last attend to nothing
    for start in range(0, end, TOKENS):
        key = start + order
        right = _block(keys, start, context, key_token, width, LIFT, TOKENS, WIDTH)
        scores = _scores(left, right, token[:, None], key[None, :], context, factor, CAUSAL, EXACT)
        weights = tl.exp2(scores - level[:, None])
        tl.store(columns + key, tl.sum(weights * weights, 0), key < context)
    if CAUSAL:
        for start in range((block + 1) * TOKENS, context, TOKENS):  # what comes later
            key = start + order
            tl.store(columns + key, tl.zeros((TOKENS,), tl.float32), key < context)


@triton.jit(do_not_specialize=["tokens", "context", "slope_sample", "slope_head", "blocks", "heads"])
def _attended_queries(
    queries, keys, slopes, levels, result, sums, factor, outer,
    tokens, context, query_sample, query_token, key_sample, key_token, slope_sample, slope_head, slope_key,
    to_sample, to_token, blocks, heads, width,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, LIFT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner, block = (program // blocks).to(tl.int64), program % blocks
    sample, head = owner // heads, owner % heads
    queries += sample * query_sample + head * width
    keys += sample * key_sample + head * width
    slopes += sample * slope_sample + head * slope_head
    token = block * TOKENS + tl.arange(0, TOKENS)
    end = context
    if CAUSAL:
        end = tl.minimum(context, (block + 1) * TOKENS)
    left = _block(queries, block * TOKENS, tokens, query_token, width, LIFT, TOKENS, WIDTH)
    level = tl.load(levels + owner * tokens + token, token < tokens, float("inf"))
    # Both terms of the gradient are equal where a row attends to one token alone. Tensor cores cut off what they
    # multiply, so the sum of the row that is put between them has to be one of numbers cut off as well.
    total = tl.zeros((TOKENS,), tl.float32)
    cut_total = tl.zeros((TOKENS,), tl.float32)
    cut_one = tl.zeros((TOKENS,), tl.float32)
    squared = tl.zeros((TOKENS, WIDTH), tl.float32)
    mean = tl.zeros((TOKENS, WIDTH), tl.float32)
    for start in range(0, end, TOKENS):
        key = start + tl.arange(0, TOKENS)
        right = _block(keys, start, context, key_token, width, LIFT, TOKENS, WIDTH)
        scores = _scores(left, right, token[:, None], key[None, :], context, factor, CAUSAL, EXACT)
        weights = tl.exp2(scores - level[:, None])
        slope = tl.load(slopes + key.to(tl.int64) * slope_key, key < context, 0.0)
        weighted = weights * weights * slope[None, :]
        total += tl.sum(weighted, 1)
        cut_weighted, cut_weights = _cut(weighted, EXACT), _cut(weights, EXACT)
        cut_total += tl.sum(cut_weighted, 1)
        cut_one += tl.sum(cut_weights, 1)
        squared = _add(squared, cut_weighted, right, EXACT)
        mean = _add(mean, cut_weights, right, EXACT)
    tl.store(sums + owner * tokens + token, total, token < tokens)
    result += sample * to_sample + head * width
    ratio = cut_total / tl.where(token < tokens, cut_one, 1.0)
    gradient = tl.cast(outer, tl.float32) * (squared - ratio[:, None] * mean)
    _put(result, gradient, block * TOKENS, tokens, to_token, width, TOKENS, WIDTH)


@triton.jit(do_not_specialize=["tokens", "context", "slope_sample", "slope_head", "blocks", "heads"])
def _attended_keys(
    queries, keys, slopes, levels, result, sums, factor, outer,
    tokens, context, query_sample, query_token, key_sample, key_token, slope_sample, slope_head, slope_key,
    to_sample, to_token, blocks, heads, width,
    CAUSAL: tl.constexpr, EXACT: tl.constexpr, LIFT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    owner, block = (program // blocks).to(tl.int64), program % blocks
    sample, head = owner // heads, owner % heads
    queries += sample * query_sample + head * width
    keys += sample * key_sample + head * width
    key = block * TOKENS + tl.arange(0, TOKENS)
    right = _block(keys, block * TOKENS, context, key_token, width, LIFT, TOKENS, WIDTH)
    places = slopes + sample * slope_sample + head * slope_head + key.to(tl.int64) * slope_key
    slope = tl.load(places, key < context, 0.0)
    gradient = tl.zeros((TOKENS, WIDTH), tl.float32)
    first = 0
    if CAUSAL:
        first = block * TOKENS
    for start in range(first, tokens, TOKENS):
        token = start + tl.arange(0, TOKENS)
        left = _block(queries, start, tokens, query_token, width, LIFT, TOKENS, WIDTH)
        scores = _scores(right, left, token[None, :], key[:, None], context, factor, CAUSAL, EXACT)
        level = tl.load(levels + owner * tokens + token, token < tokens, float("inf"))
        total = tl.load(sums + owner * tokens + token, token < tokens, 0.0)
        weights = tl.exp2(scores - level[None, :])
        steep = weights * (slope[:, None] * weights - total[None, :])
        gradient = _add(gradient, _cut(steep, EXACT), left, EXACT)
    result += sample * to_sample + head * width
    _put(result, tl.cast(outer, tl.float32) * gradient, block * TOKENS, context, to_token, width, TOKENS, WIDTH)


@triton.jit(do_not_specialize=["rows", "tokens", "heads"])
def _attended_squares(
    x, norms, energies, rows, tokens, heads, columns, x_sample, x_token,
    EXACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, HEADS)
    there, wanted = row < rows, head < heads
    sample, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
    places = x + (sample * x_sample + token * x_token)[:, None]
    total = tl.zeros((BLOCK_R, HEADS), tl.float32)
    for start in range(0, columns, BLOCK_C):
        column = start + tl.arange(0, BLOCK_C)
        inside = column < columns
        value = tl.load(places + column[None, :], there[:, None] & inside[None, :], 0.0).to(tl.float32)
        norm = tl.load(norms + head[None, :] * columns + column[:, None], inside[:, None] & wanted[None, :], 0.0)
        total = tl.dot(value * value, norm, total, input_precision=EXACT)
    results = (sample * heads * tokens + token)[:, None] + head[None, :] * tokens
    tl.store(energies + results, total, there[:, None] & wanted[None, :])


@triton.jit(do_not_specialize=["rows", "tokens", "heads", "part_rows"])
def _attended_squares_gradients(
    x, norms, slopes, result, sums,
    rows, tokens, heads, columns, x_sample, x_token, slope_sample, slope_head, slope_token, part_rows,
    EXACT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    head, column = tl.arange(0, HEADS), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    wanted, inside = head < heads, column < columns
    own = wanted[:, None] & inside[None, :]
    norm = 2 * tl.load(norms + head[:, None] * columns + column[None, :], own, 0.0)
    total = tl.zeros((HEADS, BLOCK_C), tl.float32)
    first = part * part_rows
    last = tl.minimum(first + part_rows, rows)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = row < last
        sample, token = (row // tokens).to(tl.int64), (row % tokens).to(tl.int64)
        grid = there[:, None] & inside[None, :]
        places = (sample * x_sample + token * x_token)[:, None] + column[None, :]
        value = tl.load(x + places, grid, 0.0).to(tl.float32)
        places = (sample * slope_sample + token * slope_token)[:, None] + head.to(tl.int64)[None, :] * slope_head
        slope = tl.load(slopes + places, there[:, None] & wanted[None, :], 0.0)
        gradient = value * tl.dot(slope, norm, input_precision=EXACT)
        places = row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(result + places, gradient.to(result.dtype.element_ty), grid)
        total = tl.dot(tl.trans(slope), value * value, total, input_precision=EXACT)
    tl.store(sums + (part.to(tl.int64) * heads + head)[:, None] * columns + column[None, :], total, own)


PRECISIONS = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "bf16"}
"""What tensor cores make of weights and slopes beside tensors of this precision."""


def _size(tokens: int, context: int, width: int, dtype: torch.dtype) -> int:
    """Tokens of a block: few where a head is wide, or a short sequence takes much room."""
    return 32 if width > 64 or (dtype == torch.float32 and max(tokens, context) <= 256) else 64


@remembered
def _launch(
    kernel: Any, owners: int, blocks: int, scales: tuple[float, ...], numbers: tuple[int, ...], heads: int, width: int,
    size: int, causal: bool, *dtypes: torch.dtype,
) -> Launch:  # fmt: skip
    """How a kernel is launched over so many heads of samples and blocks of tokens."""
    wide = max(16, triton.next_power_of_2(width))
    lift = interpreted() and dtypes[0] == torch.bfloat16  # which the interpreter cannot multiply
    facts = causal, PRECISIONS[dtypes[0]], lift, size, wide
    warps = 2 if size == 32 and wide <= 32 else 4
    return Launch(kernel, (owners * blocks, 1, 1), (*scales, *numbers, blocks, heads, width, *facts), warps=warps)


def columns(queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """c_a of every sample and head, (batch, head, context), and the levels of rows, (batch, head, token).

    Queries and keys are (batch, token or context, heads · width), the last axis without gaps.
    """
    (batch, tokens, features), context = queries.shape, keys.shape[1]
    levels = queries.new_empty((batch, heads, tokens), dtype=torch.float32)
    if not queries.numel() or not keys.numel():
        return queries.new_zeros((batch, heads, context), dtype=torch.float32), levels
    if triton_short.serves(queries, keys, heads):
        return triton_short.columns(queries, keys, heads, scale, causal, levels), levels
    width = features // heads
    size = _size(tokens, context, width, queries.dtype)
    blocks = triton.cdiv(tokens, size)
    parts = queries.new_empty((batch, heads, blocks, context), dtype=torch.float32)
    numbers = tokens, context, *queries.stride()[:2], *keys.stride()[:2]
    launch = _launch(
        _attended_columns, batch * heads, blocks, (scale * log2(e),), numbers, heads, width, size, causal, queries.dtype
    )
    launch(queries, keys, parts, levels)
    return parts.sum(2), levels


def column_gradients(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool, levels: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of queries and keys, `slopes` (batch, head, context) being those of the columns."""
    (batch, tokens, features), context = queries.shape, keys.shape[1]
    if not queries.numel() or not keys.numel():
        return queries.new_zeros(queries.shape), keys.new_zeros(keys.shape)
    if triton_short.serves(queries, keys, heads):
        return triton_short.column_gradients(queries, keys, heads, scale, causal, levels, slopes)
    width = features // heads
    size = _size(tokens, context, width, queries.dtype)
    results = queries.new_empty(queries.shape), keys.new_empty(keys.shape)
    sums = torch.empty_like(levels)
    scales = scale * log2(e), 2 * scale
    given = tokens, context, *queries.stride()[:2], *keys.stride()[:2], *slopes.stride()
    # The sums of rows, which the first makes, are what the second reads.
    for kernel, length, result in zip((_attended_queries, _attended_keys), (tokens, context), results, strict=True):
        numbers = *given, *result.stride()[:2]
        launch = _launch(
            kernel, batch * heads, triton.cdiv(length, size), scales, numbers, heads, width, size, causal, queries.dtype
        )
        launch(queries, keys, slopes, levels, result, sums)
    return results


@remembered
def _squares_launch(
    shape: tuple[int, int, int], strides: tuple[int, ...], slopes: tuple[int, ...] | None, heads: int,
    dtype: torch.dtype,
) -> tuple[Launch, int]:  # fmt: skip
    """How squares of such rows are launched, or with the strides of `slopes` their gradients, and in how many parts."""
    batch, tokens, width = shape
    rows, wide = batch * tokens, max(16, triton.next_power_of_2(heads))
    if slopes is None:
        # In three products: cut off by tensor cores, all energies would be a little too small.
        numbers = rows, tokens, heads, width, *strides[:2], "tf32x3", 2 * ROWS, 64, wide
        parts = triton.cdiv(rows, 2 * ROWS)
        return Launch(_attended_squares, (parts, 1, 1), numbers), parts
    exact = "tf32x3" if dtype == torch.float32 else "tf32"
    tile = 128 if wide <= 32 and exact == "tf32" else 64
    tiles = triton.cdiv(width, tile)
    part_rows = ROWS * triton.cdiv(rows, ROWS * triton.cdiv(PROGRAMS, tiles))
    parts = triton.cdiv(rows, part_rows)
    numbers = rows, tokens, heads, width, *strides[:2], *slopes, part_rows, exact, ROWS, tile, wide
    return Launch(_attended_squares_gradients, (parts, tiles, 1), numbers), parts


def squares(x: Tensor, norms: Tensor) -> Tensor:
    """Σ_j x_aj² n_hj, (batch, head, token), as the columns of attention lie.

    x is (batch, token, column) and norms (head, column), the last axes without gaps.
    """
    energies = x.new_empty((x.shape[0], len(norms), x.shape[1]), dtype=torch.float32)
    if not x.numel():
        return energies.zero_()
    launch, _ = _squares_launch(tuple(x.shape), x.stride(), None, len(norms), x.dtype)
    launch(x, norms, energies)
    return energies


def square_gradients(x: Tensor, norms: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the norms, `slopes` (batch, head, token) being those of the squares."""
    if not x.numel():
        return x.new_zeros(x.shape), torch.zeros_like(norms)
    launch, parts = _squares_launch(tuple(x.shape), x.stride(), slopes.stride(), len(norms), x.dtype)
    result = x.new_empty(x.shape)
    sums = norms.new_empty((parts, *norms.shape))
    launch(x, norms, slopes, result, sums)
    return result, sums.sum(0)
