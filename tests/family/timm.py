"""timm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from family.patterns import (
    ROTARY_LIMITS,
    eva_rotation,
    fused,
    layers,
    networks,
    numbers,
    separate,
    swin_bias,
    swin_pairs,
)
from family.table import SCORES, Family, Part


def timm_model(name: str, **options: Any) -> nn.Module:
    import timm

    return timm.create_model(name, num_classes=5, **options)


def timm_families() -> list[Family]:
    def image(size: int) -> Callable[[], Any]:
        return lambda: ((numbers(2, 3, size, size),), {})

    vit_shapes = ((48, 48),) * 3
    vit = {"parts": fused("qkv", 48, 48, 48), "shapes": vit_shapes, "heads": 3}
    mlp = partial(networks, 2, "blocks.{}.mlp.fc1", "blocks.{}.mlp.fc2", narrow=48, wide=192)
    small = {"embed_dim": 48, "depth": 2, "num_heads": 3}
    eva = {"shapes": vit_shapes, "heads": 3, "output": "proj", "rotation": eva_rotation}
    swin = []
    for stage, (width, heads) in enumerate(((24, 2), (48, 4))):
        parts = fused("qkv", width, width, width)
        swin += layers(
            2, f"layers.{stage}.blocks.{{}}.attn", 2 * stage, parts=parts, heads=heads, output="proj",
            shapes=((width, width),) * 3, pairs=swin_pairs, bias=swin_bias,
        )  # fmt: skip
    swin_mlp = [
        linear
        for stage, width in enumerate((24, 48))
        for linear in networks(
            2, f"layers.{stage}.blocks.{{}}.mlp.fc1", f"layers.{stage}.blocks.{{}}.mlp.fc2", first=2 * stage,
            narrow=width, wide=4 * width,
        )
    ]  # fmt: skip
    return [
        Family(
            "timm ViT", "timm", lambda: timm_model("vit_tiny_patch16_224", img_size=32, **small), image(32),
            layers(2, "blocks.{}.attn", output="proj", **vit), mlp(),
        ),
        Family(
            "timm ViT, normalised and gated attention output", "timm",
            lambda: gated_vit(small), image(32), layers(2, "blocks.{}.attn", output="norm", **vit), mlp(),
        ),
        Family(
            "timm DeiT, distilled", "timm",
            lambda: timm_model("deit_tiny_distilled_patch16_224", img_size=32, **small), image(32),
            layers(2, "blocks.{}.attn", output="proj", **vit), mlp(),
        ),
        Family(
            "timm Swin, shifted windows", "timm",
            lambda: timm_model(
                "swin_tiny_patch4_window7_224", img_size=32, embed_dim=24, depths=(2, 2), num_heads=(2, 4),
                window_size=4,
            ),
            image(32), tuple(swin), tuple(swin_mlp),
        ),
        Family(
            "timm Swin V2", "timm",
            lambda: timm_model(
                "swinv2_tiny_window8_256", img_size=32, embed_dim=24, depths=(2, 2), num_heads=(2, 4), window_size=4
            ),
            image(32),
            tuple(
                replace(spec, parts=biased_parts(spec.shapes[0][0]), weights="attn_drop", bias=None) for spec in swin
            ),
            tuple(swin_mlp), limits=dict.fromkeys(SCORES, ("refused", "cosines")),
        ),
        Family(
            "timm ViT, normalised queries and keys", "timm", lambda: normalised_vit(small), image(32),
            layers(2, "blocks.{}.attn", output="proj", weights="attn_drop", **vit), mlp(),
            limits=dict.fromkeys(SCORES, ("refused", "q_norm")),
            note="with `fused_attn = False`; under the fused kernel attended values have `paper` alone.",
        ),
        Family(
            "timm EVA02, fused qkv", "timm",
            lambda: timm_model("eva02_tiny_patch14_224", img_size=28, **small), image(28),
            layers(2, "blocks.{}.attn", parts=biased_parts(48), **eva),
            networks(2, "blocks.{}.mlp.fc1", "blocks.{}.mlp.fc2", narrow=48, wide=128, packed=2),
            limits=ROTARY_LIMITS,
        ),
        Family(
            "timm EVA02, separate qkv", "timm",
            lambda: timm_model("eva02_base_patch14_224", img_size=28, **small), image(28),
            layers(2, "blocks.{}.attn", parts=separate("q_proj", "k_proj", "v_proj"), **eva),
            networks(
                2, "blocks.{}.mlp.fc1_g", "blocks.{}.mlp.fc1_x", "blocks.{}.mlp.fc2", narrow=48, wide=128
            ),
            limits=ROTARY_LIMITS,
        ),
        Family(
            "timm ViT with rotary embeddings", "timm",
            lambda: timm_model("vit_small_patch16_rope_mixed_224", img_size=32, **small), image(32),
            layers(2, "blocks.{}.attn", parts=fused("qkv", 48, 48, 48), **eva), mlp(), limits=ROTARY_LIMITS,
        ),
        Family(
            "timm ViT, pooled by a latent query (SigLIP)", "timm",
            lambda: pooled_vit(small), image(32),
            layers(2, "blocks.{}.attn", output="proj", **vit)
            + layers(
                1, "attn_pool", 2, parts=(Part("q"), Part("kv", slice(0, 48)), Part("kv", slice(48, 96))),
                shapes=vit_shapes, heads=3, output="proj", cross=True,
            ),
            mlp() + networks(1, "attn_pool.mlp.fc1", "attn_pool.mlp.fc2", first=2, narrow=48, wide=192),
        ),
    ]  # fmt: skip


def biased_parts(width: int) -> tuple[Part, Part, Part]:
    """One fused weight that is used without calling its layer, and biases of their own."""
    query, key, value = (
        Part("", slice(i * width, (i + 1) * width), "qkv.weight", f"{name}_bias", None, argument="x")
        for i, name in enumerate("qkv")
    )
    return query, key, value


def normalised_vit(small: dict[str, Any]) -> nn.Module:
    model = timm_model("vit_tiny_patch16_224", img_size=32, qk_norm=True, **small)
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn.fused_attn = False
    return model


def pooled_vit(small: dict[str, Any]) -> nn.Module:
    """The network inside the pool is no part of its attention, nor is its dropout, which timm leaves at 0."""
    model = timm_model("vit_base_patch16_siglip_224", img_size=32, **small)
    network: Any = model.attn_pool.mlp  # type: ignore[union-attr]
    network.drop1, network.drop2 = nn.Identity(), nn.Identity()
    return model


def gated_vit(small: dict[str, Any]) -> nn.Module:
    from timm.layers.attention import Attention as TimmAttention

    model = timm_model("vit_tiny_patch16_224", img_size=32, **small)
    for block in model.blocks:  # type: ignore[union-attr]
        block.attn = TimmAttention(48, 3, qkv_bias=True, scale_norm=True, gated=True, norm_layer=nn.LayerNorm)
    return model
