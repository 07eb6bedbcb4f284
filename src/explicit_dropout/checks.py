"""Arguments looked at before anything is computed: each check names the argument, what would fit and what came."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, get_args

import torch
from torch import Tensor

from explicit_dropout.errors import InputError

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST = sys.float_info.max


def floating(required: Mapping[str, Tensor], optional: Mapping[str, Tensor | None]) -> torch.dtype:
    """All are real floating-point tensors on one device; optional ones may be None. The dtype to sum in."""
    working = torch.float32
    first: tuple[str, torch.device] | None = None
    for name, tensor in (*required.items(), *optional.items()):
        if tensor is None and name not in required:
            continue
        if not isinstance(tensor, Tensor):
            raise InputError(name, "a tensor", f"{type(tensor).__name__}")
        if tensor.dtype not in FLOATS:
            raise InputError(name, "a tensor of float16, bfloat16, float32 or float64", tensor.dtype)
        first = first or (name, tensor.device)
        if tensor.device != first[1]:
            raise InputError(name, f"on {first[1]}, the device of `{first[0]}`", f"a tensor on {tensor.device}")
        working = torch.promote_types(working, tensor.dtype)
    return working


def tokens(name: str, x: Tensor) -> None:
    """x is (*batch, token, width)."""
    if x.ndim < 2:
        raise InputError(name, "of shape (*batch, token, width)", f"shape {tuple(x.shape)}")


def shaped(name: str, tensor: Tensor | None, shape: Sequence[int | None], meaning: str) -> None:
    """The tensor has this shape (None in the shape: any size; a tensor of None passes)."""
    if tensor is None:
        return
    fits = tensor.ndim == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(name, f"of shape ({wanted}), {meaning}", f"shape {tuple(tensor.shape)}")


def boolean(name: str, mask: Tensor | None, shape: Sequence[int], meaning: str, device: torch.device) -> None:
    """The mask is boolean, of this shape, on this device (None passes)."""
    if mask is None:
        return
    _boolean_tensor(name, mask, device)
    shaped(name, mask, shape, meaning)


def broadcastable(name: str, mask: Tensor | None, shape: Sequence[int], meaning: str, device: torch.device) -> None:
    """The mask is boolean, on this device, and broadcasts to this shape (None passes)."""
    if mask is None:
        return
    _boolean_tensor(name, mask, device)
    padded = (1,) * (len(shape) - mask.ndim) + tuple(mask.shape)
    if (
        mask.ndim < 2
        or len(padded) != len(shape)
        or any(size not in (1, wanted) for size, wanted in zip(padded, shape, strict=True))
    ):
        raise InputError(name, f"broadcastable to {tuple(shape)}, {meaning}", f"shape {tuple(mask.shape)}")


def _boolean_tensor(name: str, mask: object, device: torch.device) -> None:
    if not isinstance(mask, Tensor):
        raise InputError(name, "a boolean tensor, True where a token or pair counts", f"{type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise InputError(name, "boolean, True where a token or pair counts", f"a mask of {mask.dtype}")
    if mask.device != device:
        raise InputError(name, f"on {device}, the device of the input", f"a mask on {mask.device}")


def heads(query_out: int, key_out: int, query_heads: int, key_heads: int | None) -> tuple[int, int, int]:
    """(key heads, query heads for each of them, width of a head) of two projections that fit together."""
    count("heads", query_heads)
    key_heads = query_heads if key_heads is None else key_heads
    count("key_heads", key_heads)
    if query_heads % key_heads:
        raise InputError("key_heads", f"a divisor of the {query_heads} query heads", key_heads)
    if query_out % query_heads:
        raise InputError("heads", f"a divisor of the {query_out} outputs of the query projection", query_heads)
    width = query_out // query_heads
    if key_out != key_heads * width:
        raise InputError(
            "key_weight",
            f"a projection to {key_heads} heads of width {width} = {key_heads * width} outputs "
            f"(heads={query_heads}, key_heads={key_heads})",
            f"{key_out} outputs",
        )
    return key_heads, query_heads // key_heads, width


def count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(name, "a whole number ≥ 1", repr(value))
    return value


def number(name: str, value: object, expected: str, *, low: float = -math.inf, below: float = math.inf) -> float:
    """The value as a float of [low, below); never NaN, infinite or a truth value."""
    # Comparisons alone: NaN fails them as well, and a compiler can follow them.
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(name, expected, repr(value))
    plain: Any = value
    if type(plain) not in (float, int):  # numpy's smaller kinds cannot be compared with the largest number
        try:
            plain = float(plain)
        except OverflowError:
            raise InputError(name, expected, repr(value)) from None
    if not (-LARGEST <= plain <= LARGEST and low <= plain < below):
        raise InputError(name, expected, repr(value))
    return plain if type(plain) is float else float(plain)  # which a compiler cannot do with a variable


def rate(value: object, name: str = "p") -> float:
    return number(name, value, "a drop rate in [0, 1)", low=0, below=1)


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InputError(name, "True or False", repr(value))
    return value


def choice(name: str, value: object, options: object) -> None:
    if value not in get_args(options):
        raise InputError(name, "one of " + ", ".join(map(repr, get_args(options))), repr(value))
