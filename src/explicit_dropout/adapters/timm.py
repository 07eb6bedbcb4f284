"""timm: the attention of ViT and DeiT, of Swin and of EVA02, pooling by a latent query, and their MLPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from explicit_dropout.adapters.generic import (
    describe_attention,
    describe_feed_forward,
    is_linear,
    library_rule,
    projection,
)
from explicit_dropout.adapters.signs import normalised
from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.sites import (
    OF_ATTENTION,
    SCORES,
    Attention,
    Call,
    Described,
    Dropout,
    Pairs,
    Projection,
    pairs_of,
    visible,
)

WINDOW = -99.0
"""The masks that Swin makes for its shifted windows add 0, or −100 for pairs that must not meet."""

_PADDED: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Windows that their block fills up, as it alone knows: its resolution is no multiple of theirs."""


@library_rule("timm.layers.attention.Attention", "timm.models.vision_transformer.Attention")
def vision_transformer(module: Any) -> Attention | None:
    return describe_attention(module, **_settings(module))


@library_rule(
    "timm.models.swin_transformer.SwinTransformerBlock", "timm.models.swin_transformer_v2.SwinTransformerV2Block"
)
def window_block(module: Any) -> None:
    """No attention itself, but it knows whether its windows are padded."""
    size, window = module.input_resolution, module.window_size
    _PADDED.pop(module.attn, None)
    if not (isinstance(size, tuple | list) and isinstance(window, tuple | list)):
        return
    if any(length % part for length, part in zip(size, window, strict=True)):
        patches, windows = (" × ".join(str(length) for length in pair) for pair in (size, window))
        _PADDED[module.attn] = (
            f"its {patches} patches are padded to whole windows of {windows}, and padding would count in the mean; "
            "build the model with an img_size that its windows divide, or with another window_size"
        )


def _padded(module: nn.Module) -> dict[str, Any]:
    reason = _PADDED.get(module)
    return {} if reason is None else {"refused": dict.fromkeys(OF_ATTENTION, reason)}


@library_rule("timm.models.swin_transformer.WindowAttention")
def window(module: Any) -> Attention | None:
    settings = {"pairs": window_pairs, **_padded(module)}
    if module.fused_attn:
        way_out = "the fused kernel hides them among position biases; set fused_attn = False on the module"
        return describe_attention(module, weights_obstacle=way_out, **settings)
    return describe_attention(module, weights=module.attn_drop, **settings)


@library_rule("timm.models.swin_transformer_v2.WindowAttention")
def cosine_window(module: Any) -> Attention | None:
    obstacle = "Swin V2 scores are cosines of normalised queries and keys"
    settings = {"pairs": window_pairs, "obstacle": obstacle, "weights": module.attn_drop, **_fused_parameters(module)}
    return describe_attention(module, **settings, **_padded(module))


@library_rule("timm.layers.attention_pool.AttentionPoolLatent")
def latent_pool(module: Any) -> list[Described]:
    """Learnt queries attend to all tokens; what they gather goes through a network of its own."""
    width = module.kv.out_features // 2
    key, value = projection(module.kv, slice(0, width)), projection(module.kv, slice(width, 2 * width))
    obstacle, refused = normalised(module), {}
    if not is_linear(module.q):
        refused = dict.fromkeys((*SCORES, "attended_value"), "its latent is the query itself, which nothing projects")
    attention = describe_attention(
        module,
        projections=(projection(module.q) if is_linear(module.q) else key, key, value),
        cross=True,
        pairs=attention_pairs,
        output=module.proj,
        weights=None if obstacle else "compute",
        weights_obstacle="no module of it has them as its input",
        obstacle=obstacle,
        refused=refused,
        dropouts=(Dropout(module.proj_drop),),
    )
    network = None if module.mlp is None else describe_feed_forward(module.mlp)
    return [item for item in (attention, network) if item is not None]


@library_rule("timm.models.eva.EvaAttention", "timm.layers.attention.AttentionRope")
def eva(module: Any) -> Attention | None:
    return describe_attention(module, **_settings(module), rotary=eva_rotary, **_fused_parameters(module))


def _fused_parameters(module: Any) -> dict[str, Any]:
    """One fused weight that is used without calling its layer, its biases being parameters of their own."""
    if module.qkv is None or getattr(module, "q_bias", None) is None:
        return {}
    width = module.qkv.out_features // 3
    projections = (
        Projection(module, slice(part * width, (part + 1) * width), "qkv.weight", f"{name}_bias", None, called=False)
        for part, name in enumerate("qkv")
    )
    return {"projections": tuple(projections), "inputs": ("x", "x", "x")}


def eva_rotary(attention: Attention, call: Call) -> Callable[[Tensor], Tensor] | None:
    rope = call.get("rope")
    if rope is None:
        return None
    if rope.ndim > 2 and rope.shape[-3] > 1 and attention.key_heads is not None:
        raise UnsupportedSiteError("rotary embeddings of their own for every head are not read with grouped heads")
    return EvaRotation(rope, attention.module.num_prefix_tokens, getattr(attention.module, "rotate_half", False))


class EvaRotation:
    """Rotation of all tokens but the prefix, as timm's own `apply_rot_embed_cat`."""

    def __init__(self, rope: Tensor, prefix: Any, half: Any) -> None:
        self.rope, self.prefix, self.half = rope, int(prefix), bool(half)

    def __call__(self, heads: Tensor) -> Tensor:
        from timm.layers.pos_embed_sincos import apply_rot_embed_cat

        fixed, turned = heads[..., : self.prefix, :], heads[..., self.prefix :, :]
        rope = self.rope if self.rope.ndim == 2 else self.rope.unsqueeze(-3)  # ours has one axis of heads more
        return torch.cat((fixed, apply_rot_embed_cat(turned, rope.to(heads.dtype), half=self.half)), -2)


def attention_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    del attention, x, context
    mask, causal = call.get("attn_mask"), bool(call.get("is_causal", False))
    if causal:
        return Pairs(causal=True)  # timm then ignores the mask
    if mask is None:
        return Pairs()
    return pairs_of(mask)


def window_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    """A batch of windows; a mask (window, token, token) repeats for every image."""
    del attention, context
    mask = call.get("mask")
    if mask is None:
        return Pairs()
    return Pairs(allowed=visible(mask, WINDOW).repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None])


def _settings(module: Any) -> dict[str, Any]:
    """What ViT and EVA attention share. Both may normalise or gate A V before projecting it: A V is what comes before.

    A is the input of the module's own dropout, unless a fused kernel computes it.
    """
    obstacle = normalised(module)
    weights = module.attn_drop
    if module.fused_attn:
        weights = None if obstacle else "compute"
    settings = {
        "pairs": attention_pairs,
        "weights": weights,
        "weights_obstacle": "the fused kernel hides them behind q_norm; set fused_attn = False on the module",
        "obstacle": obstacle,
        "output": getattr(module, "norm", module.proj),
    }
    if "norm" not in module._modules and getattr(module, "gate", None) is not None:
        settings["refused"] = {"attended_value": "its gate acts on the attention output before anything can be read"}
    return settings
