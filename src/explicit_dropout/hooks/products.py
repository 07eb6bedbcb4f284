"""What linear layers do to their input, by the steps by which they do it.

A compiler makes once what is made twice by the same steps, and twice what is made by others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explicit_dropout.kernels.energy import TENSORS, lowered


def is_plain_linear(module: nn.Module) -> bool:
    """Whether a module does nothing to its input but multiply it: then it does not matter who lowers its precision."""
    kind = type(module)
    return kind is nn.Linear or (kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils")


def lowered_input(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a linear layer in the precision in which autocast gives it to the product, and keeps it."""
    lower = lowered(x)
    if lower is None:
        return x
    if is_plain_linear(module) and type(module) is not nn.Linear:  # Conv1D has rows before autocast lowers them
        return x.reshape(-1, x.shape[-1]).to(lower).view(x.shape)
    return x.to(lower)


def product_and_bias(module: nn.Module, x: Tensor, *, written_out: bool = False) -> tuple[Tensor, Tensor] | None:
    """x Wᵀ and b, where a module does nothing but add them up.

    written_out: whether it may go on to an activation that is written out, operation by operation. Models with Conv1D
    have such, and the compiler would make the gradient twice, with and without what belongs to x Wᵀ alone.
    """
    if not is_plain_linear(module) or (written_out and type(module) is not nn.Linear):
        return None
    weight: Any = module.weight
    bias: Any = module.bias
    if type(weight) not in TENSORS or type(bias) not in TENSORS:  # sharded, quantised; or there is none
        return None
    if type(module) is nn.Linear:
        return F.linear(x, weight), bias
    return torch.mm(x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1]), bias
