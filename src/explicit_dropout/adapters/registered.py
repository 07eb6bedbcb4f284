"""Functions of one's own that transformers computes attention by (`AttentionInterface.register`).

A model may be given another at any time. What one does is tried: called with random queries, keys and values, it has to
return softmax(scale · Q Kᵀ) V, causal where the module is.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.adapters.trial import attended, close, quietly
from explicit_dropout.sites import Attention

Function = Callable[..., Any]
TOKENS = 20
CLOSE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
"""How far a result may be from what is expected, relative to its norm. A kernel may take half precision alone."""
_tried: weakref.WeakKeyDictionary[Attention, dict[int, tuple[Function, bool]]] = weakref.WeakKeyDictionary()
"""What is known of functions, by their ids: they need not be hashable."""


def own_function(attention: Attention) -> str | None:
    """Why it is not known what the model computes between scores and values, if it is not."""
    name, models = implementation(attention.module), sys.modules.get("transformers.modeling_utils")
    functions = getattr(models, "ALL_ATTENTION_FUNCTIONS", None)
    if name is None or functions is None or name not in functions or "/" in name:  # eager; or a kernel of the hub
        return None
    function = functions[name]
    known = _tried.setdefault(attention, {})
    if id(function) not in known:
        theirs = str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers.")
        known[id(function)] = function, theirs or is_softmax(function, attention)
    if known[id(function)][1]:
        return None
    whole = getattr(function, "__qualname__", type(function).__qualname__)
    named = f"{getattr(function, '__module__', type(function).__module__)}.{whole}"
    return f"tried with random tokens, {named}, by which the model computes attention ({name!r}), is no plain softmax"


def implementation(module: nn.Module) -> str | None:
    """The name under which a model looks its attention up."""
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def is_softmax(function: Function, attention: Attention) -> bool:
    """Whether a function, called as transformers does where nothing is masked, returns softmax(scale · Q Kᵀ) V."""
    held = attention.query.held
    device = torch.device("cpu") if held is None else held.device
    heads, width = attention.heads, attention.query.shape[0] // attention.heads
    numbers = [heads, attention.key_heads or heads, attention.key_heads or heads]
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, number, TOKENS, width, generator=random) for number in numbers)
    query = query * (3 / (attention.score_scale * width**0.5))  # so that weights differ
    for dtype, most in CLOSE.items():
        given = [part.to(device, dtype) for part in (query, key, value)]
        try:
            with quietly(device, gradients=False):
                found = function(attention.module, *given, None, dropout=0.0, scaling=attention.score_scale)
        except Exception:  # it wants something else
            continue
        found = found[0] if isinstance(found, tuple | list) else found
        if isinstance(found, Tensor) and found.ndim == 4:  # (sample, token, head, width)
            every = (part.double().repeat_interleave(heads // part.shape[1], 1) for part in given)
            return close(found.flatten(2), attended(attention, *every), most)
    return False
