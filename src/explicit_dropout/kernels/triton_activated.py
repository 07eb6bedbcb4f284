"""Triton: an activation with the energies of its input and output, and the gradient of all of that, one kernel each.

Rows are cut into parts and columns into tiles; one program has one part of one tile. Partial sums stay apart, so their
order is fixed. Arithmetic is float32, as in torch's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.activated import reaches
from explicit_dropout.kernels.launch import Launch, remembered

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

BLOCK_ROWS, BLOCK_COLUMNS, WARPS = 16, 128, 8
PROGRAMS = 4096
"""About how many programs share a tensor: the arithmetic of an activation wants more of them than a sum of squares."""
MOST_PARTS = 170
"""Of a narrow tensor: there are sums of all columns for every part, which have to be added up."""
_most: Callable[[int, int], int] = torch.sym_max
_least: Callable[[int, int], int] = torch.sym_min
KINDS = {"gelu": 0, "gelu_tanh": 1, "silu": 2, "quick_gelu": 3}


@triton.jit
def _activation(h, KIND: tl.constexpr):
    """σ(h) and σ′(h)."""
    if KIND == 0:
        below = 0.5 * (1 + tl.math.erf(h * 0.7071067811865476))
        result, slope = h * below, below + h * 0.3989422804014327 * tl.exp(-0.5 * h * h)
    elif KIND == 1:
        inner = 0.7978845608028654 * (h + 0.044715 * h * h * h)
        below = tl.sigmoid(2 * inner)  # ½ (1 + tanh)
        steep = 0.7978845608028654 * (1 + 0.134145 * h * h)
        result, slope = h * below, below + 2 * h * below * (1 - below) * steep
    elif KIND == 2:
        below = tl.sigmoid(h)
        result, slope = h * below, below * (1 + h * (1 - below))
    else:
        below = tl.sigmoid(1.702 * h)
        result, slope = h * below, below * (1 + 1.702 * h * (1 - below))
    return result, slope


@triton.jit(do_not_specialize=["rows", "part_rows"])
def _activate(
    x, bias, mask, result, energies, squares,
    rows, columns, x_row, x_column, bias_stride, part_rows, tiles,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ADDED: tl.constexpr, HAS_MASK: tl.constexpr, COHERENT: tl.constexpr,
    BY_COLUMN: tl.constexpr, EVEN: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    shift = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column * bias_stride, inside, 0.0).to(tl.float32)
    of_input = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    of_output = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    first = part.to(tl.int64) * part_rows
    last = tl.minimum(rows - first, part_rows).to(tl.int32)
    own_x, own_result = x + first * x_row, result + first * columns
    for start in range(0, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = row < last
        at, to = row[:, None] * x_row + column[None, :] * x_column, row[:, None] * columns + column[None, :]
        if EVEN:
            value = tl.load(own_x + at).to(tl.float32)
        else:
            value = tl.load(own_x + at, there[:, None] & inside[None, :], 0.0).to(tl.float32)
        if ADDED:
            h, deviation = value, value - shift[None, :]
        else:
            h, deviation = value + shift[None, :], value
        made, _ = _activation(h, KIND)
        made = made.to(result.dtype.element_ty)
        if EVEN:
            tl.store(own_result + to, made)
        else:
            tl.store(own_result + to, made, there[:, None] & inside[None, :])
        squared, both = deviation * deviation, made.to(tl.float32) * made.to(tl.float32)
        if HAS_MASK:
            counted = there & (tl.load(mask + first + row, there, 0) != 0)
            squared = tl.where(counted[:, None] & inside[None, :], squared, 0.0)
            both = tl.where(counted[:, None] & inside[None, :], both, 0.0)
        elif not EVEN:
            squared = tl.where(there[:, None] & inside[None, :], squared, 0.0)
            both = tl.where(there[:, None] & inside[None, :], both, 0.0)
        if COHERENT:
            of_input += squared
        if BY_COLUMN:
            of_output += both
    if COHERENT:
        tl.store(energies + part * tiles + tile, tl.sum(of_input))
    if BY_COLUMN:
        tl.store(squares + part.to(tl.int64) * columns + column, tl.sum(of_output, 0), inside)


@triton.jit(do_not_specialize=["rows", "part_rows"])
def _activate_gradients(
    x, bias, mask, gradient, of_energies, of_columns, result, of_bias,
    rows, columns, x_row, x_column, bias_stride, gradient_row, gradient_column, energy_part, energy_tile,
    columns_part, columns_column, part_rows,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ADDED: tl.constexpr, HAS_MASK: tl.constexpr, HAS_GRADIENT: tl.constexpr,
    COHERENT: tl.constexpr, BY_COLUMN: tl.constexpr, TO_BIAS: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    part, tile = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = column < columns
    shift = tl.zeros((BLOCK_C,), tl.float32)
    by_column = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        shift = tl.load(bias + column * bias_stride, inside, 0.0).to(tl.float32)
    if COHERENT:
        whole = 2 * tl.load(of_energies + part * energy_part + tile * energy_tile).to(tl.float32)
    if BY_COLUMN:
        own_columns = of_columns + part.to(tl.int64) * columns_part + column * columns_column
        by_column = 2 * tl.load(own_columns, inside, 0.0).to(tl.float32)
    reaches = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    first = part.to(tl.int64) * part_rows
    last = tl.minimum(rows - first, part_rows).to(tl.int32)
    own_x, own_gradient, own_result = x + first * x_row, gradient + first * gradient_row, result + first * columns
    for start in range(0, last, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        there = row < last
        at, to = row[:, None] * x_row + column[None, :] * x_column, row[:, None] * columns + column[None, :]
        passing_at = row[:, None] * gradient_row + column[None, :] * gradient_column
        passing = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
        if EVEN:
            value = tl.load(own_x + at).to(tl.float32)
            if HAS_GRADIENT:
                passing = tl.load(own_gradient + passing_at).to(tl.float32)
        else:
            value = tl.load(own_x + at, there[:, None] & inside[None, :], 0.0).to(tl.float32)
            if HAS_GRADIENT:
                passing = tl.load(own_gradient + passing_at, there[:, None] & inside[None, :], 0.0).to(tl.float32)
        if ADDED:
            h, deviation = value, value - shift[None, :]
        else:
            h, deviation = value + shift[None, :], value
        made, slope = _activation(h, KIND)
        counted = there
        if HAS_MASK:
            counted = there & (tl.load(mask + first + row, there, 0) != 0)
        if BY_COLUMN:  # of what was written, rounded as it was
            added = by_column[None, :] * made.to(result.dtype.element_ty).to(tl.float32)
            if HAS_MASK:
                added = tl.where(counted[:, None], added, 0.0)
            passing += added
        total = passing * slope
        if TO_BIAS and not ADDED:
            if EVEN:
                reaches += total
            else:
                reaches += tl.where(there[:, None], total, 0.0)
        if COHERENT:
            own = whole * deviation
            if HAS_MASK or not EVEN:
                own = tl.where(counted[:, None], own, 0.0)
            total += own
            if TO_BIAS and ADDED:
                reaches -= own
        if EVEN:
            tl.store(own_result + to, total.to(result.dtype.element_ty))
        else:
            tl.store(own_result + to, total.to(result.dtype.element_ty), there[:, None] & inside[None, :])
    if TO_BIAS:
        tl.store(of_bias + part.to(tl.int64) * columns + column, tl.sum(reaches, 0), inside)


def cut(rows: int, columns: int) -> tuple[int, int, int]:
    """Into how many parts and tiles, and how many rows a part has. Numbers of rows may be left open by a compiler.

    A matter of shapes alone, so that sums never change their order.
    """
    tiles = triton.cdiv(columns, BLOCK_COLUMNS)
    blocks = (rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    parts = _most(1, _least(min(MOST_PARTS, max(16, PROGRAMS // max(tiles, 1))), blocks))
    return parts, tiles, BLOCK_ROWS * _most(1, (blocks + parts - 1) // parts)


def _is_even(rows: int, columns: int) -> bool:
    """Whether blocks fill a tensor, and nothing has to be looked at to stay inside."""
    return rows > 0 and rows % BLOCK_ROWS == 0 and columns % BLOCK_COLUMNS == 0


@remembered
def _forward_launch(
    rows: int, columns: int, strides: tuple[int, ...], bias_stride: int | None, masked: bool, kind: str, added: bool,
    coherent: bool, by_column: bool, *dtypes: torch.dtype | None,
) -> Launch:  # fmt: skip
    del dtypes  # which make it another launch
    parts, tiles, part_rows = cut(rows, columns)
    numbers = rows, columns, *strides, bias_stride or 0, part_rows, tiles
    facts = KINDS[kind], bias_stride is not None, added, masked, coherent, by_column, _is_even(rows, columns)
    return Launch(_activate, (parts, tiles, 1), (*numbers, *facts, BLOCK_ROWS, BLOCK_COLUMNS), warps=WARPS)


def activate(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, kind: str, added: bool, coherent: bool, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """σ(h), partial sums of (h − b)² (part, tile), and of σ(h)² by column (part, column)."""
    rows = x.reshape(-1, x.shape[-1])
    parts, tiles, _ = cut(*rows.shape)
    result = x.new_empty(x.shape)
    energies = x.new_empty((parts, tiles) if coherent else (0, 0), dtype=torch.float32)
    squares = x.new_empty((parts if by_column else 0, rows.shape[1]), dtype=torch.float32)
    bias_stride, bias_dtype = (None, None) if bias is None else (bias.stride(0), bias.dtype)
    launch = _forward_launch(
        *rows.shape, rows.stride(), bias_stride, mask is not None, kind, added, coherent, by_column, x.dtype, bias_dtype
    )
    launch(
        rows, rows if bias is None else bias, rows if mask is None else mask, result,
        energies if coherent else result, squares if by_column else result,
    )  # fmt: skip
    return result, energies, squares


@remembered
def _backward_launch(
    rows: int, columns: int, strides: tuple[int, ...], bias_stride: int | None, passing: tuple[int, ...] | None,
    of_energies: tuple[int, ...] | None, of_columns: tuple[int, ...] | None, masked: bool, kind: str, added: bool,
    to_bias: bool, *dtypes: torch.dtype | None,
) -> Launch:  # fmt: skip
    del dtypes
    parts, tiles, part_rows = cut(rows, columns)
    none = (0, 0)
    numbers = (
        rows, columns, *strides, bias_stride or 0, *(passing or none), *(of_energies or none), *(of_columns or none),
        part_rows,
    )  # fmt: skip
    present = (given is not None for given in (passing, of_energies, of_columns))
    facts = KINDS[kind], bias_stride is not None, added, masked, *present, to_bias, _is_even(rows, columns)
    return Launch(_activate_gradients, (parts, tiles, 1), (*numbers, *facts, BLOCK_ROWS, BLOCK_COLUMNS), warps=WARPS)


def gradients(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, gradient: Tensor | None, of_energies: Tensor | None,
    of_columns: Tensor | None, kind: str, added: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x, and partial sums (part, column) of that of the bias, none of them if nothing reaches it."""
    rows = x.reshape(-1, x.shape[-1])
    passing = None if gradient is None else gradient.reshape(-1, x.shape[-1])
    to_bias = reaches(bias, of_energies, added)
    result = x.new_empty(x.shape)
    of_bias = x.new_empty((cut(*rows.shape)[0] if to_bias else 0, rows.shape[1]), dtype=torch.float32)
    bias_stride, bias_dtype = (None, None) if bias is None else (bias.stride(0), bias.dtype)
    strides = [
        None if given is None else (*(0, 0), *given.stride())[-2:] for given in (passing, of_energies, of_columns)
    ]  # those of one gradient for all parts are zeros
    launch = _backward_launch(
        *rows.shape, rows.stride(), bias_stride, *strides, mask is not None, kind, added, to_bias, x.dtype, bias_dtype,
        None if passing is None else passing.dtype,
    )  # fmt: skip
    launch(
        rows, rows if bias is None else bias, rows if mask is None else mask, rows if passing is None else passing,
        rows if of_energies is None else of_energies, rows if of_columns is None else of_columns, result,
        of_bias if to_bias else result,
    )  # fmt: skip
    return result, of_bias
