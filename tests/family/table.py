"""The form in which a family is written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

COMPONENTS = ("query", "key", "query_key", "value", "attended_value", "feed_forward")
SCORES = ("query", "key", "query_key")
Laws = Literal["every law", "paper", "refused"]


@dataclass(frozen=True)
class Part:
    """A projection: a layer below the attention module, or rows of one; or parameters of the module itself."""

    layer: str = ""
    rows: slice | tuple[int, ...] | None = None
    weight: str = "weight"
    bias: str = "bias"
    bias_rows: slice | tuple[int, ...] | Literal["rows"] | None = "rows"
    transposed: bool = False
    argument: str | None = None  # where no layer is called: the argument that is its input


@dataclass(frozen=True)
class Attention:
    """One attention module of a family. `real` and `context` name the masks of real tokens in `Family.padding`."""

    path: str
    layer: int
    heads: int
    parts: tuple[Part, Part, Part]
    shapes: tuple[tuple[int, int], ...] = ((32, 32), (32, 32), (32, 32))
    key_heads: int | None = None
    output: str | None = None  # the layer whose input is A V; None where the module returns A V; "out_proj()" see truth
    scale: float | None = None
    cross: bool = False
    causal: bool = False
    real: str | None = None
    context: str | None = None
    pairs: Callable[[dict[str, Any], int, int], Tensor | None] | None = None
    rotation: Callable[[nn.Module, dict[str, Any]], Callable[[Tensor], Tensor]] | None = None
    bias: Callable[[nn.Module, dict[str, Any], int, int], Tensor] | None = None
    batch_first: bool = True
    weights: str | None = None  # where scores are refused: the layer whose input is A, or "()" for the second output
    kv_order: tuple[int, ...] | None = None  # the key head of every query head, where it is not h // group


@dataclass(frozen=True)
class Linear:
    """One linear layer of a feed-forward network."""

    path: str
    layer: int
    shape: tuple[int, int]
    real: str | None = None
    transposed: bool = False
    batch_first: bool = True
    flattened: bool = False  # it sees the tokens of all samples in one row


@dataclass(frozen=True)
class Family:
    name: str
    library: str
    build: Callable[[], nn.Module]
    call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    attention: tuple[Attention, ...]
    feed_forward: tuple[Linear, ...] = ()
    padding: dict[str, Tensor] = field(default_factory=dict)
    limits: dict[str, tuple[Laws, str]] = field(default_factory=dict)  # component → laws, a word of the refusal
    value_counts_padding: bool = False  # the mask is an argument of attention alone
    note: str = ""

    def laws(self, component: str) -> Laws:
        return self.limits.get(component, ("every law", ""))[0]
