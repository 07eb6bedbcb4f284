"""Hugging Face Trainer: the penalty joins the training loss, is logged, and resumes with a checkpoint.

    from explicit_dropout.integrations.huggingface import ExplicitDropoutTrainer

    reg = xd.ExplicitDropout(model, xd.inverted(0.1), value=1e-3, feed_forward=1e-3)
    trainer = ExplicitDropoutTrainer(model, args, train_dataset=data, regulariser=reg)

A Trainer of your own takes the mixin first: `class MyTrainer(ExplicitDropoutMixin, Seq2SeqTrainer)`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from explicit_dropout.attached import LayerLevel
from explicit_dropout.errors import InputError
from explicit_dropout.integrations import called, check_inside, checked

STATE_FILE = "explicit_dropout.json"
"""Where a checkpoint keeps the state of the regulariser, beside those of the optimiser and the scheduler."""


class ExplicitDropoutMixin:
    """Adds a regulariser's penalty to the training loss of any `Trainer`.

    Under gradient accumulation the penalty of an update is the mean over its batches, however the Trainer scales its
    own loss. Evaluation reports the loss without the penalty. `Trainer.log` gets `penalty`, `penalty/<component>` and
    `strength/<component>` beside the loss.

    Args:
        regulariser: an `ExplicitDropout`, or what `convert_dropout` returned, of the model that is trained.
    """

    def __init__(self, *args: Any, regulariser: LayerLevel, **kwargs: Any) -> None:
        checked(regulariser)
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.args.n_gpu > 1:
            raise InputError(
                "n_gpu",
                "1 for each process: nn.DataParallel runs copies of the model, which are not regularised. Launch with "
                "torchrun or accelerate, or set CUDA_VISIBLE_DEVICES",
                trainer.args.n_gpu,
            )
        model = trainer.model
        check_inside(
            model, regulariser, f"attached to the model that is trained ({type(model).__name__}) or to a part of it"
        )
        self.regulariser = regulariser
        self._journal = Journal()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        parent: Any = super()
        result = parent.compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        if not (model.training and torch.is_grad_enabled()):
            return result
        loss, outputs = result if return_outputs else (result, None)
        penalty, values = called(self.regulariser)
        self._journal.note(values)
        if self._loss_is_scaled(num_items_in_batch):
            penalty = penalty / self._batches_of_update()
        loss = loss + penalty.to(loss)
        return (loss, outputs) if return_outputs else loss

    def _loss_is_scaled(self, num_items_in_batch: object) -> bool:
        """Whether the loss is a share of the whole update already, decided as `training_step` does."""
        trainer: Any = self
        said = getattr(trainer, "loss_is_scaled_for_ga", None)
        if said is not None:
            return bool(said)
        by_model = trainer.model_accepts_loss_kwargs and num_items_in_batch is not None
        return by_model or trainer.compute_loss_func is not None

    def _batches_of_update(self) -> int:
        trainer: Any = self
        return int(getattr(trainer, "current_gradient_accumulation_steps", trainer.args.gradient_accumulation_steps))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # a training log; evaluation and the final summary have other keys
            logs.update(self._journal.read())
        parent: Any = super()
        parent.log(logs, *args, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        parent: Any = super()
        parent._save_optimizer_and_scheduler(output_dir)
        trainer: Any = self
        if trainer.args.should_save:
            Path(output_dir, STATE_FILE).write_text(json.dumps(self.regulariser.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        parent: Any = super()
        parent._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        file = Path(checkpoint, STATE_FILE)
        if file.exists():
            self.regulariser.load_state_dict(json.loads(file.read_text()))
        else:
            logging.getLogger(__name__).warning(
                "%s has no %s: it was saved without a regulariser, whose schedules start now", checkpoint, STATE_FILE
            )


class ExplicitDropoutTrainer(ExplicitDropoutMixin, Trainer):
    """`transformers.Trainer` with a `regulariser`."""


class Journal:
    """What to log of a regulariser: means since the last reading, kept on the device until then."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor | float] = {}
        self.count = 0

    def note(self, values: Mapping[str, Tensor | float]) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        self.count += 1

    def read(self) -> dict[str, float]:
        """The means since the last reading, as plain numbers; the one place that waits for a GPU."""
        means = {name: float(total) / max(self.count, 1) for name, total in self.sums.items()}
        self.sums, self.count = {}, 0
        return means
