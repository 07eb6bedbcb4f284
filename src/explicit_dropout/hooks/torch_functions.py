"""Functions of torch by what they mean for dropout, and their arguments by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from explicit_dropout import stochastic

DROPOUTS = (F.dropout, torch.dropout, stochastic.dropout)
TIED = (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout)
"""Whole channels at once: what they are tied to does not show in the energy of the tensor itself."""
HEADS = stochastic.drop_heads
ATTENTION = F.scaled_dot_product_attention
MULTIHEAD = F.multi_head_attention_forward
PRODUCTS = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax)
SAME = (
    Tensor.view, Tensor.reshape, Tensor.contiguous, Tensor.to, Tensor.type_as, Tensor.flatten, Tensor.unflatten,
    Tensor.float, Tensor.half, Tensor.bfloat16, torch.reshape, torch.flatten, torch.unflatten,
)  # fmt: skip
"""After which a tensor still holds the same rows, as long as they are as wide."""
WEIGHING = (
    *SAME, Tensor.masked_fill, torch.masked_fill, Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.div,
    torch.div, Tensor.__truediv__, torch.where, Tensor.where, Tensor.clamp, torch.clamp, Tensor.clamp_min,
    torch.clamp_min, Tensor.nan_to_num, torch.nan_to_num, Tensor.double, Tensor.squeeze, torch.squeeze,
    Tensor.unsqueeze, torch.unsqueeze, Tensor.permute, torch.permute, Tensor.transpose, torch.transpose,
    Tensor.__getitem__,
)  # fmt: skip
"""After which attention weights are still some."""
ADDING = (Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__)
"""The same, if it is a number that they add."""
LOOKS = (Tensor.detach, torch.detach, Tensor.cpu, Tensor.clone, torch.clone, Tensor.numpy)
MULTIPLYING = (Tensor.mul, torch.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__)
RANDOM = (
    torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint, torch.randint_like, torch.randperm,
    torch.normal, torch.bernoulli, torch.multinomial, torch.poisson, torch.rrelu, torch.alpha_dropout,
    Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_, Tensor.random_,
    Tensor.cauchy_, Tensor.log_normal_, Tensor.geometric_, Tensor.multinomial, torch.dropout_, torch.alpha_dropout_,
    torch.native_dropout, torch.feature_alpha_dropout, F.alpha_dropout, F.feature_alpha_dropout, F.gumbel_softmax,
)  # fmt: skip
"""Other dice, which have no twin here."""
SWITCHED = tuple(func for func in RANDOM if "dropout" in getattr(func, "__name__", ""))
"""Those that are told whether to draw."""

_SIGNATURES: dict[Any, tuple[tuple[str, ...], dict[str, Any]]] = {
    ATTENTION: (
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"),
        {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False},
    ),
    F.linear: (("input", "weight", "bias"), {"bias": None}),
    torch.matmul: (("input", "other"), {}),
    torch.addmm: (("input", "mat1", "mat2"), {"alpha": 1}),
    torch.dropout: (("input", "p", "train"), {}),
    torch.feature_dropout: (("input", "p", "train"), {}),
}
for _function in (*DROPOUTS, *TIED, HEADS, MULTIHEAD):
    if _function not in _SIGNATURES:
        _parameters = inspect.signature(_function).parameters
        _SIGNATURES[_function] = (
            tuple(_parameters),
            {name: one.default for name, one in _parameters.items() if one.default is not one.empty},
        )


def bound(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    names, defaults = _SIGNATURES[func]
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists and mappings included."""
    for item in (*args, *kwargs.values()):
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, Mapping):
            yield from tensors_in(tuple(item.values()), {})
        elif isinstance(item, list | tuple):
            yield from tensors_in(tuple(item), {})
        elif is_dataclass(item) and not isinstance(item, type):
            yield from tensors_in(tuple(vars(item).values()), {})


def channels_of(func: Any, x: Tensor) -> int:
    """The axis of the channels that a function drops as a whole."""
    alone = {F.dropout1d: 2, F.dropout3d: 4}  # axes of a sample without a batch
    return 0 if x.ndim == alone.get(func) else 1
