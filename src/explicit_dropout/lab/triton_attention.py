"""Triton: attention over few tokens. One program has all of a head of a sample, forward and backward.

Kernels for long sequences walk over tiles and keep what they need to put them together. Of 65 tokens they waste most of
each tile, and a third of the time of a small ViT's step. Here all weights of a head are in registers: nothing is kept
for the backward pass but queries, keys and values, no sum is shared by programs, and dropped keys are bits.

Tiles have 2ⁿ tokens. A ViT has one more, the class token: it is kept beside the tile, as vectors.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.triton_short import SMALLEST, load, load_one, store_one, tile

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

RENORMALISED, RESCALED = 1, 2
"""What becomes of the weights that are left when others are dropped."""
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _store(tensor, values, tokens, stride, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    token, feature = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    there = (token < tokens)[:, None] & (feature < width)[None, :]
    tl.store(tensor + token[:, None] * stride + feature[None, :], values.to(tensor.dtype.element_ty), there)


@triton.jit
def _gone(mask, query, there, mask_query, TOKENS: tl.constexpr):
    """Which keys of the tile these queries have lost: bits of a few words."""
    key = tl.arange(0, TOKENS)
    gone = tl.zeros((TOKENS, TOKENS), tl.int32)
    for number in tl.static_range((TOKENS + 31) // 32):
        word = tl.load(mask + query * mask_query + number, there, 0)
        bit = (word[:, None] >> (key & 31)[None, :]) & 1
        gone = tl.where((key // 32 == number)[None, :], bit, gone)
    return gone != 0


@triton.jit
def _weights(
    q, k, k_extra, mask, tokens, mask_query, scale, factor,
    MASK: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Softmax weights of the tile's queries over its keys and the extra one; if rescaled, also what by."""
    query, key = tl.arange(0, TOKENS), tl.arange(0, TOKENS)
    s = tl.dot(q, tl.trans(k)) * (scale * LOG2E)
    s = tl.where((key < tokens)[None, :], s, -float("inf"))
    x = tl.sum(q.to(tl.float32) * k_extra[None, :], 1) * (scale * LOG2E)
    kept, kept_x = s, x
    if MASK:
        gone = _gone(mask, query, query < tokens, mask_query, TOKENS)
        left = tokens - tl.sum(gone.to(tl.int32), 1)
        gone_x = left > 0
        if EXTRA:
            gone_x = (tl.load(mask + query * mask_query + TOKENS // 32) >> TOKENS % 32) & 1 != 0
            left -= gone_x.to(tl.int32)
        if MASK == 1:
            s = tl.where(gone & (left > 0)[:, None], -float("inf"), s)
            x = tl.where(gone_x & (left > 0), -float("inf"), x)
        else:
            kept, kept_x = tl.where(gone, 0.0, factor), tl.where(gone_x, 0.0, factor)
    highest = tl.max(s, 1)
    if EXTRA:
        highest = tl.maximum(highest, x)
    p, p_x = tl.exp2(s - highest[:, None]), tl.exp2(x - highest)
    total = tl.sum(p, 1)
    if EXTRA:
        total += p_x
    return p / total[:, None], p_x / total, kept, kept_x


@triton.jit
def _weights_of_extra(
    q_extra, k, k_extra, mask, tokens, mask_query, scale, factor, MASK: tl.constexpr, TOKENS: tl.constexpr
):
    """The same for the extra query: over the tile's keys, and over its own."""
    key = tl.arange(0, TOKENS)
    s = tl.sum(k.to(tl.float32) * q_extra[None, :], 1) * (scale * LOG2E)
    x = tl.sum(q_extra * k_extra, 0) * (scale * LOG2E)
    kept, kept_x = s, x
    if MASK:
        row = mask + TOKENS * mask_query
        gone = (tl.load(row + key // 32) >> (key & 31)) & 1 != 0
        gone_x = (tl.load(row + TOKENS // 32) >> TOKENS % 32) & 1 != 0
        if MASK == 1:
            left = tokens - tl.sum(gone.to(tl.int32), 0) - gone_x.to(tl.int32)
            s = tl.where(gone & (left > 0), -float("inf"), s)
            x = tl.where(gone_x & (left > 0), -float("inf"), x)
        else:
            kept, kept_x = tl.where(gone, 0.0, factor), tl.where(gone_x, 0.0, factor)
    highest = tl.maximum(tl.max(s, 0), x)
    p, p_x = tl.exp2(s - highest), tl.exp2(x - highest)
    total = tl.sum(p, 0) + p_x
    return p / total, p_x / total, kept, kept_x


@triton.jit
def _forward(
    query, key, value, mask, out,
    tokens, heads, width, stride, mask_sample, mask_head, mask_query, scale, factor,
    MASK: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place = sample * tokens * stride + head * width
    query, key, value, out = query + place, key + place, value + place, out + place
    mask += sample * mask_sample + head * mask_head
    q = load(query, tokens, stride, width, False, TOKENS, WIDTH)
    k = load(key, tokens, stride, width, False, TOKENS, WIDTH)
    v = load(value, tokens, stride, width, False, TOKENS, WIDTH)
    k_extra = tl.zeros((WIDTH,), tl.float32)
    v_extra = k_extra
    if EXTRA:
        k_extra = load_one(key, TOKENS, stride, width, WIDTH)
        v_extra = load_one(value, TOKENS, stride, width, WIDTH)
    p, p_x, kept, kept_x = _weights(q, k, k_extra, mask, tokens, mask_query, scale, factor, MASK, EXTRA, TOKENS)
    if MASK == 2:
        p, p_x = p * kept, p_x * kept_x
    attended = tl.dot(p.to(q.dtype), v)
    if EXTRA:
        attended += p_x[:, None] * v_extra[None, :]
        q_extra = load_one(query, TOKENS, stride, width, WIDTH)
        r, r_x, kept_r, kept_r_x = _weights_of_extra(
            q_extra, k, k_extra, mask, tokens, mask_query, scale, factor, MASK, TOKENS
        )
        if MASK == 2:
            r, r_x = r * kept_r, r_x * kept_r_x
        store_one(out, tl.sum(r[:, None] * v.to(tl.float32), 0) + r_x * v_extra, TOKENS, stride, width, WIDTH)
    _store(out, attended, tokens, stride, width, TOKENS, WIDTH)


@triton.jit
def _backward(
    query, key, value, mask, gradient, query_result, key_result, value_result,
    tokens, heads, width, stride, mask_sample, mask_head, mask_query, scale, factor,
    MASK: tl.constexpr, EXTRA: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    sample, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    place = sample * tokens * stride + head * width
    query, key, value, gradient = query + place, key + place, value + place, gradient + place
    query_result, key_result, value_result = query_result + place, key_result + place, value_result + place
    mask += sample * mask_sample + head * mask_head
    q = load(query, tokens, stride, width, False, TOKENS, WIDTH)
    k = load(key, tokens, stride, width, False, TOKENS, WIDTH)
    v = load(value, tokens, stride, width, False, TOKENS, WIDTH)
    do = load(gradient, tokens, stride, width, False, TOKENS, WIDTH)
    k_extra = tl.zeros((WIDTH,), tl.float32)
    v_extra = k_extra
    if EXTRA:
        k_extra = load_one(key, TOKENS, stride, width, WIDTH)
        v_extra = load_one(value, TOKENS, stride, width, WIDTH)
    p, p_x, kept, kept_x = _weights(q, k, k_extra, mask, tokens, mask_query, scale, factor, MASK, EXTRA, TOKENS)
    dp = tl.dot(do, tl.trans(v))
    dp_x = tl.sum(do.to(tl.float32) * v_extra[None, :], 1)
    used, used_x = p, p_x
    if MASK == 2:
        used, dp, used_x, dp_x = p * kept, dp * kept, p_x * kept_x, dp_x * kept_x
    mean = tl.sum(p * dp, 1)
    if EXTRA:
        mean += p_x * dp_x
    ds = (p * (dp - mean[:, None]) * scale).to(q.dtype)
    dq, dk, dv = tl.dot(ds, k), tl.dot(tl.trans(ds), q), tl.dot(tl.trans(used.to(q.dtype)), do)
    if EXTRA:
        ds_x = p_x * (dp_x - mean) * scale
        dq += ds_x[:, None] * k_extra[None, :]
        q_extra = load_one(query, TOKENS, stride, width, WIDTH)
        do_extra = load_one(gradient, TOKENS, stride, width, WIDTH)
        r, r_x, kept_r, kept_r_x = _weights_of_extra(
            q_extra, k, k_extra, mask, tokens, mask_query, scale, factor, MASK, TOKENS
        )
        dr, dr_x = tl.sum(v.to(tl.float32) * do_extra[None, :], 1), tl.sum(v_extra * do_extra, 0)
        used_r, used_r_x = r, r_x
        if MASK == 2:
            used_r, dr, used_r_x, dr_x = r * kept_r, dr * kept_r, r_x * kept_r_x, dr_x * kept_r_x
        mean_r = tl.sum(r * dr, 0) + r_x * dr_x
        es, es_x = r * (dr - mean_r) * scale, r_x * (dr_x - mean_r) * scale
        dk += es[:, None] * q_extra[None, :]
        dv += used_r[:, None] * do_extra[None, :]
        dq_extra = tl.sum(es[:, None] * k.to(tl.float32), 0) + es_x * k_extra
        dk_extra = tl.sum(ds_x[:, None] * q.to(tl.float32), 0) + es_x * q_extra
        dv_extra = tl.sum(used_x[:, None] * do.to(tl.float32), 0) + used_r_x * do_extra
        store_one(query_result, dq_extra, TOKENS, stride, width, WIDTH)
        store_one(key_result, dk_extra, TOKENS, stride, width, WIDTH)
        store_one(value_result, dv_extra, TOKENS, stride, width, WIDTH)
    _store(query_result, dq, tokens, stride, width, TOKENS, WIDTH)
    _store(key_result, dk, tokens, stride, width, TOKENS, WIDTH)
    _store(value_result, dv, tokens, stride, width, TOKENS, WIDTH)


def _settings(q: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float) -> tuple[object, ...]:
    """What both kernels are told after their tensors."""
    tokens, features = q.shape[1:]
    width = features // heads
    strides = (0, 0, 0) if dropped is None else dropped.expand(len(q), heads, tokens, -1).stride()[:3]
    mask = 0 if dropped is None else RENORMALISED if renormalise else RESCALED
    numbers = (tokens, heads, width, features, *strides, width**-0.5, 1 / (1 - rate))
    return *numbers, mask, *tile(tokens), max(SMALLEST, triton.next_power_of_2(width))


def attend(
    q: Tensor, k: Tensor, v: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float
) -> Tensor:
    """softmax(q kᵀ / √width) v for every head; all (sample, token, heads · width) and contiguous.

    Which keys are dropped: bits of int32 words, (sample, head, query or 1, word).
    """
    out = torch.empty_like(q)
    if q.numel():
        settings = _settings(q, heads, dropped, renormalise, rate)
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current one
            _forward[(len(q) * heads,)](q, k, v, q if dropped is None else dropped, out, *settings, num_warps=4)
    return out


def gradients(
    q: Tensor, k: Tensor, v: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float, out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, given that of what is attended."""
    results = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if q.numel():
        settings, mask = _settings(q, heads, dropped, renormalise, rate), q if dropped is None else dropped
        with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
            _backward[(len(q) * heads,)](q, k, v, mask, out, *results, *settings, num_warps=4)
    return results
