"""Finding the layers of a model by rules, and what no rule claims."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from explicit_dropout import adapters
from explicit_dropout.adapters import places
from explicit_dropout.errors import InputError
from explicit_dropout.sites import Attention, Described, FeedForward, Layer, Site, sites_of

CROSS_ATTENTION = {
    "crossattention",
    "encoder_attn",
    "EncDecAttention",
    "multihead_attn",
    "cross_attn",
    "cross_attention",
}
"""Names under which layers keep attention to another sequence."""


def find_layers(model: nn.Module) -> list[Layer]:
    """Every attention and feed-forward layer that a rule recognises, numbered by Transformer layer.

    In the order of the model's definition, self-attention opens a layer; cross-attention and feed-forward join it.
    """
    paths = {module: path for path, module in model.named_modules()}
    order = {module: number for number, module in enumerate(paths)}
    found: list[tuple[int, nn.Module, Described]] = []
    for item in adapters.describe_all(paths):
        place, first = _place(item)
        if isinstance(item, Attention) and not item.cross and CROSS_ATTENTION & set(paths[place].split(".")):
            item = replace(item, cross=True, causal=False)
        found.append((order[first], place, item))
    layers, index, has_attention, has_feed_forward = [], -1, False, False
    for _, place, item in sorted(found, key=lambda entry: entry[0]):
        if isinstance(item, Attention):
            if not item.cross or has_feed_forward or index < 0:
                index, has_feed_forward = index + 1, False
            has_attention = True
        else:
            if index < 0 or (has_feed_forward and not has_attention):
                index += 1
            has_feed_forward, has_attention = True, False
        inner = item.layers if isinstance(item, FeedForward) else ()
        layers.append(Layer(index, paths[place], item, tuple(paths[projection.module] for projection in inner)))
    return layers


def _place(item: Described) -> tuple[nn.Module, nn.Module]:
    """The module that a description is of, and the one that gives it its place in the order of the model."""
    if isinstance(item, Attention):
        return item.module, item.query.module
    if item.module is None and not item.layers:
        raise InputError("rule", "a FeedForward with layers, or with a module and an obstacle", item)
    first = item.layers[0].module if item.layers else item.module
    return item.module or first, first  # type: ignore[return-value]


def find_sites(model: nn.Module) -> list[Site]:
    """Every site of the model where a penalty can be attached, without attaching anything."""
    return [site for layer in find_layers(model) for site in sites_of(layer)]


@dataclass(frozen=True)
class Unclaimed:
    """A linear layer that no rule claims, in a block like those whose layers are claimed."""

    path: str
    width: int
    out: int


def unclaimed(model: nn.Module, layers: Iterable[Layer] | None = None) -> list[Unclaimed]:
    """Linear layers that look like attention or a feed-forward network, inside or beside blocks of which rules know.

    layers: those that rules have found, if they are known already. Nothing is said of embeddings, heads, routers.
    """
    found = find_layers(model) if layers is None else layers
    return [Unclaimed(*row) for row in places.left_over(model, [layer.described for layer in found])]


def unclaimed_line(found: Iterable[Unclaimed], most: int = 8) -> str | None:
    """One line about layers that no rule claims, those of one shape together; None where there are none."""
    shapes: dict[str, list[str]] = {}
    for layer in found:
        shapes.setdefault(f"{layer.width} → {layer.out}", []).append(layer.path)
    if not shapes:
        return None
    told, room = [], most
    for shape, paths in shapes.items():
        told += [", ".join(paths[:room]) + (", …" if len(paths) > room else "") + f" ({shape})"]
        room = max(room - len(paths), 1)
    return f"No rule claims: {', '.join(told)}. No penalty acts there: leave it so, or use @xd.register_rule."


def told_once(reasons: Mapping[str, str]) -> list[tuple[list[str], str]]:
    """The reasons of sites, by their names, each once: with the components that it would have left out together."""
    same: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        component = name.rpartition(":")[2]
        same.setdefault(re.sub(rf"(Leave (out )?){component}\b", r"\1\0", reason), []).append(name)
    told = []
    for reason, names in same.items():
        components = [*dict.fromkeys(name.rpartition(":")[2] for name in names)]
        joined = " and ".join(filter(None, (", ".join(components[:-1]), components[-1])))
        told.append((names, reason.replace("\0", joined)))
    return told
