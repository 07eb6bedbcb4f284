"""Weights as they act when the penalty is read: whole or sharded over ranks, with low-rank adapters on top."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.kernels.plain import wide


def is_sharded(weight: Tensor) -> bool:
    """Whether the weight is spread over ranks (a DTensor, as under FSDP2)."""
    dtensor = sys.modules.get("torch.distributed.tensor")  # who has sharded anything has imported it
    return dtensor is not None and isinstance(weight, dtensor.DTensor)


def modules_under_fsdp(model: nn.Module) -> set[nn.Module]:
    """The modules of a model whose weights `fully_shard` gathers for each call and takes away after it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    units = [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]
    return {module for unit in units for module in unit.modules()}


def acting(module: nn.Module, weight: Any) -> Tensor:
    """The weight of a layer with what active low-rank adapters (LoRA by peft) add to it."""
    if is_sharded(weight):  # whatever part of it is used, its gradient comes back sharded as it is
        weight = weight.redistribute(weight.device_mesh, weight.placements)
    if "base_layer" not in module._modules:
        return weight  # type: ignore[no-any-return]
    obstacle = adapter_obstacle(module)
    if obstacle:
        raise UnsupportedSiteError(obstacle)
    for name in _active_adapters(module):
        weight = weight + module.get_delta_weight(name)  # type: ignore[operator]
    return weight  # type: ignore[no-any-return]


def adapter_obstacle(module: nn.Module) -> str | None:
    """Why the effective weight of a layer that an adapter library has wrapped is not known, if so."""
    if "base_layer" in module._modules and not hasattr(module, "active_adapters"):
        name = f"{type(module).__module__}.{type(module).__qualname__}"
        return f"{name} holds its layer as 'base_layer', as peft does, but is none of peft's: what it adds is not known"
    for name in _active_adapters(module):
        kind = type(module).__module__
        plain = name in getattr(module, "lora_A", ()) and getattr(module.lora_B[name], "bias", None) is None  # type: ignore[index]
        if not plain or name in getattr(module, "lora_variant", ()) or getattr(module, "use_dora", {}).get(name):
            return f"its adapter {name!r} ({kind}) is no plain LoRA, so what it adds to the weight is not known"
    return None


def _active_adapters(module: nn.Module) -> list[str]:
    if getattr(module, "base_layer", None) is None or getattr(module, "disable_adapters", False):
        return []
    if getattr(module, "merged", False):
        return []
    holders = [getattr(module, name, ()) for name in getattr(module, "adapter_layer_names", ())]
    return [name for name in getattr(module, "active_adapters", ()) if any(name in holder for holder in holders)]


def sharded_energy(parts: list[Tensor], weight: Any, counted: int | Tensor) -> Tensor:
    """Σ_j s_j ‖W_:j‖² / counted for a weight that is spread over ranks, each of which counts its own tokens.

    The gradient of the weight comes from the columns of all of them, as means over what each has counted.
    """
    divisor = counted.clamp(min=1) if isinstance(counted, Tensor) else counted or 1
    columns = torch.stack([part.sum(0) if part.ndim > 1 else part for part in parts]).sum(0) / divisor
    norms = wide(weight).square().sum(0).full_tensor().to(columns.dtype)  # type: ignore[attr-defined]
    fixed = norms.detach()
    energy: Tensor = (columns * fixed + mean_over_ranks(columns, weight) * (norms - fixed)).sum()
    return energy


def mean_over_ranks(tensor: Tensor, weight: Any) -> Tensor:
    """The mean over the ranks that a sharded weight is spread over, without gradient."""
    mesh, mean = weight.device_mesh, tensor.detach().clone()
    for dimension in range(mesh.ndim):
        torch.distributed.all_reduce(mean, group=mesh.get_group(dimension))
    return mean / float(mesh.size())
