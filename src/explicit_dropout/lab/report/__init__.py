"""Reports: tables with the paper's numbers beside ours, figures, and everything needed to make them again.

store = Store("results")
report = build(store, [(experiment, "experiments/table4.py")])
write_report(report, "report")                 # report.html, .md, .tex, .csv and configurations.csv
print(tables(experiment, results)[0])          # one table as Markdown
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from explicit_dropout.errors import StoreError
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.report import commands, formats, page
from explicit_dropout.lab.report.answers import answers
from explicit_dropout.lab.report.datasets import fingerprints, warnings
from explicit_dropout.lab.report.formats import console_table, latex, markdown
from explicit_dropout.lab.report.page import Live
from explicit_dropout.lab.report.reading import Part, experiments_in, read
from explicit_dropout.lab.report.sentences import findings
from explicit_dropout.lab.report.tables import Table, configuration_records, records, results_table, tables, tables_of
from explicit_dropout.lab.store import Store

__all__ = [
    "Part", "Report", "Table", "build", "console_table", "latex", "markdown", "results_table", "tables", "tables_of",
    "write_report",
]  # fmt: skip

FINGERPRINT = "data_fingerprint"
"""The last column of CSV files: of the data that the runs behind a line have seen."""


@dataclass(frozen=True)
class Report:
    """Experiments as far as a store has them.

    `others` counts the runs of the store that belong to none of them. `problems` has the folders that could not be read
    and that no experiment names; those of an experiment are among its failed runs.
    """

    parts: tuple[Part, ...]
    store: str
    others: int = 0
    problems: tuple[str, ...] = ()

    def html(self, live: Live | None = None) -> str:
        return page.render(self.parts, self.store, self.others, live, self.problems)

    def markdown(self) -> str:
        sections = [f"**{formats.prose(problem)}**\n" for problem in self.problems]
        for part in self.parts:
            experiment = part.experiment
            lines = [f"# {formats.prose(experiment.title)}", ""]
            lines += [f"**{formats.prose(sentence)}**\n" for sentence in warnings(part)]
            lines += [formats.prose(sentence) for sentence in findings(part.analysis)]
            lines += ["", *(f"- {formats.prose(note)}" for note in experiment.notes)]
            for question in experiment.questions:
                said = answers(part.analysis, question)
                lines += ["", f"**{formats.prose(question.text)}**", "", *(f"- {sentence}" for sentence in said)]
            for table in tables_of(part.analysis):
                heading = "Results" if table.name == experiment.name else table.title.rsplit(": ", 1)[-1].capitalize()
                lines += ["", f"## {heading}", "", markdown(table)]
            command = commands.sweep(part, self.store)
            if command is not None:
                lines += ["```", command, commands.report([part], self.store), "```"]
            sections.append("\n".join(lines) + "\n")
        return "\n".join(sections)

    def latex(self) -> str:
        return "\n".join(
            latex(replace(table, caption=" ".join([*warnings(part), table.caption])))
            for part in self.parts
            for table in tables_of(part.analysis)
        )

    def csv(self) -> str:
        return formats.comma_separated(
            [
                {**line, FINGERPRINT: fingerprints(part, (run for c in row.configurations for run in c.runs))}
                for part in self.parts
                for line, row in zip(records(part.analysis), part.analysis.rows, strict=True)
            ]
        )

    def configurations_csv(self) -> str:
        return formats.comma_separated(
            [
                {**line, FINGERPRINT: fingerprints(part, configuration.runs)}
                for part in self.parts
                for line, configuration in zip(
                    configuration_records(part.analysis),
                    (c for row in part.analysis.rows for c in row.configurations),
                    strict=True,
                )
            ]
        )


def build(store: Store, experiments: Sequence[tuple[Experiment, str | None]] = (), name: str | None = None) -> Report:
    """Read a store.

    Args:
        experiments: with the files that describe them; none for all runs of the store, grouped as they fit together.
        name: how commands in the report call the store; its own path if None.
    """
    problems: list[str] = []
    listed = list(experiments) or [(experiment, None) for experiment in experiments_in(store, problems)]
    parts = tuple(read(store, experiment, source) for experiment, source in listed)
    known = {run.key for experiment, _ in listed for run in experiment.runs}
    others = len(store.keys() - known)
    return Report(parts, str(store.root) if name is None else name, others, tuple(problems))


def write_report(report: Report, folder: str | Path) -> list[Path]:
    """Write all formats into a folder and return the files."""
    target = Path(folder)
    contents = {
        "report.html": report.html(),
        "report.md": report.markdown(),
        "report.tex": report.latex(),
        "report.csv": report.csv(),
        "configurations.csv": report.configurations_csv(),
    }
    written = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            temporary = target / f".{name}.{os.getpid()}.tmp"
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, target / name)
            written.append(target / name)
    except OSError as error:
        raise StoreError(f"the report could not be written to {target}: {error.strerror or error}.") from error
    return written
