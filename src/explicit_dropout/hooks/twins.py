"""The hooks that replace the dice of a whole model by penalties: before a forward pass of it, and after."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.hooks import deviations
from explicit_dropout.hooks.calls import calls_itself
from explicit_dropout.hooks.collector import Chain, Collector, Term, failed
from explicit_dropout.hooks.dice import Interception
from explicit_dropout.hooks.draws import Draw, Kind, Weighed, is_product, kind_of
from explicit_dropout.hooks.generators import Watch
from explicit_dropout.hooks.taps import Padding
from explicit_dropout.hooks.tokens import Tokens
from explicit_dropout.hooks.widths import Width, Widths
from explicit_dropout.noise import Noise, bernoulli, inverted


@dataclass(frozen=True)
class Twin:
    """A place where a model draws dropout, as a forward pass has found it.

    Attributes:
        path: dotted path of the innermost module that draws.
        component: linear, attention_weights, drop_head, hidden or drop_path: where its effect is measured.
        rate: the model's own.
        name: path and component, and a number where a module draws several of a kind.
    """

    path: str
    component: Kind
    rate: float
    name: str


class TwinHook:
    """A hook of the twins of one model. It is found by its collector, on whatever module it sits."""

    def __init__(self, collector: Collector, dice: Interception) -> None:
        self.collector, self.dice = collector, dice


class EnterHook(TwinHook):
    """Before a forward pass of the whole model: no dice from here on."""

    def __init__(self, collector: Collector, dice: Interception) -> None:
        super().__init__(collector, dice)
        self.entered = False
        self.thread = 0
        self.watch = Watch()

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if self.collector.inert or not model.training:
            return
        if not torch.compiler.is_compiling():
            self._refuse_others(model)
        if self.entered and not torch.compiler.is_compiling():  # a pass was interrupted, and left it on
            if calls_itself(model):
                raise CollectionError(
                    f"{type(model).__name__} calls itself inside its own forward pass. Move what calls it twice into a "
                    "module around it, and convert that one."
                )
            self.dice.leave()
        self.entered = True
        collecting = self.collector.slot().open
        if collecting and self.collector.sharded:
            raise UnsupportedSiteError(
                "FSDP2 takes weights away after a layer's call, and the twins of dropout need them again. Build the "
                "model with rate 0 and attach xd.ExplicitDropout with value and feed_forward, which works sharded."
            )
        if collecting and self.dice.others == "refuse" and not torch.compiler.is_compiling():
            self.watch.begin(model)
        self.dice.enter(collecting)

    def _refuse_others(self, model: nn.Module) -> None:
        if getattr(model, "_is_replica", False):
            raise UnsupportedSiteError(
                "nn.DataParallel runs copies of the model, which keep their dice. Use DistributedDataParallel."
            )
        here = threading.get_ident()
        if self.entered and self.thread != here and self.thread in {one.ident for one in threading.enumerate()}:
            raise CollectionError(
                f"{type(model).__name__} runs in another thread already, and its dice can be taken away in one at a "
                "time only. Run its forward passes one after the other, or convert a copy for each thread."
            )
        self.thread = here


class LeaveHook(TwinHook):
    """After it: the penalties of all draws that were not made. Also after a pass that has failed."""

    def __init__(
        self, entering: EnterHook, model: nn.Module, padding: Padding, width: Width, off: Iterable[Kind]
    ) -> None:
        super().__init__(entering.collector, entering.dice)
        self.entering, self.off = entering, frozenset(off)
        self.tokens, self.widths = Tokens(entering.collector, model, padding), Widths(model, width)
        self.found: dict[str, Twin] = {}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if self.collector.inert or not self.entering.entered:
            return
        self.dice.leave()
        self.entering.entered = False
        self.tokens.look_at(model, args, kwargs)
        collecting, draws = self.dice.collecting, self.dice.take(output)
        if not collecting or failed(output):
            self.entering.watch.abandon()
            return
        self.entering.watch.end(model)
        self.tokens.told = [*(draw.told for draw in draws), self.collector.known()]
        names: dict[str, int] = {}
        for draw in draws:
            kind = kind_of(draw)
            name = f"{draw.path or '(model)'}:{kind}"
            names[name] = names.get(name, 0) + 1
            name = name if names[name] == 1 else f"{name} {names[name]}"
            if name not in self.found or self.found[name].rate != draw.rate:  # which models may change
                self.found[name] = Twin(draw.path, kind, draw.rate, name)
            if kind not in self.off:
                self._add(model, name, kind, draw)
        self.tokens.told = []

    def abandon(self) -> None:
        """Of a pass that was interrupted, by Ctrl-C perhaps, which calls no hooks: give the dice back."""
        if self.entering.entered:
            self.dice.leave()
            self.entering.entered = False

    def _add(self, model: nn.Module, name: str, kind: Kind, draw: Draw | Weighed) -> None:
        try:
            penalty, tokens = self._term(model, kind, draw)
        except InputError as error:
            raise UnsupportedSiteError(f"{name}: {error}") from error
        slot = self.collector.slot()
        slot.pending = Chain(Term(name, penalty, None, tokens, 0, self.tokens.holders(model, draw.path)), slot.pending)

    def _term(self, model: nn.Module, kind: Kind, draw: Draw | Weighed) -> tuple[Tensor, int | Tensor]:
        """The penalty summed over real tokens, and their number."""
        if isinstance(draw, Weighed):
            return self._weighed(model, draw)
        noise = inverted(draw.rate) if draw.rescaled else bernoulli(draw.rate)
        if draw.weights and not is_product(draw):
            raise _unknown_product(draw) if draw.untouched else _changed(draw)
        if kind in ("attention_weights", "drop_head"):
            return self._at_product(model, kind, draw, noise)
        if any(use.masks for use in draw.uses) and is_constant(draw.x):
            raise UnsupportedSiteError(
                f"{draw.path or 'the model'} drops from a constant and multiplies something with the result: a mask "
                "that is shared (locked or variational dropout), which has no twin here. Build it with rate 0."
            )
        x = draw.clean()
        x = x if x.ndim > 1 else x[None]
        axis = self.widths.axis(draw, x)
        x = x if axis == x.ndim - 1 else x.movedim(axis, -1)
        mask = self.tokens.mask(model, draw, x)
        if kind == "linear":
            weight = draw.uses[0].other
            if weight is None or draw.uses[0].changed:
                raise _changed(draw)
            penalty = deviations.linear(x, weight, noise, mask)
        else:
            penalty = deviations.hidden(x, noise, mask)
        return penalty, _number(x.shape[:-2], x.shape[-2], mask)

    def _at_product(self, model: nn.Module, kind: Kind, draw: Draw, noise: Noise) -> tuple[Tensor, int | Tensor]:
        """Of attention weights, or of whole heads, where they are multiplied with values."""
        use = draw.uses[0]
        if use.x is None or use.other is None or use.changed:
            raise _changed(draw)
        weights, values = (self.tokens.by_sample(model, draw, t) for t in (use.x, use.other))
        if weights.ndim == 2:
            weights, values = weights[None, None], values.mT[None, None]  # kept as a weight is
        mask = self.tokens.rows(model, draw, weights)
        if kind == "drop_head":
            heads = weights @ values
            by_head = None if mask is None else mask.unsqueeze(-2).expand(heads.shape[:-1])
            penalty = deviations.hidden(heads, noise, by_head)
        else:
            penalty = deviations.attention_weights(weights, values, noise, mask)
        return penalty, _number(weights.shape[:-3], weights.shape[-2], mask)

    def _weighed(self, model: nn.Module, draw: Weighed) -> tuple[Tensor, int | Tensor]:
        if draw.changed:
            raise _changed(draw)
        queries, keys, values, mask, causal, scale = draw.call()
        if mask is not None and mask.ndim == queries.ndim == 3:
            mask = self.tokens.by_sample(model, draw, mask)
        queries, keys, values = (self.tokens.by_sample(model, draw, t) for t in (queries, keys, values))
        keys, values = (t.expand(*queries.shape[:-3], *t.shape[-3:]) for t in (keys, values))
        rows = self.tokens.rows(model, draw, queries)
        parts = queries, keys, values, mask, causal, scale
        penalty = deviations.fused_attention(parts, inverted(draw.rate), rows)
        return penalty, _number(queries.shape[:-3], queries.shape[-2], rows)


def _changed(draw: Draw | Weighed) -> UnsupportedSiteError:
    return UnsupportedSiteError(
        f"{draw.path or 'the model'}: the model changes what its dropped tensor, or its attention, works with in "
        "place, so that it is lost. Let it write a new tensor instead."
    )


def is_constant(x: Tensor) -> bool:
    """Whether all numbers are the same, as far as that can be looked at."""
    if torch.compiler.is_compiling() or x.is_meta or not x.numel():
        return False
    return bool(x.detach().min() == x.detach().max())


def _unknown_product(draw: Draw) -> UnsupportedSiteError:
    more = any(use.kind for use in draw.uses)
    reason = "A is used elsewhere as well: detach it there" if more else "it was not recognised: write it so"
    return UnsupportedSiteError(
        f"{draw.path}: attention weights A are dropped from, and their twin is about one product A @ V, or "
        f"torch.einsum of the two. Here {reason}, or build the model with rate 0 there."
    )


def _number(lead: torch.Size, tokens: int, mask: Tensor | None) -> int | Tensor:
    return lead.numel() * tokens if mask is None else mask.sum()
