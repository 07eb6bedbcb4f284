"""The hooks of an activation inside a feed-forward network: kernels make it, and the energies around it.

Whether an activation stands there is seen, not guessed: its input has to be the very output of the first layer, its
output the very input of the last, both as they were. In eager code a first pass shows it, in which the layers are
measured by themselves, and later passes go by what it has shown. A compiler does not tell whether a tensor was changed
in place; so compiled code has activations made only where the code around them is of a library that is known not to.

An activation that is written out, operation by operation, may give float32 back for less: autocast says so of some
operations. Kernels give back the precision that they are given, so they make it where it goes straight to a layer that
lowers it to that again.

Under activation checkpointing, or other hooks on what autograd saves, activations are left alone: a pass and its
repetition would have to agree on who makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from explicit_dropout import kernels
from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import only_input, with_input
from explicit_dropout.hooks.collector import Chain, Slot
from explicit_dropout.hooks.taps import Tap, TapHook, by_sample, in_order
from explicit_dropout.sites import Site


class Between:
    """What is known of one network: by whom its activations may be made, and what passes have shown.

    compiled: whether compiled code has its activation made. ready: the first layers, by the names of their sites, whose
    energies eager passes take at the activation, the activations that have the columns for the last layer, and those
    that kernels may make, each with what it is given them in.
    """

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled
        self.ready: set[Any] = set()
        self.shown: set[Any] = set()
        self.refused: set[Any] = set()  # None as well, which is none of the others

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

    tap: Tap
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

    def add(self, energies: Tensor) -> None:
        tap = self.tap
        tap.add(self.site, energies, None, self.tokens, self.mask, tap.coherence, piece=tap.coherent_piece)

    def settle(self) -> None:
        """It has not come to the activation that it came to before: take its energy by itself, now and ever after."""
        if self.deferred:
            self.between.refused.add(self.site.name)
            self.take()

    def take(self) -> None:
        """Take its energy by itself."""
        if self.output._version != self.version:
            raise CollectionError(
                f"{self.site.name}: the model has changed the output of this layer in place on its way to an "
                "activation and had not before, so that what its penalty is of is gone. From now on it is taken at the "
                "layer itself: run this step again."
            )
        self.add(kernels.passing(self.output, bias=self.bias, mask=self.rows)[1])


Precision = tuple["Activation", torch.dtype, torch.dtype | None]
"""An activation, what it is given, and what autocast lowers to."""


class Activation:
    """One activation of a network: its hooks, before and after, and what they share."""

    def __init__(self, tap: Tap, between: Between, kind: str, *, by_column: bool) -> None:
        self.tap, self.between, self.kind = tap, between, kind
        self.by_column = by_column and bool(tap.noise.variance)
        """Whether the last layer has a penalty that is made of the columns of what comes out."""

    def make(
        self, x: Tensor, left: Left | None, *, coherent: bool, by_column: bool, like: Tensor | None = None
    ) -> Tensor:
        """The activation, leaving the term of the first layer and the columns for the last.

        like: has the precision in which it goes on, where that is not the one of x.
        """
        if left is None:
            tokens, mask = by_sample(self.tap, x)
            given: tuple[Any, ...] = (x, None, in_order(mask, tokens, x))
        else:
            given = left.x, left.bias, left.rows
        made, energies, columns = kernels.activated(
            self.kind, *given, added=left is None or left.added, coherent=coherent, by_column=by_column
        )
        if left is not None and coherent:
            left.add(energies)
        made = made if like is None or like.dtype == made.dtype else made.to(like.dtype)
        if by_column:
            self.tap.collector.slot().activated = Activated(self, made, columns, x.dtype)
        return made

    def precision(self, x: Tensor) -> Precision:
        kind = x.device.type
        lower = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self, x.dtype, lower


class Activated:
    """What came out of an activation, as it was then, and its columns if kernels have them.

    given: the precision of what it was made of, which is that of what kernels make. precision: what is to be shown, if
    the module gave it back in another one.
    """

    def __init__(
        self, activation: Activation, output: Tensor, columns: Tensor | None, given: torch.dtype,
        precision: Precision | None = None,
    ) -> None:  # fmt: skip
        self.activation, self.output, self.columns, self.given = activation, output, columns, given
        self.precision = precision
        self.version = None if torch.compiler.is_compiling() else output._version


def arrived(slot: Slot, between: Between, x: Tensor, plain: bool) -> Activated | None:
    """What came out of an activation, if the last layer is given just that, in the precision in which kernels make it.

    plain: whether the layer lets autocast lower x.
    """
    activated: Activated | None = slot.activated
    slot.activated = None
    if activated is None:
        return None
    seen = (kernels.lowered(x) if plain else None) or x.dtype
    if not is_still(x, activated) or seen != activated.given:
        between.refused |= {activated.activation, activated.precision}
        return None
    if activated.precision is not None:
        between.shown.add(activated.precision)
    return activated


def is_still(x: Tensor, seen: Left | Activated) -> bool:
    """Whether eager code comes with the very tensor that was seen, and has not changed it in place since."""
    return x is seen.output and x._version == seen.version


class BeforeActivation(TapHook):
    """Eager code: makes the activation, and leaves nothing for the module itself to do."""

    def __init__(self, activation: Activation) -> None:
        super().__init__(activation.tap)
        self.activation = activation

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling() or not self.tap.watching(module):
            return None
        activation, slot = self.activation, self.tap.collector.slot()
        x = only_input(self.tap.path, args, kwargs)
        if not (free(slot) and alone_on(module) and kernels.serves_activated(x)):
            return None
        between, left = activation.between, slot.left
        if left is None or left.between is not between or not is_still(x, left):
            left = None
        else:
            slot.left = None
            if not left.deferred:
                between.shown.add(left.site.name)
                left = None
        by_column = activation in between.ready
        if left is None and not by_column:
            return None
        if activation.precision(x) not in between.ready:
            if left is not None:
                left.take()
            return None
        slot.made = activation.make(x, left, coherent=left is not None, by_column=by_column)
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
            return self._compiled(only_input(self.tap.path, args, kwargs), output, slot) if alone_on(module) else None
        made, slot.made = slot.made, None
        if made is None:
            self._look(only_input(self.tap.path, args, kwargs), output, slot, alone_on(module))
        return made

    def _look(self, x: Tensor, output: Tensor, slot: Slot, alone: bool) -> None:
        """The module has made its output itself: see in which precision, and where it goes."""
        activation = self.activation
        if not (alone and free(slot) and kernels.serves_activated(x) and kernels.serves_activated(output)):
            return
        precision, wider = activation.precision(x), output.dtype != x.dtype
        if not wider:
            activation.between.shown.add(precision)
        if wider or activation.by_column:
            slot.activated = Activated(activation, output, None, x.dtype, precision if wider else None)

    def _compiled(self, x: Tensor, output: Tensor, slot: Slot) -> Tensor | None:
        activation, between = self.activation, self.activation.between
        left, slot.left = slot.left, None
        if not between.compiled or not kernels.serves_activated(x) or self.tap.collector.sharded:
            return None
        if output.dtype != x.dtype and kernels.lowered(output) != x.dtype:
            return None
        if left is not None and (left.between is not between or left.output is not x):
            left = None
        if left is not None and left.link is not None:
            if slot.pending is not left.link or left.link.previous is None:
                left = None
            else:
                slot.pending = left.link.previous  # the term that is replaced: what made it is dropped as well
        if left is None and not activation.by_column:
            return None
        coherent = left is not None and self.tap.coherent
        return activation.make(x, left, coherent=coherent, by_column=activation.by_column, like=output)


def free(slot: Slot) -> bool:
    """Whether a pass is under way whose saved tensors nobody looks at: not checkpointing, nor what it repeats."""
    return slot.open and torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def alone_on(module: nn.Module) -> bool:
    """Whether a module has no hooks but these two: others would see what they leave it with."""
    if len(module._forward_hooks) != 1 or len(module._forward_pre_hooks) != 1:
        return False
    if module._backward_hooks or module._backward_pre_hooks:
        return False
    return torch.compiler.is_compiling() or not _has_any_global_hook()  # type: ignore[no-untyped-call]
