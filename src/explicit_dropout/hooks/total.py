"""Many terms, one number: Σ λ J over all sites, in as few operations as there are kinds of terms, not sites.

A model of a few layers has dozens of sites, and a handful of tiny operations for each of them, forward and backward,
costs more on a GPU than all penalties together. So what belongs together is put end to end and weighed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False, slots=True)
class Share:
    """What one term adds to the penalty: λ · factor · Σ energies / counted, the energies times `norms` if given.

    energies: any shape; with norms (column) or (part, column), which are summed over parts first.
    """

    site: str
    strength: float
    factor: float
    counted: int | Tensor
    energies: Tensor
    norms: Tensor | None = None


class Total:
    """The penalty and, if asked, the term of every site. Keeps the weights of the last call: they rarely change."""

    def __init__(self) -> None:
        self._kept: dict[Any, Tensor] = {}
        self._found: list[tuple[list[Share], list[int], Tensor]] = []

    def of(self, shares: Sequence[Share]) -> Tensor:
        """Σ_shares λ · factor · Σ energies / counted, float32."""
        kept: dict[Any, Tensor] = {}
        self._found = []
        total: Tensor | None = None
        for (device, dtype, _), group in _grouped(shares, _kind):
            values, lengths = _joined(group)
            self._found.append((group, lengths, values.detach()))
            weights = self._weights(group, lengths, device, dtype, kept)
            part = (values * weights).sum()
            total = part if total is None else total + part.to(total.device)
        self._kept = kept
        return torch.zeros(()) if total is None else total.float()

    def terms(self) -> dict[str, Tensor]:
        """The unweighted J of every site at the last call, in the order in which they came."""
        terms: dict[str, Tensor] = {}
        for group, lengths, values in self._found:
            for share, energies in zip(group, torch.split(values, lengths), strict=True):
                counted = share.counted.clamp(min=1) if isinstance(share.counted, Tensor) else max(share.counted, 1)
                term = (share.factor * energies.sum() / counted).float()
                terms[share.site] = terms[share.site] + term if share.site in terms else term
        return terms

    def _weights(
        self, group: list[Share], lengths: list[int], device: torch.device, dtype: torch.dtype, kept: dict[Any, Tensor]
    ) -> Tensor:
        """λ · factor / counted for every value of a group."""
        numbers = tuple(
            share.strength * share.factor / (1 if isinstance(share.counted, Tensor) else max(share.counted, 1))
            for share in group
        )
        key = (device, dtype, numbers, tuple(lengths))
        weights = self._kept.get(key)
        if weights is None:
            weights = torch.tensor(numbers, dtype=dtype)
            weights = weights.repeat_interleave(torch.tensor(lengths)) if max(lengths) > 1 else weights
            if device.type == "cuda":  # without waiting for the GPU
                weights = weights.pin_memory().to(device, non_blocking=True)
        kept[key] = weights
        if not any(isinstance(share.counted, Tensor) for share in group):
            return weights
        counts = [torch.as_tensor(share.counted, device=device).clamp(min=1) for share in group]
        return weights / torch.cat([count.expand(length) for count, length in zip(counts, lengths, strict=True)])


def _kind(share: Share) -> tuple[torch.device, torch.dtype, bool]:
    return share.energies.device, share.energies.dtype, share.norms is not None


def _grouped(shares: Sequence[Share], key: Callable[[Share], Any]) -> list[tuple[Any, list[Share]]]:
    groups: dict[Any, list[Share]] = {}
    for share in shares:
        groups.setdefault(key(share), []).append(share)
    return list(groups.items())


def _joined(group: list[Share]) -> tuple[Tensor, list[int]]:
    """The energies of shares of one kind end to end, and how many each has."""
    energies = [share.energies for share in group]
    norms = [share.norms for share in group if share.norms is not None]
    if norms:
        return _summed(energies) * _summed(norms).to(energies[0].dtype), [norm.shape[-1] for norm in norms]
    if all(tensor.ndim == 0 for tensor in energies):
        return torch.stack(energies), [1] * len(energies)
    return torch.cat([tensor.reshape(-1) for tensor in energies]), [tensor.numel() for tensor in energies]


def _summed(tensors: list[Tensor]) -> Tensor:
    """Columns end to end, those that come in parts summed over them, neighbours of equally many parts at once."""
    runs = [list(run) for _, run in groupby(tensors, lambda tensor: tensor.shape[:-1])]
    return torch.cat([torch.cat(run, -1) if run[0].ndim == 1 else torch.cat(run, -1).sum(0) for run in runs])
