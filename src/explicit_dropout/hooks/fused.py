"""Attention that torch computes in one call: its queries, keys and values by head, and its masks as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from explicit_dropout.functional.batch import without_autocast
from explicit_dropout.hooks.draws import AttentionParts
from explicit_dropout.kernels.plain import wide


def attention_parts(call: Mapping[str, Any]) -> AttentionParts:
    """What F.scaled_dot_product_attention is given, with keys and values for each head and sample of queries."""
    sides = [call["query"], call["key"], call["value"]]
    if call["enable_gqa"]:
        heads = sides[0].shape[-3]
        sides = [t if t.shape[-3] == heads else t.repeat_interleave(heads // t.shape[-3], -3) for t in sides]
    if all(t.ndim == 2 for t in sides):
        sides = [t[None, None] for t in sides]
    if any(t.shape[:-2] != sides[0].shape[:-2] for t in sides):
        lead = torch.broadcast_shapes(*(t.shape[:-2] for t in sides))  # type: ignore[no-untyped-call]
        sides = [t.expand(*lead, *t.shape[-2:]) for t in sides]
    queries, keys, values = sides
    return queries, keys, values, call["attn_mask"], call["is_causal"], call["scale"]


def multihead_parts(call: Mapping[str, Any]) -> AttentionParts:
    """Queries, keys and values of nn.MultiheadAttention by head, and its masks as one that is added or boolean."""
    query, key, value = (t.unsqueeze(1) if t.ndim == 2 else t for t in (call["query"], call["key"], call["value"]))
    if call["use_separate_proj_weight"]:
        weights = call["q_proj_weight"], call["k_proj_weight"], call["v_proj_weight"]
    else:
        weights = call["in_proj_weight"].chunk(3)
    biases = (None, None, None) if call["in_proj_bias"] is None else call["in_proj_bias"].chunk(3)
    heads = call["num_heads"]
    parts = []
    with without_autocast(query):  # by now that of the model's own call may be over
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            made = F.linear(wide(x), wide(weight), None if bias is None else wide(bias))
            parts.append(torch.unflatten(made, -1, (heads, -1)).permute(1, 2, 0, 3))
    mask, padding = call["attn_mask"], call["key_padding_mask"]
    if mask is not None:
        mask = torch.unflatten(mask, 0, (-1, heads)) if mask.ndim == 3 else mask
        mask = ~mask if mask.dtype == torch.bool else mask
    if padding is not None:
        padding = padding.reshape(-1, 1, 1, padding.shape[-1])
        padding = ~padding if padding.dtype == torch.bool else padding
    queries, keys, values = parts
    return queries, keys, values, _joined(mask, padding), False, None


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Two masks as one: both boolean, or added. None where there is none."""
    if first is None or second is None:
        return second if first is None else first
    if first.dtype == second.dtype == torch.bool:
        return first & second
    return _added(first) + _added(second)


def _added(mask: Tensor) -> Tensor:
    """A mask as what is added to scores."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
