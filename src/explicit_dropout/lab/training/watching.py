"""Those who watch a training: nobody, a progress display in the terminal, TensorBoard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Run


class Watch:
    """Told how a training goes; does nothing with it."""

    interval: float | None = None
    """Seconds between two calls of `progress`; None for never (each makes a GPU wait)."""

    def begin(self, run: Run, steps: int, done: int) -> None:
        """Training starts, or goes on after `done` of its steps."""

    def progress(self, step: int, means: Mapping[str, Any]) -> None:
        """So far within an epoch."""

    def epoch(self, line: Mapping[str, Any]) -> None:
        """An epoch is over; `line` is what stands in metrics.jsonl."""

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """The run is finished, or was broken off (None)."""


class Watches(Watch):
    """Several at once."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        self.watches = watches
        intervals = [watch.interval for watch in watches if watch.interval is not None]
        self.interval = min(intervals) if intervals else None

    def begin(self, run: Run, steps: int, done: int) -> None:
        for watch in self.watches:
            watch.begin(run, steps, done)

    def progress(self, step: int, means: Mapping[str, Any]) -> None:
        for watch in self.watches:
            watch.progress(step, means)

    def epoch(self, line: Mapping[str, Any]) -> None:
        for watch in self.watches:
            watch.epoch(line)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        for watch in self.watches:
            watch.end(summary)


class TensorBoard(Watch):
    """Event files beside the metrics: losses, accuracy, and the penalty of every site."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "execution.tensorboard",
                "off, or tensorboard installed: pip install 'explicit-dropout[tensorboard]'",
                error,
            ) from error
        self.writer: Any = SummaryWriter(str(folder / "tensorboard"))

    def epoch(self, line: Mapping[str, Any]) -> None:
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, line["step"])

    def end(self, summary: Mapping[str, Any] | None) -> None:
        del summary
        self.writer.close()


def scalars(line: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line of metrics, with the names of what they are nested in before theirs."""
    found: dict[str, float] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            found[prefix + name] = float(value)
    return found


def by_component(terms: Mapping[str, float | None]) -> dict[str, float]:
    """The terms of all layers added up for each component (what stands behind the colon of a site's name)."""
    sums: dict[str, float] = {}
    for site, value in terms.items():
        component = site.rsplit(":", 1)[-1]
        sums[component] = sums.get(component, 0.0) + (float("nan") if value is None else value)
    return sums
