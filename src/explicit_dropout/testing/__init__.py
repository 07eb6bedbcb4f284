"""check_rule: what you run to prove that a rule of your own describes your model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from explicit_dropout.errors import UnmatchedModelError
from explicit_dropout.finding import unclaimed, unclaimed_line
from explicit_dropout.noise import Noise, bernoulli
from explicit_dropout.sites import Site
from explicit_dropout.testing import copies
from explicit_dropout.testing.describes import fires, misdescribed, refused
from explicit_dropout.testing.exact import agreements, gradients
from explicit_dropout.testing.host import Host
from explicit_dropout.testing.measuring import sites_by_layer
from explicit_dropout.testing.repeating import record
from explicit_dropout.testing.report import CHECKS, Check, Failure, Report, RuleError, stop_at

__all__ = ["CHECKS", "Failure", "Report", "RuleError", "check_rule", "misdescribed"]


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
    layers = [layer for layer, _ in places]
    sites = [site for _, found in places for site in found]
    if not sites:
        raise UnmatchedModelError(
            f"no rule says anything about {type(model).__name__}: register one by @xd.register_rule(…) first"
        )
    report = Report([site.name for site in sites], unclaimed=unclaimed_line(unclaimed(model, [at for at, _ in places])))
    host = Host(model, inputs, kwinputs)
    taken = record(model, layers, inputs, kwinputs)
    stop_at(fires([layer for layer in layers if not refused(layer)], taken))
    report.done("fires", [site.name for site in sites if not refused(site.source)])
    stop_at(misdescribed(model, layers, taken, report))
    laws = agreements(host, noise, sites, taken, samples, seed, report)
    stop_at(gradients(host, laws, report))
    _of_copies(host, laws, report, compile)
    return report


def _of_copies(host: Host, laws: Mapping[Site, Noise], report: Report, compile: bool) -> None:
    """The checks of compiled, copied and saved models, for the sites of each law together."""
    checks: dict[Check, Callable[[Host, Noise, Sequence[Site]], str | None]] = {
        "compile": copies.compiled, "deepcopy": copies.copied, "pickle": copies.pickled,
    }  # fmt: skip
    for law in dict.fromkeys(laws.values()):
        together = [site for site, own in laws.items() if own == law]
        for name, check in checks.items():
            if name == "compile" and not compile:
                continue
            try:
                reason = check(host, law, together)
            except Exception as error:
                raise RuleError(
                    [Failure(name, type(host.model).__name__, f"{type(error).__name__}: {error}")]
                ) from error
            if reason:
                report.skip({name: [site.name for site in together]}, f"{name}: {reason}")
            else:
                report.done(name, [site.name for site in together])
