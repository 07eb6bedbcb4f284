"""The hooks on parts of a model whose dice are replaced: where it runs, what it is told of padding, who may call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from explicit_dropout.adapters.torch_nn import layer_padding
from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import argument_names, in_backward, named_call
from explicit_dropout.hooks.collector import Collector
from explicit_dropout.hooks.dice import Interception
from explicit_dropout.hooks.draws import Draw
from explicit_dropout.hooks.tokens import LAYER_STREAMS, PADDING
from explicit_dropout.hooks.twins import EnterHook, TwinHook


class PlaceBefore(TwinHook):
    """Before a part of the model is called: it is where draws are made from here on."""

    def __init__(self, collector: Collector, dice: Interception, path: str) -> None:
        super().__init__(collector, dice)
        self.path = path

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del part, args, kwargs
        if not self.collector.inert:
            self.dice.places.append(self.path)


class PlaceAfter(TwinHook):
    """After it was called. A call that failed ends the whole pass, and the next one begins anew."""

    def __call__(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        del part, args, kwargs, output
        if self.dice.places and not self.collector.inert:
            self.dice.places.pop()


class LayerMaskHook(TwinHook):
    """Before a layer of torch.nn is called, or a module that takes padding by the same name: what it is told of it."""

    def __init__(self, collector: Collector, dice: Interception, path: str, layer: nn.Module) -> None:
        super().__init__(collector, dice)
        self.path, self.names = path, argument_names(layer)
        self.batch_first = getattr(getattr(layer, "self_attn", None), "batch_first", True)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del layer
        if self.collector.inert or not self.collector.slot().open:
            return
        call = named_call(self.names, args, kwargs)
        told = {name: call.get(name) for name in PADDING if name in self.names}
        masks, unpadded, _ = self.collector.known()
        masks = {key: mask for key, mask in masks.items() if key[0] == self.path and key[1] not in LAYER_STREAMS}
        without = [key for key in unpadded if key[0] == self.path and key[1] not in LAYER_STREAMS]
        for name, given in told.items():
            stream = PADDING[name] if len(told) > 1 else "layer"
            mask = layer_padding({name: given})
            if mask is None:
                without += [(self.path, stream)] if stream != "layer" or PADDING[name] == "target" else []
            elif self.batch_first or mask.ndim != 2:
                masks[self.path, stream] = mask
            else:
                masks |= {(self.path, stream): mask.mT, (self.path, "turned"): mask}
        self.collector.tell(self.path, masks, None, tuple(without))


class GuardHook(TwinHook):
    """Before a module that draws is called: it must be part of a pass of the whole model, or its dice are thrown."""

    def __init__(self, entering: EnterHook, path: str) -> None:
        super().__init__(entering.collector, entering.dice)
        self.entering, self.path = entering, path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if self.collector.inert or self.entering.entered or not module.training or torch.compiler.is_compiling():
            return
        if not torch.is_grad_enabled() or draws_nothing(module):
            return
        if in_backward():
            raise CollectionError(
                f"{self.path} is run again in the backward pass, by activation checkpointing, where its dropout would "
                "be random and have no twin. Switch checkpointing off, or build the model with rate 0 and attach "
                "xd.ExplicitDropout, which knows it."
            )
        raise CollectionError(
            f"{self.path} is called in train mode outside of a training pass of the whole model that was converted, "
            "where its dropout would be random and have no twin. Call the model itself, in train mode, or convert the "
            "part that you call; or put that part into eval mode."
        )


def draws_nothing(module: nn.Module) -> bool:
    """Whether a module of dropout or attention has the rate 0."""
    if isinstance(module, nn.MultiheadAttention):
        return not module.dropout
    return isinstance(module, nn.modules.dropout._DropoutNd) and not module.p


class DropPathHook(TwinHook):
    """After a module of stochastic depth, which draws no more: the branch that it would have dropped."""

    def __init__(self, collector: Collector, dice: Interception, path: str, rate: float, rescaled: bool) -> None:
        super().__init__(collector, dice)
        self.path, self.rate, self.rescaled = path, rate, rescaled

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        del args, kwargs
        if self.collector.inert or not (module.training and self.dice.counts()):
            return None
        self.dice.check(self.path, self.rate)
        draw = Draw.of(self.path, self.rate, self.collector.known(), output, kind="drop_path", rescaled=self.rescaled)
        self.dice.draws.append(draw)
        return draw.passed
