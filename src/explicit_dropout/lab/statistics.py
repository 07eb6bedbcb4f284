"""From finished runs to the numbers of a table: selection on validation, mean ± sd on test, paired differences.

The rules, which the report repeats:

- A row's configuration (learning rate, λ, …) is chosen by the highest mean of the validation metric over its
  repetitions (seeds and splits). Only the configurations with the most repetitions in their row are compared, so that
  none wins by a single lucky seed; equal means go to the one that the experiment names first. While runs of a row are
  missing, its choice is provisional.
- Test numbers are those of the chosen configuration: mean, sd with n − 1, and Student's 95 % interval of the mean. One
  repetition has no sd, and values without spread have no interval.
- A row is compared with the baseline over the pairs (seed, split) that both have: Student's interval of the mean
  difference, and the p-value of the paired test, adjusted by Holm's method for all rows of the table.
- What is missing stays missing: nothing here fills a gap. A run that diverged counts with the score that it has; if
  that is not finite, its configuration has one repetition less.

Metrics are fractions (0 to 1), as in `summary.json`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.store import SPREAD

LEVEL = 0.95
"""Of all intervals."""
SIGNIFICANT = 0.05
"""p-values below it, after correction, are taken for a difference."""
GRID = ("treatment.strength", "training.learning_rate")
"""The settings that most rows are tried over, and that have columns of their own."""


class Result(NamedTuple):
    """A finished run: its summary, and the lines of its metrics (read only where curves are drawn)."""

    run: Run
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Estimate:
    """Independent repetitions of one number: their mean, its spread and its interval."""

    values: tuple[float, ...] = ()

    @property
    def n(self) -> int:
        return len(self.values)

    @cached_property
    def mean(self) -> float | None:
        return float(np.mean(self.values)) if self.values else None

    @cached_property
    def sd(self) -> float | None:
        """With n − 1; None for fewer than two values. Values that differ by rounding alone have none: 0."""
        if self.n < 2:
            return None
        spread = float(np.std(self.values, ddof=1))
        return spread if spread > 1e-12 * max(map(abs, self.values)) else 0.0

    def interval(self, level: float = LEVEL) -> tuple[float, float] | None:
        """Student's interval of the mean; None without spread, from which nothing can be concluded."""
        if not self.sd or self.mean is None:
            return None
        half = float(stats.t.ppf((1 + level) / 2, self.n - 1)) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float | None:
        """Two-sided p-value of Student's test that the mean is 0; None without spread."""
        if not self.sd or self.mean is None:
            return None
        return float(2 * stats.t.sf(abs(self.mean) / (self.sd / math.sqrt(self.n)), self.n - 1))


@dataclass(frozen=True)
class Configuration:
    """Runs that differ by seed and split alone: all that belong here, and the results of those that are finished."""

    runs: tuple[Run, ...]
    results: tuple[Result, ...]
    metric: str

    @property
    def run(self) -> Run:
        """The settings that the runs share."""
        return self.runs[0].configuration

    @property
    def planned(self) -> int:
        return len(self.runs)

    def estimate(self, part: str, name: str) -> Estimate:
        """A number of the summaries, such as ("test", "loss"), over the repetitions that have a finite one."""
        if part == "train" and self.withholds_training:
            return Estimate()
        values = (_number(result.summary, part, name) for result in self.results)
        return Estimate(tuple(value for value in values if value is not None))

    @cached_property
    def validation(self) -> Estimate:
        return self.estimate("validation", self.metric)

    @cached_property
    def test(self) -> Estimate:
        return self.estimate("test", self.metric)

    @property
    def diverged(self) -> int:
        """Finished runs whose loss did not stay finite. They count with the score that they have, if they have one."""
        return sum(_has_diverged(result, self.metric) for result in self.results)

    @property
    def spread(self) -> bool:
        """Whether the training examples that were scored are spread over the split: in older runs the first were."""
        scored = (result.summary for result in self.results if result.summary.get("train"))
        return all(summary.get("train_examples") == SPREAD for summary in scored)

    @property
    def withholds_training(self) -> bool:
        """Whether training scores are left out: the first examples may lack classes that the metric is a mean over."""
        return self.metric != "accuracy" and not self.spread

    def gap(self, name: str) -> Estimate:
        """Training minus test (test minus training for a loss), run by run."""
        if self.withholds_training:
            return Estimate()
        sign = -1 if name == "loss" else 1
        pairs = ((_number(r.summary, "train", name), _number(r.summary, "test", name)) for r in self.results)
        return Estimate(tuple(sign * (a - b) for a, b in pairs if a is not None and b is not None))

    @property
    def scores(self) -> dict[tuple[int, int], float]:
        """Test metric by (seed, split)."""
        found = ((r.run, _number(r.summary, "test", self.metric)) for r in self.results)
        return {(run.seed, run.data.split): value for run, value in found if value is not None}


@dataclass(frozen=True)
class Comparison:
    """A row's differences to the baseline, pair by pair, and the test that they are 0 in the mean."""

    pairs: tuple[tuple[int, int], ...]
    difference: Estimate
    holm: float | None = None


@dataclass(frozen=True)
class Row:
    """One treatment: everything that was tried of it, and what was chosen."""

    name: str
    configurations: tuple[Configuration, ...]
    chosen: Configuration | None
    failed: int = 0
    begun: int = 0
    comparison: Comparison | None = None

    @property
    def planned(self) -> int:
        return sum(c.planned for c in self.configurations)

    @property
    def finished(self) -> int:
        return sum(len(c.results) for c in self.configurations)

    @property
    def diverged(self) -> int:
        """Finished runs whose loss did not stay finite. They count with the score that they have, if they have one."""
        return sum(configuration.diverged for configuration in self.configurations)

    @property
    def complete(self) -> bool:
        return self.finished == self.planned

    @property
    def test(self) -> Estimate:
        return self.chosen.test if self.chosen else Estimate()

    @property
    def validation(self) -> Estimate:
        return self.chosen.validation if self.chosen else Estimate()

    @property
    def state(self) -> str:
        """What to know before the number: "not run", "begun", "3 of 5 seeds", "57 of 80 runs", or nothing."""
        if not self.finished:
            return (
                "begun" if self.begun else f"{self.failed} of {self.planned} runs failed" if self.failed else "not run"
            )
        if self.chosen is None:
            return "no run has a finite score"
        if self.test.n < self.chosen.planned:
            return f"{self.test.n} of {self.chosen.planned} {repetition(self.chosen.runs)}"
        return "" if self.complete else f"{self.finished} of {self.planned} runs"


@dataclass(frozen=True)
class Analysis:
    """An experiment as far as it has been run."""

    experiment: Experiment
    rows: tuple[Row, ...]

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    @property
    def baseline(self) -> Row:
        return self[self.experiment.baseline]

    @property
    def planned(self) -> int:
        return sum(row.planned for row in self.rows)

    @property
    def finished(self) -> int:
        return sum(row.finished for row in self.rows)

    @property
    def failed(self) -> int:
        return sum(row.failed for row in self.rows)

    @property
    def complete(self) -> bool:
        return self.finished == self.planned


def analyse(
    experiment: Experiment, results: Iterable[Any], failed: Collection[str] = (), begun: Collection[str] = ()
) -> Analysis:
    """The statistics of an experiment.

    Args:
        results: (run, summary) or (run, summary, metrics) of finished runs; those that are not part of the experiment
            are left alone.
        failed, begun: keys of runs that ended with an error, and of runs that have begun.
    """
    planned = {run.key: run for run in experiment.runs}
    found: dict[str, Result] = {}
    for item in results:
        result = Result(*item)
        if result.run.key in planned:
            found.setdefault(result.run.key, result)
    open_runs = planned.keys() - found.keys()
    lost, going = open_runs & set(failed), open_runs & set(begun)
    rows = []
    for name in experiment.rows:
        own = [run for run in planned.values() if experiment.row(run) == name]
        groups: dict[Run, list[Run]] = {}
        for run in own:
            groups.setdefault(run.configuration, []).append(run)
        configurations = tuple(
            Configuration(tuple(runs), tuple(found[run.key] for run in runs if run.key in found), experiment.metric)
            for runs in groups.values()
        )
        keys = {run.key for run in own}
        rows.append(Row(name, configurations, select(configurations), len(keys & lost), len(keys & going)))
    return Analysis(experiment, tuple(compare(rows, experiment.baseline)))


def select(configurations: Sequence[Configuration]) -> Configuration | None:
    """The configuration with the best mean on validation, among those with the most repetitions."""
    most = max((c.validation.n for c in configurations), default=0)
    if most == 0:
        return None
    candidates = [c for c in configurations if c.validation.n == most]
    return max(candidates, key=lambda c: round(c.validation.mean or 0.0, 9))  # the first of equals, but for rounding


def compare(rows: Sequence[Row], baseline: str) -> list[Row]:
    """The rows with their paired differences to the baseline's chosen configuration."""
    reference = next(row for row in rows if row.name == baseline)
    theirs = reference.chosen.scores if reference.chosen else {}
    comparisons: dict[str, Comparison] = {}
    p_values: dict[str, float] = {}
    for row in rows:
        ours = row.chosen.scores if row.chosen and row.name != baseline else {}
        pairs = tuple(sorted(ours.keys() & theirs.keys()))
        if pairs:
            difference = Estimate(tuple(ours[pair] - theirs[pair] for pair in pairs))
            comparisons[row.name] = Comparison(pairs, difference)
            if difference.p is not None:
                p_values[row.name] = difference.p
    for name, adjusted in holm(p_values, family=len(rows) - 1).items():
        comparisons[name] = replace(comparisons[name], holm=adjusted)
    return [replace(row, comparison=comparisons.get(row.name)) for row in rows]


def holm(p_values: Mapping[str, float], family: int | None = None) -> dict[str, float]:
    """Holm's step-down adjustment: p_(i) becomes max over j ≤ i of (m − j + 1) p_(j), at most 1.

    `family` is the number m of comparisons that are planned; those without a p-value yet count as the largest, so that
    what is significant now stays so when they arrive.
    """
    m = len(p_values) if family is None else family
    if m < len(p_values):
        raise InputError("family", f"at least the number of p-values, {len(p_values)}", m)
    adjusted: dict[str, float] = {}
    highest = 0.0
    for i, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, (m - i) * p))
        adjusted[name] = highest
    return adjusted


# ---------------------------------------------------------------------------------------------- grids


class Grid(NamedTuple):
    """Configurations of a row over λ (down) and learning rate (across); `label` tells several grids of a row apart."""

    row: str
    label: str
    strengths: tuple[float, ...]
    learning_rates: tuple[float, ...]
    cells: Mapping[tuple[float, float], Configuration]


def grids(row: Row) -> list[Grid]:
    """λ × learning rate; where other settings vary too, a grid for each of their combinations."""
    labels = differences([c.run for c in row.configurations], without=GRID)
    panels: dict[str, list[Configuration]] = {}
    for configuration, label in zip(row.configurations, labels, strict=True):
        panels.setdefault(label, []).append(configuration)
    made = []
    for label, members in panels.items():
        cells = {(c.run.treatment.strength, c.run.training.learning_rate): c for c in members}
        strengths, rates = ({place[i] for place in cells} for i in (0, 1))
        made.append(Grid(row.name, label, tuple(sorted(strengths)), tuple(sorted(rates)), cells))
    return made


def edges(row: Row) -> list[str]:
    """Which of λ, learning rate and p were chosen at an end of the values tried: a better one may be beyond it."""
    if row.chosen is None:
        return []
    found = []
    for grid in grids(row):
        for place, configuration in grid.cells.items():
            if configuration is row.chosen:
                axes = (("λ", grid.strengths), ("learning rate", grid.learning_rates))
                found += [
                    f"{name} {value:g}"
                    for (name, values), value in zip(axes, place, strict=True)
                    if _ends(values, value)
                ]
    rates = [configuration.run.treatment.rate for configuration in row.configurations]
    rate = row.chosen.run.treatment.rate
    return found + ([f"p {rate:g}"] if _ends(rates, rate) else [])


def _ends(values: Collection[float], value: float) -> bool:
    """Whether a value is the first or the last of several."""
    return len(set(values)) > 1 and value in (min(values), max(values))


def differences(runs: Sequence[Run], without: Collection[str] = ()) -> list[str]:
    """For each run, the settings in which it differs from some of the others, in words."""
    flat = [_flatten(run.to_json()) for run in runs]
    names = [name for name in (flat[0] if flat else ()) if name not in without]
    names = [name for name in names if len({repr(f[name]) for f in flat}) > 1]
    return [", ".join(f"{_words(name)} {_value(f[name])}" for name in names) for f in flat]


def repetition(runs: Sequence[Run]) -> str:
    """What repetitions differ in: "seeds", "splits" or "repetitions" (both)."""
    seeds, splits = {run.seed for run in runs}, {run.data.split for run in runs}
    if len(splits) <= 1:
        return "seeds"
    return "splits" if len(seeds) <= 1 else "repetitions"


def _flatten(written: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in written.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _words(name: str) -> str:
    return name.split(".")[-1].replace("_", " ")


def _value(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _number(summary: Mapping[str, Any], part: str, name: str) -> float | None:
    """A finite number of a summary; None if it is missing, null, NaN or infinite."""
    section = summary.get(part)
    value = section.get(name) if isinstance(section, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _has_diverged(result: Result, metric: str) -> bool:
    return bool(result.summary.get("diverged")) or _number(result.summary, "validation", metric) is None
