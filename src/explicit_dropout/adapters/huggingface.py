"""Hugging Face transformers: attention by the usual names, with its masks and rotary embeddings read from the call.

The library computes the masks of a whole model once and passes them to every attention module, boolean or additive,
(batch, heads or 1, token, context), or None where the fused kernel is told to be causal instead. Families that share
these names differ in what they do with them (how they rotate, cap or normalise), so scores are taken from the families
below alone. Names of transformers 4 (`attention.attention.query` of ViT) and 5 (`attention.q_proj`) are both usual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from explicit_dropout.adapters import generic, signs
from explicit_dropout.adapters.registered import implementation, own_function
from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.sites import Attention, Call, Described, FeedForward, Pairs, Projection, pairs_of, register_rule

PLAIN = {
    "audio_spectrogram_transformer", "bart", "bert", "camembert", "clip", "deit", "distilbert", "electra", "gpt2",
    "hubert", "mbart", "opt", "siglip", "vit", "wav2vec2", "whisper", "roberta", "xlm_roberta",
}  # fmt: skip
"""Families whose attention is softmax(scale · Q Kᵀ + mask) V and nothing else."""
TURNED = {
    "gemma", "gemma2", "gemma3", "gpt_neox", "llama", "mistral", "mixtral", "modernbert", "phi3", "qwen2", "qwen3",
}  # fmt: skip
"""Families that turn queries and keys as `HalfRotation` does, by the `position_embeddings` of the call."""
CACHES = ("past_key_values", "past_key_value", "layer_past")


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
    if not any("Attention" in base.__name__ for base in type(module).__mro__):
        return None
    family = _family(module)
    settings: dict[str, Any] = {"pairs": attention_pairs, "weights": "compute", "departs": own_function}
    if family in TURNED:
        settings["rotary"] = rotary
    if family not in PLAIN | TURNED:
        settings |= generic.unread(module)
    obstacle = _obstacle(module, family in TURNED)
    if obstacle is not None:
        settings["obstacle"] = obstacle
    if "sinks" in module._parameters:
        settings["refused"] = {"attended_value": "attention sinks (sinks) take a part of every row of its weights"}
    if settings.get("obstacle") is not None and settings["weights"] == "compute":
        settings["weights"] = "output" if implementation(module) == "eager" else None
        settings["weights_obstacle"] = "load the model with attn_implementation='eager'"
    return generic.describe_attention(module, **{**settings, **overrides})


def _obstacle(module: Any, turned: bool) -> str | None:
    """What stands between the projections and the scores, if anything does."""
    config = getattr(module, "config", None)
    cap = getattr(module, "attn_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None)
    positions = getattr(module, "position_embedding_type", None)
    if cap is not None:
        return f"attn_logit_softcapping ({cap:g}) caps the scores"
    if "sinks" in module._parameters:
        return "attention sinks (sinks) compete with the scores of the keys"
    if positions not in (None, "absolute"):
        return f"position_embedding_type {positions!r} adds to the scores what depends on queries and keys"
    if turned and "position_embeddings" not in generic.arguments(module):
        return "this version of transformers turns queries and keys inside the module, out of sight"
    return signs.normalised(module)


@generic.library_rule("transformers.models.gpt_neox.modeling_gpt_neox.GPTNeoXAttention")
def gpt_neox(module: Any) -> Attention | None:
    """Query, key and value lie side by side within each head."""
    layout = _interleaved(module, module.config.num_attention_heads, 1, module.head_size)
    return describe_attention(module, projections=layout)


@generic.library_rule("transformers.models.fsmt.modeling_fsmt.Attention")
def fsmt(module: Any) -> Attention | None:
    """All of the model sees (token, batch, width)."""
    return describe_attention(module, batch_first=False)


@generic.library_rule(
    "transformers.models.fsmt.modeling_fsmt.EncoderLayer", "transformers.models.fsmt.modeling_fsmt.DecoderLayer"
)
def fsmt_layer(module: Any) -> FeedForward | None:
    return generic.describe_feed_forward(module, batch_first=False)


@generic.library_rule("transformers.models.bloom.modeling_bloom.BloomAttention")
def bloom(module: Any) -> Attention | None:
    """As in GPT-NeoX; ALiBi is added to the scores and does not depend on what is dropped."""
    layout = _interleaved(module, module.num_heads, 1, module.head_dim)
    weights = module.attention_dropout
    return describe_attention(
        module, projections=layout, weights=weights, obstacle=None, refused={}, scale=module.inv_norm_factor
    )


@generic.library_rule("transformers.models.falcon.modeling_falcon.FalconAttention")
def falcon(module: Any) -> Attention | None:
    """Three layouts: a group of queries, its key and its value, group after group; one group; or as in GPT-NeoX."""
    groups = module.num_kv_heads if module.new_decoder_architecture else 1 if module.multi_query else module.num_heads
    layout = _interleaved(module, groups, module.num_heads // groups, module.head_dim)
    alibi = bool(module.config.alibi)
    return describe_attention(
        module,
        projections=layout,
        rotary=None if alibi else rotary,
        weights="output" if alibi and implementation(module) == "eager" else "compute",
        obstacle=None,
        refused={},
        scale=module.inv_norm_factor,
    )


def _interleaved(module: Any, groups: int, queries: int, width: int) -> tuple[Projection, ...]:
    """One fused layer, in it for every group its queries, then its key, then its value."""
    block = (queries + 2) * width

    def rows(start: int, heads: int) -> tuple[int, ...]:
        return tuple(g * block + start * width + i for g in range(groups) for i in range(heads * width))

    layer = module.query_key_value
    parts = (rows(0, queries), rows(queries, 1), rows(queries + 1, 1))
    return tuple(generic.projection(layer, part) for part in parts)


@generic.library_rule("transformers.models.gpt2.modeling_gpt2.GPT2Attention")
def gpt2(module: Any) -> Attention | None:
    if not module.is_cross_attention:
        return describe_attention(module)
    width = module.embed_dim
    key, value = (generic.projection(module.c_attn, slice(i * width, (i + 1) * width)) for i in range(2))
    projections = (generic.projection(module.q_attn), key, value)
    return describe_attention(module, projections=projections, cross=True, pairs=gpt2_cross_pairs)


@generic.library_rule("transformers.models.opt.modeling_opt.OPTDecoderLayer")
def opt_layer(module: Any) -> FeedForward | None:
    """Its feed-forward layers see the tokens of all samples in one row."""
    found = generic.describe_feed_forward(module)
    return found and replace(found, module=module, padding=unknown_padding, flattened="hidden_states")


def unknown_padding(call: Call) -> Tensor | None:
    """A layer that is not told which tokens are real."""
    del call
    return None


@generic.library_rule("transformers.models.t5.modeling_t5.T5Attention")
def t5(module: Any) -> Attention | None:
    """Scores without a scale, and a bias by relative position, which the first layer computes for all."""
    return describe_attention(module, obstacle=None, refused={}, weights="compute", pairs=t5_pairs, scale=1.0)


def attention_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    _refuse_cache(attention, call, context)
    return _masked(attention, call, call.get("attention_mask"), x, context)


def gpt2_cross_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    return _masked(attention, call, call.get("encoder_attention_mask"), x, context)


def t5_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    _refuse_cache(attention, call, context)
    found = _masked(attention, call, call.get("mask"), x, context)
    bias, module = call.get("position_bias"), cast("Any", attention.module)
    if bias is None and module.has_relative_attention_bias:
        bias = module.compute_bias(x.shape[-2], context.shape[-2], device=x.device)
    if found.bias is not None and bias is not None:
        bias = found.bias + bias
    return Pairs(found.mask, found.context_mask, found.allowed, found.causal, found.bias if bias is None else bias)


def _masked(attention: Attention, call: Call, mask: Any, x: Tensor, context: Tensor) -> Pairs:
    named = implementation(attention.module) or ""
    if "flash" in named and _window(attention.module) is not None:
        raise UnsupportedSiteError(
            f"the sliding window inside {named} cannot be read; load the model with attn_implementation='sdpa'"
        )
    causal = call.get("is_causal")
    causal = attention.causal if causal is None else bool(causal)
    causal = causal and x.shape[-2] == context.shape[-2] and not attention.cross
    if mask is None:
        return Pairs(causal=causal)
    if not isinstance(mask, Tensor):
        raise UnsupportedSiteError(f"an attention mask of type {type(mask).__name__} cannot be read; use sdpa or eager")
    if mask.ndim == 2:
        return Pairs(context_mask=mask.bool(), causal=causal)
    if mask.shape[-1] != context.shape[-2]:
        raise UnsupportedSiteError(
            f"its attention mask speaks of {mask.shape[-1]} keys, its key projection of {context.shape[-2]}: the other "
            "keys come from elsewhere (a cache, a prefix), and nothing is dropped there. Use value or feed_forward here"
        )
    return pairs_of(mask)


def _refuse_cache(attention: Attention, call: Call, context: Tensor) -> None:
    """Keys from a cache are not projected in this call. It may hold those of this call: it was filled meanwhile."""
    cache = next((call[name] for name in CACHES if call.get(name) is not None), None)
    length = getattr(cache, "get_seq_length", None)
    if length is None or attention.cross:
        return
    seen = length(getattr(attention.module, "layer_idx", 0))
    if seen > context.shape[-2]:
        raise UnsupportedSiteError(
            f"it attends to {seen - context.shape[-2]} keys of a cache or prefix (past_key_values), and nothing is "
            "dropped there. Use value or feed_forward here"
        )


def rotary(attention: Attention, call: Call) -> Callable[[Tensor], Tensor] | None:
    embeddings = call.get("position_embeddings")
    if embeddings is None:
        raise UnsupportedSiteError(f"{type(attention.module).__name__} was called without position_embeddings")
    return HalfRotation(*embeddings)


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


def _family(module: nn.Module) -> str:
    """The folder of transformers that the forward of a module comes from."""
    parts = generic.author(module).__module__.split(".")
    return parts[2] if parts[:2] == ["transformers", "models"] and len(parts) > 2 else ""


def _window(module: Any) -> Any:
    own = getattr(module, "sliding_window", None)
    return getattr(getattr(module, "config", None), "sliding_window", None) if own is None else own
