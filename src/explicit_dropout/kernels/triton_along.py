"""Triton: sums along the tokens of a sample, of squares on their way in and of slopes on their way out.

    S_ac = Σ_i x_ic² over the tokens i from a on, or up to a,   slopes  2 g x_ac Σ_i v_ic  of x

One program goes along all tokens of some columns, a block at a time. Nothing but positive numbers is added to squares,
and what has been added is never taken away again: sums do not cancel.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from explicit_dropout.kernels.launch import Launch, remembered

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-any-return"

TOKENS, COLUMNS = 128, 32
"""Of a tile. Few columns: there are programs for all of them, but only one along the tokens."""


@triton.jit
def _places(tensor, sample, token, column, tensor_sample, tensor_token):
    return tensor + sample * tensor_sample + token.to(tl.int64)[:, None] * tensor_token + column[None, :]


@triton.jit(do_not_specialize=["tokens"])
def _reach_sums(
    x, result, tokens, x_sample, x_token, columns,
    LATER: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, tokens, TOKENS):
        order = first + tl.arange(0, TOKENS)
        token = order
        if LATER:
            token = tokens - 1 - order
        inside = (order < tokens)[:, None] & (column < columns)[None, :]
        value = tl.load(_places(x, sample, token, column, x_sample, x_token), inside, 0.0).to(tl.float32)
        squares = value * value
        sums = total[None, :] + tl.cumsum(squares, 0)
        tl.store(_places(result, sample, token, column, tokens.to(tl.int64) * columns, columns), sums, inside)
        total += tl.sum(squares, 0)


@triton.jit(do_not_specialize=["tokens"])
def _reach_inputs(
    values, x, slopes, result, tokens, value_sample, value_token, x_sample, x_token, columns,
    ORDER: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sample, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    slope = 2 * tl.load(slopes + sample)
    total = tl.zeros((COLUMNS,), tl.float32)
    for first in range(0, tokens, TOKENS):
        order = first + tl.arange(0, TOKENS)
        token = order
        if ORDER < 0:
            token = tokens - 1 - order
        inside = (order < tokens)[:, None] & (column < columns)[None, :]
        value = tl.load(_places(values, sample, token, column, value_sample, value_token), inside, 0.0).to(tl.float32)
        own = tl.load(_places(x, sample, token, column, x_sample, x_token), inside, 0.0).to(tl.float32)
        sums = value
        if ORDER != 0:
            sums = total[None, :] + tl.cumsum(value, 0)
            total += tl.sum(value, 0)
        place = _places(result, sample, token, column, tokens.to(tl.int64) * columns, columns)
        tl.store(place, (slope * own * sums).to(result.dtype.element_ty), inside)


@remembered
def _launch(kernel: Any, batch: int, numbers: tuple[int, ...], order: int | bool, *dtypes: torch.dtype) -> Launch:
    """How a kernel is launched on such tensors; `dtypes` make it another launch."""
    del dtypes
    columns = numbers[-1]
    return Launch(kernel, (batch, triton.cdiv(columns, COLUMNS), 1), (*numbers, order, TOKENS, COLUMNS))


def sums(x: Tensor, later: bool) -> Tensor:
    """Sums of squares over a token and all after it, or before it, (batch, token, column), in bfloat16."""
    batch, tokens, columns = x.shape
    found = x.new_empty(x.shape, dtype=torch.bfloat16)
    _launch(_reach_sums, batch, (tokens, *x.stride()[:2], columns), later, x.dtype)(x, found)
    return found


def of_inputs(values: Tensor, x: Tensor, slopes: Tensor, order: int) -> Tensor:
    """2 g x ∘ Σ v, like x without gaps, over a token and all after it (order −1), all before it (1), or it alone."""
    batch, tokens, columns = x.shape
    found = x.new_empty(x.shape)
    numbers = tokens, *values.stride()[:2], *x.stride()[:2], columns
    _launch(_reach_inputs, batch, numbers, order, values.dtype, x.dtype)(values, x, slopes, found)
    return found
