"""Steps of optimisers, as torch tells of them all: none may come between a forward pass and its penalty.

Fused optimisers do not tell tensors that they change them, so versions alone would not show it.
"""

from __future__ import annotations

import warnings
import weakref
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from explicit_dropout.hooks.calls import nodes_behind
from explicit_dropout.hooks.collector import Collector, Term

TOLERATED = 1
"""Steps in a row that may leave passes waiting without a word: one may be of a batch that is skipped."""
_watched: weakref.WeakKeyDictionary[Collector, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Whose passes may wait, and the models that make them."""


def watch_steps(collector: Collector, model: nn.Module) -> None:
    """From here on notice steps that passes of this model have not been used for; for as long as both exist."""
    _watched[collector] = weakref.ref(model)
    _listen()


@cache
def _listen() -> None:
    """One hook for all, and for good: torch must not find them changed while it goes through its hooks."""
    register_optimizer_step_post_hook(after_step)


def after_step(optimiser: Optimizer, args: Any, kwargs: Any) -> None:
    """Passes that wait for their regulariser have lost the weights that they ran with."""
    del args, kwargs
    if torch.compiler.is_compiling():
        return
    for collector, reference in list(_watched.items()):
        model = reference()
        if model is None or collector.inert or collector.is_trial() or not collector.is_waiting():
            continue
        if not changes(optimiser, collector, model):
            continue
        collector.steps += 1
        if collector.steps == TOLERATED + 1:
            warnings.warn(
                f"{type(optimiser).__name__} has made {collector.steps} steps without a call of the regulariser of "
                f"{type(model).__name__}: its penalty is part of no loss. Add reg() to the loss, discard() passes that "
                "are not to be regularised, or remove() it. With the Trainer of transformers use "
                "ExplicitDropoutTrainer, with Lightning ExplicitDropoutCallback.",
                RuntimeWarning,
                stacklevel=3,
            )


def changes(optimiser: Optimizer, collector: Collector, model: nn.Module) -> bool:
    """Whether a step has changed parameters that waiting terms are made of: those without gradient it leaves alone."""
    stepped = {id(p) for group in optimiser.param_groups for p in group["params"] if p.grad is not None}
    if stepped.isdisjoint(map(id, model.parameters())):
        return False
    terms = [term for forward in collector.waiting_terms() for term in forward]
    if collector.sharded or not all(isinstance(term, Term) for term in terms):
        return True
    held = {id(weight) for weight in collector.held.values() if weight is not None}
    made = nodes_behind(node for term in terms for node in term.nodes())
    leaves = (id(node.variable) for node in made if hasattr(node, "variable"))
    return not stepped.isdisjoint(held) or not stepped.isdisjoint(leaves)
