"""Where a feed-forward network that was told by its names may stand: in a block, not inside attention.

Small networks that make position biases have the names of feed-forward networks too, and any two linear layers around
an activation look like one. Experts of a mixture are such networks, too, but each sees tokens of its own at every step.
What registered rules say is not asked about here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from explicit_dropout.sites import Attention, Described, FeedForward

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
BLOCK = re.compile(r"block|layer", re.IGNORECASE)
EXPERTS = re.compile(r"expert", re.IGNORECASE)
EXPERT = re.compile(r"expert_?\d+", re.IGNORECASE)
STEERING = re.compile(r"(^|_)(router|gate|gating|norm\d*|layernorm|layer_norm)$", re.IGNORECASE)
POSITIONS = re.compile(r"rel(ative)?_?pos|pos(ition)?_?(bias|mlp)|cpb", re.IGNORECASE)
Path = tuple[str, ...]
REACH = 3
"""How many levels below its block an nn.Sequential may stand: block.feed_forward.residual.network."""


@dataclass(frozen=True, eq=False)
class Found:
    """What a module was described as, and whether its names alone said so."""

    module: nn.Module
    described: Described
    guessed: bool


def in_place(found: Iterable[Found], paths: Mapping[nn.Module, str]) -> Iterator[Found]:
    """All but the feed-forward networks that were guessed and are none by where they stand; experts as one."""
    found = list(found)
    modules = {_parts(path): module for module, path in paths.items()}
    mixtures: set[nn.Module] = set()
    attention = {
        _parts(paths[item.described.module]): item.described for item in found if isinstance(item.described, Attention)
    }
    named = {_parts(path) for module, path in paths.items() if ATTENTION.search(type(module).__name__)}
    claimed = {layer.module for item in found if not _is_sequence(item) for layer in item.described.projections}
    for item in found:
        network, path = item.described, _parts(paths[item.module])
        if item.guessed and isinstance(network, FeedForward) and network.layers:
            if makes_positions(item.module, path) or steers(path) or inside_attention(network, path, attention):
                continue
            if _is_sequence(item) and (
                claimed & {layer.module for layer in network.layers} or not stands_beside(path, named | set(attention))
            ):
                continue
            mixture = mixture_around(path, modules, attention)
            if mixture is not None:
                if mixture not in mixtures:
                    reason = "its experts see different tokens at every step"
                    yield Found(mixture, FeedForward((), mixture, obstacle=reason), guessed=True)
                mixtures.add(mixture)
                continue
        yield item


def mixture_around(path: Path, modules: Mapping[Path, nn.Module], attention: Collection[Path]) -> nn.Module | None:
    """What holds the experts that a network is one of, by its name or by theirs. Whole models are no experts."""
    for length in range(len(path)):
        place = path[:length]
        holder = modules[place]
        names = (type(holder).__name__, *place[-1:])
        listed = isinstance(holder, nn.ModuleList | nn.ModuleDict) and any(EXPERTS.search(name) for name in names)
        expert = path[: length + 1]
        whole = any(other[: len(expert)] == expert for other in attention)
        if (listed or EXPERT.fullmatch(expert[-1])) and not whole:
            return holder
    return None


def makes_positions(module: nn.Module, path: Path) -> bool:
    """Whether the name of a module, of what holds it, or of its class tells of relative positions."""
    return any(POSITIONS.search(name) for name in (type(module).__name__, *path[-2:]))


def steers(path: Path) -> bool:
    """Whether a network makes weights of experts or scales of a normalisation, by its name or that of its holder."""
    return any(STEERING.search(name) for name in path[-2:])


def inside_attention(network: FeedForward, path: Path, attention: Mapping[Path, Attention]) -> bool:
    """Whether a network is a part of attention. A block that keeps its own projections may have one, of its width."""
    for length in range(len(path)):
        around = attention.get(path[:length])
        if around is not None:
            name = type(around.module).__name__
            alone = ATTENTION.search(name) and not BLOCK.search(name)
            if alone or network.layers[0].shape[1] != around.query.shape[1]:
                return True
    return False


def stands_beside(path: Path, attention: Iterable[Path]) -> bool:
    """Whether attention stands in the same block, and no deeper in it."""
    for depth in range(1, min(REACH, len(path)) + 1):
        block = path[:-depth]
        for other in attention:
            if other[: len(block)] == block and 0 < len(other) - len(block) <= depth and other[: len(path)] != path:
                return True
    return False


def _parts(path: str) -> Path:
    return tuple(path.split(".")) if path else ()


def _is_sequence(item: Found) -> bool:
    """Whether it is an nn.Sequential, which no name of its own gives away."""
    return item.guessed and isinstance(item.module, nn.Sequential) and isinstance(item.described, FeedForward)
