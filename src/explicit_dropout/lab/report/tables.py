"""The tables of an experiment as plain objects: what stands in every cell, whoever prints it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.statistics import GRID, Analysis, Configuration, Estimate, Row, analyse, differences
from explicit_dropout.lab.store import SPREAD

MISSING = "–"
METRICS = {"accuracy": "accuracy", "mean_average_precision": "mAP"}


@dataclass(frozen=True)
class Column:
    """`group` is the heading that it shares with its neighbours; `number` aligns to the right."""

    key: str
    title: str
    group: str = ""
    number: bool = True


@dataclass(frozen=True)
class Table:
    """Columns, and rows of text by column key. `str(table)` is Markdown."""

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[dict[str, str], ...]

    def __str__(self) -> str:
        from explicit_dropout.lab.report.formats import markdown

        return markdown(self)


def tables(experiment: Experiment, results: Iterable[Any], failed: Collection[str] = ()) -> list[Table]:
    """The tables of an experiment from its finished runs, given as (run, summary) or (run, summary, metrics)."""
    return tables_of(analyse(experiment, results, failed))


def tables_of(analysis: Analysis) -> list[Table]:
    """Results, diagnostics (where the summaries have them) and every configuration that was tried."""
    made = [results_table(analysis), diagnostics_table(analysis), configurations_table(analysis)]
    return [table for table in made if table.rows]


def results_table(analysis: Analysis) -> Table:
    """Ours, the difference to the baseline, the paper's numbers, and what was selected."""
    experiment = analysis.experiment
    metric = METRICS[experiment.metric]
    columns = [
        Column("row", "row", number=False),
        Column("test", f"test {metric}", "ours"),
        Column("interval", "95 % interval", "ours"),
        Column("n", "n", "ours"),
        Column("difference", "difference", "to the baseline"),
        Column("difference_interval", "95 % interval", "to the baseline"),
        Column("pairs", "pairs", "to the baseline"),
        Column("holm", "p (Holm)", "to the baseline"),
        *([Column("paper", f"test {metric}", "paper")] if experiment.paper else []),
        Column("strength", "λ", "selected"),
        Column("learning_rate", "learning rate", "selected"),
        Column("others", "others", "selected", number=False),
        Column("validation", "validation", "selected"),
        Column("runs", "runs", number=True),
    ]
    rows = [_result(analysis, row) for row in analysis.rows]
    used = [column for column in columns if column.key != "others" or any(row["others"] for row in rows)]
    return Table(
        experiment.name,
        experiment.title,
        f"Test {metric} in %, mean ± sd over n repetitions of the configuration that is best on validation; "
        f"differences in percentage points to {experiment.baseline}, paired by seed and split.",
        tuple(used),
        tuple(rows),
    )


def _result(analysis: Analysis, row: Row) -> dict[str, str]:
    chosen, comparison = row.chosen, row.comparison
    paper = analysis.experiment.paper.get(row.name)
    cells = {
        "row": row.name,
        "test": measured(row.test) if row.test.n else row.state or MISSING,
        "interval": interval(row.test),
        "n": count(row),
        "difference": "baseline" if row.name == analysis.experiment.baseline else MISSING,
        "difference_interval": MISSING,
        "pairs": MISSING,
        "holm": MISSING,
        "paper": MISSING if paper is None else quoted(paper),
        "strength": MISSING,
        "learning_rate": MISSING,
        "others": "",
        "validation": measured(row.validation),
        "runs": f"{row.finished} of {row.planned}"
        + (f", {row.diverged} diverged" if row.diverged else "")
        + (f", {row.failed} failed" if row.failed else ""),
    }
    if comparison is not None:
        cells["difference"] = percent(comparison.difference.mean, signed=True)
        cells["difference_interval"] = interval(comparison.difference, signed=True)
        cells["pairs"] = str(comparison.difference.n)
        cells["holm"] = probability(comparison.holm)
    if chosen is not None:
        cells["strength"] = strength(chosen)
        cells["learning_rate"] = f"{chosen.run.training.learning_rate:g}"
        cells["others"] = others(row)
    return cells


def others(row: Row) -> str:
    """What was chosen of a row besides λ and learning rate, in words."""
    if row.chosen is None:
        return ""
    return differences([c.run for c in row.configurations], without=GRID)[row.configurations.index(row.chosen)]


DIAGNOSTICS = (
    # key, title, part and name in the summary, percent?
    ("train_metric", "training {metric}", "train", None, True),
    ("gap", "gap to test", "gap", None, True),
    ("train_loss", "training loss", "train", "loss", False),
    ("test_loss", "test loss", "test", "loss", False),
    ("calibration_error", "calibration error", "test", "calibration_error", True),
    ("seconds", "seconds", "timing", "seconds", False),
    ("examples_per_second", "examples / s", "timing", "examples_per_second", False),
)


def diagnostics_table(analysis: Analysis) -> Table:
    """Fit, generalisation gap, likelihood, calibration and cost of the chosen configurations; only what is there."""
    metric = METRICS[analysis.experiment.metric]
    rows = []
    shown = [row.chosen for row in analysis.rows if row.chosen is not None]
    for row in analysis.rows:
        if row.chosen is None:
            continue
        cells = {"row": row.name, "n": count(row)}
        for key, _, part, name, is_percent in DIAGNOSTICS:
            estimate = diagnostic(row.chosen, part, name)
            cells[key] = measured(estimate) if is_percent else plain(estimate)
        rows.append(cells)
    filled = {key for row in rows for key, text in row.items() if text != MISSING}
    if any(c.withholds_training for c in shown):
        filled |= {key for key, _, part, *_ in DIAGNOSTICS if part in ("train", "gap")}
    columns = [Column(key, title.format(metric=metric)) for key, title, *_ in DIAGNOSTICS if key in filled]
    return Table(
        f"{analysis.experiment.name}_diagnostics",
        f"{analysis.experiment.title}: fit, calibration and cost",
        f"The same runs: mean ± sd. {_training_examples(shown)} The gap is training minus test, in percentage points; "
        "losses are mean negative log-likelihoods; the calibration error is in %." + _noisy(shown),
        (Column("row", "row", number=False), *columns, Column("n", "n")),
        tuple(rows) if columns else (),
    )


def _noisy(shown: Sequence[Configuration]) -> str:
    if not any(c.run.data.label_noise for c in shown):
        return ""
    return " Training numbers are of the labels that were trained on, wrong ones among them; test labels are right."


def _training_examples(shown: Sequence[Configuration]) -> str:
    """Which training examples the training numbers are of, and why some are left out."""
    told = [c for c in shown if not c.withholds_training]
    spread = {result.summary.get("train_examples") == SPREAD for c in told for result in c.results}
    which = "the first 10 000 training examples at most"
    if True in spread:
        which = "10 000 training examples at most, spread evenly" + (
            " or, in older runs, the first" * (False in spread)
        )
    said = f"Training numbers are of {which}, without augmentation."
    if len(told) == len(shown):
        return said
    why = (
        "Training numbers and gaps are left out (–) where runs have scored the first 10 000 training examples, in the "
        "order of the files: these may lack classes that the test has."
    )
    return f"{said} {why}" if told else why


def diagnostic(configuration: Configuration, part: str, name: str | None) -> Estimate:
    """A number beside the metric, which `name` None stands for; "gap" is training minus test."""
    if part == "gap":
        return configuration.gap(name or configuration.metric)
    return configuration.estimate(part, name or configuration.metric)


def configurations_table(analysis: Analysis) -> Table:
    """Everything that was tried: the grid over λ and learning rate, validation and test, with n in every cell."""
    rows = []
    for row in analysis.rows:
        labels = differences([c.run for c in row.configurations], without=GRID)
        for configuration, label in zip(row.configurations, labels, strict=True):
            rows.append(
                {
                    "row": row.name,
                    "strength": strength(configuration),
                    "learning_rate": f"{configuration.run.training.learning_rate:g}",
                    "others": label,
                    "validation": measured(configuration.validation),
                    "test": measured(configuration.test),
                    "paper": MISSING if (paper := paper_cell(analysis, configuration)) is None else quoted(paper),
                    "n": f"{configuration.validation.n} of {configuration.planned}"
                    + (f", {configuration.diverged} diverged" if configuration.diverged else ""),
                    "selected": "selected" if configuration is row.chosen else "",
                }
            )
    columns = (
        Column("row", "row", number=False),
        Column("strength", "λ"),
        Column("learning_rate", "learning rate"),
        Column("others", "others", number=False),
        Column("validation", "validation"),
        Column("test", "test"),
        Column("paper", "paper: test"),
        Column("n", "n"),
        Column("selected", "", number=False),
    )
    unused = {key for key in ("others", "paper") if all(row[key] in ("", MISSING) for row in rows)}
    return Table(
        f"{analysis.experiment.name}_configurations",
        f"{analysis.experiment.title}: all configurations",
        f"Test and validation {METRICS[analysis.experiment.metric]} in %, mean ± sd over n repetitions.",
        tuple(column for column in columns if column.key not in unused),
        tuple(rows),
    )


def paper_cell(analysis: Analysis, configuration: Configuration) -> Mapping[str, float] | None:
    """What the paper says of a row at this learning rate and λ, where it gives the whole grid."""
    run = configuration.run
    for rate, by_strength in analysis.experiment.paper_cells.get(run.row, {}).items():
        for strength, numbers in by_strength.items():
            if (float(rate), float(strength)) == (run.training.learning_rate, run.treatment.strength):
                return numbers
    return None


def records(analysis: Analysis) -> list[dict[str, Any]]:
    """The results in full precision, a line per row, for programs: percent, and nothing (None) where nothing is."""
    made = []
    for row in analysis.rows:
        chosen, comparison = row.chosen, row.comparison
        difference = comparison.difference if comparison else Estimate()
        paper = analysis.experiment.paper.get(row.name, {})
        made.append(
            {
                "experiment": analysis.experiment.name,
                "row": row.name,
                "baseline": row.name == analysis.experiment.baseline,
                "metric": analysis.experiment.metric,
                **_parts("test", row.test),
                "n_planned": chosen.planned if chosen else row.configurations[0].planned,
                **_parts("difference", difference),
                "p": difference.p,
                "p_holm": comparison.holm if comparison else None,
                "paper_mean": paper.get("mean"),
                "paper_sd": paper.get("std"),
                "strength": chosen.run.treatment.strength if chosen else None,
                "learning_rate": chosen.run.training.learning_rate if chosen else None,
                "others": others(row),
                "validation_mean": hundredfold(row.validation.mean),
                "validation_sd": hundredfold(row.validation.sd),
                "configurations": len(row.configurations),
                "runs_planned": row.planned,
                "runs_finished": row.finished,
                "runs_failed": row.failed,
            }
        )
    return made


def configuration_records(analysis: Analysis) -> list[dict[str, Any]]:
    """Every configuration in full precision, a line each."""
    made = []
    for row in analysis.rows:
        labels = differences([c.run for c in row.configurations], without=GRID)
        for configuration, label in zip(row.configurations, labels, strict=True):
            made.append(
                {
                    "experiment": analysis.experiment.name,
                    "row": row.name,
                    "strength": configuration.run.treatment.strength,
                    "learning_rate": configuration.run.training.learning_rate,
                    "others": label,
                    "selected": configuration is row.chosen,
                    **_parts("validation", configuration.validation),
                    **_parts("test", configuration.test),
                    "paper_mean": (paper_cell(analysis, configuration) or {}).get("mean"),
                    "paper_sd": (paper_cell(analysis, configuration) or {}).get("std"),
                    "n_planned": configuration.planned,
                }
            )
    return made


def _parts(name: str, estimate: Estimate) -> dict[str, float | int | None]:
    low, high = estimate.interval() or (None, None)
    return {
        f"{name}_mean": hundredfold(estimate.mean),
        f"{name}_sd": hundredfold(estimate.sd),
        f"{name}_low": hundredfold(low),
        f"{name}_high": hundredfold(high),
        f"{name}_n": estimate.n,
    }


def hundredfold(fraction: float | None) -> float | None:
    return None if fraction is None else 100 * fraction


# ---------------------------------------------------------------------------------------------- numbers as text


def percent(fraction: float | None, *, signed: bool = False) -> str:
    if fraction is None:
        return MISSING
    text = f"{100 * fraction:{'+' if signed else ''}.2f}"
    return text.replace("-", "−") if float(text) else text.lstrip("+-")


def measured(estimate: Estimate) -> str:
    """97.81 ± 0.31; one value stands alone."""
    return percent(estimate.mean) + ("" if estimate.sd is None else f" ± {percent(estimate.sd)}")


def interval(estimate: Estimate, *, signed: bool = False) -> str:
    bounds = estimate.interval()
    return MISSING if bounds is None else f"[{percent(bounds[0], signed=signed)}, {percent(bounds[1], signed=signed)}]"


def difference(estimate: Estimate) -> str:
    """A difference in percentage points with its interval, if it has one."""
    said = percent(estimate.mean, signed=True)
    return f"{said} {interval(estimate, signed=True)}" if estimate.sd else said


def plain(estimate: Estimate) -> str:
    """A number that is no fraction."""
    if estimate.mean is None:
        return MISSING
    size = abs(estimate.mean)
    form = ",.0f" if size >= 100 else ".1f" if size >= 10 else ".3f"
    text = f"{estimate.mean:{form}}" + ("" if estimate.sd is None else f" ± {estimate.sd:{form}}")
    return text.replace("-", "−")


def probability(p: float | None) -> str:
    if p is None:
        return MISSING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def quoted(paper: Mapping[str, float]) -> str:
    """A number of the paper, which is in percent already."""
    return f"{paper['mean']:.2f}" + (f" ± {paper['std']:.2f}" if "std" in paper else "")


def strength(configuration: Configuration) -> str:
    treatment = configuration.run.treatment
    return f"{treatment.strength:g}" if treatment.has_strength else MISSING


def count(row: Row) -> str:
    """How many repetitions stand behind a row's number: 5, or "3 of 5" while some are missing."""
    if row.chosen is None:
        return "0"
    n, planned = row.test.n, row.chosen.planned
    return str(n) if n == planned else f"{n} of {planned}"
