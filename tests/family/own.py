"""Modules of one's own, under the usual names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from family.patterns import GROUPED, Q_K_V, fused, layers, networks, numbers, separate
from family.table import Attention, Family, Linear, Part


class OwnAttention(nn.Module):
    """Home-made, under the usual names."""

    def __init__(self, *, packed: bool) -> None:
        super().__init__()
        self.num_heads, self.packed = 4, packed
        if packed:
            self.qkv = nn.Linear(32, 96)
        else:
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16)
        self.out_proj = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1) if self.packed else (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (t.unflatten(-1, (-1, 8)).transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class CausalSelfAttention(nn.Module):
    """nanoGPT's, causal by its name."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head = 4
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.c_attn(x).split(32, 2))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class ViTSelfAttention(nn.Module):
    """The names of transformers 4, where the output projection is no part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = 4
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        q, k, v = (p(x).unflatten(-1, (4, 8)).transpose(1, 2) for p in (self.query, self.key, self.value))
        return (nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2),)


class ViTLayer(nn.Module):
    """A layer of transformers 4."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {"attention": ViTSelfAttention(), "output": nn.ModuleDict({"dense": nn.Linear(32, 32)})}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(32, 64)})
        self.output = nn.ModuleDict({"dense": nn.Linear(64, 32)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention["output"]["dense"](self.attention["attention"](x)[0])
        return x + self.output["dense"](self.intermediate["dense"](x).relu())


class OwnNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).relu())


def own_families() -> list[Family]:
    def make(attention: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: nn.Sequential(attention(), OwnNetwork(), attention(), OwnNetwork())

    linear = tuple(
        Linear(f"{place}.{name}", layer, shape)
        for layer, place in enumerate((1, 3))
        for name, shape in (("fc1", (64, 32)), ("fc2", (32, 64)))
    )

    def spec(parts: tuple[Part, Part, Part], output: str, **settings: Any) -> tuple[Attention, ...]:
        one = Attention("0", 0, 4, parts, output=output, **settings)
        return one, replace(one, path="2", layer=1)

    run = lambda: ((numbers(2, 7, 32),), {})  # noqa: E731
    return [
        Family(
            "your own, separate projections", "generic", make(partial(OwnAttention, packed=False)), run,
            spec(separate(*Q_K_V), "out_proj", shapes=GROUPED, key_heads=2), linear,
        ),
        Family(
            "your own, fused projection", "generic", make(partial(OwnAttention, packed=True)), run,
            spec(fused("qkv", 32, 32, 32), "out_proj"), linear,
        ),
        Family(
            "your own, causal (nanoGPT)", "generic", make(CausalSelfAttention), run,
            spec(fused("c_attn", 32, 32, 32), "c_proj", causal=True), linear,
        ),
        Family(
            "your own, with the names of transformers 4", "generic", lambda: nn.Sequential(ViTLayer(), ViTLayer()), run,
            layers(2, "{}.attention.attention", parts=separate("query", "key", "value")),
            networks(2, "{}.intermediate.dense", "{}.output.dense"),
        ),
    ]  # fmt: skip
