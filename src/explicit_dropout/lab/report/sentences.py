"""A table in sentences: how far it is, what the baseline has, which rows differ from it after correction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from explicit_dropout.lab.report.forest import verdict
from explicit_dropout.lab.report.tables import METRICS, measured, percent
from explicit_dropout.lab.statistics import Analysis, Comparison


def findings(analysis: Analysis, *, intervals: bool = True) -> list[str]:
    """The sentences of a table.

    intervals: whether the table that they stand beside has intervals, which may then seem to say something else.
    """
    return [*_progress(analysis), *_baseline(analysis), *_differences(analysis, intervals)]


def _progress(analysis: Analysis) -> Iterator[str]:
    if not analysis.complete:
        failed = f", {analysis.failed} failed" if analysis.failed else ""
        yield f"Preliminary: {analysis.finished} of {analysis.planned} runs are finished{failed}."


def _baseline(analysis: Analysis) -> Iterator[str]:
    base = analysis.baseline
    if base.test.n:
        metric = METRICS[analysis.experiment.metric]
        yield f"The baseline {base.name} has a test {metric} of {measured(base.test)}\u00a0%."
    else:
        yield f"The baseline {base.name} has no result yet, so nothing can be compared with it."


def _differences(analysis: Analysis, intervals: bool) -> Iterator[str]:
    compared = [(row.name, row.comparison) for row in analysis.rows if row.comparison is not None]
    if not compared or not analysis.baseline.test.n:
        return
    if all(comparison.holm is None for _, comparison in compared):
        yield "There are not enough repetitions to tell any row from it."
        return
    groups: dict[str, list[str]] = {"higher": [], "lower": [], "": []}
    for name, comparison in compared:
        groups[verdict(comparison)].append(f"{name} ({percent(comparison.difference.mean, signed=True)})")
    family = len(analysis.rows) - 1
    opening = f"After Holm's correction for {family} comparisons" if family > 1 else "In a paired test"
    parts = [f"{_listed(groups[word])} {word} than it" for word in ("higher", "lower") if groups[word]]
    if groups[""] and parts:
        others = "one other row" if len(groups[""]) == 1 else f"{len(groups[''])} other rows"
        parts.append(f"{others} cannot be told apart from it")
    yield f"{opening}, at the 5\u00a0% level, {'; '.join(parts) or 'no row can be told apart from it'}."
    if groups[""]:
        alike = [comparison for _, comparison in compared if not verdict(comparison)]
        yield caution(alike, corrected=family > 1, intervals=intervals)


def caution(alike: Sequence[Comparison], *, corrected: bool, intervals: bool) -> str:
    """What follows where rows cannot be told apart from the baseline: not that they are the same."""
    few, many = (extreme(comparison.difference.n for comparison in alike) for extreme in (min, max))
    n = f"{few} pairs of runs" if few == many else f"{few} to {many} pairs of runs"
    said = f"Rows not told apart need not be equal: with {n}, differences as large as theirs may be real and not show."
    if corrected and intervals:
        said += " The intervals are of single comparisons, the p-values are corrected for their number."
    return said


def _listed(names: Sequence[str]) -> str:
    """a is / a and b are / a, b and c are"""
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"
