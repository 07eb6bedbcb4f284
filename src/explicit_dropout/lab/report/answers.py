"""What an experiment says to its questions, in sentences: only where there are five pairs, and with what is uncertain.

Rows are compared over the pairs (seed, split) that both have, as in the tables, and p-values are adjusted by Holm's
method over the comparisons of a question. Names of rows stand in backticks; sentences begin in lower case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Question
from explicit_dropout.lab.report.tables import interval, percent, probability
from explicit_dropout.lab.statistics import SIGNIFICANT, Analysis, Estimate, holm

ENOUGH = 5
"""Pairs without which nothing is concluded."""


class Pairs(NamedTuple):
    """Differences of two rows in the test metric, over n seeds and splits. `complete` if all their runs are there."""

    estimate: Estimate
    n: int
    complete: bool


class Contrast(NamedTuple):
    """What a question asks of two rows, as far as it can be answered: p is adjusted over all of its contrasts."""

    first: str
    second: str
    pairs: Pairs
    p: float | None

    @property
    def outcome(self) -> str:
        """Better or worse only if that holds beside all comparisons of the question."""
        if self.pairs.n < ENOUGH:
            return "not enough runs yet"
        if self.pairs.estimate.mean is None or self.p is None:
            return "all differences alike"
        if self.p >= SIGNIFICANT:
            return "no difference shown"
        return "better" if self.pairs.estimate.mean > 0 else "worse"


def contrasts(analysis: Analysis, question: Question) -> list[Contrast]:
    """All comparisons of a question, in its order."""
    found = {(a, b): pairs(analysis, a, b, same_settings=question.same_settings) for a, b in question.contrasts}
    p_values = {f"{a} {b}": f.estimate.p for (a, b), f in found.items() if f.n >= ENOUGH and f.estimate.p is not None}
    adjusted = holm(p_values, family=len(question.contrasts))
    return [Contrast(a, b, pairing, adjusted.get(f"{a} {b}")) for (a, b), pairing in found.items()]


def answers(analysis: Analysis, question: Question) -> Iterator[str]:
    """A sentence for each comparison that has enough pairs, and one for all the others."""
    found = contrasts(analysis, question)
    for contrast in found:
        if contrast.pairs.n >= ENOUGH:
            yield same(contrast) if question.same_settings else verdict(contrast)
    few = [contrast.pairs.n for contrast in found if contrast.pairs.n < ENOUGH]
    if few:
        n = f"{min(few)} to {max(few)}" if min(few) < max(few) else str(few[0])
        left = f" for {len(few)} of {len(found)} comparisons" if len(few) < len(found) else ""
        yield f"not enough runs yet{left} (n = {n})."


def pairs(analysis: Analysis, a: str, b: str, *, same_settings: bool = False) -> Pairs:
    """Row a minus row b: of the chosen configurations, or of all that differ in nothing but the site in attention."""
    ours, theirs = analysis[a], analysis[b]
    compared = [(ours.chosen, theirs.chosen)] if ours.chosen and theirs.chosen else []
    if same_settings:
        twins = {_twin(c.run): c for c in theirs.configurations}
        compared = [(c, twins[_twin(c.run)]) for c in ours.configurations if _twin(c.run) in twins]
    repetitions: set[tuple[int, int]] = set()
    values: list[float] = []
    for mine, other in compared:
        shared = sorted(mine.scores.keys() & other.scores.keys())
        repetitions |= set(shared)
        values += [mine.scores[pair] - other.scores[pair] for pair in shared]
    return Pairs(Estimate(tuple(values)), len(repetitions), ours.complete and theirs.complete)


def _twin(run: Run) -> Run:
    """A run without its place of the penalty in attention."""
    return replace(run, treatment=replace(run.treatment, attention="none"))


def verdict(found: Contrast) -> str:
    """The outcome with its numbers."""
    (a, b), estimate, n = found[:2], found.pairs.estimate, found.pairs.n
    provisional = "" if found.pairs.complete else " Provisional: runs of these rows are missing."
    if found.p is None:
        mean = percent(estimate.mean, signed=True)
        return f"all {n} differences of `{a}` to `{b}` are {mean} points.{provisional}"
    said = f"{percent(estimate.mean, signed=True)} points, {interval(estimate, signed=True)}, n = {n}"
    said += f", p (Holm) {probability(found.p)}"
    if found.outcome in ("better", "worse"):
        return f"`{a}` is {found.outcome} than `{b}` ({said}).{provisional}"
    return f"no difference is shown between `{a}` and `{b}` ({said}).{provisional}"


def same(found: Contrast) -> str:
    """Of two rows that should be one: how many runs came to the same number, and how far the others are apart."""
    values, n = found.pairs.estimate.values, found.pairs.n
    equal = sum(value == 0 for value in values)
    opening = "at the same λ, learning rate, seed and split"
    said = f"runs of `{found.first}` have the score of `{found.second}`"
    if equal == len(values):
        return f"{opening} all {equal} {said} (n = {n} seeds)."
    return (
        f"{opening} {equal} of {len(values)} {said}; the others are at most {percent(max(map(abs, values)))} points "
        f"apart, {percent(found.pairs.estimate.mean, signed=True)} in the mean over all (n = {n} seeds)."
    )
