"""The hooks on parts of a model whose dice are replaced: where it runs, what it is told of padding, who may call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from explicit_dropout.adapters.torch_nn import layer_padding
from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import argument_names, named_call
from explicit_dropout.hooks.collector import Collector
from explicit_dropout.hooks.dice import Interception
from explicit_dropout.hooks.draws import Draw
from explicit_dropout.hooks.tokens import PADDING
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
        given = [name for name in PADDING if call.get(name) is not None]
        mask = layer_padding({given[0]: call[given[0]]}) if len(given) == 1 else None
        masks = {key: known for key, known in self.collector.padding().items() if key[0] == self.path}
        if mask is not None and not self.batch_first and mask.ndim == 2:
            masks |= {(self.path, "layer"): mask.mT, (self.path, "turned"): mask}
        elif mask is not None:
            masks[self.path, "layer"] = mask
        self.collector.tell(self.path, masks, None)


class GuardHook(TwinHook):
    """Before a module that draws is called: it must be part of a pass of the whole model, or its dice are thrown."""

    def __init__(self, entering: EnterHook, path: str) -> None:
        super().__init__(entering.collector, entering.dice)
        self.entering, self.path = entering, path

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if self.collector.inert or self.entering.entered or not module.training or torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled():
            raise CollectionError(
                f"{self.path} is called in train mode outside of a training pass of the whole model that was "
                "converted, where its dropout would be random and have no twin. Call the model itself, in train mode, "
                "or convert the part that you call; or put that part into eval mode."
            )


class DropPathHook(TwinHook):
    """After a module of stochastic depth, which draws no more: the branch that it would have dropped."""

    def __init__(self, collector: Collector, dice: Interception, path: str, rate: float, rescaled: bool) -> None:
        super().__init__(collector, dice)
        self.path, self.rate, self.rescaled = path, rate, rescaled

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        del args, kwargs
        if not (module.training and self.dice.collecting) or self.collector.inert:
            return None
        draw = Draw.of(self.path, self.rate, output, kind="drop_path", rescaled=self.rescaled)
        self.dice.draws.append(draw)
        return draw.passed
