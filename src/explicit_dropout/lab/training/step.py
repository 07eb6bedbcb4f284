"""One training step: forward, penalty, backward, clipping, optimiser; eager, compiled, or replayed as a CUDA graph.

What is logged is summed on the device, so that a step never waits for the GPU.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

from explicit_dropout.lab import metrics
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.penalties import Penalty
from explicit_dropout.lab.training.capture import Undo, captured
from explicit_dropout.lab.training.optimisers import optimiser


class Step:
    """Trains a model on one batch after the other and sums up what happens."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[Tensor], Tensor],
        penalty: Penalty | None,
        run: Run,
        execution: Execution,
        device: torch.device,
    ) -> None:
        self.model, self.forward, self.penalty, self.training, self.device = (
            model,
            forward,
            penalty,
            run.training,
            device,
        )
        self.graphed = execution.cuda_graphs
        self.optimiser = optimiser(model, run, device)
        self.site_names: list[str] = []
        self.sums: Tensor | None = None
        self.batches = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, y: Tensor, learning_rate: float) -> None:
        self._set_learning_rate(learning_rate)
        self.batches += 1
        if not self.graphed:
            self._train(x, y)
            return
        if self._graph is None:
            static = self._static = x.clone(), y.clone()
            self._graph = captured(lambda: self._train(*static), self._remember, self.device)
        for place, given in zip(self._static, (x, y), strict=True):
            place.copy_(given)
        self._graph.replay()

    def _train(self, x: Tensor, y: Tensor) -> None:
        with self.autocast():
            logits = self.forward(x)
        task = metrics.task_loss(logits, y, self.training.label_smoothing)
        penalty = torch.zeros_like(task) if self.penalty is None else self.penalty(logits)
        (task + penalty).backward()  # type: ignore[no-untyped-call]
        if self.training.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)  # a graph makes its gradients anew, too, in memory of its own
        self._add(task, penalty, metrics.hits(logits, y))

    @torch.no_grad()
    def _add(self, task: Tensor, penalty: Tensor, hits: Tensor) -> None:
        terms = {} if self.penalty is None else self.penalty.terms()
        values = torch.stack([task.detach(), penalty.detach(), hits.float().mean(), *terms.values()])
        if self.sums is None:
            self.site_names, self.sums = list(terms), torch.zeros_like(values, dtype=torch.float64)
        self.sums += values

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.training.precision == "bfloat16")

    def _set_learning_rate(self, learning_rate: float) -> None:
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(learning_rate)
            else:
                group["lr"] = learning_rate

    def means(self, ranks: int = 1) -> dict[str, Any]:
        """Means over the steps since `reset`: task loss, penalty, accuracy and the term of every site.

        With several ranks all of them have to ask, and get the means over all.
        """
        if self.sums is None:
            return {}
        sums = self.sums.clone()
        if ranks > 1:
            distributed.all_reduce(sums)
        task, penalty, accuracy, *terms = (sums / (max(self.batches, 1) * ranks)).tolist()
        return {
            "train_loss": task,
            "penalty": penalty,
            "train_accuracy": accuracy,
            "terms": dict(zip(self.site_names, terms, strict=True)),
        }

    def reset(self) -> None:
        """Start summing anew."""
        self.batches = 0
        if self.sums is not None:
            self.sums.zero_()

    # ------------------------------------------------------------------------------------------ CUDA graphs

    def _remember(self) -> Undo:
        """What puts weights, optimiser, sums and the random state back to where they are now."""
        weights = copy.deepcopy(self.model.state_dict())
        moments = copy.deepcopy(self.optimiser.state_dict())["state"]
        random = torch.cuda.get_rng_state(self.device)

        @torch.no_grad()
        def undo() -> None:
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(weights[name])
            parameters = (p for group in self.optimiser.param_groups for p in group["params"])
            for number, parameter in enumerate(parameters):
                for name, tensor in self.optimiser.state[parameter].items():
                    before = moments.get(number, {}).get(name)
                    tensor.zero_() if before is None else tensor.copy_(before)
            if self.sums is not None:
                self.sums.zero_()
            torch.cuda.set_rng_state(random, self.device)

        return undo
