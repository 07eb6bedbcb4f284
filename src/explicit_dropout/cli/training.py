"""`explicit-dropout train`: one run, from data to test score."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from explicit_dropout.cli import FINE
from explicit_dropout.cli.output import console
from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.packing import located
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.training.loop import train as train_run
from explicit_dropout.lab.training.watching import Watch, by_component


def train(
    run: Annotated[Run, tyro.conf.arg(name="")] = Run(),  # noqa: B008  (frozen)
    execution: Annotated[Execution, tyro.conf.arg(name="")] = Execution(),  # noqa: B008  (frozen)
    config: Path | None = None,
    store: Path = Path("results"),
    quiet: bool = False,
) -> int:
    """Train one model under one treatment, and test it.

    What is trained is said by --data.…, --model.…, --treatment.…, --training.… and --seed; where and how, by the other
    options. The result is a folder of the store, named by the settings. The same command again goes on where the last
    one stopped, and only shows the result once it is finished.

    Try:
      explicit-dropout train --model.patch 2 --model.layers 2 --model.width 48 --model.heads 4
      explicit-dropout train --treatment.attention explicit_v --treatment.feed-forward explicit \\
          --treatment.strength 1e-3 --data.name cifar10 --device cuda --compile
      torchrun --nproc-per-node 2 -m explicit_dropout train --data.name cifar10 --device cuda

    Args:
        run: What is trained.
        execution: Where and how.
        config: Take the run from a config.json of a store, instead of saying what is trained.
        store: Folder of results.
        quiet: No progress display.
    """
    if config is not None:
        if run != Run():
            raise InputError("config", "the only setting of the run: it says everything about it", "others beside it")
        run = read_config(config)
    quiet = quiet or int(os.environ.get("RANK", "0")) > 0  # one of the processes of torchrun is enough to listen to
    folder = Store(store).folder(run)
    out = console()
    if not quiet:
        name, place = escape(run.data.name), escape(str(folder.path))
        out.print(f"[bold]{escape(run.row)}[/] on {name}, seed {run.seed} [dim]→ {place}[/]")
        if folder.finished:
            out.print("Finished already: shown from the store, not trained again. Another --store trains it once more.")
    summary = train_run(run, folder, execution, None if quiet else Display(out))
    if not quiet:
        show(summary, out)
    return FINE


def read_config(path: Path) -> Run:
    """The run of a config.json."""
    try:
        return Run.from_json(json.loads(located(path).read_bytes())["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        said = (error.strerror or "it is not there") if isinstance(error, OSError) else f"{error}".rstrip(".")
        said = f"it has no {error}" if isinstance(error, KeyError) else said
        raise InputError("config", "the config.json of a run folder", f"{path}: {said}") from error


def show(summary: Mapping[str, Any], out: Console) -> None:
    """The scores of a finished run, in one line."""
    metric = summary["metric"]
    parts = [
        f"{name} {100 * summary[name][metric]:.2f} %" if summary[name].get(metric) is not None else f"{name} –"
        for name in ("train", "validation", "test")
    ]
    out.print(f"{metric.replace('_', ' ')}: {', '.join(parts)} [dim](epoch {summary['selected_epoch']})[/]")
    if summary["diverged"]:
        out.print(f"[bold red]The loss was not finite in epoch {summary['epochs']}; training stopped there.[/]")


class Display(Watch):
    """A bar with the time left; below it loss, penalty by component, accuracy and speed, as they are just now."""

    interval = 0.5

    def __init__(self, out: Console) -> None:
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn(),
            TextColumn("left"), TimeRemainingColumn(), expand=True,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None)
        self.run = Run()
        self.means: Mapping[str, Any] = {}
        self.validated = self.speed = ""
        self.live = Live(get_renderable=self.render, console=out, refresh_per_second=4)

    def begin(self, run: Run, steps: int, done: int) -> None:
        self.run = run
        self.bar.update(self.task, total=steps, completed=done, description=f"epoch 0/{run.training.epochs}")
        self.live.start()

    def progress(self, step: int, means: Mapping[str, Any]) -> None:
        self.means = means
        self.bar.update(self.task, completed=step)

    def epoch(self, line: Mapping[str, Any]) -> None:
        self.means = line
        found = line.get("validation", {})
        value = found.get("mean_average_precision", found.get("accuracy"))
        if value is not None:
            self.validated = f"validation [bold]{100 * value:.2f} %[/]"
        self.speed = f"{line['timing']['examples_per_second']:,.0f} examples/s"
        described = f"epoch {line['epoch']}/{self.run.training.epochs}"
        self.bar.update(self.task, completed=line["step"], description=described)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        del summary
        self.live.stop()
        if not self.live.console.is_terminal:  # where Live leaves the line open
            self.live.console.print()

    def render(self) -> RenderableType:
        return Group(self.bar, Text.from_markup("  " + ", ".join(self.parts())))

    def parts(self) -> list[str]:
        """What is known just now, in words."""
        loss, accuracy = self.means.get("train_loss"), self.means.get("train_accuracy")
        penalties = [
            f"{component.replace('_', ' ')} {self.run.treatment.strength * value:.3g}"
            for component, value in by_component(self.means.get("terms") or {}).items()
        ]
        parts = [
            "" if loss is None else f"loss {loss:.3f}",
            f"penalty ({', '.join(penalties)})" if penalties else "",
            "" if accuracy is None else f"accuracy {100 * accuracy:.1f} %",
            self.validated,
            self.speed,
        ]
        return [part for part in parts if part]
