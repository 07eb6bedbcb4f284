"""Sweep: carry out the runs of experiments that a store does not have yet.

Finished runs are skipped and begun ones resumed, so that the same sweep can be started again after anything, or on
several machines at once: the locks of the run folders share the work out.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from explicit_dropout.errors import ExplicitDropoutError, InputError, StoreError
from explicit_dropout.lab.config import Data, Execution, Run
from explicit_dropout.lab.data import examples
from explicit_dropout.lab.engines import Engine, Event, OnEvent
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.store import Status, Store

POLL_SECONDS = 1.0
"""How often a run is looked at that another process holds."""

VISIBLE_SECONDS = 60.0
"""How long a file that another machine wrote may take to be seen here: network file systems are slow to forget."""

NAMED = 5
"""Runs that an error lists."""


@dataclass(frozen=True)
class Plan:
    """What a sweep has before it.

    Args:
        runs: all that were asked for, each once, in the order of the experiments, but baselines first.
        status: by key, as the store has it.
    """

    runs: tuple[Run, ...]
    status: Mapping[str, Status]

    @cached_property
    def todo(self) -> tuple[Run, ...]:
        """What is not finished, in the order of work."""
        return order([run for run in self.runs if self.status[run.key] != "finished"], self.status)

    def count(self, status: Status) -> int:
        return sum(self.status[run.key] == status for run in self.runs)


@dataclass
class Result:
    """How a sweep went: how many of its runs were finished by it, or by others, and why runs failed, by key."""

    plan: Plan
    finished: int = 0
    elsewhere: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def sweep(
    experiments: Sequence[Experiment],
    store: Store,
    engine: Engine,
    execution: Execution | None = None,
    *,
    only: Sequence[str] = (),
    seeds: Sequence[int] = (),
    on_event: OnEvent | None = None,
    dry_run: bool = False,
) -> Result:
    """Carry out what is missing, and return when every run is finished or has failed.

    Args:
        only: rows to be run; all if empty.
        seeds: seeds to be run; all if empty.
        on_event: told of everything that happens to a run.
        dry_run: only say what would be done, in the result's plan.
    """
    planned = plan(select(experiments, only, seeds), store)
    result = Result(planned)
    if dry_run:
        return result
    check_data(experiments, store, execution or Execution())
    store.prepare()
    busy: list[Run] = []

    def follow(event: Event) -> None:
        if event.kind == "finished" and not _is_visible(event.run, store):
            event = Event("failed", event.run, f"it was finished, but not in {store.root}: all machines must share it")
        if event.kind == "finished":
            result.finished += 1
        elif event.kind == "skipped":
            result.elsewhere += 1
        elif event.kind == "failed":
            result.failed[event.run.key] = event.message
        elif event.kind == "busy":
            busy.append(event.run)
        if on_event is not None:
            on_event(event)

    pending = list(planned.todo)
    while pending:
        engine(pending, store, execution or Execution(), follow)
        pending = _released(busy, store, follow)
    return result


def select(experiments: Sequence[Experiment], only: Sequence[str] = (), seeds: Sequence[int] = ()) -> tuple[Run, ...]:
    """The runs of some rows and seeds, baselines first; one that several experiments share comes once."""
    runs = {
        run.key: run
        for experiment in experiments
        for run in sorted(experiment.runs, key=lambda run: experiment.row(run) != experiment.baseline)
    }
    pools = {name: rows for experiment in experiments for name, rows in experiment.pooled.items()}
    rows = list(dict.fromkeys((*(run.row for run in runs.values()), *pools)))
    for name in only:
        if name not in rows:
            closest = difflib.get_close_matches(name, rows, n=1, cutoff=0.0)
            raise InputError("only", f"one of {', '.join(rows)}", f"{name!r}; the closest is {closest[0]!r}")
    only = [row for name in only for row in pools.get(name, (name,))]
    known = sorted({run.seed for run in runs.values()})
    for seed in seeds:
        if seed not in known:
            raise InputError("seeds", f"among {', '.join(map(str, known))}", seed)
    chosen = [run for run in runs.values() if (not only or run.row in only) and (not seeds or run.seed in seeds)]
    if not chosen:
        raise InputError("only", "rows and seeds that some run has both of", f"{list(only)} with seeds {list(seeds)}")
    return tuple(chosen)


def plan(runs: Sequence[Run], store: Store) -> Plan:
    return Plan(tuple(runs), store.status(runs))


def check_data(experiments: Sequence[Experiment], store: Store, execution: Execution) -> None:
    """Refuse to put runs beside finished ones of their experiments that have seen other data under the same name.

    Other data are other examples, or the same ones otherwise divided. Data that are not here, or cannot be read, are
    left to the runs, which may be carried out elsewhere.
    """
    contents: Seen = {}
    divisions: Seen = {}
    for run in select(experiments):
        folder = store.folder(run)
        if folder.finished:
            for found, data, seen in (
                (contents, run.data.material, folder.fingerprint), (divisions, run.data.divided, folder.division),
            ):  # fmt: skip
                if seen is not None:
                    found.setdefault(data, []).append((run, seen))
    for data, runs in contents.items():
        try:
            at_hand = examples(data, execution.data_root)
        except (ExplicitDropoutError, OSError):
            continue
        _compare(data, runs, at_hand.fingerprint, "fingerprint", store)
        for divided in (found for found in divisions if found.material == data):
            try:
                division = at_hand.division(divided)
            except ExplicitDropoutError:
                continue
            _compare(divided, divisions[divided], division, "division", store)


Seen = dict[Data, list[tuple[Run, str]]]
"""Runs by their data, each with the digest of what it has seen."""


def _compare(data: Data, runs: Sequence[tuple[Run, str]], at_hand: str, kind: str, store: Store) -> None:
    others = [(run, seen) for run, seen in runs if seen != at_hand]
    if others:
        raise StoreError(_other_data(data, others, at_hand, kind, store))


def _other_data(data: Data, others: Sequence[tuple[Run, str]], at_hand: str, kind: str, store: Store) -> str:
    count = f"{len(others)} finished runs have" if len(others) > 1 else "a finished run has"
    what = "other data than those" if kind == "fingerprint" else "another division into parts than that of the data"
    lines = [f"{count} seen {what} at hand under the name {data.words}, {kind} {at_hand[:12]}:"]
    for run, seen in others[:NAMED]:
        split = f", split {run.data.split}" if run.data.split else ""
        lines.append(f"  {run.key}  {run.row}, seed {run.seed}{split}: {kind} {seen[:12]}")
    if len(others) > NAMED:
        lines.append(f"  and {len(others) - NAMED} more")
    lines.append(
        f"Their numbers cannot stand beside new ones. Bring the old data back; or move these folders out of "
        f"{store.root / 'runs'}, and the runs are trained on the new data; or sweep into another store."
    )
    return "\n".join(lines)


def order(runs: Iterable[Run], status: Mapping[str, Status] | None = None) -> tuple[Run, ...]:
    """Begun runs first, those of other processes last; else seed by seed, and the rows of each in turn.

    So a sweep that is broken off leaves a table with all its rows, if with fewer seeds.
    """
    found = list(runs)
    turn: dict[str, tuple[int, int, int]] = {}
    seen: dict[tuple[int, int, str], int] = {}
    for run in found:
        group = run.seed, run.data.split, run.row
        turn[run.key] = run.seed, run.data.split, seen.get(group, 0)
        seen[group] = turn[run.key][2] + 1
    urgency: dict[Status, int] = {"resumable": 0, "new": 1, "failed": 1, "running": 2, "finished": 3}
    return tuple(sorted(found, key=lambda run: (urgency[(status or {}).get(run.key, "new")], turn[run.key])))


def _released(busy: list[Run], store: Store, on_event: OnEvent) -> list[Run]:
    """Wait until other processes let go of an unfinished run, and take such runs off the list; none if all finish."""
    while busy:
        status = store.status(busy)
        for run in busy:
            if status[run.key] == "finished":
                on_event(Event("skipped", run, "another process has finished it"))
        free = [run for run in busy if status[run.key] not in ("running", "finished")]
        busy[:] = [run for run in busy if status[run.key] == "running"]
        if free:
            return free
        if busy:
            time.sleep(POLL_SECONDS)
    return []


def _is_visible(run: Run, store: Store) -> bool:
    deadline = time.monotonic() + VISIBLE_SECONDS
    while not store.folder(run).finished:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True
