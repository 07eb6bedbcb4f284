"""Hugging Face transformers: attention by the usual names, with its masks and rotary embeddings read from the call.

The library computes the masks of a whole model once and passes them to every attention module, boolean or additive,
(batch, heads or 1, token, context), or None where the fused kernel is told to be causal instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.adapters import generic
from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.sites import Attention, Call, Described, FeedForward, Pairs, register_rule


@register_rule("transformers.modeling_utils.PreTrainedModel")
def whole_model(module: nn.Module) -> None:
    """A whole model is no layer, whatever its children are called."""
    del module


def describe(module: nn.Module) -> Described | list[Described] | None:
    """Any module of transformers."""
    attention = describe_attention(module)
    feed_forward = packed_experts(module) or generic.describe_feed_forward(module)
    return [item for item in (attention, feed_forward) if item is not None] or None


def packed_experts(module: nn.Module) -> FeedForward | None:
    """Mixtures of experts keep all experts in one parameter of three axes and route tokens between them."""
    packed = [name for name, p in module.named_parameters(recurse=False) if p.ndim == 3 and "proj" in name]
    if not packed:
        return None
    reason = f"its experts are packed into {', '.join(packed)} and see different tokens at every step"
    return FeedForward((), module, obstacle=reason)


def describe_attention(module: Any, **overrides: Any) -> Attention | None:
    if not _is_attention(module):
        return None
    eager = getattr(getattr(module, "config", None), "_attn_implementation", None) == "eager"
    biased = getattr(module, "has_relative_attention_bias", None) is not None
    weights = "output" if eager else None if biased else "compute"
    settings = {
        "pairs": attention_pairs,
        "rotary": rotary if "position_embeddings" in _arguments(module) else None,
        "weights": weights,
        "weights_obstacle": "load the model with attn_implementation='eager'",
    }
    return generic.describe_attention(module, **{**settings, **overrides})


@register_rule("transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention")
def gpt_neox(module: Any) -> Attention | None:
    """Query, key and value lie side by side within each head."""
    heads, width = module.config.num_attention_heads, module.head_size
    query, key, value = (
        generic.projection(
            module.query_key_value,
            tuple(head * 3 * width + part * width + i for head in range(heads) for i in range(width)),
        )
        for part in range(3)
    )
    return describe_attention(module, projections=(query, key, value))


@register_rule("transformers.models.gpt2.modeling_gpt2.GPT2Attention")
def gpt2(module: Any) -> Attention | None:
    if not module.is_cross_attention:
        return describe_attention(module)
    width = module.embed_dim
    key, value = (generic.projection(module.c_attn, slice(i * width, (i + 1) * width)) for i in range(2))
    return describe_attention(module, projections=(generic.projection(module.q_attn), key, value), cross=True)


def attention_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    mask = call.get("attention_mask", call.get("mask"))
    if mask is None:
        causal = call.get("is_causal")
        causal = attention.causal if causal is None else bool(causal)
        return Pairs(causal=causal and x.shape[-2] == context.shape[-2] and not attention.cross)
    if not isinstance(mask, Tensor):
        raise UnsupportedSiteError(f"an attention mask of type {type(mask).__name__} cannot be read; use sdpa or eager")
    if mask.ndim == 2:
        return Pairs(context_mask=mask.bool(), causal=attention.causal)
    mask = mask[..., : context.shape[-2]]
    if mask.dtype == torch.bool:
        return Pairs(allowed=mask)
    return Pairs(allowed=mask > torch.finfo(mask.dtype).min / 2, bias=mask)


def rotary(attention: Attention, call: Call) -> Callable[[Tensor], Tensor] | None:
    del attention
    embeddings = call.get("position_embeddings")
    return None if embeddings is None else HalfRotation(*embeddings)


class HalfRotation:
    """x cos + (−x₂, x₁) sin on the first dimensions of every head, as many as there are angles."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __call__(self, heads: Tensor) -> Tensor:
        width = self.cos.shape[-1]
        turned, fixed = heads[..., :width], heads[..., width:]
        cos, sin = (angle.to(heads.dtype)[:, None, None] for angle in (self.cos, self.sin))
        first, second = turned.chunk(2, -1)
        return torch.cat((turned * cos + torch.cat((-second, first), -1) * sin, fixed), -1)


def _is_attention(module: nn.Module) -> bool:
    return "Attention" in type(module).__name__


def _arguments(module: nn.Module) -> list[str]:
    return list(module.forward.__code__.co_varnames)
