"""A page of experiments of one kind: for each its test scores, fit and calibration, and the command that goes on."""

from collections.abc import Sequence
from dataclasses import replace

from explicit_dropout.lab.report import markdown, results_table
from explicit_dropout.lab.report.answers import ENOUGH
from explicit_dropout.lab.report.reading import Part
from explicit_dropout.lab.report.stopping import stopping_table
from explicit_dropout.lab.report.tables import MISSING, Column, Table, configurations_table, diagnostics_table
from explicit_dropout.lab.statistics import Analysis, edges
from pages.source import Source, commands, heading, not_run

DIAGNOSED = ("row", "train_metric", "gap", "train_loss", "test_loss", "calibration_error", "n")
SHARED = {"strength": "λ", "learning_rate": "learning rate"}
"""Columns that are said in a sentence where all rows have one value."""
STOPPED = (
    "Stopped early: wrong labels are learnt last, so what a regulariser gains at the end may be had by stopping before "
    "it, which costs nothing. From the validation curves of the same runs; the epoch is chosen on the very scores that "
    "are shown, so those of *stopped* flatter a little."
)


def page(name: str, sources: Sequence[Source]) -> list[str]:
    lines = [f"# {name}", ""]
    for found in sources:
        for part in found.parts:
            lines += section(found, part)
    return lines


def section(found: Source, part: Part) -> list[str]:
    analysis = part.analysis
    if not analysis.finished and not analysis.experiment.paper:
        return [*heading(analysis), *not_run(found, analysis)]
    grid = bool(analysis.experiment.paper_cells)
    lines = [*heading(analysis), markdown(configurations_table(analysis) if grid else scores(analysis))]
    return [*lines, *at_edges(analysis), *fit(analysis), *stopped_early(analysis), *commands(found, analysis)]


def scores(analysis: Analysis) -> Table:
    """Test scores, differences to the baseline and what was selected, in as few columns as say it."""
    table = results_table(analysis)
    rows = [{**row, "difference": joined(row["difference"], row["difference_interval"])} for row in table.rows]
    values = {key: {row[key] for row in rows} - {MISSING} for key in SHARED}
    shared = {name: next(iter(values[key])) for key, name in SHARED.items() if len(values[key]) == 1}
    varied = [key for key, found in values.items() if len(found) > 1]
    fewer = any(row["pairs"] not in (row["n"].partition(" ")[0], MISSING) for row in rows)
    own = {column.key: replace(column, group="") for column in table.columns if column.key != "paper"}
    own["difference"] = Column("difference", f"to {analysis.experiment.baseline}")
    order = ["row", *varied, "others", "validation", "test", "n", "difference", *(["pairs"] if fewer else []), "holm"]
    columns = [own[key] for key in order if key in own]
    columns += [column for column in table.columns if column.key == "paper"]
    said = f" All rows: {', '.join(f'{name} = {value}' for name, value in shared.items())}." if shared else ""
    return replace(table, columns=tuple(columns), rows=tuple(rows), caption=table.caption + said)


def joined(difference: str, interval: str) -> str:
    return difference if interval == MISSING else f"{difference} {interval}"


def at_edges(analysis: Analysis) -> list[str]:
    """Rows whose choice lies at an end of what was tried: beyond it there may be a better one."""
    found = [f"`{row.name}` ({', '.join(ends)})" for row in analysis.rows if (ends := edges(row))]
    return [f"Chosen at an end of the values tried: {', '.join(found)}.", ""] if found else []


def fit(analysis: Analysis) -> list[str]:
    """Generalisation gap, likelihood and calibration of the rows with enough repetitions."""
    enough = [row for row in analysis.rows if row.test.n >= ENOUGH]
    if not enough:
        most = max(row.test.n for row in analysis.rows)
        return [f"Beyond accuracy: not enough runs yet (n = {most}).", ""]
    table = diagnostics_table(replace(analysis, rows=tuple(enough)))
    columns = tuple(column for column in table.columns if column.key in DIAGNOSED)
    return ["Beyond accuracy:", "", markdown(replace(table, columns=columns))]


def stopped_early(analysis: Analysis) -> list[str]:
    """Where labels are wrong, what would have come of stopping early instead."""
    table = stopping_table(analysis, ENOUGH)
    noisy = any(run.data.label_noise for run in analysis.experiment.runs)
    return [STOPPED, "", markdown(table)] if noisy and table.rows else []
