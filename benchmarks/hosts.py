"""The models that benchmarks attach to: ViT and GPT-2 of Hugging Face transformers, as they come, and their batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explicit_dropout.stochastic import DropKey


class Host(NamedTuple):
    """How to make a model, given the rate of its own dropout, and a batch for it, with labels."""

    make: Callable[[float], nn.Module]
    batch: dict[str, Tensor]


def transformers() -> Any:
    """The library, imported when it is needed.

    It imports torchvision where that is installed, whose default wheel cannot load its operators beside a CPU build of
    torch. Declaring the two schemas that it asks for is enough.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        pass
    except RuntimeError:
        _torchvision.append(torch.library.Library("torchvision", "FRAGMENT"))
        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                _torchvision[-1].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import transformers

    return transformers


_torchvision: list[torch.library.Library] = []
"""Schemas live as long as their library."""


def vit(dropout: float, *, image: int, patch: int, width: int, layers: int, heads: int, inner: int) -> nn.Module:
    library = transformers()
    config = library.ViTConfig(
        image_size=image, patch_size=patch, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, num_labels=10, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        problem_type="single_label_classification",  # found out in the first step otherwise, and compiled anew for it
    )  # fmt: skip
    return fused(library.ViTForImageClassification(config))


def gpt2(dropout: float, *, width: int, layers: int, heads: int, length: int) -> nn.Module:
    library = transformers()
    config = library.GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, n_positions=length,
        attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return fused(library.GPT2LMHeadModel(config))


def fused(model: nn.Module) -> nn.Module:
    """The model with torch's fused attention and no mask, in every mode.

    transformers looks at the batch to find out that nothing is padded or packed. A step that is compiled or captured
    cannot look: it would get a mask, and with it a slower attention than the eager step.
    """
    transformers().AttentionInterface.register("fused", fused_attention)
    model.set_attn_implementation("fused")  # type: ignore[operator]
    return model


def fused_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention in the form that transformers asks for."""
    if attention_mask is not None:
        raise ValueError("benchmarks have no padding, and no mask")
    attended = F.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=module.is_causal, scale=scaling
    )
    return attended.transpose(1, 2), None


def images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(10, (batch,))}


def tokens(batch: int, length: int, vocabulary: int = 50257) -> dict[str, Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def hosts(device: str) -> dict[str, Host]:
    """The models of the step-time benchmark, by name."""
    if device == "cpu":
        return {
            "small ViT, batch 16": Host(
                lambda p: vit(p, image=32, patch=4, width=192, layers=4, heads=6, inner=384), images(16, 32)
            ),
        }
    return {
        "ViT-7 (CIFAR), batch 512": Host(
            lambda p: vit(p, image=32, patch=4, width=384, layers=7, heads=12, inner=384), images(512, 32)
        ),
        "ViT-B/16, batch 128": Host(
            lambda p: vit(p, image=224, patch=16, width=768, layers=12, heads=12, inner=3072), images(128, 224)
        ),
        "GPT-2 small, 16 × 1024": Host(
            lambda p: gpt2(p, width=768, layers=12, heads=12, length=1024), tokens(16, 1024)
        ),
    }


def drop_keys(model: nn.Module, rate: float) -> None:
    """Let every attention of the model draw keys to drop in train mode, before the softmax."""
    transformers().AttentionInterface.register("drop_key", drop_key_attention)
    model.set_attn_implementation("drop_key")  # type: ignore[operator]
    for module in list(model.modules()):
        if hasattr(module, "is_causal"):
            module.drop_key = DropKey(rate)


def drop_key_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention with DropKey, in the form that transformers asks for. Keys cannot be dropped in fused attention."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None:
        raise ValueError("benchmarks have no padding, and no mask")
    if module.is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    weights = module.drop_key(scores).to(value.dtype)
    return (weights @ value).transpose(1, 2), weights
