"""check_rule: what you run to prove that a rule of your own describes your model."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from explicit_dropout.errors import ExplicitDropoutError, UnmatchedModelError
from explicit_dropout.noise import Noise, bernoulli, paper
from explicit_dropout.perturbation import (
    AttentionAgain,
    Record,
    closed_forms,
    measure,
    projected,
    record,
    sites_by_layer,
    steady,
    strengths,
)
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.sites import COMPONENTS, Attention, FeedForward, Layer, Projection, Site

Check = Literal[
    "fires", "projection", "values", "pairs", "weights", "scores", "exact", "gradient", "compile", "deepcopy", "pickle"
]
CHECKS: tuple[Check, ...] = get_args(Check)
TOLERANCE = 2e-3
"""Relative error up to which two ways of computing one tensor agree in single precision."""
DEVIATIONS = 5.0
"""Standard errors up to which a closed form and Monte Carlo agree."""


@dataclass(frozen=True)
class Failure:
    """One check that failed at one place: a site (path:component), or the path of a layer."""

    check: Check
    site: str
    reason: str

    def __str__(self) -> str:
        return f"{self.check} failed for {self.site}: {self.reason}"


class RuleError(ExplicitDropoutError, AssertionError):
    """A rule does not describe the model. `failures` says which checks failed for which sites."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("\n".join(map(str, failures)))
        self.failures = tuple(failures)


@dataclass
class Report:
    """What `check_rule` has shown: the sites, the checks passed, and what could not be checked and why."""

    sites: list[str]
    passed: list[Check] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.sites)} sites proved: {', '.join(self.passed)}."]
        return "\n".join(lines + [f"Not checked: {reason}" for reason in self.skipped])


def check_rule(
    model: nn.Module,
    *inputs: Any,
    noise: Noise | None = None,
    samples: int = 256,
    seed: int = 0,
    compile: bool = True,
    **kwinputs: Any,
) -> Report:
    """Prove that the library's rules describe this model, on a copy of it, or raise a `RuleError` that says where not.

    fires: every projection is called, and every site yields a term.
    projection: each projection is x Wᵀ + b with the weight and rows that the rule names.
    values: attention weights, read out of the real attention through the described values, have rows that sum to 1.
    pairs: they are zero where the rule says that a query does not see a key, and only there.
    weights: where the rule says how to have them, that is what they are.
    scores: they follow the described heads, scale and rotation for queries and keys of our choice.
    exact: each closed form agrees with Monte Carlo on the real modules.
    gradient: each site's parameters get a finite gradient that is not zero.
    compile: under `torch.compile(fullgraph=True, backend="aot_eager")` the penalty is the same.
    deepcopy, pickle: the model with its hooks can be copied and saved, and a copy is not regularised.

    Args:
        model: a small model of the family; its weights are left alone.
        inputs, kwinputs: what to call it with. Choose more tokens than one, and no two sequences alike.
        noise: the law under test; default `bernoulli(0.2)`, and `paper(0.2)` for sites exact only without variance.
        samples, seed: masks drawn for each site, and the seed that makes them the same again.
        compile: False leaves that check out; it takes seconds.
    """
    noise = bernoulli(0.2) if noise is None else noise
    model = copy.deepcopy(model)
    places = sites_by_layer(model)
    layers = [layer for layer, _ in places if not _refused(layer)]
    sites = [site for _, found in places for site in found]
    if not sites:
        raise UnmatchedModelError(
            f"no rule says anything about {type(model).__name__}: register one by @xd.register_rule(…) first"
        )
    report = Report([site.name for site in sites])
    taken = record(model, layers, inputs, kwinputs)
    _stop_at(_fires(layers, taken))
    report.passed.append("fires")
    failures, skipped = misdescribed(model, layers, taken)
    _stop_at(failures)
    report.skipped += skipped
    report.passed += ["projection", "values", "pairs", "weights", "scores"]
    exact, laws = _exact(model, noise, sites, taken, inputs, kwinputs, samples, seed, report)
    _stop_at(exact)
    report.passed.append("exact")
    _stop_at(_gradients(model, laws, inputs, kwinputs))
    report.passed.append("gradient")
    checks: list[tuple[Check, Callable[..., str | None]]] = [("deepcopy", _copied), ("pickle", _pickled)]
    if compile:
        checks.insert(0, ("compile", _compiled))
    first = noise if noise in laws.values() else paper(0.2)
    together = [site for site, law in laws.items() if law == first]
    for name, check in checks:
        try:
            reason = check(model, first, together, inputs, kwinputs)
        except Exception as error:
            raise RuleError([Failure(name, type(model).__name__, f"{type(error).__name__}: {error}")]) from error
        if reason:
            report.skipped.append(f"{name}: {reason}")
        else:
            report.passed.append(name)
    return report


def _stop_at(failures: Sequence[Failure]) -> None:
    if failures:
        raise RuleError(failures)


# ---------------------------------------------------------------------------------------------- fires


def _fires(layers: Sequence[Layer], taken: Record) -> list[Failure]:
    failures = []
    for layer in layers:
        described, calls = layer.described, taken.of(layer)
        if isinstance(described, Attention) and not calls:
            failures.append(Failure("fires", layer.path, "the module is never called, so nothing inside it is seen"))
            continue
        for role, path, projection in _projections(layer):
            if projection.called and not any(projection.module in call.inputs for call in calls):
                failures.append(
                    Failure("fires", path, f"the {role} projection ({type(projection.module).__name__}) is never called"
                            + ("" if role == "layer" else f" inside {layer.path or 'the model'}")
                            + "; name the module that is, or describe it with called=False and `inputs`")
                )  # fmt: skip
    return failures


def _projections(layer: Layer) -> list[tuple[str, str, Projection]]:
    described = layer.described
    if isinstance(described, FeedForward):
        return [("layer", path, p) for path, p in zip(layer.layer_paths, described.layers, strict=True)]
    roles = {"query": described.query, "key": described.key, "value": described.value}
    return [(role, f"{layer.path}:{role}", projection) for role, projection in roles.items()]


# ---------------------------------------------------------------------------------------------- describes


def misdescribed(model: nn.Module, layers: Sequence[Layer], taken: Record) -> tuple[list[Failure], list[str]]:
    """Where descriptions are not what the modules really do; and what could not be looked at, and why."""
    failures: list[Failure] = []
    skipped: list[str] = []
    with steady(model), torch.no_grad():
        for layer in layers:
            failures += [] if _refused(layer) else _describes(layer, taken, skipped)
    return failures, skipped


def _refused(layer: Layer) -> bool:
    """Whether no law has a penalty there, so that nothing hangs on the description."""
    item = layer.described
    return bool(item.obstacle) if isinstance(item, FeedForward) else item.refused.keys() >= {*COMPONENTS[:5]}


def _describes(layer: Layer, taken: Record, skipped: list[str]) -> list[Failure]:
    described = layer.described
    failures: list[Failure] = []
    for call in taken.of(layer):
        for role, path, projection in _projections(layer):
            if projection.called and projection.module in call.inputs:
                weight, bias = projection.parameters()
                x = call.inputs[projection.module]
                if x.shape[-1] != weight.shape[1]:
                    reason = f"its input is {x.shape[-1]} wide, the described weight takes {weight.shape[1]}"
                    failures.append(Failure("projection", path, reason))
                    continue
                gap = _gap(nn.functional.linear(x, weight, bias), projected(projection, x))
                if not gap < TOLERANCE:
                    reason = f"the {role}'s output is not x Wᵀ + b of the described weight (relative gap {gap:.2g})"
                    failures.append(Failure("projection", path, reason))
        if isinstance(described, Attention) and not failures:
            if refusal := described.refused.get("attended_value"):
                skipped.append(f"values and scores of {layer.path}: {refusal}")
                continue  # and its masks need not be understood
            try:
                failures += _attends(layer, described, AttentionAgain(described, call), skipped)
            except Exception as error:
                failures.append(Failure("values", layer.path, f"{type(error).__name__}: {error}"))
    return failures


def _attends(layer: Layer, attention: Attention, again: AttentionAgain, skipped: list[str]) -> list[Failure]:
    allowed = again.allowed()
    real = again.weights()
    if real is None:
        return _recomputed(layer, attention, again, skipped)
    rows = allowed.expand(*real.shape).any(-1)
    if not _close(sums := real.sum(-1)[rows], 1.0) or real[rows].min() < -TOLERANCE:
        return [
            Failure("values", f"{layer.path}:value", "attention does not average what the rule calls values: its "
                    f"weights, read through them, sum to {sums.min():.3g} … {sums.max():.3g}, not to 1. Check the rows "
                    "of `value`, `heads`, `key_heads` and `output`")
        ]  # fmt: skip
    unseen = real.masked_fill(allowed, 0)[rows].max()
    hidden = (real == 0) & allowed
    if unseen > TOLERANCE or hidden.any():
        reason = (
            f"the model gives a weight of {unseen:.2g} to a key that the rule hides from its query"
            if unseen > TOLERANCE
            else f"the rule counts {int(hidden.sum())} pairs of query and key that the model never sees"
        )
        return [Failure("pairs", f"{layer.path}:query_key", reason + ". Check `causal` and `pairs`")]
    claimed = again.claimed_weights()
    if claimed is not None and not (gap := _gap(claimed, real, rows[..., None])) < 10 * TOLERANCE:
        reason = f"`weights` does not lead to the attention weights of the model (relative gap {gap:.2g})"
        return [Failure("weights", f"{layer.path}:attended_value", reason)]
    if obstacle := attention.obstacle or attention.refused.get("query_key"):
        skipped.append(f"scores of {layer.path}: {obstacle}")
        return []
    return _follows(layer, attention, again, real, allowed)


def _follows(layer: Layer, attention: Attention, again: AttentionAgain, real: Tensor, allowed: Tensor) -> list[Failure]:
    """log A changes with queries and keys as the described scores do, up to a constant in each row."""
    if isinstance(attention.module, nn.MultiheadAttention):
        described = again.described_weights()
        gap = _gap(described.masked_fill(~allowed, 0), real.masked_fill(~allowed, 0))
        return _score_failure(layer, gap)
    clean = again.scores(queries := again.projected("query"), keys := again.projected("key"))
    spread = (attention.score_scale * (queries.shape[-1] / attention.heads) ** 0.5) ** -0.5
    generator = torch.Generator().manual_seed(0)
    logits = real.clamp(min=1e-30).log()
    worst = 0.0
    for moved in ({"query"}, {"key"}, {"query", "key"}):
        new = {
            role: (spread * torch.randn(out.shape, generator=generator)).to(out) if role in moved else out
            for role, out in (("query", queries), ("key", keys))
        }
        weights = again.weights(**{role: new[role] for role in moved})
        assert weights is not None
        expected = again.scores(new["query"], new["key"]) - clean
        found = weights.clamp(min=1e-30).log() - logits
        counted = allowed & (weights > 1e-6) & (real > 1e-6)
        worst = max(worst, _gap(_centred(found, counted), _centred(expected, counted)))
    return _score_failure(layer, worst)


def _score_failure(layer: Layer, gap: float) -> list[Failure]:
    if gap < 10 * TOLERANCE:
        return []
    reason = (
        f"attention weights do not move with queries and keys as the described scores do (relative gap {gap:.2g}). "
        "Check `heads`, `key_heads`, `scale`, `rotary` and the rows of `query` and `key`; where something acts between "
        "the projections and the scores, say so by `obstacle`"
    )
    return [Failure("scores", f"{layer.path}:query_key", reason)]


def _recomputed(layer: Layer, attention: Attention, again: AttentionAgain, skipped: list[str]) -> list[Failure]:
    """Where no module is called for the values: the described attention as a whole against the real one."""
    weights = again.known_weights()
    if reason := attention.obstacle or attention.refused.get("query_key"):
        skipped.append(f"{'values and scores' if weights is None else 'scores'} of {layer.path}: {reason}")
    if weights is None:
        return []
    described = weights @ again.by_head("value", again.projected("value"))
    gap = _gap(described.transpose(-2, -3).flatten(-2), again.again())
    return [] if gap < 10 * TOLERANCE else [
        Failure("weights" if reason else "scores", f"{layer.path}:{'attended_value' if reason else 'query_key'}",
                f"the described attention is not the real one (relative gap {gap:.2g}). Check the rows of the "
                "projections, `heads`" + (" and `weights`" if reason else ", `scale`, `pairs` and `rotary`"))
    ]  # fmt: skip


def _centred(values: Tensor, counted: Tensor) -> Tensor:
    """Less the mean of each row over what counts, and zero elsewhere."""
    kept = torch.where(counted, values, 0)
    mean = kept.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(counted, values - mean, 0)


def _gap(ours: Tensor, theirs: Tensor, counted: Tensor | None = None) -> float:
    """The largest difference relative to the largest element, where it counts; infinite for other shapes."""
    if ours.shape != theirs.shape:
        return torch.inf
    ours, theirs = ours.detach().double(), theirs.detach().double()
    if counted is not None:
        ours, theirs = torch.where(counted, ours, 0), torch.where(counted, theirs, 0)
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def _close(values: Tensor, target: float) -> bool:
    return bool(((values - target).abs() < TOLERANCE).all())


# ---------------------------------------------------------------------------------------------- exact


def _exact(
    model: nn.Module,
    noise: Noise,
    sites: Sequence[Site],
    taken: Record,
    inputs: Sequence[Any],
    keywords: Mapping[str, Any],
    samples: int,
    seed: int,
    report: Report,
) -> tuple[list[Failure], dict[Site, Noise]]:
    """Closed form against Monte Carlo; and the law under which each site was found exact."""
    laws: dict[Site, Noise] = {}
    failures = []
    closed: dict[str, Tensor] = {}
    for law in (noise, paper(0.2)):
        rest = [site for site in sites if site not in laws]
        if not rest:
            break
        try:
            terms, refused = closed_forms(model, law, rest, inputs, keywords)
        except ExplicitDropoutError as error:
            return [Failure("fires", type(model).__name__, str(error))], {}
        closed |= terms
        laws |= {site: law for site in rest if site.name in terms}
    report.skipped += [f"{site.name}: {refused[site.name]}" for site in sites if site not in laws]
    generator = torch.Generator().manual_seed(seed)
    with steady(model):
        for site, law in laws.items():
            drawn = measure(site, taken.of(site.source), law, samples, generator=generator)
            value = closed[site.name].double()
            allowance = DEVIATIONS * drawn.standard_error + TOLERANCE * drawn.mean.abs()
            if not (value - drawn.mean).abs() <= allowance:
                reason = (
                    f"the closed form says {value:.6g}, {drawn.samples} perturbed calls of the real module say "
                    f"{drawn.mean:.6g} ± {drawn.standard_error:.2g}"
                )
                failures.append(Failure("exact", site.name, reason))
    return failures, laws


# ---------------------------------------------------------------------------------------------- gradient


def _gradients(
    model: nn.Module, laws: Mapping[Site, Noise], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Failure]:
    failures = []
    done: set[tuple[int, str, str]] = set()
    for site, law in laws.items():
        key = (site.layer, site.component, site.source.path)
        if key in done:
            continue
        done.add(key)
        same = [s for s in laws if (s.layer, s.component, s.source.path) == key]
        model.zero_grad()
        with ExplicitDropout(model, law, padding=None, **strengths([site])) as reg, steady(model):
            model(*inputs, **keywords)
            try:
                reg().backward()  # type: ignore[no-untyped-call]
            except RuntimeError as error:  # what a hook has seen was changed in place later, say
                failures.append(Failure("gradient", site.name, str(error).partition("\n")[0]))
                continue
        for member in same:
            for role, projection in _parameters_of(member):
                failures += _gradient(member, role, projection)
    model.zero_grad()
    return failures


def _parameters_of(site: Site) -> list[tuple[str, Projection]]:
    described = site.source.described
    if isinstance(described, Attention) and site.component in ("query", "key", "query_key"):
        return [("query", described.query), ("key", described.key)]
    assert site.projection is not None
    return [("own", site.projection)]


def _gradient(site: Site, role: str, projection: Projection) -> list[Failure]:
    weight: Any = projection.module
    for name in projection.weight.split("."):
        weight = getattr(weight, name)
    if not (isinstance(weight, nn.Parameter) and weight.requires_grad):
        return []  # frozen, or made by an adapter from parameters of its own
    gradient = weight.grad
    if gradient is None:
        return [Failure("gradient", site.name, f"the {role} weight gets none")]
    gradient = projection.of(gradient.mT if projection.transposed else gradient, 0)
    if not gradient.isfinite().all():
        return [Failure("gradient", site.name, f"that of the {role} weight is not finite")]
    if not gradient.any():
        return [Failure("gradient", site.name, f"that of the {role} weight is zero")]
    return []


# ---------------------------------------------------------------------------------------------- compile, copy, save


def _penalty(model: nn.Module, reg: ExplicitDropout, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Tensor:
    torch.manual_seed(0)
    model.train()
    model(*inputs, **keywords)
    return reg()


def _quiet(model: nn.Module) -> nn.Module:
    """A copy without random modules, so that two ways of running it can be compared."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def _compiled(
    model: nn.Module, noise: Noise, sites: Sequence[Site], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    def compiled(module: nn.Module) -> Any:
        torch.compiler.reset()
        return torch.compile(module, fullgraph=True, backend="aot_eager")

    with torch.random.fork_rng():
        bare = _quiet(model).train()
        try:
            compiled(bare)(*inputs, **keywords)
        except Exception as error:
            return f"the model itself does not compile in one graph ({type(error).__name__})"
        quiet = _quiet(model)
        with ExplicitDropout(quiet, noise, padding=None, **strengths(sites)) as reg:
            expected = _penalty(quiet, reg, inputs, keywords)
            found = _penalty(compiled(quiet), reg, inputs, keywords)
            found.backward()  # type: ignore[no-untyped-call]
    torch.compiler.reset()
    if not _close(found.detach() / expected.detach(), 1.0):
        raise ExplicitDropoutError(f"the compiled penalty is {found:.6g}, the eager one {expected:.6g}")
    return None


def _copied(
    model: nn.Module, noise: Noise, sites: Sequence[Site], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    with ExplicitDropout(model, noise, padding=None, **strengths(sites)) as reg, steady(model):
        before = _penalty(model, reg, inputs, keywords)
        model(*inputs, **keywords)  # live terms are in the collector now
        twin = copy.deepcopy(model)
        after = reg()
        twin(*inputs, **keywords)
        if not _close(after.detach() / before.detach(), 1.0):
            raise ExplicitDropoutError(
                f"the penalty changed from {before:.6g} to {after:.6g} when the model was copied"
            )
    return None


def _pickled(
    model: nn.Module, noise: Noise, sites: Sequence[Site], inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    try:
        torch.save(model, io.BytesIO())
    except Exception as error:
        return f"the model itself cannot be pickled ({type(error).__name__})"
    with ExplicitDropout(model, noise, padding=None, **strengths(sites)) as reg, steady(model):
        before = _penalty(model, reg, inputs, keywords)
        model(*inputs, **keywords)
        file = io.BytesIO()
        torch.save(model, file)
        after = reg()
        file.seek(0)
        torch.load(file, weights_only=False)(*inputs, **keywords)
        if not _close(after.detach() / before.detach(), 1.0):
            raise ExplicitDropoutError(f"the penalty changed from {before:.6g} to {after:.6g} when the model was saved")
    return None
