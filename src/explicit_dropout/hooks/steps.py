"""Steps of optimisers, as torch tells of them all: none may come between a forward pass and its penalty."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from explicit_dropout.hooks.collector import Collector

TOLERATED = 1
"""Steps in a row that may leave passes waiting without a word: one may be of a batch that is skipped."""


class StepHook:
    """After a step of any optimiser: passes of this model that wait for the regulariser have lost their weights.

    Fused optimisers do not tell tensors that they change them, so versions alone would not show it.
    """

    def __init__(self, collector: Collector, model: nn.Module) -> None:
        self.collector, self.model = weakref.ref(collector), weakref.ref(model)  # the hook is torch's, not the model's

    def __call__(self, optimiser: Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if torch.compiler.is_compiling():
            return
        collector, model = self.collector(), self.model()
        if collector is None or model is None or collector.inert or not collector.is_waiting():
            return
        if not self._changes(model, optimiser):
            return
        collector.steps += 1
        if collector.steps == TOLERATED + 1:
            warnings.warn(
                f"{type(optimiser).__name__} has made {collector.steps} steps without a call of the regulariser of "
                f"{type(model).__name__}: its penalty is part of no loss. Add reg() to the loss, discard() passes that "
                "are not to be regularised, or remove() it. With the Trainer of transformers use "
                "ExplicitDropoutTrainer, with Lightning ExplicitDropoutCallback.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _changes(self, model: nn.Module, optimiser: Optimizer) -> bool:
        own = {id(parameter) for parameter in model.parameters()}
        return any(id(parameter) in own for group in optimiser.param_groups for parameter in group["params"])


def watch_steps(collector: Collector, model: nn.Module) -> RemovableHandle:
    handle = register_optimizer_step_post_hook(StepHook(collector, model))
    weakref.finalize(collector, handle.remove).atexit = False
    return handle
