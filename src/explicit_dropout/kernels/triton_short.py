"""Triton: column energies of attention weights over few tokens. One program has all of a head of a sample.

The kernels for any number of tokens (`triton_attended`) make scores a block of pairs at a time: twice forward, for
levels and for weights, and twice backward, for queries and for keys. Few tokens have all their weights in registers,
each made once forward and once backward:

    c_a = Σ_i A_ia²,   slope of s Q Kᵀ at (i, a):  D_ia = A_ia (g_a A_ia − Σ_b g_b A_ib²),   dQ = 2s D K,   dK = 2s Dᵀ Q

Tiles have 2ⁿ tokens. A ViT has one more, the class token: it is kept beside the tile, as vectors.
"""

from __future__ import annotations

from math import e, log2
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.energy import interpreted
from explicit_dropout.kernels.launch import Launch, remembered
from explicit_dropout.kernels.triton_gram import _put

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

SMALLEST = 16
"""Tokens or features in a tile: less than this the GPU does not multiply."""
MOST, WIDEST = 64, 64
"""Tokens in a tile and features of a head that a program has registers for."""
WARPS = 4


@triton.jit
def load_one(tensor, token, stride, width, WIDTH: tl.constexpr):
    """One token of a head in float32, zeros beyond its edge."""
    feature = tl.arange(0, WIDTH)
    return tl.load(tensor + token * stride + feature, feature < width, 0.0).to(tl.float32)


@triton.jit
def store_one(tensor, values, token, stride, width, WIDTH: tl.constexpr):
    feature = tl.arange(0, WIDTH)
    tl.store(tensor + token * stride + feature, values.to(tensor.dtype.element_ty), feature < width)


def tile(tokens: int) -> tuple[bool, int]:
    """Whether one token is kept beside the tile, and the tokens of the tile."""
    extra = tokens > SMALLEST and (tokens - 1) & (tokens - 2) == 0
    return extra, max(SMALLEST, triton.next_power_of_2(tokens - extra))


@triton.jit
def load(side, tokens, stride, width, LIFT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """All tokens of a head, zeros beyond its edges; LIFT: in float32."""
    token, feature = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there = (token < tokens)[:, None] & (feature < width)[None, :]
    value = tl.load(side + token[:, None] * stride + feature[None, :], there, 0.0)
    if LIFT:
        value = value.to(tl.float32)
    return value


@triton.jit
def _scores(q, k, k_extra, tokens, factor, CAUSAL: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr):
    """Scores of the tile's queries in powers of two, with its keys and with the extra one; −∞ where none is seen."""
    query, key = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    seen = key < tokens
    if CAUSAL:
        seen = seen & (key <= query)
    scores = tl.where(seen, factor * tl.dot(q, tl.trans(k)), float("-inf"))
    beside = tl.full((TOKENS,), float("-inf"), tl.float32)
    if EXTRA and not CAUSAL:
        beside = factor * tl.sum(q.to(tl.float32) * k_extra[None, :], 1)
    return scores, beside


@triton.jit
def _scores_of_extra(q_extra, k, k_extra, factor):
    """Those of the extra query, the last: it sees all keys."""
    return factor * tl.sum(k.to(tl.float32) * q_extra[None, :], 1), factor * tl.sum(q_extra * k_extra, 0)


@triton.jit(do_not_specialize=["heads"])
def _short_columns(
    queries, keys, columns, levels, factor,
    tokens, query_sample, query_token, key_sample, key_token, heads, width,
    CAUSAL: tl.constexpr, LIFT: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0).to(tl.int64)
    queries += owner // heads * query_sample + owner % heads * width
    keys += owner // heads * key_sample + owner % heads * width
    columns += owner * tokens
    levels += owner * tokens
    factor = tl.cast(factor, tl.float32)  # in compiled code it comes in float64
    token = tl.arange(0, TOKENS)
    q = load(queries, tokens, query_token, width, LIFT, TOKENS, WIDTH)
    k = load(keys, tokens, key_token, width, LIFT, TOKENS, WIDTH)
    k_extra = tl.zeros((WIDTH,), tl.float32)
    if EXTRA:
        k_extra = load_one(keys, TOKENS, key_token, width, WIDTH)
    scores, beside = _scores(q, k, k_extra, tokens, factor, CAUSAL, EXTRA, TOKENS)
    most = tl.maximum(tl.max(scores, 1), beside)
    weights, weight_beside = tl.exp2(scores - most[:, None]), tl.exp2(beside - most)
    total = tl.sum(weights, 1) + weight_beside
    tl.store(levels + token, most + tl.log2(total), token < tokens)
    share = tl.where(token < tokens, 1 / total, 0.0)  # rows beyond the last attend to nothing
    weights, weight_beside = weights * share[:, None], weight_beside * share
    column = tl.sum(weights * weights, 0)
    if EXTRA:
        q_extra = load_one(queries, TOKENS, query_token, width, WIDTH)
        scores_of_extra, own_score = _scores_of_extra(q_extra, k, k_extra, factor)
        most_of_extra = tl.maximum(tl.max(scores_of_extra, 0), own_score)
        weights_of_extra, own_weight = tl.exp2(scores_of_extra - most_of_extra), tl.exp2(own_score - most_of_extra)
        total_of_extra = tl.sum(weights_of_extra, 0) + own_weight
        tl.store(levels + TOKENS, most_of_extra + tl.log2(total_of_extra))
        weights_of_extra, own_weight = weights_of_extra / total_of_extra, own_weight / total_of_extra
        column += weights_of_extra * weights_of_extra
        tl.store(columns + TOKENS, tl.sum(weight_beside * weight_beside, 0) + own_weight * own_weight)
    tl.store(columns + token, column, token < tokens)


@triton.jit
def multiply(slopes, side):
    """Their product, in the precision of the side. Half of that range is too small for slopes: float16 is widened."""
    if side.dtype != tl.bfloat16:
        side = side.to(tl.float32)
    return tl.dot(slopes.to(side.dtype), side)


@triton.jit(do_not_specialize=["slope_sample", "slope_head", "heads"])
def _short_gradients(
    queries, keys, slopes, levels, query_result, key_result, factor, outer,
    tokens, query_sample, query_token, key_sample, key_token, slope_sample, slope_head, slope_key,
    query_to_sample, query_to_token, key_to_sample, key_to_token, heads, width,
    CAUSAL: tl.constexpr, LIFT: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    owner = tl.program_id(0).to(tl.int64)
    sample, head = owner // heads, owner % heads
    queries += sample * query_sample + head * width
    keys += sample * key_sample + head * width
    slopes += sample * slope_sample + head * slope_head
    query_result += sample * query_to_sample + head * width
    key_result += sample * key_to_sample + head * width
    levels += owner * tokens
    factor, outer = tl.cast(factor, tl.float32), tl.cast(outer, tl.float32)
    token = tl.arange(0, TOKENS)
    q = load(queries, tokens, query_token, width, LIFT, TOKENS, WIDTH)
    k = load(keys, tokens, key_token, width, LIFT, TOKENS, WIDTH)
    k_extra = tl.zeros((WIDTH,), tl.float32)
    slope_beside = 0.0
    if EXTRA:
        k_extra = load_one(keys, TOKENS, key_token, width, WIDTH)
        slope_beside = tl.load(slopes + TOKENS * slope_key)
    slope = tl.load(slopes + token * slope_key, token < tokens, 0.0)
    level = tl.load(levels + token, token < tokens, float("inf"))
    scores, beside = _scores(q, k, k_extra, tokens, factor, CAUSAL, EXTRA, TOKENS)
    weights, weight_beside = tl.exp2(scores - level[:, None]), tl.exp2(beside - level)
    steep, steep_beside = weights * slope[None, :], weight_beside * slope_beside
    mean = tl.sum(weights * steep, 1) + weight_beside * steep_beside
    steep, steep_beside = weights * (steep - mean[:, None]), weight_beside * (steep_beside - mean)
    query_slopes, key_slopes = multiply(steep, k), multiply(tl.trans(steep), q)
    if EXTRA:
        q_extra = load_one(queries, TOKENS, query_token, width, WIDTH)
        level_of_extra = tl.load(levels + TOKENS)
        scores_of_extra, own_score = _scores_of_extra(q_extra, k, k_extra, factor)
        weights_of_extra = tl.exp2(scores_of_extra - level_of_extra)
        own_weight = tl.exp2(own_score - level_of_extra)
        steep_of_extra, own = weights_of_extra * slope, own_weight * slope_beside
        mean_of_extra = tl.sum(weights_of_extra * steep_of_extra, 0) + own_weight * own
        steep_of_extra = weights_of_extra * (steep_of_extra - mean_of_extra)
        own = own_weight * (own - mean_of_extra)
        query_slopes += steep_beside[:, None] * k_extra[None, :]
        key_slopes += steep_of_extra[:, None] * q_extra[None, :]
        of_query = tl.sum(steep_of_extra[:, None] * k.to(tl.float32), 0) + own * k_extra
        of_key = tl.sum(steep_beside[:, None] * q.to(tl.float32), 0) + own * q_extra
        store_one(query_result, outer * of_query, TOKENS, query_to_token, width, WIDTH)
        store_one(key_result, outer * of_key, TOKENS, key_to_token, width, WIDTH)
    _put(query_result, outer * query_slopes, 0, tokens, query_to_token, width, TOKENS, WIDTH)
    _put(key_result, outer * key_slopes, 0, tokens, key_to_token, width, TOKENS, WIDTH)


def serves(queries: Tensor, keys: Tensor, heads: int) -> bool:
    """Whether there are as many queries as keys, few enough, in half precision, and no symbols of a compiler's."""
    (_, tokens, features), context = queries.shape, keys.shape[1]
    if not isinstance(tokens, int) or tokens != context or queries.dtype == torch.float32:
        return False
    return tile(tokens)[1] <= MOST and features <= WIDEST * heads


@remembered
def _launch(
    kernel: Any, owners: int, scales: tuple[float, ...], tokens: int, strides: tuple[int, ...], heads: int, width: int,
    causal: bool, dtype: torch.dtype,
) -> Launch:  # fmt: skip
    lift = interpreted() and dtype == torch.bfloat16  # which the interpreter cannot multiply
    shape = *tile(tokens), max(SMALLEST, triton.next_power_of_2(width))
    return Launch(kernel, (owners, 1, 1), (*scales, tokens, *strides, heads, width, causal, lift, *shape), warps=WARPS)


def columns(queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool, levels: Tensor) -> Tensor:
    """As `triton_attended.columns`; levels are written."""
    batch, tokens, features = queries.shape
    found = torch.empty_like(levels)
    strides = *queries.stride()[:2], *keys.stride()[:2]
    launch = _launch(
        _short_columns, batch * heads, (scale * log2(e),), tokens, strides, heads, features // heads, causal,
        queries.dtype,
    )  # fmt: skip
    launch(queries, keys, found, levels)
    return found


def column_gradients(
    queries: Tensor, keys: Tensor, heads: int, scale: float, causal: bool, levels: Tensor, slopes: Tensor
) -> tuple[Tensor, Tensor]:
    """As `triton_attended.column_gradients`."""
    batch, tokens, features = queries.shape
    results = queries.new_empty(queries.shape), keys.new_empty(keys.shape)
    sides = *queries.stride()[:2], *keys.stride()[:2]
    strides = *sides, *slopes.stride(), *results[0].stride()[:2], *results[1].stride()[:2]
    launch = _launch(
        _short_gradients, batch * heads, (scale * log2(e), 2 * scale), tokens, strides, heads, features // heads,
        causal, queries.dtype,
    )  # fmt: skip
    launch(queries, keys, slopes, levels, *results)
    return results
