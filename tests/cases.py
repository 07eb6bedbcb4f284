"""Every closed form in every situation it covers: the table that most tests run over.

A case holds named leaf tensors and says how to make a call of them, so that gradients can be compared leaf by leaf even
where an argument, such as a layer's own output, is computed from others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from explicit_dropout import Noise, bernoulli, functional, gaussian, inverted, paper, reference

LAWS = {law.law: law for law in (paper(0.3), bernoulli(0.3), inverted(0.3), gaussian(0.6))}
EXACT_LAWS = {name: law for name, law in LAWS.items() if name != "paper"}

Leaves = dict[str, Tensor]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    site: str
    shapes: dict[str, tuple[int, ...]]
    call: Callable[[Leaves], Call]

    def leaves(self, *, seed: int = 0, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Leaves:
        generator = torch.Generator().manual_seed(seed)
        leaves = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in self.shapes.items()
        }
        return {name: leaf.to(device, dtype) for name, leaf in leaves.items()}

    def closed_form(self, leaves: Leaves, noise: Noise, **overrides: Any) -> Tensor:
        args, options = self.call(leaves)
        return getattr(functional, self.site)(*args, noise, **{**options, **overrides})

    def literal(self, leaves: Leaves, noise: Noise, **overrides: Any) -> Tensor:
        args, options = self.call(leaves)
        return getattr(reference, self.site)(*args, noise, **{**options, **overrides})

    def monte_carlo(self, leaves: Leaves, noise: Noise, samples: int, seed: int = 0, **overrides: Any):
        args, options = self.call(leaves)
        device = next(iter(leaves.values())).device
        generator = torch.Generator(device).manual_seed(seed)
        return reference.monte_carlo(self.site, noise, samples, *args, generator=generator, **{**options, **overrides})


def _lengths(*lengths: int, of: int) -> Tensor:
    """A padding mask (batch, token): the first tokens of each sample are real."""
    return torch.arange(of) < torch.tensor(lengths)[:, None]


PADDING = _lengths(5, 3, of=5)
CONTEXT_PADDING = _lengths(2, 4, of=4)
BANNED = torch.rand(2, 1, 5, 5, generator=torch.Generator().manual_seed(3)) < 0.6
BANNED_BY_HEAD = torch.rand(2, 4, 5, 5, generator=torch.Generator().manual_seed(4)) < 0.6
BANNED_CROSS = torch.rand(5, 4, generator=torch.Generator().manual_seed(5)) < 0.6


def _on(device: torch.device, options: dict[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}


def _linear(**options: Any) -> Callable[[Leaves], Call]:
    def call(leaves: Leaves) -> Call:
        extra = dict(_on(leaves["x"].device, options))
        if "bias" in leaves:
            extra["bias"] = leaves["bias"]
        if extra.pop("output", False):
            extra["output"] = F.linear(leaves["x"], leaves["weight"], leaves.get("bias"))
        return (leaves["x"], leaves["weight"]), extra

    return call


def _feed_forward(**options: Any) -> Callable[[Leaves], Call]:
    def call(leaves: Leaves) -> Call:
        extra = dict(_on(leaves["x"].device, options))
        h = F.gelu(F.linear(leaves["x"], leaves["first"], leaves["first_bias"]))
        if extra.pop("outputs", False):
            extra["biases"] = (leaves["first_bias"], None)
            extra["outputs"] = (F.linear(leaves["x"], leaves["first"], leaves["first_bias"]), None)
        return ((leaves["x"], h), (leaves["first"], leaves["second"])), extra

    return call


def _scores(**options: Any) -> Callable[[Leaves], Call]:
    def call(leaves: Leaves) -> Call:
        extra = dict(_on(leaves["x"].device, options))
        for name in ("query_bias", "key_bias", "context"):
            if name in leaves:
                extra[name] = leaves[name]
        if extra.pop("projected", False):
            source = leaves.get("context", leaves["x"])
            extra["queries"] = F.linear(leaves["x"], leaves["query_weight"], leaves.get("query_bias"))
            extra["keys"] = F.linear(source, leaves["key_weight"], leaves.get("key_bias"))
        return (leaves["x"], leaves["query_weight"], leaves["key_weight"]), extra

    return call


def _attended(**options: Any) -> Callable[[Leaves], Call]:
    def call(leaves: Leaves) -> Call:
        extra = dict(_on(leaves["x"].device, options))
        attention = leaves["scores"].softmax(-1)
        if "value_bias" in leaves:
            extra["value_bias"] = leaves["value_bias"]
        if extra.pop("attended", False):
            groups, heads = extra.get("key_heads", extra["heads"]), extra["heads"]
            values = F.linear(leaves["x"], leaves["weight"], leaves["value_bias"])
            values = values.unflatten(-1, (groups, -1)).transpose(-2, -3).repeat_interleave(heads // groups, -3)
            extra["attended"] = (attention @ values).transpose(-2, -3).flatten(-2)
        return (leaves["x"], leaves["weight"], attention), extra

    return call


def _attention_weights(**options: Any) -> Callable[[Leaves], Call]:
    return lambda leaves: ((leaves["scores"].softmax(-1), leaves["values"]), _on(leaves["values"].device, options))


def _conv(**options: Any) -> Callable[[Leaves], Call]:
    def call(leaves: Leaves) -> Call:
        extra = dict(_on(leaves["x"].device, options))
        if extra.pop("output", False):
            extra["bias"] = leaves["bias"]
            geometry = {k: v for k, v in extra.items() if k in ("stride", "padding", "dilation", "groups")}
            extra["output"] = F.conv2d(leaves["x"], leaves["weight"], leaves["bias"], **geometry)
        return (leaves["x"], leaves["weight"]), extra

    return call


def _plain(**options: Any) -> Callable[[Leaves], Call]:
    return lambda leaves: ((leaves["x"],), _on(leaves["x"].device, options))


X = {"x": (2, 5, 6)}
PROJECTIONS = {"query_weight": (8, 6), "key_weight": (8, 6)}
BIASES = {"query_bias": (8,), "key_bias": (8,)}
GROUPED = {"query_weight": (8, 6), "key_weight": (4, 6), "query_bias": (8,), "key_bias": (4,)}
CROSS = {"context": (2, 4, 3), "query_weight": (8, 6), "key_weight": (8, 3)}

CASES: dict[str, Case] = {
    "linear": Case("linear", {**X, "weight": (4, 6)}, _linear()),
    "linear of one sample": Case("linear", {"x": (5, 6), "weight": (4, 6)}, _linear()),
    "linear of a deep batch": Case("linear", {"x": (2, 1, 3, 5, 6), "weight": (4, 6)}, _linear()),
    "linear with its output": Case("linear", {**X, "weight": (4, 6), "bias": (4,)}, _linear(output=True)),
    "linear with padding": Case("linear", {**X, "weight": (4, 6), "bias": (4,)}, _linear(mask=PADDING)),
    "linear with padding and output": Case(
        "linear", {**X, "weight": (4, 6), "bias": (4,)}, _linear(mask=PADDING, output=True)
    ),
    "value": Case("value", {**X, "weight": (4, 6)}, _linear(mask=PADDING)),
    "feed_forward": Case(
        "feed_forward", {**X, "first": (7, 6), "first_bias": (7,), "second": (6, 7)}, _feed_forward()
    ),
    "feed_forward with outputs": Case(
        "feed_forward",
        {**X, "first": (7, 6), "first_bias": (7,), "second": (6, 7)},
        _feed_forward(outputs=True, mask=PADDING),
    ),
    "hidden": Case("hidden", X, _plain()),
    "hidden with padding": Case("hidden", X, _plain(mask=PADDING)),
    "drop_path": Case("drop_path", X, _plain()),
    "drop_path with padding": Case("drop_path", X, _plain(mask=PADDING)),
    "drop_head": Case("drop_head", {**X, "weight": (4, 6)}, _linear(heads=3)),
    "drop_head with output": Case(
        "drop_head", {**X, "weight": (4, 6), "bias": (4,)}, _linear(heads=3, output=True, mask=PADDING)
    ),
    "attended_value": Case(
        "attended_value", {**X, "weight": (4, 6), "scores": (2, 1, 3, 5)}, _attended(heads=1)
    ),
    "attended_value with heads": Case(
        "attended_value",
        {**X, "weight": (8, 6), "scores": (2, 4, 5, 5)},
        _attended(heads=4, mask=PADDING, context_mask=PADDING),
    ),
    "attended_value with shared heads and output": Case(
        "attended_value",
        {**X, "weight": (4, 6), "value_bias": (4,), "scores": (2, 4, 3, 5)},
        _attended(heads=4, key_heads=2, attended=True, mask=_lengths(3, 1, of=3)),
    ),
    "attention_weights": Case(
        "attention_weights", {"values": (2, 2, 5, 3), "scores": (2, 4, 4, 5)}, _attention_weights()
    ),
    "attention_weights with padding": Case(
        "attention_weights",
        {"values": (2, 4, 5, 3), "scores": (2, 4, 4, 5)},
        _attention_weights(mask=_lengths(4, 2, of=4), context_mask=PADDING),
    ),
    "conv 1d": Case("conv", {"x": (2, 4, 9), "weight": (6, 2, 3)}, _conv(groups=2, padding="same", dilation=2)),
    "conv 2d": Case("conv", {"x": (2, 3, 5, 6), "weight": (4, 3, 3, 2)}, _conv(stride=(2, 1), padding=(1, 0))),
    "conv 2d with its output": Case(
        "conv", {"x": (2, 2, 4, 4), "weight": (2, 1, 2, 2), "bias": (2,)}, _conv(groups=2, output=True)
    ),
    "conv 3d": Case("conv", {"x": (1, 2, 2, 3, 4, 3), "weight": (2, 2, 2, 2, 2)}, _conv(padding=1, stride=2)),
    "conv with padding mask": Case(
        "conv", {"x": (2, 3, 8), "weight": (4, 3, 3)}, _conv(stride=2, mask=_lengths(8, 3, of=8))
    ),
}  # fmt: skip
for _site in ("query", "key", "query_key"):
    CASES |= {
        f"{_site}": Case(_site, {**X, **PROJECTIONS}, _scores()),
        f"{_site} of one sample": Case(_site, {"x": (5, 6), **PROJECTIONS}, _scores(heads=2)),
        f"{_site} of a large batch": Case(_site, {"x": (2, 3, 5, 6), **PROJECTIONS}, _scores(heads=4)),
        f"{_site} with biases": Case(_site, {**X, **PROJECTIONS, **BIASES}, _scores(heads=4, scale=0.7)),
        f"{_site} with shared key heads": Case(_site, {**X, **GROUPED}, _scores(heads=4, key_heads=2, projected=True)),
        f"{_site} across": Case(_site, {**X, **CROSS}, _scores(heads=4, context_mask=CONTEXT_PADDING)),
        f"{_site} across a mask": Case(_site, {**X, **CROSS}, _scores(heads=2, attention_mask=BANNED_CROSS)),
        f"{_site} with padding": Case(
            _site, {**X, **PROJECTIONS, **BIASES}, _scores(heads=2, mask=PADDING, projected=True)
        ),
        f"{_site} causal": Case(_site, {**X, **PROJECTIONS, **BIASES}, _scores(heads=2, causal=True)),
        f"{_site} causal over blocks": Case(
            _site, {"x": (1, 37, 6), **GROUPED}, _scores(heads=4, key_heads=2, causal=True)
        ),
        f"{_site} causal with padding": Case(
            _site, {**X, **GROUPED}, _scores(heads=4, key_heads=2, causal=True, mask=PADDING)
        ),
        f"{_site} masked": Case(
            _site, {**X, **GROUPED}, _scores(heads=4, key_heads=2, attention_mask=BANNED, mask=PADDING)
        ),
        f"{_site} masked by head": Case(
            _site, {**X, **GROUPED}, _scores(heads=4, key_heads=2, attention_mask=BANNED_BY_HEAD)
        ),
        f"{_site} masked and causal": Case(
            _site, {**X, **PROJECTIONS}, _scores(heads=4, attention_mask=BANNED_BY_HEAD, causal=True)
        ),
    }
CASES |= {
    f"query_key, one mask{name}": Case("query_key", shapes, _scores(shared_mask=True, **options))
    for name, shapes, options in [
        ("", {"x": (2, 3, 4), "query_weight": (4, 4), "key_weight": (4, 4)}, {"heads": 2}),
        (
            " with biases",
            {"x": (2, 3, 4), "query_weight": (4, 4), "key_weight": (2, 4), "query_bias": (4,), "key_bias": (2,)},
            {"heads": 2, "key_heads": 1, "mask": _lengths(3, 2, of=3)},
        ),
        (" causal", {"x": (2, 3, 4), "query_weight": (4, 4), "key_weight": (4, 4)}, {"heads": 2, "causal": True}),
        (
            " masked",
            {"x": (2, 3, 4), "query_weight": (4, 4), "key_weight": (4, 4)},
            {"heads": 2, "attention_mask": BANNED_BY_HEAD[:, :2, :3, :3]},
        ),
    ]
}
