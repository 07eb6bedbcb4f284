"""Triton: ‖x_:j‖² and ‖W_:j‖² of a layer's input and weight, in two launches, by steps that a compiler can follow.

The first cuts the rows of both into parts and sums the squares of each part by column; the second adds the parts up, in
a fixed order. For the squares of every sample, which has few rows, one launch is enough.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.launch import Launch
from explicit_dropout.kernels.triton_energy import BLOCK_COLUMNS, PROGRAMS

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

BLOCK_ROWS = 32
WEIGHT_ROWS = 4 * BLOCK_ROWS
"""How many rows of a weight one program takes."""
FEW_COLUMNS = 32
"""How many columns one program adds up the parts of."""


@triton.jit
def _squares(
    x, mask, first, last, column, inside, row_stride, column_stride,
    HAS_MASK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Σ x² of some rows, by column."""
    squares = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        counted = row < last
        if HAS_MASK:
            counted = counted & (tl.load(mask + row, counted, 0) != 0)
        place = row.to(tl.int64)[:, None] * row_stride + column[None, :] * column_stride
        value = tl.load(x + place, counted[:, None] & inside[None, :], 0.0).to(tl.float32)
        squares += value * value
    return tl.sum(squares, 0)


@triton.jit(do_not_specialize=["rows", "part_rows", "parts", "weight_rows", "weight_part"])
def _column_squares(
    x, mask, weight, sums, rows, columns, x_row, x_column, part_rows, parts,
    weight_rows, weight_row, weight_column, weight_part,
    HAS_MASK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    if part < parts:
        first = part * part_rows
        last = tl.minimum(first + part_rows, rows)
        found = _squares(x, mask, first, last, column, inside, x_row, x_column, HAS_MASK, BLOCK_R, BLOCK_C)
    else:
        first = (part - parts) * weight_part
        last = tl.minimum(first + weight_part, weight_rows)
        found = _squares(
            weight, mask, first, last, column, inside, weight_row, weight_column, False, BLOCK_R, BLOCK_C
        )  # fmt: skip
    tl.store(sums + part.to(tl.int64) * columns + column, found, inside)


@triton.jit
def _added(sums, first, last, column, inside, columns, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sum of some parts, by column."""
    total = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(first, last, BLOCK_R):
        part = start + tl.arange(0, BLOCK_R)
        place = part.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(sums + place, (part < last)[:, None] & inside[None, :], 0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["parts", "all_parts"])
def _column_sums(sums, inputs, norms, columns, parts, all_parts, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    tile = tl.program_id(0)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    tl.store(inputs + column, _added(sums, 0, parts, column, inside, columns, BLOCK_R, BLOCK_C), inside)
    tl.store(norms + column, _added(sums, parts, all_parts, column, inside, columns, BLOCK_R, BLOCK_C), inside)


def incoherent_of(x: Tensor, weight: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Σ x² and Σ W² by column, of x (*batch, column) and W (out, column)."""
    rows = x.reshape(-1, x.shape[-1])
    columns, tiles = rows.shape[1], triton.cdiv(rows.shape[1], BLOCK_COLUMNS)
    parts = max(16, PROGRAMS // max(tiles, 1))  # whatever the number of rows, which may change from batch to batch
    part_rows = BLOCK_ROWS * triton.cdiv(triton.cdiv(rows.shape[0], parts), BLOCK_ROWS)
    all_parts = parts + triton.cdiv(weight.shape[0], WEIGHT_ROWS)
    sums = x.new_empty((all_parts, columns), dtype=torch.float32)
    inputs, norms = (x.new_empty((columns,), dtype=torch.float32) for _ in range(2))
    if columns:
        of_input = rows.shape[0], columns, *rows.stride(), part_rows, parts
        of_weight = weight.shape[0], *weight.stride(), WEIGHT_ROWS
        facts = mask is not None, BLOCK_ROWS, BLOCK_COLUMNS
        first = Launch(_column_squares, (all_parts, tiles, 1), of_input + of_weight + facts)
        first(rows, rows if mask is None else mask, weight, sums)
        numbers = columns, parts, all_parts, BLOCK_ROWS, FEW_COLUMNS
        second = Launch(_column_sums, (triton.cdiv(columns, FEW_COLUMNS), 1, 1), numbers)
        second(sums, inputs, norms)
    return inputs, norms


@triton.jit(do_not_specialize=["tokens"])
def _sample_squares(x, sums, tokens, columns, x_sample, x_row, x_column, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    sample, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    own = x + sample * x_sample
    found = _squares(own, own, 0, tokens, column, inside, x_row, x_column, False, BLOCK_R, BLOCK_C)
    tl.store(sums + sample * columns + column, found, inside)


def squares_of(x: Tensor) -> Tensor:
    """Σ x² over the tokens of x (sample, token, column)."""
    samples, tokens, columns = x.shape
    sums = x.new_empty((samples, columns), dtype=torch.float32)
    numbers = tokens, columns, *x.stride(), BLOCK_ROWS, BLOCK_COLUMNS
    Launch(_sample_squares, (samples, triton.cdiv(columns, BLOCK_COLUMNS), 1), numbers)(x, sums)
    return sums
