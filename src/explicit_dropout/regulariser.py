"""ExplicitDropout: attach penalties to a model that already exists, and read them after each forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Literal, Never

import torch
from torch import Tensor, nn

from explicit_dropout import checks, kernels
from explicit_dropout.attached import LayerLevel, firings, uncompiled
from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.finding import unclaimed, unclaimed_line
from explicit_dropout.hooks.calls import in_transform
from explicit_dropout.hooks.collector import MOST_FORWARDS, Term
from explicit_dropout.hooks.plan import Plan
from explicit_dropout.hooks.taps import Padding, Tap, check_padding
from explicit_dropout.hooks.told import holders_of
from explicit_dropout.hooks.total import Share
from explicit_dropout.noise import Noise
from explicit_dropout.refusals import (
    Place,
    check_exact,
    may_depart,
    no_forward,
    places_of,
    refuse_chunks,
    refuse_departure,
    refuse_replaced,
    refuse_sharded,
    refuse_silent,
    refuse_unknown,
)
from explicit_dropout.selection import select
from explicit_dropout.sites import COMPONENTS, Layer, Site, projection_of
from explicit_dropout.strengths import Strength
from explicit_dropout.table import heads, shape, table
from explicit_dropout.weights import is_sharded, modules_under_fsdp, sharded_energy

__all__ = ["MOST_FORWARDS", "ExplicitDropout"]


class ExplicitDropout(LayerLevel):
    """J = Σ_sites λ_site · ½ E‖deviation at the site‖² (paper Eqs. 20–22), collected while the model runs.

        reg = xd.ExplicitDropout(model, xd.inverted(0.2), value=1e-3, feed_forward=1e-3)
        loss = criterion(model(x), y) + reg()

    Args:
        model: any model with Transformer layers that a rule recognises (`find_sites` tells).
        noise: the law of the dropout that the penalty stands for; or one for each component, by its name:
            {"query": xd.paper(0.1), "feed_forward": xd.inverted(0.2)}.
        query, key, query_key, value, attended_value, feed_forward: the strength λ of each component: a number, one for
            each layer, a mapping from layer index, or a schedule over calls. None or 0 is off.
        reduction: "token" averages over the real tokens of a batch, "sample" sums over tokens and averages samples.
        layers: indices of the layers to regularise; None for all.
        reading: "model" takes scores as the model has them, head by head with its own scale; "paper" takes the formulas
            literally: heads merged, no scale, sums over tokens (reduction "sample").
        padding: "auto" takes `attention_mask` (and `decoder_attention_mask`) of the model's call as real tokens; None
            counts all tokens; a function of (module path, x) returns the mask.
        disable_dropout: switch off the model's stochastic dropout at the sites that are regularised, until `remove`.
            Copies of the model that are made or saved meanwhile have it off, too.
        require_all: raise if a site does not fire between two calls; False for models that skip layers at random.

    A model that is compiled, sharded or wrapped for several processes may be attached to before or after that, as long
    as it has not been called compiled yet. Whatever replaces layers (adapters of peft, quantisation) comes first.
    """

    def __init__(
        self,
        model: nn.Module,
        noise: Noise | Mapping[str, Noise],
        *,
        query: Strength | None = None,
        key: Strength | None = None,
        query_key: Strength | None = None,
        value: Strength | None = None,
        attended_value: Strength | None = None,
        feed_forward: Strength | None = None,
        reduction: Literal["token", "sample"] | None = None,
        layers: int | Iterable[int] | None = None,
        reading: Literal["model", "paper"] = "model",
        padding: Padding = "auto",
        disable_dropout: bool = True,
        require_all: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_unknown(unknown, type(self))
        if reading not in ("model", "paper"):
            raise InputError("reading", "'model' or 'paper'", repr(reading))
        if reduction not in (None, "token", "sample"):
            raise InputError("reduction", "'token' or 'sample'", repr(reduction))
        check_padding(padding)
        checks.flag("disable_dropout", disable_dropout)
        checks.flag("require_all", require_all)
        super().__init__()
        given = (query, key, query_key, value, attended_value, feed_forward)
        self.model = model = uncompiled(model)
        selection = select(model, noise, dict(zip(COMPONENTS, given, strict=True)), layers)
        self._unclaimed = unclaimed_line(unclaimed(model, selection.layers))
        self.reading = reading
        self.noise = noise if isinstance(noise, Noise) else dict(noise)
        self.reduction = reduction or ("sample" if reading == "paper" else "token")
        self.require_all = require_all
        self.sites: list[Site] = selection.sites
        self._laws, self._schedules = selection.laws, selection.schedules
        self._places: list[Place] = []
        self._sharding_known = self._known_frozen = False
        for site in self.sites:
            check_exact(site, self._laws[site.component], reading)
        self._departing = [*{site.path: site for site in self.sites if may_depart(site)}.values()]
        self._by_name = {site.name: site for site in self.sites}
        refuse_sharded(model, self.sites, self._laws)
        refuse_chunks(model, self.sites)
        with self._attaching():
            if self.sites:
                self._attach(selection.places, padding)
            if disable_dropout:
                self.silenced.switch_off_at(self.sites)

    # ------------------------------------------------------------------------------------------ attaching

    def _attach(self, places: list[tuple[Layer, list[Site]]], padding: Padding) -> None:
        self._collector.sharded = bool(modules_under_fsdp(self.model))
        self._collector.held = {site.name: projection_of(site).held for site in self.sites if site.projection}
        self._places = places_of(self.model, self.sites)
        plan = Plan(self._collector, self.model, padding)
        for layer, sites in places:
            holders, merged = holders_of(self.model, layer.path), self.reading == "paper"
            for noise in dict.fromkeys(self._laws[site.component] for site in sites):
                own = [site for site in sites if self._laws[site.component] == noise]
                tap = Tap(layer, noise, self._collector, merged_heads=merged, padding=padding, holders=holders)
                plan.add(layer, own, tap)
        plan.register(self._handles)

    # ------------------------------------------------------------------------------------------ reading

    def _penalty(self, forwards: list[list[Term]]) -> Tensor:
        if not self.sites:
            self.calls += 1
            return torch.zeros(())
        if not forwards:
            raise no_forward(self.model)
        refuse_replaced(self._places)
        for site in self._departing:
            refuse_departure(site)
        self._refuse_changed(forwards)
        if not self._sharding_known:
            refuse_sharded(self.model, self.sites, self._laws)
            self._sharding_known = True
        fired = {term.site for forward in forwards for term in forward}
        refuse_silent(self.sites, fired, require_all=self.require_all)
        step, self.calls = self.calls, self.calls + 1
        strengths = {name: self._schedules[name].at(step) for name in fired}
        shares: list[Share] = []
        for terms, counted in firings(forwards, self.reduction):
            shares += self._shares(terms, counted, strengths[terms[0].site])
        penalty = self._total.of(shares)
        if not (penalty.requires_grad or self._known_frozen) and any(strengths.values()):
            self._warn_if_frozen()
        return penalty

    def _warn_if_frozen(self) -> None:
        """Of a penalty without gradient, once: it is a constant beside the loss."""
        if not torch.is_grad_enabled() or in_transform():
            return
        self._known_frozen = True
        warnings.warn(
            f"no parameter of {type(self.model).__name__} that learns moves this penalty: all regularised layers are "
            "frozen, with what comes before them. It changes nothing.",
            RuntimeWarning,
            stacklevel=4,
        )

    def _shares(self, terms: list[Term], counted: int | Tensor, strength: float) -> list[Share]:
        """What one firing of a site adds, over all forward passes as one batch of so many tokens or samples."""
        name = terms[0].site
        shares: list[Share] = []
        later: list[Tensor] = []
        factor = 1.0
        for term in terms:
            if term.penalty is not None:
                shares.append(Share(name, strength, term.factor, counted, term.penalty))
            elif term.columns is not None and term.norms is not None:
                shares.append(Share(name, strength, term.factor, counted, term.columns, term.norms))
            elif term.columns is not None:
                later.append(term.columns)
                factor = term.factor  # the same for all columns of a site
        if later:
            weight = self._weight(name)
            if is_sharded(weight):
                shares.append(Share(name, strength, factor, 1, sharded_energy(later, weight, counted)))
            else:
                known = (None, weight) if kernels.serves(weight) else (kernels.columns(weight), None)
                shares += [Share(name, strength, factor, counted, columns, *known) for columns in later]
        return shares

    def _refuse_changed(self, forwards: list[list[Term]]) -> None:
        """Weights that have changed since a forward pass, which is of no use then: neither its terms nor its graph."""
        for forward in forwards:
            for term in forward:
                if term.version is None:
                    continue
                held = projection_of(self._by_name[term.site]).held
                known = self._collector.held.get(term.site)  # the one that the pass has had
                if held is not known or (held is not None and held._version != term.version):
                    self._weight(term.site)  # which has words of its own for one that was taken apart
                    raise CollectionError(
                        f"{term.site}: its weight was changed after a forward pass that waits for this call, by a step "
                        "of the optimiser perhaps. Call the regulariser after every forward pass in train mode, before "
                        "weights change, or discard() passes that are not to be regularised. The terms of all passes "
                        "are dropped now."
                    )

    def _weight(self, name: str) -> Tensor:
        site = self._by_name[name]
        weight, _ = projection_of(site).parameters()
        if weight.shape != site.shape:
            raise UnsupportedSiteError(
                f"{site.name}: its weight has the shape {tuple(weight.shape)} now, and had {site.shape} when the "
                "regulariser was attached. FSDP1 and ZeRO-3 take weights apart like that: use FSDP2 (fully_shard). Or "
                "the layer was replaced: attach after that."
            )
        return weight

    def summary(self) -> str:
        """What is attached, as a table."""
        strengths = self.strengths()
        rows = [
            [str(s.layer), s.component, s.path or "(model)", shape(s), heads(s), f"{strengths[s.name]:g}"]
            for s in self.sites
        ]
        lines = [
            f"ExplicitDropout on {type(self.model).__name__}: {len(self.sites)} sites, {self._law_names()}, "
            f"reduction={self.reduction!r}, reading={self.reading!r}",
            table(["layer", "component", "module", "in → out", "heads", "λ"], rows),
        ]
        lines += self._state_lines()
        lines += [self._unclaimed] if self._unclaimed and not self._removed else []
        return "\n".join(lines)

    def _law_names(self) -> str:
        if isinstance(self.noise, Noise):
            return str(self.noise)
        return ", ".join(f"{component}: {law}" for component, law in self._laws.items())
