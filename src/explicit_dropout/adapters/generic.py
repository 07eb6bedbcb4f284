"""The usual names: attention with separate or fused linear projections, and feed-forward pairs, in any module.

By its names a module is taken for plain attention: softmax(scale · Q Kᵀ) V, heads side by side, q ‖ k ‖ v where they
are fused, nothing between it and the output projection, causal if it says so (`is_causal`, `causal`, or in its class
name), samples before tokens unless its `batch_first` is False. What shows that it is not (normalised queries, rotary
embeddings, a scale that is learnt, a mask that it keeps) is refused: see `signs`. A feed-forward network gives back the
width that it takes; `places` says where it may stand.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from explicit_dropout.adapters import signs
from explicit_dropout.sites import SCORES, Attention, Described, Dropout, FeedForward, Projection, Rule, register_rule
from explicit_dropout.stochastic import AttentionTreatment

SEPARATE = [
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q_lin", "k_lin", "v_lin"),
    ("to_q", "to_k", "to_v"),
    ("wq", "wk", "wv"),
    ("q", "k", "v"),
]
FUSED = ["qkv", "qkv_proj", "to_qkv", "Wqkv", "in_proj", "c_attn"]
OUTPUT = ["out_proj", "o_proj", "proj", "out_lin", "to_out", "to_out.0", "Wo", "wo", "c_proj", "dense", "o", "out"]
FEED_FORWARD = [
    ("fc1", "fc2"),
    ("fc1_g", "fc1_x", "fc2"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc_in", "fc_out"),
    ("wi_0", "wi_1", "wo"),
    ("wi", "wo"),
    ("w1", "w3", "w2"),
    ("w1", "w2"),
    ("c_fc", "c_proj"),
    ("Wi", "Wo"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("intermediate_dense", "output_dense"),
    ("intermediate.dense", "output.dense"),
]
HEADS = ["num_heads", "num_attention_heads", "n_heads", "heads", "n_head", "num_head", "nhead"]
KEY_HEADS = [
    "num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads", "n_query_groups", "num_heads_kv", "kv_n_heads",
]  # fmt: skip
HEAD_WIDTHS = ["head_dim", "dim_head", "head_size", "key_dim", "d_k"]
SCALES = ["scaling", "scale"]
ATTENTION_DROPOUT = ["attention_dropout", "attn_dropout", "dropout_prob", "dropout_p", "dropout"]
ACTIVATION = re.compile(r"elu|silu|swish|mish|tanh|sigmoid|softplus|activation", re.IGNORECASE)
SEQUENCE = re.compile(r"n?d*ld*ad*ld*")
PROJECTIONS = {name for names in (*SEPARATE, FUSED, OUTPUT) for name in names}


READ = ("torch.nn.", "torchvision.", "timm.", "transformers.")
"""Whose code is known: linear layers do what nn.Linear does, also where they write it anew; networks change nothing in
place."""


def describe(module: nn.Module, **overrides: Any) -> Described | list[Described] | None:
    """What the names of a module's children say it is."""
    attention = describe_attention(module, **{"refused": not_plain(module), **overrides})
    feed_forward = describe_feed_forward(module) or describe_sequence(module)
    return [item for item in (attention, feed_forward) if item is not None] or None


def author(module: nn.Module) -> type:
    """The class that wrote the forward of a module: what a subclass does not change is its base's."""
    return next(base for base in type(module).__mro__ if "forward" in base.__dict__)


def is_read(kind: type) -> bool:
    """Whether a class is of `READ`."""
    return f"{kind.__module__}.".startswith(READ)


def unread(module: nn.Module) -> dict[str, Any]:
    """Settings for attention of a library that nobody here has read: only separate projections are beyond doubt."""
    name = author(module).__qualname__
    reason = f"no rule says what {name} does between its projections and its output"
    refused = dict.fromkeys((*SCORES, "attended_value"), reason)
    if separate_projections(module) is None:
        refused["value"] = f"no rule says how {name} lays out its fused projection"
    return {"refused": refused}


def library_rule(*names: str) -> Callable[[Rule], Rule]:
    """A rule for classes of a library, and for subclasses as long as they keep a forward of the library's own file."""
    files = {name.rpartition(".")[0] for name in names}

    def register(rule: Rule) -> Rule:
        @register_rule(*names)
        def guarded(module: nn.Module) -> Described | list[Described] | None:
            return rule(module) if author(module).__module__ in files else describe(module, **unread(module))

        return rule

    return register


def describe_attention(module: nn.Module, **overrides: Any) -> Attention | None:
    """An attention module by the names of its projections, if it also says how many heads it has."""
    heads = number_of_heads(module)
    if heads is None:
        return None
    projections = overrides.pop("projections", None) or separate_projections(module) or fused_projections(module, heads)
    if projections is None or projections[0].shape[0] % heads:
        return None
    query, key, _ = projections
    width = query.shape[0] // heads
    key_heads = key.shape[0] // width
    widths = {query.shape[0], *(part.shape[1] for part in projections)}
    scale = attribute(module, SCALES)
    settings: dict[str, Any] = {
        "heads": heads,
        "output": output_projection(module),
        "key_heads": None if key_heads == heads else key_heads,
        "scale": float(scale) if isinstance(scale, int | float) and not isinstance(scale, bool) else None,
        "causal": is_causal(module),
        "batch_first": is_batch_first(module),
        "obstacle": signs.normalised(module) or signs.normalised_heads(module, width, widths),
        "weights": None,
        "weights_obstacle": "say where they are in a rule of your own (weights=)",
        "dropouts": tuple(attention_dropouts(module)),
    }
    settings |= overrides
    settings["refused"] = {**shared(module, projections), **settings.get("refused", {})}
    return Attention(module, *projections, **settings)


def lacks_heads(module: nn.Module) -> bool:
    """Whether a module would be taken for attention if it said how many heads it has."""
    fused = any(is_linear(nested(module, name)) for name in FUSED)
    return number_of_heads(module) is None and (fused or separate_projections(module) is not None)


def shared(module: nn.Module, projections: tuple[Projection, Projection, Projection]) -> dict[str, str]:
    """What cannot be told where one layer is called for two of query, key and value: its calls look the same."""
    query, key, value = ((part.module, part.weight, part.rows) for part in projections)
    if query != key and value not in (query, key):
        return {}
    layer = query[0] if query in (key, value) else value[0]
    names = " and ".join(name for name, child in module._modules.items() if child is layer) or "its projections"
    reason = f"{names} are one layer, whose calls cannot be told apart; two layers may have the same weight"
    return dict.fromkeys(SCORES if value not in (query, key) else (*SCORES, "value", "attended_value"), reason)


def describe_feed_forward(module: nn.Module, **overrides: Any) -> FeedForward | None:
    for names in FEED_FORWARD:
        layers = [layer for name in names if is_linear(layer := nested(module, name)) and layer is not None]
        if len(layers) == len(names) and width(layers[0], "in") == width(layers[-1], "out"):
            holder = nested(module, names[0].rpartition(".")[0]) if "." in names[0] else module
            projections = tuple(projection(layer) for layer in with_gates(holder or module, layers))
            dropouts = tuple(feed_forward_dropouts(module, names))
            return FeedForward(
                projections, **{"dropouts": dropouts, "batch_first": is_batch_first(module), **overrides}
            )
    return None


def with_gates(holder: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """The layers of a network and those beside its first that have its shape: by whatever name, they gate it.

    Projections of attention are none, where a block keeps them beside its network.
    """
    first = layers[0]
    gates = [
        child
        for name, child in holder.named_children()
        if is_linear(child)
        and child not in layers
        and [width(child, side) for side in ("in", "out")] == [width(first, side) for side in ("in", "out")]
        and not (name in PROJECTIONS and number_of_heads(holder))
    ]
    return [*layers[:-1], *gates, layers[-1]]


def describe_sequence(module: nn.Module) -> FeedForward | None:
    """An nn.Sequential of two linear layers around an activation, a normalisation before them and dropout anywhere."""
    if not isinstance(module, nn.Sequential) or author(module) is not nn.Sequential:
        return None
    if not SEQUENCE.fullmatch("".join(kind(child) for child in module)):
        return None
    first, last = (child for child in module if is_linear(child))
    if width(first, "in") != width(last, "out"):
        return None
    dropouts = tuple(Dropout(child) for child in module if isinstance(child, nn.Dropout))
    return FeedForward((projection(first), projection(last)), dropouts=dropouts)


def kind(child: nn.Module) -> str:
    """A letter for what a child of an nn.Sequential is: linear, dropout (or nothing), normalisation, activation."""
    if is_linear(child):
        return "l"
    if isinstance(child, nn.Dropout | nn.Identity):
        return "d"
    if isinstance(child, nn.LayerNorm | nn.RMSNorm):
        return "n"
    return "a" if ACTIVATION.search(type(child).__name__) and not child._modules else "?"


def width(layer: Any, side: str) -> int:
    """How many features go in or out of a linear layer, whatever holds its weight."""
    base = getattr(layer, "base_layer", layer)
    features = {"in": ("in_features", "nx"), "out": ("out_features", "nf")}[side]
    return int(next(getattr(base, name) for name in features if hasattr(base, name)))


def separate_projections(module: nn.Module) -> tuple[Projection, Projection, Projection] | None:
    for names in SEPARATE:
        layers = [nested(module, name) for name in names]
        if all(is_linear(layer) for layer in layers):
            query, key, value = (projection(layer) for layer in layers if layer is not None)
            return query, key, value
    return None


def fused_projections(module: nn.Module, heads: int) -> tuple[Projection, Projection, Projection] | None:
    """One layer for query ‖ key ‖ value, with fewer key and value heads where the module has them."""
    layer = next((child for name in FUSED if is_linear(child := nested(module, name))), None)
    found = None if layer is None else fused_heads(module, heads, projection(layer).shape[0])
    if layer is None or found is None:
        return None
    key_heads, width = found
    ends = [0, heads * width, (heads + key_heads) * width, (heads + 2 * key_heads) * width]
    query, key, value = (projection(layer, slice(*ends[part : part + 2])) for part in range(3))
    return query, key, value


def fused_heads(module: nn.Module, heads: int, rows: int) -> tuple[int, int] | None:
    """How many key heads share so many rows with the query heads, and how wide a head is; None if they do not fit.

    Key heads have many names, and one that is not known looks like none at all. What goes into the output projection
    is as wide as the query heads together, whatever the key heads are called.
    """
    said, output = attribute(module, KEY_HEADS), output_projection(module)
    said = said if isinstance(said, int) else None
    if output is None:
        key_heads = said or heads
        each, rest = divmod(rows, heads + 2 * key_heads)
        return None if rest else (key_heads, each)
    each, rest = divmod(width(output, "in"), heads)
    if rest:
        return None
    key_heads, rest = divmod(rows - heads * each, 2 * each)
    if rest or key_heads < 1 or heads % key_heads or said not in (None, key_heads):
        return None
    if key_heads < heads and attribute(module, HEAD_WIDTHS) not in (None, each):
        return None  # values may be wider than queries and keys, which looks the same
    return key_heads, each


def output_projection(module: nn.Module) -> nn.Module | None:
    return next((child for name in OUTPUT if is_linear(child := nested(module, name))), None)


def projection(layer: nn.Module, rows: slice | tuple[int, ...] | None = None) -> Projection:
    return Projection(layer, rows, transposed=_is_conv1d(layer))


def is_linear(layer: nn.Module | None) -> bool:
    """nn.Linear, the Conv1D of GPT-2, or either of them in the wrapping of an adapter library."""
    if layer is None:
        return False
    base = getattr(layer, "base_layer", layer)
    return isinstance(base, nn.Linear) or _is_conv1d(base)


def _is_conv1d(layer: nn.Module) -> bool:
    base = getattr(layer, "base_layer", layer)
    return any(c.__name__ == "Conv1D" and c.__module__.startswith("transformers.") for c in type(base).__mro__)


def nested(module: nn.Module, dotted: str) -> nn.Module | None:
    found: Any = module
    for name in dotted.split("."):
        if not isinstance(found, nn.Module):
            return None
        found = found._modules.get(name)
    return found if isinstance(found, nn.Module) else None


def attribute(module: nn.Module, names: list[str]) -> Any:
    """The first attribute of these names that a module, or its configuration, has."""
    for owner in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(owner, name, None)
            if value is not None:
                return value
    return None


def number_of_heads(module: nn.Module) -> int | None:
    heads = attribute(module, HEADS)
    return heads if isinstance(heads, int) and heads > 0 else None


def not_plain(module: nn.Module) -> dict[str, str]:
    """The scores, refused if something shows that they are not scale · Q Kᵀ of every pair, or of every earlier one.

    And attended values, if they are not A V of the projected values.
    """
    reason = (
        signs.rotary(module, arguments(module))
        or signs.odd_scale(attribute(module, SCALES))
        or signs.temperature(module)
        or signs.kept_mask(module)
        or next(iter(doubts(module)), None)
    )
    values = signs.normalised_values(module)
    refused = {} if reason is None else dict.fromkeys(SCORES, reason)
    return refused if values is None else {**refused, "attended_value": values}


def doubts(module: nn.Module) -> dict[str, bool]:
    """Reasons to refuse scores that a `trial` may settle, each with whether only causal attention settles it."""
    triangle = None if is_causal(module) else signs.kept_triangle(module)
    found = {triangle: True, signs.odd_number(attribute(module, SCALES)): False}
    return {reason: causal for reason, causal in found.items() if reason is not None}


def arguments(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward."""
    return list(inspect.signature(module.forward).parameters)


def is_causal(module: nn.Module) -> bool:
    said = getattr(module, "is_causal", None)
    said = getattr(module, "causal", None) if said is None else said
    return bool(said) if isinstance(said, bool | int) else "causal" in type(module).__name__.lower()


def is_batch_first(module: nn.Module) -> bool:
    """Whether a module is given (batch, token, width), as nearly all are that do not say otherwise."""
    said = getattr(module, "batch_first", None)
    return said if isinstance(said, bool) else True


def below(module: nn.Module) -> Iterator[nn.Module]:
    """All modules inside a module, but none inside a layer of peft: its dropout and its matrices are the adapter's."""
    for child in module.children():
        yield child
        if "base_layer" not in child._modules:
            yield from below(child)


def attention_dropouts(module: nn.Module) -> Iterator[Dropout]:
    """Dropout modules inside attention, and the rates that it keeps as plain numbers."""
    for child in below(module):
        if isinstance(child, nn.Dropout | AttentionTreatment):
            yield Dropout(child)
    for name in ATTENTION_DROPOUT:
        if isinstance(getattr(module, name, None), float):
            yield Dropout(module, name)


def feed_forward_dropouts(module: nn.Module, layers: tuple[str, ...]) -> Iterator[Dropout]:
    """Dropout modules of a feed-forward network. Where its layers stand in a whole block, only what is named for it."""
    if any("." in name for name in layers):
        for name in layers:
            parent = nested(module, name.rsplit(".", 1)[0])
            yield from (
                Dropout(child) for child in (parent.children() if parent else ()) if isinstance(child, nn.Dropout)
            )
        return
    if isinstance(getattr(module, "activation_dropout", None), float):
        yield Dropout(module, "activation_dropout")
    if not any(nested(module, name) for name in ("self_attn", "attention", "attn", "self_attention")):
        yield from (Dropout(child) for child in module.children() if isinstance(child, nn.Dropout))
