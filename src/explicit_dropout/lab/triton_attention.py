"""Triton: attention over few tokens. One program has all of a head of a sample, forward and backward.

Kernels for long sequences walk over tiles and keep what they need to put them together. Of 65 tokens they waste most of
each tile, and half of the time of a small ViT's step. Here all weights of a head are in registers: nothing is kept for
the backward pass but queries, keys and values, no sum is shared by programs, and dropped keys cost one look at a mask.

Tokens are cut into two pieces of 2ⁿ tokens, 65 into 64 and 16 (of which one is there), since tiles are of such sizes.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

RENORMALISED, RESCALED = 1, 2
"""What becomes of the weights that are left when others are dropped."""
SMALLEST = 16
"""Tokens or features in a tile: less than this the GPU does not multiply."""


@triton.jit
def _load(tensor, first, tokens, stride, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    token, feature = first + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there = (token < tokens)[:, None] & (feature < width)[None, :]
    return tl.load(tensor + token[:, None] * stride + feature[None, :], there, 0.0)


@triton.jit
def _store(tensor, values, first, tokens, stride, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    token, feature = first + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there = (token < tokens)[:, None] & (feature < width)[None, :]
    tl.store(tensor + token[:, None] * stride + feature[None, :], values.to(tensor.dtype.element_ty), there)


@triton.jit
def _scores(q, k, first, tokens, scale, KEYS: tl.constexpr):
    """Scores in units of log₂, −inf where there is no key."""
    scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)
    return tl.where((first + tl.arange(0, KEYS) < tokens)[None, :], scores, -float("inf"))


@triton.jit
def _dropped(mask, row, column, tokens, mask_query, mask_key, ROWS: tl.constexpr, KEYS: tl.constexpr):
    query, key = row + tl.arange(0, ROWS), column + tl.arange(0, KEYS)
    there = (query < tokens)[:, None] & (key < tokens)[None, :]
    return tl.load(mask + query[:, None] * mask_query + key[None, :] * mask_key, there, 0) != 0


@triton.jit
def _weights(
    q, k1, k2, mask, row, tokens, mask_query, mask_key, scale, factor,
    MASK: tl.constexpr, ROWS: tl.constexpr, BIG: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Softmax weights of some queries over both pieces of keys, and what each is multiplied by (rescaled only)."""
    s1 = _scores(q, k1, 0, tokens, scale, BIG)
    s2 = s1
    if SMALL:
        s2 = _scores(q, k2, BIG, tokens, scale, SMALL)
    kept1, kept2 = s1, s2
    if MASK:
        gone1 = _dropped(mask, row, 0, tokens, mask_query, mask_key, ROWS, BIG)
        gone2 = gone1
        if SMALL:
            gone2 = _dropped(mask, row, BIG, tokens, mask_query, mask_key, ROWS, SMALL)
        if MASK == 1:
            left = tokens - tl.sum(gone1.to(tl.int32), 1)
            if SMALL:
                left -= tl.sum(gone2.to(tl.int32), 1)
            s1 = tl.where(gone1 & (left > 0)[:, None], -float("inf"), s1)
            if SMALL:
                s2 = tl.where(gone2 & (left > 0)[:, None], -float("inf"), s2)
        else:
            kept1, kept2 = tl.where(gone1, 0.0, factor), tl.where(gone2, 0.0, factor)
    highest = tl.max(s1, 1)
    if SMALL:
        highest = tl.maximum(highest, tl.max(s2, 1))
    p1 = tl.exp2(s1 - highest[:, None])
    p2, total = p1, tl.sum(p1, 1)
    if SMALL:
        p2 = tl.exp2(s2 - highest[:, None])
        total += tl.sum(p2, 1)
    return p1 / total[:, None], p2 / total[:, None], kept1, kept2


@triton.jit
def _attend(
    query, out, k1, k2, v1, v2, mask, row, tokens, stride, width, mask_query, mask_key, scale, factor,
    MASK: tl.constexpr, ROWS: tl.constexpr, BIG: tl.constexpr, SMALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    q = _load(query, row, tokens, stride, width, ROWS, WIDTH)
    p1, p2, kept1, kept2 = _weights(
        q, k1, k2, mask, row, tokens, mask_query, mask_key, scale, factor, MASK, ROWS, BIG, SMALL
    )
    if MASK == 2:
        p1, p2 = p1 * kept1, p2 * kept2
    attended = tl.dot(p1.to(q.dtype), v1)
    if SMALL:
        attended += tl.dot(p2.to(q.dtype), v2)
    _store(out, attended, row, tokens, stride, width, ROWS, WIDTH)


@triton.jit
def _forward(
    query, key, value, mask, out,
    tokens, heads, width, stride, mask_sample, mask_head, mask_query, mask_key, scale, factor,
    MASK: tl.constexpr, BIG: tl.constexpr, SMALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place = sample * tokens * stride + head * width
    query, key, value, out = query + place, key + place, value + place, out + place
    mask += sample * mask_sample + head * mask_head
    k1, v1 = _load(key, 0, tokens, stride, width, BIG, WIDTH), _load(value, 0, tokens, stride, width, BIG, WIDTH)
    k2, v2 = k1, v1
    if SMALL:
        k2 = _load(key, BIG, tokens, stride, width, SMALL, WIDTH)
        v2 = _load(value, BIG, tokens, stride, width, SMALL, WIDTH)
    _attend(
        query, out, k1, k2, v1, v2, mask, 0, tokens, stride, width, mask_query, mask_key, scale, factor,
        MASK, BIG, BIG, SMALL, WIDTH,
    )  # fmt: skip
    if SMALL:
        _attend(
            query, out, k1, k2, v1, v2, mask, BIG, tokens, stride, width, mask_query, mask_key, scale, factor,
            MASK, SMALL, BIG, SMALL, WIDTH,
        )  # fmt: skip


@triton.jit
def _differentiate(
    query, gradient, query_result, k1, k2, v1, v2, mask,
    row, tokens, stride, width, mask_query, mask_key, scale, factor,
    MASK: tl.constexpr, ROWS: tl.constexpr, BIG: tl.constexpr, SMALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """What some queries add to the gradients of both pieces of keys and values; their own gradient is stored."""
    q = _load(query, row, tokens, stride, width, ROWS, WIDTH)
    do = _load(gradient, row, tokens, stride, width, ROWS, WIDTH)
    p1, p2, kept1, kept2 = _weights(
        q, k1, k2, mask, row, tokens, mask_query, mask_key, scale, factor, MASK, ROWS, BIG, SMALL
    )
    dp1 = tl.dot(do, tl.trans(v1))
    used1, used2, dp2 = p1, p2, dp1
    if MASK == 2:
        used1, dp1 = p1 * kept1, dp1 * kept1
    mean = tl.sum(p1 * dp1, 1)
    if SMALL:
        dp2 = tl.dot(do, tl.trans(v2))
        if MASK == 2:
            used2, dp2 = p2 * kept2, dp2 * kept2
        mean += tl.sum(p2 * dp2, 1)
    ds1 = (p1 * (dp1 - mean[:, None]) * scale).to(q.dtype)
    dq = tl.dot(ds1, k1)
    dk1, dv1 = tl.dot(tl.trans(ds1), q), tl.dot(tl.trans(used1.to(q.dtype)), do)
    dk2, dv2 = dk1, dv1
    if SMALL:
        ds2 = (p2 * (dp2 - mean[:, None]) * scale).to(q.dtype)
        dq += tl.dot(ds2, k2)
        dk2, dv2 = tl.dot(tl.trans(ds2), q), tl.dot(tl.trans(used2.to(q.dtype)), do)
    _store(query_result, dq, row, tokens, stride, width, ROWS, WIDTH)
    return dk1, dv1, dk2, dv2


@triton.jit
def _backward(
    query, key, value, mask, gradient, query_result, key_result, value_result,
    tokens, heads, width, stride, mask_sample, mask_head, mask_query, mask_key, scale, factor,
    MASK: tl.constexpr, BIG: tl.constexpr, SMALL: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place = sample * tokens * stride + head * width
    query, key, value, gradient = query + place, key + place, value + place, gradient + place
    query_result, key_result, value_result = query_result + place, key_result + place, value_result + place
    mask += sample * mask_sample + head * mask_head
    k1, v1 = _load(key, 0, tokens, stride, width, BIG, WIDTH), _load(value, 0, tokens, stride, width, BIG, WIDTH)
    k2, v2 = k1, v1
    if SMALL:
        k2 = _load(key, BIG, tokens, stride, width, SMALL, WIDTH)
        v2 = _load(value, BIG, tokens, stride, width, SMALL, WIDTH)
    dk1, dv1, dk2, dv2 = _differentiate(
        query, gradient, query_result, k1, k2, v1, v2, mask,
        0, tokens, stride, width, mask_query, mask_key, scale, factor, MASK, BIG, BIG, SMALL, WIDTH,
    )  # fmt: skip
    if SMALL:
        more_k1, more_v1, more_k2, more_v2 = _differentiate(
            query, gradient, query_result, k1, k2, v1, v2, mask,
            BIG, tokens, stride, width, mask_query, mask_key, scale, factor, MASK, SMALL, BIG, SMALL, WIDTH,
        )  # fmt: skip
        dk1, dv1, dk2, dv2 = dk1 + more_k1, dv1 + more_v1, dk2 + more_k2, dv2 + more_v2
        _store(key_result, dk2, BIG, tokens, stride, width, SMALL, WIDTH)
        _store(value_result, dv2, BIG, tokens, stride, width, SMALL, WIDTH)
    _store(key_result, dk1, 0, tokens, stride, width, BIG, WIDTH)
    _store(value_result, dv1, 0, tokens, stride, width, BIG, WIDTH)


def pieces(tokens: int) -> tuple[int, int]:
    """The two powers of two that tokens are cut into; the second is 0 where one will do."""
    big = max(SMALLEST, 1 << (tokens.bit_length() - 1))
    rest = tokens - big
    return big, 0 if rest <= 0 else max(SMALLEST, triton.next_power_of_2(rest))


def _settings(q: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float) -> tuple[object, ...]:
    """What both kernels are told after their tensors."""
    tokens, features = q.shape[1:]
    width = features // heads
    strides = (0, 0, 0, 0) if dropped is None else dropped.expand(len(q), heads, tokens, tokens).stride()
    mask = 0 if dropped is None else RENORMALISED if renormalise else RESCALED
    numbers = (tokens, heads, width, features, *strides, width**-0.5, 1 / (1 - rate))
    return *numbers, mask, *pieces(tokens), max(SMALLEST, triton.next_power_of_2(width))


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float
) -> Tensor:
    """softmax(q kᵀ / √width) v for every head; all (sample, token, heads · width) and contiguous."""
    out = torch.empty_like(q)
    mask = q if dropped is None else dropped.view(torch.uint8)
    if q.numel():
        settings = _settings(q, heads, dropped, renormalise, rate)
        _forward[(len(q) * heads,)](q, k, v, mask, out, *settings, num_warps=4)
    return out


def gradients(
    q: Tensor, k: Tensor, v: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, given that of what is attended."""
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    mask = q if dropped is None else dropped.view(torch.uint8)
    if q.numel():
        settings = _settings(q, heads, dropped, renormalise, rate)
        _backward[(len(q) * heads,)](q, k, v, mask, out, *results, *settings, num_warps=4)
    return results
