"""What the call of a model says about its batch: which tokens are real, and how many samples there are.

The whole model is asked, and every model of transformers inside it, each for itself: what is around them may have
arguments of the same names for something else. A model inside that takes a mask and was called without one has no
padding, whatever the whole model was told, unless both work on the same input.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError
from explicit_dropout.hooks.calls import argument_names, around, in_transform, named_call
from explicit_dropout.sites import visible

PADDING_ARGUMENTS = {
    "main": "attention_mask",
    "decoder": "decoder_attention_mask",
    "context": "encoder_attention_mask",
    "vision": "pixel_attention_mask",
}
"""Arguments of a whole model that mark real tokens, (batch, token): of its first sequence, of its decoder's, of the one
that cross-attention looks at where the model is given it (`encoder_hidden_states`), otherwise that is the first; and of
patches of images, where these come in sequences."""
DOUBTED = 4
"""So many calls of a model of one's own have their boolean masks looked at; it makes a GPU wait."""
PATCHES = "patch_valid"
"""The same for models of timm that take sequences of patches, by itself or with them in a mapping."""

DECODER = re.compile(r"(^|_)(decoders?|dec|tgt|target)(_|\d|$)")
ENCODER = re.compile(r"(^|_)(encoders?|enc|src|source)(_|\d|$)")
"""Names of parts that work on the second or on the first of two sequences."""

Masks = dict[tuple[str, str], Tensor]
"""Masks of real tokens, (batch, token), by the path of the model that was told and by stream."""
Unpadded = tuple[tuple[str, str], ...]
"""The streams of models that take a mask of them and were called without one."""
Samples = dict[str, int]
"""How many samples models were given, where that is known, by their paths."""


class Known(NamedTuple):
    """What is known of a pass at some moment, by all calls that are under way or over."""

    padding: Masks
    unpadded: Unpadded
    samples: Samples


class Said(NamedTuple):
    """What one call says."""

    padding: Masks
    unpadded: Unpadded
    samples: int | None


class Told:
    """What the calls of a model, the whole one or one inside it (at the path `owner`), say."""

    def __init__(
        self, model: nn.Module, owner: str = "", whole: nn.Module | None = None, *, doubting: bool = True
    ) -> None:
        self.names, self.owner = argument_names(model), owner
        self.shares_input = whole is not None and main_input(whole) == main_input(model)
        """Whether it works on what the whole model is given, and so under the masks of that, too (as in Whisper)."""
        self.has_encoder = PADDING_ARGUMENTS["decoder"] in self.names or any(
            "encoder" in path.split(".") for path, _ in model.named_modules()
        )
        self.prefix = int(getattr(model, "num_prefix_tokens", 0))
        self.doubted = DOUBTED if doubting and not is_pretrained(model) else 0
        """In how many more calls a boolean mask is looked at: a model of one's own may mean padding by True."""
        own = main_input(model)
        self.inputs = () if own is None else ("input_ids", "inputs_embeds", own)
        """Arguments that have a sample in each row. Others may not: positions can be those of any sample."""

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch_first: bool) -> Said:
        call = named_call(self.names, args, kwargs)
        found = self._masks(call)
        taken = [(stream, name) for stream, name in PADDING_ARGUMENTS.items() if name in self.names]
        missing = [stream for stream, name in taken if call.get(name) is None and not self.shares_input]
        alike = [] if self.has_encoder else ["decoder"]  # a decoder alone has no other sequence
        if call.get("encoder_hidden_states") is None:
            alike.append("context")
        for stream in alike:
            if "main" in found:
                found[stream] = found["main"]
            elif "main" in missing:
                missing.append(stream)
        return Said(
            {(self.owner, stream): mask for stream, mask in found.items()},
            tuple([(self.owner, stream) for stream in missing if stream not in found]),
            self._samples(call, args, batch_first),
        )

    def _masks(self, call: Mapping[str, Any]) -> dict[str, Tensor]:
        found = {}
        given = (value for name, value in call.items() if name not in PADDING_ARGUMENTS.values())
        alone = next((value.shape[0] == 1 for value in given if isinstance(value, Tensor) and value.ndim > 1), False)
        for stream, name in PADDING_ARGUMENTS.items():
            mask = real_tokens(call.get(name), alone=alone)
            if mask is not None and (stream != "vision" or call[name].ndim == 2):  # elsewhere it is of pixels
                if self.doubted and stream in ("main", "decoder") and call[name].dtype == torch.bool:
                    self._refuse_inverted(name, mask)
                found[stream] = mask
        if "main" in found and not self.has_encoder:
            found["main"] = found["main"][:, cached(call.get("past_key_values")) :]
        patches = real_tokens(_inside(call, PATCHES))
        if patches is not None:
            found["main"] = torch.nn.functional.pad(patches, (self.prefix, 0), value=True)
        if "vision" in found and PADDING_ARGUMENTS["main"] not in self.names:
            found["main"] = found["vision"]  # a model of nothing but images
        return found

    def _refuse_inverted(self, name: str, mask: Tensor) -> None:
        """A mask that marks padding: nothing in the longest sample, and the ends of others.

        Samples that fill up a batch have no real token either, but then the marks of others are at their beginning.
        """
        if torch.compiler.is_compiling() or in_transform() or mask.is_meta:
            return
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        self.doubted -= 1
        some, every = mask.any(-1), mask.all(-1)
        ends = ~mask[:, 0] & mask[:, -1]  # of samples whose mask is mixed
        if mask.shape[1] > 1 and bool((~some).any() & some.any() & (ends | ~some | every).all() & ~every.any()):
            raise CollectionError(
                f"the {name} of the call of {self.owner or 'the model'} marks no token at all of some samples. True "
                "means a real token there, as in transformers: if it means padding, attach with "
                "padding=lambda path, x: mask, True for real tokens, or with padding=None to count all tokens."
            )

    def _samples(self, call: Mapping[str, Any], args: tuple[Any, ...], batch_first: bool) -> int | None:
        """How many samples a model is given, if its first tensor says so: images, vectors or numbers of tokens.

        Layers may see them otherwise: as windows of images, or all tokens in one row.
        """
        if not batch_first:
            return None
        named = first_tensor(call.get(name) for name in self.inputs)
        first = first_tensor((*call.values(), *args)) if named is None else named  # (*args has no names)
        if first is None:
            return None
        of_tokens = first.ndim == 2 and not first.is_floating_point()
        return first.shape[0] if of_tokens or first.ndim > 2 else None


def _inside(call: Mapping[str, Any], name: str) -> object:
    """An argument by its name, which may be in a mapping among the others."""
    if call.get(name) is not None:
        return call[name]
    return next((value[name] for value in call.values() if isinstance(value, Mapping) and name in value), None)


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


# ---------------------------------------------------------------------------------------------- sound


class Lengths:
    """How many tokens the layers of a model of sound see of sequences of such lengths."""

    def __init__(self, counting: Callable[..., Any], squeeze: int) -> None:
        adapted = "add_adapter" in inspect.signature(counting).parameters  # which comes after the layers
        self.counting, self.options, self.squeeze = counting, {"add_adapter": False} if adapted else {}, squeeze
        self.whole: dict[int, int] = {}

    def __call__(self, lengths: Tensor) -> Tensor:
        try:
            found = self._counted(lengths)
        except (TypeError, ValueError, RuntimeError):  # some count one sequence at a time
            found = None
        if not isinstance(found, Tensor) or found.shape != lengths.shape:
            each = [int(self._counted(length)) for length in lengths.cpu()]
            found = torch.tensor(each, device=lengths.device)
        return found // self.squeeze

    def _counted(self, lengths: Tensor) -> Any:
        found = self.counting(lengths, **self.options)
        return found[0] if isinstance(found, tuple) else found  # then those after pooling, behind the layers

    def of_whole(self, length: int) -> int:
        """Tokens of a sequence without padding."""
        if length not in self.whole:
            self.whole[length] = int(self(torch.tensor([length])))
        return self.whole[length]


def lengths_of(model: nn.Module) -> Lengths | None:
    """How a model of transformers shortens sound before its layers see it; None for one that does not."""
    counting = getattr(model, "_get_feat_extract_output_lengths", None)
    if counting is None or not is_pretrained(model):
        return None
    return Lengths(counting, int(getattr(model.config, "squeeze_factor", 1)))


def shortened(mask: Tensor, tokens: int, lengths: Lengths) -> Tensor:
    """Which tokens are made of real sound, by a mask of what it was before."""
    if not torch.compiler.is_compiling() and lengths.of_whole(mask.shape[-1]) != tokens:
        raise CollectionError(
            f"the model says that {mask.shape[-1]} steps of sound become {lengths.of_whole(mask.shape[-1])} tokens, "
            f"and its layers see {tokens}: which of them are real is not known. Attach with padding=None to count all "
            "tokens, or with padding=function(module path, x) → boolean mask."
        )
    return torch.arange(tokens, device=mask.device) < lengths(mask.sum(-1))[:, None]


# ---------------------------------------------------------------------------------------------- who is told


def holders_of(model: nn.Module, path: str) -> tuple[str, ...]:
    """The paths of the models that say what the layer at a path works on, innermost first.

    Models of transformers do. Without any it is the outermost module that is told of padding, or the whole model.
    """
    holding = list(around(model, path))
    own = [outer for outer, part in holding if is_pretrained(part)]
    return tuple(own[::-1]) or (next((outer for outer, part in holding if takes_masks(part)), ""),)


def stream_of(path: str) -> str:
    """Which sequence of a model the layers at this path work on; the mask of text says nothing about images."""
    parts = path.split(".")
    if any(part.startswith(("vision", "visual", "image", "visn")) for part in parts) or "r_layers" in parts:
        return "vision"
    return "decoder" if any(DECODER.search(part) for part in parts) else "main"


def marks(mask: object, shape: torch.Size) -> bool:
    """Whether a mask says of tokens of this shape which are real."""
    return isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.shape == shape


def shown(mask: object) -> str:
    """A mask, or what came in the place of one, in a few words."""
    return f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__


def is_pretrained(module: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    return any(base.__name__ == "PreTrainedModel" for base in type(module).__mro__)


def main_input(model: nn.Module) -> str | None:
    """The argument that a model of transformers is for."""
    name = getattr(model, "main_input_name", "input_ids") if is_pretrained(model) else None
    return name if isinstance(name, str) else None


def takes_masks(model: nn.Module) -> bool:
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        return False
    return not {*PADDING_ARGUMENTS.values(), PATCHES}.isdisjoint(argument_names(model))
