"""Tables as Markdown, LaTeX (booktabs), CSV and on the console."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from explicit_dropout.lab.report.tables import Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable


def markdown(table: Table) -> str:
    """The table with its caption. Groups stand in front of the titles: "paper: test accuracy"."""
    titles = [f"{c.group}: {c.title}" if c.group else c.title for c in table.columns]
    lines = [
        _pipes(titles),
        _pipes(["---:" if c.number else "---" for c in table.columns]),
        *(_pipes([row[c.key] for c in table.columns], code=_codes(table)) for row in table.rows),
    ]
    return "\n".join([*lines, "", prose(table.caption)]) + "\n"


def prose(text: str) -> str:
    """Foreign text in a line of Markdown: no HTML, no link, no emphasis, no second line."""
    flat = " ".join(text.split())
    for special in "\\`*_[]<>|#":
        flat = flat.replace(special, "\\" + special)
    return flat


def _pipes(cells: Sequence[str], code: Sequence[bool] = ()) -> str:
    marked = code or [False] * len(cells)
    shown = [_code(cell) if flag and cell else prose(cell) for cell, flag in zip(cells, marked, strict=True)]
    return "| " + " | ".join(shown) + " |"


def _codes(table: Table) -> list[bool]:
    return [column.key == "row" for column in table.columns]


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$", "[": "{[}", "]": "{]}",
    "λ": r"$\lambda$", "±": r"$\pm$", "−": "$-$", "–": "--", "×": r"$\times$",
}  # fmt: skip


def latex(table: Table) -> str:
    """A table for the package booktabs."""
    groups = [(name, len(list(members))) for name, members in groupby(table.columns, key=lambda c: c.group)]
    above, rules, at = [], [], 1
    for name, width in groups:
        above.append(rf"\multicolumn{{{width}}}{{c}}{{{tex(name)}}}" if name else " & ".join([""] * width))
        rules += [rf"\cmidrule(lr){{{at}-{at + width - 1}}}"] if name else []
        at += width
    lines = [
        rf"% {tex(table.name)}: needs \usepackage{{booktabs}}",
        r"\begin{table}",
        rf"\caption{{{tex(table.title)}. {tex(table.caption)}}}",
        rf"\begin{{tabular}}{{{''.join('r' if c.number else 'l' for c in table.columns)}}}",
        r"\toprule",
        *([" & ".join(above) + r" \\", " ".join(rules)] if any(name for name, _ in groups) else []),
        " & ".join(tex(c.title) for c in table.columns) + r" \\",
        r"\midrule",
        *(" & ".join(tex(row[c.key]) for c in table.columns) + r" \\" for row in table.rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def tex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in " ".join(text.split()))


def comma_separated(records: Sequence[Mapping[str, Any]]) -> str:
    """CSV with a header; floats in full, nothing where nothing is known."""
    if not records:
        return ""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(records[0]), lineterminator="\n")
    writer.writeheader()
    for record in records:
        writer.writerow({key: str(v).lower() if isinstance(v, bool) else v for key, v in record.items()})
    return out.getvalue()


CONSOLE = ("row", "test", "n", "difference", "difference_interval", "holm", "paper", "runs")
WIDE = 100
"""Columns of a terminal from which on the intervals have room."""


def console_table(table: Table, width: int = WIDE) -> RichTable:
    """The columns that fit a terminal of this width."""
    from rich.markup import escape
    from rich.table import Table as RichTable

    by_key = {column.key: column for column in table.columns}
    shown = [by_key[key] for key in CONSOLE if key in by_key] if "test" in by_key else list(table.columns)
    shown = [column for column in shown if column.key != "difference_interval" or width >= WIDE]
    made = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    titles = {"test": "ours", "difference": "to base", "paper": "paper"}
    for column in shown:
        justify: Any = "right" if column.number else "left"
        is_name = column.key == "row"
        made.add_column(
            titles.get(column.key, column.title),
            justify=justify, overflow="fold", no_wrap=not is_name, ratio=1 if is_name else None,
        )  # fmt: skip
    for row in table.rows:
        made.add_row(*(escape(row[c.key]) for c in shown))
    return made
