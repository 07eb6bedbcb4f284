"""How samples and real tokens lie in what a model drops from, by what its parts are told of padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError, UnsupportedSiteError
from explicit_dropout.hooks.calls import argument_names, without_function
from explicit_dropout.hooks.collector import Collector
from explicit_dropout.hooks.taps import Padding
from explicit_dropout.hooks.told import first_tensor, holders_of, is_pretrained, marks, shortened, shown, stream_of

TORCH_LAYERS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")
"""Arguments of layers of torch.nn that mark padding."""


class Tokens:
    """The samples and the real tokens of draws, by the place in the model where they are made."""

    def __init__(self, collector: Collector, model: nn.Module, padding: Padding) -> None:
        self.collector, self.padding_source = collector, padding
        self.turned = 0  # how many samples a model is given if tokens come first; 0 where it is known that they do not
        self.found: dict[str, tuple[str, ...]] = {"": ("",)}
        """The holders of places, as they were asked for."""
        self.layers = {path for path, module in model.named_modules() if takes_padding(module)}
        for path in told_parts(model):
            self.holders(model, path)

    def __getstate__(self) -> dict[str, Any]:
        return without_function(self.__dict__, "padding_source")

    def look_at(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See whether tokens may come first in what the model was given."""
        given = None if is_pretrained(model) else first_tensor((*args, *kwargs.values()))
        self.turned = 0 if given is None or given.ndim in (0, 1, 4) else given.shape[1]  # 4: images

    def holders(self, model: nn.Module, path: str) -> tuple[str, ...]:
        """The models and layers whose masks are about a place, innermost first."""
        if path not in self.found:
            inside = sorted(layer for layer in self.layers if not layer or f"{path}.".startswith(f"{layer}."))
            own = [path] if is_pretrained(model.get_submodule(path)) else []
            self.found[path] = tuple(dict.fromkeys((*inside[::-1], *own, *holders_of(model, path), "")))
        return self.found[path]

    def by_sample(self, model: nn.Module, path: str, tensor: Tensor) -> Tensor:
        """Heads apart from samples: (sample, head, token, width)."""
        if tensor.ndim != 3:
            return tensor
        given = self.collector.slot().samples
        holder = next((holder for holder in self.holders(model, path) if holder in given), None)
        samples = None if holder is None else given[holder]
        turned = 0 if holder or samples != tensor.shape[1] else self.turned  # as many tokens, which may come first
        if not samples or tensor.shape[0] % samples or (turned and turned != samples and not tensor.shape[0] % turned):
            raise UnsupportedSiteError(
                f"{path}: attention of shape {tuple(tensor.shape)} has samples and heads in one axis, and how many "
                "samples there are is not known (or tokens come first in what the model is given). Have it keep heads "
                "apart, (sample, head, token, width), or build it with rate 0 there."
            )
        return torch.unflatten(tensor, 0, (samples, -1))

    def rows(self, model: nn.Module, path: str, by_head: Tensor) -> Tensor | None:
        """The real queries, (*sample, token)."""
        shape = torch.Size((*by_head.shape[:-3], by_head.shape[-2]))
        return self._fitting(model, path, shape, by_head, ("turned", "layer"))

    def mask(self, model: nn.Module, path: str, x: Tensor) -> Tensor | None:
        """The real tokens of x, (*batch, token)."""
        return self._fitting(model, path, x.shape[:-1], x, ("layer", "turned"))

    def _fitting(
        self, model: nn.Module, path: str, shape: torch.Size, x: Tensor, kinds: tuple[str, str]
    ) -> Tensor | None:
        source = self.padding_source
        if source is None:
            return None
        if callable(source):
            mask = source(path, x)
            if mask is not None and not marks(mask, shape):
                raise CollectionError(
                    f"the mask of your padding function, {shown(mask)}, does not say which of the tokens "
                    f"{tuple(shape)} of {path} are real."
                )
            return mask
        return self._as_told(model, path, shape, kinds)

    def _as_told(self, model: nn.Module, path: str, shape: torch.Size, kinds: tuple[str, str]) -> Tensor | None:
        """The mask of these tokens among those that the model and its parts were given."""
        told = list(self._told(model, path, shape[-1], kinds))
        if not told and self.holders(model, path) == ("",):  # what lies beside the one model that is told of padding
            others = {id(mask): mask for mask in self.collector.padding().values()}
            told = [mask for mask in others.values() if len(others) == 1 and mask.shape == shape]
        for mask in told:
            if mask.shape == shape:
                return mask
        for mask in told:
            if mask.numel() == shape.numel() and (len(shape) == 1 or 1 in shape):  # all tokens in one row
                return mask.reshape(shape)
            if mask.mT.shape == shape:  # tokens in front of samples
                return mask.mT
        if not told or len(shape) == 1 or shape[-1] == 1 or all(mask.shape[0] not in shape for mask in told):
            return None  # one token for each sample, or tokens of something else
        raise CollectionError(
            f"a padding mask {tuple(told[0].shape)} does not say which of the tokens {tuple(shape)} of {path} are "
            "real. Convert with padding=None to count all tokens, or with padding=function(module path, x) → boolean "
            "mask."
        )

    def _told(self, model: nn.Module, path: str, tokens: int, kinds: tuple[str, str]) -> Iterator[Tensor]:
        """The masks that are about a place, (batch, token), those of the innermost model or layer first."""
        masks = self.collector.padding()
        for holder in self.holders(model, path):
            for kind in (*kinds, stream_of(path.removeprefix(holder))):
                if (holder, kind) in masks:
                    mask, lengths = masks[holder, kind], self.collector.lengths.get(holder)
                    yield mask if lengths is None or mask.shape[-1] == tokens else shortened(mask, tokens, lengths)
                elif (holder, kind) in self.collector.unpadded():
                    return


def takes_padding(module: nn.Module) -> bool:
    """Whether a module is told of padding by the names that torch.nn has for it."""
    return isinstance(module, TORCH_LAYERS) or not set(PADDING).isdisjoint(argument_names(module))


def told_parts(model: nn.Module) -> Iterator[str]:
    """The parts of a model that say what they are told of padding: models of transformers, layers of torch.nn."""
    for path, module in model.named_modules():
        if (path and is_pretrained(module)) or takes_padding(module):
            yield path
