"""A plain table for a terminal, and what stands in its cells."""

from __future__ import annotations

from collections.abc import Sequence

from explicit_dropout.sites import Site


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in [lines[0], "  ".join("─" * width for width in widths), *lines[1:]])


def shape(site: Site) -> str:
    out, width = site.shape
    return f"{width} → {out}" if out else "–"


def heads(site: Site) -> str:
    """How many, and of keys where these have fewer."""
    if site.heads is None:
        return "–"
    return str(site.heads) if site.heads == site.key_heads else f"{site.heads}/{site.key_heads}"
