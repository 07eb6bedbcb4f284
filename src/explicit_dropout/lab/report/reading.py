"""What a store says about the runs of experiments: how far each is, and its numbers.

Reading takes no lock, so that a report can be made, and watched, while a sweep works in the same store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from explicit_dropout.errors import InputError, StoreError
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.statistics import Analysis, Result, analyse
from explicit_dropout.lab.store import Store

State = Literal["finished", "begun", "failed", "new"]


@dataclass(frozen=True)
class Record:
    """A run as its folder shows it, whose path within the store is `place`.

    `error` holds what a failed run, or a folder that cannot be read, says.
    """

    run: Run
    state: State
    place: str
    metrics: Sequence[Mapping[str, Any]] = ()
    summary: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True)
class Part:
    """One experiment in a report. `source` is the file that describes it; None if the runs were merely found."""

    analysis: Analysis
    records: tuple[Record, ...]
    source: str | None = None

    @property
    def experiment(self) -> Experiment:
        return self.analysis.experiment

    def having(self, state: State) -> list[Record]:
        return [record for record in self.records if record.state == state]


def read(store: Store, experiment: Experiment, source: str | None = None) -> Part:
    """An experiment with what the store has of it."""
    records = tuple(_record(store, run) for run in dict.fromkeys(experiment.runs))
    results = [Result(r.run, r.summary, r.metrics) for r in records if r.summary is not None]
    failed, begun = ([r.run.key for r in records if r.state == state] for state in ("failed", "begun"))
    return Part(analyse(experiment, results, failed, begun), records, source)


def experiments_in(store: Store, problems: list[str] | None = None) -> list[Experiment]:
    """The runs of a store as experiments: those with the same data, model and way of training form a table.

    A folder that does not say which run it is becomes a line in `problems`, or an error if there is no such list.
    """
    groups: dict[Run, list[Run]] = {}
    metrics: dict[Run, Any] = {}
    for folder in store.folders(problems):
        setting = _setting(folder.run)
        groups.setdefault(setting, []).append(folder.run)
        if setting not in metrics and folder.finished:
            with suppress(StoreError, OSError):  # it is read again, and told of, as a record
                metrics[setting] = folder.summary().get("metric")
    if not groups and problems:
        raise StoreError("\n".join(problems))
    if not groups:
        raise InputError("store", "a folder with runs", f"{store.root}, which has none")
    experiments = []
    for number, (setting, runs) in enumerate(sorted(groups.items(), key=lambda item: str(item[0].to_json()))):
        rows = sorted({run.row for run in runs})
        baseline = next((row for row in ("none+none", "none+implicit") if row in rows), rows[0])
        ordered = sorted(runs, key=lambda run: (run.row != baseline, run.row, *_place(run)))
        experiments.append(
            Experiment(
                name=f"runs{number + 1}" if len(groups) > 1 else "runs",
                title=_title(setting),
                runs=tuple(ordered),
                baseline=baseline,
                metric="mean_average_precision" if metrics.get(setting) == "mean_average_precision" else "accuracy",
                notes=("Runs as they were found in the store: what was planned beyond them is not known.",),
            )
        )
    return experiments


def _record(store: Store, run: Run) -> Record:
    place = f"runs/{run.key}"
    try:
        folder = store.folder(run)
        place = Path(str(folder.path)).relative_to(store.root).as_posix()
        metrics = folder.metrics()
        if folder.finished:
            return Record(run, "finished", place, metrics, folder.summary(), folder.environment())
        if not folder.path.is_dir():
            return Record(run, "new", place)
        error = folder.path / "error.txt"
        if error.exists() and _written(error) >= _written(folder.path / "metrics.jsonl"):
            return Record(run, "failed", place, metrics, None, folder.environment(), error.read_text(errors="replace"))
        return Record(run, "begun", place, metrics, None, folder.environment())
    except (StoreError, OSError) as problem:  # one bad folder must not hide the others, nor be hidden
        return Record(run, "failed", place, error=str(problem))


def _written(path: Path) -> int:
    """When a file was written; an error that is older than the metrics is of an attempt before this one."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return -1


def _setting(run: Run) -> Run:
    """What the runs of a table share: all but treatment, learning rate, weight decay, seed and split."""
    defaults = Run()
    training = replace(run.training, learning_rate=defaults.training.learning_rate, weight_decay=0.0)
    return replace(run.configuration, treatment=defaults.treatment, training=training)


def _place(run: Run) -> tuple[float, float, float, int, int]:
    training = run.training
    return run.treatment.strength, training.learning_rate, training.weight_decay, run.seed, run.data.split


def _title(setting: Run) -> str:
    data, model, training = setting.data, setting.model, setting.training
    said = [data.name + (f" ({data.folder})" if data.folder else "")]
    said += [f"{data.examples} training examples"] if data.examples else []
    said += [f"label noise {data.label_noise:g}"] if data.label_noise else []
    said += [f"{model.layers} {'layer' if model.layers == 1 else 'layers'} of width {model.width}"]
    said += [f"{training.epochs} {'epoch' if training.epochs == 1 else 'epochs'}"]
    return ", ".join(said)


def recorded(parts: Sequence[Part]) -> list[Record]:
    """The runs that have begun somewhere, each once."""
    unique = {record.run.key: record for part in parts for record in part.records if record.environment is not None}
    return list(unique.values())
