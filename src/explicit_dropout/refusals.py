"""What is refused before anything is attached, and in which words."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

from torch import nn

from explicit_dropout import functional
from explicit_dropout.adapters import generic
from explicit_dropout.errors import CollectionError, InputError, UnmatchedModelError, UnsupportedSiteError
from explicit_dropout.functional.batch import coherent_part_needed
from explicit_dropout.hooks.calls import around
from explicit_dropout.hooks.collector import Collector
from explicit_dropout.noise import Noise
from explicit_dropout.sites import (
    COMPONENTS,
    SCORES,
    Attention,
    Component,
    Layer,
    Projection,
    Site,
    projection_of,
    sites_of,
)
from explicit_dropout.weights import adapter_obstacle, modules_under_fsdp


def refuse_unknown(given: Iterable[str], regulariser: Callable[..., object]) -> None:
    """Arguments that a regulariser does not have: slips of the pen, or forms that are not attached to models."""
    for name in given:
        if name in functional.__all__ and name not in COMPONENTS:
            what = f"{name!r}, which is not attached to models: call xd.functional.{name} in your forward pass"
            if name in ("attention_weights", "hidden", "drop_path"):
                what += ". Or xd.convert_dropout(model) has it wherever the model draws such dropout now"
            raise InputError("strengths", f"those of {', '.join(COMPONENTS)}", what)
        known = [name for name, one in signature(regulariser).parameters.items() if one.kind is one.KEYWORD_ONLY]
        closest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise InputError("arguments", f"among {', '.join(known)}", f"{name!r}; the closest is {closest!r}")


def chosen_layers(layers: int | Iterable[int] | None, number: int) -> set[int]:
    """The indices of `layers`, all of the model's if None."""
    if layers is None:
        return set(range(number))
    given = [layers] if isinstance(layers, int) else list(layers) if isinstance(layers, Iterable) else [None]
    outside = [index for index in given if isinstance(index, bool) or index not in range(number)]
    if outside or not given:
        raise InputError("layers", f"indices from 0 to {number - 1}, at least one", repr(layers))
    return {int(index) for index in given}


def refuse_second(model: nn.Module) -> None:
    """One regulariser at a time, on a model or any part of it."""
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            collector = getattr(hook, "collector", None)
            if isinstance(collector, Collector) and not collector.inert:
                where = f"{type(model).__name__} has one" + (f" at {path!r}" if path else "")
                raise InputError("model", "without a regulariser: call remove() of the one it has", where)


def check_components(model: nn.Module, found: list[Layer], strengths: Iterable[Component]) -> None:
    """Every component that has a strength has a site."""
    there = {site.component for layer in found for site in sites_of(layer)}
    for component in strengths:
        if component not in there:
            paths = ", ".join(repr(layer.path) for layer in found[:3])
            raise UnmatchedModelError(
                f"{type(model).__name__} has no {component} site, only {', '.join(sorted(there))} (at {paths}"
                f"{', …' if len(found) > 3 else ''}). Leave {component} out, or tell the library where it is by "
                "@xd.register_rule(YourModule)."
            )


def laws(noise: object, components: Iterable[Component]) -> dict[Component, Noise]:
    """The law of each of these components, given one for all of them or one for each."""
    kinds = "paper(p), bernoulli(p), inverted(p) or gaussian(std)"
    if isinstance(noise, Noise):
        return dict.fromkeys(components, noise)
    if not isinstance(noise, Mapping):
        raise InputError("noise", f"a Noise: {kinds}; or a mapping from components to them", repr(noise))
    components = list(components)
    for component, law in noise.items():
        if component not in components:
            raise InputError("noise", f"for components that have a strength: {', '.join(components)}", repr(component))
        if not isinstance(law, Noise):
            raise InputError(f"noise[{component!r}]", f"a Noise: {kinds}", repr(law))
    missing = [component for component in components if component not in noise]
    if missing:
        raise InputError("noise", "one for every component that has a strength", f"none for {', '.join(missing)}")
    return {component: noise[component] for component in components}


def check_exact(site: Site, noise: Noise, reading: str) -> None:
    """Refuse what could only be approximate."""
    attention = site.source.described
    for projection in _dropped_before(site):
        adapted = adapter_obstacle(projection.module)
        if adapted:
            raise UnsupportedSiteError(
                f"{site.name}: {adapted}. Use LoRA of peft without DoRA, or leave the layer out by layers=."
            )
    _refuse_own_forward(site, noise)
    if not isinstance(attention, Attention):
        if attention.obstacle:
            raise UnsupportedSiteError(
                f"{site.name}: {attention.obstacle}. Leave it out: feed_forward={{layer: strength, …}} names layers."
            )
        return
    if site.component in attention.refused:
        raise UnsupportedSiteError(
            f"{site.name}: {attention.refused[site.component]}. Leave {site.component} out here, or the layer by "
            "layers=, or describe the module in a rule of your own: @xd.register_rule."
        )
    if site.component in SCORES:
        if attention.obstacle:
            raise UnsupportedSiteError(
                f"{site.name}: {attention.obstacle}, so scores do not depend linearly on what is dropped. "
                "Use value, attended_value or feed_forward here, or leave the layer out by layers=."
            )
        if attention.rotary is not None and noise.variance:
            raise UnsupportedSiteError(
                f"{site.name}: rotary embeddings turn queries and keys before the scores, and what a variance adds "
                "then depends on the distance of tokens. Use a law without one here, such as paper(p), which may "
                "be for scores alone (noise={'query': paper(p), …}), or leave scores out."
            )
        if reading == "paper" and attention.key_heads not in (None, attention.heads):
            raise UnsupportedSiteError(
                f"{site.name}: reading='paper' merges heads, which needs as many key heads as query heads, not "
                f"{attention.key_heads} and {attention.heads}. Use reading='model'."
            )
    refuse_departure(site)
    if site.component == "attended_value" and noise.variance and attention.weights is None:
        raise UnsupportedSiteError(
            f"{site.name}: {noise} needs the attention weights, which cannot be had here: "
            f"{attention.weights_obstacle or 'no rule says where they are'}. Or use paper(p), which needs none."
        )


def may_depart(site: Site) -> bool:
    """Whether a penalty rests on what an attention computes of its scores, which may become something else."""
    return site.component != "value" and getattr(site.source.described, "departs", None) is not None


def refuse_departure(site: Site) -> None:
    """An attention that computes something else of its scores than a rule has said of it, as it stands now."""
    attention: Any = site.source.described
    if may_depart(site) and (reason := attention.departs(attention)):
        raise UnsupportedSiteError(
            f"{site.name}: {reason}. Use another implementation (sdpa, eager), or value and feed_forward alone, which "
            "do not depend on it."
        )


def check_reached(site: Site, noise: Noise) -> None:
    """Refuse what cannot be followed to the loss: an input that is not known, or a share of a weight that is not."""
    described = site.source.described
    reason = described.refused.get(site.component) if isinstance(described, Attention) else described.obstacle
    if reason is None and site.projection is not None and site.projection.rows is not None and site.projection.called:
        reason = adapter_obstacle(site.projection.module)
        _refuse_own_forward(site, noise)
    if reason:
        raise UnsupportedSiteError(
            f"{site.name}: {reason}. Leave it out ({site.component}={{layer: strength, …}} names layers), or describe "
            "the module in a rule of your own: @xd.register_rule."
        )


def _dropped_before(site: Site) -> list[Projection]:
    """The projections whose inputs are dropped from at a site: of queries and keys at once there are two."""
    described = site.source.described
    if isinstance(described, Attention) and site.component == "query_key":
        return [described.query, described.key]
    return [] if site.projection is None else [site.projection]


def _refuse_own_forward(site: Site, noise: Noise) -> None:
    """A kind of nn.Linear with a forward of its own, where its weight enters: another may act than the one it holds."""
    for projection in _dropped_before(site):
        layer = getattr(projection.module, "base_layer", projection.module)
        if not isinstance(layer, nn.Linear) or (projection.called and not noise.variance):
            continue
        if "forward" in vars(layer) and not hasattr(layer, "_hf_hook"):  # accelerate's moves weights, and is known
            raise UnsupportedSiteError(
                f"{site.name}: the forward of this {type(layer).__name__} was replaced by a function, so another "
                f"weight may act than the one it holds, which {noise} needs. Use paper(p), which needs its output "
                "alone; or leave the layer out by layers=."
            )
        writer = generic.author(layer)
        if not generic.is_read(writer):
            raise UnsupportedSiteError(
                f"{site.name}: {type(layer).__name__} is an nn.Linear with a forward of its own ({writer.__module__}), "
                f"so what acts may be another weight than the one it holds, which {noise} needs. Use paper(p), which "
                "needs its output alone; or have the weight changed by torch.nn.utils.parametrize or by peft, which "
                "are understood; or leave the layer out by layers=."
            )


def chunk_of(part: nn.Module) -> int:
    """How many tokens a part of a model of transformers runs its feed-forward layers on at a time; 0 for all."""
    size = getattr(part, "chunk_size_feed_forward", 0)
    return size if isinstance(size, int) and size > 0 else 0


def refuse_chunks(model: nn.Module, sites: Iterable[Site]) -> None:
    """Feed-forward layers of transformers that are run on some tokens after the other: each call looks like a batch."""
    for site in (site for site in sites if site.component == "feed_forward"):
        for path, part in around(model, site.path):
            if size := chunk_of(part):
                raise UnsupportedSiteError(
                    f"{site.name}: {path or 'the model'} runs it on {size} tokens at a time, so that each chunk would "
                    "count as a batch of its own. Set chunk_size_feed_forward = 0 in the model's configuration before "
                    "the model is made, or on that module now."
                )


def refuse_sharded(model: nn.Module, sites: Iterable[Site], laws: Mapping[Component, Noise]) -> None:
    """FSDP2 takes weights away after a layer's call: no penalty may need one in its backward pass."""
    sharded = modules_under_fsdp(model)
    for site in sites:
        noise = laws[site.component]
        if projection_of(site).module in sharded and keeps_weight(site, noise):
            raise UnsupportedSiteError(
                f"{site.name}: under {noise} its penalty needs a weight again in the backward pass, and fully_shard "
                "has taken it away by then. Under FSDP2 use value and feed_forward of layers that are modules of their "
                "own, which work with every law, or paper(p) for scores and attended values; or leave the layer "
                "unsharded."
            )


Place = tuple[nn.Module, str, nn.Module, str]
"""What holds a module, under which name, the module, and its path."""


def places_of(model: nn.Module, sites: Iterable[Site]) -> list[Place]:
    """Where the layers of these sites are."""
    wanted = {projection.module for site in sites for projection in site.source.described.projections}
    return [
        (holder, name, module, f"{path}.{name}" if path else name)
        for path, holder in model.named_modules()
        for name, module in holder.named_children()
        if module in wanted
    ]


def refuse_replaced(places: Iterable[Place]) -> None:
    """What has taken the place of a layer does something else, and the penalty would not know."""
    for holder, name, module, path in places:
        now = holder._modules.get(name)
        if now is not module:
            is_now = "gone" if now is None else type(now).__name__
            raise CollectionError(
                f"{path} was {type(module).__name__} when the regulariser was attached, and is {is_now} now. Adapters "
                "(peft) and quantisation replace layers: remove() the regulariser and attach it after that."
            )


def keeps_weight(site: Site, noise: Noise) -> bool:
    """Whether the penalty of a site is computed from a weight during the forward pass."""
    attention = site.source.described
    if not isinstance(attention, Attention):
        return False
    if site.component == "value":
        return not attention.value.called and coherent_part_needed(noise)
    if site.component == "attended_value":
        return bool(noise.variance) or (attention.output is None and attention.inputs is not None)
    return bool(noise.variance) or attention.inputs is not None


def no_forward(model: nn.Module) -> CollectionError:
    return CollectionError(
        f"no training forward pass of {type(model).__name__} since the last call, in this thread. Run the model in "
        "train mode and with gradients, by calling it (not its forward method or a part of it), before calling the "
        "regulariser. If the model was compiled and called before the regulariser was attached, compile it again "
        "(after torch.compiler.reset()): torch.compile ignores new hooks."
    )


def refuse_silent(sites: Sequence[Site], fired: Collection[str], *, require_all: bool) -> None:
    """Sites that have left nothing in a forward pass; where they may, all of them at once."""
    silent = [site.name for site in sites if site.name not in fired]
    if silent and (require_all or len(silent) == len(sites)):
        raise CollectionError(
            f"{len(silent)} of {len(sites)} sites did not fire in the forward pass: {', '.join(silent[:5])}"
            f"{', …' if len(silent) > 5 else ''}. The model went around their modules (a fused path, a part in eval "
            "mode, LayerDrop): leave them out by layers=, or attach with require_all=False. Or it was compiled and "
            "called before the regulariser was attached: compile it again, after torch.compiler.reset()."
        )


def unmatched(model: nn.Module) -> UnmatchedModelError:
    modules = list(model.named_modules())
    linear = [(path, m) for path, m in modules if isinstance(m, nn.Linear)]
    closest = ", ".join(f"{path!r} ({m.in_features} → {m.out_features})" for path, m in linear[:3])
    rest = f" and {len(linear) - 3} more" if len(linear) > 3 else ""
    headless = [path or "the model" for path, module in modules if generic.lacks_heads(module)]
    hint = f"{headless[0]!r} has projections of attention, but no number of heads: set num_heads. " if headless else ""
    return UnmatchedModelError(
        f"no attention or feed-forward site was found in {type(model).__name__}. Looked at {len(modules)} modules; "
        + (f"linear layers that no rule claims: {closest}{rest}. " if linear else "none of them is a linear layer. ")
        + hint
        + "Tell the library what they are:  @xd.register_rule(YourModule)   (docs: Add a model family)"
    )


def check_state(state: object) -> int:
    """The number of calls in a state_dict."""
    calls = state.get("calls") if isinstance(state, Mapping) and set(state) == {"calls"} else None
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 0:
        raise InputError("state", "what state_dict() returned: {'calls': whole number ≥ 0}", repr(state))
    return calls
