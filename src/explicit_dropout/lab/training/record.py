"""The course of one run as it is written down: a line for each epoch, the weights to be tested, the summary."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from explicit_dropout.errors import StoreError
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.data import Dataset
from explicit_dropout.lab.store import SPREAD, RunFolder

Weights = dict[str, Tensor]


class Record:
    """Follows a run through its epochs. Engines that train several runs at once have one for each."""

    def __init__(self, run: Run, folder: RunFolder, dataset: Dataset, checkpoint_seconds: float) -> None:
        self.run, self.folder, self.metric, self.checkpoint_seconds = run, folder, dataset.metric, checkpoint_seconds
        self.epochs_done, self.diverged = 0, False
        self.seconds, self.examples = 0.0, 0
        self.best: float | None = None
        self.best_epoch = 0
        self.best_weights: Weights | None = None
        self._saved_at = time.monotonic()

    def begin(self, environment: Mapping[str, Any]) -> dict[str, Any] | None:
        """Write what is run and where; return the state to go on from, if there is one.

        A run that was begun on other data is refused; one that was begun on another machine says so ("before").
        """
        self.folder.write_config()
        state, before = self.folder.load_checkpoint(), self.folder.environment()
        if state is not None:
            self._restore(state["record"])
            if before is not None:
                environment = self._continued(environment, before)
        self.folder.write_environment(environment)
        return state

    def _continued(self, environment: Mapping[str, Any], before: dict[str, Any]) -> Mapping[str, Any]:
        """The environment of a run that goes on, with those that it had before."""
        for name in ("fingerprint", "division"):
            now, then = (e.get("dataset", {}).get(name) for e in (environment, before))
            if now != then:
                raise StoreError(
                    f"{self.folder.path} was begun on other data than those at hand: their {name} was {then} and is "
                    f"{now}. Bring the data back, or move the folder away, and the run starts anew."
                )
        earlier = before.pop("before", [])
        changed = {name: value for name, value in before.items() if environment.get(name) != value}
        return {**environment, "before": [*earlier, changed] if changed else earlier}

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train."""
        return self.diverged or self.epochs_done >= self.run.training.epochs

    def validates(self, epoch: int) -> bool:
        """Whether this epoch, counted from 1, ends with a validation."""
        return epoch % self.run.training.validate_every == 0 or epoch == self.run.training.epochs

    def epoch(
        self,
        means: Mapping[str, Any],
        validation: Mapping[str, float | None] | None,
        weights: Callable[[], Weights],
        *,
        step: int,
        learning_rate: float,
        seconds: float,
        examples: int,
    ) -> dict[str, Any]:
        """Write the line of the epoch just done and keep its weights if they are the best so far."""
        self.epochs_done += 1
        self.seconds, self.examples = self.seconds + seconds, self.examples + examples
        self.diverged = not math.isfinite(means["train_loss"] + means["penalty"])
        line: dict[str, Any] = {"epoch": self.epochs_done, "step": step, "learning_rate": learning_rate}
        line |= {name: _finite(value) for name, value in means.items()}
        if validation is not None:
            line["validation"] = dict(validation)
            value = validation.get(self.metric)
            if self.run.training.select == "best" and value is not None and (self.best is None or value > self.best):
                self.best, self.best_epoch = value, self.epochs_done
                self.best_weights = {name: tensor.detach().cpu().clone() for name, tensor in weights().items()}
        line["timing"] = {"seconds": seconds, "examples_per_second": examples / max(seconds, 1e-9)}
        self.folder.append_metrics(line)
        return line

    def checkpoint_due(self) -> bool:
        return not self.over and time.monotonic() - self._saved_at >= self.checkpoint_seconds

    def checkpoint(self, state: Mapping[str, Any]) -> None:
        """Save the state of training after the epochs done so far."""
        self.folder.save_checkpoint({"epoch": self.epochs_done, "record": self._state(), **state})
        self._saved_at = time.monotonic()

    def finish(
        self,
        test: Mapping[str, float | None],
        train: Mapping[str, float | None],
        validation: Mapping[str, float | None],
        *,
        parameters: int,
        keep: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Write the summary. `keep` is a last state to leave in the folder, for those who want the weights."""
        if keep is not None:
            self.checkpoint(keep)
        summary: dict[str, Any] = {
            "row": self.run.row,
            "metric": self.metric,
            "validation": dict(validation),
            "test": dict(test),
            "train": dict(train),
            "train_examples": SPREAD,
            "epochs": self.epochs_done,
            "selected_epoch": self.best_epoch or self.epochs_done,
            "diverged": self.diverged,
            "parameters": parameters,
            "timing": {
                "seconds": self.seconds,
                "examples_per_second": self.examples / max(self.seconds, 1e-9),
            },
        }
        self.folder.finish(summary, keep_checkpoint=keep is not None)
        return self.folder.summary()

    def _state(self) -> dict[str, Any]:
        return {
            "diverged": self.diverged,
            "seconds": self.seconds,
            "examples": self.examples,
            "best": self.best,
            "best_epoch": self.best_epoch,
            "best_weights": self.best_weights,
            "epochs_done": self.epochs_done,
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        for name in self._state():
            setattr(self, name, state[name])


def _finite(value: Any) -> Any:
    """Numbers that are not finite are None: JSON knows no NaN."""
    if isinstance(value, Mapping):
        return {name: _finite(inner) for name, inner in value.items()}
    return value if math.isfinite(value) else None


def cpu_copy(state: Any) -> Any:
    """A state with its tensors on the CPU, in plain containers."""
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, Mapping):
        return {name: cpu_copy(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [cpu_copy(value) for value in state]
    return state


def load_optimiser(optimiser: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put the moments of a checkpoint back, but not its settings, which may be those of another device."""
    settings = [{name: value for name, value in group.items() if name != "params"} for group in optimiser.param_groups]
    optimiser.load_state_dict(dict(state))
    for group, kept in zip(optimiser.param_groups, settings, strict=True):
        group.update(kept)
