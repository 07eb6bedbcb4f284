"""The least that a penalty can cost beside a model: bytes that its own kernels have to move, over measured bandwidth.

A pass is one read or one write of a tensor, in the precision that the model has it in.

    energy of an output          4   read it; in the backward pass read it and its gradient, write the gradient
    column energies of an input  4   likewise; 1 where autocast lowers the input: it is summed in the pass that lowers
                                     it, and its gradient is made in the pass that widens the gradient again
    the same around an activation that kernels make (`kernels.activated`): 0, since it reads and writes both anyway
    column norms of a weight     4   read it; in the backward pass read it, add to its gradient
    scores                       4   for each of queries and keys that enters, whatever is made of them

A step that is compiled as a whole can fall below: it may take an energy along in a pass that the model makes anyway.
Products of matrices are not counted. Attended values under a law with a variance need the attention weights, which
fused attention never writes: they have no floor here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hosts import Host
from measure import seconds
from steps import autocast
from torch import Tensor, nn
from treatments import Treatment

import explicit_dropout as xd
from explicit_dropout.functional.batch import coherent_part_needed
from explicit_dropout.kernels import activation_of, lowered
from explicit_dropout.sites import Projection, Site


def least_bytes(host: Host, treatment: Treatment, device: str) -> int | None:
    """What an explicit treatment moves at least in a step; None for others and where no floor is known."""
    noise = treatment.noise
    if noise is None or (noise.variance and "attended_value" in treatment.components):
        return None
    with torch.device(device):
        model = host.make(0.0).train()
    sites = [site for site in xd.find_sites(model) if site.component in treatment.components]
    calls = Calls(model)
    with torch.no_grad(), autocast(device):
        model(**{name: tensor.to(device) for name, tensor in host.batch.items()})
    return sum(site_bytes(site, noise, calls) for site in sites)


class Calls:
    """What the layers of a model are given and make, in bytes, as the last forward pass had it."""

    def __init__(self, model: nn.Module) -> None:
        self.inputs: dict[nn.Module, tuple[int, bool]] = {}
        self.row_bytes: dict[nn.Module, int] = {}
        self.ends: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.activations: list[tuple[Tensor, Tensor]] = []  # inputs and outputs of those that kernels make
        for module in model.modules():
            if activation_of(module) is not None:
                module.register_forward_hook(lambda _, args, output: self.activations.append((args[0], output)))
            if isinstance(getattr(module, "weight", None), Tensor) and module.weight.ndim == 2:  # type: ignore[union-attr]
                module.register_forward_hook(self.see)

    def see(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        x, lower = args[0], lowered(args[0])
        self.ends[module] = x, output
        size = (x if lower is None else torch.empty((), dtype=lower)).element_size()
        self.inputs[module] = x.numel() * size, lower is not None
        self.row_bytes[module] = output.numel() // output.shape[-1] * output.element_size()

    def output(self, projection: Projection) -> int:
        """Bytes of what a projection has made, if they have to be read for themselves."""
        made = self.ends[projection.module][1]
        if any(made is given for given, _ in self.activations):
            return 0
        return self.row_bytes[projection.module] * projection.shape[0]

    def columns(self, projection: Projection) -> int:
        """Bytes that the column energies of its input and of its weight cost."""
        size, is_lowered = self.inputs[projection.module]
        given = self.ends[projection.module][0]
        if any(given is made for _, made in self.activations):
            size = 0
        weight, _ = projection.parameters()
        return (1 if is_lowered else 4) * size + 4 * weight.numel() * weight.element_size()


def site_bytes(site: Site, noise: xd.Noise, calls: Calls) -> int:
    coherent, incoherent = coherent_part_needed(noise), bool(noise.variance)
    if site.component in ("value", "attended_value", "feed_forward"):
        made = calls.output(site.projection) if coherent else 0  # type: ignore[arg-type]
        return 4 * made + (calls.columns(site.projection) if incoherent else 0)  # type: ignore[arg-type]
    attention: Any = site.source.described
    dropped = {"query", "key"} if site.component == "query_key" else {site.component}
    others = {"key" if role == "query" else "query" for role in dropped}
    sides = {"query", "key"} if coherent else others
    total = sum(4 * calls.output(getattr(attention, side)) for side in sides)
    return total + sum(calls.columns(getattr(attention, role)) for role in dropped if incoherent)


def ceilings() -> dict[str, float]:
    """What this GPU does at its best: bytes a second of a large copy, FLOP a second of a large product in bfloat16."""
    source = torch.empty(2**29, dtype=torch.bfloat16, device="cuda").normal_()
    target, side = torch.empty_like(source), 8192
    left, right = source[: side * side].view(side, side), source[side * side : 2 * side * side].view(side, side)

    def rate(work: float, function: Callable[[], object]) -> float:
        return work / seconds(function, "cuda", budget=0.1)[0]

    return {
        "copy_bytes_per_second": rate(2 * source.numel() * source.element_size(), lambda: target.copy_(source)),
        "matmul_flop_per_second": rate(2 * side**3, lambda: left @ right),
    }
