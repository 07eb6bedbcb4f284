"""Many models of one shape as one: their weights in the rows of a matrix, and Adam for all of them.

Everything that models may differ in (weights, learning rate, weight decay, number of steps) has a row for each, and
rows never meet: one that is no longer finite leaves the others as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from explicit_dropout.errors import InputError
from explicit_dropout.stochastic import replaying

SHORT = 32
"""Up to so many tokens, attention by plain products is faster on a CPU than torch's fused kernel."""


class Stack:
    """The weights of models that share their architecture: row m of `weights` holds all of model m.

    Args:
        pattern: any one of the models; its forward, hooks included, is what all of them do.
        models: as many state dictionaries as there are models.
    """

    def __init__(self, pattern: nn.Module, models: Sequence[Mapping[str, Tensor]]) -> None:
        self.names = [name for name, _ in pattern.named_parameters()]
        if list(pattern.state_dict()) != self.names:
            raise InputError(
                "model", "a model without buffers or shared weights, to be trained with others", type(pattern)
            )
        self.shapes = [parameter.shape for parameter in pattern.parameters()]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.weights = torch.stack([self.row(model) for model in models])

    def row(self, state: Mapping[str, Tensor]) -> Tensor:
        """A state dictionary as one row."""
        return torch.cat([state[name].detach().reshape(-1) for name in self.names])

    def by_name(self, rows: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Rows (…, parameters) as the stacked parameters of a module, name by name: views of them."""
        parts = torch.split(rows, self.sizes, dim=-1)
        return {
            prefix + name: torch.unflatten(part, -1, shape)
            for name, shape, part in zip(self.names, self.shapes, parts, strict=True)
        }


class Adam:
    """`torch.optim.Adam`, or AdamW where decay is decoupled, for rows of weights with settings of their own.

    g ← ∇ + w θ (Adam), or θ ← (1 − η w) θ (AdamW);  m ← m + (1 − β₁)(g − m);  v ← β₂ v + (1 − β₂) g²;
    θ ← θ − η / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
    """

    betas, epsilon = (0.9, 0.999), 1e-8

    def __init__(self, weights: Tensor, weight_decay: Sequence[float], *, decoupled: bool) -> None:
        self.decoupled = decoupled
        self.weight_decay = list(weight_decay)
        self.steps = [0] * len(weights)
        self.first, self.second = torch.zeros_like(weights), torch.zeros_like(weights)

    def coefficients(self, learning_rates: Sequence[Sequence[float]]) -> Tensor:
        """What the next steps need, from the learning rates of each: (steps, 3, models, 1), on the device.

        All at once, so that no step waits until its numbers have come to the GPU. From here on they count as made.
        """
        table = []
        for later, rates in enumerate(learning_rates, start=1):
            first = [1 - math.pow(self.betas[0], done + later) for done in self.steps]
            second = [math.sqrt(1 - math.pow(self.betas[1], done + later)) for done in self.steps]
            decay = [1 - rate * w if self.decoupled else w for rate, w in zip(rates, self.weight_decay, strict=True)]
            table.append([[-rate / part for rate, part in zip(rates, first, strict=True)], second, decay])
        self.steps = [done + len(learning_rates) for done in self.steps]
        return torch.tensor(table, dtype=self.first.dtype).unsqueeze(-1).to(self.first.device)

    @torch.no_grad()
    def step(self, weights: Tensor, gradients: Tensor, coefficients: Tensor) -> None:
        """One step of every row, in place; the coefficients are those of this step."""
        size, correction, decay = coefficients
        if any(self.weight_decay):
            if self.decoupled:
                weights.mul_(decay)
            else:
                gradients = gradients + decay * weights
        self.first.lerp_(gradients, 1 - self.betas[0])
        self.second.mul_(self.betas[1]).addcmul_(gradients, gradients, value=1 - self.betas[1])
        weights.addcmul_(self.first / (self.second.sqrt() / correction).add_(self.epsilon), size)

    def keep(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        self.first, self.second = self.first[rows], self.second[rows]
        self.weight_decay, self.steps = ([values[row] for row in rows] for values in (self.weight_decay, self.steps))  # type: ignore[assignment]

    # ------------------------------------------------------------------------------------------ as torch writes it

    def state(self, row: int, stack: Stack, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The state dictionary that a torch optimiser of this model alone would have, given its parameter groups."""
        moments = zip(*(stack.by_name(moment[row]).values() for moment in (self.first, self.second)), strict=True)
        step = torch.tensor(float(self.steps[row]))
        states = {
            number: {"step": step.clone(), "exp_avg": first, "exp_avg_sq": second}
            for number, (first, second) in enumerate(moments)
        }
        return {"state": states if self.steps[row] else {}, "param_groups": groups}

    def restore(self, row: int, state: Mapping[str, Any]) -> None:
        """Take over such a state dictionary."""
        states = [state["state"][number] for number in sorted(state["state"])]
        if states:
            self.steps[row] = int(states[0]["step"])
            for moment, name in ((self.first, "exp_avg"), (self.second, "exp_avg_sq")):
                moment[row] = torch.cat([one[name].reshape(-1) for one in states])


def clip(gradients: Tensor, largest: Tensor) -> Tensor:
    """Each row scaled down to its largest norm (inf for none), as `nn.utils.clip_grad_norm_` does."""
    norms: Tensor = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
    return gradients * (largest / (norms + 1e-6)).clamp(max=1.0)


# ---------------------------------------------------------------------------------------------- mapping over models


def mapped(module: nn.Module, parameters: dict[str, Tensor], *arguments: Tensor, numbers: Sequence[Tensor] = ()) -> Any:
    """What the module returns for every model, stacked along the first axis, given parameters and arguments for each.

    `numbers` are the random numbers that a forward pass asks for, also for each.
    """

    def one(parameters: dict[str, Tensor], numbers: list[Tensor], *arguments: Tensor) -> Any:
        with replaying(numbers):
            return functional_call(module, parameters, arguments)

    with StackedAttention():
        return vmap(one)(parameters, list(numbers), *arguments)


def mapped_to_all(module: nn.Module, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
    """What the module makes of the same x in every model, (examples, models, …)."""
    with StackedAttention():
        found: Tensor = vmap(lambda p: functional_call(module, p, (x,)), out_dims=1)(parameters)
    return found


class StackedAttention(TorchFunctionMode):
    """Inside, torch's fused attention takes stacked models as a larger batch: `vmap` has no rule for it on a CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is F.scaled_dot_product_attention and not kwargs and len(args) == 3:
            q, k, v = args
            if q.device.type == "cpu" and q.shape[-2] <= SHORT:
                return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
            return _FoldedAttention.apply(q, k, v)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _FoldedAttention(torch.autograd.Function):
    """Only ever called under `vmap`, where its rule below takes its place."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        del ctx, inputs, output

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *qkv: Tensor) -> tuple[Tensor, int]:
        stacked = [
            t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)
            for t, axis in zip(qkv, in_dims, strict=True)
        ]
        q, k, v = (t.flatten(0, 1) for t in stacked)
        return torch.unflatten(F.scaled_dot_product_attention(q, k, v), 0, stacked[0].shape[:2]), 0
