"""What the commands print: to people, in as many columns as their terminal has."""

from __future__ import annotations

import textwrap

from rich.console import Console
from rich.markup import escape

from explicit_dropout.sites import Site


def console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def complain(message: str) -> None:
    """An error, wrapped between words: paths, however long, stay whole."""
    err = console(stderr=True)
    lines = (
        textwrap.fill(line, err.width, break_long_words=False, break_on_hyphens=False)
        for line in f"error: {message}".splitlines()
    )
    text = escape("\n".join(lines).removeprefix("error:"))
    err.print(f"[bold red]error:[/]{text}", soft_wrap=True)


def shape(site: Site) -> str:
    out, width = site.shape
    return f"{width} → {out}" if out else "–"


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
