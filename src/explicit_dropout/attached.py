"""What every regulariser that hangs on a model has: it is called after a forward pass, tells its terms, and goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from explicit_dropout.errors import CollectionError, InputError
from explicit_dropout.hooks.collector import Collector, Term
from explicit_dropout.hooks.total import Total
from explicit_dropout.refusals import check_state
from explicit_dropout.selection import Silenced, still_random
from explicit_dropout.strengths import Schedule

Reduction = Literal["token", "sample"]


class Named(Protocol):
    """What the places of a regulariser have in common: a name that is theirs alone, and a kind."""

    @property
    def name(self) -> str: ...

    @property
    def component(self) -> str: ...


class Attached(ABC):
    """Hooks on a model that collect what a penalty is made of, and how to be rid of them."""

    model: nn.Module
    sites: Sequence[Named]
    _schedules: Mapping[Any, Schedule]

    def __init__(self) -> None:
        self.calls = 0
        self.silenced = Silenced()
        self._total, self._collector = Total(), Collector()
        self._handles: list[RemovableHandle] = []
        self._removed = False

    def _collected(self) -> list[list[Any]]:
        """What was collected in each forward pass since the last call."""
        if self._removed:
            raise CollectionError("the regulariser was removed from its model; attach a new one")
        if self._collector.inert:
            raise CollectionError("this regulariser is a copy, and copies are not attached; attach a new one")
        steps, spent = self._collector.steps, self._collector.is_spent()
        forwards = self._collector.take()
        if steps and forwards:
            raise CollectionError(
                f"an optimiser of {type(self.model).__name__} has made a step since a forward pass that waits for this "
                "call, whose weights are gone. Call the regulariser after every forward pass in train mode, before "
                "weights change, or discard() passes that are not to be regularised. The terms of all passes are "
                "dropped now."
            )
        if spent and forwards:
            raise CollectionError(
                f"a backward pass has gone through a forward pass of {type(self.model).__name__} that waits for this "
                "call, and has freed its graph. Call the regulariser first, and differentiate loss + reg() at once. "
                "discard() passes that are not to be regularised, such as those that look for adversarial examples or "
                "train another network. The terms of all passes are dropped now."
            )
        return forwards

    def strengths(self) -> dict[str, float]:
        """The λ of every site at the next call, by site name."""
        return {site.name: self._schedule(site).at(self.calls) for site in self.sites}

    def _schedule(self, site: Any) -> Schedule:
        return self._schedules[site.name]

    @contextmanager
    def _attaching(self) -> Iterator[None]:
        """Nothing is left on a model that could not be attached to."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    @abstractmethod
    def summary(self) -> str:
        """What is attached, as a table."""

    def _state_lines(self) -> list[str]:
        """What a summary ends with: which dropout is off, and which is still random."""
        if self._removed:
            return ["Removed: nothing is attached any more."]
        return [*self.silenced.lines(self.model), *still_random(self.model)]

    def remove(self) -> None:
        """Take every hook off and give the model its stochastic dropout back."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.silenced.switch_on()
        self._collector.inert = self._removed = True
        self._collector.take()

    def discard(self) -> None:
        """Forget the forward passes since the last call, as if they had been made in eval mode.

        For batches that are skipped and for passes whose loss has no penalty. Schedules stay where they are.
        """
        self._collector.take()

    def terms(self) -> dict[str, Tensor]:
        """The unweighted J of every site at the last call, detached, by site name: for logging."""
        found = self._total.terms()
        return {site.name: found[site.name] for site in self.sites if site.name in found}

    def state_dict(self) -> dict[str, int]:
        """Where the schedules stand."""
        return {"calls": self.calls}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.calls = check_state(state)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        return self.summary()


class LayerLevel(Attached):
    """A penalty that is complete once the model has run, of which nothing but its layers has to be known."""

    def __call__(self) -> Tensor:
        """Σ λ J over the forward passes since the last call, as one float32 number to add to the loss.

        Several forward passes count as one batch. A module that fires several times in one (a shared layer) adds up.
        """
        if torch.compiler.is_compiling():  # or every step of a schedule would be compiled anew
            outside = torch.compiler.disable(self._taken)  # type: ignore[no-untyped-call]
            return outside()  # type: ignore[no-any-return]
        return self._taken()

    def _taken(self) -> Tensor:
        return self._penalty(self._collected())

    @abstractmethod
    def _penalty(self, forwards: list[list[Term]]) -> Tensor:
        """The penalty of these forward passes."""


def firings(forwards: list[list[Term]], reduction: Reduction) -> Iterable[tuple[list[Term], int | Tensor]]:
    """The terms of all forward passes, those of the same firing of a site together, and what they are a mean over.

    Passes may have made a penalty in different ways, of one term or of several: a firing counts where its first is.
    """
    if len(forwards) == 1:
        return [([term], _counted(term, reduction)) for term in forwards[0]]
    found: dict[tuple[str, int], list[Term]] = {}
    for forward in forwards:
        seen: dict[tuple[str, int], int] = {}
        for term in forward:
            kind = term.site, term.piece
            seen[kind] = seen.get(kind, -1) + 1
            found.setdefault((term.site, seen[kind]), []).append(term)
    return [(terms, sum([_counted(term, reduction) for term in terms if term.piece == 0])) for terms in found.values()]


def _counted(term: Term, reduction: Reduction) -> int | Tensor:
    return term.tokens if reduction == "token" else term.samples


def uncompiled(model: nn.Module) -> nn.Module:
    """The model itself, if this is what `torch.compile` made of it: only hooks inside are compiled."""
    if not isinstance(model, nn.Module):
        raise InputError("model", "a torch.nn.Module", type(model).__name__)
    while type(model).__name__ == "OptimizedModule" and isinstance(model._orig_mod, nn.Module):
        model = model._orig_mod
    return model
