"""Triton: what is incoherent in the scores of all pairs, one head of one sample at a time, in registers.

A side of attention X (token, width) meets the weight W (width, column) of the other side, whose input has the column
energies s, as ⟨XᵀX, M⟩ with M = W diag(s) Wᵀ; both sides dropped at once meet as ⟨M, M′⟩. One program makes these
matrices, which are never stored. The backward pass makes them once more, for the slopes 2 a X M of a side, and stores
the slope D of every M, a XᵀX + c M′ with the slopes a and c of the energies. From those the slopes of W and s follow:

    ∂W = 2 Σ D W diag(s)  over samples,   ∂s_c = Σ_e W_ec (D W)_ec  over heads.

Weights are bfloat16, so are the operands of products with M and D; sums are float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.energy import interpreted
from explicit_dropout.kernels.launch import Launch, remembered
from explicit_dropout.kernels.triton_gram import _put

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

INTERPRETED = tl.constexpr(interpreted())
PARTS = 4
"""Samples are dealt out to so many programs for each block of a weight; what they make of it is added up afterwards."""


@triton.jit
def _product(left, right, total):
    if INTERPRETED:  # by what has no products of bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, total)


@triton.jit
def _met(x, matrix):
    """X M in the precision of X, where that has the range of M."""
    if x.dtype == tl.bfloat16:
        found = _product(x, matrix.to(tl.bfloat16), tl.zeros((x.shape[0], matrix.shape[1]), tl.float32))
    else:
        found = tl.dot(x.to(tl.float32), matrix, input_precision="tf32")
    return found


@triton.jit
def _rows(side, start, tokens, token_stride, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """A block of tokens of a head, as they are, zeros beyond its edges."""
    token, feature = start + tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    inside = (token < tokens)[:, None] & (feature < width)[None, :]
    return tl.load(side + token.to(tl.int64)[:, None] * token_stride + feature[None, :], inside, 0.0)


@triton.jit
def _gram(side, tokens, token_stride, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr):
    """XᵀX of a head."""
    found = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(0, tokens, TOKENS):
        x = _rows(side, start, tokens, token_stride, width, TOKENS, WIDTH)
        found = _product(tl.trans(x), x, found)
    return found


@triton.jit
def _weighted(
    weight, squares, sample, head, row_stride, column_stride, columns, width,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """W diag(s) Wᵀ of a head of a sample."""
    weight += head.to(tl.int64) * width * row_stride
    squares += sample * columns
    row = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = (row < width)[:, None] & (column < columns)[None, :]
        places = row.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
        w = tl.load(weight + places, inside, 0.0)
        s = tl.load(squares + column, column < columns, 0.0)
        right = tl.trans(w)
        if WIDTH >= 64:  # products go on while later blocks are fetched, and Triton would fetch them into w too early
            right = tl.load(weight + tl.trans(places), tl.trans(inside), 0.0)
        found = _product((w.to(tl.float32) * s[None, :]).to(tl.bfloat16), right, found)
    return found


@triton.jit(do_not_specialize=["tokens", "other_tokens", "heads"])
def _spread_energies(
    side, weight, squares, other_side, other_weight, other_squares, energies, other_energies, joint_energies,
    tokens, other_tokens, sample_stride, token_stride, other_sample, other_token,
    row_stride, column_stride, other_row, other_column, columns, other_columns, heads, width,
    JOINT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, head = (program // heads).to(tl.int64), program % heads
    own = _weighted(weight, squares, sample, head, row_stride, column_stride, columns, width, COLUMNS, WIDTH)
    gram = _gram(side + sample * sample_stride + head * width, tokens, token_stride, width, TOKENS, WIDTH)
    tl.store(energies + program, tl.sum(tl.sum(own * gram, 1), 0))
    if JOINT:
        other = _weighted(
            other_weight, other_squares, sample, head, other_row, other_column, other_columns, width, COLUMNS, WIDTH
        )
        tl.store(joint_energies + program, tl.sum(tl.sum(own * other, 1), 0))
        gram = _gram(other_side + sample * other_sample + head * width, other_tokens, other_token, width, TOKENS, WIDTH)
        tl.store(other_energies + program, tl.sum(tl.sum(other * gram, 1), 0))


@triton.jit
def _side_slopes(
    side, result, matrix, slope, tokens, token_stride, to_token, width, TOKENS: tl.constexpr, WIDTH: tl.constexpr
):
    """2 a X M, block by block."""
    for start in range(0, tokens, TOKENS):
        x = _rows(side, start, tokens, token_stride, width, TOKENS, WIDTH)
        _put(result, 2 * slope * _met(x, matrix), start, tokens, to_token, width, TOKENS, WIDTH)


@triton.jit(do_not_specialize=["tokens", "other_tokens", "heads"])
def _spread_slopes(
    side, weight, squares, other_side, other_weight, other_squares, slopes, other_slopes, joint_slopes,
    result, other_result, inner, other_inner,
    tokens, other_tokens, sample_stride, token_stride, other_sample, other_token,
    to_sample, to_token, other_to_sample, other_to_token,
    row_stride, column_stride, other_row, other_column, columns, other_columns, heads, width,
    JOINT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    sample, head = (program // heads).to(tl.int64), program % heads
    slope = tl.load(slopes + program)
    side += sample * sample_stride + head * width
    result += sample * to_sample + head * width
    inner += program.to(tl.int64) * width * width
    own = _weighted(weight, squares, sample, head, row_stride, column_stride, columns, width, COLUMNS, WIDTH)
    _side_slopes(side, result, own, slope, tokens, token_stride, to_token, width, TOKENS, WIDTH)
    inside = slope * _gram(side, tokens, token_stride, width, TOKENS, WIDTH)
    if JOINT:
        joint = tl.load(joint_slopes + program)
        low = (joint * own).to(tl.bfloat16)  # which it will be in the end: fewer registers until then
        other = _weighted(
            other_weight, other_squares, sample, head, other_row, other_column, other_columns, width, COLUMNS, WIDTH
        )
        _put(inner, inside + joint * other, 0, width, width, width, WIDTH, WIDTH)
        slope = tl.load(other_slopes + program)
        other_side += sample * other_sample + head * width
        other_result += sample * other_to_sample + head * width
        _side_slopes(
            other_side, other_result, other, slope, other_tokens, other_token, other_to_token, width, TOKENS, WIDTH
        )
        inside = slope * _gram(other_side, other_tokens, other_token, width, TOKENS, WIDTH)
        other_inner += program.to(tl.int64) * width * width
        _put(other_inner, inside + low.to(tl.float32), 0, width, width, width, WIDTH, WIDTH)
    else:
        _put(inner, inside, 0, width, width, width, WIDTH, WIDTH)


@triton.jit(do_not_specialize=["batch", "each", "heads"])
def _spread_weights(
    inner, weight, squares, of_weight, of_squares, batch, each, row_stride, column_stride, columns, heads, width,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head, part = tl.program_id(0), tl.program_id(2)
    row, column = tl.arange(0, WIDTH), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < width)[:, None] & (column < columns)[None, :]
    places = (head * width + row).to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    w = tl.load(weight + places, inside, 0.0)
    total = tl.zeros((WIDTH, COLUMNS), tl.float32)
    for sample in range(part * each, tl.minimum(part * each + each, batch)):
        place = tl.cast(sample, tl.int64) * heads + head
        matrix = inner + place * width * width
        slope = _product(_rows(matrix, 0, width, width, width, WIDTH, WIDTH), w, tl.zeros((WIDTH, COLUMNS), tl.float32))
        s = tl.load(squares + tl.cast(sample, tl.int64) * columns + column, column < columns, 0.0)
        total += slope * s[None, :]
        tl.store(of_squares + place * columns + column, tl.sum(slope * w.to(tl.float32), 0), column < columns)
    of_weight += (part * heads + head).to(tl.int64) * width * columns
    tl.store(of_weight + row.to(tl.int64)[:, None] * columns + column[None, :], 2 * total, inside)


class Blocks(NamedTuple):
    """How much a program takes at a time."""

    tokens: int
    columns: int
    warps: int


BLOCKS = {
    _spread_energies: {16: Blocks(32, 64, 2), 32: Blocks(32, 64, 2), 64: Blocks(32, 64, 4), 128: Blocks(32, 32, 8)},
    _spread_slopes: {16: Blocks(32, 64, 2), 32: Blocks(32, 64, 2), 64: Blocks(32, 64, 4), 128: Blocks(16, 32, 8)},
    _spread_weights: {16: Blocks(32, 64, 2), 32: Blocks(32, 64, 2), 64: Blocks(32, 64, 4), 128: Blocks(32, 32, 4)},
}
"""By kernel and by the width of a head."""


@remembered
def _launch(
    kernel: Any, programs: tuple[int, int, int], numbers: tuple[int, ...], sides: int, *dtypes: torch.dtype
) -> Launch:
    """How a kernel is launched on the tokens of one side or two; of `numbers` the last is the width of a head."""
    del dtypes  # which make it another launch
    wide = _wide(numbers[-1])
    blocks = BLOCKS[kernel][wide]
    return Launch(kernel, programs, (*numbers, sides == 2, blocks.tokens, blocks.columns, wide), blocks.warps)


@remembered
def _weights_launch(batch: int, numbers: tuple[int, ...]) -> Launch:
    *_, columns, heads, width = numbers
    wide = _wide(width)
    blocks = BLOCKS[_spread_weights][wide]
    programs = heads, triton.cdiv(columns, blocks.columns), PARTS
    given = batch, (batch + PARTS - 1) // PARTS, *numbers, blocks.columns, wide
    return Launch(_spread_weights, programs, given, blocks.warps)


def _wide(width: int) -> int:
    return max(16, int(triton.next_power_of_2(width)))


Side = tuple[Tensor, Tensor, Tensor]
"""X (batch, token, feature), features without gaps; W (feature, column) in bfloat16; s (batch, column) in float32."""


def _numbers(sides: tuple[Side, Side], results: tuple[Tensor, ...], heads: int) -> tuple[int, ...]:
    (x, weight, _), (other, other_weight, _) = sides
    return (
        x.shape[1], other.shape[1], *x.stride()[:2], *other.stride()[:2],
        *(step for result in results for step in result.stride()[:2]),
        *weight.stride(), *other_weight.stride(), weight.shape[1], other_weight.shape[1], heads, x.shape[2] // heads,
    )  # fmt: skip


def spread_energies(sides: list[Side], heads: int) -> list[Tensor]:
    """⟨XᵀX, M⟩ for every sample and head, (batch, head); of two sides both, and ⟨M, M′⟩."""
    first, last = sides[0], sides[-1]
    batch = first[0].shape[0]
    shape, device = (batch, heads), first[0].device
    found = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2 * len(sides) - 1)]
    if batch:
        numbers = _numbers((first, last), (), heads)
        dtypes = first[0].dtype, last[0].dtype
        launch = _launch(_spread_energies, (batch * heads, 1, 1), numbers, len(sides), *dtypes)
        launch(*first, *last, found[0], found[len(sides) - 1], found[-1])
    return found


def spread_gradients(sides: list[Side], heads: int, slopes: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every side: X's, in its precision, W's and s's in float32. `slopes` of the energies, without gaps."""
    batch, width = sides[0][0].shape[0], sides[0][0].shape[2] // heads
    device = sides[0][0].device
    results = [torch.empty(x.shape, dtype=x.dtype, device=device) for x, _, _ in sides]
    inners = [torch.empty((batch, heads, width, width), dtype=torch.bfloat16, device=device) for _ in sides]
    if batch:
        numbers = _numbers((sides[0], sides[-1]), (results[0], results[-1]), heads)
        dtypes = sides[0][0].dtype, sides[-1][0].dtype
        launch = _launch(_spread_slopes, (batch * heads, 1, 1), numbers, len(sides), *dtypes)
        launch(
            *sides[0], *sides[-1], slopes[0], slopes[len(sides) - 1], slopes[-1],
            results[0], results[-1], inners[0], inners[-1],
        )  # fmt: skip
    return [
        (result, *_of_weight(inner, weight, squares))
        for result, inner, (_, weight, squares) in zip(results, inners, sides, strict=True)
    ]


def _of_weight(inner: Tensor, weight: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a weight and of the squares that it meets, from the slopes of all matrices M."""
    (batch, heads, width, _), columns = inner.shape, weight.shape[1]
    of_weight = torch.empty((PARTS, *weight.shape), dtype=torch.float32, device=weight.device)
    of_squares = torch.empty((batch, heads, columns), dtype=torch.float32, device=weight.device)
    _weights_launch(batch, (*weight.stride(), columns, heads, width))(inner, weight, squares, of_weight, of_squares)
    return of_weight.sum(0), of_squares.sum(1)
