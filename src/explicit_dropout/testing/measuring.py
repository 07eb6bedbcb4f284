"""Half the expected squared change at a site, by drawn masks and by the closed form of the regulariser itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout import checks
from explicit_dropout.errors import ExplicitDropoutError, InputError, UnsupportedSiteError
from explicit_dropout.finding import find_layers
from explicit_dropout.noise import Noise
from explicit_dropout.refusals import check_exact
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.sampling import Estimate
from explicit_dropout.sites import FeedForward, Layer, Projection, Site, sites_of
from explicit_dropout.testing.repeating import AttentionAgain, Call, projected, steady

CHUNK_ELEMENTS = 2**23
"""Numbers that the draws of one chunk may take."""
Tick = Callable[[int], None]
"""Told how many more masks have been drawn."""
Perturb = Callable[[Tensor], Tensor]
Change = tuple[Callable[[Perturb], Tensor], "int | Tensor", int]
"""Squared changes (draw, …) under perturbed inputs; the number of tokens; numbers a draw takes, 0 to draw singly."""


def measure(
    site: Site,
    calls: Sequence[Call],
    noise: Noise,
    samples: int,
    *,
    generator: torch.Generator | None = None,
    tick: Tick | None = None,
) -> Estimate:
    """½ E‖change of the real output‖² per token at a site, by perturbing the input of its real projection.

    A law without variance has one mask, 1 − μ everywhere: one draw is exact, and its standard error 0.
    """
    if not calls:
        raise ExplicitDropoutError(f"{site.name} was not called")
    draws = samples if noise.variance else 1
    if noise.variance and checks.count("samples", samples) < 2:
        raise InputError("samples", "at least 2, or there is no standard error", samples)
    means, variances = [], []
    with torch.no_grad():
        for call in calls:
            change, tokens, size = _change(site, call)
            energies: list[Tensor] = []
            chunk = max(1, min(draws, CHUNK_ELEMENTS // max(size, 1))) if size else 1
            for start in range(0, draws, chunk):
                number = min(chunk, draws - start)
                energies.append(change(partial(_draw, noise, number, generator)).flatten(1).sum(1).double())
                if tick is not None:
                    tick(number)
            penalties = 0.5 * torch.cat(energies) / tokens
            means.append(penalties.mean())
            variances.append(penalties.var() / draws if draws > 1 else torch.zeros_like(means[-1]))
    return Estimate(torch.stack(means).sum(), torch.stack(variances).sum().sqrt(), draws)


def _draw(noise: Noise, number: int, generator: torch.Generator | None, x: Tensor) -> Tensor:
    """x under masks of its own, as many times as are drawn at once."""
    shape = (number, *x.shape)
    if not noise.variance:
        return (x * (1 - noise.mean)).expand(shape)
    dtype = torch.promote_types(x.dtype, torch.float32)
    mask = noise.draw(shape, generator=generator, dtype=dtype, device=x.device if generator is None else "cpu")
    return x * mask.to(x)


def _change(site: Site, call: Call) -> Change:
    described = site.source.described
    if isinstance(described, FeedForward):
        assert site.projection is not None
        mask = described.padding(call.arguments) if described.padding else None
        return _linear_change(site.projection, call.inputs[site.projection.module], mask)
    again = AttentionAgain(described, call)
    if site.component == "value":
        mask = None if described.value.called else again.pairs.context_mask
        return _linear_change(described.value, again.x["value"], mask)
    if site.component == "attended_value":
        return _attended_change(again)
    return _score_change(again, site.component)


def _linear_change(projection: Projection, x: Tensor, mask: Tensor | None) -> Change:
    clean = projected(projection, x)

    def change(perturb: Perturb) -> Tensor:
        moved = (projected(projection, perturb(x)) - clean).square()
        return moved if mask is None else moved * mask[..., None]

    return change, x.shape[:-1].numel() if mask is None else mask.sum(), x.numel() + clean.numel()


def _score_change(again: AttentionAgain, component: str) -> Change:
    queries, keys = again.projected("query"), again.projected("key")
    clean, allowed, mask = again.scores(queries, keys), again.allowed(), again.pairs.mask
    single = again.attention.rotary is not None

    def change(perturb: Perturb) -> Tensor:
        q = again.projected("query", perturb(again.x["query"])) if "query" in component else queries
        k = again.projected("key", perturb(again.x["key"])) if "key" in component else keys
        if single:
            q, k = (part.squeeze(0) if part.ndim > queries.ndim else part for part in (q, k))
            return (again.scores(q, k) - clean).square()[None] * allowed
        return (again.scores(q, k) - clean).square() * allowed

    tokens = again.x["query"].shape[:-1].numel() if mask is None else mask.sum()
    return change, tokens, 0 if single else 2 * clean.numel() + queries.numel() + keys.numel()


def _attended_change(again: AttentionAgain) -> Change:
    rows = again.pairs.mask
    tokens = again.x["query"].shape[:-1].numel() if rows is None else rows.sum()
    if again.attention.value.called:
        clean = again.again()

        def real(perturb: Perturb) -> Tensor:
            values = again.projected("value", perturb(again.x["value"]).squeeze(0))
            moved = (again.again(value=values) - clean).square()[None]
            return moved if rows is None else moved * rows[..., None]

        return real, tokens, 0
    weights = again.weights()
    attention = again.known_weights() if weights is None else weights
    if attention is None:
        reason = again.attention.weights_obstacle or "no rule says where they are"
        raise ExplicitDropoutError(f"no module has its values as output, nor can its weights be had: {reason}")
    values = again.by_head("value", again.projected("value"))

    def recomputed(perturb: Perturb) -> Tensor:
        moved = attention @ (again.by_head("value", again.projected("value", perturb(again.x["value"]))) - values)
        return moved.square() if rows is None else moved.square() * rows[..., None, :, None]

    return recomputed, tokens, 2 * attention.shape[-2] * values.numel()


# ---------------------------------------------------------------------------------------------- closed forms


def closed_forms(
    model: nn.Module,
    noise: Noise,
    sites: Sequence[Site],
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What the regulariser itself says of these sites in one forward pass; and why it refuses the others, by name."""
    refused: dict[str, str] = {}
    wanted = list(sites)
    while True:
        wanted = [site for site in wanted if site.name not in refused]
        for site in wanted:
            reason = refusal(site, noise)
            if reason is not None:
                refused[site.name] = reason
        wanted = [site for site in wanted if site.name not in refused]
        if not wanted:
            return {}, refused
        try:
            terms = _terms(model, noise, wanted, inputs, keywords)
        except UnsupportedSiteError as error:  # seen only when the model runs: an unreadable mask, say
            named = {site.name for site in wanted if str(error).startswith(site.name)}
            if not named:
                raise
            refused |= {full: str(error).removeprefix(full + ": ") for full in named}
            continue
        return {site.name: terms[site.name] for site in wanted}, refused


def refusal(site: Site, noise: Noise) -> str | None:
    """Why the regulariser does not take a site under a law; None where it does."""
    try:
        check_exact(site, noise, "model")
    except UnsupportedSiteError as error:
        return str(error).removeprefix(site.name + ": ")
    return None


def unit_strengths(sites: Iterable[Site]) -> dict[str, Any]:
    """Strength 1 for these sites (and their neighbours of the same component and layer), as `ExplicitDropout` takes."""
    chosen: dict[str, dict[int, float]] = {}
    for site in sites:
        chosen.setdefault(site.component, {})[site.layer] = 1.0
    return chosen


def _terms(
    model: nn.Module, noise: Noise, sites: Sequence[Site], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Tensor]:
    with (
        ExplicitDropout(model, noise, padding=None, **unit_strengths(sites)) as reg,
        steady(model),
        torch.enable_grad(),
    ):
        model(*inputs, **keywords)
        reg()
        return reg.terms()


def sites_by_layer(model: nn.Module) -> list[tuple[Layer, list[Site]]]:
    return [(layer, list(sites_of(layer))) for layer in find_layers(model)]
