"""Triton: Σ (x − b)² in one pass over x, and its gradient added to another in one pass.

A tensor of rows is cut into parts of consecutive rows and tiles of columns; one program sums one part of one tile.
Partial sums stay apart, so their order is fixed; what reads them adds them up. The backward pass has the same parts, so
that each of them may have a gradient of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.launch import Launch

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128
PROGRAMS = 512
"""About how many programs share a tensor: enough to fill a large GPU, few enough for small partial sums."""


@triton.jit(do_not_specialize=["sample_rows", "bias_stride", "part_rows", "sample_parts", "parts", "tiles"])
def _energies(
    x, bias, mask, energies, sums, lowered,
    sample_rows, columns, x_row, x_column, bias_stride, part_rows, sample_parts, parts, tiles,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, LOWERS: tl.constexpr, BY_COLUMN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    shift = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column * bias_stride, inside, 0.0).to(tl.float32)
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    deviations = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    sample = part // sample_parts
    first = sample * sample_rows + part % sample_parts * part_rows
    last = tl.minimum(first + part_rows, (sample + 1) * sample_rows)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = row < last
        place = row.to(tl.int64)[:, None]
        grid = there[:, None] & inside[None, :]
        value = tl.load(x + place * x_row + column[None, :] * x_column, grid, 0.0)
        if LOWERS:
            value = value.to(lowered.dtype.element_ty)
            tl.store(lowered + place * columns + column[None, :], value, grid)
        counted = grid
        if HAS_MASK:
            counted = grid & (tl.load(mask + row, there, 0) != 0)[:, None]
        deviation = tl.where(counted, value.to(tl.float32) - shift[None, :], 0.0)
        squares += deviation * deviation
        if HAS_BIAS:
            deviations += deviation
    by_column = tl.sum(squares, 0)
    if BY_COLUMN:
        tl.store(energies + part * columns + column, by_column, inside)
    else:
        tl.store(energies + part * tiles + tile, tl.sum(by_column, 0))
    if HAS_BIAS:
        tl.store(sums + part * columns + column, tl.sum(deviations, 0), inside)
        if part == 0:  # a copy of the bias: a sharded one is gone by the time of the backward pass
            tl.store(sums + parts * columns + column, shift, inside)


# Where columns begin and end is left to Triton to look at: only so does it know that neighbours are read together.
@triton.jit(do_not_specialize=["sample_rows", "weight_part", "weight_column", "part_rows", "sample_parts", "parts"])
def _gradients(
    x, mask, sums, gradient, weights, result, bias_gradient,
    sample_rows, columns, offset, x_row, x_column, gradient_row, gradient_column, weight_part, weight_column, width,
    part_rows, sample_parts, parts,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GRADIENT: tl.constexpr, BY_COLUMN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # `own` is a column's number among those that have an energy; the others pass their gradient on.
    part, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    own = column - offset
    owned = (own >= 0) & (own < width)
    source = own if BY_COLUMN else own // BLOCK_C
    if part == parts:  # one more than there are, for the bias
        # x contains the bias, the deviation does not: what reaches it through x is taken back here
        slopes = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        for start in range(0, parts, BLOCK_R):
            each = start + tl.arange(0, BLOCK_R)
            grid = (each < parts)[:, None] & owned[None, :]
            factor = tl.load(weights + each[:, None] * weight_part + source[None, :] * weight_column, grid, 0.0)
            slopes += factor * tl.load(sums + each[:, None] * width + own[None, :], grid, 0.0)
        tl.store(bias_gradient + own, (-2 * tl.sum(slopes, 0)).to(bias_gradient.dtype.element_ty), owned)
    else:
        weight = 2 * tl.load(weights + part * weight_part + source * weight_column, owned, 0.0)
        shift = tl.zeros((BLOCK_C,), tl.float32)
        if HAS_BIAS:
            shift = tl.load(sums + parts * width + own, owned, 0.0)
        sample = part // sample_parts
        first = sample * sample_rows + part % sample_parts * part_rows
        last = tl.minimum(first + part_rows, (sample + 1) * sample_rows)
        for start in range(first, last, BLOCK_R):
            row = start + tl.arange(0, BLOCK_R)
            there = row < last
            place = row.to(tl.int64)[:, None]
            grid = there[:, None] & inside[None, :]
            counted = there[:, None] & owned[None, :]
            if HAS_MASK:
                counted = counted & (tl.load(mask + row, there, 0) != 0)[:, None]
            value = tl.load(x + place * x_row + column[None, :] * x_column, counted, 0.0).to(tl.float32)
            total = tl.where(counted, weight[None, :] * (value - shift[None, :]), 0.0)
            if HAS_GRADIENT:
                passing = gradient + place * gradient_row + column[None, :] * gradient_column
                total += tl.load(passing, grid, 0.0).to(tl.float32)
            tl.store(result + place * columns + column[None, :], total.to(result.dtype.element_ty), grid)


@lru_cache(1024)
def cut(rows: int, columns: int, samples: int) -> tuple[int, int, int]:
    """Into how many parts each of so many samples is cut, of how many rows, and into how many tiles.

    A matter of shapes alone, so that sums never change their order.
    """
    tiles = triton.cdiv(columns, BLOCK_COLUMNS)
    wanted = triton.next_power_of_2(max(1, max(16, PROGRAMS // max(tiles, 1)) // max(samples, 1)))
    sample_rows = rows // max(samples, 1)
    parts = max(1, min(wanted, triton.cdiv(sample_rows, BLOCK_ROWS)))
    part_rows = BLOCK_ROWS * triton.cdiv(triton.cdiv(sample_rows, parts), BLOCK_ROWS)
    return parts, part_rows, tiles


def sources(rows: int, columns: int, samples: int, by_column: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which partial sum each row and each column belongs to."""
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    parts, part_rows, _ = cut(rows, columns, samples)
    sample_rows = max(1, rows // max(samples, 1))
    part = row // sample_rows * parts + row % sample_rows // max(1, part_rows)
    return part, column if by_column else column // BLOCK_COLUMNS


def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """Rows and columns of a tensor and the strides of both; None where its rows lie at no regular distance."""
    if 0 in shape:  # any strides will do, and `contiguous` would leave them as they are
        return prod(shape[:-1]), shape[-1], shape[-1], 1
    rows, row = 1, 0
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1]), strict=True):
        if size == 1:
            continue
        if rows > 1 and stride != rows * row:
            return None
        rows, row = rows * size, row if rows > 1 else stride
    return rows, shape[-1], row, strides[-1]


@lru_cache(4096)
def _energies_launch(
    shape: tuple[int, ...], strides: tuple[int, ...], bias_stride: int | None, masked: bool, by_column: bool,
    samples: int, *dtypes: torch.dtype | None,
) -> tuple[Launch, tuple[int, int], tuple[int, int]] | None:  # fmt: skip
    """How energies of such tensors are launched, and the shapes of them and of what is kept of the bias.

    None where the tensor has to be made contiguous first.
    """
    layout, lower = _layout(shape, strides), dtypes[-1]
    if layout is None:
        return None
    rows, columns, x_row, x_column = layout
    sample_parts, part_rows, tiles = cut(rows, columns, samples)
    parts = samples * sample_parts
    sample_rows = rows // max(samples, 1)
    numbers = sample_rows, columns, x_row, x_column, bias_stride or 0, part_rows, sample_parts, parts, tiles
    facts = bias_stride is not None, masked, lower is not None, by_column, BLOCK_ROWS, BLOCK_COLUMNS
    launch = Launch(_energies, (parts, tiles, 1), numbers + facts)
    return launch, (parts, columns if by_column else tiles), (parts + 1, columns)


def energies_of(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, lower: torch.dtype | None, by_column: bool,
    samples: int = 1,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """Partial sums of (x − b)² of x (*batch, column), what the backward pass needs of the bias, x in lower precision.

    Sums are (part, column) or (part, tile), sample after sample. For the bias, (part + 1, column): those of
    x − b, and a copy of it as the last.
    """
    bias_stride, bias_dtype = (None, None) if bias is None else (bias.stride(0), bias.dtype)
    found = _energies_launch(
        x.shape, x.stride(), bias_stride, mask is not None, by_column, samples, x.dtype, bias_dtype, lower
    )
    if found is None:
        return energies_of(x.contiguous(), bias, mask, lower, by_column, samples)
    launch, shape, kept = found
    energies = x.new_empty(shape, dtype=torch.float32)
    sums = None if bias is None else x.new_empty(kept, dtype=torch.float32)
    lowered = None if lower is None else x.new_empty(x.shape, dtype=lower)
    launch(
        x, x if bias is None else bias, x if mask is None else mask, energies,
        energies if sums is None else sums, energies if lowered is None else lowered,
    )  # fmt: skip
    return energies, () if sums is None else (sums,), lowered


@lru_cache(4096)
def _gradients_launch(
    shape: tuple[int, ...], strides: tuple[int, ...], passing: tuple[int, ...] | None, weights: tuple[int, ...],
    offset: int, width: int, biased: bool, masked: bool, by_column: bool, samples: int, *dtypes: torch.dtype | None,
) -> Launch | None:  # fmt: skip
    """How gradients of such tensors are launched; `passing` and `weights` are strides. None as above."""
    del dtypes  # which make it another launch
    own, other = _layout(shape, strides), _layout(shape, strides if passing is None else passing)
    if own is None or other is None:
        return None
    rows, columns, *row_and_column = own
    sample_parts, part_rows, _ = cut(rows, width, samples)
    parts, tiles = samples * sample_parts, triton.cdiv(columns, BLOCK_COLUMNS)
    sample_rows = rows // max(samples, 1)
    numbers = sample_rows, columns, offset, *row_and_column, *other[2:], *weights, width, part_rows, sample_parts, parts
    facts = biased, masked, passing is not None, by_column, BLOCK_ROWS, BLOCK_COLUMNS
    return Launch(_gradients, (parts + biased, tiles, 1), numbers + facts)


def gradient_of(
    x: Tensor, of_bias: Sequence[Tensor], mask: Tensor | None, gradient: Tensor | None, weights: Tensor,
    dtype: torch.dtype, by_column: bool, offset: int, width: int, bias_dtype: torch.dtype | None, samples: int = 1,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gradient` plus that of the energies of x, their gradients being `weights`; and the gradient of the bias.

    Energies are those of `width` columns from `offset` on; the others pass their gradient on.
    """
    passing, other_strides = (x, None) if gradient is None else (gradient, gradient.stride())
    launch = _gradients_launch(
        x.shape, x.stride(), other_strides, weights.stride(), offset, width, bool(of_bias), mask is not None,
        by_column, samples, x.dtype, passing.dtype, dtype, bias_dtype,
    )  # fmt: skip
    if launch is None:
        x, gradient = x.contiguous(), None if gradient is None else gradient.contiguous()
        return gradient_of(x, of_bias, mask, gradient, weights, dtype, by_column, offset, width, bias_dtype, samples)
    result = x.new_empty(x.shape, dtype=dtype)
    slope = x.new_empty((width,), dtype=bias_dtype) if of_bias else None
    launch(
        x, x if mask is None else mask, of_bias[0] if of_bias else weights, passing, weights, result,
        weights if slope is None else slope,
    )  # fmt: skip
    return result, slope
