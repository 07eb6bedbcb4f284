"""The counterpart of `triton_energy` for tensors on a CPU: the same functions, with few passes over memory.

On a CPU memory that is fresh costs more than arithmetic. So what is made on the way is made in memory that each thread
keeps, a few megabytes; larger tensors are summed block by block. A sample is one part, and a whole row one tile.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from explicit_dropout.kernels.plain import deviation

BLOCK_ELEMENTS = 2**20
"""How much of a tensor is looked at together: 4 MB. Small blocks take longer, since each costs a handful of calls."""


class _Room(threading.local):
    """Memory of a thread, float32, used again for every block."""

    kept = torch.empty(0)

    def like(self, block: Tensor) -> Tensor:
        size = block.numel()
        if self.kept.numel() < size:
            self.kept = torch.empty(size)
        return self.kept[:size].view(block.shape)


_room = _Room()


def _deviation(block: Tensor, bias: Tensor | None, flags: Tensor | None) -> Tensor:
    """`deviation`, in the memory that is kept; valid until the next block."""
    if bias is None or block.dtype != torch.float32 or bias.dtype != torch.float32:
        return deviation(block, bias, flags)
    shifted = torch.sub(block, bias, out=_room.like(block))
    return shifted if flags is None else shifted.masked_fill_(~flags[..., None], 0)


def sources(rows: int, columns: int, samples: int, by_column: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which partial sum each row and each column belongs to."""
    row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
    return row // max(1, rows // max(samples, 1)), column if by_column else torch.zeros_like(column)


def _by_sample(x: Tensor, samples: int) -> Tensor:
    """(sample, row, column)."""
    columns = x.shape[-1]
    return x.reshape(samples, x.numel() // max(1, samples * columns), columns)


def energies_of(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, lower: torch.dtype | None, by_column: bool,
    samples: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Sums of (x − b)² of x (*batch, column), what the backward pass needs of the bias, x in lower precision.

    Sums are (sample, column) or (sample, 1). Of the bias, (sample + 1, column): its sums and a copy.
    """
    lowered = None if lower is None else x.to(lower)
    rows, flags = _by_sample(x if lowered is None else lowered, samples), _flags(mask, samples)
    energies, sums = [], []
    step = max(1, BLOCK_ELEMENTS // max(1, samples * rows.shape[-1]))
    for start in range(0, max(1, rows.shape[1]), step):
        block = slice(start, start + step)
        deviations = _deviation(rows[:, block], bias, None if flags is None else flags[:, block])
        if bias is not None:
            sums.append(deviations.sum(1))
        if by_column:
            energies.append(torch.mul(deviations, deviations, out=_room.like(deviations)).sum(1))
        else:
            lengths = torch.linalg.vector_norm(deviations, dim=-1)  # of rows: reads them once and writes nothing
            energies.append(lengths.square().sum(1, keepdim=True))
    total = energies[0] if len(energies) == 1 else torch.stack(energies).sum(0)
    if bias is None:
        return total, None, lowered
    summed = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
    return total, torch.cat([summed, bias[None].to(total.dtype)]), lowered


def gradient_of(
    x: Tensor, sums: Tensor | None, mask: Tensor | None, gradient: Tensor | None, weights: Tensor, dtype: torch.dtype,
    by_column: bool, offset: int, width: int, bias_dtype: torch.dtype | None, samples: int = 1,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """`gradient` plus that of the energies of x, their gradients being `weights`; and the gradient of the bias.

    Energies are those of `width` columns from `offset` on; the others pass their gradient on.
    """
    del by_column  # the shape of the weights says it
    doubled, whole = 2 * weights, width == x.shape[-1]
    slope = None if sums is None else -(doubled * sums[:-1]).sum(0).to(bias_dtype)
    own = _by_sample(x if whole else x[..., offset : offset + width], samples)
    bias = None if sums is None else sums[-1]
    deviations, each = deviation(own, bias, _flags(mask, samples)), doubled[:, None]
    if gradient is not None and whole:
        spare = deviations if bias is not None and dtype == gradient.dtype == deviations.dtype else None
        result = torch.addcmul(_by_sample(gradient, samples), deviations, each, out=spare)
        return result.to(dtype).reshape(x.shape), slope
    if whole:
        return (deviations * each).to(dtype).reshape(x.shape), slope
    if gradient is None:
        result = torch.zeros(x.shape, dtype=dtype, device=x.device)
    else:
        result = gradient.to(dtype, copy=True, memory_format=torch.contiguous_format)
    result.view(samples, -1, x.shape[-1])[..., offset : offset + width].addcmul_(deviations, each)
    return result, slope


def _flags(mask: Tensor | None, samples: int) -> Tensor | None:
    return None if mask is None else mask.view(torch.bool).view(samples, -1)
