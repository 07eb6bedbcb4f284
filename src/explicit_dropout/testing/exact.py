"""Whether closed forms agree with Monte Carlo on the real modules, and reach their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import ExplicitDropoutError
from explicit_dropout.finding import told_once
from explicit_dropout.noise import Noise, paper
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.sites import Attention, Projection, Site
from explicit_dropout.testing.host import Host
from explicit_dropout.testing.measuring import closed_forms, measure, refusal, unit_strengths
from explicit_dropout.testing.repeating import Record, steady
from explicit_dropout.testing.report import TOLERANCE, Failure, Report, RuleError, stop_at

DEVIATIONS = 5.0
"""Standard errors up to which a closed form and Monte Carlo agree."""


def agreements(
    host: Host, noise: Noise, sites: Sequence[Site], taken: Record, samples: int, seed: int, report: Report
) -> dict[Site, Noise]:
    """Closed form against Monte Carlo; and the law under which each site was found exact."""
    laws: dict[Site, Noise] = {}
    failures = []
    closed: dict[str, Tensor] = {}
    for law in (noise, paper(0.2)):
        rest = [site for site in sites if site not in laws]
        if not rest:
            break
        try:
            terms, refused = closed_forms(host.model, law, rest, host.inputs, host.keywords)
        except ExplicitDropoutError as error:
            raise RuleError([Failure("fires", type(host.model).__name__, str(error))]) from error
        closed |= terms
        laws |= {site: law for site in rest if site.name in terms}
    for names, reason in told_once({site.name: refused[site.name] for site in sites if site not in laws}):
        report.skip({}, f"{', '.join(names)}: {reason}")
    here = [site.name for site in sites if site not in laws and refusal(site, paper(0.2)) is None]  # in this call alone
    report.skip({"exact": here, "gradient": here})
    generator = torch.Generator().manual_seed(seed)
    with steady(host.model):
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
            report.done("exact", [site.name])
    stop_at(failures)
    return laws


# ---------------------------------------------------------------------------------------------- gradient


def gradients(host: Host, laws: Mapping[Site, Noise], report: Report) -> list[Failure]:
    """Parameters of sites that their penalty does not move."""
    failures = []
    done: set[tuple[int, str, str]] = set()
    for site, law in laws.items():
        key = (site.layer, site.component, site.source.path)
        if key in done:
            continue
        done.add(key)
        same = [s for s in laws if (s.layer, s.component, s.source.path) == key]
        host.model.zero_grad()
        with ExplicitDropout(host.model, law, padding=None, **unit_strengths([site])) as reg, steady(host.model):
            host.run()
            try:
                reg().backward()  # type: ignore[no-untyped-call]
            except RuntimeError as error:  # what a hook has seen was changed in place later, say
                failures.append(Failure("gradient", site.name, str(error).partition("\n")[0]))
                continue
        for member in same:
            for role, projection in _parameters_of(member):
                failures += _gradient(member, role, projection, report)
    host.model.zero_grad()
    return failures


def _parameters_of(site: Site) -> list[tuple[str, Projection]]:
    described = site.source.described
    if isinstance(described, Attention) and site.component in ("query", "key", "query_key"):
        return [("query", described.query), ("key", described.key)]
    assert site.projection is not None
    return [("own", site.projection)]


def _gradient(site: Site, role: str, projection: Projection, report: Report) -> list[Failure]:
    weight: Any = projection.module
    for name in projection.weight.split("."):
        weight = getattr(weight, name)
    if not (isinstance(weight, nn.Parameter) and weight.requires_grad):
        reason = f"gradient of {site.name}: its {role} weight takes none, being frozen or made of other parameters"
        report.skip({"gradient": [site.name]}, reason)
        return []
    report.done("gradient", [site.name])
    gradient = weight.grad
    if gradient is None:
        return [Failure("gradient", site.name, f"the {role} weight gets none")]
    gradient = projection.of(gradient.mT if projection.transposed else gradient, 0)
    wrong = "not finite" if not gradient.isfinite().all() else "zero" if not gradient.any() else None
    return [Failure("gradient", site.name, f"that of the {role} weight is {wrong}")] if wrong else []
