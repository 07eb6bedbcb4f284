"""Where a feed-forward network that was told by its names may stand: in a block, not inside attention.

Small networks that make position biases have the names of feed-forward networks too, and any two linear layers around
an activation look like one. Experts of a mixture are such networks, too, but each sees tokens of its own at every step.
What registered rules say is not asked about here, except for what they leave over: linear layers in blocks of which
they know, in the shape of attention or of a network.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from explicit_dropout.adapters.generic import is_linear, width
from explicit_dropout.sites import Attention, Described, FeedForward

ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
BLOCK = re.compile(r"block|layer", re.IGNORECASE)
EXPERTS = re.compile(r"expert", re.IGNORECASE)
EXPERT = re.compile(r"expert_?\d+", re.IGNORECASE)
STEERING = re.compile(r"(^|_)(router|gate|gating|norm\d*|layernorm|layer_norm)$", re.IGNORECASE)
OTHERS = re.compile(r"conv|mamba|ssm|modulation|adapter|lora", re.IGNORECASE)
POSITIONS = re.compile(r"rel(ative)?_?pos|pos(ition)?_?(bias|mlp)|cpb", re.IGNORECASE)
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
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
    around = named | set(attention)
    claimed = {layer.module for item in found if not _is_sequence(item) for layer in item.described.projections}

    def is_something_else(item: Found, network: FeedForward, path: Path) -> bool:
        if makes_positions(item.module, path) or steers(path) or inside_attention(network, path, attention):
            return True
        if not _is_sequence(item):
            return False
        return bool(claimed & {layer.module for layer in network.layers}) or not stands_beside(path, around)

    for item in found:
        network, path = item.described, _parts(paths[item.module])
        if not (item.guessed and isinstance(network, FeedForward) and network.layers):
            yield item
            continue
        if is_something_else(item, network, path):
            continue
        mixture = mixture_around(path, modules, attention)
        if mixture is None:
            yield item
        elif mixture not in mixtures:
            mixtures.add(mixture)
            reason = "its experts see different tokens at every step"
            yield Found(mixture, FeedForward((), mixture, obstacle=reason), guessed=True)


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


# ---------------------------------------------------------------------------------------------- what is left over


def left_over(model: nn.Module, found: Iterable[Described]) -> list[tuple[str, int, int]]:
    """(path, in, out) of linear layers that no description claims, where those of one module together have the shape
    of attention or of a feed-forward network, in a block that has claimed layers, or in one beside such a block.

    Heads, embeddings, poolers, routers and adapters stand elsewhere, alone, or have other shapes.
    """
    modules = {_parts(path): module for path, module in model.named_modules()}
    taken = claimed_widths(list(found), {module: path for path, module in modules.items()})
    widths: dict[Path, dict[Path, set[int]]] = {}  # by the list that a block stands in, and by block
    for path, features in taken.items():
        stack, block = block_of(path, modules)
        widths.setdefault(stack, {}).setdefault(block, set()).add(features)
    rows: list[tuple[str, int, int]] = []
    for path, holder in modules.items():
        children = {name: child for name, child in holder._modules.items() if (*path, name) not in taken}
        layers = {name: (width(one, "in"), width(one, "out")) for name, one in children.items() if is_linear(one)}
        if len(layers) < 2 or is_linear(holder) or any(path[:end] in taken for end in range(len(path) + 1)):
            continue
        stack, block = block_of((*path, "layer"), modules)
        if stack not in widths or not (stack or len(widths) == 1) or does_something_else(holder, path):
            continue
        known = {features for own in widths[stack].values() for features in own}
        alike = block in widths[stack] or any(same_kind(modules[block], modules[other]) for other in widths[stack])
        shaped = in_shape(layers, known, network=alike)
        rows += [(".".join((*path, name)), *shape) for name, shape in layers.items() if name in shaped]
    return rows


def claimed_widths(found: Sequence[Described], paths: dict[nn.Module, Path]) -> dict[Path, int]:
    """The layers that descriptions claim, with the widths of their inputs, and what is claimed with all inside it."""
    taken = {paths[part.module]: part.shape[1] for item in found for part in item.projections if part.module in paths}
    for item in found:
        if item.module in paths and (isinstance(item, Attention) or item.obstacle):
            taken.setdefault(paths[item.module], 0)
    return taken


def does_something_else(holder: nn.Module, path: Path) -> bool:
    """Whether what holds layers is, by its names, neither attention nor a feed-forward network."""
    mixes = any(OTHERS.search(name) for name in (type(holder).__name__, *path[-1:]))
    return mixes or makes_positions(holder, path) or any(STEERING.search(name) for name in path[-2:])


def block_of(path: Path, modules: Mapping[Path, nn.Module]) -> tuple[Path, Path]:
    """The list that a layer's block stands in, and the block; a list of layers themselves is none. () where is none."""
    for length in range(len(path) - 1, 0, -1):
        stack, block = path[: length - 1], path[:length]
        around = modules.get(stack)
        if not isinstance(around, LISTS) or any(is_linear(child) for child in around.children()):
            continue
        if isinstance(modules.get(stack[:-1]), LISTS) and stack:  # a list of parts, in a list of such lists
            return stack[:-1], stack
        return stack, block
    return (), ()


def same_kind(one: nn.Module, other: nn.Module) -> bool:
    """Whether two blocks are of one class; if that says nothing, whether their parts are."""
    if type(one) is not type(other):
        return False
    return not isinstance(one, LISTS) or [type(part) for part in one.children()] == [
        type(part) for part in other.children()
    ]


def in_shape(layers: Mapping[str, tuple[int, int]], known: Collection[int], *, network: bool) -> set[str]:
    """Names of layers that are like query, key, value and output, or like a network from a known width and back."""
    for features in sorted({*known} - {0}):
        into = {name for name, (before, _) in layers.items() if before == features}
        back = {name for name, (_, after) in layers.items() if after == features}
        if len(into) >= 3 and back and len(into | back) >= 4:
            return into | back
        pairs = [(layers[first][1], layers[last][0]) for first in into for last in back - {first}]
        if any(
            3 * gathered >= rows > gathered >= features for rows, gathered in pairs
        ):  # q ‖ k ‖ v, and what they give
            return into | back
        hidden = {rows for rows, gathered in pairs if network and rows == gathered > features}
        if hidden:
            return {name for name in into | back if hidden & {*layers[name]}}
    return set()
