"""Where the terms of forward passes wait until the regulariser is called.

A term is what one firing of one site contributes: a penalty summed over its tokens, the number of tokens, and, where a
weight enters only through the norms of its columns, the column energies of the input.

Eager code writes here, each thread for itself, and so does compiled code, which has one place whatever thread runs it.
What compiled code reads here becomes a guard, so everything that grows is a chain: a new end on an old one looks the
same to the compiler however long it is.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import argument_names, around, calls_itself, named_call
from explicit_dropout.sites import visible
from explicit_dropout.weights import modules_under_fsdp

MOST_FORWARDS = 64
"""Forward passes that may wait for a call of the regulariser; more are a loop that forgot to call it."""
PADDING_ARGUMENTS = {
    "main": "attention_mask",
    "decoder": "decoder_attention_mask",
    "context": "encoder_attention_mask",
}
"""Arguments of a whole model that mark real tokens, (batch, token): of its first sequence, of its decoder's, and of the
one that cross-attention looks at where the model is given it (`encoder_hidden_states`); otherwise that is the first."""

Padding = dict[tuple[str, str], Tensor]
"""Masks of real tokens, (batch, token), by the path of the model that was told and by stream."""
Lengths = Callable[[Tensor], Tensor]
"""How many tokens convolutions make of sequences of such lengths."""
Samples = dict[str, int]
"""How many samples models were given, where that is known, by their paths."""


@dataclass(eq=False, slots=True)
class Term:
    """What one firing of a site adds: J summed over tokens is `factor` times the sum of `penalty`, of any shape, or
    times Σ_j columns_j ‖W_:j‖². Columns are (part, column) or summed over parts, and so are the norms where they are
    given. A weight that is sharded over ranks has its norms taken when the regulariser is called.

    samples: as the layer has them, 0 where it has tokens alone. holders: the models that know better.
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

    def count(self, given: Samples) -> None:
        """The samples that models were given, unless the layer cannot be working on parts of them.

        Windows of images are parts, and so are all tokens in one row.
        """
        known = 0
        for holder in (*self.holders, ""):
            if holder in given:
                known = given[holder]
                break
        if known and self.samples % known == 0:
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
        samples: how many the whole model was given, and models inside it.
        observed: calls of layers under way, by layer.
        passed: hooks that want to know whether the model changes a tensor in place, the tensor, and its version.
    """

    def __init__(self) -> None:
        self.open = False
        self.opened_compiled = False
        self.pending = EMPTY
        self.complete = Chain(None, None)  # of its own: the compiler takes two names of one object for one
        self.waiting = 0
        self.padding: Padding | None = None
        self.samples: Samples = {}
        self.observed: dict[str, Observed] = {}
        self.passed: list[tuple[Any, Tensor, int]] = []

    def begin(self, padding: Padding, samples: Samples) -> None:
        self.open, self.pending, self.observed, self.passed = True, EMPTY, {}, []
        self.padding, self.samples = padding, samples

    def abandon(self) -> None:
        self.open, self.opened_compiled, self.pending, self.observed, self.passed = False, False, EMPTY, {}, []

    def take(self) -> list[list[Term]]:
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

    def padding(self) -> Padding:
        """The masks of the forward pass; in another thread, such as one that recomputes layers, of the last one."""
        found = self.slot().padding
        if found is None:
            found = self.compiled.padding
        return {} if found is None else found

    def tell(self, part: str, padding: Padding, samples: int | None) -> None:
        """A model inside the model is called: what it knows of padding, and its samples."""
        slot = self.slot()
        others = {key: mask for key, mask in (slot.padding or {}).items() if key[0] != part}
        slot.padding = {**others, **padding}
        if samples is not None:
            slot.samples = {**slot.samples, part: samples}
        if not torch.compiler.is_compiling():
            self.compiled.padding = slot.padding  # for layers that are compiled one by one

    def begin(self, padding: Padding, samples: int | None = None) -> None:
        """A training forward pass of the whole model starts."""
        own, given = self.own(), {} if samples is None else {"": samples}
        if torch.compiler.is_compiling():
            own.opened_compiled = True
        elif own.waiting >= MOST_FORWARDS:
            own.take()
            own.abandon()
            raise CollectionError(
                f"{MOST_FORWARDS} forward passes in train mode wait for a call of the regulariser, and each keeps its "
                "graph alive; their terms are dropped now. Call the regulariser once for every backward pass, run "
                "passes that are not trained on in eval mode or under torch.no_grad(), discard() them, or remove() it."
            )
        else:
            self.compiled.begin(padding, given)  # for layers that are compiled one by one
        own.begin(padding, given)

    def end(self) -> None:
        """The forward pass has come to its end."""
        own = self.own()
        if own.open:
            pending = own.pending
            if not torch.compiler.is_compiling():
                self._look_for_changes(own)
                for term in self.compiled.pending.items():
                    pending = Chain(term, pending)
                own.waiting += 1
            own.complete = Chain((pending, own.samples), own.complete)
        self.abandon()

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

    def take(self) -> list[list[Term]]:
        """The terms of all complete forward passes of this thread, oldest first, and forget them."""
        return self.compiled.take() + self.own().take()

    def __deepcopy__(self, memo: object) -> Collector:
        return Collector(inert=True)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inert_collector, ()


def _inert_collector() -> Collector:
    return Collector(inert=True)


class PaddingMasks:
    """What the calls of a model, the whole one or one inside it (at the path `owner`), say about real tokens."""

    def __init__(self, model: nn.Module, owner: str = "") -> None:
        self.names, self.owner = argument_names(model), owner
        self.has_encoder = any("encoder" in path.split(".") for path, _ in model.named_modules())

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Padding:
        call, found = named_call(self.names, args, kwargs), {}
        given = (value for name, value in call.items() if name not in PADDING_ARGUMENTS.values())
        alone = next((value.shape[0] == 1 for value in given if isinstance(value, Tensor) and value.ndim > 1), False)
        for stream, name in PADDING_ARGUMENTS.items():
            mask = real_tokens(call.get(name), alone=alone)
            if mask is not None:
                found[stream] = mask
        if "main" in found and not self.has_encoder:
            found["main"] = found["main"][:, cached(call.get("past_key_values")) :]
        if "main" in found and call.get("encoder_hidden_states") is None:
            found["context"] = found["main"]
        if "main" in found and not self.has_encoder:
            found["decoder"] = found["main"]  # a decoder alone has no other sequence
        return {(self.owner, stream): mask for stream, mask in found.items()}


def real_tokens(mask: object, *, alone: bool = False) -> Tensor | None:
    """Tokens that count, (batch, token), by a mask of them, or by one of pairs that any query sees them in.

    alone: the batch is of one sample, so that a mask of one is no mask for any batch.
    """
    if not isinstance(mask, Tensor):
        return None
    if mask.ndim == 2 and mask.is_floating_point():  # ones and zeros, or what is added to scores: nothing above zero
        return torch.where((mask <= 0).all(), visible(mask), mask > 0)
    if mask.ndim == 2:
        return mask.bool()
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[2] not in (1, mask.shape[3]):
        return None  # of heads, or of other keys than queries
    if mask.shape[0] == 1 and not alone:
        return None
    seen = visible(mask) if mask.is_floating_point() else mask.bool()
    return seen.any(2)[:, 0]


def cached(past: Any) -> int:
    """How many tokens a cache holds that come before those of this call, and that a mask of real tokens has as well."""
    if isinstance(past, tuple | list) and past:
        return int(past[0][0].shape[-2])
    return int(past.get_seq_length()) if hasattr(past, "get_seq_length") else 0


def lengths_of(model: nn.Module) -> Lengths | None:
    """How a model of transformers shortens sound before its layers see it; None for one that does not."""
    counting = getattr(model, "_get_feat_extract_output_lengths", None)
    if counting is None or not is_pretrained(model):
        return None
    adapted = "add_adapter" in inspect.signature(counting).parameters  # which comes after the layers
    return partial(counting, add_adapter=False) if adapted else counting


def shortened(mask: Tensor, tokens: int, lengths: Lengths) -> Tensor:
    """Which tokens are made of real sound, by a mask of what it was before."""
    return torch.arange(tokens, device=mask.device) < lengths(mask.sum(-1))[:, None]


def holders_of(model: nn.Module, path: str) -> tuple[str, ...]:
    """The paths of the models that say what the layer at a path works on, innermost first.

    Models of transformers do, each for itself: what is around them may have arguments of the same names for something
    else. Without any it is the outermost module that is told of padding, or the whole model.
    """
    holding = list(around(model, path))
    own = [outer for outer, part in holding if is_pretrained(part)]
    return tuple(own[::-1]) or (next((outer for outer, part in holding if told(part)), ""),)


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def told(model: nn.Module) -> bool:
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return False
    return not set(PADDING_ARGUMENTS.values()).isdisjoint(argument_names(model))


class RootBefore:
    """Before a forward pass of the whole model: open the collector if it is one of training."""

    def __init__(self, collector: Collector, model: nn.Module) -> None:
        self.collector, self.masks, self.looked = collector, PaddingMasks(model), False
        self.batch_first = True  # whether all layers are
        self.last: list[tuple[nn.Module, int]] = []
        """Modules with a hook, and its number, that has to see what they are called with in the end."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.collector.inert:
            return
        if not torch.compiler.is_compiling() and self.collector.threads.slot.open and calls_itself(model):
            raise CollectionError(
                f"{type(model).__name__} calls itself inside its own forward pass, so the terms of both calls would be "
                "mixed up. Move what calls it twice into a module around it, and attach to that one."
            )
        if not (model.training and torch.is_grad_enabled()):
            self.collector.abandon()
            return
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            return  # checkpointing runs the model once more, during the backward pass: its terms were taken before
        if not self.looked and not torch.compiler.is_compiling():  # it may be sharded after it was attached to
            self.collector.sharded, self.looked = bool(modules_under_fsdp(model)), True
        if not torch.compiler.is_compiling():
            for module, number in self.last:  # others that came later may change the input, or the weight (pruning)
                hooks = module._forward_pre_hooks
                if number in hooks and next(reversed(hooks)) != number:
                    hooks[number] = hooks.pop(number)
        self.collector.begin(self.masks.of(args, kwargs), samples_of((*args, *kwargs.values()), self.batch_first))


class PartBefore:
    """Before the call of a model inside the model: what it is told of padding, and how many samples it is given."""

    def __init__(self, collector: Collector, part: nn.Module, owner: str) -> None:
        self.collector, self.masks, self.owner = collector, PaddingMasks(part, owner), owner

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.collector.inert and part.training and torch.is_grad_enabled():
            samples = samples_of((*args, *kwargs.values()), is_pretrained(part))
            self.collector.tell(self.owner, self.masks.of(args, kwargs), samples)


def samples_of(arguments: Iterable[object], batch_first: bool) -> int | None:
    """How many samples a model is given, if its first tensor says so: images, vectors or numbers of tokens.

    Layers may see them otherwise: as windows of images, or all tokens in one row.
    """
    first = first_tensor(arguments)
    if first is None:
        return None
    of_tokens = first.ndim == 2 and not first.is_floating_point()
    return first.shape[0] if batch_first and (of_tokens or first.ndim > 2) else None


def first_tensor(arguments: Iterable[object]) -> Tensor | None:
    """The first there is, also in lists and mappings."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        inside: Iterable[object] = ()
        if isinstance(argument, Mapping):
            inside = argument.values()
        elif isinstance(argument, list | tuple):
            inside = argument
        found = first_tensor(inside)
        if found is not None:
            return found
    return None


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
            self.collector.end()
