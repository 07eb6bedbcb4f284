"""torch.nn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from family.patterns import REAL, TARGET_REAL, TARGETS, layers, networks, numbers
from family.table import Attention, Family, Linear, Part


def mha_parts(embed: int = 32, *, same: bool = True) -> tuple[Part, Part, Part]:
    found = []
    for i, (short, name) in enumerate(zip("qkv", ("query", "key", "value"), strict=True)):
        rows = slice(i * embed, (i + 1) * embed)
        if same:
            found.append(Part("", rows, "in_proj_weight", "in_proj_bias", argument=name))
        else:
            found.append(Part("", None, f"{short}_proj_weight", "in_proj_bias", rows, argument=name))
    return found[0], found[1], found[2]


def mha(name: str, module: Callable[[], nn.Module], call: Callable[[], Any], **settings: Any) -> Family:
    shapes = settings.pop("shapes", ((32, 32),) * 3)
    padding = settings.pop("padding", {})
    parts = settings.pop("parts", mha_parts())
    spec = Attention("", 0, 4, parts, shapes, output="out_proj()", **settings)
    return Family(name, "torch.nn", module, call, (spec,), (), padding)


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 4, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=5)


def torch_families() -> list[Family]:
    x, y, z = numbers(2, 7, 32), numbers(2, 5, 24, seed=1), numbers(2, 5, 16, seed=2)
    quick = {"need_weights": False}
    blocked = torch.rand(7, 7, generator=torch.Generator().manual_seed(3)) < 0.3
    blocked.fill_diagonal_(False)
    bias = numbers(8, 7, 7, seed=4).masked_fill(blocked, -torch.inf)

    def float_mask(call: dict[str, Any], n: int, m: int) -> Tensor:
        return (call["attn_mask"] > -torch.inf).reshape(2, 4, n, m)

    def float_bias(module: nn.Module, call: dict[str, Any], n: int, m: int) -> Tensor:
        del module
        return call["attn_mask"].reshape(2, 4, n, m)

    def bool_mask(call: dict[str, Any], n: int, m: int) -> Tensor:
        del n, m
        return ~call["attn_mask"]

    families = [
        mha(
            "nn.MultiheadAttention, batch first, key_padding_mask",
            lambda: nn.MultiheadAttention(32, 4, batch_first=True),
            lambda: ((x, x, x), {"key_padding_mask": ~REAL, **quick}),
            padding={"real": REAL}, real="real", context="real",
        ),
        mha(
            "nn.MultiheadAttention, token first, boolean attn_mask",
            lambda: nn.MultiheadAttention(32, 4),
            lambda: ((x.transpose(0, 1),) * 3, {"attn_mask": blocked, **quick}),
            pairs=bool_mask, batch_first=False,
        ),
        mha(
            "nn.MultiheadAttention, additive attn_mask for every head",
            lambda: nn.MultiheadAttention(32, 4, batch_first=True, bias=False),
            lambda: ((x, x, x), {"attn_mask": bias, **quick}),
            pairs=float_mask, bias=float_bias,
        ),
        mha(
            "nn.MultiheadAttention, unbatched",
            lambda: nn.MultiheadAttention(32, 4),
            lambda: ((x[0],) * 3, {"attn_mask": blocked, **quick}),
            pairs=bool_mask,
        ),
        mha(
            "nn.MultiheadAttention, cross-attention with kdim and vdim",
            lambda: nn.MultiheadAttention(32, 4, kdim=24, vdim=16, batch_first=True),
            lambda: ((x, y, z), {"key_padding_mask": ~TARGET_REAL, **quick}),
            parts=mha_parts(same=False), shapes=((32, 32), (32, 24), (32, 16)),
            padding={"context": TARGET_REAL}, context="context",
        ),
    ]  # fmt: skip
    families.append(
        Family(
            "torchvision ViT", "torchvision", torchvision_vit, lambda: ((numbers(2, 3, 16, 16),), {}),
            layers(2, "encoder.layers.encoder_layer_{}.self_attention", parts=mha_parts(), output="out_proj()"),
            networks(2, "encoder.layers.encoder_layer_{}.mlp.0", "encoder.layers.encoder_layer_{}.mlp.3"),
        )
    )  # fmt: skip
    for norm_first in (False, True):
        options = {"batch_first": norm_first, "norm_first": norm_first}
        turned = (lambda t: t) if norm_first else (lambda t: t.transpose(0, 1))
        word = "norm first" if norm_first else "norm last, token first"
        families += [
            Family(
                f"nn.TransformerEncoder, {word}",
                "torch.nn",
                lambda o=options: nn.TransformerEncoder(
                    nn.TransformerEncoderLayer(32, 4, 64, **o), 2, enable_nested_tensor=False
                ),
                lambda t=turned: ((t(numbers(2, 7, 32)),), {"src_key_padding_mask": ~REAL}),
                layers(
                    2, "layers.{}.self_attn", parts=mha_parts(), output="out_proj()", real="main", context="main",
                    batch_first=norm_first,
                ),
                networks(2, "layers.{}.linear1", "layers.{}.linear2", real="main", batch_first=norm_first),
                {"main": REAL},
            ),
            decoder_family(f"nn.TransformerDecoder, {word}", options, turned, "", 0),
            transformer_family(f"nn.Transformer, {word}", options, turned),
        ]  # fmt: skip
    return families


CROSS_NOTE = "padded targets count as queries of cross-attention, whose call does not tell them; `padding=` can."
CAUSAL = torch.ones(TARGETS, TARGETS, dtype=torch.bool).triu(1)


def decoder_layers(prefix: str, first: int, batch_first: bool) -> tuple[tuple[Attention, ...], tuple[Linear, ...]]:
    own = layers(
        2, prefix + "layers.{}.self_attn", first, parts=mha_parts(), output="out_proj()", causal=True, real="target",
        context="target", batch_first=batch_first,
    )  # fmt: skip
    cross = layers(
        2, prefix + "layers.{}.multihead_attn", first, parts=mha_parts(), output="out_proj()", cross=True,
        context="main", batch_first=batch_first,
    )  # fmt: skip
    linear = networks(
        2, prefix + "layers.{}.linear1", prefix + "layers.{}.linear2", first=first, real="target",
        batch_first=batch_first,
    )  # fmt: skip
    return own + cross, linear


def decoder_family(name: str, options: dict[str, Any], turned: Any, prefix: str, first: int) -> Family:
    attention, linear = decoder_layers(prefix, first, options["batch_first"])
    masks = {"tgt_mask": CAUSAL, "tgt_key_padding_mask": ~TARGET_REAL, "memory_key_padding_mask": ~REAL}
    return Family(
        name,
        "torch.nn",
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 64, **options), 2),
        lambda: ((turned(numbers(2, 5, 32)), turned(numbers(2, 7, 32, seed=1))), masks),
        attention,
        linear,
        {"main": REAL, "target": TARGET_REAL},
        note=CROSS_NOTE,
    )


def transformer_family(name: str, options: dict[str, Any], turned: Any) -> Family:
    attention, linear = decoder_layers("decoder.", 2, options["batch_first"])
    masks = {
        "tgt_mask": CAUSAL,
        "src_key_padding_mask": ~REAL,
        "tgt_key_padding_mask": ~TARGET_REAL,
        "memory_key_padding_mask": ~REAL,
    }
    encoder = layers(
        2, "encoder.layers.{}.self_attn", parts=mha_parts(), output="out_proj()", real="main", context="main",
        batch_first=options["batch_first"],
    )  # fmt: skip
    inner = networks(
        2, "encoder.layers.{}.linear1", "encoder.layers.{}.linear2", real="main", batch_first=options["batch_first"]
    )
    return Family(
        name,
        "torch.nn",
        lambda: nn.Transformer(32, 4, 2, 2, 64, **options),
        lambda: ((turned(numbers(2, 7, 32)), turned(numbers(2, 5, 32, seed=1))), masks),
        encoder + attention,
        inner + linear,
        {"main": REAL, "target": TARGET_REAL},
        note=CROSS_NOTE,
    )
