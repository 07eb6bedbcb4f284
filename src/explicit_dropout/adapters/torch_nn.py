"""torch.nn: MultiheadAttention, and the encoder and decoder layers built of it, those of torchvision's ViT included.

`nn.MultiheadAttention` computes with its parameters and never calls its children, so everything is read from its own
call. Its masks are True where something must not be seen, or are added to the scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.adapters import generic
from explicit_dropout.sites import (
    OF_ATTENTION,
    Attention,
    Call,
    Described,
    Dropout,
    FeedForward,
    Pairs,
    Projection,
    register_rule,
    visible,
)


@register_rule(nn.MultiheadAttention)
def multihead_attention(module: nn.MultiheadAttention) -> Attention:
    """A subclass with a forward of its own is refused: nothing of it is called that would tell what it does."""
    width = module.embed_dim
    parts = [slice(part * width, (part + 1) * width) for part in range(3)]
    if module._qkv_same_embed_dim:
        projections = [Projection(module, rows, "in_proj_weight", "in_proj_bias", called=False) for rows in parts]
    else:
        projections = [
            Projection(module, None, f"{name}_proj_weight", "in_proj_bias", rows, called=False)
            for name, rows in zip("qkv", parts, strict=True)
        ]
    query, key, value = projections
    appended = "bias_k and add_zero_attn append keys and values of their own" if _appends_keys(module) else None
    refused = {} if appended is None else {"attended_value": appended}
    if generic.author(module) is not nn.MultiheadAttention:
        name = generic.author(module).__qualname__
        refused = dict.fromkeys(OF_ATTENTION, f"no rule says what the forward of {name} does with its parameters")
    return Attention(
        module,
        query,
        key,
        value,
        heads=module.num_heads,
        pairs=multihead_pairs,
        inputs=("query", "key", "value"),
        batch_first=module.batch_first,
        weights="compute",
        obstacle=appended,
        refused=refused,
        dropouts=(Dropout(module, "dropout"),),
    )


@register_rule(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
def transformer_layer(module: Any) -> Described | list[Described] | None:
    """Its feed-forward network, with the gates that a subclass gives it; or what a subclass has in its place."""
    layers = [generic.nested(module, name) for name in ("linear1", "linear2")]
    if not all(generic.is_linear(layer) for layer in layers):
        return generic.describe(module)
    network = generic.with_gates(module, [layer for layer in layers if layer is not None])
    return FeedForward(
        tuple(generic.projection(layer) for layer in network),
        module,
        layer_padding,
        tuple(Dropout(child) for child in (generic.nested(module, "dropout"),) if isinstance(child, nn.Dropout)),
        batch_first=getattr(generic.nested(module, "self_attn"), "batch_first", True),
    )


@register_rule("torchvision.ops.misc.MLP")
def torchvision_mlp(module: nn.Sequential) -> FeedForward:
    layers = tuple(Projection(layer) for layer in module if isinstance(layer, nn.Linear))
    return FeedForward(layers, dropouts=tuple(Dropout(layer) for layer in module if isinstance(layer, nn.Dropout)))


def multihead_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    padding, blocked = call.get("key_padding_mask"), call.get("attn_mask")
    if padding is not None:
        padding = padding.reshape(context.shape[:-1])
    if blocked is not None and blocked.ndim == 3 and x.ndim == 3:
        blocked = torch.unflatten(blocked, 0, (x.shape[0], attention.heads))
    context_mask = None if padding is None else real(padding)
    allowed = None if blocked is None else real(blocked)
    bias = None if blocked is None or blocked.dtype == torch.bool else blocked
    if padding is not None and padding.dtype != torch.bool:
        by_key = padding[..., None, None, :]  # the same for every head and query
        bias = by_key if bias is None else bias + by_key
    same = call["query"] is call["key"]
    return Pairs(context_mask if same else None, context_mask, allowed, bias=bias)


def layer_padding(call: Call) -> Tensor | None:
    """The padding that an encoder or decoder layer is told of, as real tokens."""
    padding = call.get("src_key_padding_mask", call.get("tgt_key_padding_mask"))
    return None if padding is None else real(padding)


def real(blocked: Tensor) -> Tensor:
    """A mask of torch.nn turned round: True where something may be seen."""
    return ~blocked if blocked.dtype == torch.bool else visible(blocked)


def _appends_keys(module: nn.MultiheadAttention) -> bool:
    return module.bias_k is not None or module.add_zero_attn
