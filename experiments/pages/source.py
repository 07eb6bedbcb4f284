"""An experiment file as far as it has been run, and what its parts are called on the pages."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from explicit_dropout.lab.experiment import load_experiments, module_of
from explicit_dropout.lab.report.formats import prose
from explicit_dropout.lab.report.reading import Part, read
from explicit_dropout.lab.statistics import Analysis
from explicit_dropout.lab.store import Store

EXPERIMENTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Source:
    """An experiment file: its module, the command in its first lines, and its parts."""

    file: str
    module: ModuleType
    command: tuple[str, ...]
    parts: tuple[Part, ...]

    def continued(self, row: str | None = None) -> str:
        """What makes the tables, or a row of them, or goes on with it: finished runs are skipped."""
        return shlex.join([*self.command, *([] if row is None else ["--only", row])])


def source(name: str, root: Path) -> Source:
    path = EXPERIMENTS / f"{name}.py"
    module = module_of(path)
    lines = (line.strip() for line in (module.__doc__ or "").splitlines())
    words = shlex.split(next(line for line in lines if line.startswith("explicit-dropout sweep ")))
    if "--only" in words:  # examples in the files name a row; the command of a row names its own
        del words[(at := words.index("--only")) : at + 2]
    store = Store(root / (words[words.index("--store") + 1] if "--store" in words else "results"))
    parts = tuple(read(store, experiment, f"experiments/{name}.py") for experiment in load_experiments(path))
    return Source(name, module, tuple(words), parts)


def label(analysis: Analysis) -> str:
    """Table 4; the title of what is no table of the paper."""
    number = analysis.experiment.name.removeprefix("table")
    return f"Table {number}" if number.isdigit() else prose(analysis.experiment.title)


def title(analysis: Analysis) -> str:
    name, said = label(analysis), prose(analysis.experiment.title)
    return said if name == said else f"{name}: {said}"


def heading(analysis: Analysis) -> list[str]:
    """The head of a section, with the notes of the experiment."""
    notes = analysis.experiment.notes
    return [f"## {title(analysis)}", "", *([*(f"- {prose(note)}" for note in notes), ""] if notes else [])]


def not_run(found: Source, analysis: Analysis) -> list[str]:
    return [f"Not run yet (0 of {analysis.planned} runs).", "", "```", found.continued(), "```", ""]


def commands(found: Source, analysis: Analysis) -> list[str]:
    """The command that makes any row, and those that go on with what is not complete."""
    unfinished = [row for row in analysis.rows if not row.complete]
    state = f"{len(unfinished)} are not complete" if unfinished else "all are complete"
    lines = [f"{found.continued()} --only ROW  # makes the row of that name; {state}"]
    lines += [f"{found.continued(row.name)}  # {row.finished} of {row.planned} runs" for row in unfinished]
    return ["```", *lines, "```", ""]
