"""How a sweep goes, as it goes: a live table in a terminal, a line for each run in a file."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from explicit_dropout.cli.output import plural
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.engines import Event
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.sweep import Plan

SHOWN = 8
"""Runs in progress that are listed."""


class Display:
    """Listens to the events of a sweep."""

    def __init__(self, plan: Plan, store: Store, console: Console) -> None:
        self.plan, self.store, self.console = plan, store, console
        self.todo = plan.todo
        self.ended: dict[str, str] = {}
        self.running: dict[str, Run] = {}
        self.held: dict[str, Run] = {}
        self.notes: set[str] = set()
        self.epochs_before = {run.key: self._epochs(run) for run in self.todo}
        self.began = time.monotonic()
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=True)

    @property
    def done(self) -> int:
        return sum(kind != "failed" for kind in self.ended.values())

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def on_event(self, event: Event) -> None:
        run = event.run
        self.held.pop(run.key, None)
        if event.kind == "started":
            self.running[run.key] = run
            return
        if event.kind == "note":
            if event.message not in self.notes:
                self.notes.add(event.message)
                self.console.print(f"[yellow]{escape(label(run))}:[/] {escape(event.message)}")
            return
        self.running.pop(run.key, None)
        if event.kind == "busy":
            self.held[run.key] = run
            if not self.console.is_terminal:
                self.console.print(f"{escape(label(run))}: another process is at it; looked after later")
            return
        self.ended[run.key] = event.kind
        if event.kind == "failed" or not self.console.is_terminal:
            colour = "red" if event.kind == "failed" else "green"
            words = {"skipped": "done elsewhere"}.get(event.kind, event.kind)
            reason = f": {event.message.splitlines()[0]}" if event.kind == "failed" else ""
            count = f"{len(self.ended)}/{len(self.todo)}"
            self.console.print(f"{count} [{colour}]{words}[/] {escape(label(run) + reason)}")

    def _epochs(self, run: Run) -> int:
        """Lines of metrics so far, without reading what they say."""
        try:
            return (self.store.root / "runs" / run.key / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def _render(self) -> RenderableType:
        now = {key: self._epochs(run) for key, run in list(self.running.items())}
        whole = sum(max(0, run.training.epochs - self.epochs_before[run.key]) for run in self.todo)
        made = sum(max(0, epochs - self.epochs_before[key]) for key, epochs in now.items()) + sum(
            max(0, run.training.epochs - self.epochs_before[run.key]) for run in self.todo if run.key in self.ended
        )
        elapsed = time.monotonic() - self.began
        left = f"about {span(elapsed / made * (whole - made))} left" if made else "time left unknown yet"
        head = Table.grid(padding=(0, 1))
        words = f"{len(self.ended)}/{len(self.todo)} runs, {span(elapsed)} so far, {left}"
        head.add_row(ProgressBar(whole, made, width=24), words)
        return Group(head, self._rows(), self._in_progress(now))

    def _rows(self) -> Table:
        total = Counter(run.row for run in self.plan.runs)
        done: Counter[str] = Counter()
        failed: Counter[str] = Counter()
        for run in self.plan.runs:
            ended = self.ended.get(run.key, self.plan.status[run.key])
            failed[run.row] += ended == "failed" and run.key in self.ended
            done[run.row] += ended in ("finished", "skipped")
        table = Table(box=None, pad_edge=False, show_header=False)
        for row in total:
            bad = f"[red]{failed[row]} failed[/]" if failed[row] else ""
            table.add_row(escape(row), f"{done[row]}/{total[row]}", bad)
        return table

    def _in_progress(self, now: dict[str, int]) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False, style="dim")
        begun = sorted(now.items(), key=lambda pair: -pair[1])
        for key, epochs in begun[:SHOWN]:
            run = self.running.get(key)
            if run is not None:
                table.add_row(escape(label(run)), f"epoch {epochs}/{run.training.epochs}")
        if len(begun) > SHOWN:
            table.add_row(f"and {len(begun) - SHOWN} more", "")
        if self.held:
            table.add_row(f"{plural(len(self.held), 'run')} in the hands of other processes", "")
        return table


def label(run: Run) -> str:
    """A run in words: its row and what tells it apart within."""
    strength = f", λ {run.treatment.strength:g}" if run.treatment.strength else ""
    split = f", split {run.data.split}" if run.data.split else ""
    return f"{run.row}{strength}, learning rate {run.training.learning_rate:g}, seed {run.seed}{split}"


def span(seconds: float) -> str:
    """A time in the unit that people would use."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size or (size == 1.0 and seconds >= 1):
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{seconds * 1000:.0f} ms"
