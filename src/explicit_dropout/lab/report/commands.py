"""The commands that make the rows of a table, or go on with them: finished runs are skipped."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from explicit_dropout.lab.report.reading import Part, Record

PROGRAM = "explicit-dropout"
LISTED = 5
"""Commands that are written out where every run needs one of its own."""


def sweep(part: Part, store: str, row: str | None = None) -> str | None:
    """What makes the table, or one row of it; None if no file describes it."""
    if part.source is None:
        return None
    only = [] if row is None else ["--only", row]
    return shlex.join([PROGRAM, "sweep", part.source, *only, "--store", store])


def report(parts: Sequence[Part], store: str) -> str:
    """What makes this report again."""
    sources = dict.fromkeys(part.source for part in parts if part.source is not None)
    return shlex.join([PROGRAM, "report", *sources, "--store", store])


def for_rows(part: Part, store: str) -> list[dict[str, str]]:
    """For every row what there is to do and the command, or commands, that do it."""
    rows = []
    for row in part.analysis.rows:
        command = sweep(part, store, row.name)
        if command is None:
            command = "\n".join(_one_by_one([r for r in part.records if part.experiment.row(r.run) == row.name], store))
        todo = "goes on with it" if row.finished and not row.complete else "makes it"
        rows.append({"row": row.name, "state": row.state, "todo": todo, "command": command})
    return rows


def _one_by_one(records: Sequence[Record], store: str) -> list[str]:
    """The command for each run that no experiment file describes: its settings are in its folder."""
    ordered = sorted(records, key=lambda record: record.state == "finished")  # what is still to be done comes first
    listed = [
        shlex.join([PROGRAM, "train", "--config", f"{store}/{record.place}/config.json", "--store", store])
        for record in ordered[:LISTED]
    ]
    more = len(ordered) - len(listed)
    return listed + ([f"# and {more} more, one for each config.json"] if more else [])
