"""What makes steps of gradients: Adam with L2, AdamW with decoupled decay, or Muon for the matrices of the layers.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal one, roughly: all its directions
move alike. torch has an optimiser of that name, which takes one matrix after the other and its learning rate from the
CPU; here matrices of one shape are turned together, and a CUDA graph can hold the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from explicit_dropout.lab.config import Run

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial a x + b x³ + c x⁵ that takes singular values in (0, 1] to about 1 within a few rounds."""

ROUNDS = 5
BETAS, EPSILON = (0.9, 0.999), 1e-8


def optimiser(model: nn.Module, run: Run, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser that a run asks for, over all parameters of its model."""
    on_gpu = device.type == "cuda"
    rate = run.training.learning_rate
    settings: dict[str, Any] = {
        "lr": torch.tensor(rate, device=device) if on_gpu else rate,  # a CUDA graph reads it anew at every replay
        "weight_decay": weight_decay(run),
        "fused": True,
        "capturable": on_gpu,
    }
    match run.training.optimiser:
        case "adam":
            return torch.optim.Adam(model.parameters(), **settings)
        case "adamw":
            return torch.optim.AdamW(model.parameters(), **settings)
        case "muon":
            matrices = {name for name, p in model.named_parameters() if name.startswith("blocks.") and p.ndim == 2}
            return Muon(
                (parameter for name, parameter in model.named_parameters() if name in matrices),
                (parameter for name, parameter in model.named_parameters() if name not in matrices),
                **settings,
            )


def weight_decay(run: Run) -> float:
    """The decay that training has in any case, and that of the control row."""
    own = run.treatment.strength if run.treatment.feed_forward == "weight_decay" else 0.0
    return run.training.weight_decay + own


class Muon(torch.optim.Optimizer):
    """Orthogonal steps for matrices, AdamW for everything else, at one learning rate.

    M ← μ M + (1 − μ) G;  W ← (1 − η w) W − 0.2 √max(rows, columns) η · orthogonal((1 − μ) G + μ M)

    The factor makes the entries of a step as large as Adam's usually are (Liu et al., 2025), so that learning rates of
    Adam can be kept.

    Args:
        matrices: parameters with two axes.
        others: any parameters.
        momentum: μ.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        lr: float | Tensor,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        *,
        fused: bool = False,
        capturable: bool = False,
    ) -> None:
        groups = [{"params": list(matrices), "turned": True}, {"params": list(others), "turned": False}]
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "fused": fused,
            "capturable": capturable,
        }
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for group in self.param_groups:
            given = {parameter: parameter.grad for parameter in group["params"] if parameter.grad is not None}
            if group["turned"]:
                for shape in {parameter.shape: None for parameter in given}:
                    self._turned({p: gradient for p, gradient in given.items() if p.shape == shape}, group)
            elif given:
                self._adam(given, group)

    def _turned(self, given: dict[Tensor, Tensor], group: dict[str, Any]) -> None:
        matrices, gradients = list(given), list(given.values())
        for matrix in matrices:
            if not self.state[matrix]:
                self.state[matrix] = {"momentum": torch.zeros_like(matrix)}
        momenta = [self.state[matrix]["momentum"] for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, momenta, group["momentum"])
        steps = orthogonal(torch.stack(list(ahead))).to(matrices[0].dtype)
        size = 0.2 * max(matrices[0].shape) ** 0.5
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_sub_(matrices, list((steps * (size * group["lr"])).unbind()))

    def _adam(self, given: dict[Tensor, Tensor], group: dict[str, Any]) -> None:
        parameters, gradients = list(given), list(given.values())
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device if group["fused"] else None),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        first, second, steps = (
            [self.state[parameter][name] for parameter in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        adamw(
            parameters, gradients, first, second, [], steps, amsgrad=False, maximize=False,
            beta1=BETAS[0], beta2=BETAS[1], eps=EPSILON, lr=group["lr"], weight_decay=group["weight_decay"],
            fused=group["fused"], capturable=group["capturable"],
        )  # fmt: skip


def orthogonal(matrices: Tensor) -> Tensor:
    """U Vᵀ of matrices U S Vᵀ (…, rows, columns), in bfloat16; about: singular values end between 0.7 and 1.2."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).bfloat16()
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(ROUNDS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
