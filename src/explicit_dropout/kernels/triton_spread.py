"""Triton: the Gram matrix of every head of every sample, a side of attention times such matrices, and the products of
pairs of rows of a head's weight that they meet, with their gradient."""

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


@triton.jit
def _spread_pairs(weight, pairs, weight_row, weight_column, columns, width, BLOCK: tl.constexpr):
    # One row of a weight times every row of its head.
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    places = weight + column.to(tl.int64) * weight_column
    own = tl.load(places + row.to(tl.int64) * weight_row, inside, 0.0).to(tl.float32)
    pairs += row.to(tl.int64) * width * columns + column
    for other in range(width):
        place = (row // width * width + other).to(tl.int64) * weight_row
        value = own * tl.load(places + place, inside, 0.0).to(tl.float32)
        tl.store(pairs + other * columns, value.to(pairs.dtype.element_ty), inside)


@triton.jit
def _spread_weights(slopes, weight, result, weight_row, weight_column, columns, width, BLOCK: tl.constexpr):
    # What those products make of one row: they are symmetric, and so are their slopes.
    row, column = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    slopes += row.to(tl.int64) * width * columns + column
    total = tl.zeros((BLOCK,), tl.float32)
    for other in range(width):
        place = (row // width * width + other).to(tl.int64) * weight_row + column.to(tl.int64) * weight_column
        slope = tl.load(slopes + other * columns, inside, 0.0).to(tl.float32)
        total += slope * tl.load(weight + place, inside, 0.0).to(tl.float32)
    tl.store(result + row.to(tl.int64) * columns + column, (2 * total).to(result.dtype.element_ty), inside)


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


@remembered
def _rows_launch(kernel: Any, features: int, numbers: tuple[int, ...], *dtypes: torch.dtype) -> Launch:
    """How a kernel is launched on the rows of a weight; `numbers` end with its columns and the width of a head."""
    del dtypes
    block = min(1024, max(128, triton.next_power_of_2(numbers[-2])))
    return Launch(kernel, (features, triton.cdiv(numbers[-2], block), 1), (*numbers, block))


def pairs(weight: Tensor, heads: int) -> Tensor:
    """W_ec W_fc for all pairs of rows of a head, (head · width · width, column) in bfloat16."""
    features, columns = weight.shape
    width = features // heads
    found = torch.empty((features * width, columns), dtype=torch.bfloat16, device=weight.device)
    if found.numel():
        numbers = *weight.stride(), columns, width
        _rows_launch(_spread_pairs, features, numbers, weight.dtype)(weight, found)
    return found


def weight_gradient(slopes: Tensor, weight: Tensor, heads: int) -> Tensor:
    """2 Σ_f ∂P_(ef)c W_fc, (feature, column), of slopes (head · width · width, column) without gaps."""
    features, columns = weight.shape
    found = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if found.numel():
        numbers = *weight.stride(), columns, features // heads
        _rows_launch(_spread_weights, features, numbers, weight.dtype, slopes.dtype)(slopes, weight, found)
    return found
