"""Whether a description is what the modules really do: what is called, with which weights, and how it attends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from explicit_dropout.errors import InputError, UnsupportedSiteError
from explicit_dropout.sites import OF_ATTENTION, SCORES, Attention, FeedForward, Layer, Projection
from explicit_dropout.testing.repeating import AttentionAgain, Record, projected, steady
from explicit_dropout.testing.report import TOLERANCE, Check, Failure, Report, close


def fires(layers: Sequence[Layer], taken: Record) -> list[Failure]:
    """Projections that nobody calls, and so nobody sees."""
    failures = []
    for layer in layers:
        described, calls = layer.described, taken.of(layer)
        if isinstance(described, Attention) and not calls:
            failures.append(Failure("fires", layer.path, "the module is never called, so nothing inside it is seen"))
            continue
        for role, path, projection, _ in _projections(layer):
            if projection.called and not any(projection.module in call.inputs for call in calls):
                failures.append(
                    Failure("fires", path, f"the {role} projection ({type(projection.module).__name__}) is never called"
                            + ("" if role == "layer" else f" inside {layer.path or 'the model'}")
                            + "; name the module that is, or describe it with called=False and `inputs`")
                )  # fmt: skip
    return failures


def _projections(layer: Layer) -> list[tuple[str, str, Projection, list[str]]]:
    """Role, path and projection, and the sites at which it acts."""
    described, at = layer.described, layer.path
    if isinstance(described, FeedForward):
        layers = zip(layer.layer_paths, described.layers, strict=True)
        return [("layer", path, projection, [f"{path}:feed_forward"]) for path, projection in layers]
    acts = {"query": ("query", "query_key"), "key": ("key", "query_key"), "value": ("value", "attended_value")}
    parts = zip(acts, described.projections, strict=True)
    return [(role, f"{at}:{role}", projection, [f"{at}:{name}" for name in acts[role]]) for role, projection in parts]


# ---------------------------------------------------------------------------------------------- describes


def _of(layer: Layer, *checks: Check) -> dict[Check, list[str]]:
    """Checks of attention, each with the sites that it is about."""
    about = {"values": ("value", "attended_value"), "pairs": (*SCORES, "attended_value"), "scores": SCORES}
    return {check: [f"{layer.path}:{name}" for name in about.get(check, ("attended_value",))] for check in checks}


def misdescribed(model: nn.Module, layers: Sequence[Layer], taken: Record, report: Report) -> list[Failure]:
    """Where descriptions are not what the modules really do; what was and was not looked at goes to the report."""
    failures: list[Failure] = []
    with steady(model), torch.no_grad():
        for layer in layers:
            described = layer.described
            if not refused(layer):
                failures += _describes(layer, taken, report)
            elif isinstance(described, Attention):
                _unseen(layer, described.refused["value"], report, "values", "pairs", "scores")
    return failures


def refused(layer: Layer) -> bool:
    """Whether no law has a penalty there, so that nothing hangs on the description."""
    item = layer.described
    return bool(item.obstacle) if isinstance(item, FeedForward) else item.refused.keys() >= {*OF_ATTENTION}


def _describes(layer: Layer, taken: Record, report: Report) -> list[Failure]:
    described = layer.described
    failures: list[Failure] = []
    for call in taken.of(layer):
        for role, path, projection, sites in _projections(layer):
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
                report.done("projection", sites)
        if isinstance(described, Attention) and not failures:
            if refusal := described.refused.get("attended_value"):
                _unseen(layer, refusal, report, "values", "pairs", "scores")
                continue  # and its masks need not be understood
            try:
                failures += _attends(layer, described, AttentionAgain(described, call), report)
            except Exception as error:
                failures.append(Failure("values", layer.path, f"{type(error).__name__}: {error}"))
    return failures


def _unseen(layer: Layer, reason: str, report: Report, *checks: Check) -> None:
    what = "values and scores" if "values" in checks else "scores"
    report.skip(_of(layer, *checks), f"{what} of {layer.path or 'the model'}: {reason}")


def _attends(layer: Layer, attention: Attention, again: AttentionAgain, report: Report) -> list[Failure]:
    allowed, unread = None, None
    try:
        allowed = again.allowed()
    except (InputError, UnsupportedSiteError) as error:  # of a rule that does not understand the masks of the call
        unread = str(error)
    real = again.weights()
    if real is None and unread is None:
        return _recomputed(layer, attention, again, report)
    if unread is not None:
        _unseen(layer, unread, report, *(("scores", "pairs") if real is not None else ("values", "pairs", "scores")))
    if real is None:
        return []
    rows = real.sum(-1).abs() > TOLERANCE if allowed is None else allowed.expand(*real.shape).any(-1)
    if not close(sums := real.sum(-1)[rows], 1.0) or real[rows].min() < -TOLERANCE:
        return [
            Failure("values", f"{layer.path}:value", "attention does not average what the rule calls values: its "
                    f"weights, read through them, sum to {sums.min():.3g} … {sums.max():.3g}, not to 1. Check the rows "
                    "of `value`, `heads`, `key_heads` and `output`")
        ]  # fmt: skip
    _done(layer, report, "values")
    if allowed is None:
        return []
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
    obstacle = attention.obstacle or attention.refused.get("query_key")
    if obstacle:
        _unseen(layer, obstacle, report, "scores")
    made: dict[Check, bool] = {"pairs": True, "weights": claimed is not None, "scores": not obstacle}
    _done(layer, report, *(check for check, was in made.items() if was))
    return [] if obstacle else _follows(layer, attention, again, real, allowed)


def _done(layer: Layer, report: Report, *checks: Check) -> None:
    for check, sites in _of(layer, *checks).items():
        report.done(check, sites)


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


def _recomputed(layer: Layer, attention: Attention, again: AttentionAgain, report: Report) -> list[Failure]:
    """Where no module is called for the values: the described attention as a whole against the real one."""
    weights = again.known_weights()
    if reason := attention.obstacle or attention.refused.get("query_key"):
        _unseen(layer, reason, report, *(("values", "pairs", "scores") if weights is None else ("scores",)))
    if weights is None:
        return []
    described = weights @ again.by_head("value", again.projected("value"))
    gap = _gap(described.transpose(-2, -3).flatten(-2), again.again())
    _done(layer, report, "values", "pairs", "weights" if reason else "scores")  # all at once, unless it fails
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
