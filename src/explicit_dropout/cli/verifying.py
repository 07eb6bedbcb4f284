"""`explicit-dropout verify`: the closed forms against dice, on a real model."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

from explicit_dropout.cli import FAILED, FINE
from explicit_dropout.cli.inspecting import unconfirmed
from explicit_dropout.cli.models import load
from explicit_dropout.cli.output import common_prefix, console, fitted, plural, shortened
from explicit_dropout.cli.plotting import check_file, draw
from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.finding import told_once, unclaimed, unclaimed_line
from explicit_dropout.noise import Noise, bernoulli, gaussian, inverted, paper
from explicit_dropout.refusals import unmatched
from explicit_dropout.sampling import Estimate
from explicit_dropout.sites import COMPONENTS, Component, Site
from explicit_dropout.testing import Failure, Report, misdescribed
from explicit_dropout.testing.measuring import closed_forms, measure, refusal, sites_by_layer
from explicit_dropout.testing.repeating import Record, record, steady

DEVIATIONS = 4.5
"""Standard errors beyond which a site disagrees: by chance, one site in 150 000."""
FEWEST = 20
"""Masks at a site, below which a standard error says little."""
TOLERANCE = 1e-3
"""Relative difference that single precision may cause, all there is to go by under a law without variance."""
_ALL = "(default: all)"
LAWS = {"inverted": inverted, "bernoulli": bernoulli, "gaussian": gaussian, "paper": paper}


@dataclass(frozen=True)
class Result:
    """One site: what the regulariser says, and what the dice say."""

    site: Site
    closed: float
    drawn: Estimate

    @property
    def deviation(self) -> float | None:
        """Standard errors between the two; None where the law has a single mask."""
        error = float(self.drawn.standard_error)
        return (self.closed - float(self.drawn.mean)) / error if error else None

    @property
    def agrees(self) -> bool:
        mean, error = float(self.drawn.mean), float(self.drawn.standard_error)
        small = TOLERANCE * abs(mean) if not error else 1e-5 * abs(mean)
        return abs(self.closed - mean) <= DEVIATIONS * error + small


@dataclass
class Findings:
    """All that is found about the sites of a model, and by which dice."""

    law: Noise
    samples: int
    seed: int
    results: list[Result] = field(default_factory=list)
    wrong: list[Failure] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    unmeasured: dict[str, str] = field(default_factory=dict)
    unconfirmed: dict[str, str] = field(default_factory=dict)


def verify(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    /,
    noise: Literal["inverted", "bernoulli", "gaussian", "paper"] = "inverted",
    rate: float = 0.2,
    samples: int = 200,
    seed: int = 0,
    components: Annotated[tuple[Component, ...], tyro.conf.arg(metavar="NAME …", help_behavior_hint=_ALL)] = (),
    layers: Annotated[tuple[int, ...], tyro.conf.arg(metavar="INDEX …", help_behavior_hint=_ALL)] = (),
    batch: int = 2,
    tokens: int = 16,
    plot: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = (),
) -> int:
    """Check every closed form of a model against drawn masks.

    Masks multiply the input of the real projection; its real output moves.

    Exit status: 0 all sites agree, 1 one does not, 2 it cannot be carried out.

    Status 1, too, where a module is not what its names say.

    Try:
      explicit-dropout verify timm:vit_tiny_patch16_224 --layers 0 11
      explicit-dropout verify hf:llama --set num_hidden_layers=2 --noise paper
      explicit-dropout verify my_model.py:build --samples 1000 --plot check.png

    Args:
        model: timm:NAME, hf:TYPE, hf:FOLDER, torch:CONSTRUCTOR(…), MODULE:CALLABLE or FILE.py:CALLABLE.
        noise: The law of the masks; paper has a single mask, 1 − rate everywhere, and no standard error.
        rate: Drop rate; the standard deviation for gaussian.
        samples: Masks drawn at each site.
        seed: Of weights, inputs and masks.
        components: Only these: query key query_key value attended_value feed_forward.
        layers: Only these layers.
        batch: Samples in the example input.
        tokens: Tokens of each, where the model takes text.
        plot: Draw the comparison into this file (.png, .pdf, .svg).
        set: Argument of the model or of its configuration, such as depth=2.
    """
    law = _checked(noise, rate, samples, batch, tokens, plot)
    example = load(model, set, batch=batch, tokens=tokens, seed=seed)
    inputs, keywords = example.call()
    places = sites_by_layer(example.model)
    if not places:
        raise unmatched(example.model)
    sites = _chosen([site for _, found in places for site in found], components, layers)
    found = Findings(law, samples, seed)
    out = console()
    out.print(f"[bold]{type(example.model).__name__}[/], {_described(law, rate)}: {plural(len(sites), 'site')}")
    terms, found.refused = closed_forms(example.model, law, sites, inputs, keywords)
    if terms:
        taken = record(example.model, [layer for layer, _ in places], inputs, keywords)
        _measure([site for site in sites if site.name in terms], terms, taken, example.model, found)
        prefix = common_prefix(sites)
        if prefix:
            out.print(f"[dim]modules are inside {escape(prefix.rstrip('.'))}[/]")
        table = as_table(found.results, prefix)
        out.print(fitted(table, out.width, name="module", expendable=("drawn", "closed", "layer")))
        shown = Report([site.name for site in sites])
        found.wrong = misdescribed(example.model, list({site.source: None for site in sites}), taken, shown)
    found.unconfirmed = unconfirmed(sites)
    _tell(found)
    if line := unclaimed_line(unclaimed(example.model, [layer for layer, _ in places])):
        out.print(f"[yellow]{escape(line)}[/]")
    if plot is not None and found.results:
        draw(found.results, f"{model}, {_described(law, rate)}", plot)
        out.print(f"plot written to {escape(str(plot))}")
    return _verdict(found, [site for site in sites if refusal(site, law) is not None])


def _checked(noise: str, rate: float, samples: int, batch: int, tokens: int, plot: Path | None) -> Noise:
    """The law, once it is clear that everything else can be done, too."""
    if plot is not None:
        check_file(plot)
    for option, given in (("--samples", samples), ("--batch", batch), ("--tokens", tokens)):
        if given < (least := FEWEST if option == "--samples" else 1):
            raise InputError(option, f"at least {least}", given)
    try:
        return LAWS[noise](rate)
    except InputError as error:  # by the name that the option has here
        raise InputError("--rate", error.expected, rate) from None


def _tell(found: Findings) -> None:
    """What was not checked, and what is not as it is said to be, each with its reason."""
    out = console()
    for failure in found.wrong:
        out.print(f"[bold red]wrong rule[/] {escape(str(failure))}")
    for place, reason in found.unconfirmed.items():
        out.print(f"[bold red]not confirmed[/] {escape(place or 'the model')}: [dim]{escape(reason)}[/]")
    said = tuple(found.unconfirmed.values())
    refused = {name: reason for name, reason in found.refused.items() if not said or not reason.startswith(said)}
    for mark, reasons in (("not exact", refused), ("not checked", found.unmeasured)):
        for names, reason in told_once(reasons):
            such = f"{plural(len(names), 'site')}, such as {escape(names[0])}"
            out.print(f"[yellow]{mark}[/] {such}: [dim]{escape(reason)}[/]")


def _described(law: Noise, rate: float) -> str:
    return f"gaussian std {rate:g}" if law.law == "gaussian" else f"{law.law} dropout of rate {rate:g}"


def _chosen(sites: list[Site], components: tuple[Component, ...], layers: tuple[int, ...]) -> list[Site]:
    number = max(site.layer for site in sites) + 1
    outside = [index for index in layers if index not in range(number)]
    if outside:
        raise InputError("--layers", f"indices from 0 to {number - 1}", outside[0])
    wanted = [s for s in sites if s.component in (components or COMPONENTS) and s.layer in (layers or range(number))]
    if not wanted:
        there = sorted({site.component for site in sites})
        raise InputError("--components", f"among those of the model: {', '.join(there)}", ", ".join(components))
    return wanted


def _measure(sites: list[Site], terms: dict[str, Tensor], taken: Record, model: nn.Module, found: Findings) -> None:
    generator = torch.Generator().manual_seed(found.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress, steady(model):
        task = progress.add_task("drawing masks", total=len(sites) * (found.samples if found.law.variance else 1))
        tick = partial(progress.advance, task)
        for site in sites:
            try:
                drawn = measure(site, taken.of(site.source), found.law, found.samples, generator=generator, tick=tick)
            except ExplicitDropoutError as error:
                found.unmeasured[site.name] = str(error)
                continue
            found.results.append(Result(site, float(terms[site.name]), drawn))


def as_table(results: list[Result], prefix: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("component", no_wrap=True)
    table.add_column("module", overflow="fold", ratio=1)
    table.add_column("closed", justify="right", no_wrap=True)
    table.add_column("drawn", no_wrap=True)
    table.add_column("away", justify="right", no_wrap=True)
    layer = -1
    for result in results:
        site, deviation = result.site, result.deviation
        away = f"{abs(deviation):.1f} se" if deviation is not None else _relative(result)
        table.add_row(
            str(site.layer) if site.layer != layer else "",
            site.component,
            escape(shortened(site.path, prefix)),
            f"{result.closed:.4g}",
            f"{float(result.drawn.mean):.4g} [dim]± {float(result.drawn.standard_error):.1g}[/]",
            away if result.agrees else f"[bold red]{away}[/]",
        )
        layer = site.layer
    return table


def _relative(result: Result) -> str:
    mean = float(result.drawn.mean)
    return f"{abs(result.closed - mean) / max(abs(mean), 1e-30):.0e}"


def _verdict(found: Findings, refused: list[Site]) -> int:
    """What it all comes to. refused: the sites that have no penalty under the law, whatever the call."""
    out, results, law = console(), found.results, found.law
    in_this_call = len(found.refused) - len(refused)
    left = f"; {plural(len(refused), 'site')} not exact under this law" if refused else ""
    left += f"; {plural(in_this_call, 'site')} not exact in this call" if in_this_call else ""
    wrong = [result for result in results if not result.agrees]
    if wrong:
        out.print(
            f"[bold red]{len(wrong)} of {plural(len(results), 'site')} disagree[/] with the model itself, first "
            f"{escape(wrong[0].site.name)}{left}. Is its rule right? explicit_dropout.testing.check_rule tells."
        )
        return FAILED
    if found.wrong:
        places = {failure.site.partition(":")[0] for failure in found.wrong}
        out.print(
            f"[bold red]{plural(len(places), 'module')} described wrongly[/]: penalties there mean something else."
        )
        return FAILED
    if found.unconfirmed:
        out.print(
            f"[bold red]{plural(len(found.unconfirmed), 'module')} not confirmed[/] to be what the names say{left}. "
            "Describe what is by @xd.register_rule (docs: Add a model family)."
        )
        return FAILED
    if found.unmeasured:
        name, reason = next(iter(found.unmeasured.items()))
        raise ExplicitDropoutError(f"{plural(len(found.unmeasured), 'site')} could not be checked: {name}: {reason}")
    if not results:
        way_out = " Try --noise paper." if law.variance and refused else ""
        out.print(f"[bold red]Nothing to check[/]{left}.{way_out}")
        return FAILED
    deviations = [abs(d) for result in results if (d := result.deviation) is not None]
    how = (
        f"with {found.samples} masks each, the farthest {max(deviations):.1f} standard errors away"
        if deviations
        else f"within {TOLERANCE:g} of the one mask that {law.law} has"
    )
    noun = "site agrees" if len(results) == 1 else "sites agree"
    out.print(f"[bold green]All {len(results)} {noun}[/] {how}{left}.")
    return FINE
