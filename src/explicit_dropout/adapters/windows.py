"""Hugging Face transformers that attend within windows: what fills these up is no token of the model's.

Windows of images are filled up where they do not divide the patches, sequences up to a whole number of windows. Only
the call of attention tells which of its rows are real, so values are measured there, not at their own projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from explicit_dropout.adapters import generic, huggingface
from explicit_dropout.sites import Attention, Call, FeedForward, Pairs

MODELS = "transformers.models."


@generic.library_rule(
    MODELS + "swin.modeling_swin.SwinAttention",
    MODELS + "swin.modeling_swin.SwinSelfAttention",  # of transformers 4
    MODELS + "swinv2.modeling_swinv2.Swinv2SelfAttention",
    MODELS + "swin2sr.modeling_swin2sr.Swin2SRSelfAttention",
    MODELS + "donut.modeling_donut_swin.DonutSwinSelfAttention",
    MODELS + "maskformer.modeling_maskformer_swin.MaskFormerSwinSelfAttention",
    MODELS + "clap.modeling_clap.ClapAudioSelfAttention",
)
def swin(module: Any) -> Attention | None:
    return measured_at_call(module, image_pairs)


@generic.library_rule(
    MODELS + "longformer.modeling_longformer.LongformerSelfAttention",
    MODELS + "led.modeling_led.LEDEncoderSelfAttention",
)
def longformer(module: Any) -> Attention | None:
    """Projections see (token, batch, width), the module itself (batch, token, width)."""
    return measured_at_call(module, text_pairs)


@generic.library_rule(
    MODELS + "longformer.modeling_longformer.LongformerLayer", MODELS + "led.modeling_led.LEDEncoderLayer"
)
def longformer_layer(module: Any) -> FeedForward | None:
    found = generic.describe_feed_forward(module)
    return found and replace(found, module=module, padding=real_tokens)


def measured_at_call(module: Any, pairs: Any) -> Attention | None:
    """Separate projections of the one argument that all of them are given."""
    projections = generic.separate_projections(module)
    if projections is None:
        return None
    parts = tuple(replace(part, called=False) for part in projections)
    return huggingface.describe_attention(module, projections=parts, inputs=("hidden_states",) * 3, pairs=pairs)


def image_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    """Padding is of zeros, put in just before the windows are cut; a normalised patch is not zero everywhere."""
    del attention, call, context
    real = (x != 0).any(-1)
    return Pairs(real, real)


def text_pairs(attention: Attention, call: Call, x: Tensor, context: Tensor) -> Pairs:
    del attention, x, context
    real = real_tokens(call)
    return Pairs(real, real)


def real_tokens(call: Call) -> Tensor | None:
    """The padding that the model was told of, and its own after that."""
    padded = call.get("is_index_masked")
    return None if padded is None else ~padded
