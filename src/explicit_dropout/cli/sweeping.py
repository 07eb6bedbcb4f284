"""`explicit-dropout sweep`: carry out the runs of an experiment that are not finished yet."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.markup import escape
from rich.table import Table

from explicit_dropout.cli import FAILED, FINE, STOPPED
from explicit_dropout.cli.output import console, fitted, plural
from explicit_dropout.cli.sweep_display import Display, label, span
from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.lab import estimate
from explicit_dropout.lab import sweep as sweeps
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.data import data_root
from explicit_dropout.lab.engines import Options, choose
from explicit_dropout.lab.experiment import load_experiments
from explicit_dropout.lab.store import Store

MOST_MINUTES = 10**6
PATIENCE = 60
"""Seconds after which a dry run times no further kind of run."""
_ALL = "(default: all)"
_OWN = "(default: the engine's choice)"
_UNTIL = "(default: until all are finished)"


def sweep(
    experiment: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="EXPERIMENT.py")],
    /,
    engine: Literal["local", "vectorised", "ray", "submitit"] = "local",
    store: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results"),
    only: Annotated[tuple[str, ...], tyro.conf.arg(metavar="ROW …", help_behavior_hint=_ALL)] = (),
    seeds: Annotated[str, tyro.conf.arg(metavar="0,1,…", help_behavior_hint=_ALL)] = "",
    dry_run: bool = False,
    pack: bool = False,
    minutes: Annotated[float | None, tyro.conf.arg(metavar="M", help_behavior_hint=_UNTIL)] = None,
    workers: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint=_OWN)] = None,
    address: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", help_behavior_hint="")] = None,
    slurm: Annotated[str, tyro.conf.arg(metavar="KEY=VALUE,…", help_behavior_hint="")] = "",
    execution: Annotated[Execution, tyro.conf.arg(name="")] = Execution(),  # noqa: B008  (frozen)
) -> int:
    """Carry out the runs of an experiment that are not finished yet.

    Stopped by Ctrl-C, kill -9 or a power cut, the same command resumes it.

    Started several times on one store, on any machines, they share the work.

    Exit status:
      0 all runs are finished
      1 a run failed
      2 the command could not be carried out
      130 stopped

    Try:
      explicit-dropout sweep experiments/digits.py --dry-run
      explicit-dropout sweep experiments/digits.py --only none+none --seeds 0-4
      explicit-dropout sweep experiments/table4.py --engine vectorised --minutes 30
      explicit-dropout sweep experiments/table4.py --engine ray --address auto
      explicit-dropout sweep experiments/table4.py --engine submitit \\
          --slurm partition=gpu,timeout_min=60,gpus_per_node=1

    Args:
        experiment: A Python file with a function experiment().
        engine: Processes, many models in one program, a Ray cluster, or Slurm.
        store: Folder of the results.
        only: Rows of the table, by name.
        seeds: Seeds, such as 0,1 or 0-4.
        dry_run: Show what would run and how long it may take; train nothing.
        pack: Only move finished runs into one file, DIR/EXPERIMENT.zip.
        minutes: Stop after so long, as Ctrl-C would.
        workers: Runs side by side. With local, 0 means in this very process.
        address: Of a running Ray cluster; auto finds one.
        slurm: Parameters of the jobs; cluster=local does without Slurm.
        execution: Where and how.
    """
    execution = replace(
        execution, data_root=str(data_root(execution.data_root).absolute())
    )  # workers may start elsewhere
    if engine in ("local", "vectorised"):  # other engines run on other machines
        estimate.device_name(execution)
    if minutes is not None and not 0 < minutes <= MOST_MINUTES:
        raise InputError("minutes", f"above 0 and at most {MOST_MINUTES}", minutes)
    how = choose(engine, Options(workers, address, _pairs(slurm)))
    experiments = load_experiments(experiment)
    chosen = sweeps.select(experiments, only, _numbers(seeds))
    place = Store(store)
    if pack:
        packed = place.pack(experiment.stem, chosen)
        console().print(f"{plural(packed, 'run')} packed into {escape(experiment.stem)}.zip.")
        return FINE
    plan = sweeps.plan(chosen, place)
    if dry_run:
        sweeps.check_data(experiments, place, execution)
        _show(plan, place, execution)
        return FINE
    out = console()
    out.print(_opening(plan))
    display = Display(plan, place, out)
    try:
        with display, _at_most(minutes):
            result = sweeps.sweep(
                experiments, place, how, execution, only=only, seeds=_numbers(seeds), on_event=display.on_event
            )
    except KeyboardInterrupt:
        out.print(
            f"Stopped: {plural(display.done, 'run')} of {len(plan.todo)} done. The same command goes on from here."
        )
        return STOPPED
    if result.failed:
        complain_of(result, out_of=len(plan.todo))
        return FAILED
    elsewhere = f", {result.elsewhere} of them by other processes" if result.elsewhere else ""
    out.print(f"All {plural(len(plan.runs), 'run')} finished{elsewhere}. Results are in {escape(str(store))}.")
    return FINE


@contextmanager
def _at_most(minutes: float | None) -> Iterator[None]:
    """Inside, a KeyboardInterrupt comes after so many minutes, even where Ctrl-C is ignored, as under nohup."""
    if minutes is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60 * minutes, 30)  # again later: where it comes, errors may be ignored
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _opening(plan: sweeps.Plan) -> str:
    parts = {
        "finished already": plan.count("finished"),
        "to be resumed": plan.count("resumable"),
        "to be tried again": plan.count("failed"),
        "new": plan.count("new"),
        "held by another process": plan.count("running"),
    }
    return f"{plural(len(plan.runs), 'run')}: " + ", ".join(f"{n} {words}" for words, n in parts.items() if n) + "."


def complain_of(result: sweeps.Result, *, out_of: int) -> None:
    """Which runs failed, those that failed alike together."""
    err = console(stderr=True)
    err.print(f"[bold red]{len(result.failed)} of {plural(out_of, 'run')} failed:[/]")
    runs = {run.key: run for run in result.plan.runs}
    alike: dict[str, list[Run]] = {}
    for key, message in result.failed.items():
        alike.setdefault(message.replace(key, "…") if len(result.failed) > 1 else message, []).append(runs[key])
    for message, failed in alike.items():
        for run in failed[:5]:
            err.print(f"  {run.key}  {escape(label(run))}")
        if len(failed) > 5:
            err.print(f"  and {len(failed) - 5} more")
        err.print(f"    {escape(message)}")
    err.print("The same command tries them again and leaves the others alone.")


# ---------------------------------------------------------------------------------------------- dry run


def _show(plan: sweeps.Plan, store: Store, execution: Execution) -> None:
    """What would run, row by row, and the time that it may take."""
    out = console()
    speed, unknown = _speed(plan.todo, store, execution)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("row", overflow="fold", ratio=1)
    for name in ("finished", "begun", "new", "an epoch", "left"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in dict.fromkeys(run.row for run in plan.runs):
        runs = [run for run in plan.runs if run.row == row]
        status = [plan.status[run.key] for run in runs]
        todo = [run for run in plan.todo if run.row == row]
        timed = sorted({speed[kind] for run in todo if (kind := estimate.shape(run)) in speed})
        all_known = all(estimate.shape(run) in speed for run in todo)
        table.add_row(
            escape(row),
            str(status.count("finished")),
            str(sum(state in ("resumable", "running", "failed") for state in status)),
            str(status.count("new")),
            "–" if not todo else span(timed[0]) if timed else "unknown",
            "–" if not todo else span(estimate.total(todo, store, speed)) if all_known else "unknown",
        )
    out.print(fitted(table, out.width, name="row", expendable=("an epoch", "begun", "finished")))
    said = f"Would carry out {len(plan.todo)} of {plural(len(plan.runs), 'run')}."
    known = [run for run in plan.todo if estimate.shape(run) in speed]
    if known:
        work = span(estimate.total(known, store, speed))
        rest = (
            f", without {plural(len(plan.todo) - len(known), 'run')} of unknown length"
            if len(known) < len(plan.todo)
            else ""
        )
        said += f" One after another on this machine: about {work} of training{rest}."
    out.print(said)
    for reason in unknown:
        out.print(f"[dim]no estimate: {escape(reason)}[/]")


def _speed(todo: Sequence[Run], store: Store, execution: Execution) -> tuple[dict[Run, float], list[str]]:
    """Seconds per epoch by shape, and why some are missing."""
    speed = estimate.known(todo, store, estimate.device_name(execution))
    reasons: dict[str, None] = {}
    began = time.monotonic()
    unknown = [kind for kind in dict.fromkeys(estimate.shape(run) for run in todo) if kind not in speed]
    for number, kind in enumerate(unknown):
        if number and time.monotonic() - began > PATIENCE:
            reasons[f"steps take so long here that not all kinds of run were timed in {PATIENCE} seconds"] = None
            break
        try:
            speed[kind] = estimate.probe(kind, execution)
        except ExplicitDropoutError as error:
            reasons[str(error)] = None
    return speed, list(reasons)


# ---------------------------------------------------------------------------------------------- arguments


def _numbers(text: str) -> tuple[int, ...]:
    """`0,2,5-7` as numbers."""
    found: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise InputError("seeds", "whole numbers and ranges, such as 0,1 or 0-4", repr(text))
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise InputError("seeds", "ranges that go up, such as 0-4", repr(text))
        found += numbers
    if text and not found:
        raise InputError("seeds", "whole numbers and ranges, such as 0,1 or 0-4", repr(text))
    return tuple(found)


def _pairs(text: str) -> dict[str, str]:
    """`partition=gpu,timeout_min=60` as a dictionary."""
    pairs: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise InputError("slurm", "of the form key=value,key=value", repr(text))
        pairs[name.strip()] = value.strip()
    return pairs
