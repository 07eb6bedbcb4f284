"""The training loop: one run, from its settings to its summary."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from explicit_dropout.lab import data, penalties
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.data import Dataset, Split
from explicit_dropout.lab.models import Transformer
from explicit_dropout.lab.store import RunFolder
from explicit_dropout.lab.training.batches import batches, steps_per_epoch
from explicit_dropout.lab.training.environment import environment, prepare
from explicit_dropout.lab.training.evaluation import TRAINING_EXAMPLES_SCORED, predictions, scores
from explicit_dropout.lab.training.processes import Place, processes
from explicit_dropout.lab.training.randomness import mixed
from explicit_dropout.lab.training.record import Record, cpu_copy, load_optimiser
from explicit_dropout.lab.training.schedule import learning_rate
from explicit_dropout.lab.training.step import Step
from explicit_dropout.lab.training.watching import TensorBoard, Watch, Watches


def train(
    run: Run,
    folder: RunFolder,
    execution: Execution | None = None,
    watch: Watch | None = None,
    dataset: Dataset | None = None,
) -> dict[str, Any]:
    """Train, or go on training, and return the summary; a finished run only returns it.

    Under `torchrun` every process calls this; the first one writes.
    """
    execution = execution or Execution()
    if folder.finished:
        return folder.summary()
    prepare(execution)
    with processes(run, execution) as place, ExitStack() as held:
        if place.first:
            held.enter_context(folder.lock())
        if place.shared(folder.finished):  # by another process, before the lock was ours
            return folder.summary()
        dataset = (dataset or data.load(run.data, execution.data_root)).to(place.device)
        watches = [watch] if watch is not None and place.first else []
        if execution.tensorboard and place.first:
            watches.append(TensorBoard(folder.path))
        return _Training(run, folder, execution, Watches(watches), dataset, place).carry_out()


def build(run: Run, dataset: Dataset, device: torch.device | str = "cpu") -> Transformer:
    """The model of a run with the initial weights of its seed, which are the same on every device."""
    torch.manual_seed(mixed(run.seed, 0, "weights"))
    return Transformer(dataset.shape, len(dataset.classes), run.model, run.treatment).to(device)


class _Training:
    """One process of one training."""

    def __init__(
        self, run: Run, folder: RunFolder, execution: Execution, watch: Watch, dataset: Dataset, place: Place
    ) -> None:
        self.run, self.folder, self.execution, self.watch = run, folder, execution, watch
        self.dataset, self.place = dataset, place
        self.record = Record(run, folder, dataset, execution.checkpoint_seconds)
        self.model = build(run, dataset, place.device)
        penalties.refuse(run.treatment, execution, dataset.metric)
        penalty = penalties.attach(self.model, run.treatment)
        forward: Callable[[Tensor], Tensor] = self.model
        if place.ranks > 1:
            forward = DistributedDataParallel(self.model)
        if execution.compile:
            # Or this model is taken for one that the process has compiled before: the compiler does not look at hooks.
            torch.compiler.reset()
            forward = torch.compile(forward)
        self.step = Step(self.model, forward, penalty, run, execution, place.device)
        self.steps = steps_per_epoch(run, dataset.train)

    def carry_out(self) -> dict[str, Any]:
        place, record = self.place, self.record
        described = environment(self.execution, place.device, self.dataset, place.ranks)
        state = record.begin(described) if place.first else None
        self._restore(state)
        self.watch.begin(self.run, self.run.training.epochs * self.steps, record.epochs_done * self.steps)
        summary = None
        try:
            while not place.shared(record.over):
                self._epoch()
            summary = self._finish()
        finally:
            self.watch.end(summary)
        return summary

    def _restore(self, state: dict[str, Any] | None) -> None:
        """Every process takes the state from the file of the first, which has looked at it already."""
        if self.place.shared(state is not None):
            state = state or torch.load(self.folder.path / "checkpoint.pt", map_location="cpu", weights_only=True)
            self.model.load_state_dict(state["model"])
            load_optimiser(self.step.optimiser, state["optimiser"])
            self.record.epochs_done = state["epoch"]
        self.place.wait()

    def _epoch(self) -> None:
        run, place, record = self.run, self.place, self.record
        number, began = record.epochs_done, time.perf_counter()
        torch.manual_seed(mixed(run.seed, number, "masks", place.rank))
        self.model.train()
        self.step.reset()
        looked, rate = began, 0.0
        for index, (x, y) in enumerate(batches(run, self.dataset.train, number, rank=place.rank, ranks=place.ranks)):
            step = number * self.steps + index
            rate = learning_rate(run.training, step, self.steps)
            self.step(x, y, rate)
            if self.watch.interval is not None and (now := time.perf_counter()) - looked > self.watch.interval:
                looked = now
                self.watch.progress(step + 1, self.step.means())
        means = self.step.means(place.ranks)  # waits for the device
        seconds = time.perf_counter() - began
        if not place.first:
            record.epochs_done += 1
            return
        validation = self._scores(self.dataset.validation) if record.validates(number + 1) else None
        done = number + 1
        line = record.epoch(
            means, validation, self.model.state_dict, step=done * self.steps, learning_rate=rate,
            seconds=seconds, examples=self.steps * run.training.batch,
        )  # fmt: skip
        if record.checkpoint_due():
            record.checkpoint(self._state())
        self.watch.epoch(line)

    def _state(self) -> dict[str, Any]:
        return {"model": cpu_copy(self.model.state_dict()), "optimiser": cpu_copy(self.step.optimiser.state_dict())}

    @torch.no_grad()
    def _scores(self, split: Split, examples: int | None = None) -> dict[str, float | None]:
        self.model.eval()

        def predict(x: Tensor) -> Tensor:
            with self.step.autocast():
                return self.model(x)  # type: ignore[no-any-return]

        return scores(self.dataset, *predictions(predict, split, examples))

    def _finish(self) -> dict[str, Any]:
        if not self.place.first:
            self.place.wait()
            return self.folder.summary()
        record = self.record
        if record.best_weights is not None:
            self.model.load_state_dict(record.best_weights)
        summary = record.finish(
            test=self._scores(self.dataset.test),
            train=self._scores(self.dataset.train, TRAINING_EXAMPLES_SCORED),
            validation=self._scores(self.dataset.validation),
            parameters=number_of_parameters(self.model),
            keep=self._state() if self.execution.keep_checkpoint else None,
        )
        self.place.wait()
        return summary


def number_of_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
