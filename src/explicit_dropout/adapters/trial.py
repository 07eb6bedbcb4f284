"""Attention of one's own on trial: a call with random tokens tells whether it does what its names say.

Names do not tell everything: how rows of a fused projection are laid out, what acts between attention and the output
projection, whether a position is rotated by a plain function. So a copy of the module, in eval mode, is given random
tokens, and what it attends to is compared with the softmax that its description stands for. Where another way to read
the module explains it (another order of rows, causal or not), that one is taken, and doubts that names have raised are
settled; where none does, what depends on it is refused, in words that name the cause where a reading that no name asks
for explains the call. A module that cannot be tried, since its call wants more than tokens, is taken at its word.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from explicit_dropout.adapters.generic import SCALES
from explicit_dropout.sites import OF_ATTENTION, SCORES, Attention, Projection

TOKENS = (20, 3)
"""How many a call is given: more than there are in most windows, or few for a module that cannot take as many."""
CLOSE = 1e-3
"""So far may what is attended to be from what is expected, relative to its norm."""
ROLES = ("query", "key", "value")
TOKENS_BY_NAME = re.compile(r"(x|hidden|inputs?|context|memory|source|encoder|quer|key|val|[qkv]$|kv|tokens?|states?)")
OTHERS_BY_NAME = re.compile(r"mask|bias|pos|freq|cos|sin|rope|cache|past|len|size|shape|step|layer|height|width|index")


@dataclass(frozen=True)
class Seen:
    """What a call has shown: the outputs of projections, and what goes on to the output projection, (token, width)."""

    outputs: dict[nn.Module, Tensor]
    attended: Tensor

    def of(self, projection: Projection) -> Tensor:
        return projection.of(self.outputs[projection.module])


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
    layers = [part.module for part in attention.projections] + ([attention.output] if attention.output else [])
    known = {id(parameter) for layer in layers for parameter in layer.parameters()}
    others = {name: p for name, p in attention.module.named_parameters() if id(p) not in known}
    if not others or still_explained(attention, others.values(), tokens):
        return None
    acting = [name for name, p in others.items() if not still_explained(attention, [p], tokens)] or [*others]
    named = ", ".join(f"`{name}`" for name in acting[:3]) + (", …" if len(acting) > 3 else "")
    reason = (
        f"tried with random tokens, {type(attention.module).__name__} computes {formula(attention)} only while its "
        f"{named} is what it is now, and that may change"
    )
    return replace(attention, refused={**dict.fromkeys((*SCORES, "attended_value"), reason), **attention.refused})


def still_explained(attention: Attention, others: Iterable[nn.Parameter], tokens: int) -> bool:
    """Whether a reading explains a call as well when other parameters of the module have other values."""
    seen = Trial(attention, moved=others).call(tokens)
    return seen is not None and explains(attention, seen)


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
    return replace(attention, refused={**dict.fromkeys(SCORES, reason), **attention.refused})


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
    scores = attention.score_scale * query @ key.mT
    if attention.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return close(seen.attended, (scores.softmax(-1) @ value).transpose(0, 1).flatten(1))


def heads_of(attention: Attention, seen: Seen, projection: Projection) -> Tensor:
    """(query head, token, width) of queries, or of keys and values, as often as query heads need them."""
    number = attention.heads if projection is attention.query else attention.key_heads or attention.heads
    heads = torch.unflatten(seen.of(projection), -1, (number, -1)).transpose(0, 1)
    return heads.repeat_interleave(attention.heads // number, 0)


def close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).norm() <= CLOSE * expected.norm() + 1e-9)


def contradicted(trial: Trial, seen: Seen, single: Seen) -> Attention:
    """With what depends on how no reading explains the module refused, by a call with one token, which sees itself."""
    attention, name = trial.attention, type(trial.attention.module).__name__
    found = explanation(attention, seen)
    scores = tried_words(attention, found)
    refused, unconfirmed = dict.fromkeys(() if attention.obstacle else SCORES, scores), None
    if not close(single.attended, heads_of(attention, single, attention.value).transpose(0, 1).flatten(1)):
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
    return replace(attention, refused={**refused, **attention.refused}, unconfirmed=unconfirmed)


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


class Trial:
    """A copy of an attention module, with its parameters, for calls that leave nothing behind.

    moved: those of which the copy has its own, with other values.
    """

    def __init__(self, attention: Attention, *, grid: bool = False, moved: Iterable[nn.Parameter] = ()) -> None:
        self.attention, self.grid = attention, grid
        self.copies: dict[nn.Module, nn.Module] = {}
        self.factor = 1.0
        if not can_be_copied(attention):
            return
        module = attention.module
        half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in module.parameters())
        moved = list(moved)
        kept = {id(parameter): parameter for parameter in module.parameters()}
        memo: dict[int, Any] = {} if half else {key: p for key, p in kept.items() if not any(p is one for one in moved)}
        try:
            copied = copy.deepcopy(module, memo).eval()
        except Exception:  # it holds what cannot be copied
            return
        self.copies = {part: memo[id(part)] for part in module.modules() if id(part) in memo}
        for part in copied.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
            part._compiled_call_impl = None
        for dropout in attention.dropouts:
            setattr(self.copies.get(dropout.module, dropout.module), dropout.name, 0.0)
        if half:
            copied.float()
        random = torch.Generator().manual_seed(2)
        for parameter in (memo[id(one)] for one in moved):
            factor, added = 0.5 * torch.randn(2, *parameter.shape, generator=random).to(parameter)
            parameter.data.mul_(1 + factor).add_(added)

    def call(self, tokens: int, *, gradients: bool = False) -> Seen | None:
        """What a call with so many tokens shows; None if it cannot be made or shows too little."""
        if not self.copies:
            return None
        seen = self._call(tokens, gradients)
        if seen is None or tokens == 1 or self.factor != 1:
            return seen
        query, key = (heads_of(self.attention, seen, part) for part in self.attention.projections[:2])
        spread = float((self.attention.score_scale * query @ key.mT).std())
        if not 0 < spread < 1:
            return seen
        self.factor = min((2 / spread) ** 0.5, 100.0)  # so that weights differ
        return self._call(tokens, gradients)

    def role_of_values(self) -> Literal["all", "some", "none", "unknown"]:
        """How much what a token that sees itself alone attends to is made of its values, of all that is projected."""
        with torch.inference_mode(False), torch.enable_grad():
            seen = self.call(1, gradients=True)
            if seen is None or not all(x.requires_grad for x in (seen.attended, *seen.outputs.values())):
                return "unknown"
            outputs = seen.outputs
            anywhere = torch.randn(seen.attended.shape, generator=torch.Generator().manual_seed(1)).to(seen.attended)
            moved = (seen.attended * anywhere).sum()  # and not its square, which a normalisation leaves as it is
            gradients = torch.autograd.grad(moved, [*outputs.values()], materialize_grads=True)
        found = dict(zip(outputs, gradients, strict=True))
        values = self.attention.value.of(found[self.attention.value.module]).norm()
        every = torch.stack([gradient.square().sum() for gradient in found.values()]).sum()
        rest = (every - values.square()).clamp(min=0).sqrt()
        if values <= CLOSE * rest or not values > 0:
            return "none"
        return "all" if rest <= CLOSE * values else "some"

    def _call(self, tokens: int, gradients: bool) -> Seen | None:
        attention, given = self.attention, self._tokens(tokens)
        if given is None:
            return None
        module = self.copies[attention.module]
        output = None if attention.output is None else self.copies[attention.output]
        outputs: dict[nn.Module, list[Tensor]] = {part.module: [] for part in attention.projections}
        attended: list[Tensor] = []
        handles = [
            self.copies[layer].register_forward_hook(lambda _m, _args, out, kept=kept: kept.append(out))
            for layer, kept in outputs.items()
        ]
        if output is not None:
            handles.append(output.register_forward_pre_hook(lambda _m, args: attended.extend(args[:1])))
        try:
            with quietly(given[0].device, gradients):
                result = module(*(x.requires_grad_(gradients).clone() for x in given))
        except Exception:  # it wants something else
            return None
        finally:
            for handle in handles:
                handle.remove()
        if output is None:
            attended = [result[0] if isinstance(result, tuple | list) and result else result]
        every = [*outputs.values(), attended]
        if any(len(kept) != 1 or not isinstance(kept[0], Tensor) for kept in every):
            return None
        rows = {layer: kept[0] for layer, kept in outputs.items()}
        if any(kept[0].shape[:-1].numel() != tokens for kept in every):
            return None
        if gradients:  # of the outputs as the model has made them
            return Seen(rows, attended[0].reshape(tokens, -1))
        return Seen(
            {layer: out.reshape(tokens, -1).double() for layer, out in rows.items()},
            attended[0].reshape(tokens, -1).double(),
        )

    def _tokens(self, number: int) -> list[Tensor] | None:
        """An argument for each that the call needs, if all of them are tokens by their names and of one width."""
        attention = self.attention
        needed = [
            argument
            for argument in inspect.signature(attention.module.forward).parameters.values()
            if argument.default is argument.empty
            and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        ]
        widths = {part.shape[1] for part in attention.projections}
        if not needed or len(widths) > 1:
            return None
        others = [argument.name for argument in needed[1:]]
        if any(OTHERS_BY_NAME.search(name) or not TOKENS_BY_NAME.match(name) for name in others):
            return None
        held = attention.query.held
        device, dtype = (torch.device("cpu"), torch.float32) if held is None else (held.device, held.dtype)
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        random = torch.Generator().manual_seed(0)
        shape = (1, number, *widths) if attention.batch_first else (number, 1, *widths)
        shape = (1, number, 1, *widths) if self.grid else shape
        return [self.factor * torch.randn(shape, generator=random).to(device, dtype) for _ in needed]


def can_be_copied(attention: Attention) -> bool:
    """Whether a module and its parameters are what plain PyTorch makes, and its projections are called inside it."""
    module, inside = attention.module, set(attention.module.modules())
    parameters = list(module.parameters())
    plain = all(
        type(parameter) is nn.Parameter and parameter.is_floating_point() and not parameter.is_meta
        for parameter in parameters
    )
    called = all(part.called and part.module in inside for part in attention.projections)
    own = not any("forward" in vars(part) for part in inside)
    return bool(parameters) and plain and called and own and (attention.output is None or attention.output in inside)


def quietly(device: torch.device, gradients: bool) -> ExitStack:
    """Without autocast, without a compiler, and with the random numbers of everybody else left as they are."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
    stack.enter_context(torch.autocast(device.type, enabled=False))
    stack.enter_context(torch.set_grad_enabled(gradients))
    if "torch._dynamo" in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack
