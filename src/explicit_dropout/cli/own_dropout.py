"""`explicit-dropout twins`: where a model draws dropout of its own, and what stands for each draw."""

from __future__ import annotations

import json as written
from typing import Annotated

import tyro
from rich.markup import escape
from rich.table import Table

from explicit_dropout.cli import FINE
from explicit_dropout.cli.models import load
from explicit_dropout.cli.output import console, fitted, plural, print_plainly
from explicit_dropout.twins import convert_dropout


def twins(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    /,
    json: bool = False,
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = (),
) -> int:
    """Show where a model draws dropout of its own, and the twin of each.

    The model runs once, in train mode. In Python, xd.convert_dropout(model).

    Try:
      explicit-dropout twins hf:bert --set num_hidden_layers=2
      explicit-dropout twins 'torch:TransformerEncoderLayer(32, 4)'
      explicit-dropout twins my_model.py:build --json

    Args:
        model: timm:NAME, hf:TYPE, hf:FOLDER, torch:CONSTRUCTOR(…), MODULE:CALLABLE or FILE.py:CALLABLE.
        json: Print JSON instead, for programs.
        set: Argument of the model or of its configuration, such as attention_dropout=0.1.
    """
    example = load(model, set)
    inputs, keywords = example.call()
    with convert_dropout(example.model.train(), others="keep") as found:
        example.model(*inputs, **keywords)
        sites = found.sites
    name = type(example.model).__name__
    if json:
        rows = [{"name": s.name, "module": s.path, "twin": s.component, "p": s.rate} for s in sites]
        print_plainly(written.dumps({"model": model, "class": name, "dropout": rows}, indent=2))
        return FINE
    out = console()
    out.print(f"[bold]{name}[/]: dropout at {plural(len(sites), 'place')}")
    if not sites:
        out.print("[dim]Its rates are 0; --set one to see more, such as attention_dropout=0.1.[/]")
        return FINE
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module", overflow="fold", ratio=1)
    table.add_column("twin", no_wrap=True)
    table.add_column("p", no_wrap=True)
    for site in sites:
        table.add_row(escape(site.path or "(model)"), site.component, f"{site.rate:g}")
    out.print(fitted(table, out.width, name="module", expendable=()))
    return FINE
