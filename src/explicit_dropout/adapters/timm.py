"""timm: the attention of ViT and DeiT, of Swin and of EVA02, and their MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from explicit_dropout.adapters.generic import describe_attention
from explicit_dropout.sites import Attention, Call, Pairs, Projection, register_rule

NOT_SEEN = -99.0
"""Additive masks of window attention use −100 for pairs that must not meet."""


@register_rule("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
def vision_transformer(module: Any) -> Attention | None:
    return describe_attention(module, **_weights(module), pairs=attention_pairs)


@register_rule("timm.models.swin_transformer.WindowAttention")
def window(module: Any) -> Attention | None:
    if module.fused_attn:
        way_out = "fused attention hides them among position biases; set fused_attn = False on the module"
        return describe_attention(module, pairs=window_pairs, weights_obstacle=way_out)
    return describe_attention(module, pairs=window_pairs, weights=module.attn_drop)


@register_rule("timm.models.swin_transformer_v2.WindowAttention")
def cosine_window(module: Any) -> Attention | None:
    obstacle = "Swin V2 scores are cosines of normalised queries and keys"
    return describe_attention(module, pairs=window_pairs, obstacle=obstacle, weights=module.attn_drop)


@register_rule("timm.models.eva.EvaAttention")
def eva(module: Any) -> Attention | None:
    settings = {**_weights(module), "pairs": attention_pairs, "rotary": eva_rotary}
    if module.qkv is None or module.q_bias is None:
        return describe_attention(module, **settings)
    # One fused weight, used without calling its layer; biases are parameters of their own.
    width = module.qkv.out_features // 3
    projections = (
        Projection(module, slice(part * width, (part + 1) * width), "qkv.weight", f"{name}_bias", None, called=False)
        for part, name in enumerate("qkv")
    )
    return describe_attention(module, projections=tuple(projections), inputs=("x", "x", "x"), **settings)


def eva_rotary(attention: Attention, call: Call) -> Callable[[Tensor], Tensor] | None:
    rope = call.get("rope")
    if rope is None:
        return None
    return EvaRotation(rope, attention.module.num_prefix_tokens, getattr(attention.module, "rotate_half", False))


class EvaRotation:
    """Rotation of all tokens but the prefix, as timm's own `apply_rot_embed_cat`."""

    def __init__(self, rope: Tensor, prefix: Any, half: Any) -> None:
        self.rope, self.prefix, self.half = rope, int(prefix), bool(half)

    def __call__(self, heads: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        fixed, turned = heads[..., : self.prefix, :], heads[..., self.prefix :, :]
        rope = self.rope if self.rope.ndim == 2 else self.rope.reshape(self.rope.shape[0], 1, 1, *self.rope.shape[-2:])
        return torch.cat((fixed, apply_rot_embed_cat(turned, rope.to(heads.dtype), half=self.half)), -2)


def attention_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    del attention, x, context
    mask, causal = call.get("attn_mask"), bool(call.get("is_causal", False))
    if mask is None or mask.dtype == torch.bool:
        return Pairs(allowed=mask, causal=causal)
    return Pairs(allowed=mask > NOT_SEEN, causal=causal, bias=mask)


def window_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    """A batch of windows; a mask (window, token, token) repeats for every image."""
    del attention, context
    mask = call.get("mask")
    if mask is None:
        return Pairs()
    return Pairs(allowed=(mask > NOT_SEEN).repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None])


def _weights(module: Any) -> dict[str, Any]:
    """A is the input of the module's own dropout, unless a fused kernel computes it."""
    return {"weights": "compute" if module.fused_attn else module.attn_drop}
