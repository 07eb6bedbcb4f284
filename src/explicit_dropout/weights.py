"""Weights as they are when the penalty is read: whole, or sharded over ranks."""

from __future__ import annotations

import torch
from torch import Tensor


def is_sharded(weight: Tensor) -> bool:
    """Whether the weight is spread over ranks (a DTensor, as under FSDP2)."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(weight, DTensor)


def column_norms(weight: Tensor) -> Tensor:
    """‖W_:j‖² for every input j, float32 at least, whole on every rank."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    norms = wide.square().sum(0)
    return norms.full_tensor() if is_sharded(norms) else norms  # type: ignore[attr-defined]


def mean_over_ranks(tensor: Tensor) -> Tensor:
    """The mean over all ranks, without gradient."""
    mean = tensor.detach().clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()
