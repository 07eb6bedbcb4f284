"""Many terms, one number: Σ λ J over all sites, in as few operations as there are kinds of terms, not sites.

A model of a few layers has dozens of sites, and a handful of tiny operations for each of them, forward and backward,
costs more on a GPU than all penalties together. So what belongs together is put end to end and weighed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from explicit_dropout import kernels
from explicit_dropout.hooks.calls import in_transform


@dataclass(eq=False, slots=True)
class Share:
    """What one term adds to the penalty: λ · factor · Σ energies / counted, the energies times `norms` if given.

    energies: any shape; with norms (column) or (part, column), which are summed over parts first. Instead of norms a
    weight (out, column) may be given, one that the kernels serve, to have them taken together with those of others.
    """

    site: str
    strength: float
    factor: float
    counted: int | Tensor
    energies: Tensor
    norms: Tensor | None = None
    weight: Tensor | None = None


class Total:
    """The penalty and, if asked, the term of every site. Keeps the weights of the last call: they rarely change."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Tensor, Tensor]] = {}
        self._found: list[tuple[list[str], list[int], Tensor, Tensor]] = []

    def of(self, shares: Iterable[Share]) -> Tensor:
        """Σ_shares λ · factor · Σ energies / counted, float32."""
        kept: dict[Any, tuple[Tensor, Tensor]] = {}
        self._found = []
        total: Tensor | None = None
        for (device, dtype, multiplied, weighted), group in _grouped(shares).items():
            energies = [share.energies for share in group]
            if weighted:
                norms = [kernels.norms([share.weight for share in group if share.weight is not None])]
            else:
                norms = [share.norms for share in group if share.norms is not None]
            lengths = [tensor.shape[-1] if multiplied or weighted else tensor.numel() for tensor in energies]
            weights, units = self._weights(group, lengths, device, dtype, kept)
            if in_transform():
                plain = [torch.cat([tensor.reshape(-1) for tensor in energies])]
                values = _product(_factors(energies, norms) if norms else plain)
                part = (values * weights).sum()
            else:
                part, values = _weighed(weights, len(norms), *energies, *norms)
            sites = [share.site for share in group]  # and nothing of the graph
            self._found.append((sites, lengths, values.detach(), units))
            total = part if total is None else total + part.to(total.device)
        self._kept = kept
        return torch.zeros(()) if total is None else total.float()

    def terms(self) -> dict[str, Tensor]:
        """The unweighted J of every site at the last call, in the order in which they came."""
        terms: dict[str, Tensor] = {}
        for sites, lengths, values, units in self._found:
            for site, term in zip(sites, _sums((values * units).float(), lengths), strict=True):
                terms[site] = terms[site] + term if site in terms else term
        return terms

    def _weights(
        self, group: list[Share], lengths: list[int], device: torch.device, dtype: torch.dtype, kept: dict[Any, Any]
    ) -> tuple[Tensor, Tensor]:
        """λ · factor / counted for every value of a group, and the same without λ."""
        unknown = [isinstance(share.counted, Tensor) for share in group]
        units = [
            share.factor / (1 if later else share.counted or 1) for share, later in zip(group, unknown, strict=True)
        ]
        numbers = [share.strength * unit for share, unit in zip(group, units, strict=True)]
        key = device, dtype, *numbers, *units, *lengths
        found = self._kept.get(key)
        if found is None:
            with torch.inference_mode(False):  # kept, and used outside of it as well
                both = _moved(torch.tensor([numbers, units], dtype=dtype, device="cpu"), device)
                if set(lengths) != {1}:  # spread where it is used: compiled code leaves a number for every token
                    repeats = _moved(torch.tensor(lengths, device="cpu"), device)
                    both = both.repeat_interleave(repeats, dim=1, output_size=sum(lengths))
                found = both[0], both[1]
        kept[key] = found
        if not any(unknown):
            return found
        one = torch.ones((), dtype=torch.long, device=device)  # where the numbers have been divided already
        counts = [share.counted.clamp(min=1) if isinstance(share.counted, Tensor) else one for share in group]
        counted = torch.cat([count.expand(length) for count, length in zip(counts, lengths, strict=True)])
        return found[0] / counted, found[1] / counted


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, without waiting for a GPU."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _sums(values: Tensor, lengths: list[int]) -> list[Tensor]:
    """The sum of each piece of so many values, neighbours of one length at once."""
    found: list[Tensor] = []
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    pieces = torch.split(values, [length * number for length, number in runs])
    for (length, number), piece in zip(runs, pieces, strict=True):
        found += piece.view(number, length).sum(1).unbind()
    return found


def _grouped(shares: Iterable[Share]) -> dict[tuple[torch.device, torch.dtype, bool, bool], list[Share]]:
    """Shares of one kind together: on one device, of one precision, with norms, with weights or without."""
    groups: dict[tuple[torch.device, torch.dtype, bool, bool], list[Share]] = {}
    for share in shares:
        energies = share.energies
        kind = energies.device, energies.dtype, share.norms is not None, share.weight is not None
        if kind in groups:
            groups[kind].append(share)
        else:
            groups[kind] = [share]
    return groups


class _Weighed(torch.autograd.Function):
    """The weighted sum of energies and what was weighed, as one node of the graph.

    It gives every energy its gradient by a few operations for all. Arguments: weights, how many norms there are, the
    energies, the norms.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, number: int, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        factors = _factors(tensors[: len(tensors) - number], tensors[len(tensors) - number :])
        values = _product(factors)
        ctx.save_for_backward(weights, *(factors if number else ()), *tensors)
        ctx.number = number
        ctx.mark_non_differentiable(values)
        ctx.set_materialize_grads(False)
        return (values * weights).sum(), values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weights, *tensors = ctx.saved_tensors
        each = gradients[0] * weights
        if not ctx.number:
            return None, None, *torch._C._nn.unflatten_dense_tensors(each, tensors)
        first, second, *tensors = tensors
        energies, norms = tensors[: -ctx.number], tensors[-ctx.number :]
        if torch.is_grad_enabled():  # somebody goes on to differentiate this
            first, second = _factors(energies, norms)
        return None, None, *_spread(each * second, energies), *_spread(each * first, norms)


_weighed: Callable[..., tuple[Tensor, Tensor]] = super(torch.autograd.Function, _Weighed).apply
"""`_Weighed.apply` without its look for function transforms, for where there are none."""


def _factors(energies: Sequence[Tensor], norms: Sequence[Tensor]) -> list[Tensor]:
    """The energies end to end; with norms the columns' energies, and the norms beside them."""
    if not norms:
        return [torch._C._nn.flatten_dense_tensors(list(energies))]
    return [_summed(energies), _summed(norms).to(energies[0].dtype)]


def _product(factors: list[Tensor]) -> Tensor:
    return factors[0] if len(factors) == 1 else factors[0] * factors[1]


def _runs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of equally many parts together."""
    return [list(run) for _, run in groupby(tensors, lambda tensor: tensor.shape[:-1])]


def _summed(tensors: Sequence[Tensor]) -> Tensor:
    """Columns end to end, those that come in parts summed over them."""
    return torch.cat([
        torch.cat(run, -1) if run[0].ndim == 1 else torch.cat(run, -1).sum(0) for run in _runs(tensors)
    ])  # fmt: skip


def _spread(values: Tensor, tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The way back: to each tensor its columns, to each of its parts the same."""
    runs = [(run, [tensor.shape[-1] for tensor in run]) for run in _runs(tensors)]
    for own, (run, widths) in zip(values.split_with_sizes([sum(w) for _, w in runs]), runs, strict=True):
        yield from own.expand(*run[0].shape[:-1], -1).split_with_sizes(widths, -1)
