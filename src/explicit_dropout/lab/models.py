"""The Transformer encoder of all experiments: the paper's ViT for CIFAR, and the same for sequences of features.

    images   → patches → Linear ┐
                                ├→ + positions → layers → the token that is read → LayerNorm → Linear → logits
    features ──────────→ Linear ┘

Stochastic treatments are modules of the model; penalties are attached to it from outside (`penalties.attach`).
Attention is torch's fused kernel wherever nothing has to be done to the attention weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explicit_dropout import sites
from explicit_dropout.adapters.generic import describe_attention
from explicit_dropout.errors import InputError
from explicit_dropout.lab import config
from explicit_dropout.lab.attention import attention
from explicit_dropout.stochastic import (
    AttentionDropout,
    AttentionTreatment,
    DropAttention,
    DropHead,
    DropKey,
    Dropout,
    DropPath,
    rates_over_depth,
)


class Transformer(nn.Module):
    """A classifier of images (batch, channels, height, width) or sequences (batch, tokens, features)."""

    def __init__(self, shape: Sequence[int], classes: int, model: config.Model, treatment: config.Treatment) -> None:
        super().__init__()
        tokens, features = _tokens(shape, model)
        self.patch, self.read, self.lowered = model.patch, model.read, model.residual == "lowered"
        self.embedding = nn.Linear(features, model.width)
        if model.read == "class":
            self.class_token = nn.Parameter(torch.randn(1, 1, model.width) * 0.02)
            tokens += 1
        self.positions = nn.Parameter(torch.randn(1, tokens, model.width) * 0.02)
        dropped = attention_treatments(treatment, model.layers)
        paths = rates_over_depth(treatment.drop_path, model.layers, "rising")
        self.blocks = nn.ModuleList(
            Block(model, treatment, layer_treatment, path) for layer_treatment, path in zip(dropped, paths, strict=True)
        )
        self.norm = nn.LayerNorm(model.width)
        self.head = nn.Linear(model.width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x if self.patch is None else patches(x, self.patch))
        if self.read == "class":
            x = torch.cat([self.class_token.expand(len(x), -1, -1).to(x.dtype), x], 1)
        x = x + (self.positions.to(x.dtype) if self.lowered else self.positions)
        for block in self.blocks:
            x = block(x)
        match self.read:
            case "class":
                x = x[:, 0]
            case "last":
                x = x[:, -1]
            case _:
                x = x.mean(1)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to its input, with LayerNorm before (pre) or after (post)."""

    def __init__(
        self, model: config.Model, treatment: config.Treatment, weights: AttentionTreatment | None, drop_path: float
    ) -> None:
        super().__init__()
        self.pre = model.norm == "pre"
        self.norm1, self.norm2 = nn.LayerNorm(model.width), nn.LayerNorm(model.width)
        at_value = treatment.rate if treatment.attention == "implicit_v" else 0.0
        inside = treatment.rate if treatment.feed_forward == "implicit" else treatment.extra_dropout
        at_inputs = treatment.rate if treatment.feed_forward == "implicit_inputs" else 0.0
        self.attention = Attention(model.width, model.heads, weights, bias=model.qkv_bias, at_value=at_value)
        self.feed_forward = FeedForward(model.width, model.hidden, inside, at_inputs=at_inputs)
        self.path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.path(self.attention(self.norm1(x)))
            return x + self.path(self.feed_forward(self.norm2(x)))  # type: ignore[no-any-return]
        x = self.norm1(x + self.path(self.attention(x)))
        return self.norm2(x + self.path(self.feed_forward(x)))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """softmax(Q Kᵀ / √head width) V, several heads, with or without a stochastic treatment of its weights.

    at_value: the rate of dropout on the input of the value projection.
    """

    def __init__(
        self, width: int, heads: int, treatment: AttentionTreatment | None, *, bias: bool = True, at_value: float = 0.0
    ) -> None:
        super().__init__()
        self.heads, self.treatment = heads, treatment
        self.query, self.key, self.value = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.before_value = Dropout(at_value) if at_value else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(self.before_value(x))
        return self.out(attention(q, k, v, self.heads, self.treatment))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Linear, GELU, Linear, with dropout after the activation and at the end, as in the public ViT for CIFAR.

    at_inputs: the rate of dropout on the inputs of both layers, instead.
    """

    def __init__(self, width: int, hidden: int, dropout: float, *, at_inputs: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = Dropout(dropout)
        self.before = Dropout(at_inputs) if at_inputs else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.before(F.gelu(self.fc1(self.before(x))))
        return self.dropout(self.fc2(self.dropout(hidden)))  # type: ignore[no-any-return]


@sites.register_rule(Attention)
def attention_rule(module: Attention) -> sites.Attention | None:
    """The attention above for the regulariser: its weights are the softmax of its scores, and nothing else."""
    described = describe_attention(module)
    return None if described is None else dataclasses.replace(described, weights="compute")


def attention_treatments(treatment: config.Treatment, layers: int) -> list[AttentionTreatment | None]:
    """What happens to the attention weights of each layer; None where nothing does."""
    rates = rates_over_depth(treatment.rate, layers, "falling" if treatment.decreasing else "constant")
    match treatment.attention:
        case "dropout":
            return [AttentionDropout(rate) for rate in rates]
        case "drop_attention":
            return [DropAttention(rate, span=treatment.span) for rate in rates]
        case "drop_attention_column":
            return [DropAttention(rate, mode="column", span=treatment.span) for rate in rates]
        case "drop_key":
            return [DropKey(rate) for rate in rates]
        case "drop_head":
            return [DropHead(rate) for rate in rates]
        case _:
            return [None] * layers


def patches(images: Tensor, side: int) -> Tensor:
    """(batch, channels, height, width) → (batch, patches, channels · side²), row by row."""
    batch, channels, height, width = images.shape
    cut = images.reshape(batch, channels, height // side, side, width // side, side)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * side * side)


def _tokens(shape: Sequence[int], model: config.Model) -> tuple[int, int]:
    """How many tokens an example has, and of what width."""
    if model.patch is None:
        if len(shape) != 2:
            raise InputError("model.patch", f"a patch size: the data are images of shape {tuple(shape)}", None)
        return shape[0], shape[1]
    if len(shape) != 3:
        raise InputError("model.patch", f"null: the data are sequences of shape {tuple(shape)}", model.patch)
    channels, height, width = shape
    if height % model.patch or width % model.patch:
        raise InputError("model.patch", f"a divisor of height and width of the images, {height} × {width}", model.patch)
    return height // model.patch * (width // model.patch), channels * model.patch**2
