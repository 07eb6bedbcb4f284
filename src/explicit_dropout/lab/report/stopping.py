"""Would it have been enough to stop early? From the validation curves of runs that were trained to the end.

A regulariser that only undoes what the last epochs spoil can be had for nothing. So every row is shown with its best
(λ, epoch), by the mean of validation over repetitions, beside what it has at the end. The epoch is chosen on the scores
that are shown, so they flatter a little; those at the end choose λ on them as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from explicit_dropout.lab.report.tables import METRICS, Column, Table, difference, measured, strength
from explicit_dropout.lab.statistics import Analysis, Configuration, Estimate, Row

NONE = "none+none"


@dataclass(frozen=True)
class Stop:
    """A configuration after some epoch: its validation scores by (seed, split)."""

    configuration: Configuration
    epoch: int
    scores: dict[tuple[int, int], float]

    @property
    def estimate(self) -> Estimate:
        return Estimate(tuple(self.scores.values()))

    def less(self, other: Stop) -> Estimate:
        """The differences to another, pair by pair."""
        shared = sorted(self.scores.keys() & other.scores.keys())
        return Estimate(tuple(self.scores[pair] - other.scores[pair] for pair in shared))


def stops(configuration: Configuration) -> list[Stop]:
    """Every epoch that all finished runs of a configuration were validated after."""
    curves = []
    for result in configuration.results:
        lines = ((line["epoch"], line.get("validation") or {}) for line in result.metrics)
        values = {epoch: found.get(configuration.metric) for epoch, found in lines}
        curves.append((result.run, {epoch: value for epoch, value in values.items() if value is not None}))
    shared = set.intersection(*(set(curve) for _, curve in curves)) if curves else set()
    return [
        Stop(configuration, epoch, {(run.seed, run.data.split): curve[epoch] for run, curve in curves})
        for epoch in sorted(shared)
    ]


def best(row: Row) -> Stop | None:
    """The (λ, epoch) with the highest mean, among configurations with the most repetitions; the earliest of equals."""
    found = [stop for configuration in row.configurations for stop in stops(configuration)]
    most = max((stop.estimate.n for stop in found), default=0)
    candidates = [stop for stop in found if stop.estimate.n == most]
    return max(candidates, key=lambda stop: round(stop.estimate.mean or 0.0, 9), default=None)


def stopping_table(analysis: Analysis, enough: int) -> Table:
    """Validation at the end and at the best epoch, of rows with enough repetitions."""
    rows = []
    bare = next((best(row) for row in analysis.rows if row.name == NONE), None)
    for row in analysis.rows:
        early = best(row)
        if row.chosen is None or early is None or early.estimate.n < enough:
            continue
        last = stops(row.chosen)[-1]
        gain = early.less(last)
        beside = early.less(bare) if bare is not None and row.name != NONE else Estimate()
        rows.append(
            {
                "row": row.name,
                "end": measured(last.estimate),
                "strength": strength(row.chosen),
                "early": measured(early.estimate),
                "epoch": str(early.epoch),
                "early_strength": strength(early.configuration),
                "gain": difference(gain),
                "beside": difference(beside),
                "n": str(early.estimate.n),
            }
        )
    metric = METRICS[analysis.experiment.metric]
    return Table(
        f"{analysis.experiment.name}_stopping",
        f"{analysis.experiment.title}: stopped early",
        f"Validation {metric} in %, mean ± sd over n repetitions, with the λ that is best at the end, and with the λ "
        "and the epoch that are best of all; differences in percentage points, paired, with 95 % intervals.",
        (
            Column("row", "row", number=False), Column("end", "at the end"), Column("strength", "λ"),
            Column("early", "stopped"), Column("epoch", "after epoch"), Column("early_strength", "λ"),
            Column("gain", "gain over the end"), Column("beside", f"gain over {NONE}, stopped"), Column("n", "n"),
        ),
        tuple(rows),
    )  # fmt: skip
