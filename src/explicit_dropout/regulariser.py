"""ExplicitDropout: attach penalties to a model that already exists, and read them after each forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError, InputError, UnmatchedModelError, UnsupportedSiteError
from explicit_dropout.noise import Noise
from explicit_dropout.sites import COMPONENTS, Attention, Component, Dropout, Layer, Site, find_layers, sites_of
from explicit_dropout.strengths import Schedule, Strength, by_layer
from explicit_dropout.taps import (
    AttentionHook,
    CallHook,
    Collector,
    InputHook,
    LinearHook,
    Padding,
    RootAfter,
    RootBefore,
    RootHook,
    SeenHook,
    Tap,
    Term,
)
from explicit_dropout.weights import column_norms, is_sharded, mean_over_ranks

MOST_FORWARDS = 64
"""Forward passes that may wait for a call of the regulariser; more are a loop that forgot to call it."""


class ExplicitDropout:
    """J = Σ_sites λ_site · ½ E‖deviation at the site‖² (paper Eqs. 20–22), collected while the model runs.

        reg = xd.ExplicitDropout(model, xd.inverted(0.2), value=1e-3, feed_forward=1e-3)
        loss = criterion(model(x), y) + reg()

    Args:
        model: any model with Transformer layers that a rule recognises (`find_sites` tells).
        noise: the law of the dropout that the penalty stands for.
        query, key, query_key, value, attended_value, feed_forward: the strength λ of each component: a number, one for
            each layer, a mapping from layer index, or a schedule over calls. None or 0 is off.
        reduction: "token" averages over the real tokens of a batch, "sample" sums over tokens and averages samples.
        layers: indices of the layers to regularise; None for all.
        reading: "model" takes scores as the model has them, head by head with its own scale; "paper" takes the formulas
            literally: heads merged, no scale, sums over tokens (reduction "sample").
        padding: "auto" takes `attention_mask` (and `decoder_attention_mask`) of the model's call as real tokens; None
            counts all tokens; a function of (module path, x) returns the mask.
        disable_dropout: switch off the model's stochastic dropout at the sites that are regularised, until `remove`.
        require_all: raise if a site does not fire between two calls; False for models that skip layers at random.
    """

    def __init__(
        self,
        model: nn.Module,
        noise: Noise,
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
    ) -> None:
        given = (query, key, query_key, value, attended_value, feed_forward)
        strengths = {c: s for c, s in zip(COMPONENTS, given, strict=True) if s is not None}
        if not isinstance(model, nn.Module):
            raise InputError("model", "a torch.nn.Module", type(model).__name__)
        if not isinstance(noise, Noise):
            raise InputError("noise", "a Noise: paper(p), bernoulli(p), inverted(p) or gaussian(std)", repr(noise))
        if reading not in ("model", "paper"):
            raise InputError("reading", "'model' or 'paper'", repr(reading))
        if reduction not in (None, "token", "sample"):
            raise InputError("reduction", "'token' or 'sample'", repr(reduction))
        if not strengths:
            raise InputError("strengths", f"given for at least one of {', '.join(COMPONENTS)}", "none")
        _refuse_second(model)
        self.model, self.noise, self.reading = model, noise, reading
        self.reduction = reduction or ("sample" if reading == "paper" else "token")
        self.require_all, self.calls = require_all, 0
        found = find_layers(model)
        if not found:
            raise _unmatched(model)
        chosen = _chosen(layers, number := found[-1].index + 1)
        schedules = {component: by_layer(component, strength, number) for component, strength in strengths.items()}
        self._schedules: dict[str, Schedule] = {}
        self.sites: list[Site] = []
        by_place: list[tuple[Layer, list[Site]]] = []
        for layer in found:
            wanted = [site for site in sites_of(layer) if site.component in schedules and layer.index in chosen]
            active = [site for site in wanted if not schedules[site.component][layer.index].is_off]
            self._schedules |= {site.name: schedules[site.component][layer.index] for site in active}
            self.sites += active
            if active:
                by_place.append((layer, active))
        _check_components(model, found, strengths)
        for site in self.sites:
            _check_exact(site, noise, reading)
        self._collector = Collector()
        self._handles: list[Any] = []
        self._terms: dict[str, Tensor] = {}
        self.silenced: list[tuple[Dropout, float]] = []
        self._attach(by_place, padding)
        if disable_dropout:
            self._silence()

    # ------------------------------------------------------------------------------------------ attaching

    def _attach(self, places: list[tuple[Layer, list[Site]]], padding: Padding) -> None:
        root = RootHook(self._collector, self.model)
        self._handles.append(self.model.register_forward_pre_hook(RootBefore(root), with_kwargs=True, prepend=True))
        for layer, sites in places:
            tap = Tap(sites, self.noise, self._collector, literal=self.reading == "paper", padding=padding)
            described = layer.described
            if not isinstance(described, Attention):
                if described.module is not None and described.padding is not None:
                    self._before(described.module, CallHook(tap))
                for site in sites:
                    self._after(_module(site), LinearHook(tap, site))
                continue
            at_projection = [s for s in sites if s.component == "value" and described.value.called]
            for site in at_projection:
                self._after(described.value.module, LinearHook(tap, site))
            tap.sites = tuple(site for site in sites if site not in at_projection)
            if tap.sites:
                self._attach_attention(tap, described)
        self._handles.append(self.model.register_forward_hook(RootAfter(root)))

    def _attach_attention(self, tap: Tap, attention: Attention) -> None:
        self._before(attention.module, CallHook(tap))
        if attention.inputs is None:
            roles = {"query": attention.query, "key": attention.key, "value": attention.value}
            for role, projection in roles.items():
                self._after(projection.module, SeenHook(tap, role))
        if any(site.component == "attended_value" for site in tap.sites):
            if attention.output is not None:
                self._handles.append(attention.output.register_forward_pre_hook(InputHook(tap, "attended")))
            if isinstance(attention.weights, nn.Module):
                self._handles.append(attention.weights.register_forward_pre_hook(InputHook(tap, "weights")))
        self._after(attention.module, AttentionHook(tap))

    def _before(self, module: nn.Module, hook: Any) -> None:
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, hook: Any) -> None:
        # prepend: before the hooks of sharding wrappers, which take the weights away again
        self._handles.append(module.register_forward_hook(hook, prepend=True))

    def _silence(self) -> None:
        for site in self.sites:
            for dropout in site.source.described.dropouts:
                rate = getattr(dropout.module, dropout.name, 0.0)
                if rate:
                    self.silenced.append((dropout, rate))
                    setattr(dropout.module, dropout.name, 0.0)

    def remove(self) -> None:
        """Take every hook off and give the model its stochastic dropout back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for dropout, rate in self.silenced:
            setattr(dropout.module, dropout.name, rate)
        self.silenced.clear()
        self._collector.inert = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    # ------------------------------------------------------------------------------------------ reading

    def __call__(self) -> Tensor:
        """Σ λ J over the forward passes since the last call, as one float32 number to add to the loss.

        Several forward passes count as one batch. A module that fires several times in one (a shared layer) adds up.
        """
        if not self._handles:
            raise CollectionError("the regulariser was removed from its model; attach a new one")
        forwards = self._collector.take()
        step, self.calls = self.calls, self.calls + 1
        if not self.sites:
            return torch.zeros(())
        if not forwards:
            raise CollectionError(_no_forward(self.model))
        fired = {term.site for forward in forwards for term in forward}
        silent = [site.name for site in self.sites if site.name not in fired]
        if silent and (self.require_all or len(silent) == len(self.sites)):
            raise CollectionError(
                f"{len(silent)} of {len(self.sites)} sites did not fire in the forward pass: {', '.join(silent[:5])}"
                f"{', …' if len(silent) > 5 else ''}. The model went around their modules (a fused or compiled path, a "
                "frozen part in eval mode, LayerDrop). Leave them out by layers=, or attach with require_all=False."
            )
        total: Tensor | None = None
        self._terms = {}
        for site in self.sites:
            if site.name not in fired:
                continue
            term = self._term(site, forwards)
            self._terms[site.name] = term.detach()
            weighted = self._schedules[site.name].at(step) * term
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    def _term(self, site: Site, forwards: list[list[Term]]) -> Tensor:
        """J of a site: for each firing the mean over all forward passes, then the sum over firings."""
        firings: list[list[Term]] = []
        for forward in forwards:
            for number, term in enumerate([term for term in forward if term.site == site.name]):
                if number == len(firings):
                    firings.append([])
                firings[number].append(term)
        total: Tensor | None = None
        for terms in firings:
            tokens = sum(term.tokens if self.reduction == "token" else term.samples for term in terms)
            number_of = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(tokens, 1)
            penalties = [term.penalty for term in terms if term.penalty is not None]
            columns = [term.columns for term in terms if term.columns is not None]
            value: Tensor | None = torch.stack(penalties).sum() / number_of if penalties else None
            if columns:
                incoherent = self._incoherent(site, torch.stack(columns).sum(0) / number_of)
                value = incoherent if value is None else value + incoherent
            assert value is not None
            total = value if total is None else total + value
        assert total is not None
        return total.float()

    def _incoherent(self, site: Site, columns: Tensor) -> Tensor:
        """½ v Σ_j s_j ‖W_:j‖². A sharded weight gets its gradient from the columns of all ranks."""
        assert site.projection is not None
        weight, _ = site.projection.parameters()
        norms = column_norms(weight).to(columns.dtype)
        if not is_sharded(weight):
            return 0.5 * self.noise.variance * (columns * norms).sum()
        fixed = norms.detach()
        return 0.5 * self.noise.variance * (columns * fixed + mean_over_ranks(columns) * (norms - fixed)).sum()

    def terms(self) -> dict[str, Tensor]:
        """The unweighted J of every site at the last call, detached, by site name: for logging."""
        return dict(self._terms)

    def strengths(self) -> dict[str, float]:
        """The λ of every site at the next call, by site name."""
        return {site.name: self._schedules[site.name].at(self.calls) for site in self.sites}

    def state_dict(self) -> dict[str, int]:
        """Where the schedules stand."""
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        if set(state) != {"calls"} or not isinstance(state["calls"], int) or state["calls"] < 0:
            raise InputError("state", "what state_dict() returned: {'calls': whole number ≥ 0}", dict(state))
        self.calls = state["calls"]

    def summary(self) -> str:
        """What is attached, as a table."""
        from explicit_dropout.table import table

        rows = [
            [str(s.layer), s.component, s.path or "(model)", f"{s.shape[1]} → {s.shape[0]}",
             _heads(s), f"{self._schedules[s.name].at(self.calls):g}"]
            for s in self.sites
        ]  # fmt: skip
        lines = [
            f"ExplicitDropout on {type(self.model).__name__}: {len(self.sites)} sites, {self.noise}, "
            f"reduction={self.reduction!r}, reading={self.reading!r}",
            table(["layer", "component", "module", "in → out", "heads", "λ"], rows),
        ]
        if self.silenced:
            lines.append(f"Stochastic dropout switched off at {len(self.silenced)} places until remove().")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()


def _heads(site: Site) -> str:
    if site.heads is None:
        return "–"
    return str(site.heads) if site.key_heads == site.heads else f"{site.heads}/{site.key_heads}"


def _module(site: Site) -> nn.Module:
    assert site.projection is not None
    return site.projection.module


def _chosen(layers: int | Iterable[int] | None, number: int) -> set[int]:
    if layers is None:
        return set(range(number))
    chosen = {layers} if isinstance(layers, int) else set(layers)
    outside = [index for index in chosen if not isinstance(index, int) or index not in range(number)]
    if outside or not chosen:
        raise InputError("layers", f"indices from 0 to {number - 1}, at least one", layers)
    return chosen


def _refuse_second(model: nn.Module) -> None:
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, RootBefore) and not hook.root.collector.inert:
            raise InputError(
                "model", "free: a regulariser is attached to it already; call its remove() first", type(model).__name__
            )


def _check_components(model: nn.Module, found: list[Layer], strengths: Mapping[Component, object]) -> None:
    there = {site.component for layer in found for site in sites_of(layer)}
    for component in strengths:
        if component not in there:
            raise UnmatchedModelError(
                f"{type(model).__name__} has no {component} site, only {', '.join(sorted(there))}. "
                f"Leave {component} out, or tell the library where it is by xd.register_rule."
            )


def _check_exact(site: Site, noise: Noise, reading: str) -> None:
    """Refuse, before anything is attached, what could only be approximate."""
    attention = site.source.described
    if not isinstance(attention, Attention):
        if attention.obstacle:
            raise UnsupportedSiteError(
                f"{site.name}: {attention.obstacle}. Leave it out: feed_forward={{layer: strength, …}} names layers."
            )
        return
    if site.component in ("query", "key", "query_key"):
        if attention.obstacle:
            raise UnsupportedSiteError(
                f"{site.name}: {attention.obstacle}, so scores do not depend linearly on what is dropped. "
                "Use value, attended_value or feed_forward here, or leave the layer out by layers=."
            )
        if attention.rotary is not None and noise.variance:
            raise UnsupportedSiteError(
                f"{site.name}: rotary embeddings turn queries and keys before the scores, and the incoherent part of "
                f"{noise} then depends on the distance of tokens. Use paper(p) here, or value, attended_value and "
                "feed_forward, which are exact under every law."
            )
        if reading == "paper" and attention.key_heads not in (None, attention.heads):
            raise UnsupportedSiteError(f"{site.name}: merged heads need as many key heads as query heads")
    if site.component == "attended_value" and noise.variance and attention.weights is None:
        raise UnsupportedSiteError(
            f"{site.name}: {noise} needs the attention weights, which cannot be had here: "
            f"{attention.weights_obstacle or 'no rule says where they are'}. Or use paper(p), which needs none."
        )


def _no_forward(model: nn.Module) -> str:
    return (
        f"no training forward pass of {type(model).__name__} since the last call. Run the model in train mode and "
        "with gradients, by calling it (not its forward method or a part of it), before calling the regulariser. If "
        "the model was compiled and called before the regulariser was attached, compile it again: torch.compile ignores "
        "new hooks."
    )


def _unmatched(model: nn.Module) -> UnmatchedModelError:
    modules = list(model.named_modules())
    linear = [(path, m) for path, m in modules if isinstance(m, nn.Linear)]
    closest = ", ".join(f"{path!r} ({m.in_features} → {m.out_features})" for path, m in linear[:3])
    return UnmatchedModelError(
        f"no attention or feed-forward site was found in {type(model).__name__}. Looked at {len(modules)} modules; "
        + (f"linear layers that no rule claims: {closest}. " if linear else "none of them is a linear layer. ")
        + "Tell the library what they are:  @xd.register_rule(YourModule)   (docs: Add a model family)"
    )
