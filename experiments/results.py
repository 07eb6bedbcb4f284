"""docs/results.md from results/: every table, what is missing and the command that goes on, and what follows from it.

    python experiments/results.py              # writes docs/results.md, and tables in README.md and docs/findings.md
    python experiments/results.py --check      # only says whether they are current

Tables and statistics are the report's (`explicit_dropout.lab.report`). The command beside a row is the one in the first
lines of its experiment file. Nothing is concluded from fewer than five pairs.
"""

import argparse
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Question, load_experiments, module_of
from explicit_dropout.lab.report import markdown, results_table
from explicit_dropout.lab.report.answers import ENOUGH, Contrast, answers, contrasts
from explicit_dropout.lab.report.formats import prose
from explicit_dropout.lab.report.reading import Part, read
from explicit_dropout.lab.report.stopping import stopping_table
from explicit_dropout.lab.report.tables import (
    MISSING,
    Column,
    Table,
    configurations_table,
    diagnostics_table,
    interval,
    measured,
    percent,
    probability,
)
from explicit_dropout.lab.statistics import Analysis, Configuration, Estimate, differences, edges
from explicit_dropout.lab.store import Store

HERE = Path(__file__).parent
SUMMARIES = module_of(HERE / "summaries.py")


@dataclass(frozen=True)
class Source:
    """An experiment file as far as it has been run: its module, the command in its first lines, and its parts."""

    file: str
    module: ModuleType
    command: tuple[str, ...]
    parts: tuple[Part, ...]

    def continued(self, row: str | None = None) -> str:
        """What makes the table, or a row of it, or goes on with it: finished runs are skipped."""
        return shlex.join([*self.command, *([] if row is None else ["--only", row])])


@cache
def source(name: str, root: Path) -> Source:
    path = HERE / f"{name}.py"
    module = module_of(path)
    lines = (line.strip() for line in (module.__doc__ or "").splitlines())
    words = shlex.split(next(line for line in lines if line.startswith("explicit-dropout sweep ")))
    if "--only" in words:  # examples in the files name a row; the command of a row names its own
        del words[(at := words.index("--only")) : at + 2]
    store = Store(root / (words[words.index("--store") + 1] if "--store" in words else "results"))
    parts = tuple(read(store, experiment, f"experiments/{name}.py") for experiment in load_experiments(path))
    return Source(name, module, tuple(words), parts)


# ---------------------------------------------------------------------------------------------- the page


CHOICES = ("recipe", "strength", "strength_gtzan")
"""Experiments that choose settings, by validation alone: their test numbers are not shown."""

TABLES = (
    "table1", "table2", "table3", "table4", "table5", "rates", "label_noise", "noise", "few_images", "few_images_again",
    "few_images_why", "few_images_loss", "few_images_twins", "few_cifar",
)  # fmt: skip


def page(root: Path) -> str:
    sources = {name: source(name, root) for name in (*CHOICES, *TABLES)}
    analyses = {part.experiment.name: part.analysis for found in sources.values() for part in found.parts}
    lines = [
        "# Results",
        "",
        "<!-- Made by `python experiments/results.py` from results/. Do not edit. -->",
        "",
        "The paper's tables beside ours, on real data, as far as they have been run. The runs are in `results/`, and "
        "`python experiments/results.py` makes this page of them; the command beside a row makes or continues its "
        "runs. [Reports](report.md) says how the numbers are made: settings are chosen on validation data, ± is a "
        "standard deviation over n repetitions, differences are paired, intervals are Student's at 95 %, p-values are "
        "adjusted by Holm's method. The same difference can have two of them: under *Answers* adjusted for the few "
        "comparisons of its question, which verdicts there rest on, and in a table for all of its rows. Where a number "
        "is missing the "
        "cell says so. Numbers of the paper stand in columns that say paper, and nowhere else.",
        "",
        "A row is what is done to attention + what is done to feed-forward layers: `none+none` has no regulariser, "
        "`none+implicit` is `nn.Dropout` in feed-forward layers, `explicit_v+explicit` has the penalties of values and "
        "of feed-forward layers; [the laboratory](laboratory.md#rows) has all names. Penalties are under the law "
        "`paper` unless a row names another, means over tokens unless it says token sums. All rates are p = 0.2, in "
        "penalties and masks, except where the rate is what is studied, or a row says *p chosen*: on validation data, "
        "as λ is.",
        "",
        *overview(sources.values()),
        *answered(analyses.values()),
        *beyond_accuracy(part.analysis for name in TABLES for part in sources[name].parts),
        *stopped_early(part.analysis for name in TABLES for part in sources[name].parts),
        "## How settings were chosen",
        "",
    ]
    for name in CHOICES:
        for part in sources[name].parts:
            lines += chosen(sources[name], part)
    lines += ["## Tables", ""]
    for name in TABLES:
        for part in sources[name].parts:
            lines += tabled(sources[name], part)
    lines += module_of(HERE / "references.py").section(root)
    return "\n".join(lines).rstrip() + "\n"


def overview(sources: Iterable[Source]) -> list[str]:
    lines = ["| experiment | runs finished | rows with n ≥ 5 | to continue |", "| --- | ---: | ---: | --- |"]
    for found in sources:
        for part in found.parts:
            analysis = part.analysis
            full = sum(row.test.n >= ENOUGH for row in analysis.rows)
            command = "complete" if analysis.complete else f"`{found.continued()}`"
            done = f"{analysis.finished} of {analysis.planned}"
            lines.append(f"| {title(analysis)} | {done} | {full} of {len(analysis.rows)} | {command} |")
    return [*lines, ""]


def title(analysis: Analysis) -> str:
    name, said = label(analysis), prose(analysis.experiment.title)
    return said if name == said else f"{name}: {said}"


def label(analysis: Analysis) -> str:
    """Table 4; the title of what is no table of the paper."""
    number = analysis.experiment.name.removeprefix("table")
    return f"Table {number}" if number.isdigit() else prose(analysis.experiment.title)


def heading(analysis: Analysis) -> list[str]:
    return [f"### {title(analysis)}", ""]


def notes(analysis: Analysis) -> list[str]:
    said = analysis.experiment.notes
    return [*(f"- {prose(note)}" for note in said), ""] if said else []


def commands(found: Source, analysis: Analysis) -> list[str]:
    """A command for every row, with how far it is; one for all of them where nothing was run."""
    if not analysis.finished:
        return ["```", found.continued(), "```", ""]
    lines = []
    for row in analysis.rows:
        state = "complete" if row.complete else f"{row.finished} of {row.planned} runs"
        named = [other for part in found.parts for other in part.analysis.rows if other.name == row.name]
        finished, planned = (sum(getattr(other, name) for other in named) for name in ("finished", "planned"))
        others = f"; {finished} of {planned} with the other tables of this file" if finished < planned else ""
        lines.append(f"{found.continued(row.name)}  # {state}{others if len(named) > 1 else ''}")
    return ["```", *lines, "```", ""]


def tabled(found: Source, part: Part) -> list[str]:
    """A table of test numbers."""
    analysis = part.analysis
    lines = [*heading(analysis), *notes(analysis)]
    if not analysis.finished and not analysis.experiment.paper:
        return [*lines, f"Not run yet (0 of {analysis.planned} runs).", "", *commands(found, analysis)]
    table = configurations_table(analysis) if analysis.experiment.paper_cells else results_table(analysis)
    return [*lines, markdown(table), *at_edges(analysis), *commands(found, analysis)]


def at_edges(analysis: Analysis) -> list[str]:
    """Rows whose choice lies at an end of what was tried: beyond it there may be a better one."""
    found = [f"`{row.name}` ({', '.join(ends)})" for row in analysis.rows if (ends := edges(row))]
    return [f"Chosen at an end of the values tried: {', '.join(found)}.", ""] if found else []


# ---------------------------------------------------------------------------------------------- choices


def chosen(found: Source, part: Part) -> list[str]:
    """Validation numbers of everything that was tried."""
    analysis = part.analysis
    lines = [*heading(analysis), *notes(analysis)]
    if not analysis.finished:
        return [*lines, f"Not run yet (0 of {analysis.planned} runs).", "", *commands(found, analysis)]
    if len(analysis.rows) == 1:
        lines.append(markdown(settings_table(analysis)))
    else:
        lines += [markdown(table) for table in strength_tables(analysis)]
    return [*lines, *commands(found, analysis)]


def settings_table(analysis: Analysis) -> Table:
    """One row of the paper under several settings."""
    (row,) = analysis.rows
    labels = differences([c.run for c in row.configurations])
    return Table(
        analysis.experiment.name,
        analysis.experiment.title,
        f"Validation accuracy of {row.name} in %; n of the planned repetitions.",
        (Column("settings", "settings", number=False), Column("validation", "validation"), Column("n", "n")),
        tuple(
            {
                "settings": label,
                "validation": measured(c.validation) if c.validation.n else absent(c),
                "n": f"{c.validation.n} of {c.planned}",
            }
            for c, label in zip(row.configurations, labels, strict=True)
        ),
    )


def absent(configuration: Configuration) -> str:
    """Why there is no number."""
    return "diverged" if configuration.results else "not run"


def tokens(run: Run) -> int:
    """How many tokens an example of a study has."""
    return {"cifar10": 65, "gtzan_yamnet": 120}[run.data.name]


def per_token(run: Run) -> float:
    """λ of the mean over tokens that is the same penalty."""
    treatment = run.treatment
    return float(f"{treatment.strength * (tokens(run) if treatment.reduction == 'sample' else 1):.6g}")


def strength_tables(analysis: Analysis) -> Iterator[Table]:
    """λ across, rows down: validation, and how much of the loss the penalty is at the end."""
    cells = {(row.name, per_token(c.run)): c for row in analysis.rows for c in row.configurations}
    across = sorted({strength for _, strength in cells})
    columns = (
        Column("row", "row", number=False),
        *(Column(f"{s:g}", f"{s:g}" if s else "no λ") for s in across),
    )

    def filled(text: Callable[[Configuration], str]) -> tuple[dict[str, str], ...]:
        return tuple(
            {
                "row": row.name,
                **{
                    f"{s:g}": (text(c) if c.validation.n else absent(c)) if (c := cells.get((row.name, s))) else ""
                    for s in across
                },
            }
            for row in analysis.rows
        )

    name, shown = analysis.experiment.name, analysis.experiment.title
    yield Table(
        name,
        shown,
        "Validation accuracy in % (n). Columns: λ for a mean over tokens. Rows of token sums had this value divided by "
        "the number of tokens.",
        columns,
        filled(lambda c: f"{measured(c.validation)} ({c.validation.n})"),
    )
    yield Table(
        f"{name}_share",
        shown,
        "λ Σ J of the last epoch in % of the task loss beside it (n).",
        columns,
        filled(lambda c: f"{percent(share(c).mean)} ({share(c).n})" if c.run.treatment.has_penalty else MISSING),
    )


def share(configuration: Configuration) -> Estimate:
    last = [result.metrics[-1] for result in configuration.results if result.metrics]
    return Estimate(tuple(m["penalty"] / m["train_loss"] for m in last if m["train_loss"] and m["penalty"] is not None))


# ---------------------------------------------------------------------------------------------- answers


def answered(analyses: Iterable[Analysis]) -> list[str]:
    """Every question once, with what each experiment says to it: in short, and comparison by comparison."""
    asked: dict[str, list[tuple[Analysis, Question]]] = {}
    for analysis in analyses:
        for question in analysis.experiment.questions:
            asked.setdefault(question.text, []).append((analysis, question))
    where = "Where explicit dropout helps and where not is said in words under [what was seen](findings.md)."
    lines = ["## Answers", "", where, ""]
    for text, said in asked.items():
        lines += [f"### {text}", ""]
        if said[0][1].same_settings:
            lines += [
                f"- {label(analysis)}: {one}" for analysis, question in said for one in answers(analysis, question)
            ]
            lines += [""]
            continue
        found = {label(analysis): contrasts(analysis, question) for analysis, question in said}
        lines += [*(f"- {name}: {in_short(compared)}" for name, compared in found.items()), ""]
        rows = [cells(name, contrast) for name, compared in found.items() for contrast in compared]
        if any(row["n"] for row in rows):
            lines += [
                "| experiment | row | against | points | 95 % | p (Holm) | n | |",
                "|---|---|---|---:|---|---:|---:|---|",
            ]
            lines += ["| " + " | ".join(row.values()) + " |" for row in rows if row["n"]] + [""]
    return lines


OUTCOMES = ("better", "worse", "no difference shown", "all differences alike", "not enough runs yet")


def in_short(found: Sequence[Contrast]) -> str:
    """Better in 3 of 10, no difference shown in 7 of 10."""
    counts = Counter(contrast.outcome for contrast in found)
    total = len(found)
    if counts.keys() == {OUTCOMES[-1]} or total == 1:
        return f"{found[0].outcome}."
    if len(counts) == 1:
        some, every = ("either of two", "both") if total == 2 else (f"any of {total}", f"all {total}")
        return f"{found[0].outcome} in {some if found[0].outcome.startswith('no ') else every} comparisons."
    return ", ".join(f"{outcome} in {counts[outcome]} of {total}" for outcome in OUTCOMES if counts[outcome]) + "."


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


DIAGNOSED = ("row", "train_metric", "gap", "train_loss", "test_loss", "calibration_error", "n")


def beyond_accuracy(analyses: Iterable[Analysis]) -> list[str]:
    """Fit, generalisation gap, likelihood and calibration of the rows with enough repetitions."""
    lines = ["## Beyond accuracy", ""]
    for analysis in analyses:
        enough = [row for row in analysis.rows if row.test.n >= ENOUGH]
        if enough:
            table = diagnostics_table(replace(analysis, rows=tuple(enough)))
            columns = tuple(column for column in table.columns if column.key in DIAGNOSED)
            lines += [f"{title(analysis)}:", "", markdown(replace(table, columns=columns))]
        else:
            most = max(row.test.n for row in analysis.rows)
            lines += [f"{title(analysis)}: not enough runs yet (n = {most}).", ""]
    return lines


def stopped_early(analyses: Iterable[Analysis]) -> list[str]:
    """Where labels are wrong, what would have come of stopping early instead."""
    lines = [
        "## Would stopping early have been enough?",
        "",
        "Wrong labels are learnt last. So what a regulariser gains at the end may be had by stopping before it, which "
        "costs nothing; the validation curves of the same runs tell. The epoch is chosen on the very scores that are "
        "shown, so those of *stopped* flatter a little.",
        "",
    ]
    for analysis in analyses:
        table = stopping_table(analysis, ENOUGH)
        if table.rows and any(run.data.label_noise for run in analysis.experiment.runs):
            lines += [f"{title(analysis)}:", "", markdown(table)]
    return lines


# ---------------------------------------------------------------------------------------------- summaries


def summaries(root: Path) -> dict[Path, str]:
    """The pages that have summaries, with these made anew."""
    files = {name: max((f for f in TABLES if f"{name}_".startswith(f"{f}_")), key=len) for name in SUMMARIES.CONTRASTED}
    sources = {name: source(file, root) for name, file in files.items()}
    analyses = {part.experiment.name: part.analysis for found in sources.values() for part in found.parts}
    made = SUMMARIES.tables(analyses, {name: found.module for name, found in sources.items()})
    return {root / name: SUMMARIES.filled((root / name).read_text(encoding="utf-8"), made) for name in SUMMARIES.PAGES}


def pages(root: Path) -> dict[Path, str]:
    return {root / "docs" / "results.md": page(root), **summaries(root)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Make docs/results.md, and tables in README.md and docs/findings.md, from results/."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one of them is not current")
    given = parser.parse_args(arguments)
    root = HERE.parent
    made = pages(root)
    stale = [path for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    for path in made:
        print(f"{path.relative_to(root)} {'is not current' if path in stale else 'is current'}.")
        if path in stale and not given.check:
            path.write_text(made[path], encoding="utf-8")
            print("  written anew.")
    return 1 if given.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
