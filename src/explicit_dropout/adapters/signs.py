"""Signs that attention of one's own is not plain, though its names are the usual ones: what it keeps gives it away."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

MASKS = re.compile(r"mask|tril|triu|causal")
TEMPERATURES = ("temperature", "tau", "logit_scale")


def odd_scale(scale: Any) -> str | None:
    """Why a scale is no plain factor on the scores, if so: one is a number from 0 to 1, mostly 1/√(head width)."""
    if scale is None:
        return None
    if isinstance(scale, nn.Parameter):
        seen = "its scale is a parameter, which training moves"
    elif isinstance(scale, bool | int | float):
        if not isinstance(scale, bool) and 0 < scale <= 1:
            return None
        seen = f"its scale is {scale:g}, as if scores were divided by it" if scale > 1 else f"its scale is {scale}"
    else:
        seen = f"its scale is a {type(scale).__name__}, which may multiply the scores or divide them"
    return f"{seen}; a rule says what it does to them (scale=, or obstacle=)"


def temperature(module: nn.Module) -> str | None:
    """A temperature that divides the scores as well."""
    for name in TEMPERATURES:
        value = getattr(module, name, None)
        if isinstance(value, Tensor) or (isinstance(value, int | float) and value != 1):
            return f"its {name} acts on the scores; a rule says how (scale=, or obstacle=)"
    return None


def kept_mask(module: nn.Module, causal: bool) -> str | None:
    """A mask that the module keeps, unless it is the triangle of attention that calls itself causal anyway."""
    kept = {**module._buffers, **{name: value for name, value in vars(module).items() if isinstance(value, Tensor)}}
    for name, mask in kept.items():
        if mask is None or mask.numel() < 2:
            continue
        triangle = is_triangle(mask)
        if (triangle or MASKS.search(name.lower())) and not (triangle and causal):
            says = "looks like the mask of causal attention" if triangle else "looks like a mask"
            return f"{name!r} {says}; a rule says which query sees which key (causal=, or pairs=)"
    return None


def is_triangle(mask: Tensor) -> bool:
    """Whether a tensor is zero everywhere above its diagonal and nowhere else, or the other way round."""
    if mask.ndim < 2 or mask.is_meta or mask.shape[-1] != mask.shape[-2] or mask.numel() != mask.shape[-1] ** 2:
        return False
    marked = mask.reshape(mask.shape[-2:]) != 0
    lower = torch.ones_like(marked).tril()
    return bool((marked == lower).all() or (marked != lower).all())
