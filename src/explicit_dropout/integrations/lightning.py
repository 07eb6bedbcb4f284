"""Lightning: a callback that adds the penalty to the loss, logs it, and resumes with a checkpoint.

    from explicit_dropout.integrations.lightning import ExplicitDropoutCallback

    reg = xd.ExplicitDropout(module.encoder, xd.inverted(0.1), value=1e-3, feed_forward=1e-3)
    trainer = lightning.Trainer(callbacks=[ExplicitDropoutCallback(reg)])

Attach the regulariser to the model that `training_step` calls (`self.encoder(x)`), which is seldom the LightningModule.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from explicit_dropout.attached import LayerLevel
from explicit_dropout.errors import InputError
from explicit_dropout.integrations import called, check_inside, checked


class Joined(torch.autograd.Function):
    """A loss as it is, whose gradient goes on to a penalty too: as if it were loss + penalty."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, penalty: Tensor) -> Tensor:
        ctx.mark_dirty(loss)
        ctx.like = {"dtype": penalty.dtype, "device": penalty.device}
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.to(**ctx.like)


def join(loss: Tensor, penalty: Tensor) -> None:
    """Let the backward pass of this very tensor be that of loss + penalty.

    Its value stays, so what was kept for the backward pass (the root of an RMSE) is still right. The counter by which
    autograd notices changes is therefore put back.
    """
    try:
        with torch.autograd._unsafe_preserve_version_counter(loss):  # type: ignore[attr-defined]
            Joined.apply(loss, penalty)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        expected = "a tensor that the penalty can join: a result of its own, such as loss.clone(), no leaf and no view"
        raise InputError("loss", expected, str(error)) from error


class ExplicitDropoutCallback(Callback):
    """Adds a regulariser's penalty to the loss of every training batch, in one backward pass with it.

    The penalty is divided by `accumulate_grad_batches` and multiplied by the scale of mixed precision, as Lightning
    does with the loss. It joins the graph of the tensor that is about to be differentiated, so distributed strategies
    see a single backward pass; the value of the loss stays without it.

    Searches for a learning rate or a batch size (`Tuner`, `LearningRateFinder`, `BatchSizeFinder`) take callbacks away
    while they try values, so what they find is found without the penalty.

    In manual optimisation it joins the first `manual_backward` after a forward pass of the model; others go without.

    Args:
        regulariser: an `ExplicitDropout`, or what `convert_dropout` returned, of the model that `training_step` calls.
        log: whether to log `penalty`, `penalty/<component>` and `strength/<component>`.
    """

    def __init__(self, regulariser: LayerLevel, *, log: bool = True) -> None:
        self.regulariser, self.log = checked(regulariser), log
        self._backward: Counter[str] = Counter()
        """Backward passes of this epoch, "with" and "without" a penalty."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        del stage
        check_inside(pl_module, self.regulariser, f"attached to a model inside {type(pl_module).__name__}")
        known, here = weakref.ref(trainer), weakref.ref(self)

        def is_trial() -> bool:
            running: Any = known()
            return running is not None and running.state.status == "running" and here() not in running.callbacks

        self.regulariser._collector.is_trial = is_trial

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        self._backward.clear()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer, pl_module
        if self._backward["without"] and not self._backward["with"]:
            self.regulariser()  # which says why there was none

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        if not pl_module.automatic_optimization and not self.regulariser._collector.is_waiting():
            self._backward["without"] += 1
            return
        self._backward["with"] += 1
        if not self.log:
            penalty = self.regulariser()
        else:
            penalty, values = called(self.regulariser)
            pl_module.log_dict({name: torch.as_tensor(value) for name, value in values.items()})
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled: Tensor = penalty if scaler is None else scaler.scale(penalty)
        join(loss, scaled / trainer.accumulate_grad_batches)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        del trainer, batch, batch_idx
        if outputs is None and pl_module.automatic_optimization:  # training_step has skipped this batch
            self.regulariser.discard()

    def state_dict(self) -> dict[str, Any]:
        return dict(self.regulariser.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.regulariser.load_state_dict(state_dict)
