"""The hooks of loss-level penalties: they keep what dropout would drop from, and where backward passes come back to.

Dropout acts on the input of a projection. Where nothing else reads that input, its gradient is what is wanted, and the
module is given an alias of it to have one of its own. Of a fused layer only some rows are meant: there the gradient of
its output is taken, and brought to its input by those rows of the weight.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import argument_names, in_backward, only_input, with_input
from explicit_dropout.hooks.collector import Chain, Collector
from explicit_dropout.hooks.told import Samples
from explicit_dropout.kernels.plain import wide
from explicit_dropout.sites import Projection, Site


class Reached:
    """One firing of a site: its input x, and a place in the graph whose gradient leads to that of x."""

    def __init__(self, site: Site, x: Tensor, seen: Tensor, projection: Projection | None) -> None:
        self.site, self.x, self.projection = site.name, x, projection
        self.edge: GradientEdge = get_gradient_edge(seen)  # stays what it is if the model changes `seen` in place
        self.version = x._version
        self.samples: int | None = None

    def nodes(self) -> list[Any]:
        """Where it stands in the graph."""
        return [self.edge.node]

    def count(self, given: Samples) -> None:
        """What the whole model was given, as far as that is known."""
        self.samples = given.get("")

    def refuse_changed(self) -> None:
        """Before anything is differentiated: torch would complain of the same, and not say where."""
        if self.x._version != self.version:
            raise CollectionError(
                f"{self.site}: the model has changed its input in place after it was used, so what dropout would have "
                "done to it is not known any more. Do that out of place, or leave the layer out by layers=."
            )

    def effect(self, gradient: Tensor) -> Tensor:
        """x ⊙ ∂/∂x, element by element, given the gradient at the place."""
        if self.projection is not None:
            weight, _ = self.projection.parameters()
            gradient = self.projection.of(gradient).to(weight.dtype) @ weight
        return wide(self.x) * wide(gradient)


class Compiled:
    """A firing inside compiled code, which cannot be differentiated twice; nor can it raise an error that says so."""

    def __init__(self, path: str) -> None:
        self.path = path

    def nodes(self) -> list[Any]:
        return []

    def count(self, given: Samples) -> None:
        del given

    def refuse(self) -> CollectionError:
        return CollectionError(
            f"{self.path} is compiled, and compiled code cannot be differentiated twice. Train with LossLevelDropout "
            "in eager mode; ExplicitDropout can be compiled."
        )


def repeating(collector: Collector, module: nn.Module) -> bool:
    """Whether checkpointing runs this module once more, in a backward pass, where it has to do the same again."""
    if collector.inert or torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
        return False
    return in_backward()


class Reaching:
    """A hook that leaves firings with its collector."""

    def __init__(self, collector: Collector, sites: list[Site]) -> None:
        self.collector, self.sites = collector, sites

    def watching(self, module: nn.Module) -> bool:
        """Whether a training forward pass is under way, and not one that checkpointing repeats."""
        slot = self.collector.slot()
        if self.collector.inert or not module.training or not slot.open or repeating(self.collector, module):
            return False
        if torch.compiler.is_compiling():
            slot.pending = Chain(Compiled(self.sites[0].path), slot.pending)
            return False
        if torch.is_grad_enabled():
            return True
        raise CollectionError(
            f"{self.sites[0].path} runs without gradients inside a training forward pass, so its penalty would have "
            "none. Use activation checkpointing with use_reentrant=False, or leave the layer out by layers=."
        )

    def leave(self, site: Site, x: Tensor, seen: Tensor, projection: Projection | None = None) -> None:
        slot = self.collector.slot()
        slot.pending = Chain(Reached(site, x, seen, projection), slot.pending)

    def changing(self, module: nn.Module) -> bool:
        """Whether inputs are replaced: where they are watched, and again wherever checkpointing repeats that."""
        return self.watching(module) or repeating(self.collector, module)

    def alias(self, site: Site, x: Tensor, module: nn.Module) -> Tensor:
        """The same input, as this site alone sees it."""
        own = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        if not repeating(self.collector, module):
            self.leave(site, own, own)
        return own


class InputReached(Reaching):
    """Before a projection that is a module of its own."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.changing(module):
            return None
        x = only_input(self.sites[0].path, args, kwargs)
        return with_input(self.alias(self.sites[0], x, module), args, kwargs)


class RowsReached(Reaching):
    """After a fused layer, of which each site has some rows."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        if not self.changing(module):
            return None
        own = output if output.requires_grad else output.detach().requires_grad_()
        if not repeating(self.collector, module):
            x = only_input(self.sites[0].path, args, kwargs)
            for site in self.sites:
                self.leave(site, x, own, site.projection)
        return None if own is output else own


class ArgumentsReached(Reaching):
    """Before attention that computes with the weights of its projections and does not call them."""

    def __init__(self, collector: Collector, sites: list[Site], module: nn.Module, inputs: dict[str, str]) -> None:
        super().__init__(collector, sites)
        names = argument_names(module)
        self.inputs = [(site, names.index(inputs[site.component]), inputs[site.component]) for site in sites]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.changing(module):
            return None
        given, named = list(args), dict(kwargs)
        for site, place, name in self.inputs:
            if place < len(given):
                given[place] = self.alias(site, given[place], module)
            else:
                named[name] = self.alias(site, named[name], module)
        return tuple(given), named


class DifferentiableAttention:
    """Around the call of a module: fused attention by torch's own arithmetic, the only kernel with second derivatives.

    Around that of the whole model, while it is trained; around that of attention, too, where checkpointing repeats it.
    """

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.entered: list[AbstractContextManager[Any]] = []

    def enter(self, module: nn.Module) -> None:
        if torch.compiler.is_compiling():
            return
        if self.collector.slot().open or repeating(self.collector, module):
            context = sdpa_kernel(SDPBackend.MATH)
            context.__enter__()
            self.entered.append(context)

    def leave(self) -> None:
        while not torch.compiler.is_compiling() and self.entered:
            self.entered.pop().__exit__(None, None, None)

    def __deepcopy__(self, memo: object) -> DifferentiableAttention:
        return DifferentiableAttention(Collector(inert=True))

    def __reduce__(self) -> tuple[Any, ...]:
        return DifferentiableAttention, (Collector(inert=True),)


class EnterAttention:
    def __init__(self, attention: DifferentiableAttention) -> None:
        self.attention = attention

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        self.attention.enter(module)


class LeaveAttention:
    """Runs after a call that failed, too."""

    def __init__(self, attention: DifferentiableAttention) -> None:
        self.attention = attention

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        del module, args, kwargs, output
        self.attention.leave()
