"""Attention of one's own on trial: a call with random tokens tells whether it does what its names say.

Names do not tell everything: how rows of a fused projection are laid out, what acts between attention and the output
projection, whether a position is rotated by a plain function. So a copy of the module, in eval mode, is given random
tokens, and what it attends to is compared with the softmax that its description stands for. Where another way to read
the module explains it (another order of rows, causal or not), that one is taken, and doubts that names have raised are
settled; where none does, what depends on it is refused, in words that name the cause where a reading that no name asks
for explains the call. A module that cannot be tried, since its call wants more than tokens, is taken at its word.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from explicit_dropout.adapters.generic import SCALES
from explicit_dropout.adapters.trial import Seen, Trial, attended, close, heads_of
from explicit_dropout.sites import OF_ATTENTION, SCORES, Attention, Projection

TOKENS = (20, 3)
"""How many a call is given: more than there are in most windows, or few for a module that cannot take as many."""
ROLES = ("query", "key", "value")


def tried(attention: Attention, doubts: Mapping[str, bool]) -> Attention:
    """The same attention, read as a call of it shows; with what no reading explains refused.

    doubts: reasons to refuse scores that are none where a reading explains the call, some only if that one is causal.
    """
    trial = Trial(attention)
    seen = next((seen for number in TOKENS if (seen := trial.call(number)) is not None), None)
    if seen is None:
        return tried_on_grid(attention)
    for output in outputs(attention):
        going_on = seen if output is attention else Trial(output).call(len(seen.attended))
        for reading in readings(output):
            if going_on is not None and explains(reading, going_on):
                return moved(reading, len(going_on.attended)) or settled(reading, doubts)
    single = trial.call(1)
    return attention if single is None else contradicted(trial, seen, single)


def moved(attention: Attention, tokens: int) -> Attention | None:
    """The same, with what depends on how refused, if it is something else once its other parameters change; or None.

    Gains of 1 and low-rank updates of 0 do nothing at first, and training or a checkpoint makes them do something.
    """
    reason = only_now(attention, lambda some: explained_when_moved(attention, some, tokens), formula(attention))
    if reason is None:
        return None
    return with_values_as_they_stay(replace(attention, refused={**dict.fromkeys(SCORES, reason), **attention.refused}))


def only_now(attention: Attention, holds: Callable[[Iterable[nn.Parameter]], bool], what: str) -> str | None:
    """Why a module computes something only now, if that does not hold once some other parameters have other values."""
    others = other_parameters(attention)
    if not others or holds(others.values()):
        return None
    acting = [name for name, one in others.items() if not holds([one])] or [*others]
    named = ", ".join(f"`{name}`" for name in acting[:3]) + (", …" if len(acting) > 3 else "")
    return (
        f"tried with random tokens, {type(attention.module).__name__} computes {what} only while its {named} is what "
        "it is now, and that may change"
    )


def other_parameters(attention: Attention) -> dict[str, nn.Parameter]:
    """What a module learns beside its projections, by name; all that it has beside them where it is frozen."""
    layers = [part.module for part in attention.projections] + ([attention.output] if attention.output else [])
    known = {id(parameter) for layer in layers for parameter in layer.parameters()}
    frozen = not any(parameter.requires_grad for parameter in attention.module.parameters())
    named = attention.module.named_parameters()
    return {name: one for name, one in named if id(one) not in known and (frozen or one.requires_grad)}


def explained_when_moved(attention: Attention, others: Iterable[nn.Parameter], tokens: int) -> bool:
    """Whether a reading explains a call as well when other parameters have other values, or none can have any."""
    trial = Trial(attention, moved=others)
    if not trial.copies:
        return True
    seen = trial.call(tokens)
    return seen is not None and explains(attention, seen)


def with_values_as_they_stay(attention: Attention, *, grid: bool = False) -> Attention:
    """Without attended values, if something may come to act between them and the output projection.

    A token that sees itself alone attends to its value, whatever acts on scores.
    """
    if "attended_value" in attention.refused:
        return attention

    def stays(some: Iterable[nn.Parameter]) -> bool:
        single = Trial(attention, grid=grid, moved=some).call(1)
        return single is None or attends_to_values(attention, single)

    reason = only_now(attention, stays, "the values of a token that sees itself alone")
    return attention if reason is None else replace(attention, refused={**attention.refused, "attended_value": reason})


def attends_to_values(attention: Attention, single: Seen) -> bool:
    """Whether what one token attends to, by itself, is its value."""
    return close(single.attended, heads_of(attention, single, attention.value).transpose(0, 1).flatten(1))


def settled(attention: Attention, doubts: Mapping[str, bool]) -> Attention:
    """A reading that explains a call: its weights are the softmax of its scores, and doubts about these are over."""
    over = {reason for reason, causal in doubts.items() if attention.causal or not causal}
    refused = {name: reason for name, reason in attention.refused.items() if reason not in over}
    plain = not refused and attention.obstacle is None and attention.weights is None
    return replace(attention, refused=refused, weights="compute" if plain else attention.weights)


def tried_on_grid(attention: Attention) -> Attention:
    """The same attention, without scores if its call takes rows and columns of tokens and it attends to all of them."""
    seen = Trial(attention, grid=True).call(TOKENS[0])
    if seen is None or not any(explains(reading, seen) for reading in readings(attention)):
        return attention
    reason = (
        f"{type(attention.module).__name__} attends to a grid of tokens as to one sequence, and is given it as a grid"
    )
    refused = {**dict.fromkeys(SCORES, reason), **attention.refused}
    return with_values_as_they_stay(replace(attention, refused=refused), grid=True)


def outputs(attention: Attention) -> Iterator[Attention]:
    """A module as described, and with each of its other linear layers as the output projection if no name tells it."""
    yield attention
    claimed = {part.module for part in attention.projections}
    for layer in attention.module.modules() if attention.output is None else ():
        if isinstance(layer, nn.Linear) and layer not in claimed and layer.in_features == attention.query.shape[0]:
            yield replace(attention, output=layer)


def readings(attention: Attention) -> Iterator[Attention]:
    """What a module with such names may be: as described, or with a usual scale, causal or not; fused head by head."""
    layouts = [attention, head_by_head(attention)]
    scales = [attention.scale, None, 1 / attention.scale] if attention.scale else [None]
    orders = [attention.causal] if attention.cross else [attention.causal, not attention.causal]
    for layout, scale, causal in itertools.product(layouts, scales, orders):
        if layout is not None:
            yield replace(layout, scale=scale, causal=causal)


def head_by_head(attention: Attention) -> Attention | None:
    """The rows of one layer for query, key and value, with those of each head side by side."""
    layers = {part.module for part in attention.projections}
    rows = sum(part.shape[0] for part in attention.projections)
    if len(layers) > 1 or attention.key_heads not in (None, attention.heads):
        return None
    width = rows // (3 * attention.heads)
    parts = torch.arange(rows).view(attention.heads, 3, width).transpose(0, 1).flatten(1).tolist()
    query, key, value = (replace(part, rows=tuple(own)) for part, own in zip(attention.projections, parts, strict=True))
    return replace(attention, query=query, key=key, value=value)


def explains(attention: Attention, seen: Seen) -> bool:
    """Whether softmax(scale · Q Kᵀ) V of a reading is what was attended to."""
    if attention.causal and seen.of(attention.query).shape[0] != seen.of(attention.key).shape[0]:
        return False
    query, key, value = (heads_of(attention, seen, part) for part in attention.projections)
    return close(seen.attended, attended(attention, query, key, value))


def contradicted(trial: Trial, seen: Seen, single: Seen) -> Attention:
    """With what depends on how no reading explains the module refused, by a call with one token, which sees itself."""
    attention, name = trial.attention, type(trial.attention.module).__name__
    found = explanation(attention, seen)
    scores = tried_words(attention, found)
    refused, unconfirmed = dict.fromkeys(() if attention.obstacle else SCORES, scores), None
    if not attends_to_values(attention, single):
        place = "the output projection" if attention.output is not None else "its output"
        between = f"something acts between the values of {name} and {place}"
        refused["attended_value"] = f"tried with a random token, {between}"
        role, fused = trial.role_of_values(), is_fused(attention)
        values = (
            f"the rows of {name} that look like values" if fused else f"{name}'s {name_of(attention.value, attention)}"
        )
        if found is not None and not same_place(found.value, attention.value):
            unconfirmed, role = scores, "none"
        elif role != "all":
            shown = "has nothing to do with {}" if role == "none" else "cannot be shown to be made of {} alone"
            unconfirmed = f"tried with a random token, what goes to {place} {shown.format(values)}"
        if unconfirmed is not None and (fused or role == "none"):
            refused = dict.fromkeys(OF_ATTENTION, unconfirmed)
    found_out = replace(attention, refused={**refused, **attention.refused}, unconfirmed=unconfirmed)
    return with_values_as_they_stay(found_out)


def explanation(attention: Attention, seen: Seen) -> Attention | None:
    """A reading that explains a call though no name asks for it: another usual scale, or other roles. To be told."""
    width = attention.query.shape[0] // attention.heads
    scales = [attention.scale, None, 1.0, 1 / width, attention.query.shape[0] ** -0.5, width**0.5]
    causal = [attention.causal] if attention.cross else [False, True]
    alike = len({part.shape[0] for part in attention.projections}) == 1
    for layout in filter(None, (attention, head_by_head(attention))):
        orders = itertools.permutations(layout.projections) if alike else [layout.projections]
        for (query, key, value), scale, hides in itertools.product(orders, scales, causal):
            reading = replace(layout, query=query, key=key, value=value, scale=scale, causal=hides)
            if explains(reading, seen):
                return reading
    return None


def tried_words(attention: Attention, found: Attention | None) -> str:
    """What a trial has shown instead of what names suggest, and what to do about it if that is known."""
    name = f"tried with random tokens, {type(attention.module).__name__}"
    grouped = f" ({attention.key_heads} for keys)" if attention.key_heads else ""
    heads = f"{attention.heads} heads of {attention.query.shape[0] // attention.heads}{grouped}"
    said = f"{formula(attention)} with {heads}, which its attribute names suggest"
    if found is None:
        return f"{name} does not compute {said}. Another scale, head layout or order of q, k, v may be the reason"
    layout = rows_of(attention, found)
    order = [role for part in layout.projections for role in ROLES if same_place(getattr(found, role), part)]
    if order != [*ROLES]:
        parts = [f"the {place} part of its fused layer" for place in ("first", "second", "third")]
        if not is_fused(attention):
            parts = [name_of(part, attention) for part in attention.projections]
        uses = ", ".join(f"{part} for {role}" for part, role in zip(parts, order, strict=True))
        return f"{name} does not use its projections as their names suggest, but {uses}"
    scale = next((name for name in SCALES if getattr(attention.module, name, None) is not None), SCALES[-1])
    return (
        f"{name} computes {formula(found)}, not {said}. If it is to do so, let its attribute `{scale}` be "
        f"{found.score_scale:g}, which is read"
    )


def rows_of(attention: Attention, found: Attention) -> Attention:
    """The layout, of the two that a fused layer may have, that a reading is an order of."""
    layout = head_by_head(attention)
    places = [part.rows for part in found.projections]
    return layout if layout is not None and all(part.rows in places for part in layout.projections) else attention


def formula(attention: Attention) -> str:
    """What attention computes, with the scale that it has."""
    width, scale = attention.query.shape[0] // attention.heads, attention.score_scale
    known = {f"q kᵀ / √{width}": width**-0.5, "q kᵀ": 1.0, f"q kᵀ / {width}": 1 / width}
    scores = next((text for text, usual in known.items() if math.isclose(usual, scale)), f"{scale:g} q kᵀ")
    return f"{'causal ' if attention.causal else ''}softmax({scores}) v"


def is_fused(attention: Attention) -> bool:
    """Whether one layer makes two of query, key and value."""
    return len({part.module for part in attention.projections}) < len(attention.projections)


def same_place(one: Projection, other: Projection) -> bool:
    return one.module is other.module and one.rows == other.rows


def name_of(projection: Projection, attention: Attention) -> str:
    """The name of a projection inside its module."""
    names: dict[nn.Module, str] = {child: name for name, child in attention.module.named_modules()}
    return names[projection.module]
