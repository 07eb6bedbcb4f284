"""What a function of torch does with a dropped tensor: a linear map of it, attention, or anything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from explicit_dropout.hooks.draws import Use
from explicit_dropout.hooks.torch_functions import MULTIPLYING, PRODUCTS, bound


def use_of(item: Tensor, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Use:
    """What a function does with a dropped tensor."""
    if func is F.linear:
        call = bound(F.linear, args, kwargs)
        return Use("linear", item, call["weight"]) if item is call["input"] else Use(None)
    if func is torch.addmm:
        call = bound(torch.addmm, args, kwargs)
        return Use("linear", item, call["mat2"].mT * call["alpha"]) if item is call["mat1"] else Use(None)
    if func in PRODUCTS:
        call = bound(torch.matmul, args, kwargs)
        other = call.get("other", call.get("mat2"))
        if item is call["input"] and isinstance(other, Tensor) and other is not item:
            return Use("linear", item, other.mT) if other.ndim == 2 else _product(item, other)
    if func is torch.einsum:
        return _einsum(item, *args)
    others = (other for other in args if isinstance(other, Tensor) and other is not item)
    return Use(None, masks=func in MULTIPLYING and not item.requires_grad and any(x.requires_grad for x in others))


def _product(weights: Tensor, values: Tensor) -> Use:
    return Use("attention_weights", weights, values) if weights.ndim == values.ndim > 2 else Use(None)


def _einsum(item: Tensor, equation: object, *operands: Any) -> Use:
    """A sum over one index that turns rows of weights into rows of values: bhij,bhjd->bhid, in any order of axes."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2 or "." in equation or "->" not in equation:
        return Use(None)
    inputs, made = equation.replace(" ", "").split("->")
    names = inputs.split(",")
    first = 0 if operands[0] is item else 1
    own, other = names[first], names[1 - first]
    together = [name for name in own if name in other and name in made]
    summed = [name for name in own if name in other and name not in made]
    rows = [name for name in own if name not in other and name in made]
    wide = [name for name in other if name not in own and name in made]
    whole = len(summed) == len(wide) == 1 and len(own) == len(together) + len(rows) + 1 == len(other) + len(rows) - 1
    if not whole or len(rows) not in (1, 2) or operands[0] is operands[1]:
        return Use(None)
    weights = item.permute([own.index(name) for name in (*together, *rows, *summed)])
    values = operands[1 - first].permute([other.index(name) for name in (*together, *summed, *wide)])
    return _product(weights, values if len(rows) == 1 else values.unsqueeze(-3))  # one head of values for all of them
