"""Every question that experiments ask, with what each of them says to it: in short, and comparison by comparison."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from explicit_dropout.lab.experiment import Question
from explicit_dropout.lab.report.answers import ENOUGH, Contrast, answers, contrasts
from explicit_dropout.lab.report.tables import interval, percent, probability
from explicit_dropout.lab.statistics import Analysis
from pages.source import label

OUTCOMES = ("better", "worse", "no difference shown", "all differences alike", "not enough runs yet")
HEAD = ["| experiment | row | against | points | 95 % | p (Holm) | n | |", "|---|---|---|---:|---|---:|---:|---|"]


@dataclass(frozen=True)
class Asked:
    """A question, and every experiment that asks it."""

    text: str
    by: tuple[tuple[Analysis, Question], ...]

    def in_short(self) -> list[str]:
        """A line for each outcome, with the experiments that have it."""
        lines: dict[str, list[str]] = {}
        for analysis, question in self.by:
            said = (
                [answer.rstrip(".") for answer in answers(analysis, question)]
                if question.same_settings
                else [tally(contrasts(analysis, question))]
            )
            for one in said:
                lines.setdefault(one, []).append(label(analysis))
        return [f"- {'; '.join(names)}: {said}." for said, names in lines.items()]

    def in_full(self) -> list[str]:
        """A line for each comparison."""
        rows = [
            cells(label(analysis), contrast)
            for analysis, question in self.by
            if not question.same_settings
            for contrast in contrasts(analysis, question)
        ]
        shown = ["| " + " | ".join(row.values()) + " |" for row in rows if row["n"]]
        return [*HEAD, *shown, ""] if shown else []


def asked(analyses: Iterable[Analysis]) -> list[Asked]:
    """The questions of all experiments, each once."""
    found: dict[str, list[tuple[Analysis, Question]]] = {}
    for analysis in analyses:
        for question in analysis.experiment.questions:
            found.setdefault(question.text, []).append((analysis, question))
    return [Asked(text, tuple(by)) for text, by in found.items()]


def tally(found: Sequence[Contrast]) -> str:
    """Better in 3 of 10, no difference shown in 7 of 10."""
    counts = Counter(contrast.outcome for contrast in found)
    total = len(found)
    if counts.keys() == {OUTCOMES[-1]} or total == 1:
        return found[0].outcome
    if len(counts) == 1:
        some, every = ("either of two", "both") if total == 2 else (f"any of {total}", f"all {total}")
        return f"{found[0].outcome} in {some if found[0].outcome.startswith('no ') else every} comparisons"
    return ", ".join(f"{outcome} in {counts[outcome]} of {total}" for outcome in OUTCOMES if counts[outcome])


def cells(experiment: str, contrast: Contrast) -> dict[str, str]:
    """A line of the table of comparisons; without an n where there are too few pairs."""
    estimate, enough = contrast.pairs.estimate, contrast.pairs.n >= ENOUGH
    return {
        "experiment": experiment,
        "row": f"`{contrast.first}`",
        "against": f"`{contrast.second}`",
        "points": percent(estimate.mean, signed=True) if enough else "",
        "interval": interval(estimate, signed=True) if enough and contrast.p is not None else "",
        "p": probability(contrast.p) if enough and contrast.p is not None else "",
        "n": str(contrast.pairs.n) if enough else "",
        "outcome": contrast.outcome + ("" if contrast.pairs.complete else ", provisional: runs are missing"),
    }


def page(questions: Iterable[Asked]) -> list[str]:
    lines = [
        "# Comparisons",
        "",
        "Every question that experiments ask, with all of its comparisons: differences of test scores in points, "
        "paired by seed and split, with Student's 95 % intervals. p-values are adjusted by Holm's method for the "
        "comparisons of one experiment under the same question, and verdicts rest on them. Nothing is concluded from "
        "fewer than "
        f"{ENOUGH} pairs.",
        "",
    ]
    for question in questions:
        lines += [f"## {question.text}", "", *question.in_short(), "", *question.in_full()]
    return lines
