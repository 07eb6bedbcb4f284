"""`explicit-dropout train`: one run, from data to test score."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from explicit_dropout.cli.output import console
from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Execution, Run
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
        config: Take the run from a config.json of a store; the other settings are then left alone.
        store: Folder of results.
        quiet: No progress display.
    """
    if config is not None:
        run = read_config(config)
    folder = Store(store).folder(run)
    out = console()
    if not quiet:
        out.print(f"[bold]{run.row}[/] on {run.data.name}, seed {run.seed} [dim]→ {folder.path}[/]")
    summary = train_run(run, folder, execution, None if quiet else Display(out))
    if not quiet:
        show(summary, out)
    return 0


def read_config(path: Path) -> Run:
    """The run of a config.json."""
    try:
        return Run.from_json(json.loads(path.read_text())["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("config", "the config.json of a run folder", f"{path}: {error}") from error


def show(summary: Mapping[str, Any], out: Any) -> None:
    metric = summary["metric"]
    parts = [
        f"{name} {100 * summary[name][metric]:.2f} %" if summary[name].get(metric) is not None else f"{name} –"
        for name in ("train", "validation", "test")
    ]
    out.print(f"{metric.replace('_', ' ')}: {', '.join(parts)} [dim](epoch {summary['selected_epoch']})[/]")
    if summary["diverged"]:
        out.print(f"[bold red]The loss was not finite in epoch {summary['epochs']}; training stopped there.[/]")


class Display(Watch):
    """A progress bar with loss, penalty by component, accuracy and speed."""

    interval = 0.5

    def __init__(self, out: Any) -> None:
        self.progress_bar = Progress(
            BarColumn(bar_width=24), TextColumn("{task.description}"), TimeElapsedColumn(), TextColumn("of about"),
            TimeRemainingColumn(elapsed_when_finished=True), console=out, transient=False,
        )  # fmt: skip
        self.task: Any = None
        self.epochs, self.line = 0, ""
        self.strength = 0.0

    def begin(self, run: Run, steps: int, done: int) -> None:
        self.epochs, self.strength = run.training.epochs, run.treatment.strength
        self.task = self.progress_bar.add_task("", total=steps, completed=done)
        self.progress_bar.start()

    def progress(self, step: int, means: Mapping[str, Any]) -> None:
        self.progress_bar.update(self.task, completed=step, description=self.text(means))

    def epoch(self, line: Mapping[str, Any]) -> None:
        validated = line.get("validation", {})
        value = validated.get("mean_average_precision", validated.get("accuracy"))
        self.line = f"epoch {line['epoch']}/{self.epochs}" + (
            "" if value is None else f", validation {100 * value:.1f} %"
        )
        self.line += f", {line['timing']['examples_per_second']:,.0f} examples/s"
        self.progress_bar.update(self.task, completed=line["step"], description=self.text(line))

    def text(self, means: Mapping[str, Any]) -> str:
        loss, accuracy = means.get("train_loss"), means.get("train_accuracy")
        parts = [self.line] if self.line else []
        parts += [] if loss is None else [f"loss {loss:.3f}"]
        for component, value in by_component(means.get("terms") or {}).items():
            parts.append(f"{component} {self.strength * value:.3g}")
        parts += [] if accuracy is None else [f"accuracy {100 * accuracy:.1f} %"]
        return ", ".join(parts)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        del summary
        self.progress_bar.stop()
