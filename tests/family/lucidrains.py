"""vit-pytorch and x-transformers."""

from __future__ import annotations

from typing import Any

from torch import nn

from family.patterns import (
    GROUPED,
    IDS,
    REAL,
    ROTARY_LIMITS,
    SELF,
    TARGET_REAL,
    fused,
    layers,
    networks,
    numbers,
    separate,
    within,
    x_rotation,
)
from family.table import Attention, Family, Linear


def x_family(name: str, stack: str, call: Any = None, attention: Any = None, **settings: Any) -> Family:
    """A stack of x-transformers under token embeddings; its layers are attention (and cross-attention) and network."""
    from collections import Counter

    cross = bool(settings.get("cross_attend"))
    causal = stack == "Decoder"
    limits = settings.pop("limits", {})
    spec = {"parts": separate("to_q", "to_k", "to_v"), "output": "to_out", **SELF, **(attention or {})}
    own, others, linear = [], [], []
    place = Counter()
    for i in range(2):
        own.append(Attention(f"attn_layers.layers.{place['']}.1", i, 4, causal=causal, **spec))
        place[""] += 1
        if cross:
            path = f"attn_layers.layers.{place['']}.1"
            others.append(Attention(path, i, 4, cross=True, **{**spec, "context": "other"}))
            place[""] += 1
        base = f"attn_layers.layers.{place['']}.1.ff"
        linear += [Linear(f"{base}.0.0", i, (128, 32)), Linear(f"{base}.2", i, (32, 128))]
        place[""] += 1

    def make() -> nn.Module:
        import x_transformers

        layers_ = getattr(x_transformers, stack)(dim=32, depth=2, heads=4, attn_dim_head=8, verbose=False, **settings)
        return x_transformers.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers_)

    def run() -> Any:
        other = {"context": numbers(2, 5, 32), "context_mask": TARGET_REAL} if cross else {}
        return (IDS,), {"mask": REAL, **other}

    return Family(
        name, "x-transformers", make, call or run, (*own, *others), tuple(linear), {"main": REAL, "other": TARGET_REAL},
        limits, value_counts_padding=True,
        note="`mask` is an argument of attention alone: value and feed-forward sites count all tokens, unless "
        "`padding=` says otherwise.",
    )  # fmt: skip


def lucidrains_families() -> list[Family]:
    def vit(module: str) -> nn.Module:
        import importlib

        options = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4}
        maker = importlib.import_module(f"vit_pytorch.{module}")
        return getattr(maker, "ViT" if module == "vit" else "SimpleViT")(mlp_dim=64, dim_head=8, **options)

    parts = fused("to_qkv", 32, 32, 32)
    picture = lambda: ((numbers(2, 3, 16, 16),), {})  # noqa: E731
    only = {"attended_value": ("paper", "flash")}
    return [
        Family(
            "vit-pytorch ViT", "vit-pytorch", lambda: vit("vit"), picture,
            layers(2, "transformer.layers.{}.0", parts=parts, output="to_out.0"),
            networks(2, "transformer.layers.{}.1.net.1", "transformer.layers.{}.1.net.4"),
        ),
        Family(
            "vit-pytorch SimpleViT", "vit-pytorch", lambda: vit("simple_vit"), simple_picture,
            layers(2, "transformer.layers.{}.0", parts=parts, output="to_out"),
            networks(2, "transformer.layers.{}.1.net.1", "transformer.layers.{}.1.net.3"),
        ),
        x_family("x-transformers Encoder", "Encoder"),
        x_family("x-transformers Encoder, flash attention", "Encoder", attn_flash=True, limits=only),
        x_family("x-transformers Decoder", "Decoder"),
        x_family("x-transformers Decoder with cross-attention", "Decoder", cross_attend=True),
        x_family(
            "x-transformers Encoder, rotary", "Encoder", attention={"rotation": x_rotation}, rotary_pos_emb=True,
            limits=ROTARY_LIMITS,
        ),
        x_family(
            "x-transformers Decoder, near past only", "Decoder", attn_max_attend_past=2,
            attention={"pairs": within(3)},
        ),
        x_family(
            "x-transformers Decoder, one key head", "Decoder", attn_one_kv_head=True,
            attention={"key_heads": 1, "shapes": ((32, 32), (8, 32), (8, 32))},
        ),
        x_family(
            "x-transformers Decoder, grouped heads", "Decoder", attn_kv_heads=2,
            attention={"key_heads": 2, "shapes": GROUPED, "kv_order": (0, 1, 0, 1)},
            limits={"attended_value": ("paper", "order of heads")},
        ),
    ]  # fmt: skip


def simple_picture() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (numbers(2, 3, 16, 16),), {}
