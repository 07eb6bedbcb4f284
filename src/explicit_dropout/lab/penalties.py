"""What a treatment adds to the loss: explicit dropout, also followed there, twins, Arora et al., activation L2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout import functional
from explicit_dropout.errors import CollectionError, InputError
from explicit_dropout.lab.config import Execution, Metric, Treatment
from explicit_dropout.lab.models import Transformer
from explicit_dropout.loss_level import LossLevelDropout
from explicit_dropout.noise import Noise, bernoulli, inverted, paper
from explicit_dropout.regulariser import ExplicitDropout
from explicit_dropout.twins import convert_dropout

LAWS: dict[str, Callable[[float], Noise]] = {"paper": paper, "bernoulli": bernoulli, "inverted": inverted}
COMPONENTS = {"q": "query", "k": "key", "qk": "query_key", "v": "value", "av": "attended_value"}


def attach(model: Transformer, treatment: Treatment) -> Penalty | None:
    """The penalty of a treatment, attached to its model; None if it adds nothing to the loss."""
    return Penalty(model, treatment) if treatment.has_penalty else None


def refuse(treatment: Treatment, execution: Execution, metric: Metric) -> None:
    """Compiled steps where it cannot be; and losses that are followed but have a curvature that depends on labels."""
    if not (treatment.is_loss_level or treatment.twins):
        return
    reason = "differentiates the model twice" if treatment.is_loss_level else "looks at every call of dropout"
    for name in ("compile", "cuda_graphs"):
        if getattr(execution, name):
            raise InputError(f"execution.{name}", f"false: {treatment.row} {reason}", "true")
    if treatment.is_loss_level and metric != "accuracy":
        raise InputError(
            "treatment", "another one for examples of several classes: how their loss curves depends on how many",
            treatment.row,
        )  # fmt: skip


class Penalty:
    """λ Σ J over the sites of a treatment, read after each forward pass.

    logits = model(x)
    loss = cross_entropy(logits, y) + penalty(logits)
    """

    def __init__(self, model: Transformer, treatment: Treatment) -> None:
        self.strength = treatment.strength
        self.explicit: ExplicitDropout | None = None
        self.loss_level: LossLevelDropout | None = None
        self.twins = convert_dropout(model, 1.0) if treatment.twins else None
        self.others: list[LinearTerms | OutputTerms] = []
        components: dict[str, Any] = {}
        kind, _, place = treatment.attention.partition("_")
        if kind in ("explicit", "loss"):
            components[COMPONENTS[place]] = 1.0
        if treatment.feed_forward in ("explicit", "loss"):
            components["feed_forward"] = 1.0
        if treatment.is_loss_level:
            self.loss_level = LossLevelDropout(model, inverted(treatment.rate), disable_dropout=False, **components)
        elif components:
            self.explicit = ExplicitDropout(
                model,
                LAWS[treatment.law](treatment.rate),
                reduction=treatment.reduction,
                reading=treatment.reading,
                disable_dropout=False,  # a treatment has the stochastic dropout that it names, and no other
                **components,
            )
        if treatment.attention.startswith("arora_"):
            name = COMPONENTS[treatment.attention.removeprefix("arora_")]
            self.others.append(LinearTerms(model, (name,), treatment))
        if treatment.feed_forward == "arora":
            self.others.append(LinearTerms(model, ("fc1", "fc2"), treatment))
        if treatment.feed_forward == "activation_l2":
            self.others.append(OutputTerms(model, treatment))
        self._terms: dict[str, Tensor] = {}

    def __call__(self, outputs: Tensor | None = None) -> Tensor:
        """λ Σ J of the forward pass just made, which has led to these outputs."""
        return self.strength * self.unweighted(outputs)

    def unweighted(self, outputs: Tensor | None = None) -> Tensor:
        """Σ J of the forward pass just made, as one float32 number with gradients."""
        parts, self._terms = [], {}
        if self.loss_level is not None:
            parts.append(self.loss_level(outputs))  # which says that it needs them, if they are not given
            self._terms |= self.loss_level.terms()
        for own in (self.explicit, self.twins):
            if own is not None:
                parts.append(own())
                self._terms |= own.terms()
        for other in self.others:
            terms = other.take()
            parts.extend(terms.values())
            self._terms |= {name: term.detach() for name, term in terms.items()}
        return torch.stack(parts).sum()

    def terms(self) -> dict[str, Tensor]:
        """The unweighted J of every site at the last reading, detached, by site name."""
        return dict(self._terms)


class Terms:
    """Numbers that hooks leave during a training forward pass, one for each module that was asked for."""

    def __init__(self, treatment: Treatment, names: Iterable[str]) -> None:
        self.reduction = treatment.reduction
        self.names = tuple(names)
        self.pending: dict[str, Tensor] = {}

    def take(self) -> dict[str, Tensor]:
        """The terms since the last time."""
        terms, self.pending = self.pending, {}
        if set(terms) != set(self.names):
            missing = [name for name in self.names if name not in terms]
            raise CollectionError(f"no training forward pass has left a term at {', '.join(missing[:3])}")
        return terms

    def watching(self, module: nn.Module) -> bool:
        return module.training and torch.is_grad_enabled()


class LinearTerms(Terms):
    """The regulariser of Arora et al.: p/(1−p) Σ_j ‖x_:j‖² ‖W_:j‖² at linear layers; twice `linear`, `inverted`."""

    def __init__(self, model: Transformer, layers: tuple[str, ...], treatment: Treatment) -> None:
        found = [(path, m) for path, m in model.named_modules() if path.rsplit(".", 1)[-1] in layers]
        super().__init__(treatment, (f"{path}:arora" for path, _ in found))
        self.noise = inverted(treatment.rate)
        for path, module in found:
            module.register_forward_hook(_Hook(self, f"{path}:arora"))

    def term(self, module: Any, x: Tensor, output: Tensor) -> Tensor:
        del output
        return functional.linear(x, module.weight, self.noise, reduction=self.reduction, strength=2.0)


class OutputTerms(Terms):
    """The control: ½ ‖h‖² of what every residual branch adds, bias included (activation L2)."""

    def __init__(self, model: Transformer, treatment: Treatment) -> None:
        found = [
            (path, m) for path, m in model.named_modules() if path.rsplit(".", 1)[-1] in ("attention", "feed_forward")
        ]
        super().__init__(treatment, (f"{path}:activation_l2" for path, _ in found))
        for path, module in found:
            module.register_forward_hook(_Hook(self, f"{path}:activation_l2"))

    def term(self, module: nn.Module, x: Tensor, output: Tensor) -> Tensor:
        del module, x
        counted = output.shape[0] if self.reduction == "sample" else output.shape[:-1].numel()
        return 0.5 * output.float().square().sum() / counted


class _Hook:
    """Leaves the term of one module. A class of its own, so that a model with hooks can be copied and saved."""

    def __init__(self, terms: LinearTerms | OutputTerms, name: str) -> None:
        self.terms, self.name = terms, name

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        if self.terms.watching(module):
            self.terms.pending[self.name] = self.terms.term(module, args[0], output)
