"""Hooks that compute penalties inside a model's own forward pass, and the place where they leave them.

A term is what one firing of one site contributes: a penalty summed over its tokens, the number of tokens, and, where a
weight enters only through the norms of its columns, the column energies of the input. The weight joins later, when the
regulariser is called: nothing here keeps a weight alive for the backward pass of a linear layer, so sharded weights
may be resharded in between.

Hooks are objects of top-level classes and the collector forgets its terms when it is copied or pickled, so a model with
hooks can be deep-copied and saved; the copy is not regularised.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from explicit_dropout import functional
from explicit_dropout.errors import CollectionError, ExplicitDropoutError, InputError, UnsupportedSiteError
from explicit_dropout.functional.batch import rows_zeroed
from explicit_dropout.noise import Noise
from explicit_dropout.sites import Attention, FeedForward, Pairs, Site

Padding = Literal["auto"] | None | Callable[[str, Tensor], Tensor | None]
"""How padding is known: from the model's arguments, not at all, or by a function of module path and tokens."""
PADDING_ARGUMENTS = {"main": "attention_mask", "decoder": "decoder_attention_mask"}
"""Arguments of a whole model that mark real tokens, (batch, token), for its first sequence and for its decoder's."""


@dataclass(frozen=True, eq=False)
class Term:
    """What one firing of a site adds: J summed over tokens is penalty + ½ v Σ_j columns_j ‖W_:j‖², as far as given."""

    site: str
    penalty: Tensor | None
    columns: Tensor | None
    tokens: int | Tensor
    samples: int


class Forward:
    """The terms of one complete forward pass, linked to the one before it."""

    def __init__(self, terms: list[Term], previous: Forward | None) -> None:
        self.terms, self.previous = terms, previous


class Observed:
    """What hooks have seen of the call of a layer that is under way: its arguments and the tensors inside it."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self.call = call
        self.tensors: dict[str, Tensor] = {}


class _Slot:
    """What one thread has collected."""

    def __init__(self) -> None:
        self.open = False
        self.pending: list[Term] = []
        self.last: Forward | None = None
        self.padding: dict[str, Tensor] = {}
        self.observed: dict[str, Observed] = {}


class Collector:
    """Terms of forward passes since the last call of the regulariser, apart for each thread."""

    def __init__(self, *, inert: bool = False) -> None:
        self.inert = inert
        self.slots: dict[int, _Slot] = {0: _Slot()}

    def slot(self) -> _Slot:
        if torch.compiler.is_compiling():
            return self.slots[0]  # a compiled model has one place, whatever thread runs it
        return self.slots.setdefault(threading.get_ident(), _Slot())

    def take(self) -> list[list[Term]]:
        """The terms of all complete forward passes of this thread, oldest first, and forget them."""
        forwards: list[list[Term]] = []
        for slot in {id(s): s for s in (self.slots[0], self.slot())}.values():
            last, slot.last, slot.pending, slot.observed = slot.last, None, [], {}
            while last is not None:
                forwards.append(last.terms)
                last = last.previous
        return forwards[::-1]

    def __deepcopy__(self, memo: object) -> Collector:
        return Collector(inert=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_collector, ()


def _inert_collector() -> Collector:
    return Collector(inert=True)


class RootHook:
    """Opens the collector before a training forward pass of the whole model and closes it after."""

    def __init__(self, collector: Collector, model: nn.Module) -> None:
        self.collector, self.names = collector, parameter_names(model)

    def before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.collector.inert:
            return
        slot = self.collector.slot()
        slot.open = model.training and torch.is_grad_enabled()
        slot.pending = []
        slot.padding = {}
        slot.observed = {}
        if slot.open:
            call = named_call(self.names, args, kwargs)
            for stream, name in PADDING_ARGUMENTS.items():
                mask = call.get(name)
                if isinstance(mask, Tensor) and mask.ndim == 2:
                    slot.padding[stream] = mask.bool()

    def after(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        del model, args, output
        if self.collector.inert:
            return
        slot = self.collector.slot()
        if slot.open:
            slot.last = Forward(slot.pending, slot.last)
        slot.open = False
        slot.pending = []
        slot.padding = {}


class RootBefore:
    def __init__(self, root: RootHook) -> None:
        self.root = root

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.root.before(model, args, kwargs)


class RootAfter:
    def __init__(self, root: RootHook) -> None:
        self.root = root

    def __call__(self, model: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self.root.after(model, args, output)


class Tap:
    """What the hooks of one layer share: its call, what they have seen of it, and where terms go."""

    def __init__(
        self, sites: Sequence[Site], noise: Noise, collector: Collector, *, literal: bool, padding: Padding
    ) -> None:
        self.sites, self.noise, self.collector = tuple(sites), noise, collector
        self.literal, self.padding_source = literal, padding
        self.described = sites[0].source.described
        self.path = sites[0].source.path
        self.stream = stream(self.path)
        module = self.described.module
        self.names = () if module is None else parameter_names(module)

    def observed(self) -> Observed:
        """What was seen of the call under way; nothing, where the layer is no module of its own."""
        found = self.collector.slot().observed.get(self.path)
        return Observed({}) if found is None else found

    def watching(self, module: nn.Module) -> bool:
        """Whether a firing of this module is part of training.

        Under activation checkpointing the recomputed forward is one too: it must repeat the same computation, although
        nobody collects its result.
        """
        if self.collector.inert or not module.training:
            return False
        if torch.is_grad_enabled():
            return True
        if self.collector.slot().open:
            raise CollectionError(
                f"{self.path} runs without gradients inside a training forward pass, so its penalty would have none. "
                "Reentrant activation checkpointing does that: use checkpoint(..., use_reentrant=False), in "
                "transformers gradient_checkpointing_kwargs={'use_reentrant': False}. Or leave it out by layers=."
            )
        return False

    def add(self, site: Site, penalty: Tensor | None, columns: Tensor | None, x: Tensor, mask: Tensor | None) -> None:
        """Leave a term for the tokens of x that the mask calls real."""
        slot = self.collector.slot()
        if slot.open:
            tokens = x.shape[:-1].numel() if mask is None else mask.sum()
            slot.pending.append(Term(site.name, penalty, columns, tokens, x.shape[:-2].numel()))

    def padding(self, x: Tensor, stream: str | None = None) -> Tensor | None:
        """The real tokens of x, from the arguments of the whole model or as the user says."""
        if self.padding_source is None:
            return None
        if callable(self.padding_source):
            return self.padding_source(self.path, x)
        mask = self.collector.slot().padding.get(stream or self.stream)
        if mask is None:
            return None
        if mask.shape != x.shape[:-1]:
            raise CollectionError(
                f"the {PADDING_ARGUMENTS[stream or self.stream]} of shape {tuple(mask.shape)} does not say which of "
                f"the tokens {tuple(x.shape[:-1])} of {self.path} are real. Attach with padding=None to count all "
                "tokens, or with padding=function(module path, x) → mask."
            )
        return mask

    # ------------------------------------------------------------------------------------------ linear sites

    def linear(self, site: Site, x: Tensor, output: Tensor | None, mask: Tensor | None) -> None:
        """J of a linear layer: coherent from its output now, incoherent from the columns of its input later."""
        assert site.projection is not None
        penalty = columns = None
        if self.noise.mean or not self.noise.variance:
            weight, bias = site.projection.parameters()
            coherent = Noise(self.noise.mean, 0.0)
            penalty = functional.linear(
                x, weight, coherent, bias=bias, output=output, mask=mask, reduction="none"
            ).sum()
        if self.noise.variance:
            columns = column_energies(x, mask)
        self.add(site, penalty, columns, x, mask)


class LinearHook:
    """On a projection: the penalty of a value or feed-forward site."""

    def __init__(self, tap: Tap, site: Site) -> None:
        self.tap, self.site = tap, site

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not self.tap.watching(module):
            return
        assert self.site.projection is not None
        x, described = args[0], self.tap.described
        with located(self.site):
            if isinstance(described, FeedForward):
                mask = described.padding(self.tap.observed().call) if described.padding else None
                mask = self.tap.padding(x) if mask is None else mask
            else:
                mask = self.tap.padding(x, "main" if described.cross else None)
            self.tap.linear(self.site, x, self.site.projection.of(output), mask)


class CallHook:
    """Before a layer is called: keep the arguments that its penalties depend on."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.tap.watching(module):
            slot = self.tap.collector.slot()
            slot.observed[self.tap.path] = Observed(named_call(self.tap.names, args, kwargs))


class SeenHook:
    """On a projection inside attention: keep its input and output until the attention is done."""

    def __init__(self, tap: Tap, role: str) -> None:
        self.tap, self.role = tap, role

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if self.tap.watching(module):
            tensors = self.tap.observed().tensors
            tensors[self.role], tensors[self.role + " out"] = args[0], output


class InputHook:
    """Before a module inside attention (output projection, dropout of weights): keep its input."""

    def __init__(self, tap: Tap, role: str) -> None:
        self.tap, self.role = tap, role

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self.tap.watching(module):
            self.tap.observed().tensors[self.role] = args[0]


class AttentionHook:
    """After attention: the penalties of its scores and of its output, from what the other hooks have kept."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        del args
        tap = self.tap
        if not tap.watching(module):
            return
        layer = AttentionCall(tap, output)
        for site in tap.sites:
            with located(site):
                layer.penalise(site)
        tap.collector.slot().observed.pop(tap.path)


class AttentionCall:
    """One call of one attention module: its inputs, masks and projections in one form, however it was observed."""

    def __init__(self, tap: Tap, output: Any) -> None:
        self.tap, self.output = tap, output
        described, observed = tap.described, tap.observed()
        assert isinstance(described, Attention)
        self.attention, self.call, self.seen = described, observed.call, observed.tensors
        if described.inputs is None:
            self.x, self.context, self.values = (self.seen.get(role) for role in ("query", "key", "value"))
        else:
            self.x, self.context, self.values = (self._sequence(self.call[name]) for name in described.inputs)
        self.pairs: Pairs | None = None

    def _sequence(self, x: Tensor) -> Tensor:
        return x if self.attention.batch_first or x.ndim < 3 else x.transpose(0, 1)

    def masks(self) -> Pairs:
        """The pairs of this call, with the padding of the whole model where the call itself says nothing."""
        if self.pairs is None:
            attention, tap = self.attention, self.tap
            x, context = _present(self.x, "query"), _present(self.context, "key")
            found = attention.pairs(attention, self.call, x, context)
            mask, context_mask = found.mask, found.context_mask
            if mask is None:
                mask = tap.padding(x)
            if context_mask is None:
                context_mask = tap.padding(context, "main" if attention.cross else None)
            self.pairs = replace(found, mask=mask, context_mask=context_mask)
        return self.pairs

    def penalise(self, site: Site) -> None:
        if site.component == "value":
            self.tap.linear(site, _present(self.values, "value"), None, self.masks().context_mask)
        elif site.component == "attended_value":
            self._attended_value(site)
        else:
            self._scores(site)

    def _scores(self, site: Site) -> None:
        attention, tap, pairs = self.attention, self.tap, self.masks()
        x, context = _present(self.x, "query"), _present(self.context, "key")
        (query_weight, query_bias), (key_weight, key_bias) = attention.query.parameters(), attention.key.parameters()
        options: dict[str, Any] = {}
        if context is x:
            if pairs.mask is not None or pairs.context_mask is not None:
                options["context"], options["context_mask"] = context, pairs.context_mask
        else:
            options["context"], options["context_mask"] = context, pairs.context_mask
        if attention.inputs is None:
            options["queries"] = attention.query.of(self.seen["query out"])
            options["keys"] = attention.key.of(self.seen["key out"])
        rotary = None if attention.rotary is None else attention.rotary(attention, self.call)
        merged = tap.literal
        if merged and attention.key_heads not in (None, attention.heads):
            raise UnsupportedSiteError("merged heads need as many key heads as query heads")
        form = getattr(functional, site.component)
        penalty = form(
            x, query_weight, key_weight, tap.noise,
            query_bias=query_bias, key_bias=key_bias,
            heads=1 if merged else attention.heads,
            key_heads=None if merged else attention.key_heads,
            scale=1.0 if tap.literal else attention.score_scale,
            mask=pairs.mask,
            attention_mask=_merged(pairs.allowed, merged),
            causal=pairs.causal,
            rotary=rotary,
            reduction="none",
            **options,
        )  # fmt: skip
        tap.add(site, penalty.sum(), None, x, pairs.mask)

    def _attended_value(self, site: Site) -> None:
        attention, tap = self.attention, self.tap
        weight, bias = attention.value.parameters()
        values = _present(self.values, "value")
        attended = self._attended()
        weights = None
        if tap.noise.variance or attended is None:
            weights = self._weights()
        pairs = self.masks() if self.x is not None and self.context is not None else None
        if pairs is None:
            mask, query_mask = tap.padding(values, "main" if attention.cross else None), None
            query_mask = tap.padding(attended) if attended is not None else None
        else:
            mask, query_mask = pairs.context_mask, pairs.mask
        rows = attended if attended is not None else _present(self.x, "query")
        if mask is not None and query_mask is None:
            query_mask = torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        penalty = functional.attended_value(
            values, weight, weights, tap.noise,
            value_bias=bias, attended=attended, heads=attention.heads, key_heads=attention.key_heads,
            mask=mask, query_mask=query_mask, reduction="none",
        )  # fmt: skip
        tap.add(site, penalty.sum(), None, rows, query_mask)

    def _attended(self) -> Tensor | None:
        """A V, heads side by side, bias included; None where it has to be computed from A."""
        if self.attention.output is not None:
            return _present(self.seen.get("attended"), "output")
        if self.attention.inputs is not None:
            return None
        output = self.output[0] if isinstance(self.output, tuple) else self.output
        return cast("Tensor", output)

    def _weights(self) -> Tensor:
        """A, (*batch, heads, token, context)."""
        source = self.attention.weights
        if isinstance(source, nn.Module):
            return _present(self.seen.get("weights"), "attention weights")
        if source == "output" and isinstance(self.output, tuple) and isinstance(self.output[1], Tensor):
            return self.output[1]
        if source == "compute":
            return self._computed_weights()
        raise UnsupportedSiteError(
            f"its attention weights cannot be had: {self.attention.weights_obstacle or 'no rule says where they are'}. "
            "Or use a law without variance, such as paper(p), which needs none"
        )

    def _computed_weights(self) -> Tensor:
        attention, pairs = self.attention, self.masks()
        heads = []
        for role, projection, x in (("query", attention.query, self.x), ("key", attention.key, self.context)):
            weight, bias = projection.parameters()
            if attention.inputs is None:
                out = projection.of(self.seen[role + " out"])
            else:
                out = torch.nn.functional.linear(_present(x, role), weight, bias)
            number = attention.heads if role == "query" else attention.key_heads or attention.heads
            heads.append(torch.unflatten(out, -1, (number, -1)).transpose(-2, -3).float())
        queries, keys = heads
        keys = keys.repeat_interleave(queries.shape[-3] // keys.shape[-3], -3)
        rotary = None if attention.rotary is None else attention.rotary(attention, self.call)
        if rotary is not None:
            queries, keys = rotary(queries.unsqueeze(-3)).squeeze(-3), rotary(keys.unsqueeze(-3)).squeeze(-3)
        scores = attention.score_scale * queries @ keys.mT
        if pairs.bias is not None:
            scores = scores + pairs.bias
        allowed = pairs.allowed
        if pairs.causal:
            triangle = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            allowed = triangle if allowed is None else allowed & triangle
        if pairs.context_mask is not None:
            real = pairs.context_mask[..., None, None, :]
            allowed = real if allowed is None else allowed & real
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1)


# ---------------------------------------------------------------------------------------------- small helpers


class located:  # noqa: N801 - used as a statement
    """Errors of the closed forms, with the site in front."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, InputError | UnsupportedSiteError):
            raise UnsupportedSiteError(f"{self.site.name}: {error}") from error


def stream(path: str) -> str:
    """Which sequence of a model the layers at this path work on; the mask of text says nothing about images."""
    parts = path.split(".")
    if any(part.startswith(("vision", "visual", "image")) for part in parts):
        return "vision"
    return "decoder" if "decoder" in parts else "main"


def column_energies(x: Tensor, mask: Tensor | None) -> Tensor:
    """Σ x_j² over the tokens that count, float32 at least."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return rows_zeroed(wide, mask).reshape(-1, x.shape[-1]).square().sum(0)


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def named_call(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _present(tensor: Tensor | None, role: str) -> Tensor:
    if tensor is None:
        raise ExplicitDropoutError(f"the {role} projection was not called inside its attention")
    return tensor


def _merged(allowed: Tensor | None, merged: bool) -> Tensor | None:
    if merged and allowed is not None and allowed.ndim > 2 and allowed.shape[-3] != 1:
        raise UnsupportedSiteError("merged heads need one attention mask for all heads")
    return allowed
