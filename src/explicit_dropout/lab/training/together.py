"""Several runs trained as one program: every tensor has an axis for the models, and each run its own folder.

Runs fit together if they are of one shape (`fits`): their seeds, splits, strengths, learning rates, weight decay and
schedules may differ. Each sees the same batches and the same random numbers as it would alone, so it comes to the same
result within rounding; what is written is the same, and either way of training goes on from a checkpoint of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.data import Dataset, Split
from explicit_dropout.lab.store import RunFolder
from explicit_dropout.lab.training.batches import batches, steps_per_epoch
from explicit_dropout.lab.training.environment import environment
from explicit_dropout.lab.training.evaluation import EVALUATION_BATCH, TRAINING_EXAMPLES_SCORED, predictions, scores
from explicit_dropout.lab.training.loop import build, number_of_parameters
from explicit_dropout.lab.training.optimisers import optimiser, weight_decay
from explicit_dropout.lab.training.randomness import generator
from explicit_dropout.lab.training.record import Record, Weights, cpu_copy
from explicit_dropout.lab.training.schedule import learning_rate
from explicit_dropout.lab.training.stacked import Adam, Stack, mapped_to_all
from explicit_dropout.lab.training.stacked_step import Objective, StackedStep
from explicit_dropout.lab.training.watching import TensorBoard, Watch

Finished = Callable[[Run], None]


def fits(run: Run) -> Run:
    """What runs that are trained together have in common: the run with everything else at one value."""
    if run.training.optimiser == "muon" or run.treatment.is_loss_level or run.treatment.twins:
        return run  # alone: steps of whole matrices, second derivatives of what is transformed, or watched calls
    training = replace(
        run.training, epochs=1, learning_rate=1.0, weight_decay=0.0, schedule="constant", warm_up_epochs=0.0,
        final_learning_rate=0.0, clip=0.0, select="last", validate_every=1,
    )  # fmt: skip
    treatment = replace(run.treatment, strength=1.0 if run.treatment.strength else 0.0)
    return replace(
        run, seed=0, data=replace(run.data, split=0, label_noise=0.0), treatment=treatment, training=training
    )


@dataclass
class Member:
    """One of the runs."""

    run: Run
    folder: RunFolder
    dataset: Dataset
    record: Record
    watch: Watch


class Together:
    """Trains runs that fit together, from wherever their folders say they are. The caller holds the locks."""

    def __init__(
        self,
        runs: Sequence[tuple[Run, RunFolder, Dataset]],
        execution: Execution,
        device: torch.device,
        on_finished: Finished | None = None,
    ) -> None:
        self.execution, self.device, self.on_finished = execution, device, on_finished
        self.members = [
            Member(
                run, folder, dataset, Record(run, folder, dataset, execution.checkpoint_seconds),
                TensorBoard(folder.path) if execution.tensorboard else Watch(),
            )
            for run, folder, dataset in runs
        ]  # fmt: skip
        first = self.members[0]
        self.steps = steps_per_epoch(first.run, first.dataset.train)
        models = [build(member.run, member.dataset, device) for member in self.members]
        self.objective = Objective(models[0], first.run)
        self.stack = Stack(models[0], [model.state_dict() for model in models])
        self.adam = Adam(
            self.stack.weights,
            [weight_decay(member.run) for member in self.members],
            decoupled=first.run.training.optimiser == "adamw",
        )
        self.step: StackedStep | None = None

    def carry_out(self) -> None:
        """Until every run is finished."""
        ready = []
        for row, member in enumerate(self.members):
            described = environment(self.execution, self.device, member.dataset)
            try:
                state = member.record.begin({**described, "trained_together": len(self.members)})
            except Exception:  # whatever it is: left to be trained alone, where it is told
                continue
            ready.append(row)
            if state is not None:
                self.stack.weights[row] = self.stack.row(state["model"])
                self.adam.restore(row, state["optimiser"])
            total = member.run.training.epochs * self.steps
            member.watch.begin(member.run, total, member.record.epochs_done * self.steps)
        self._keep(ready)
        try:
            self._leave()
            while self.members:
                self._epoch()
                self._leave()
        finally:
            for member in self.members:  # none, unless it was broken off
                member.watch.end(None)

    # ------------------------------------------------------------------------------------------ training

    def _epoch(self) -> None:
        """One epoch of every run, each its own: runs that were resumed may be further than others."""
        members, began = self.members, time.perf_counter()
        self.objective.train()
        rates = [
            [learning_rate(m.run.training, m.record.epochs_done * self.steps + step, self.steps) for m in members]
            for step in range(self.steps)
        ]
        coefficients = self.adam.coefficients(rates)
        masks = [generator(m.run.seed, m.record.epochs_done, "masks", self.device) for m in members]
        streams = [batches(m.run, m.dataset.train, m.record.epochs_done) for m in members]
        if self.step is None:
            runs = [member.run for member in members]
            self.step = StackedStep(self.objective, self.stack, self.adam, runs, self.execution)
        self.step.reset()
        for number, examples in enumerate(zip(*streams, strict=True)):
            self.step(examples, masks, coefficients[number])
        means = self.step.means(self.steps)  # waits for the device
        seconds = (time.perf_counter() - began) / len(members)  # so that the seconds of all runs add up to what passed
        validating = [row for row, m in enumerate(members) if m.record.validates(m.record.epochs_done + 1)]
        validation = self._scores(self.stack.weights, validating, lambda dataset: dataset.validation)
        for row, member in enumerate(members):
            line = member.record.epoch(
                means[row],
                validation.get(row),
                lambda row=row: self._weights(row),  # type: ignore[misc]
                step=(member.record.epochs_done + 1) * self.steps,
                learning_rate=rates[-1][row],
                seconds=seconds,
                examples=self.steps * member.run.training.batch,
            )
            if member.record.checkpoint_due():
                member.record.checkpoint(self._state(row))
            member.watch.epoch(line)

    # ------------------------------------------------------------------------------------------ what is kept

    def _weights(self, row: int) -> Weights:
        return self.stack.by_name(self.stack.weights[row])

    def _state(self, row: int) -> dict[str, Any]:
        """As the run alone would write it."""
        alone = optimiser(self.objective.model, self.members[row].run, self.device)
        state = self.adam.state(row, self.stack, alone.state_dict()["param_groups"])
        return {"model": cpu_copy(self._weights(row)), "optimiser": cpu_copy(state)}

    # ------------------------------------------------------------------------------------------ scores and ends

    @torch.no_grad()
    def _scores(
        self,
        weights: Tensor,
        rows: Sequence[int],
        chosen: Callable[[Dataset], Split],
        examples: int | None = None,
    ) -> dict[int, dict[str, float | None]]:
        """Scores of some of the models, each on its own examples; models with the same examples go together."""
        self.objective.eval()
        found: dict[int, dict[str, float | None]] = {}
        for dataset in {id(self.members[row].dataset): self.members[row].dataset for row in rows}.values():
            sharing = [row for row in rows if self.members[row].dataset is dataset]
            parameters = self.stack.by_name(weights[sharing])
            at_once = max(EVALUATION_BATCH // len(sharing), 1)

            def predict(x: Tensor, parameters: dict[str, Tensor] = parameters, at_once: int = at_once) -> Tensor:
                with self.objective.autocast(x.device):
                    parts = [mapped_to_all(self.objective.model, parameters, part) for part in torch.split(x, at_once)]
                return torch.cat(parts)

            logits, targets = predictions(predict, chosen(dataset), examples)
            found |= {row: scores(dataset, logits[:, place], targets) for place, row in enumerate(sharing)}
        return found

    def _leave(self) -> None:
        """Finish the runs that are over, and go on without them."""
        over = [row for row, member in enumerate(self.members) if member.record.over]
        if not over:
            return
        tested = self.stack.weights.clone()
        for row in over:
            best = self.members[row].record.best_weights
            if best is not None:
                tested[row] = self.stack.row(best)
        test = self._scores(tested, over, lambda dataset: dataset.test)
        train = self._scores(tested, over, lambda dataset: dataset.train, TRAINING_EXAMPLES_SCORED)
        validation = self._scores(tested, over, lambda dataset: dataset.validation)
        for row in over:
            member = self.members[row]
            keep = self._state(row) if self.execution.keep_checkpoint else None
            if keep is not None:
                keep["model"] = cpu_copy(self.stack.by_name(tested[row]))
            summary = member.record.finish(
                test[row], train[row], validation[row],
                parameters=number_of_parameters(self.objective.model), keep=keep,
            )  # fmt: skip
            member.watch.end(summary)
            if self.on_finished is not None:
                self.on_finished(member.run)
        self._keep([row for row in range(len(self.members)) if row not in over])

    def _keep(self, rows: list[int]) -> None:
        """Go on with these only."""
        if len(rows) < len(self.members):
            self.members = [self.members[row] for row in rows]
            self.stack.weights = self.stack.weights[rows]
            self.adam.keep(rows)
            self.step = None  # it is one of other tensors


def bytes_per_model(run: Run, dataset: Dataset, device: torch.device) -> int:
    """Memory that one more model needs in a step: weights, gradients, moments, and what the backward pass needs."""
    objective = Objective(build(run, dataset, device), run)
    weights = sum(parameter.nbytes for parameter in objective.parameters())
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        task, penalty, *_ = objective(*next(batches(run, dataset.train, 0)))
    del task, penalty
    return 6 * weights + sum(kept.values())
