"""What the commands print: to people, in as many columns as their terminal has."""

from __future__ import annotations

import io
import os
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from explicit_dropout.sites import Site

NAME = 12
"""Characters that the name of a row has, at least, before it is folded."""


class _Output(Console):
    """A console that whoever reads along may leave, as `| head` does: the work goes on in silence."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        silence(self.file)


def console(*, stderr: bool = False) -> Console:
    return _Output(stderr=stderr, highlight=False, soft_wrap=False, emoji=False)


def silence(stream: IO[str]) -> None:
    """Send what is still written to a stream nowhere."""
    with suppress(OSError):  # one that is no file of the system
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def flush() -> None:
    """Write out what is printed, if anybody is still there to read it."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence(sys.stdout)


def print_plainly(text: str) -> None:
    """Text for programs, as it is."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        silence(sys.stdout)


def tolerate_any_character() -> None:
    """Print a question mark where the terminal has no such character, rather than nothing at all."""
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and not out.encoding.lower().startswith("utf"):
        out.reconfigure(errors="replace")


def complain(message: str) -> None:
    """An error, wrapped between words: paths, however long, stay whole."""
    err = console(stderr=True)
    lines = (
        textwrap.fill(line, err.width, break_long_words=False, break_on_hyphens=False)
        for line in f"error: {message}".splitlines()
    )
    text = escape("\n".join(lines).removeprefix("error:"))
    err.print(f"[bold red]error:[/]{text}", soft_wrap=True)


def fitted(table: Table, width: int, *, name: str, expendable: Sequence[str]) -> Table:
    """The table without columns that would leave no room for the one that names the rows.

    Args:
        name: header of that column, which may be folded but not to less than NAME characters.
        expendable: headers of what can be left out, first what is missed least.
    """
    room = {str(column.header): _longest(column) for column in table.columns}
    room[name] = least = min(room[name], NAME)
    between = table.padding[1] + table.padding[3]
    for header in expendable:
        if sum(room.values()) + between * (len(room) - 1) > width:
            room.pop(header, None)
    made = Table(box=None, pad_edge=False, header_style=table.header_style, padding=table.padding)
    kept = [column for column in table.columns if column.header in room]
    for column in kept:
        made.add_column(
            column.header, justify=column.justify, overflow=column.overflow, no_wrap=column.no_wrap, ratio=column.ratio,
            min_width=least if column.header == name else column.min_width,
        )  # fmt: skip
    for cells in zip(*(column.cells for column in kept), strict=True):
        made.add_row(*cells)
    return made


def _longest(column: Column) -> int:
    return max(Text.from_markup(str(cell)).cell_len for cell in (column.header, *column.cells))


def shortened(path: str, prefix: str) -> str:
    return path.removeprefix(prefix) or "(model)"


def common_prefix(sites: list[Site]) -> str:
    """The dotted beginning that all paths share: it tells sites apart no better and costs columns."""
    split = [site.path.split(".")[:-1] for site in sites]
    shared: list[str] = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) + "." if shared else ""


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
