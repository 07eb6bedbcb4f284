"""Where the terms of forward passes wait until the regulariser is called.

A term is what one firing of one site contributes: a penalty summed over its tokens, the number of tokens, and, where a
weight enters only through the norms of its columns, the column energies of the input.

Eager code writes here, each thread for itself, and so does compiled code, which has one place whatever thread runs it.
What compiled code reads here becomes a guard, so everything that grows is a chain: a new end on an old one looks the
same to the compiler however long it is.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import calls_itself, in_backward, in_transform, keeps_graph, nodes_behind
from explicit_dropout.hooks.told import Known, Lengths, Masks, Said, Samples, Told, Unpadded, is_pretrained
from explicit_dropout.hooks.torch_functions import tensors_in
from explicit_dropout.weights import modules_under_fsdp

MOST_FORWARDS = 64
"""Forward passes that may wait for a call of the regulariser; more are a loop that forgot to call it."""


@dataclass(eq=False, slots=True)
class Term:
    """What one firing of a site adds: J summed over tokens is `factor` times the sum of `penalty`, of any shape, or
    times Σ_j columns_j ‖W_:j‖². Columns are (part, column) or summed over parts, and so are the norms where they are
    given. A weight that is sharded over ranks has its norms taken when the regulariser is called.

    samples: as the layer has them, 0 where it has tokens alone. holders: the models that know better. given: what they
    were given when the site fired, which a later call of the same model does not change; None in compiled code.
    piece: which term of its firing it is; 0 is the one that every firing leaves, whatever way its penalty was made.
    version: of the weight that it was made with, which changes with every in-place operation; None if unknown."""

    site: str
    penalty: Tensor | None
    columns: Tensor | None
    tokens: int | Tensor
    samples: int
    holders: tuple[str, ...]
    factor: float = 1.0
    norms: Tensor | None = None
    piece: int = 0
    version: int | None = None
    given: Samples | None = None

    def nodes(self) -> list[Any]:
        """Where it stands in the graph."""
        return [tensor.grad_fn for tensor in (self.penalty, self.columns) if tensor is not None]

    def count(self, given: Samples) -> None:
        """The samples that models were given, if the layer can be working on them; `given` where it does not know.

        It works on parts of them where it has windows of images, and on all at once where it has all tokens in one row.
        """
        known, given = 0, given if self.given is None else self.given
        for holder in (*self.holders, ""):
            if holder in given:
                known = given[holder]
                break
        if known and (self.samples % known == 0 or self.samples == 1):
            self.samples = known
        self.samples = max(self.samples, 1)


class Chain:
    """A list that grows by a new end pointing to the old one."""

    def __init__(self, item: Any, previous: Chain | None) -> None:
        self.item, self.previous = item, previous

    def items(self) -> list[Any]:
        """Oldest first."""
        found, link = [], self
        while link.previous is not None:
            found.append(link.item)
            link = link.previous
        return found[::-1]


EMPTY = Chain(None, None)


class Observed:
    """What hooks have seen of the call of a layer that is under way: its arguments and the tensors inside it."""

    def __init__(self, call: Mapping[str, Any]) -> None:
        self.call = call
        self.tensors: dict[str, Tensor] = {}
        self.repeated: set[str] = set()  # projections that were called more than once
        self.done: set[str] = set()  # sites whose term is there already
        self.versions: dict[str, int] = {}  # of the outputs among them, which change with every in-place operation


class Slot:
    """What one thread, or compiled code, has collected.

    Attributes:
        open: whether a training forward pass of the whole model is under way.
        opened_compiled: whether it is compiled code that runs this pass.
        pending: the terms of this pass so far. complete: those of earlier ones, in a chain of chains.
        waiting: how many passes that is, in eager mode.
        padding: masks of real tokens of the last pass. They outlive it: checkpointing recomputes layers.
        unpadded: streams of the model and of models inside it that were called without a mask that they take.
        samples: how many the whole model was given, and models inside it.
        observed: calls of layers under way, by layer.
        passed: hooks that want to know whether the model changes a tensor in place, the tensor, and its version.
        taken: how often all of this was taken. freed: where backward passes that keep no graph have begun since, at
            outputs of passes that wait.
        left: an output on its way to an activation. made: by kernels, for an activation under way. activated: what came
            out of one, and its columns if kernels have them.
    """

    def __init__(self) -> None:
        self.open = False
        self.opened_compiled = False
        self.pending = EMPTY
        self.complete = Chain(None, None)  # of its own: the compiler takes two names of one object for one
        self.waiting = 0
        self.padding: Masks | None = None
        self.unpadded: Unpadded = ()
        self.samples: Samples = {}
        self.observed: dict[str, Observed] = {}
        self.passed: list[tuple[Any, Tensor, int]] = []
        self.left: Any = None
        self.made: Tensor | None = None
        self.activated: Any = None
        self.taken = 0
        self.freed: list[Any] = []

    def begin(self, call: Said) -> None:
        self.open, self.pending, self.observed, self.passed = True, EMPTY, {}, []
        self.left = self.made = self.activated = None
        self.padding, self.unpadded = call.padding, call.unpadded
        self.samples = {} if call.samples is None else {"": call.samples}

    def abandon(self) -> None:
        self.open, self.opened_compiled, self.pending, self.observed, self.passed = False, False, EMPTY, {}, []
        self.left = self.made = self.activated = None

    def notice_backward(self, output: object) -> None:
        """From here on notice a backward pass of this output that may free what the penalty needs."""
        first = next((tensor for tensor in tensors_in((output,), {}) if tensor.grad_fn is not None), None)
        if first is None or first.grad_fn is None or in_transform():
            return
        slot, number = weakref.ref(self), self.taken  # a node that knew all of this would keep it from being freed

        def before(gradients: object) -> None:
            del gradients
            found = slot()
            if found is not None and found.taken == number and not keeps_graph():
                found.freed.append(torch._C._current_autograd_node())

        first.grad_fn.register_prehook(before)

    def is_spent(self) -> bool:
        """Whether terms of passes that wait are made of what a backward pass has freed."""
        if not self.freed:
            return False
        gone = {node for node in nodes_behind(self.freed) if not hasattr(node, "variable")}  # parameters stay
        terms = (term for pending, _ in self.complete.items() for term in pending.items())
        return any(node in gone for node in nodes_behind(node for term in terms for node in term.nodes()))

    def take(self) -> list[list[Term]]:
        self.freed, self.taken = [], self.taken + 1
        forwards: list[list[Term]] = []
        for pending, samples in self.complete.items():
            terms: list[Term] = pending.items()
            for term in terms:
                term.count(samples)
            forwards.append(terms)
        self.complete, self.waiting = Chain(None, None), 0
        return forwards


class Threads(threading.local):
    """A slot for each thread."""

    def __init__(self) -> None:
        self.slot = Slot()


class Collector:
    """Terms of forward passes since the last call of the regulariser.

    A copy, by `deepcopy` or `pickle`, is inert: it has no terms and never takes any. A model can so be copied and saved
    with its hooks on; the copy is not regularised.
    """

    def __init__(self, *, inert: bool = False) -> None:
        self.inert = inert
        self.sharded = False  # whether weights are gathered for each layer's call and taken away after it
        self.held: dict[str, Tensor | None] = {}  # the weights of the model itself, by site
        self.lengths: dict[str, Lengths] = {}  # of sequences of sound, by the model that shortens them
        self.steps = 0  # of optimisers, since passes wait
        self.is_trial: Callable[[], bool] = bool
        """Whether a framework tries something out meanwhile, without the penalty: its passes are of no account."""
        self.networks: list[Any] = []  # what is known of activations, each told when a pass begins
        self.compiled = Slot()
        self.threads = Threads()

    def own(self) -> Slot:
        """The slot of this thread; of compiled code, while compiling."""
        return self.compiled if torch.compiler.is_compiling() else self.threads.slot

    def slot(self) -> Slot:
        """Where a layer's hook works: that of compiled code where this layer is an eager part of a compiled model."""
        compiled = self.compiled
        if torch.compiler.is_compiling():
            return compiled
        own: Slot = self.threads.slot
        return compiled if compiled.opened_compiled and not own.open else own

    def padding(self) -> Masks:
        """The masks of the forward pass; in another thread, such as one that recomputes layers, of the last one."""
        found = self.slot().padding
        if found is None:
            found = self.compiled.padding
        return {} if found is None else found

    def unpadded(self) -> Unpadded:
        """Streams of which it is known that they have no padding, whatever models around theirs were told."""
        slot = self.slot()
        return self.compiled.unpadded if slot.padding is None else slot.unpadded

    def known(self) -> Known:
        """All of this, as it stands: calls to come put new mappings in the places of these."""
        return Known(self.padding(), self.unpadded(), self.slot().samples)

    def tell(self, part: str, padding: Masks, samples: int | None, unpadded: Unpadded = ()) -> None:
        """A model inside the model is called: what it knows of padding, and its samples."""
        slot = self.slot()
        others = {key: mask for key, mask in (slot.padding or {}).items() if key[0] != part}
        slot.padding = {**others, **padding}
        slot.unpadded = (*(key for key in slot.unpadded if key[0] != part), *unpadded)
        if samples is not None:
            slot.samples = {**slot.samples, part: samples}
        if not torch.compiler.is_compiling():  # for layers that are compiled one by one
            self.compiled.padding, self.compiled.unpadded = slot.padding, slot.unpadded

    def begin(self, call: Said) -> None:
        """A training forward pass of the whole model starts."""
        own = self.own()
        if torch.compiler.is_compiling():
            own.opened_compiled = True
        elif own.waiting >= MOST_FORWARDS:
            self.take()
            own.abandon()
            raise CollectionError(
                f"{MOST_FORWARDS} forward passes in train mode wait for a call of the regulariser, and each keeps its "
                "graph alive; their terms are dropped now. Call the regulariser once for every backward pass, run "
                "passes that are not trained on in eval mode or under torch.no_grad(), discard() them, or remove() it. "
                "With the Trainer of transformers use ExplicitDropoutTrainer, with Lightning ExplicitDropoutCallback."
            )
        else:
            self.compiled.begin(call)  # for layers that are compiled one by one
            for network in self.networks:
                network.begin()
        own.begin(call)

    def end(self, output: object = None) -> None:
        """The forward pass has come to its end, with this output."""
        own = self.own()
        if own.open:
            if own.left is not None and not torch.compiler.is_compiling():
                self._settle(own)
            pending = own.pending
            if not torch.compiler.is_compiling():
                self._look_for_changes(own)
                for term in self.compiled.pending.items():
                    pending = Chain(term, pending)
                own.waiting += 1
                own.notice_backward(output)
            own.complete = Chain((pending, own.samples), own.complete)
        self.abandon()

    def _settle(self, slot: Slot) -> None:
        """What was left for an activation that did not come."""
        try:
            slot.left.settle()
        except CollectionError:
            self.abandon()
            raise

    def _look_for_changes(self, slot: Slot) -> None:
        """Which outputs the model has changed in place during this pass: of those a copy has to be kept."""
        touched = [hook for hook, tensor, version in slot.passed if tensor._version != version]
        without_copy = [hook.site.name for hook in touched if hook.untouched]
        for hook, _, _ in slot.passed:
            hook.untouched = hook.untouched is not False and hook not in touched
        if without_copy:
            self.abandon()
            raise CollectionError(
                f"{without_copy[0]}: the model has changed the output of this layer in place, and had not before, so "
                "no copy was kept for its penalty. From now on one is: run this step again."
            )

    def abandon(self) -> None:
        """No training forward pass is under way, or it has failed."""
        self.own().abandon()
        self.compiled.abandon()

    def is_waiting(self) -> bool:
        """Whether there are complete forward passes of this thread, or of compiled code."""
        return any(slot.complete.previous is not None for slot in (self.compiled, self.threads.slot))

    def is_spent(self) -> bool:
        """Whether a backward pass has gone through one of this thread that waits, and has freed its graph."""
        return self.threads.slot.is_spent()

    def waiting_terms(self) -> list[list[Any]]:
        """What such passes have left, without taking it."""
        slots = (self.compiled, self.threads.slot)
        return [pending.items() for slot in slots for pending, _ in slot.complete.items()]

    def take(self) -> list[list[Term]]:
        """The terms of all complete forward passes of this thread, oldest first, and forget them."""
        self.steps = 0
        return self.compiled.take() + self.own().take()

    def __deepcopy__(self, memo: object) -> Collector:
        return Collector(inert=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_collector, ()


def _inert_collector() -> Collector:
    return Collector(inert=True)


class RootBefore:
    """Before a forward pass of the whole model: open the collector if it is one of training."""

    def __init__(self, collector: Collector, model: nn.Module, *, doubting: bool) -> None:
        self.collector, self.told, self.looked = collector, Told(model, doubting=doubting), False
        self.batch_first = True  # whether all layers are
        self.last: list[tuple[nn.Module, int]] = []
        """Modules with a hook, and its number, that has to see what they are called with in the end."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.collector.inert:
            return
        if not torch.compiler.is_compiling() and self.collector.is_trial():
            self.collector.abandon()
            return
        if not torch.compiler.is_compiling() and self.collector.threads.slot.open and calls_itself(model):
            raise CollectionError(
                f"{type(model).__name__} calls itself inside its own forward pass, so the terms of both calls would be "
                "mixed up. Move what calls it twice into a module around it, and attach to that one."
            )
        if not (model.training and torch.is_grad_enabled()):
            self.collector.abandon()
            return
        if not torch.compiler.is_compiling() and in_backward():
            return  # checkpointing runs the model once more, during the backward pass: its terms were taken before
        if not self.looked and not torch.compiler.is_compiling():  # it may be sharded after it was attached to
            self.collector.sharded, self.looked = bool(modules_under_fsdp(model)), True
        if not torch.compiler.is_compiling():
            for module, number in self.last:  # others that came later may change the input, or the weight (pruning)
                hooks = module._forward_pre_hooks
                if number in hooks and next(reversed(hooks)) != number:
                    hooks[number] = hooks.pop(number)
        self.collector.begin(self.told.of(args, kwargs, self.batch_first))


class PartBefore:
    """Before the call of a model inside the model: what it is told of padding, and how many samples it is given."""

    def __init__(self, collector: Collector, part: nn.Module, owner: str, whole: nn.Module, *, doubting: bool) -> None:
        self.collector, self.told, self.owner = collector, Told(part, owner, whole, doubting=doubting), owner
        self.batch_first = is_pretrained(part)

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.collector.inert and part.training and torch.is_grad_enabled():
            call = self.told.of(args, kwargs, self.batch_first)
            self.collector.tell(self.owner, call.padding, call.samples, call.unpadded)


def failed(output: object) -> bool:
    """Whether an error has cut short the call whose hooks are running now. It has no output then."""
    return not torch.compiler.is_compiling() and output is None and sys.exc_info()[0] is not None


class RootAfter:
    """After a forward pass of the whole model: its terms are complete, unless it has failed."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        del model, args, kwargs
        if self.collector.inert:
            return
        if failed(output):
            self.collector.abandon()
        else:
            self.collector.end(output)
