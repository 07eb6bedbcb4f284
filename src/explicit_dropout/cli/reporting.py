"""`explicit-dropout report`: tables and figures of what a store holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from explicit_dropout.cli import FINE
from explicit_dropout.cli.output import console, fitted, plural
from explicit_dropout.errors import InputError
from explicit_dropout.lab.experiment import Experiment, load_experiments
from explicit_dropout.lab.report import Report, build, console_table, results_table, write_report
from explicit_dropout.lab.report.datasets import warnings
from explicit_dropout.lab.report.formats import WIDE
from explicit_dropout.lab.report.legend import legend
from explicit_dropout.lab.report.page import Live
from explicit_dropout.lab.report.sentences import findings
from explicit_dropout.lab.report.serving import LiveReport, Server
from explicit_dropout.lab.store import Store


def report(
    experiments: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="[EXPERIMENT.py …]", help_behavior_hint="(default: every run of the store)"),
    ] = (),
    /,
    store: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results"),
    output: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("report"),
    serve: bool = False,
    port: int = 8000,
) -> int:
    """Make tables and figures of the runs in a store, finished or not.

    Writes report.html (one file, to look at), report.md, report.tex,
    report.csv and configurations.csv.

    Try:
      explicit-dropout report experiments/digits.py --store build/digits
      explicit-dropout report --store results --output report
      explicit-dropout report experiments/table4.py --serve

    Args:
        experiments: Experiment files.
        store: Folder of the results.
        output: Folder for the report.
        serve: Show the report in a browser, up to date while a sweep runs.
        port: Where to serve it, on this machine only; 0 takes a free one.
    """
    place = Store(store)
    place.check()
    if not store.is_dir():
        raise InputError("--store", "a folder that a sweep has written", f"{store}, which is not there")
    listed: list[tuple[Experiment, str | None]] = [
        (experiment, file) for file in dict.fromkeys(experiments) for experiment in load_experiments(file)
    ]
    if not listed and not place.exists:
        raise InputError("--store", "a folder that a sweep has written (it has a folder runs)", store)
    if serve:
        return _serve(place, listed, port)
    made = build(place, listed)
    written = write_report(made, output)
    show(made)
    console().print(f"Written to {escape(str(output))}: {', '.join(path.name for path in written)}")
    return FINE


def show(made: Report) -> None:
    """The results of every experiment as tables of the terminal's width."""
    out = console()
    for part in made.parts:
        out.print(f"[bold]{escape(part.experiment.title)}[/]")
        table = console_table(results_table(part.analysis), out.width)
        out.print(fitted(table, out.width, name="row", expendable=("runs", "p (Holm)", "n", "paper", "to base")))
        for sentence in warnings(part):
            out.print(f"[bold yellow]{escape(sentence)}[/]")
        for sentence in findings(part.analysis, intervals=out.width >= WIDE):
            out.print(f"[dim]{escape(sentence)}[/]")
        out.print()
        for row, words in legend(part.analysis):
            out.print(f"[dim]{escape(row)}: {escape(words)}[/]")
        out.print()
    for problem in made.problems:
        out.print(f"[bold yellow]{escape(problem)}[/]")
    if made.others:
        belong = "belongs" if made.others == 1 else "belong"
        out.print(f"[dim]{plural(made.others, 'more run')} of the store {belong} to none of these experiments.[/]")


def _serve(place: Store, listed: list[tuple[Experiment, str | None]], port: int) -> int:
    def make(live: Live) -> str:
        return build(place, listed).html(live)

    out = console()
    with Server(LiveReport(place.root, make), port) as server:
        try:
            followed = escape(str(place.root))
            out.print(f"The report is at [bold]{server.address}[/] and follows {followed}. Ctrl-C stops it.")
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            out.print("Stopped.")
    return FINE
