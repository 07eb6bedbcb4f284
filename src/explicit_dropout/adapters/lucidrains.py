"""vit-pytorch and x-transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from explicit_dropout.adapters.generic import describe_attention
from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.sites import Attention, Call, Dropout, FeedForward, Pairs, Projection, register_rule


@register_rule("vit_pytorch.vit.Attention")
def vit_attention(module: Any) -> Attention | None:
    return describe_attention(module, weights=module.dropout)


@register_rule("vit_pytorch.vit.FeedForward", "x_transformers.x_transformers.FeedForward")
def feed_forward(module: Any) -> FeedForward:
    linear = [child for child in module.modules() if isinstance(child, nn.Linear)]
    dropouts = tuple(Dropout(child) for child in module.modules() if isinstance(child, nn.Dropout))
    return FeedForward(tuple(Projection(layer) for layer in linear), dropouts=dropouts)


@register_rule("x_transformers.x_transformers.Attention")
def x_attention(module: Any) -> Attention | None:
    obstacle = "qk_norm normalises queries and keys before the scores" if module.qk_norm else None
    return describe_attention(module, pairs=x_pairs, obstacle=obstacle, weights=None)


def x_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    """Masks of x-transformers are True where a token is real or a pair allowed."""
    del x, context
    if call.get("rotary_pos_emb") is not None:
        raise UnsupportedSiteError("the rotary embeddings of x-transformers are not read; use value or feed_forward")
    mask, context_mask = call.get("mask"), call.get("context_mask")
    if call.get("context") is None:
        context_mask = mask if context_mask is None else context_mask
    return Pairs(mask, context_mask, call.get("attn_mask"), attention.causal)
