"""One training step of many models at once, on a batch of each; eager, compiled, or replayed as a CUDA graph.

The compiler does not see through `vmap`, autograd and hooks together. So a step is traced first, gradients included:
what is left of it is a list of operators on stacked tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from explicit_dropout.lab import metrics, penalties
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.training.capture import Undo, captured
from explicit_dropout.lab.training.stacked import Adam, Stack, clip, mapped
from explicit_dropout.stochastic import recording


class StackedStep:
    """Trains models on one batch of each after the other, and sums up what happens.

    All that a step reads and writes stays where it is, so that a CUDA graph can hold it: batches, random numbers and
    coefficients are put in their places beforehand.

    Args:
        objective: the module that all models share.
        runs: what each model is trained for, in the order of the stack.
        execution: whether the step is compiled, and whether it is replayed as a CUDA graph.
    """

    def __init__(
        self, objective: Objective, stack: Stack, adam: Adam, runs: Sequence[Run], execution: Execution
    ) -> None:
        self.objective, self.stack, self.adam, self.execution = objective, stack, adam, execution
        self.device = stack.weights.device
        self.strengths = torch.tensor([run.treatment.strength for run in runs], device=self.device)
        largest = [[run.training.clip or float("inf")] for run in runs]
        self.largest = torch.tensor(largest, device=self.device) if any(run.training.clip for run in runs) else None
        self.batch: list[Tensor] = []
        self.numbers: list[Tensor] = []
        self.coefficients = torch.empty(3, len(runs), 1, dtype=stack.weights.dtype, device=self.device)
        self.site_names: list[str] = []
        self.sums: Tensor | None = None
        self.differentiate: Callable[..., tuple[Tensor, Tensor]] = self._differentiate
        self.update: Callable[[Tensor, Tensor, Tensor], None] = adam.step
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(
        self, examples: Sequence[tuple[Tensor, Tensor]], masks: Sequence[torch.Generator], coefficients: Tensor
    ) -> None:
        """One step.

        Args:
            examples: inputs and targets for each model.
            masks: where the random numbers of each come from.
            coefficients: of Adam, for this step.
        """
        stacked = [list(parts) for parts in zip(*examples, strict=True)]
        if self.batch:
            for place, parts in zip(self.batch, stacked, strict=True):
                torch.stack(parts, out=place)
        else:
            self.batch = [torch.stack(parts) for parts in stacked]
            self.numbers = self._places(examples[0][0], len(masks))
            if self.execution.compile:
                self._compile()
        for row, mask in enumerate(masks):
            for place in self.numbers:
                torch.rand(place.shape[1:], generator=mask, out=place[row])
        self.coefficients.copy_(coefficients)
        if not self.execution.cuda_graphs:
            self._train()
            return
        if self.graph is None:
            self.graph = captured(self._train, self._remember, self.device)
        self.graph.replay()

    def _places(self, x: Tensor, models: int) -> list[Tensor]:
        """Room for the random numbers that a forward pass of every model asks for."""
        with recording() as shapes, torch.no_grad():
            self.objective.model(x)
        return [torch.empty(models, *shape, device=self.device) for shape in shapes]

    def _compile(self) -> None:
        torch.compiler.reset()  # or Adam's step is compiled anew for each number of models, which it may be eight times
        self._differentiate(self.stack.weights, self.batch, self.numbers)  # what penalties keep is made now, not traced
        traced = make_fx(lambda *given: self._differentiate(*given))(self.stack.weights, self.batch, self.numbers)
        self.differentiate = torch.compile(traced, fullgraph=True)
        self.update = torch.compile(self.adam.step, fullgraph=True)

    @torch.no_grad()
    def _train(self) -> None:
        gradients, values = self.differentiate(self.stack.weights, self.batch, self.numbers)
        self.update(self.stack.weights, gradients, self.coefficients)
        if self.sums is None:
            self.sums = torch.zeros_like(values, dtype=torch.float64)
        self.sums += values

    @torch.enable_grad()
    def _differentiate(
        self, weights: Tensor, batch: Sequence[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The gradients of all weights, clipped, and what is summed up for every model."""
        weights = weights.detach().requires_grad_()
        task, penalty, accuracy, terms = mapped(
            self.objective, self.stack.by_name(weights, "model."), *batch, numbers=numbers
        )
        penalty = self.strengths * penalty
        (gradients,) = torch.autograd.grad((task + penalty).sum(), weights)
        if self.largest is not None:
            gradients = clip(gradients, self.largest)
        self.site_names = list(terms)
        return gradients, torch.stack([task, penalty, accuracy, *terms.values()], -1).detach()

    def reset(self) -> None:
        """Start summing anew."""
        if self.sums is not None:
            self.sums.zero_()

    def means(self, steps: int) -> list[dict[str, Any]]:
        """For every model means over so many steps: task loss, penalty, accuracy and the term of every site."""
        if self.sums is None:
            raise RuntimeError("no step since the models were put together")
        return [
            {
                "train_loss": task,
                "penalty": penalty,
                "train_accuracy": accuracy,
                "terms": dict(zip(self.site_names, terms, strict=True)),
            }
            for task, penalty, accuracy, *terms in (self.sums / steps).tolist()
        ]

    def _remember(self) -> Undo:
        """What puts weights and moments back to where they are now, and sums to zero."""
        changed = self.stack.weights, self.adam.first, self.adam.second
        before = [tensor.clone() for tensor in changed]

        def undo() -> None:
            for tensor, values in zip(changed, before, strict=True):
                tensor.copy_(values)
            self.reset()

        return undo


class Objective(nn.Module):
    """The model with its loss: task loss, Σ J without its strength, accuracy, and the terms of all sites."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        super().__init__()
        self.model, self.settings = model, run.training
        self.penalty = penalties.attach(model, run.treatment)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        with self.autocast(x.device):
            logits = self.model(x)
        task = metrics.task_loss(logits, y, self.settings.label_smoothing)
        accuracy = metrics.hits(logits, y).float().mean()
        if self.penalty is None:
            return task, torch.zeros_like(task), accuracy, {}
        return task, self.penalty.unweighted(), accuracy, self.penalty.terms()

    def autocast(self, device: torch.device) -> Any:
        half = self.settings.precision == "bfloat16"
        return torch.autocast(device.type, torch.bfloat16) if half else nullcontext()
