"""Triton: squares of products with the weight of every head, and their gradients, without the products themselves.

Rows o (batch, token, feature), heads side by side, and a weight W (feature, column), a head being `width` features of
both. T_h = o_h W_h has as many columns as W, for every head of every row: it is made a tile at a time, and forgotten.

    D_ac = Σ_h (T_h)_ac²,   energy = Σ_ac S_ac D_ac,   slopes  2 (S ∘ T_h) W_hᵀ  of o_h  and  2 o_hᵀ (S ∘ T_h)  of W_h
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.energy import interpreted
from explicit_dropout.kernels.launch import Launch, remembered
from explicit_dropout.kernels.triton_attended import _block
from explicit_dropout.kernels.triton_gram import _put
from explicit_dropout.kernels.triton_short import multiply

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

WARPS = 8
PROGRAMS = 1024
"""About how many programs share the rows in the gradient of the weight: there are fewer partial sums than these."""


@triton.jit
def _rows(weight, head, start, columns, width, LIFT: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Some columns of a head's weight, (width, column), zeros beyond its edges."""
    feature, column = tl.arange(0, WIDTH), start + tl.arange(0, COLUMNS)
    inside = (feature < width)[:, None] & (column < columns)[None, :]
    place = weight + (head * width + feature).to(tl.int64)[:, None] * columns + column[None, :]
    value = tl.load(place, inside, 0.0)
    if LIFT:
        value = value.to(tl.float32)
    return value


@triton.jit
def _sums(sums, row, start, tokens, column_start, columns, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of S, whose rows are those of o."""
    token, column = start + tl.arange(0, TOKENS), column_start + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    return tl.load(sums + (row + token).to(tl.int64)[:, None] * columns + column[None, :], inside, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _reach_squares(
    rows, weight, sums, result, tokens, row_sample, row_token, blocks, heads, width, columns,
    WHOLE: tl.constexpr, LIFT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # All columns of a block of rows one after the other, so that they find its rows in the cache.
    parts = tl.cdiv(columns, COLUMNS)
    program = tl.program_id(0)
    own, part = program // parts, program % parts
    sample, start = (own // blocks).to(tl.int64), own % blocks * TOKENS
    rows += sample * row_sample
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for head in range(heads):
        left = _block(rows + head * width, start, tokens, row_token, width, LIFT, TOKENS, WIDTH)
        product = tl.dot(left, _rows(weight, head, part * COLUMNS, columns, width, LIFT, COLUMNS, WIDTH))
        total += product * product
    if WHOLE:
        result += sample * tokens * columns + part * COLUMNS
        _put(result, total, start, tokens, columns, columns - part * COLUMNS, TOKENS, COLUMNS)
    else:
        factor = _sums(sums, sample * tokens, start, tokens, part * COLUMNS, columns, TOKENS, COLUMNS)
        tl.store(result + program, tl.sum(tl.sum(total * factor, 1), 0))


@triton.jit(do_not_specialize=["tokens", "blocks"])
def _reach_rows(
    rows, weight, sums, slopes, result, tokens, row_sample, row_token, blocks, heads, width, columns,
    LIFT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # All heads of a block of rows one after the other, so that they find its part of S in the cache.
    program = tl.program_id(0)
    own, head = program // heads, program % heads
    sample, start = (own // blocks).to(tl.int64), own % blocks * TOKENS
    left = _block(rows + sample * row_sample + head * width, start, tokens, row_token, width, LIFT, TOKENS, WIDTH)
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for first in range(0, columns, COLUMNS):
        right = _rows(weight, head, first, columns, width, LIFT, COLUMNS, WIDTH)
        factor = _sums(sums, sample * tokens, start, tokens, first, columns, TOKENS, COLUMNS)
        total += multiply(factor * tl.dot(left, right), tl.trans(right))
    features = heads * width
    result += sample * tokens * features + head * width
    total *= 2 * tl.load(slopes + sample)
    _put(result, total, start, tokens, features, width, TOKENS, WIDTH)


@triton.jit(do_not_specialize=["tokens", "blocks", "all_blocks", "part_blocks"])
def _reach_weights(
    rows, weight, sums, slopes, result, tokens, row_sample, row_token, blocks, all_blocks, part_blocks,
    heads, width, columns,
    LIFT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # One head, some columns and some blocks of rows.
    program, first = tl.program_id(0), tl.program_id(1) * COLUMNS
    part, head = program // heads, program % heads
    right = _rows(weight, head, first, columns, width, LIFT, COLUMNS, WIDTH)
    total = tl.zeros((WIDTH, COLUMNS), tl.float32)
    for own in range(part * part_blocks, tl.minimum((part + 1) * part_blocks, all_blocks)):
        sample, start = (own // blocks).to(tl.int64), own % blocks * TOKENS
        left = _block(rows + sample * row_sample + head * width, start, tokens, row_token, width, LIFT, TOKENS, WIDTH)
        factor = _sums(sums, sample * tokens, start, tokens, first, columns, TOKENS, COLUMNS)
        steep = 2 * tl.load(slopes + sample) * factor * tl.dot(left, right)
        if left.dtype == tl.bfloat16:
            total += tl.dot(tl.trans(left), steep.to(tl.bfloat16))
        else:
            total += tl.dot(tl.trans(left.to(tl.float32)), steep)
    result += (part * heads + head).to(tl.int64) * width * columns + first
    _put(result, total, 0, width, columns, columns - first, WIDTH, COLUMNS)


@remembered
def _launch(
    kernel: Any, grid: tuple[int, int, int], numbers: tuple[int, ...], whole: tuple[bool, ...], shape: tuple[int, int],
    width: int, dtype: torch.dtype, *dtypes: torch.dtype,
) -> Launch:  # fmt: skip
    """How a kernel is launched on such tensors; `dtypes` of the others make it another launch."""
    del dtypes
    lift = interpreted() and dtype == torch.bfloat16  # which the interpreter cannot multiply
    return Launch(kernel, grid, (*numbers, *whole, lift, *shape, max(16, triton.next_power_of_2(width))), warps=WARPS)


class _Sizes(NamedTuple):
    """How rows and columns are shared out. `tokens` and `columns` are those of a tile."""

    tokens: int
    columns: int
    blocks: int
    tiles: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    """What kernels are told before and after other numbers of theirs."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.tokens, self.columns


def _sizes(rows: Tensor, weight: Tensor, heads: int, columns: int) -> _Sizes:
    _, length, features = rows.shape
    few = isinstance(length, int) and length <= 64
    tokens = 64 if few or features > 64 * heads else 128  # or wide heads need more shared memory than most GPUs have
    blocks, tiles = triton.cdiv(length, tokens), triton.cdiv(weight.shape[1], columns)
    before, after = (length, *rows.stride()[:2], blocks), (heads, features // heads, weight.shape[1])
    return _Sizes(tokens, columns, blocks, tiles, before, after)


def _check(rows: Tensor, sums: Tensor) -> None:
    if rows.shape[:2] != sums.shape[:2]:
        raise ValueError(f"{tuple(rows.shape[:2])} rows meet {tuple(sums.shape[:2])} sums: they must be as many")


def energies(rows: Tensor, weight: Tensor, sums: Tensor, heads: int) -> Tensor:
    """Σ_ac S_ac D_ac of every sample. All are without gaps on the last axis, weight and S on every one."""
    _check(rows, sums)
    size = _sizes(rows, weight, heads, 128)
    found = rows.new_empty((rows.shape[0], size.blocks * size.tiles), dtype=torch.float32)
    _squares_launch(size, rows, weight, sums.dtype)(rows, weight, sums, found)
    return found.sum(1)


def squares(rows: Tensor, weight: Tensor, heads: int) -> Tensor:
    """D, (batch, token, column)."""
    found = rows.new_empty((*rows.shape[:2], weight.shape[1]), dtype=torch.float32)
    _squares_launch(_sizes(rows, weight, heads, 128), rows, weight)(rows, weight, found, found)
    return found


def _squares_launch(size: _Sizes, rows: Tensor, weight: Tensor, *sums: torch.dtype) -> Launch:
    """For their energies, given the precision of sums, or for all of them."""
    grid, numbers, whole = (rows.shape[0] * size.blocks * size.tiles, 1, 1), (*size.before, *size.after), (not sums,)
    return _launch(_reach_squares, grid, numbers, whole, size.shape, size.after[1], rows.dtype, weight.dtype, *sums)


def gradients(rows: Tensor, weight: Tensor, sums: Tensor, slopes: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and, in float32, of the weight, `slopes` (batch) being those of the energies."""
    _check(rows, sums)
    size = _sizes(rows, weight, heads, 64)
    told = size.shape, size.after[1], rows.dtype, weight.dtype, sums.dtype
    of_rows, all_blocks = rows.new_empty(rows.shape), rows.shape[0] * size.blocks
    launch = _launch(_reach_rows, (all_blocks * heads, 1, 1), (*size.before, *size.after), (), *told)
    launch(rows, weight, sums, slopes, of_rows)
    part_blocks = triton.cdiv(all_blocks, max(1, PROGRAMS // (heads * size.tiles)))
    parts = triton.cdiv(all_blocks, part_blocks)
    partial = rows.new_empty((parts, *weight.shape), dtype=torch.float32)
    numbers = *size.before, all_blocks, part_blocks, *size.after
    launch = _launch(_reach_weights, (parts * heads, size.tiles, 1), numbers, (), *told)
    launch(rows, weight, sums, slopes, partial)
    return of_rows, partial.sum(0)
