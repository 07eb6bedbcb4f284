"""`explicit-dropout inspect`: where dropout can act in a model."""

from __future__ import annotations

import json
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree
from torch import nn

from explicit_dropout.cli import FINE
from explicit_dropout.cli.models import load
from explicit_dropout.cli.output import common_prefix, console, fitted, plural, print_plainly, shortened
from explicit_dropout.finding import Unclaimed, find_sites, told_once, unclaimed, unclaimed_line
from explicit_dropout.noise import inverted, paper
from explicit_dropout.refusals import unmatched
from explicit_dropout.sites import Attention, Site
from explicit_dropout.table import heads, shape
from explicit_dropout.testing.measuring import refusal


def inspect(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    /,
    tree: bool = False,
    json: bool = False,
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = (),
) -> int:
    """Show the sites of a model: every place where a penalty can be attached.

    Nothing is trained or changed; weights are random unless a folder has some.

    Try:
      explicit-dropout inspect timm:vit_tiny_patch16_224
      explicit-dropout inspect hf:llama --set num_hidden_layers=2 --tree
      explicit-dropout inspect 'torch:TransformerEncoderLayer(32, 4)'
      explicit-dropout inspect my_model.py:build --json

    Args:
        model: timm:NAME, hf:TYPE, hf:FOLDER, torch:CONSTRUCTOR(…), MODULE:CALLABLE or FILE.py:CALLABLE.
        tree: Show layers as a tree instead of a table.
        json: Print JSON instead, for programs.
        set: Argument of the model or of its configuration, such as depth=2.
    """
    example = load(model, set)
    sites = find_sites(example.model)
    if not sites:
        raise unmatched(example.model)
    laws = {site.name: exact_under(site) for site in sites}
    left = unclaimed(example.model, {site.source: None for site in sites})
    if json:
        print_plainly(as_json(model, example.model, sites, laws, left))
        return FINE
    out = console()
    parameters = sum(p.numel() for p in example.model.parameters())
    layers = len({site.layer for site in sites})
    out.print(
        f"[bold]{type(example.model).__name__}[/]: {parameters:,} parameters, {plural(layers, 'layer')}, "
        f"{plural(len(sites), 'site')}"
    )
    if tree:
        out.print(as_tree(example.model, sites, laws))
    else:
        prefix = common_prefix(sites)
        if prefix:
            out.print(f"[dim]modules are inside {escape(prefix.rstrip('.'))}[/]")
        table = as_table(sites, prefix, laws)
        out.print(fitted(table, out.width, name="module", expendable=("heads", "exact", "in → out", "layer")))
    for _, reason in told_once({name: reason for name, (mark, reason) in laws.items() if mark != "any"}):
        out.print(f"[dim]{escape(reason)}[/]")
    for place, reason in unconfirmed(sites).items():
        if not any(reason in told for _, told in laws.values()):
            out.print(f"[yellow]not confirmed[/] {escape(place or 'the model')}: [dim]{escape(reason)}[/]")
    if line := unclaimed_line(left):
        out.print(f"[yellow]{escape(line)}[/]")
    return FINE


def exact_under(site: Site) -> tuple[str, str]:
    """The laws under which a site has an exact penalty (any, v = 0, none), and why not under all."""
    reason = refusal(site, inverted(0.2))
    if reason is None:
        return "any", ""
    if refusal(site, paper(0.2)) is None:
        return "v = 0", f"v = 0: {reason}"
    return "none", f"none: {reason}"


def unconfirmed(sites: list[Site]) -> dict[str, str]:
    """What trials have found that speaks against the names of attention at these sites, by its path."""
    described = {site.source.path: site.source.described for site in sites}
    return {
        path: item.unconfirmed for path, item in described.items() if isinstance(item, Attention) and item.unconfirmed
    }


def as_table(sites: list[Site], prefix: str, laws: dict[str, tuple[str, str]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("component", no_wrap=True)
    table.add_column("module", overflow="fold", ratio=1)
    table.add_column("in → out", no_wrap=True)
    table.add_column("heads", justify="right", no_wrap=True)
    table.add_column("exact", no_wrap=True)
    before: Site | None = None
    for site in sites:
        new_layer = before is None or before.layer != site.layer
        new_place = new_layer or before is None or before.path != site.path
        table.add_row(
            str(site.layer) if new_layer else "",
            site.component,
            escape(shortened(site.path, prefix)) + (" [dim](cross)[/]" if site.cross else "")
            if new_place
            else "[dim]″[/]",
            shape(site),
            heads(site),
            laws[site.name][0],
            end_section=False,
        )
        before = site
    return table


def as_tree(model: nn.Module, sites: list[Site], laws: dict[str, tuple[str, str]]) -> Tree:
    root = Tree(type(model).__name__)
    layers: dict[int, Tree] = {}
    places: dict[tuple[int, str], Tree] = {}
    for site in sites:
        layer = layers.setdefault(site.layer, Tree(f"[bold]layer {site.layer}[/]"))
        if layer not in root.children:
            root.children.append(layer)
        place = site.source.path
        if (site.layer, place) not in places:
            kind = "feed-forward" if site.heads is None else "cross-attention" if site.cross else "attention"
            many = "" if site.heads is None else f", {heads(site)} heads"
            places[site.layer, place] = layer.add(f"{escape(place or '(model)')} [dim]{kind}{many}[/]")
        own = "" if site.heads is not None else f" [dim]{escape(site.path.rsplit('.', 1)[-1])}[/]"
        law = laws[site.name][0]
        mark = "" if law == "any" else f" [dim]({law})[/]"
        places[site.layer, place].add(f"{site.component}{own} {shape(site)}{mark}")
    return root


def as_json(
    spec: str, model: nn.Module, sites: list[Site], laws: dict[str, tuple[str, str]], left: list[Unclaimed]
) -> str:
    rows: list[dict[str, Any]] = [
        {
            "name": site.name,
            "layer": site.layer,
            "component": site.component,
            "module": site.path,
            "in": site.shape[1],
            "out": site.shape[0],
            "heads": site.heads,
            "key_heads": site.key_heads,
            "cross": site.cross,
            "exact": laws[site.name][0],
        }
        for site in sites
    ]
    parameters = sum(p.numel() for p in model.parameters())
    beside = [{"module": layer.path, "in": layer.width, "out": layer.out} for layer in left]
    found = {
        "model": spec, "class": type(model).__name__, "parameters": parameters, "sites": rows, "unclaimed": beside,
    }  # fmt: skip
    return json.dumps(found, indent=2)
