"""`explicit-dropout twins`: where a model draws dropout of its own, and what stands for each draw."""

from __future__ import annotations

import inspect
import json as written
import sys
import threading
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Annotated, Any

import torch
import tyro
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.overrides import TorchFunctionMode

from explicit_dropout.cli import FAILED, FINE
from explicit_dropout.cli.models import Example, load
from explicit_dropout.cli.output import console, fitted, plural, print_plainly
from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.hooks.generators import PATIENCE
from explicit_dropout.twins import Twin, convert_dropout

TIMM_RATES = ("proj_drop_rate", "attn_drop_rate", "drop_rate", "drop_path_rate")
"""Arguments of timm's models, those that act in most places first. `patch_drop_rate` draws what has no twin."""
ELSEWHERE = ("classifier", "summary", "layerdrop", "layer_drop")
"""In names of rates of a configuration: of heads, which are not built; of LayerDrop, which has no twin."""
NAMED = 6
"""Places that are listed in a sentence."""


def twins(
    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")],
    /,
    json: bool = False,
    set: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")] = (),
) -> int:
    """Show where a model draws dropout of its own, and the twin of each.

    The model runs in train mode. In Python, xd.convert_dropout(model).

    Exit status:
      0 all that is random has a twin
      1 something has none, so that xd.convert_dropout needs others='keep'
      2 the command could not be carried out

    Try:
      explicit-dropout twins hf:bert --set num_hidden_layers=2
      explicit-dropout twins 'torch:TransformerEncoderLayer(32, 4)'
      explicit-dropout twins my_model.py:build --json

    Args:
        model: timm:NAME, hf:TYPE, hf:FOLDER, torch:CONSTRUCTOR(…), MODULE:CALLABLE or FILE.py:CALLABLE.
        json: Print JSON instead, for programs.
        set: Argument of the model or of its configuration, such as num_hidden_layers=2.
    """
    example = load(model, set)
    sites, others = looked_at(example)
    status = FAILED if others else FINE
    name = type(example.model).__name__
    if json:
        rows = [{"name": s.name, "module": s.path, "twin": s.component, "p": s.rate} for s in sites]
        found = {"model": model, "class": name, "dropout": rows, "without_twin": others}
        print_plainly(written.dumps(found, indent=2))
        return status
    out = console()
    out.print(f"[bold]{name}[/]: dropout at {plural(len(sites), 'place')}")
    if sites:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("module", overflow="fold", ratio=1)
        table.add_column("twin", no_wrap=True)
        table.add_column("p", no_wrap=True)
        for site in sites:
            table.add_row(escape(place(site)), site.component, f"{site.rate:g}")
        out.print(fitted(table, out.width, name="module", expendable=()))
    elif not others:
        out.print(f"[dim]Its rates are 0. To see more: {escape(advice(model, example.model))}[/]")
    if others:
        listed = ", ".join(others[:NAMED]) + (f" and {len(others) - NAMED} more" if len(others) > NAMED else "")
        needs = "" if "others='keep'" in listed else "; needs others='keep'"
        out.print(f"[bold red]also random, without a twin:[/] {escape(listed + needs)}")
    return status


def place(site: Twin) -> str:
    """The module of a twin, and which of its kind there: a module may draw several times."""
    path = site.path or "(model)"
    number = site.name.removeprefix(f"{path}:{site.component}").strip()
    return f"{path} ({number})" if number else path


# ---------------------------------------------------------------------------------------------- what is random


def looked_at(example: Example) -> tuple[list[Twin], list[str]]:
    """The twins of a model, and what is random besides, where convert_dropout would refuse it."""
    model = example.model.train()
    inputs, keywords = example.call()
    # beside other threads it takes that many passes until generators that have moved are held against the model
    passes = 1 if threading.active_count() == 1 else PATIENCE
    try:
        with convert_dropout(model) as found:
            for _ in range(passes):
                model(*inputs, **keywords)
                found.discard()
            return found.sites, []
    except UnsupportedSiteError as error:
        refused = str(error)
    with Dice(model) as dice, convert_dropout(model, others="keep") as found:
        model(*inputs, **keywords)
        return found.sites, dice.found or [refused]


class Dice(TorchFunctionMode):
    """Notes where a model moves torch's generator: what dropout is left after convert_dropout has taken its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(before, torch.get_rng_state()):
            said = f"{self._here()} ({getattr(func, '__name__', func)})"
            if said not in self.found:
                self.found.append(said)
        return result

    def _here(self) -> str:
        """The innermost module that is running."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path or "(model)"
            frame = frame.f_back
        return "(model)"


# ---------------------------------------------------------------------------------------------- rates of 0


def advice(spec: str, model: nn.Module) -> str:
    """How this model is given rates above 0."""
    kind = spec.partition(":")[0]
    names = list({"timm": _timm_rates, "hf": _configured_rates, "torch": _torch_rates}.get(kind, lambda _: ())(model))
    if names:
        return f"--set {names[0]}=0.1" + (f" (or {', '.join(names[1:])})" if names[1:] else "")
    if kind == "torch":
        takers = (type(one).__name__ for one in model.modules() if "dropout" in _arguments(one))
        taker = next(takers, None)
        return f"{taker}(…, dropout=0.1)" if taker else "choose a module that has dropout"
    if kind in ("timm", "hf"):
        return f"choose a model with dropout: {type(model).__name__} has none that could be set"
    return f"give rates above 0 where {spec.rpartition(':')[2]} builds it, or --set an argument of it"


def _timm_rates(model: nn.Module) -> Iterator[str]:
    return (name for name in TIMM_RATES if name in _arguments(model))


def _torch_rates(model: nn.Module) -> Iterator[str]:
    return (name for name in ("dropout", "p") if name in _arguments(model))


def _configured_rates(model: nn.Module) -> Iterator[str]:
    """Numbers of the configuration that are named for dropout, and not for parts that the bare model lacks."""
    config: Any = model.config
    for name, value in config.to_dict().items():
        rate = "drop" in name and isinstance(value, float | int) and not isinstance(value, bool)
        if rate and not any(part in name for part in ELSEWHERE):
            yield name


def _arguments(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(type(module)).parameters
