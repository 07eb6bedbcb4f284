"""The penalties of one call of an attention module: scores and attended values, from what hooks have seen of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from explicit_dropout import functional, kernels
from explicit_dropout.errors import CollectionError, UnsupportedSiteError
from explicit_dropout.functional.batch import without_autocast
from explicit_dropout.hooks.calls import only_input, with_input
from explicit_dropout.hooks.products import is_plain_linear, lowered_input
from explicit_dropout.hooks.taps import Tap, TapHook, by_sample
from explicit_dropout.kernels.plain import wide
from explicit_dropout.sites import Attention, Pairs, Projection, Site, samples_first
from explicit_dropout.weights import is_sharded

Rotation = Callable[[Tensor], Tensor]


class AttendedHook(TapHook):
    """Before the output projection: keep A V, and take its energy as it passes through, where that is all there is.

    Not after it: what a compiler finds used later once more, it keeps.
    """

    def __init__(self, tap: Tap, attention: Attention, site: Site) -> None:
        super().__init__(tap)
        self.attention, self.site = attention, site

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.tap.watching(module):
            return None
        attended = only_input(self.tap.path, args, kwargs)
        self.tap.observed().tensors["attended"] = attended
        if self.tap.noise.variance:
            return None
        call = AttentionCall(self.tap, self.attention, None)
        passed = self.tap.penalise(self.site, call.attended_passing, self.site, call.by_sample(attended))
        self.tap.observed().done.add(self.site.name)
        return with_input(call.by_sample(passed), args, kwargs)


class SquaresHook(TapHook):
    """Before a query or key projection: the column energies of its input, sample by sample, where kernels take them.

    In causal order it is the input itself that they take, in the precision in which the projection keeps it.
    """

    def __init__(self, tap: Tap, attention: Attention, roles: list[str]) -> None:
        super().__init__(tap)
        self.attention, self.roles = attention, roles
        self.plain = is_plain_linear(getattr(attention, roles[0]).module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tap, attention = self.tap, self.attention
        if attention.cross or not attention.batch_first or not tap.watching(module):
            return None
        x = only_input(tap.path, args, kwargs)
        if x.ndim != 3 or not kernels.serves(x):
            return None
        lower = kernels.lowered(x) if self.plain else None
        wanted = (lower or x.dtype) != torch.float32 if kernels.by_triton(x) else not attention.causal
        if not wanted or by_sample(tap, x)[1] is not None:
            return None
        if attention.causal:
            passed = x if lower is None else x.to(lower)
            tap.observed().tensors |= {f"{role} input": passed for role in self.roles}
            return with_input(passed, args, kwargs)
        samples = x.shape[0]
        passed, columns = kernels.passing(x, lower=lower, by_column=True, samples=samples)
        for role in self.roles:
            tap.observed().tensors[f"{role} squares"] = torch.unflatten(columns, 0, (samples, -1)).sum(1)
        return with_input(passed, args, kwargs)


class AttentionHook(TapHook):
    """After attention: the penalties of its scores and of its output, from what the other hooks have kept."""

    def __init__(self, tap: Tap, attention: Attention, sites: list[Site]) -> None:
        super().__init__(tap)
        self.attention, self.sites = attention, sites

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del args, kwargs
        if not self.tap.watching(module):
            return
        done = self.tap.observed().done
        left = [site for site in self.sites if site.name not in done]
        if left:
            call = AttentionCall(self.tap, self.attention, output)
            for site in left:
                self.tap.penalise(site, call.penalise, site)


class AttentionCall:
    """One call of one attention module: its inputs, masks and projections in one form, however it was observed."""

    def __init__(self, tap: Tap, attention: Attention, output: Any) -> None:
        self.tap, self.attention, self.output = tap, attention, output
        observed = tap.observed()
        self.call, self.seen, self.versions = observed.call, observed.tensors, observed.versions
        self.repeated = observed.repeated
        self.x, self.context, self.values = (self._input(role) for role in ("query", "key", "value"))
        self.pairs: Pairs | None = None

    def _input(self, role: str) -> Tensor | None:
        """What the query, key or value projection is given, (*batch, token, width)."""
        attention = self.attention
        if attention.inputs is None:
            seen = self.seen.get(role)
            return None if seen is None else self.by_sample(seen)
        return self.by_sample(cast("Tensor", self.call[attention.inputs[("query", "key", "value").index(role)]]))

    def by_sample(self, x: Tensor) -> Tensor:
        """A tensor of the call with its samples in front of its tokens; of such a one, as the call has it."""
        return samples_first(self.attention, x)

    def _projected(self, role: str) -> Tensor:
        """What the query or key projection has made, as it made it."""
        self._refuse_repeated(role)
        output = self._present(self.seen.get(role + " out"), role)
        if not torch.compiler.is_compiling() and output._version != self.versions.get(role, output._version):
            raise UnsupportedSiteError(
                f"the model changes the output of its {role} projection in place, so what the projection made is lost. "
                "Let it write a new tensor instead, or use value or feed_forward here"
            )
        return self.by_sample(output)

    def _refuse_repeated(self, role: str) -> None:
        if role in self.repeated:
            raise UnsupportedSiteError(
                f"the model calls its {role} projection more than once in one call, and what it makes of that is not "
                "known. Use value or feed_forward here, or leave the layer out by layers="
            )

    def _sides(self) -> tuple[Tensor, Tensor]:
        """Queries and keys as their projections made them.

        Of one fused output they are cut at once: each slice would have a gradient of its own, as wide as the output.
        """
        query, key = self.attention.query, self.attention.key
        queries, keys = self._projected("query"), self._projected("key")
        if queries is keys and query.rows != key.rows and not torch.compiler.is_compiling():
            cut = apart(queries, query.rows, key.rows)
            if cut is not None:
                return cut
        return query.of(queries), key.of(keys)

    def _present(self, tensor: Tensor | None, role: str) -> Tensor:
        if tensor is None:
            raise CollectionError(
                f"{self.tap.path}: its {role} projection was not called while it ran, so its penalty cannot be known. "
                "Leave the layer out by layers=, or describe it by a rule of your own (xd.register_rule)."
            )
        return tensor

    def masks(self) -> Pairs:
        """The pairs of this call, with the padding of the whole model where the call itself says nothing."""
        if self.pairs is None:
            attention, tap = self.attention, self.tap
            x, context = self._present(self.x, "query"), self._present(self.context, "key")
            found = attention.pairs(attention, self.call, x, context)
            mask, context_mask = found.mask, found.context_mask
            if mask is None:
                mask = tap.padding(x)
            if context_mask is None:
                context_mask = tap.padding(context, "context" if attention.cross else None)
            known = mask is found.mask and context_mask is found.context_mask
            self.pairs = found if known else replace(found, mask=mask, context_mask=context_mask)
        return self.pairs

    def penalise(self, site: Site) -> None:
        if site.component == "value":
            self.tap.linear(site, self._present(self.values, "value"), self.masks().context_mask)
        elif site.component == "attended_value":
            self._attended_value(site)
        else:
            self._scores(site)

    def _scores(self, site: Site) -> None:
        attention, tap, pairs = self.attention, self.tap, self.masks()
        if self._scores_by_kernel(site, pairs):
            return
        x, context = self._present(self.x, "query"), self._present(self.context, "key")
        (query_weight, query_bias), (key_weight, key_bias) = _whole(attention.query), _whole(attention.key)
        options: dict[str, Any] = {}
        if context is not x or pairs.mask is not None or pairs.context_mask is not None:
            options |= {"context": context, "context_mask": pairs.context_mask}
        if attention.inputs is None:
            options["queries"], options["keys"] = self._sides()
        rotary = self._rotary()
        if tap.merged_heads:
            _refuse_masks_by_head(pairs.allowed)
            rotary = None if rotary is None else MergedRotation(rotary, attention.heads)
        form = getattr(functional, site.component)
        penalty = form(
            x, query_weight, key_weight, tap.noise,
            query_bias=query_bias, key_bias=key_bias,
            heads=1 if tap.merged_heads else attention.heads,
            key_heads=None if tap.merged_heads else attention.key_heads,
            scale=1.0 if tap.merged_heads else attention.score_scale,
            mask=pairs.mask,
            attention_mask=pairs.allowed,
            causal=pairs.causal,
            rotary=rotary,
            reduction="none",
            **options,
        )  # fmt: skip
        tap.add(site, penalty.sum(), None, x, pairs.mask)

    def _straight(self, pairs: Pairs) -> bool:
        """Whether every query meets every key (up to causal order), both just as their projections made them."""
        attention = self.attention
        called = attention.inputs is None and attention.batch_first
        alike = attention.rotary is None and not attention.key_heads
        return called and alike and pairs.mask is None and pairs.context_mask is None and pairs.allowed is None

    def _scores_by_kernel(self, site: Site, pairs: Pairs) -> bool:
        """The penalty from the projections as they are, where kernels serve and no mask is in the way."""
        attention, tap = self.attention, self.tap
        if tap.merged_heads or not self._straight(pairs):
            return False
        mean, variance, both = tap.noise.mean, tap.noise.variance, site.component == "query_key"
        queries, keys = self._sides()
        if (both and mean) or not _in_step(pairs, queries, keys):
            return False
        if not kernels.serves_scores(queries, keys, attention.heads):
            return False
        parts: list[tuple[float, Tensor]] = []
        if variance:
            spreads = self._spreads(site.component, queries, keys, pairs)
            if spreads is None:
                return False
            parts += spreads
        if tap.coherent:
            # Only the side that is dropped enters without its bias.
            query_bias = _gathered(attention.query.offset()) if site.component == "query" else None
            key_bias = _gathered(attention.key.offset()) if site.component == "key" else None
            energies = kernels.scores(queries, keys, query_bias, key_bias, attention.heads, pairs.causal)
            parts.append((mean**2, energies))
        for piece, (factor, energies) in enumerate(parts):
            scaled = 0.5 * factor * attention.score_scale**2
            tap.add(site, energies, None, self._present(self.x, "query"), None, scaled, piece=piece)
        return True

    def _spreads(
        self, component: str, queries: Tensor, keys: Tensor, pairs: Pairs
    ) -> list[tuple[float, Tensor]] | None:
        """The incoherent energies, each with its factor; None where kernels do not serve.

        In causal order a key is reached by the queries from it on, and a query by the keys up to it.
        """
        attention, variance, heads = self.attention, self.tap.noise.variance, self.attention.heads
        roles = ("query", "key") if component == "query_key" else (component,)
        if attention.cross:
            return None
        given = self._reaching(roles, queries) if pairs.causal else self._squares(roles, queries)
        if len(given) < len(roles):
            return None
        others = {"query": keys, "key": queries}
        weights = {role: _whole(getattr(attention, role))[0] for role in roles}
        sides = {role: (others[role], weights[role], given[role]) for role in roles}
        if pairs.causal:
            found = [kernels.reach(*side, heads, role == "query") for role, side in sides.items()]
            if len(roles) == 2:
                query, key = ((weights[role], given[role]) for role in roles)
                found.append(kernels.joint_reach(*query, *key, heads=heads))
        elif len(roles) == 2:
            found = [*kernels.joint_spread(*sides["query"], *sides["key"], heads=heads)]
        else:
            found = [kernels.spread(*sides[component], heads)]
        return list(zip((variance, variance, variance**2), found, strict=False))

    def _reaching(self, roles: tuple[str, ...], queries: Tensor) -> dict[str, Tensor]:
        """The inputs of these projections, in step with the queries, where kernels take them."""
        found: dict[str, Tensor] = {}
        for role in roles:
            x = self.seen.get(f"{role} input")
            if x is None and torch.compiler.is_compiling():
                x = self._lowered(role, self._present(self._input(role), role))
            if x is None or x.shape[:-1] != queries.shape[:-1]:
                continue
            if kernels.serves_reach(queries, x, self.attention.heads):
                found[role] = x
        return found

    def _squares(self, roles: tuple[str, ...], queries: Tensor) -> dict[str, Tensor]:
        """Column energies of the inputs of these projections, sample by sample, where kernels take them."""
        if not kernels.serves_spread(queries, self.attention.heads):
            return {}
        if not torch.compiler.is_compiling():
            return {role: self.seen[f"{role} squares"] for role in roles if f"{role} squares" in self.seen}
        inputs = {role: self._input(role) for role in roles}
        return {
            role: kernels.squares(self._lowered(role, x)) for role, x in inputs.items() if x is not None and x.ndim == 3
        }

    def _lowered(self, role: str, x: Tensor) -> Tensor:
        """The input of a projection in the precision in which autocast gives it to the product, and keeps it."""
        module = getattr(self.attention, role).module
        return lowered_input(module, x) if is_plain_linear(module) else x

    def _rotary(self) -> Rotation | None:
        return None if self.attention.rotary is None else self.attention.rotary(self.attention, self.call)

    def _attended_value(self, site: Site) -> None:
        if self.tap.noise.variance:
            self._refuse_repeated("value")
        if self._attended_by_kernel(site):
            return
        attention, tap = self.attention, self.tap
        values, attended = self._present(self.values, "value"), self._attended()
        if attended is not None and not tap.noise.variance:
            self.attended_passing(site, attended)
            return
        weight, bias = _whole(attention.value)
        weights = self._weights()
        rows = attended if attended is not None else self._present(self.x, "query")
        mask, context_mask = self._row_masks(rows, values)
        if context_mask is not None and mask is None:
            mask = torch.ones(rows.shape[:-1], dtype=torch.bool, device=rows.device)
        penalty = functional.attended_value(
            values, weight, weights, tap.noise,
            value_bias=bias, attended=attended, heads=attention.heads, key_heads=attention.key_heads,
            mask=mask, context_mask=context_mask, reduction="none",
        )  # fmt: skip
        tap.add(site, penalty.sum(), None, rows, mask)

    def _attended_by_kernel(self, site: Site) -> bool:
        """The penalty without keeping attention weights, where they are ours to make and nothing is masked."""
        attention, tap = self.attention, self.tap
        if not tap.noise.variance or attention.weights != "compute":
            return False
        pairs = self.masks()
        if pairs.bias is not None or not self._straight(pairs):
            return False
        values = self._lowered("value", self._present(self.values, "value"))
        queries, keys = self._sides()
        if not _in_step(pairs, queries, keys, values):
            return False
        if not kernels.serves_attended(values, queries, keys, attention.heads):
            return False
        with without_autocast(values):
            weight = _whole(attention.value)[0]
            spread = kernels.attended_spread(
                values, weight, queries, keys, attention.heads, attention.score_scale, pairs.causal
            )
        tap.add(site, spread, None, queries, None, tap.incoherence)
        if tap.coherent:
            self.attended_passing(site, self._present(self._attended(), "output"))
        return True

    def _row_masks(self, rows: Tensor, values: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """The real rows of A V, and the real tokens that values are made of."""
        if self.x is not None and self.context is not None:
            return self.masks().mask, self.masks().context_mask
        return self.tap.padding(rows), self.tap.padding(values, "context" if self.attention.cross else None)

    def attended_passing(self, site: Site, attended: Tensor) -> Tensor:
        """½ μ² ‖A V̂‖², taken from A V, samples first, on its way to the output projection, which it goes on to."""
        attention, tap = self.attention, self.tap
        mask, _ = self._row_masks(attended, self._present(self.values, "value"))
        bias = _gathered(attention.value.offset())
        shared = attention.heads // (attention.key_heads or attention.heads)
        if bias is not None and shared > 1:
            bias = torch.unflatten(bias, 0, (attention.heads // shared, -1)).repeat_interleave(shared, 0).flatten()
        if kernels.serves(attended):
            passed, energies = kernels.passing(attended, bias=bias, mask=mask)
        else:
            passed, energies = attended, kernels.plain.energies(attended, bias, mask)
        tap.add(site, energies, None, attended, mask, tap.coherence, piece=tap.coherent_piece)
        return passed

    def _attended(self) -> Tensor | None:
        """A V, heads side by side, bias included; None where it has to be computed from A."""
        if self.attention.output is not None:
            return self.by_sample(self._present(self.seen.get("attended"), "output"))
        if self.attention.inputs is not None:
            return None
        output = self.by_sample(cast("Tensor", self.output[0] if isinstance(self.output, tuple) else self.output))
        return output.clone()  # the model may go on to change its own in place

    def _weights(self) -> Tensor:
        """A, (*batch, heads, token, context)."""
        source = self.attention.weights
        if isinstance(source, nn.Module):
            return self._present(self.seen.get("weights"), "attention weights")
        if source == "output" and isinstance(self.output, tuple) and isinstance(self.output[1], Tensor):
            return self.output[1]
        if source == "compute":
            return self._computed_weights()
        raise UnsupportedSiteError(
            f"its attention weights cannot be had: {self.attention.weights_obstacle or 'no rule says where they are'}. "
            "Or use a law without variance, such as paper(p), which needs none"
        )

    def _computed_weights(self) -> Tensor:
        x, pairs = self._present(self.x, "query"), self.masks()
        with without_autocast(x):
            return self._softmax(pairs)

    def _softmax(self, pairs: Pairs) -> Tensor:
        attention, heads = self.attention, []
        for role, projection, x in (("query", attention.query, self.x), ("key", attention.key, self.context)):
            if attention.inputs is None:
                out = projection.of(wide(self._projected(role)))
            else:
                weight, bias = _whole(projection)
                out = wide(self._present(x, role)) @ wide(weight).mT
                out = out if bias is None else out + wide(bias)
            number = attention.heads if role == "query" else attention.key_heads or attention.heads
            heads.append(torch.unflatten(out, -1, (number, -1)).transpose(-2, -3))
        queries, keys = heads
        keys = keys.repeat_interleave(queries.shape[-3] // keys.shape[-3], -3)
        rotary = self._rotary()
        if rotary is not None:
            queries, keys = rotary(queries.unsqueeze(-3)).squeeze(-3), rotary(keys.unsqueeze(-3)).squeeze(-3)
        scores = attention.score_scale * queries @ keys.mT
        if pairs.bias is not None:
            scores = scores + pairs.bias
        allowed = pairs.allowed
        if pairs.causal and queries.shape[-2] != keys.shape[-2]:
            raise UnsupportedSiteError(
                f"its call is causal, with {queries.shape[-2]} queries and {keys.shape[-2]} keys: which of them sees "
                "which is not known. Let a rule of your own say so (xd.register_rule)"
            )
        if pairs.causal:
            triangle = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            allowed = triangle if allowed is None else allowed & triangle
        if pairs.context_mask is not None:
            real = pairs.context_mask[..., None, None, :]
            allowed = real if allowed is None else allowed & real
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return scores.softmax(-1)


class MergedRotation:
    """A rotation of heads, for heads that lie side by side in one."""

    def __init__(self, rotary: Rotation, heads: int) -> None:
        self.rotary, self.heads = rotary, heads

    def __call__(self, merged: Tensor) -> Tensor:
        """Rotate (batch, 1, 1, token, heads · width)."""
        by_head = torch.unflatten(merged.squeeze(2), -1, (self.heads, -1)).transpose(2, 3)
        return self.rotary(by_head).transpose(2, 3).flatten(3).unsqueeze(2)


def apart(x: Tensor, first: object, second: object) -> tuple[Tensor, Tensor] | None:
    """Two slices of the last axis that do not overlap, with one gradient; None if that is not what they are."""
    if not isinstance(first, slice) or not isinstance(second, slice):
        return None
    ends = [rows.indices(x.shape[-1]) for rows in (first, second)]
    (begin, end, _), (later_begin, later_end, _) = sorted(ends)
    if end > later_begin or any(step != 1 for *_, step in ends):
        return None
    cuts = [0, begin, end, later_begin, later_end, x.shape[-1]]
    pieces = torch.split(x, [after - before for before, after in pairwise(cuts)], -1)
    found = pieces[1], pieces[3]
    return found if ends[0][0] == begin else found[::-1]


def _whole(projection: Projection) -> tuple[Tensor, Tensor | None]:
    weight, bias = projection.parameters()
    _gathered(weight)
    return weight, bias


def _gathered(parameter: Tensor | None) -> Tensor | None:
    """The parameter itself, if this rank has all of it."""
    if parameter is not None and is_sharded(parameter):
        raise UnsupportedSiteError(
            "its projections are sharded one by one and taken away before its call is over; apply fully_shard to the "
            "attention module or to its block instead"
        )
    return parameter


def _in_step(pairs: Pairs, queries: Tensor, *others: Tensor) -> bool:
    """Whether a causal order is one of as many keys as queries. Only the plain forms say what is wrong elsewhere."""
    return not pairs.causal or all(other.shape[:-1] == queries.shape[:-1] for other in others)


def _refuse_masks_by_head(allowed: Tensor | None) -> None:
    if allowed is not None and allowed.ndim > 2 and allowed.shape[-3] != 1:
        raise UnsupportedSiteError("merged heads need one attention mask for all heads")
