"""Triton: score energies of one head of one sample at a time, from Gram matrices that stay in registers.

Two sides of attention are given as (batch, token, feature), a head being `width` consecutive features. One program has
one head of one sample, walks along its tokens and keeps width × width sums; the backward pass makes them again, so
nothing is kept. With every pair allowed,

    Σ_ij (l_i · r_j)² = ⟨LᵀL, RᵀR⟩,   slopes 2 L RᵀR and 2 R LᵀL.

In causal order, where i meets j ≤ i, a block of tokens meets the blocks before it through their Gram matrix and itself
by half a matrix of scores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.launch import Launch, remembered

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"


@triton.jit
def _tile(
    side, bias, start, tokens, token_stride, width, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """A block of tokens of a head less its bias, float32, zeros beyond its edges."""
    token, feature = start + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    value = tl.load(side + token.to(tl.int64)[:, None] * token_stride + feature[None, :], inside, 0.0).to(tl.float32)
    if HAS_BIAS:
        value = tl.where(inside, value - tl.load(bias + feature, feature < width, 0.0).to(tl.float32)[None, :], 0.0)
    return value


@triton.jit
def _put(result, value, start, tokens, token_stride, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    token, feature = start + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    place = result + token.to(tl.int64)[:, None] * token_stride + feature[None, :]
    tl.store(place, value.to(result.dtype.element_ty), inside)


@triton.jit
def _gram(
    side,
    bias,
    tokens,
    token_stride,
    width,
    HAS_BIAS: tl.constexpr,
    EXACT: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """XᵀX of a head."""
    gram = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(0, tokens, TOKENS):
        x = _tile(side, bias, start, tokens, token_stride, width, HAS_BIAS, TOKENS, WIDTH)
        gram = tl.dot(tl.trans(x), x, gram, input_precision=EXACT)
    return gram


@triton.jit(do_not_specialize=["left_tokens", "right_tokens", "heads"])
def _scores(
    left, right, left_bias, right_bias, energies,
    left_tokens, right_tokens, left_sample, left_token, right_sample, right_token, heads, width,
    LEFT_BIAS: tl.constexpr, RIGHT_BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    EXACT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, head = (program // heads).to(tl.int64), program % heads
    left += sample * left_sample + head * width
    right += sample * right_sample + head * width
    left_bias += head * width
    right_bias += head * width
    if CAUSAL:
        total = tl.zeros((TOKENS,), tl.float32)
        earlier = tl.zeros((WIDTH, WIDTH), tl.float32)
        order = tl.arange(0, TOKENS)[:, None] >= tl.arange(0, TOKENS)[None, :]
        for start in range(0, left_tokens, TOKENS):
            lefts = _tile(left, left_bias, start, left_tokens, left_token, width, LEFT_BIAS, TOKENS, WIDTH)
            rights = _tile(right, right_bias, start, right_tokens, right_token, width, RIGHT_BIAS, TOKENS, WIDTH)
            across = tl.dot(lefts, earlier, input_precision=EXACT)
            own = tl.where(order, tl.dot(lefts, tl.trans(rights), input_precision=EXACT), 0.0)
            total += tl.sum(across * lefts, 1) + tl.sum(own * own, 1)
            earlier = tl.dot(tl.trans(rights), rights, earlier, input_precision=EXACT)
        energy = tl.sum(total, 0)
    else:
        lefts = _gram(left, left_bias, left_tokens, left_token, width, LEFT_BIAS, EXACT, TOKENS, WIDTH)
        rights = _gram(right, right_bias, right_tokens, right_token, width, RIGHT_BIAS, EXACT, TOKENS, WIDTH)
        energy = tl.sum(tl.sum(lefts * rights, 1), 0)
    tl.store(energies + program, energy)


@triton.jit(do_not_specialize=["left_tokens", "right_tokens", "heads", "weight_sample", "weight_head"])
def _score_gradients(
    left, right, left_bias, right_bias, weights, left_result, right_result, left_slope, right_slope,
    left_tokens, right_tokens, left_sample, left_token, right_sample, right_token,
    left_to_sample, left_to_token, right_to_sample, right_to_token, weight_sample, weight_head, heads, width,
    LEFT_BIAS: tl.constexpr, RIGHT_BIAS: tl.constexpr, CAUSAL: tl.constexpr,
    EXACT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # The second axis of the grid has the gradient of the left side in its first program, of the right in its second.
    program = tl.program_id(0)
    sample, head = (program // heads).to(tl.int64), program % heads
    left += sample * left_sample + head * width
    right += sample * right_sample + head * width
    left_bias += head * width
    right_bias += head * width
    weight = 2 * tl.load(weights + sample * weight_sample + head * weight_head)
    feature = tl.arange(0, WIDTH)
    summed = tl.zeros((TOKENS, WIDTH), tl.float32)
    order = tl.arange(0, TOKENS)[:, None] >= tl.arange(0, TOKENS)[None, :]
    gram = tl.zeros((WIDTH, WIDTH), tl.float32)
    if tl.program_id(1) == 0:
        left_result += sample * left_to_sample + head * width
        if not CAUSAL:
            gram = _gram(right, right_bias, right_tokens, right_token, width, RIGHT_BIAS, EXACT, TOKENS, WIDTH)
        for start in range(0, left_tokens, TOKENS):
            lefts = _tile(left, left_bias, start, left_tokens, left_token, width, LEFT_BIAS, TOKENS, WIDTH)
            slope = tl.dot(lefts, gram, input_precision=EXACT)
            if CAUSAL:
                rights = _tile(right, right_bias, start, right_tokens, right_token, width, RIGHT_BIAS, TOKENS, WIDTH)
                own = tl.where(order, tl.dot(lefts, tl.trans(rights), input_precision=EXACT), 0.0)
                slope = tl.dot(own, rights, slope, input_precision=EXACT)
                gram = tl.dot(tl.trans(rights), rights, gram, input_precision=EXACT)
            slope *= weight
            summed += slope
            _put(left_result, slope, start, left_tokens, left_to_token, width, TOKENS, WIDTH)
        if LEFT_BIAS:
            tl.store(left_slope + program * width + feature, -tl.sum(summed, 0), feature < width)
    else:
        right_result += sample * right_to_sample + head * width
        if not CAUSAL:
            gram = _gram(left, left_bias, left_tokens, left_token, width, LEFT_BIAS, EXACT, TOKENS, WIDTH)
        blocks = tl.cdiv(right_tokens, TOKENS)
        for block in range(blocks):
            start = (blocks - 1 - block) * TOKENS
            rights = _tile(right, right_bias, start, right_tokens, right_token, width, RIGHT_BIAS, TOKENS, WIDTH)
            slope = tl.dot(rights, gram, input_precision=EXACT)
            if CAUSAL:
                lefts = _tile(left, left_bias, start, left_tokens, left_token, width, LEFT_BIAS, TOKENS, WIDTH)
                own = tl.where(order, tl.dot(lefts, tl.trans(rights), input_precision=EXACT), 0.0)
                slope = tl.dot(tl.trans(own), lefts, slope, input_precision=EXACT)
                gram = tl.dot(tl.trans(lefts), lefts, gram, input_precision=EXACT)
            slope *= weight
            summed += slope
            _put(right_result, slope, start, right_tokens, right_to_token, width, TOKENS, WIDTH)
        if RIGHT_BIAS:
            tl.store(right_slope + program * width + feature, -tl.sum(summed, 0), feature < width)


@remembered
def _launch(
    kernel: Any, programs: tuple[int, int, int], numbers: tuple[int, ...], left_bias: torch.dtype | None,
    right_bias: torch.dtype | None, causal: bool, *dtypes: torch.dtype,
) -> Launch:  # fmt: skip
    """How one of the kernels is launched on such sides; of `numbers` the last is the width of a head."""
    wide = max(16, triton.next_power_of_2(numbers[-1]))
    # Half precision is exact in the 32-bit mode of the tensor cores, float32 is not.
    exact = "ieee" if dtypes[0] == torch.float32 else "tf32"
    # Few tokens at a time and few threads were fastest where they were tried; causal blocks meet themselves as well.
    tokens = 16 if not causal and wide <= 64 else 64 if wide <= 64 else 32
    warps = 8 if wide > 64 else 4 if causal else max(1, wide // 32)
    facts = left_bias is not None, right_bias is not None, causal, exact, tokens, wide
    return Launch(kernel, programs, numbers + facts, warps=warps)


def _dtype(tensor: Tensor | None) -> torch.dtype | None:
    return None if tensor is None else tensor.dtype


def score_energies(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool
) -> Tensor:
    """Σ_ij (l_i · r_j)² for every sample and head of (batch, token, feature), the last axis without gaps."""
    batch, width = left.shape[0], left.shape[2] // heads
    energies = torch.empty((batch, heads), dtype=torch.float32, device=left.device)
    if batch:
        numbers = (left.shape[1], right.shape[1], *left.stride()[:2], *right.stride()[:2], heads, width)
        launch = _launch(
            _scores, (batch * heads, 1, 1), numbers, _dtype(left_bias), _dtype(right_bias), causal,
            left.dtype, right.dtype,
        )  # fmt: skip
        launch(
            left, right, left if left_bias is None else left_bias, left if right_bias is None else right_bias, energies
        )
    return energies


def score_gradients(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool,
    weights: Tensor, left_result: Tensor, right_result: Tensor,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Writes the gradients of both sides, `weights` (batch, head) being those of the energies; returns the biases'."""
    batch, width = left.shape[0], left.shape[2] // heads
    slopes = [
        None if bias is None else torch.empty((batch, heads * width), dtype=torch.float32, device=left.device)
        for bias in (left_bias, right_bias)
    ]
    if batch:
        numbers = (
            left.shape[1], right.shape[1], *left.stride()[:2], *right.stride()[:2],
            *left_result.stride()[:2], *right_result.stride()[:2], *weights.stride(), heads, width,
        )  # fmt: skip
        launch = _launch(
            _score_gradients, (batch * heads, 2, 1), numbers, _dtype(left_bias), _dtype(right_bias), causal,
            left.dtype, right.dtype, weights.dtype,
        )  # fmt: skip
        launch(
            left, right, left if left_bias is None else left_bias, left if right_bias is None else right_bias,
            weights, left_result, right_result,
            weights if slopes[0] is None else slopes[0], weights if slopes[1] is None else slopes[1],
        )  # fmt: skip
    first, second = (None if slope is None else slope.sum(0) for slope in slopes)
    return first, second
