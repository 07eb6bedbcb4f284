"""An experiment: runs that belong into one table, and what stands beside them.

An experiment file is Python with a function `experiment() -> Experiment` (or a list of them for tables with parts); a
grid is a comprehension.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.lab.config import Metric, Run


@dataclass(frozen=True)
class Question:
    """What an experiment is to decide.

    Args:
        text: the question, in words.
        contrasts: pairs of rows (a, b): is a better than b?
        same_settings: compare run by run at equal λ, learning rate, seed and split, instead of what was chosen of each.
    """

    text: str
    contrasts: tuple[tuple[str, str], ...]
    same_settings: bool = False


@dataclass(frozen=True)
class Experiment:
    """A table in the making.

    Args:
        name: short, for files and the command line: table4.
        title: what the table shows.
        runs: everything to be run. Rows are told apart by `run.row`, configurations within a row (learning rate,
            strength, …) by `run.configuration`, repetitions by seed and split.
        baseline: the row that others are compared with.
        metric: what is selected and reported, a name in `summary.json`.
        paper: numbers of the paper by row, in percent: {"mean": …, "std": …}. Shown beside ours, never in their place.
        paper_cells: where the paper gives a whole grid: row → learning rate → λ → numbers.
        notes: what a reader has to know: dataset, deviations from the paper.
        pooled: rows that count as one, by its name: a setting that rows are named for, such as the rate of dropout, is
            then chosen on validation data as λ is.
        questions: which rows are compared, and why; the report answers them.
    """

    name: str
    title: str
    runs: tuple[Run, ...]
    baseline: str
    metric: Metric = "accuracy"
    paper: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    paper_cells: Mapping[str, Mapping[str, Mapping[str, Mapping[str, float]]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    pooled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.runs:
            raise InputError("runs", "at least one run", "none")
        own = {run.row for run in self.runs}
        members = [row for rows in self.pooled.values() for row in rows]
        for row in members:
            if row not in own or members.count(row) > 1:
                raise InputError("pooled", f"rows of runs, each once: {', '.join(sorted(own))}", repr(row))
        if self.baseline not in self.rows:
            raise InputError("baseline", f"one of the rows {', '.join(self.rows)}", repr(self.baseline))
        for name in (name for question in self.questions for pair in question.contrasts for name in pair):
            if name not in self.rows:
                raise InputError("questions", f"about the rows {', '.join(self.rows)}", repr(name))

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The rows in order of appearance."""
        return tuple(dict.fromkeys(map(self.row, self.runs)))

    def row(self, run: Run) -> str:
        """The row of the table that a run belongs to."""
        return self._pools.get(run.row, run.row)

    @cached_property
    def _pools(self) -> dict[str, str]:
        return {row: name for name, rows in self.pooled.items() for row in rows}


def module_of(path: str | Path) -> Any:
    """An experiment file as a module, for others to build on."""
    file = Path(path)
    if not file.is_file():
        what = "which is a folder" if file.is_dir() else "which is not there"
        raise InputError("experiment", "a Python file with a function experiment()", f"{file}, {what}")
    name = f"explicit_dropout_experiment_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InputError("experiment", "a Python file (.py)", str(file))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _naming(file):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Errors of an experiment file as errors of ours, with the place."""
    try:
        yield
    except ExplicitDropoutError:
        raise
    except SyntaxError as error:
        raise InputError("experiment", "Python", f"{file}, line {error.lineno}: {error.msg}") from error
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        place = f"{file}, line {lines[-1]}" if lines else str(file)
        raise InputError("experiment", "a file that runs", f"{place}: {type(error).__name__}: {error}") from error


def load_experiments(path: str | Path) -> list[Experiment]:
    """The experiments of a Python file."""
    function = getattr(module_of(path), "experiment", None)
    if not callable(function):
        raise InputError("experiment", "a Python file with a function experiment()", f"{path} without one")
    with _naming(Path(path)):
        made = function()
    found = list(made) if isinstance(made, list | tuple) else [made]
    if not found or not all(isinstance(item, Experiment) for item in found):
        raise InputError(
            "experiment", "a file whose experiment() returns an Experiment or several", type(made).__name__
        )
    return found
