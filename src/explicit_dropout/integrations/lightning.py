"""Lightning: a callback that adds the penalty to the loss, logs it, and resumes with a checkpoint.

    from explicit_dropout.integrations.lightning import ExplicitDropoutCallback

    reg = xd.ExplicitDropout(module.encoder, xd.inverted(0.1), value=1e-3, feed_forward=1e-3)
    trainer = lightning.Trainer(callbacks=[ExplicitDropoutCallback(reg)])

Attach the regulariser to the model that `training_step` calls (`self.encoder(x)`), which is seldom the LightningModule.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from explicit_dropout.errors import InputError
from explicit_dropout.integrations import by_component
from explicit_dropout.regulariser import ExplicitDropout


class ExplicitDropoutCallback(Callback):
    """Adds a regulariser's penalty to the loss of every training batch, in one backward pass with it.

    The penalty is divided by `accumulate_grad_batches` and multiplied by the scale of mixed precision, as Lightning
    does with the loss. It is added in place to the tensor that is about to be differentiated, so distributed strategies
    see a single backward pass; the loss that Lightning reports stays without it.

    Args:
        regulariser: an `ExplicitDropout` attached to the model that `training_step` calls.
        log: whether to log `penalty`, `penalty/<component>` and `strength/<component>`.
    """

    def __init__(self, regulariser: ExplicitDropout, *, log: bool = True) -> None:
        if not isinstance(regulariser, ExplicitDropout):
            raise InputError("regulariser", "an ExplicitDropout attached to the model", type(regulariser).__name__)
        self.regulariser, self.log = regulariser, log

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        del trainer, stage
        if not any(module is self.regulariser.model for module in pl_module.modules()):
            raise InputError(
                "regulariser",
                f"attached to a model inside {type(pl_module).__name__}",
                f"one attached to another {type(self.regulariser.model).__name__}",
            )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        strengths = self.regulariser.strengths()
        penalty = self.regulariser()
        if self.log:
            values = {"penalty": penalty.detach(), **by_component(self.regulariser, strengths)}
            pl_module.log_dict({name: torch.as_tensor(value) for name, value in values.items()})
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled: Tensor = penalty if scaler is None else scaler.scale(penalty)
        loss.add_((scaled / trainer.accumulate_grad_batches).to(loss))

    def state_dict(self) -> dict[str, Any]:
        return dict(self.regulariser.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.regulariser.load_state_dict(state_dict)
