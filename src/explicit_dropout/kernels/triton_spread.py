"""Triton: the Gram matrix of every head of every sample, and a side of attention times such matrices."""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.launch import Launch, remembered
from explicit_dropout.kernels.triton_gram import _gram, _put, _tile

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"


@triton.jit(do_not_specialize=["tokens", "heads"])
def _spread_grams(
    side, grams, tokens, sample_stride, token_stride, heads, width,
    EXACT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    side += (program // heads).to(tl.int64) * sample_stride + program % heads * width
    gram = _gram(side, side, tokens, token_stride, width, False, EXACT, TOKENS, WIDTH)
    grams += program.to(tl.int64) * width * width
    _put(grams, gram, 0, width, width, width, WIDTH, WIDTH)


@triton.jit(do_not_specialize=["tokens", "heads"])
def _spread_products(
    side, matrices, result, tokens, sample_stride, token_stride, to_sample, to_token, heads, width,
    EXACT: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, head = (program // heads).to(tl.int64), program % heads
    side += sample * sample_stride + head * width
    result += sample * to_sample + head * width
    matrices += program.to(tl.int64) * width * width
    matrix = _tile(matrices, matrices, 0, width, width, width, False, WIDTH, WIDTH)
    for start in range(0, tokens, TOKENS):
        x = _tile(side, side, start, tokens, token_stride, width, False, TOKENS, WIDTH)
        product = 2 * tl.dot(x, matrix, input_precision=EXACT)
        _put(result, product, start, tokens, to_token, width, TOKENS, WIDTH)


@remembered
def _launch(kernel: Any, programs: int, numbers: tuple[int, ...], *dtypes: torch.dtype) -> Launch:
    """How one of the kernels is launched on such tensors; of `numbers` the last is the width of a head."""
    del dtypes  # which make it another launch
    wide = max(16, triton.next_power_of_2(numbers[-1]))
    return Launch(kernel, (programs, 1, 1), (*numbers, "tf32", 64 if wide <= 64 else 32, wide))


def grams(side: Tensor, heads: int) -> Tensor:
    """XᵀX of every head, (batch, head · width · width) in bfloat16, of (batch, token, feature)."""
    batch, tokens, features = side.shape
    width = features // heads
    found = torch.empty((batch, features * width), dtype=torch.bfloat16, device=side.device)
    if batch:
        numbers = tokens, *side.stride()[:2], heads, width
        _launch(_spread_grams, batch * heads, numbers, side.dtype)(side, found)
    return found


def products(side: Tensor, matrices: Tensor, heads: int) -> Tensor:
    """2 X M for the symmetric matrix M of every head."""
    batch, tokens, features = side.shape
    width = features // heads
    found = torch.empty(side.shape, dtype=side.dtype, device=side.device)
    if batch:
        numbers = tokens, *side.stride()[:2], *found.stride()[:2], heads, width
        _launch(_spread_products, batch * heads, numbers, side.dtype, matrices.dtype)(side, matrices, found)
    return found
