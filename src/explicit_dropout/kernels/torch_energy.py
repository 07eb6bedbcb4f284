"""The counterpart of `triton_energy` for tensors on a CPU: the same functions, with few passes over memory.

On a CPU memory that is fresh costs more than arithmetic. So what is made on the way is made in memory that each thread
keeps, a few megabytes; larger tensors are summed block by block. A sample is one part, and a whole row one tile.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from explicit_dropout.kernels.plain import deviation

BLOCK_ELEMENTS = 2**20
"""How much of a tensor is looked at together: 4 MB. Small blocks take longer, since each costs a handful of calls."""
SMALL_ELEMENTS = 2**13
"""So little that fresh memory costs less than two calls to find some that is kept."""


class _Room(threading.local):
    """Memory of a thread, float32, used again for every block."""

    kept = torch.empty(0, dtype=torch.float32, device="cpu")

    def of(self, shape: torch.Size) -> Tensor | None:
        """A place for a result of this shape; None where it may as well be fresh."""
        size = shape.numel()
        if size < SMALL_ELEMENTS:
            return None
        if self.kept.numel() < size:
            with torch.inference_mode(False):  # it may be asked for in there, and is used outside of it as well
                self.kept = torch.empty(size, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
        return self.kept[:size].view(shape)


room = _Room()


def _deviation(block: Tensor, bias: Tensor | None, flags: Tensor | None) -> Tensor:
    """`deviation`, in the memory that is kept; valid until the next block."""
    if bias is None or block.dtype != torch.float32 or bias.dtype != torch.float32:
        return deviation(block, bias, flags)
    shifted = torch.sub(block, bias, out=room.of(block.shape))
    return shifted if flags is None else shifted.masked_fill_(~flags[..., None], 0)


def sources(rows: int, columns: int, samples: int, by_column: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which partial sum each row and each column belongs to."""
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return row // max(1, rows // max(samples, 1)), column if by_column else torch.zeros_like(column)


def _by_row(x: Tensor, samples: int) -> Tensor:
    """(sample, row, column), or (row, column) of a single sample: there are more calls than work where it matters."""
    columns = x.shape[-1]
    rows = x.numel() // max(1, samples * columns)
    return x.reshape(rows, columns) if samples == 1 else x.reshape(samples, rows, columns)


def _flags(mask: Tensor | None, samples: int) -> Tensor | None:
    """Which rows count, as `_by_row` has them."""
    if mask is None:
        return None
    flags = mask.view(torch.bool)
    return flags if samples == 1 else flags.view(samples, -1)


def energies_of(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, lower: torch.dtype | None, by_column: bool,
    samples: int = 1,
) -> tuple[Tensor, tuple[Tensor, ...], Tensor | None]:  # fmt: skip
    """Sums of (x − b)² of x (*batch, column), what the backward pass needs of the bias, x in lower precision.

    Sums are (sample, column) or (sample, 1). For the bias, those of x − b (sample, column) and a copy of it.
    """
    lowered = None if lower is None else x.to(lower)
    rows, flags = _by_row(x if lowered is None else lowered, samples), _flags(mask, samples)
    number, step = rows.shape[-2], max(1, BLOCK_ELEMENTS // max(1, samples * rows.shape[-1]))
    if number <= step:
        total, summed = _block(rows, bias, flags, by_column)
    else:
        cuts = [slice(start, start + step) for start in range(0, number, step)]
        found = [_block(rows[..., c, :], bias, None if flags is None else flags[..., c], by_column) for c in cuts]
        total = torch.stack([energies for energies, _ in found]).sum(0)
        summed = None if bias is None else torch.stack([sums for _, sums in found if sums is not None]).sum(0)
    if bias is None or summed is None:
        return total, (), lowered
    return total, (summed, bias.to(total.dtype, copy=True)), lowered


def _block(rows: Tensor, bias: Tensor | None, flags: Tensor | None, by_column: bool) -> tuple[Tensor, Tensor | None]:
    """Energies of some rows, (sample, column) or (sample, 1), and sums of their deviations if there is a bias."""
    single = rows.ndim == 2
    deviations = _deviation(rows, bias, flags)
    sums = None if bias is None else deviations.sum(-2, keepdim=single)
    if by_column:
        return torch.mul(deviations, deviations, out=room.of(deviations.shape)).sum(-2, keepdim=single), sums
    lengths = torch.linalg.vector_norm(deviations, dim=-1, keepdim=True)  # of rows: reads them once, writes nothing
    return lengths.square_().sum(-2, keepdim=single), sums


def gradient_of(
    x: Tensor, of_bias: Sequence[Tensor], mask: Tensor | None, gradient: Tensor | None, weights: Tensor,
    dtype: torch.dtype, by_column: bool, offset: int, width: int, bias_dtype: torch.dtype | None, samples: int = 1,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gradient` plus that of the energies of x, their gradients being `weights`; and the gradient of the bias.

    Energies are those of `width` columns from `offset` on; the others pass their gradient on.
    """
    del by_column  # the shape of the weights says it
    whole, slope, bias = width == x.shape[-1], None, None
    if of_bias:
        sums, bias = of_bias
        slope = (sums * weights).mul_(-2)
        slope = slope.view(-1) if samples == 1 else slope.sum(0)
        slope = slope if slope.dtype == bias_dtype else slope.to(bias_dtype)
    own, each, passing = x if whole else x[..., offset : offset + width], weights, gradient
    flags = None if mask is None else mask.view(torch.bool).view(x.shape[:-1])
    if samples != 1 or x.ndim == 1:
        own, flags = _by_row(own, samples), _flags(mask, samples)
        each = weights if samples == 1 else weights[:, None]
        passing = gradient if gradient is None else _by_row(gradient, samples)
    deviations = deviation(own, bias, flags)
    if whole and passing is not None:
        spare = deviations if bias is not None and dtype == passing.dtype == deviations.dtype else None
        result = torch.addcmul(passing, deviations, each, value=2, out=spare)
    elif whole:
        result = (deviations * each).mul_(2)
    else:
        if gradient is None:
            result = torch.zeros(x.shape, dtype=dtype, device=x.device)
        else:
            result = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
        result[..., offset : offset + width].view(own.shape).addcmul_(deviations, each, value=2)
    result = result if result.dtype == dtype else result.to(dtype)
    return result if result.shape == x.shape else result.view(x.shape), slope
