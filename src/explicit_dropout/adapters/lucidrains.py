"""vit-pytorch and x-transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from explicit_dropout.adapters.generic import (
    attention_dropouts,
    below,
    describe_attention,
    is_linear,
    library_rule,
    projection,
)
from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.sites import Attention, Call, Dropout, FeedForward, Pairs


@library_rule("vit_pytorch.vit.Attention")
def vit_attention(module: Any) -> Attention | None:
    return describe_attention(module, weights=module.dropout)


@library_rule("vit_pytorch.simple_vit.Attention")
def simple_vit_attention(module: Any) -> Attention | None:
    return describe_attention(module, weights="compute")


@library_rule(
    "vit_pytorch.vit.FeedForward", "vit_pytorch.simple_vit.FeedForward", "x_transformers.x_transformers.FeedForward"
)
def feed_forward(module: Any) -> FeedForward:
    linear = [child for child in below(module) if is_linear(child)]
    dropouts = tuple(Dropout(child) for child in below(module) if isinstance(child, nn.Dropout))
    return FeedForward(tuple(projection(layer) for layer in linear), dropouts=dropouts)


# ---------------------------------------------------------------------------------------------- x-transformers


@dataclass(frozen=True)
class Place:
    """What an attention module does not know of itself: what its stack of layers uses it for."""

    cross: bool = False
    rotary: Literal["none", "plain", "scaled"] = "none"
    polar: bool = False
    value_residual: bool = False


_PLACES: WeakKeyDictionary[nn.Module, Place] = WeakKeyDictionary()

SCORES = {
    "qk_norm": "qk_norm normalises queries and keys before the scores",
    "q_rmsnorm": "q_rmsnorm normalises queries before the scores",
    "k_rmsnorm": "k_rmsnorm normalises keys before the scores",
    "to_latent_q": "use_latent_q projects through a latent space",
    "to_latent_kv": "use_latent_kv projects through a latent space",
    "num_mem_kv": "num_mem_kv appends keys of its own",
    "attend.add_zero_kv": "add_zero_kv appends a key of its own",
    "attend.head_learned_sink": "head_learned_sink competes with the scores of the keys",
    "attend.l2_distance": "l2_distance makes scores of distances",
    "attend.softclamp_logits": "softclamp_logits clamps the scores",
    "attend.pre_softmax_talking_heads": "pre_talking_heads mixes the scores of all heads",
    "attend.pre_scale_post_talking_heads": "pre_scale_post_talking_heads mixes the scores of all heads",
    "attend.selective": "selective attention subtracts scores from each other",
    "attend.cog_signed": "cog_signed takes the scores apart by their sign",
    "attend.cope": "use_cope adds what depends on the queries",
    "attend.inverted_attention": "inverted_attention normalises over queries",
    "attend.flash_pack_seq": "flash_pack_seq packs sequences whose borders are not read",
}
"""Options of `x_transformers.Attention` under which scores are not plainly scale · Q Kᵀ of the projected keys."""
ATTENDED = {
    "value_rmsnorm": "value_rmsnorm normalises the values",
    "laser": "laser exponentiates the values",
    "num_mem_kv": "num_mem_kv appends values of its own",
    "attend.add_zero_kv": "add_zero_kv appends a value of its own",
    "attend.post_softmax_talking_heads": "post_talking_heads mixes the attention of all heads",
    "attend.pre_scale_post_talking_heads": "pre_scale_post_talking_heads rescales the attention",
    "attend.flash_pack_seq": "flash_pack_seq packs sequences whose borders are not read",
    "head_scale": "head_scale scales the heads of the attention output",
    "to_v_head_gate": "gate_value_heads gates the attention output",
    "to_v_gate": "gate_values gates the attention output",
    "to_output_gate": "output_gate gates the attention output",
    "hybrid_module": "hybrid_module joins the attention output",
    "orthog_projected_values": "orthog_projected_values projects the attention output",
    "orthog_projected_values_per_head": "orthog_projected_values_per_head projects the attention output",
}
"""Options under which what the output projection sees is not A V."""
IN_CALL = (
    "mem", "cache", "additional_key_values", "q_delta", "k_delta", "v_delta", "o_delta", "attn_delta",
    "flash_pack_seq_kwargs",
)  # fmt: skip
"""Arguments of a call that add what the projections do not see."""


@library_rule("x_transformers.x_transformers.AttentionLayers")
def x_layers(module: Any) -> None:
    """No layer itself, but it knows what its attention modules are for."""
    turn = module.rotary_pos_emb
    rotary: Literal["none", "plain", "scaled"] = "none" if turn is None else "plain" if turn.scale is None else "scaled"
    polar = getattr(module, "polar_pos_emb", None) is not None
    for kind, layer in zip(module.layer_types, module.layers, strict=False):
        if kind in ("a", "c"):
            residual = getattr(module, "add_value_residual", False)
            _PLACES[layer[1]] = Place(kind == "c", rotary, polar and kind == "a", residual)


@library_rule("x_transformers.x_transformers.Attention")
def x_attention(module: Any) -> Attention | None:
    place = _PLACES.get(module, Place())
    refused = {}
    if reason := _set(module, ATTENDED):
        refused["attended_value"] = reason
    elif place.value_residual:
        refused["attended_value"] = "add_value_residual mixes in the values of the first layer"
    obstacle = _set(module, SCORES)
    turned = place.rotary != "none"
    if obstacle is None and turned and place.cross:
        obstacle = "rotary embeddings turn queries and context by positions of their own"
    if obstacle is None and turned and (module.rotate_num_heads < module.heads or place.rotary == "scaled"):
        obstacle = "rotary embeddings that are scaled (rotary_xpos) or only for some heads are not read"
    if obstacle is None and place.polar:
        obstacle = "polar_pos_emb is not linear in queries and keys"
    weights = None if module.attend.flash else module.attend.attn_dropout
    way_out = "flash attention hides them; build the model without attn_flash"
    settings: dict[str, Any] = {}
    if 1 < module.kv_heads < module.heads:
        # Head h attends with the keys h mod kv_heads, so queries are taken in that order.
        width = module.to_q.out_features // module.heads
        order = [h for kv in range(module.kv_heads) for h in range(kv, module.heads, module.kv_heads)]
        rows = tuple(h * width + i for h in order for i in range(width))
        layers = (projection(module.to_q, rows), projection(module.to_k), projection(module.to_v))
        settings["projections"] = layers
        weights, way_out = None, "they are in another order of heads (attn_kv_heads)"
    return describe_attention(
        module,
        pairs=x_pairs,
        obstacle=obstacle,
        refused=refused,
        rotary=x_rotary if turned and not place.cross else None,
        cross=place.cross,
        output=module.to_out,
        weights=weights,
        weights_obstacle=way_out,
        scale=module.attend.scale,
        dropouts=(*attention_dropouts(module), Dropout(module.attend, "dropout")),  # the second for flash attention
        **settings,
    )


def _set(module: Any, options: dict[str, str]) -> str | None:
    """The reason that goes with the first of these options that a module has switched on."""
    for dotted, reason in options.items():
        value: Any = module
        for name in dotted.split("."):
            value = getattr(value, name, None)
        if value is not None and value is not False and value != 0:
            return reason
    return None


def x_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    """Masks of x-transformers are True where a token is real or a pair allowed."""
    module = attention.module
    passed = [name for name in IN_CALL if call.get(name) is not None]
    if attention.obstacle is None:  # else nothing here depends on how queries and keys are turned
        turned = ["polar_pos_emb"] if attention.rotary is not None else ["polar_pos_emb", "rotary_pos_emb"]
        passed += [name for name in turned if call.get(name) is not None]
    if call.get("value_residual") is not None and "attended_value" not in attention.refused:
        passed.append("value_residual")
    if passed:
        raise UnsupportedSiteError(f"{passed[0]} adds what its projections do not see. Use value or feed_forward here")
    mask, context_mask = call.get("mask"), call.get("context_mask")
    if call.get("context") is None:
        context_mask = mask if context_mask is None else context_mask
    allowed = call.get("attn_mask")
    if allowed is not None and allowed.ndim > 2 and attention.query.rows is not None and allowed.shape[-3] > 1:
        raise UnsupportedSiteError("attn_mask for every head is not read with grouped heads (attn_kv_heads)")
    past = getattr(module, "max_attend_past", None)
    if past is not None:
        queries, keys = (torch.arange(t.shape[-2], device=t.device) for t in (x, context))
        near = queries[:, None] + len(keys) - len(queries) - keys <= past
        allowed = near if allowed is None else allowed & near
    causal = call.get("causal")
    return Pairs(mask, context_mask, allowed, attention.causal if causal is None else bool(causal))


def x_rotary(attention: Attention, call: Call) -> Callable[[Tensor], Tensor] | None:
    del attention
    embedding = call.get("rotary_pos_emb")
    return None if embedding is None else InterleavedRotation(embedding[0])


class InterleavedRotation:
    """(x₁ cos − x₂ sin, x₂ cos + x₁ sin) on neighbouring pairs of the first dimensions, as many as there are angles."""

    def __init__(self, angles: Tensor) -> None:
        self.angles = angles

    def __call__(self, heads: Tensor) -> Tensor:
        width = self.angles.shape[-1]
        angles = self.angles[:, -heads.shape[-2] :].to(heads.dtype)[:, None, None]
        turned, fixed = heads[..., :width], heads[..., width:]
        first, second = turned[..., ::2], turned[..., 1::2]
        crossed = torch.stack((-second, first), -1).flatten(-2)
        return torch.cat((turned * angles.cos() + crossed * angles.sin(), fixed), -1)
