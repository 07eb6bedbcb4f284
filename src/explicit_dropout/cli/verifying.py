"""`explicit-dropout verify`: the closed forms against dice, on a real model."""

from __future__ import annotations

from dataclasses import dataclass
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
from explicit_dropout.cli.models import load, unmatched
from explicit_dropout.cli.output import common_prefix, console, fitted, plural, shortened
from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.noise import Noise, bernoulli, gaussian, inverted, paper
from explicit_dropout.perturbation import Record, closed_forms, measure, record, sites_by_layer, steady
from explicit_dropout.sampling import Estimate
from explicit_dropout.sites import COMPONENTS, Component, Site
from explicit_dropout.testing import Failure, misdescribed

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

    Exit status: 0 all sites agree, 1 one does not, 2 the command makes no sense.

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
    if plot is not None and not plot.parent.is_dir():
        raise InputError("--plot", "a file in a folder that exists", plot)
    for option, given in (("--samples", samples), ("--batch", batch), ("--tokens", tokens)):
        if given < (least := FEWEST if option == "--samples" else 1):
            raise InputError(option, f"at least {least}", given)
    try:
        law = LAWS[noise](rate)
    except InputError as error:  # by the name that the option has here
        raise InputError("--rate", error.expected, rate) from None
    example = load(model, set, batch=batch, tokens=tokens, seed=seed)
    inputs, keywords = example.call()
    places = sites_by_layer(example.model)
    if not places:
        raise unmatched(example.model)
    sites = _chosen([site for _, found in places for site in found], components, layers)
    out = console()
    out.print(f"[bold]{type(example.model).__name__}[/], {_described(law, rate)}: {plural(len(sites), 'site')}")
    terms, refused = closed_forms(example.model, law, sites, inputs, keywords)
    results: list[Result] = []
    wrong: list[Failure] = []
    if terms:
        taken = record(example.model, [layer for layer, _ in places], inputs, keywords)
        results = _measured([s for s in sites if s.name in terms], terms, taken, law, samples, seed, example.model)
        prefix = common_prefix(sites)
        if prefix:
            out.print(f"[dim]modules are inside {escape(prefix.rstrip('.'))}[/]")
        table = as_table(results, prefix)
        out.print(fitted(table, out.width, name="module", expendable=("drawn", "closed", "layer")))
        wrong, _ = misdescribed(example.model, list({site.source: None for site in sites}), taken)
        for failure in wrong:
            out.print(f"[bold red]wrong rule[/] {escape(str(failure))}")
    for reason in dict.fromkeys(refused.values()):
        names = [name for name, given in refused.items() if given == reason]
        such = f"{plural(len(names), 'site')}, such as {escape(names[0])}"
        out.print(f"[yellow]not exact[/] {such}: [dim]{escape(reason)}[/]")
    if plot is not None and results:
        from explicit_dropout.cli.plotting import draw

        draw(results, f"{model}, {_described(law, rate)}", plot)
        out.print(f"plot written to {escape(str(plot))}")
    return _verdict(results, wrong, law, samples, len(refused))


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


def _measured(
    sites: list[Site], terms: dict[str, Tensor], taken: Record, law: Noise, samples: int, seed: int, model: nn.Module
) -> list[Result]:
    generator = torch.Generator().manual_seed(seed)
    results = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as progress, steady(model):
        task = progress.add_task("drawing masks", total=len(sites) * (samples if law.variance else 1))
        for site in sites:
            try:
                calls = taken.of(site.source)
                drawn = measure(site, calls, law, samples, generator=generator, tick=partial(progress.advance, task))
            except ExplicitDropoutError as error:
                raise ExplicitDropoutError(f"{site.name}: {error}") from error
            results.append(Result(site, float(terms[site.name]), drawn))
    return results


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


def _verdict(results: list[Result], misread: list[Failure], law: Noise, samples: int, refused: int) -> int:
    out = console()
    left = f"; {plural(refused, 'site')} not exact under this law" if refused else ""
    if not results:
        out.print(f"[bold red]Nothing to check[/]{left}. Try --noise paper.")
        return FAILED
    wrong = [result for result in results if not result.agrees]
    if wrong:
        out.print(
            f"[bold red]{len(wrong)} of {plural(len(results), 'site')} disagree[/] with the model itself, first "
            f"{escape(wrong[0].site.name)}{left}. Is its rule right? explicit_dropout.testing.check_rule tells."
        )
        return FAILED
    if misread:
        places = {failure.site.partition(":")[0] for failure in misread}
        out.print(
            f"[bold red]{plural(len(places), 'module')} described wrongly[/]: penalties there mean something else."
        )
        return FAILED
    deviations = [abs(d) for result in results if (d := result.deviation) is not None]
    how = (
        f"with {samples} masks each, the farthest {max(deviations):.1f} standard errors away"
        if deviations
        else f"within {TOLERANCE:g} of the one mask that {law.law} has"
    )
    noun = "site agrees" if len(results) == 1 else "sites agree"
    out.print(f"[bold green]All {len(results)} {noun}[/] {how}{left}.")
    return FINE
