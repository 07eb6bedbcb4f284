"""The hooks of an activation inside a feed-forward network: kernels make it, and the energies around it.

Whether an activation stands there is not read off a model's code but seen: its input has to be the very output of the
first layer, its output the very input of the last. A compiler sees that as it traces; in eager code a first pass shows
it, in which the layers are measured by themselves, and later passes go by what it has shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout import kernels
from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import only_input, with_input
from explicit_dropout.hooks.collector import Chain
from explicit_dropout.hooks.taps import Tap, TapHook, by_sample, in_order
from explicit_dropout.sites import Site


class Between:
    """What passes have shown of one network: which energies are taken at its activation.

    Energies of outputs go by the names of their sites; those of the last layer's input are "columns".

    gated: whether something else is multiplied by what comes out. Columns are then not of what the last layer is given,
    and compiled code does better to make activation and product at once.
    """

    def __init__(self, *, gated: bool) -> None:
        self.gated = gated
        self.ready: set[str] = set()
        self.shown: set[str] = set()
        self.refused: set[str] = set()
        """By passes under way. Both count when the next begins: checkpointing has to repeat this one as it was."""

    def begin(self) -> None:
        """A new pass may count on what earlier ones have shown, and on nothing that one of them has refused."""
        if self.shown or self.refused:
            self.ready = (self.ready | self.shown) - self.refused
            self.shown = set()


@dataclass(eq=False)
class Left:
    """The output of a first layer, on its way to the activation.

    output: as the model has it, and how often it was changed in place. x: that with its bias, or without (`added`).
    deferred: whether its energy is left for the activation to take. link: where its term stands, if there is one.
    """

    between: Between
    site: Site
    output: Tensor
    version: int | None
    x: Tensor
    bias: Tensor | None
    added: bool
    tokens: Tensor
    mask: Tensor | None
    rows: Tensor | None
    deferred: bool = False
    link: Chain | None = None

    def is_input(self, x: Tensor) -> bool:
        return x is self.output and (self.version is None or x._version == self.version)

    def missed(self) -> CollectionError:
        """It has not come to an activation, as it did before."""
        self.between.refused.add(self.site.name)
        return CollectionError(
            f"{self.site.name}: the output of this layer has not gone to the activation that it went to before, so its "
            "penalty was not taken there. From now on it is taken at the layer itself: run this step again."
        )


class Activation:
    """One activation of a network: its hooks, before and after, and what they share."""

    def __init__(self, tap: Tap, between: Between, kind: str, by_column: bool) -> None:
        self.tap, self.between, self.kind = tap, between, kind
        self.by_column = by_column and bool(tap.noise.variance)
        """Whether the last layer has a penalty that is made of the columns of what comes out."""

    def make(self, x: Tensor, left: Left | None, *, coherent: bool, by_column: bool) -> Tensor:
        """The activation, leaving the term of the first layer and the columns for the last."""
        slot, tap = self.tap.collector.slot(), self.tap
        if left is None:
            tokens, mask = by_sample(tap, x)
            given: tuple[Any, ...] = (x, None, in_order(mask, tokens, x))
        else:
            given = left.x, left.bias, left.rows
        made, energies, columns = kernels.activated(
            self.kind, *given, added=left is None or left.added, coherent=coherent, by_column=by_column
        )
        if left is not None and coherent:
            tap.add(left.site, energies, None, left.tokens, left.mask, tap.coherence, piece=tap.coherent_piece)
        slot.activated = made, columns if by_column else None
        return made


class BeforeActivation(TapHook):
    """Eager code: makes the activation, and leaves nothing for the module itself to do."""

    def __init__(self, activation: Activation) -> None:
        super().__init__(activation.tap)
        self.activation = activation

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not self.tap.watching(module):
            return None
        slot, between = self.tap.collector.slot(), self.activation.between
        x = only_input(self.tap.path, args, kwargs)
        left = slot.left
        if not alone_on(module) or not kernels.serves_activated(x):
            return None
        if left is None or left.between is not between or not left.is_input(x):
            left = None
        else:
            slot.left = None
            if not left.deferred:
                between.shown.add(left.site.name)
                left = None
        by_column = "columns" in between.ready
        if left is None and not by_column:
            return None
        slot.made = self.activation.make(x, left, coherent=left is not None, by_column=by_column)
        return with_input(x.new_empty(0), args, kwargs)


class AfterActivation(TapHook):
    """Gives the model what was made before; in compiled code it is made here, and what the module made is dropped."""

    def __init__(self, activation: Activation) -> None:
        super().__init__(activation.tap)
        self.activation = activation

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        if not self.tap.watching(module):
            return None
        slot = self.tap.collector.slot()
        if torch.compiler.is_compiling():
            return self._compiled(only_input(self.tap.path, args, kwargs))
        made, slot.made = slot.made, None
        if made is None and self.activation.by_column and kernels.serves_activated(output) and alone_on(module):
            slot.activated = output, None
        return made

    def _compiled(self, x: Tensor) -> Tensor | None:
        slot, activation = self.tap.collector.slot(), self.activation
        left, slot.left = slot.left, None
        if activation.between.gated or not kernels.serves_activated(x) or self.tap.collector.sharded:
            return None
        if left is not None and (left.between is not activation.between or left.output is not x):
            left = None
        if left is not None and left.link is not None:
            if slot.pending is not left.link or left.link.previous is None:
                left = None
            else:
                slot.pending = left.link.previous  # the term that is replaced: what made it is dropped as well
        if left is None and not activation.by_column:
            return None
        coherent = left is not None and self.tap.coherent
        return activation.make(x, left, coherent=coherent, by_column=activation.by_column)


def alone_on(module: nn.Module) -> bool:
    """Whether a module has no hooks but these two: others would see what they leave it with."""
    return (
        len(module._forward_hooks) == len(module._forward_pre_hooks) == 1
        and not module._backward_hooks
        and not module._backward_pre_hooks
    )
