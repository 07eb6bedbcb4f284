"""The report as one HTML file that needs nothing else: no script, no font, no image from anywhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from explicit_dropout import __version__
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.report import commands
from explicit_dropout.lab.report.answers import answers
from explicit_dropout.lab.report.curves import DEPTHS, penalty_curves, row_curves, spark
from explicit_dropout.lab.report.datasets import datasets, divisions, warnings
from explicit_dropout.lab.report.forest import forest, verdict
from explicit_dropout.lab.report.heatmaps import views
from explicit_dropout.lab.report.legend import legend
from explicit_dropout.lab.report.reading import Part, Record, recorded
from explicit_dropout.lab.report.sentences import findings
from explicit_dropout.lab.report.svg import element
from explicit_dropout.lab.report.tables import (
    METRICS,
    Column,
    configurations_table,
    diagnostics_table,
    percent,
    results_table,
)
from explicit_dropout.lab.statistics import edges


@dataclass(frozen=True)
class Live:
    """What a page needs that keeps itself up to date: which state it shows, and the nonce of its script."""

    version: str
    nonce: str
    clock: str


def render(
    parts: Sequence[Part], store: str, others: int = 0, live: Live | None = None, problems: Sequence[str] = ()
) -> str:
    """The whole page. The same runs give the same bytes."""
    return _environment().get_template("report.html").render(
        parts=[part_view(part, f"e{number}", store) for number, part in enumerate(parts, start=1)],
        single=len(parts) == 1,
        store=store,
        others=others,
        live=live,
        version=__version__,
        settings=environment_table(parts),
        datasets=datasets(parts),
        divisions=divisions(parts),
        problems=problems,
        report_command=commands.report(parts, store),
        depths=range(DEPTHS),
    )  # fmt: skip


@cache
def _environment() -> Environment:
    folder = files("explicit_dropout.lab.report").joinpath("templates")

    def load(name: str) -> str:
        return folder.joinpath(name).read_text(encoding="utf-8")

    made = Environment(
        loader=FunctionLoader(load),
        autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters["breakable"] = breakable
    made.filters["coded"] = coded
    made.filters["column_groups"] = column_groups
    made.filters["column_class"] = column_class
    made.globals["style"] = Markup(load("style.css"))
    made.globals["script"] = Markup(load("live.js"))
    return made


def breakable(text: str) -> Markup:
    """A name that may be broken after + and _ where there is little room."""
    return Markup(_BREAKS.sub(r"\1<wbr>", str(escape(text))))


def coded(text: str) -> Markup:
    """A sentence whose words in backticks are names."""
    parts = text.split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(breakable(part)) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    )


_BREAKS = re.compile(r"(?<=[a-z])([+_])(?=[a-z])")


def column_groups(columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Neighbouring columns under their common heading."""
    made: list[dict[str, Any]] = []
    for name, members in groupby(columns, key=lambda column: column.group):
        made.append({"name": name, "slug": name.split(" ")[0], "columns": list(members)})
    return made


def column_class(column: Column, columns: Sequence[Column]) -> str:
    """The classes of a cell: numbers to the right, room before a new group, and the group's name."""
    first = next(one for one in columns if one.group == column.group) is column
    parts = ("number" if column.number else "", "starts" if first and column.group else "", column.group.split(" ")[0])
    return " ".join(part for part in parts if part)


def part_view(part: Part, anchor: str, store: str) -> dict[str, Any]:
    """Everything that the template says about one experiment."""
    analysis, experiment = part.analysis, part.experiment
    results = results_table(analysis)
    rows = [
        {
            "cells": cells,
            "baseline": row.name == experiment.baseline,
            "state": row.state if row.finished else "",  # where a number is missing, its cell says so
            "missing": not row.test.n,
            "verdict": verdict(row.comparison),
        }
        for cells, row in zip(results.rows, analysis.rows, strict=True)
    ]
    begun = part.having("begun")
    return {
        "id": anchor,
        "name": experiment.name,
        "title": experiment.title,
        "metric": METRICS[experiment.metric],
        "baseline": experiment.baseline,
        "notes": experiment.notes,
        "counts": {
            "planned": analysis.planned, "finished": analysis.finished, "failed": analysis.failed, "begun": len(begun),
        },
        "bar": progress_bar(analysis.planned, analysis.finished, len(begun), analysis.failed),
        "findings": [*warnings(part), *findings(analysis)],
        "answers": [
            (question.text, [said[0].upper() + said[1:] for said in answers(analysis, question)])
            for question in experiment.questions
        ],
        "results": results,
        "rows": rows,
        "legend": legend(analysis),
        "paper_only": [name for name in experiment.paper if name not in experiment.rows],
        "forest": forest(analysis),
        "heat": views(analysis),
        "edges": [(row.name, ", ".join(found)) for row in analysis.rows if (found := edges(row))],
        "curves": row_curves(analysis),
        "penalties": penalty_curves(analysis),
        "diagnostics": diagnostics_table(analysis),
        "configurations": configurations_table(analysis),
        "begun": [running_view(record, experiment.metric) for record in begun],
        "failed": [failed_view(record) for record in part.having("failed")],
        "commands": commands.for_rows(part, store),
        "sweep": commands.sweep(part, store),
    }  # fmt: skip


def progress_bar(planned: int, finished: int, begun: int, failed: int) -> Markup:
    """Finished, begun and failed as shares of what is planned."""
    parts, at = [], 0.0
    for number, kind in ((finished, "finished"), (begun, "begun"), (failed, "failed")):
        share = 100 * number / planned
        if number:
            parts.append(element("rect", x=f"{at:.2f}%", width=f"{share:.2f}%", height=8, class_=kind))
        at += share
    label = f"{finished} of {planned} runs finished, {begun} begun, {failed} failed"
    return element("svg", *parts, class_="progress", width="100%", height=8, role="img", aria_label=label)


def running_view(record: Record, metric: str) -> dict[str, Any]:
    last = record.metrics[-1] if record.metrics else {}
    scores = [line["validation"].get(metric) for line in record.metrics if isinstance(line.get("validation"), Mapping)]
    score = scores[-1] if scores else None
    return {
        "run": describe(record.run),
        "row": record.run.row,
        "epoch": last.get("epoch", 0),
        "epochs": record.run.training.epochs,
        "score": percent(score if isinstance(score, float) else None),
        "spark": spark(record.metrics, metric) or "",
    }


def failed_view(record: Record) -> dict[str, Any]:
    lines = [line for line in record.error.strip().splitlines() if line.strip()]
    return {
        "run": describe(record.run),
        "row": record.run.row,
        "key": record.run.key,
        "reason": lines[-1] if lines else "no reason was written",
        "text": record.error[-4000:] if len(lines) > 1 else "",
    }


def describe(run: Run) -> str:
    """λ, learning rate, seed and split of a run."""
    said = [f"λ {run.treatment.strength:g}"] if run.treatment.has_strength else []
    said += [f"learning rate {run.training.learning_rate:g}", f"seed {run.seed}"]
    return ", ".join(said + ([f"split {run.data.split}"] if run.data.split else []))


# ---------------------------------------------------------------------------------------------- where it was made


def environment_table(parts: Sequence[Part]) -> list[tuple[str, list[tuple[str, int]]]]:
    """Every setting of the environments with its values and how many runs have each."""
    found: dict[str, Counter[str]] = {}
    for record in recorded(parts):
        for name, value in _flat(record.environment or {}).items():
            if not name.startswith("dataset."):
                found.setdefault(name, Counter())[value] += 1
    return [(name.replace("_", " "), values.most_common()) for name, values in found.items()]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + str(name)] = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return flat
