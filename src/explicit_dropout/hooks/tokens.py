"""How samples and real tokens lie in what a model drops from, by what its parts are told of padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError, UnsupportedSiteError
from explicit_dropout.hooks.calls import argument_names, without_function
from explicit_dropout.hooks.collector import Collector
from explicit_dropout.hooks.draws import Draw, Weighed
from explicit_dropout.hooks.taps import Padding
from explicit_dropout.hooks.told import (
    DECODER,
    ENCODER,
    Known,
    first_tensor,
    holders_of,
    is_pretrained,
    marks,
    shortened,
    shown,
    stream_of,
)  # fmt: skip

TORCH_LAYERS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
PADDING = {"src_key_padding_mask": "source", "tgt_key_padding_mask": "target"}
"""Arguments of layers of torch.nn that mark padding, and of which sequence where a module takes both."""
LAYER_STREAMS = ("layer", "turned", *PADDING.values())
"""What layers are told: of their own tokens, the same for tokens in front of samples, and of either sequence."""
PREFIX = 8
"""So many tokens a model may put in front of those that it is given: one for classes, a few registers."""


class Tokens:
    """The samples and the real tokens of draws, by the place in the model where they are made."""

    def __init__(self, collector: Collector, model: nn.Module, padding: Padding) -> None:
        self.collector, self.padding_source = collector, padding
        self.turned = 0  # how many samples a model is given if tokens come first; 0 where it is known that they do not
        self.others: set[int] = set()
        """Other numbers of samples that what it is given may be of."""
        self.told: list[Known] = []
        """What was known when each of the draws of a pass was made."""
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
        batches = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and is_batch(x)]
        self.others = set() if given is None else {x.shape[0] for x in batches} - {given.shape[0] if given.ndim else 0}

    def holders(self, model: nn.Module, path: str) -> tuple[str, ...]:
        """The models and layers whose masks are about a place, innermost first."""
        if path not in self.found:
            inside = sorted(layer for layer in self.layers if not layer or f"{path}.".startswith(f"{layer}."))
            own = [path] if is_pretrained(model.get_submodule(path)) else []
            self.found[path] = tuple(dict.fromkeys((*inside[::-1], *own, *holders_of(model, path), "")))
        return self.found[path]

    def by_sample(self, model: nn.Module, draw: Draw | Weighed, tensor: Tensor) -> Tensor:
        """Heads apart from samples: (sample, head, token, width)."""
        if tensor.ndim != 3:
            return tensor
        given, path = draw.told.samples, draw.path
        holder = next((holder for holder in self.holders(model, path) if holder in given), None)
        samples = None if holder is None else given[holder]
        unclear = not holder and samples is not None and self._is_unclear(samples, tensor)
        if not samples or tensor.shape[0] % samples or unclear:
            raise UnsupportedSiteError(
                f"{path}: attention of shape {tuple(tensor.shape)} has samples and heads in one axis, and how many "
                "samples there are is not known (or tokens come first in what the model is given). Have it keep heads "
                "apart, (sample, head, token, width), or build it with rate 0 there."
            )
        return torch.unflatten(tensor, 0, (samples, -1))

    def _is_unclear(self, samples: int, tensor: Tensor) -> bool:
        """Whether what seems to be samples, the first axis of what it is given, may be tokens, or others may be."""
        if any(tensor.shape[0] % number == 0 for number in self.others - {samples}):
            return True
        if not self.turned or self.turned == samples or tensor.shape[0] % self.turned:
            return False
        return samples == tensor.shape[1] or (
            tensor.shape[1] != self.turned and samples <= tensor.shape[1] <= samples + PREFIX
        )

    def rows(self, model: nn.Module, draw: Draw | Weighed, by_head: Tensor) -> Tensor | None:
        """The real queries, (*sample, token)."""
        shape = torch.Size((*by_head.shape[:-3], by_head.shape[-2]))
        return self._fitting(model, draw, shape, by_head, ("turned", "layer"))

    def mask(self, model: nn.Module, draw: Draw | Weighed, x: Tensor) -> Tensor | None:
        """The real tokens of x, (*batch, token)."""
        return self._fitting(model, draw, x.shape[:-1], x, ("layer", "turned"))

    def _fitting(
        self, model: nn.Module, draw: Draw | Weighed, shape: torch.Size, x: Tensor, kinds: tuple[str, str]
    ) -> Tensor | None:
        source, path = self.padding_source, draw.path
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
        return self._as_told(model, draw, shape, kinds)

    def _as_told(
        self, model: nn.Module, draw: Draw | Weighed, shape: torch.Size, kinds: tuple[str, str]
    ) -> Tensor | None:
        """The mask of these tokens among those that the model and its parts were given."""
        path = draw.path
        told = self._told(model, draw, shape[-1], kinds)
        if told is None:
            return None
        if not told and self.holders(model, path) == ("",):  # what lies beside the one model that is told of padding
            told = [mask for mask in self._only(draw) if mask.shape == shape]
        for mask in told:
            if mask.shape == shape:
                return mask
        for mask in told:
            if mask.numel() == shape.numel() and (len(shape) == 1 or 1 in shape):  # all tokens in one row
                return mask.reshape(shape)
            if mask.mT.shape == shape:  # tokens in front of samples
                return mask.mT
        fitting = [mask for mask in told if mask.shape[0] in shape or mask.shape[-1] == shape[-1]]
        if not fitting or len(shape) == 1 or shape[-1] == 1:
            return None  # one token for each sample, or tokens of something else
        raise CollectionError(
            f"a padding mask {tuple(told[0].shape)} does not say which of the tokens {tuple(shape)} of {path} are "
            "real. Convert with padding=None to count all tokens, or with padding=function(module path, x) → boolean "
            "mask."
        )

    def _only(self, draw: Draw | Weighed) -> list[Tensor]:
        """The one mask that anything was told of until a draw, or of all the pass; none, where there are several."""
        for known in ([draw.told], self.told):
            masks = {id(mask): mask for told in known for mask in told.padding.values()}
            if masks:
                return list(masks.values()) if len(masks) == 1 else []
        return []

    def _told(self, model: nn.Module, draw: Draw | Weighed, tokens: int, kinds: tuple[str, str]) -> list[Tensor] | None:
        """The masks that are about a place, (batch, token), those of the innermost model or layer first.

        None, where it is known that there is no padding.
        """
        masks, unpadded, _ = draw.told
        found: list[Tensor] = []
        for holder in self.holders(model, draw.path):
            inside = draw.path.removeprefix(holder)
            for kind in (*kinds, *side_of(inside), stream_of(inside)):
                if (holder, kind) in masks:
                    mask, lengths = masks[holder, kind], self.collector.lengths.get(holder)
                    whole = lengths is None or mask.shape[-1] == tokens
                    found.append(mask if whole or lengths is None else shortened(mask, tokens, lengths))
                elif (holder, kind) in unpadded:
                    return found or None
        return found


def side_of(path: str) -> tuple[str, ...]:
    """Which of two sequences a place works on, where its name tells."""
    parts = path.split(".")
    if any(DECODER.search(part) for part in parts):
        return ("target",)
    return ("source",) if any(ENCODER.search(part) for part in parts) else ()


def is_batch(x: Tensor) -> bool:
    """Whether an argument may have a sample in each row: no mask of pairs of tokens, and nothing that samples share."""
    square = x.ndim in (2, 3) and x.shape[-1] == x.shape[-2]
    return x.ndim > 1 and x.shape[0] > 1 and x.dtype != torch.bool and not square


def takes_padding(module: nn.Module) -> bool:
    """Whether a module is told of padding by the names that torch.nn has for it."""
    return isinstance(module, TORCH_LAYERS) or not set(PADDING).isdisjoint(argument_names(module))


def told_parts(model: nn.Module) -> Iterator[str]:
    """The parts of a model that say what they are told of padding: models of transformers, layers of torch.nn."""
    for path, module in model.named_modules():
        if (path and is_pretrained(module)) or takes_padding(module):
            yield path
