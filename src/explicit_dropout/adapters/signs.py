"""Signs that attention of one's own is not plain, though its names are the usual ones: what it keeps gives it away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

MASKS = re.compile(r"mask|tril|triu|causal")
TEMPERATURES = ("temperature", "tau", "logit_scale")
ROTARY = re.compile(r"^rope|rotary|^freqs|^inv_freq|^position_embeddings$|(^|_)(cos|sin)(_|$)")
ROTARY_CLASS = re.compile(r"(?i:rotary)|R[oO]P[eE]|(?<![A-Za-z])rope")  # and no DropEdge
NORMS = {
    "q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm", "query_layernorm", "key_layernorm",
    "qk_norm", "norm_q", "norm_k",
}  # fmt: skip
QUERY_OR_KEY = re.compile(
    r"(^|[_.])(q|k|qk|query|key|queries|keys)([_.]|$)|(^|[_.])(q|k|qk)(ln|norm|rms)|(ln|norm|rms)(q|k|qk)([_.]|$)"
)
SCALE_IN_A_RULE = "a rule says what it does to them (scale=, or obstacle=)"
PAIRS_IN_A_RULE = "a rule says which query sees which key (causal=, or pairs=)"
VALUE = re.compile(r"(^|[_.])(v|value|values)([_.]|$)|(^|[_.])v(ln|norm|rms)|(ln|norm|rms)v([_.]|$)")


def odd_scale(scale: Any) -> str | None:
    """Why a scale is no number, and so no plain factor on the scores."""
    if scale is None or isinstance(scale, bool | int | float):
        return None
    if isinstance(scale, nn.Parameter):
        seen = "its scale is a parameter, which training moves"
    else:
        seen = f"its scale is a {type(scale).__name__}, which may multiply the scores or divide them"
    return f"{seen}; {SCALE_IN_A_RULE}"


def odd_number(scale: Any) -> str | None:
    """Why a number may be no factor on the scores: one is from 0 to 1, mostly 1/√(head width)."""
    if not isinstance(scale, bool | int | float) or (not isinstance(scale, bool) and 0 < scale <= 1):
        return None
    seen = f"its scale is {scale:g}, as if scores were divided by it" if scale > 1 else f"its scale is {scale}"
    return f"{seen}; {SCALE_IN_A_RULE}"


def rotary(module: nn.Module, arguments: Iterable[str]) -> str | None:
    """An argument, attribute or class that tells by its name of a rotary embedding."""
    tensors = (name for name, value in vars(module).items() if isinstance(value, Tensor))
    names = (*arguments, *module._modules, *module._buffers, *module._parameters, *tensors)
    found = next((repr(name) for name in names if ROTARY.search(name)), None)
    for name, child in inner(module):
        if found is None and ROTARY_CLASS.search(type(child).__name__):
            found = f"{name!r} ({type(child).__name__})"
    return found and f"{found} looks like rotary embeddings, which a rule of its own would have to read"


def normalised(module: nn.Module) -> str | None:
    """The normalisation between projection and scores that names tell of, if there is one."""
    for name, child in inner(module):
        named = name in NORMS and not isinstance(child, nn.Identity)
        if named or (is_norm(child) and QUERY_OR_KEY.search(name)):
            return f"{name} ({type(child).__name__}) normalises queries or keys before the scores"
    return None


def normalised_values(module: nn.Module) -> str | None:
    """The same for values, before they are attended to."""
    for name, child in inner(module):
        if is_norm(child) and VALUE.search(name):
            return f"{name} ({type(child).__name__}) normalises values before they are attended to"
    return None


def normalised_heads(module: nn.Module, head: int, others: set[int]) -> str | None:
    """A normalisation as wide as a head, whatever its name, unless something else in attention is as wide."""
    for name, child in inner(module):
        if head not in others and is_norm(child) and norm_width(child) == head and not VALUE.search(name):
            return f"{name} ({type(child).__name__}) is as wide as a head and may normalise queries or keys"
    return None


def inner(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module and their children, by dotted names; what is inside a linear layer is its own affair."""
    for name, child in module.named_children():
        yield name, child
        if not isinstance(child, nn.Linear) and not hasattr(child, "base_layer"):
            yield from ((f"{name}.{below}", grandchild) for below, grandchild in child.named_children())


def is_norm(child: nn.Module) -> bool:
    named = "norm" in type(child).__name__.lower() and not isinstance(child, nn.Linear) and not child._modules
    return named or isinstance(child, nn.LayerNorm | nn.RMSNorm)


def norm_width(norm: nn.Module) -> int | None:
    """How many features a normalisation takes, if it says so by its shape or by a parameter."""
    shape = getattr(norm, "normalized_shape", None)
    if isinstance(shape, tuple | list) and shape:
        return int(shape[-1])
    sizes = (parameter.shape[-1] for parameter in norm.parameters(recurse=False) if parameter.ndim)
    return next(sizes, None)


def temperature(module: nn.Module) -> str | None:
    """A temperature that divides the scores as well."""
    for name in TEMPERATURES:
        value = getattr(module, name, None)
        if isinstance(value, Tensor) or (isinstance(value, int | float) and value != 1):
            return f"its {name} acts on the scores; a rule says how (scale=, or obstacle=)"
    return None


def kept_mask(module: nn.Module) -> str | None:
    """A mask that the module keeps, other than that of causal attention."""
    for name, mask in kept_tensors(module):
        if MASKS.search(name.lower()) and not is_triangle(mask):
            return f"{name!r} looks like a mask; {PAIRS_IN_A_RULE}"
    return None


def kept_triangle(module: nn.Module) -> str | None:
    """The mask of causal attention that the module keeps, by whatever name."""
    for name, mask in kept_tensors(module):
        if is_triangle(mask):
            return f"{name!r} looks like the mask of causal attention; {PAIRS_IN_A_RULE}"
    return None


def kept_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers of a module, and tensors that are none but that it keeps, of more than one number."""
    for name, kept in {**vars(module), **module._buffers}.items():
        if isinstance(kept, Tensor) and kept.numel() > 1:
            yield name, kept


def is_triangle(mask: Tensor) -> bool:
    """Whether a tensor is zero everywhere above its diagonal and nowhere else, or the other way round."""
    if mask.ndim < 2 or mask.is_meta or mask.shape[-1] != mask.shape[-2] or mask.numel() != mask.shape[-1] ** 2:
        return False
    marked = mask.reshape(mask.shape[-2:]) != 0
    lower = torch.ones_like(marked).tril()
    return bool((marked == lower).all() or (marked != lower).all())
