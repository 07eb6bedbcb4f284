"""What a training step is compared under: no dropout, stochastic dropout, explicit dropout and slower ways to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

from hosts import drop_keys
from literal import LiteralTraces
from torch import Tensor, nn

import explicit_dropout as xd
from explicit_dropout.kernels import activation_of, energy

RATE, STRENGTH = 0.2, 1e-3
LAWS = {"paper": xd.paper(RATE), "bernoulli": xd.bernoulli(RATE), "inverted": xd.inverted(RATE)}
ATTENTION = {"V": "value", "AV": "attended_value", "Q": "query", "QK": "query_key"}
Kind = Literal["none", "one_operation", "model", "twins", "stochastic", "drop_key", "explicit", "plain", "literal"]


@dataclass(frozen=True)
class Treatment:
    """How components are treated.

    - none: not at all. one_operation: neither, but for activations that are written out, which torch makes at once.
    - model: by the dropout that the model brings, everywhere where it has some. twins: by `convert_dropout` of that.
    - stochastic: by nn.Dropout on the input of each site, the place where explicit dropout stands for it.
    - drop_key: DropKey in attention, nn.Dropout on the inputs of feed-forward layers.
    - explicit: by `ExplicitDropout`. plain: the same without fused kernels. literal: the same as traces.
    """

    kind: Kind = "none"
    components: tuple[str, ...] = ()
    noise: xd.Noise | None = None

    @property
    def own_rate(self) -> float:
        """The rate of the model's own dropout."""
        return RATE if self.kind in ("model", "twins") else 0.0

    def attach(self, model: nn.Module) -> Callable[[], Tensor] | None:
        """Change the model; what is returned gives the penalty after each forward pass."""
        if self.kind == "one_operation":
            activate_at_once(model)
        if self.kind in ("stochastic", "drop_key"):
            drop_inputs(model, self.components)
        if self.kind == "drop_key":
            drop_keys(model, RATE)
        if self.kind == "twins":
            return xd.convert_dropout(model, STRENGTH)
        if self.noise is None:
            return None
        if self.kind == "literal":
            return LiteralTraces(model, self.noise, self.components, STRENGTH)
        return xd.ExplicitDropout(model, self.noise, **dict.fromkeys(self.components, STRENGTH))

    def context(self) -> AbstractContextManager[None]:
        """Where its steps have to run."""
        return plain_autograd() if self.kind == "plain" else nullcontext()


class DropInput:
    """Before a layer is called: nn.Dropout on its input."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return nn.functional.dropout(args[0], RATE, module.training), *args[1:]


def drop_inputs(model: nn.Module, components: Sequence[str]) -> None:
    """Dropout on the input of every site. Where a layer makes queries, keys and values at once, all of them see it."""
    sites = [site for site in xd.find_sites(model) if site.component in components]
    for module in {site.projection.module: None for site in sites if site.projection is not None}:
        module.register_forward_pre_hook(DropInput())


def activate_at_once(model: nn.Module) -> None:
    """Let torch make each GELU in one operation, whatever the model has for it: GPT-2's is written out in eight."""
    at_once = {"gelu": nn.GELU(), "gelu_tanh": nn.GELU("tanh")}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (kind := activation_of(child)) in at_once:
                setattr(parent, name, at_once[kind])


@contextmanager
def plain_autograd() -> Iterator[None]:
    """No kernels inside, since there is no precision that they serve: penalties are torch's own operations."""
    before = energy.DTYPES
    energy.DTYPES = ()  # type: ignore[assignment]
    try:
        yield
    finally:
        energy.DTYPES = before


def _all() -> dict[str, Treatment]:
    found = {
        "none": Treatment(),
        "none, GELU by torch": Treatment("one_operation"),
        "model's own dropout": Treatment("model"),
        "model's own dropout, twins": Treatment("twins"),
        "stochastic V+FF": Treatment("stochastic", ("value", "feed_forward")),
        "stochastic Q+FF": Treatment("stochastic", ("query", "feed_forward")),
        "DropKey+FF": Treatment("drop_key", ("feed_forward",)),
    }
    for short, component in ATTENTION.items():
        for law, noise in LAWS.items():
            found[f"{short}+FF {law}"] = Treatment("explicit", (component, "feed_forward"), noise)
    for name in ("V+FF paper", "V+FF inverted", "Q+FF paper", "QK+FF inverted"):
        found[f"{name}, plain autograd"] = Treatment("plain", found[name].components, found[name].noise)
    for name in ("V+FF paper", "V+FF bernoulli", "Q+FF paper"):
        found[f"{name}, literal traces"] = Treatment("literal", found[name].components, found[name].noise)
    return found


TREATMENTS = _all()
