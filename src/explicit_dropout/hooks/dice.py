"""Every dropout that a model draws while it runs, seen where torch is called, whatever module or function calls it.

Inside a training forward pass of the whole model each call of a dropout function returns its input, and is noted as a
`Draw` together with what the model does with the result. So the dice are off everywhere, also where they are no modules
(`F.dropout`, `dropout_p` of fused attention), and no rule for a model family is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from explicit_dropout.errors import UnsupportedSiteError
from explicit_dropout.hooks.calls import is_checkpointing, is_in_function
from explicit_dropout.hooks.collector import Collector
from explicit_dropout.hooks.draws import AttentionParts, Draw, Use, Weighed
from explicit_dropout.hooks.fused import attention_parts, multihead_parts
from explicit_dropout.hooks.torch_functions import (
    ADDING,
    ATTENTION,
    DROPOUTS,
    HEADS,
    LOOKS,
    MULTIHEAD,
    RANDOM,
    SAME,
    SOFTMAX,
    SWITCHED,
    TIED,
    WEIGHING,
    bound,
    channels_of,
    tensors_in,
)
from explicit_dropout.hooks.uses import use_of

Others = Literal["refuse", "keep"]


class Interception(TorchFunctionMode):
    """Turns dropout off while it is entered, and notes the draws of a training pass."""

    def __init__(self, model: nn.Module, collector: Collector, others: Others) -> None:
        super().__init__()
        self.collector, self.others = collector, others
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.rates = {rate for module in model.modules() for rate in vars(module).values() if type(rate) is float}
        """Numbers that modules have, rates of dropout among them: a compiler may take those for variables."""
        self.collecting = False
        self.places: list[str] = []
        """The parts of the model that are running, outermost first, as far as hooks on them say: for compiled code."""
        self.draws: list[Draw | Weighed] = []
        self.dropped: list[tuple[Tensor, Draw]] = []
        """What dropout functions have returned, and the same rows in another shape."""
        self.known: dict[int, Draw] = {}
        """The same by id, of those that no compiled code has made."""
        self.weights: list[Tensor] = []
        """What a softmax has made, as it is or masked."""

    def __getstate__(self) -> dict[str, Any]:
        """Copies have nothing of a pass that was interrupted."""
        return {**self.__dict__, "places": [], "draws": [], "dropped": [], "known": {}, "weights": []}

    def enter(self, collecting: bool) -> None:
        self._clear()
        self.collecting, self.draws = collecting, []
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        if torch.compiler.is_compiling() or _get_current_function_mode() is self:  # type: ignore[no-untyped-call]
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def take(self, output: object) -> list[Draw | Weighed]:
        """The draws of the pass, now that it is over: what it returns is used by somebody.

        Attention weights are returned to be looked at (output_attentions): what acts is their product with values.
        """
        for item in tensors_in((output,), {}) if self.dropped else ():
            draw = self._of(item)
            if draw is not None and not draw.weights:
                draw.uses.append(Use(None))
        draws, self.collecting, self.draws = self.draws, False, []
        self._clear()
        return draws

    def _clear(self) -> None:
        self.places, self.dropped, self.known, self.weights = [], [], {}, []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in DROPOUTS or func in TIED or func is HEADS:
            return self._dropout(func, args, given)
        if func is ATTENTION:
            return self._attention(args, given)
        if func is MULTIHEAD:
            return self._multihead(args, given)
        if func in RANDOM and self.others == "refuse":
            self._refuse(func, args, given)
        result = self._using(func, args, given) if self.dropped else func(*args, **given)
        if self.collecting and (func in SOFTMAX or self._keeps_weights(func, args)):
            self.weights.append(result)
        return result

    def _keeps_weights(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether a function makes attention weights of some: in another form, masked, or with a constant added."""
        if func in ADDING:
            return self._is_weights(args[0]) and not any(isinstance(other, Tensor) for other in args[1:])
        return func in WEIGHING and any(map(self._is_weights, args))

    def _is_weights(self, tensor: object) -> bool:
        return any(tensor is found for found in self.weights[-8:])

    # ------------------------------------------------------------------------------------------ dice

    def _dropout(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = bound(func, args, kwargs)
        x, rate = call["input"], self._rate(call["p"])
        training = call.get("training", call.get("train", True))
        path = self.here() if training and rate else None
        if path is None:
            return self._using(func, args, kwargs)
        self._note_uses(args, kwargs, None)
        in_place = bool(call.get("inplace", False))
        if not self.counts():
            return x if in_place else x.clone()
        self.check(path, rate)
        facts: dict[str, Any] = {"weights": self._is_weights(x)}
        if func in TIED:
            facts |= {"kind": "hidden", "axis": channels_of(func, x)}
        elif func is HEADS:
            facts = {"kind": "drop_head", "weights": True}
        draw = Draw.of(path, rate, self.collector.known(), x, in_place=in_place, **facts)
        self.draws.append(draw)
        self._mark(draw.passed, draw)
        return draw.passed

    def _rate(self, given: float) -> float:
        """A rate as a plain number, also where code is compiled for any value of it."""
        if torch.compiler.is_compiling():
            for rate in self.rates:
                if given == rate:
                    return rate
            return given  # one that has come since: compiled for any value of it
        return float(given)

    def _attention(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = bound(ATTENTION, args, kwargs)
        self._note_uses(args, kwargs, None)
        rate = self._rate(call["dropout_p"])
        path = self.here() if rate else None
        if path is None:
            return ATTENTION(*args, **kwargs)
        if self.counts():
            self.check(path, rate)
            self._weighed(path, rate, lambda: attention_parts(call), call)
        return ATTENTION(**{**call, "dropout_p": 0.0})

    def _multihead(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        call = bound(MULTIHEAD, args, kwargs)
        self._note_uses(args, kwargs, None)
        rate = self._rate(call["dropout_p"])
        path = self.here() if rate and call["training"] else None
        if path is None:
            return MULTIHEAD(*args, **kwargs)
        if self.counts():
            self.check(path, rate)
            if call["bias_k"] is not None or call["add_zero_attn"] or call["static_k"] is not None:
                raise UnsupportedSiteError(
                    f"{path}: bias_k, add_zero_attn and static keys append to what is attended, and the twin of its "
                    "dropout does not know them. Build the module without them, or with dropout=0."
                )
            self._weighed(path, rate, lambda: multihead_parts(call), call)
        return MULTIHEAD(**{**call, "dropout_p": 0.0})

    def _weighed(self, path: str, rate: float, parts: Callable[[], AttentionParts], call: Mapping[str, Any]) -> None:
        self.draws.append(Weighed(path, rate, self.collector.known(), parts, tuple(tensors_in((), call))))

    def counts(self) -> bool:
        """Whether a draw has a twin: not where the model itself runs a part without gradients, such as a teacher."""
        return self.collecting and (torch.is_grad_enabled() or is_checkpointing())

    def check(self, path: str, rate: float) -> None:
        where = path or "the model"
        if rate >= 1:
            raise UnsupportedSiteError(f"{where}: dropout at rate {rate:g} leaves nothing, and has no expectation.")
        if is_checkpointing():
            raise UnsupportedSiteError(
                f"{where}: activation checkpointing would run it again in the backward pass, with its dice. Switch "
                "checkpointing off, or build the model with rate 0 and attach xd.ExplicitDropout, which knows it."
            )

    def _refuse(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        call = kwargs if "training" in kwargs else dict(zip(("input", "p", "training"), args, strict=False))
        if func in SWITCHED and (call.get("training") is False or call.get("p") == 0):
            return
        name, path = getattr(func, "__name__", str(func)), self.here()
        if path is None:
            return
        own = " The modules of xd.stochastic have one in code that is not compiled: compilers look into them."
        raise UnsupportedSiteError(
            f"{path or 'the model'} draws random numbers by {name}, which has no deterministic twin here. If it is "
            "meant to stay random (or is drawn for nothing, as for LayerDrop at rate 0): others='keep'."
            + (own if torch.compiler.is_compiling() and func is torch.rand else "")
        )

    def here(self) -> str | None:
        """The path of the innermost module of the model that is running; None if none is: a pass was interrupted.

        Compiled code has no frames to look at, and knows the innermost model or layer of torch.nn alone. Nor is any
        after `remove`, which cannot take this off where somebody else's mode lies on top.
        """
        if self.collector.inert:
            return None
        if torch.compiler.is_compiling():
            return self.places[-1] if self.places else ""
        frame: FrameType | None = sys._getframe(1)  # not this one: what it holds would hold it, as garbage does
        while frame is not None:
            path: str | None = self.paths.get(id(frame.f_locals.get("self")))
            if path is not None:
                return path
            frame = frame.f_back
        return None

    # ------------------------------------------------------------------------------------------ what is done with it

    def _using(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function, and note it if it makes something of a dropped tensor."""
        if not any(self._of(item) is not None for item in tensors_in(args, kwargs)):
            return func(*args, **kwargs)
        first = self._of(args[0]) if args and isinstance(args[0], Tensor) else None
        result = func(*args, **kwargs)
        nothing_done = func in SAME or func in DROPOUTS  # which come here only where they draw nothing
        if first is not None and nothing_done and result.shape[-1:] == args[0].shape[-1:]:
            self._mark(result, first)
            return result
        made = list(tensors_in((result,), {}))
        if func is Tensor.__setitem__ or any(item.requires_grad for item in made):
            self._note_uses(args, kwargs, func)  # and not what only looks at it
        elif is_in_function():
            self._note_uses(args, kwargs, None)  # of which torch tells nothing but what it computes with
        elif func not in LOOKS and any(item.dtype.is_floating_point and item.ndim for item in made):
            self._note_uses(args, kwargs, func, frozen=True)
        return result

    def _note_uses(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], func: Any, *, frozen: bool = False) -> None:
        """frozen: only of tensors that nothing which learns has made, and whose uses do not show by gradients."""
        if frozen and not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
            return
        for item in tensors_in(args, kwargs):
            draw = self._of(item)
            if draw is not None and not (frozen and item.requires_grad):
                draw.uses.append(use_of(item, func, args, kwargs))

    def _mark(self, tensor: Tensor, draw: Draw) -> None:
        self.dropped.append((tensor, draw))  # which keeps it, so that its id stays
        if not torch.compiler.is_compiling():
            self.known[id(tensor)] = draw

    def _of(self, item: Tensor) -> Draw | None:
        """The draw that a tensor is the result of."""
        if not torch.compiler.is_compiling():
            found = self.known.get(id(item))
            if found is not None or len(self.known) == len(self.dropped):
                return found
        for tensor, draw in self.dropped:
            if tensor is item:
                return draw
        return None
