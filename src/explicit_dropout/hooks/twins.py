"""The hooks that replace the dice of a whole model by penalties: in front of a forward pass, after it, and in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from explicit_dropout import functional
from explicit_dropout.adapters.torch_nn import layer_padding
from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.functional.batch import without_autocast
from explicit_dropout.hooks.calls import argument_names, calls_itself, named_call
from explicit_dropout.hooks.collector import Chain, Collector, Term, failed
from explicit_dropout.hooks.dice import Interception
from explicit_dropout.hooks.draws import Draw, Kind, Weighed, kind_of
from explicit_dropout.hooks.generators import dice_thrown, same_states
from explicit_dropout.hooks.taps import Padding, stream
from explicit_dropout.hooks.told import first_tensor, holders_of, is_pretrained, shortened
from explicit_dropout.hooks.widths import axis_by_history
from explicit_dropout.kernels.plain import wide
from explicit_dropout.noise import Noise, bernoulli, inverted
from explicit_dropout.sites import visible

SMALL = 2**20
"""So many attention weights may be kept for the backward pass; more are computed again."""
CHECKED = 16
"""Every so many passes generators are looked at, and in the first ones."""
PATIENCE = 4
"""Passes in a row that have to have drawn where another thread may have."""
TORCH_LAYERS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer

Width = Callable[[str, Tensor], int] | None
"""Which axis of a tensor is its width, by module path; None: it is told by the layers around it."""


@dataclass(frozen=True)
class Twin:
    """A place where a model draws dropout, as a forward pass has found it.

    Attributes:
        path: dotted path of the innermost module that draws.
        component: linear, attention_weights, hidden or drop_path: where its effect is measured.
        rate: the model's own.
        name: path and component, and a number where a module draws several of a kind.
    """

    path: str
    component: Kind
    rate: float
    name: str


class TwinHook:
    """A hook of the twins of one model. It is found by its collector, on whatever module it sits."""

    def __init__(self, collector: Collector, dice: Interception) -> None:
        self.collector, self.dice = collector, dice


class EnterHook(TwinHook):
    """Before a forward pass of the whole model: no dice from here on."""

    def __init__(self, collector: Collector, dice: Interception) -> None:
        super().__init__(collector, dice)
        self.entered = False
        self.thread = 0
        self.before: tuple[Any, ...] | None = None
        self.passes = self.suspicious = 0

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if self.collector.inert or not model.training:
            return
        if not torch.compiler.is_compiling():
            self._refuse_others(model)
        if self.entered and not torch.compiler.is_compiling():  # a pass was interrupted, and left it on
            if calls_itself(model):
                raise CollectionError(
                    f"{type(model).__name__} calls itself inside its own forward pass. Move what calls it twice into a "
                    "module around it, and convert that one."
                )
            self.dice.leave()
        self.entered = True
        collecting = self.collector.slot().open
        if collecting and self.collector.sharded:
            raise UnsupportedSiteError(
                "FSDP2 takes weights away after a layer's call, and the twins of dropout need them again. Build the "
                "model with rate 0 and attach xd.ExplicitDropout with value and feed_forward, which works sharded."
            )
        if collecting and self.dice.others == "refuse" and not torch.compiler.is_compiling():
            if self.passes < CHECKED or self.passes % CHECKED == 0 or self.suspicious:
                self.before = dice_thrown(device_of(model))
            self.passes += 1
        self.dice.enter(collecting)

    def _refuse_others(self, model: nn.Module) -> None:
        if getattr(model, "_is_replica", False):
            raise UnsupportedSiteError(
                "nn.DataParallel runs copies of the model, which keep their dice. Use DistributedDataParallel."
            )
        here = threading.get_ident()
        if self.entered and self.thread != here and self.thread in {one.ident for one in threading.enumerate()}:
            raise CollectionError(
                f"{type(model).__name__} runs in another thread already, and its dice can be taken away in one at a "
                "time only. Run its forward passes one after the other, or convert a copy for each thread."
            )
        self.thread = here


class LeaveHook(TwinHook):
    """After it: the penalties of all draws that were not made. Also after a pass that has failed."""

    def __init__(
        self, entering: EnterHook, model: nn.Module, padding: Padding, width: Width, off: Iterable[Kind]
    ) -> None:
        super().__init__(entering.collector, entering.dice)
        self.entering, self.padding_source, self.width, self.off = entering, padding, width, frozenset(off)
        self.found: dict[str, Twin] = {}
        self.turned = 0  # how many samples a model is given if tokens come first; 0 where it is known that they do not
        self.holders: dict[str, tuple[str, ...]] = {"": ("",)}
        self.layers = {path for path, module in model.named_modules() if takes_padding(module)}
        self.channels, self.widths = widths_of(model)
        for path in places_of(model):
            self._holders(model, path)

    def __getstate__(self) -> dict[str, Any]:
        """Copies are inert, so they do without a function of the user's, which may not be one that can be saved."""
        source = self.padding_source
        return {**self.__dict__, "padding_source": None if callable(source) else source, "width": None}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if self.collector.inert or not self.entering.entered:
            return
        self.dice.leave()
        self.entering.entered = False
        given = None if is_pretrained(model) else first_tensor((*args, *kwargs.values()))
        self.turned = 0 if given is None or given.ndim in (0, 1, 4) else given.shape[1]  # 4: images
        collecting, draws = self.dice.collecting, self.dice.take(output)
        before, self.entering.before = self.entering.before, None
        if not collecting or failed(output):
            return
        if before is not None:
            self._refuse_thrown(model, before)
        names: dict[str, int] = {}
        for draw in draws:
            kind = kind_of(draw)
            name = f"{draw.path or '(model)'}:{kind}"
            names[name] = names.get(name, 0) + 1
            name = name if names[name] == 1 else f"{name} {names[name]}"
            self.found.setdefault(name, Twin(draw.path, kind, draw.rate, name))
            if kind not in self.off:
                self._add(model, name, kind, draw)

    def _refuse_thrown(self, model: nn.Module, before: tuple[Any, ...]) -> None:
        if same_states(before, dice_thrown(device_of(model))):
            self.entering.suspicious = 0
            return
        self.entering.suspicious += 1
        if threading.active_count() == 1 or self.entering.suspicious == PATIENCE:
            raise UnsupportedSiteError(
                f"{type(model).__name__} has drawn random numbers in its forward pass where torch does not let one "
                "look: by Python or numpy, by an extension (flash attention, xformers), by torch.ops, by an LSTM or "
                "GRU; or another thread of the program has. Build it with rate 0 there, or let it: others='keep'."
            )

    def _add(self, model: nn.Module, name: str, kind: Kind, draw: Draw | Weighed) -> None:
        try:
            penalty, tokens = self._term(model, kind, draw)
        except InputError as error:
            raise UnsupportedSiteError(f"{name}: {error}") from error
        slot = self.collector.slot()
        slot.pending = Chain(Term(name, penalty, None, tokens, 0, self._holders(model, draw.path)), slot.pending)

    def _term(self, model: nn.Module, kind: Kind, draw: Draw | Weighed) -> tuple[Tensor, int | Tensor]:
        """The penalty summed over real tokens, and their number."""
        if isinstance(draw, Weighed):
            return self._weighed(model, draw)
        noise = inverted(draw.rate) if draw.rescaled else bernoulli(draw.rate)
        if kind == "attention_weights":
            use = draw.uses[0]
            if use.x is None or use.other is None or use.changed:
                raise _changed(draw)
            weights, values = (self._by_sample(model, draw.path, t) for t in (use.x, use.other))
            if weights.ndim == 2:
                weights, values = weights[None, None], values.mT[None, None]  # kept as a weight is
            mask = self._rows(model, draw.path, weights)
            penalty = functional.attention_weights(weights, values, noise, mask=mask, reduction="none")
            return penalty.sum(), _number(weights.shape[:-3], weights.shape[-2], mask)
        if draw.weights:
            if not draw.untouched:
                raise _changed(draw)
            more = any(use.kind for use in draw.uses)
            reason = "A is used elsewhere as well: detach it there" if more else "it was not recognised: write it so"
            raise UnsupportedSiteError(
                f"{draw.path}: attention weights A are dropped from, and their twin is about one product A @ V, or "
                f"torch.einsum of the two. Here {reason}, or build the model with rate 0 there."
            )
        x = draw.clean()
        x = x if x.ndim > 1 else x[None]
        axis = self._width_axis(draw, x)
        x = x if axis == x.ndim - 1 else x.movedim(axis, -1)
        mask = self._mask(model, draw.path, x)
        if kind == "linear":
            weight = draw.uses[0].other
            if weight is None or draw.uses[0].changed:
                raise _changed(draw)
            penalty = functional.linear(x, weight, noise, mask=mask, reduction="none")
        else:
            penalty = functional.hidden(x, noise, mask=mask, reduction="none")
        return penalty.sum(), _number(x.shape[:-2], x.shape[-2], mask)

    def _width_axis(self, draw: Draw, x: Tensor) -> int:
        """Which axis of a tensor is its width: the last, or the second where convolutions work on it."""
        if draw.axis is not None:
            return draw.axis
        if x.ndim < 3 or kind_of(draw) == "linear":
            return x.ndim - 1
        if self.width is not None:
            given = self.width(draw.path, x)
            if isinstance(given, bool) or not isinstance(given, int) or not -x.ndim <= given < x.ndim:
                raise InputError("width", f"a function that returns an axis of {tuple(x.shape)}", repr(given))
            return given % x.ndim
        known = None if torch.compiler.is_compiling() else axis_by_history(x)
        if known is not None:
            return known
        first, last = x.shape[1] in self.channels, x.shape[-1] in self.widths
        if first and not last:
            return 1
        if first == last and (first or x.ndim > 3):
            raise UnsupportedSiteError(
                f"{draw.path or 'the model'}: which axis of a tensor of shape {tuple(x.shape)} is its width, the "
                "second or the last, cannot be told from the layers of the model. Say so: "
                "convert_dropout(..., width=lambda path, x: axis)."
            )
        return x.ndim - 1

    def _weighed(self, model: nn.Module, draw: Weighed) -> tuple[Tensor, int | Tensor]:
        if draw.changed:
            raise _changed(draw)
        queries, keys, values, mask, causal, scale = draw.call()
        if mask is not None and mask.ndim == queries.ndim == 3:
            mask = self._by_sample(model, draw.path, mask)
        queries, keys, values = (self._by_sample(model, draw.path, t) for t in (queries, keys, values))
        keys, values = (t.expand(*queries.shape[:-3], *t.shape[-3:]) for t in (keys, values))
        rows = self._rows(model, draw.path, queries)
        given = (queries, keys, values, mask, causal, scale, rows, inverted(draw.rate))
        small = queries.shape[:-1].numel() * keys.shape[-2] <= SMALL
        if small or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            penalty = weight_energy(*given)
        else:  # the weights themselves are not kept for the backward pass
            penalty = checkpoint(weight_energy, *given, use_reentrant=False, preserve_rng_state=False)
        return penalty, _number(queries.shape[:-3], queries.shape[-2], rows)

    # ------------------------------------------------------------------------------------------ samples and padding

    def _holders(self, model: nn.Module, path: str) -> tuple[str, ...]:
        """The models and layers whose masks are about a place, innermost first."""
        if path not in self.holders:
            inside = sorted(layer for layer in self.layers if not layer or f"{path}.".startswith(f"{layer}."))
            own = [path] if is_pretrained(model.get_submodule(path)) else []
            self.holders[path] = tuple(dict.fromkeys((*inside[::-1], *own, *holders_of(model, path), "")))
        return self.holders[path]

    def _by_sample(self, model: nn.Module, path: str, tensor: Tensor) -> Tensor:
        """Heads apart from samples: (sample, head, token, width)."""
        if tensor.ndim != 3:
            return tensor
        given = self.collector.slot().samples
        holder = next((holder for holder in self._holders(model, path) if holder in given), None)
        samples = None if holder is None else given[holder]
        turned = 0 if holder or samples != tensor.shape[1] else self.turned  # as many tokens, which may come first
        if not samples or tensor.shape[0] % samples or (turned and turned != samples and not tensor.shape[0] % turned):
            raise UnsupportedSiteError(
                f"{path}: attention of shape {tuple(tensor.shape)} has samples and heads in one axis, and how many "
                "samples there are is not known (or tokens come first in what the model is given). Have it keep heads "
                "apart, (sample, head, token, width), or build it with rate 0 there."
            )
        return torch.unflatten(tensor, 0, (samples, -1))

    def _rows(self, model: nn.Module, path: str, by_head: Tensor) -> Tensor | None:
        """The real queries, (*sample, token)."""
        shape = torch.Size((*by_head.shape[:-3], by_head.shape[-2]))
        return self._fitting(model, path, shape, by_head, ("turned", "layer"))

    def _mask(self, model: nn.Module, path: str, x: Tensor) -> Tensor | None:
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
            if mask is not None and (mask.dtype != torch.bool or mask.shape != shape):
                raise CollectionError(
                    f"the mask of your padding function, {mask.dtype} {tuple(mask.shape)}, does not say which of the "
                    f"tokens {tuple(shape)} of {path} are real."
                )
            return mask
        told = list(self._told(model, path, shape[-1], kinds))
        if not told and self._holders(model, path) == ("",):  # what lies beside the one model that is told of padding
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
        for holder in self._holders(model, path):
            for kind in (*kinds, stream(path.removeprefix(holder))):
                if (holder, kind) in masks:
                    mask, lengths = masks[holder, kind], self.collector.lengths.get(holder)
                    yield mask if lengths is None or mask.shape[-1] == tokens else shortened(mask, tokens, lengths)
                elif (holder, kind) in self.collector.unpadded():
                    return


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
        told = {} if mask is None else {(self.path, "layer"): mask}
        if mask is not None and not self.batch_first and mask.ndim == 2:
            told = {(self.path, "layer"): mask.mT, (self.path, "turned"): mask}
        known = {key: other for key, other in self.collector.padding().items() if key[0] == self.path}
        self.collector.tell(self.path, {**known, **told} if mask is not None else known, None)


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


PADDING = ("src_key_padding_mask", "tgt_key_padding_mask")


def takes_padding(module: nn.Module) -> bool:
    """Whether a module is told of padding by the names that torch.nn has for it."""
    return isinstance(module, TORCH_LAYERS) or not set(PADDING).isdisjoint(argument_names(module))


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def places_of(model: nn.Module) -> Iterator[str]:
    """The parts of a model that say what they are told of padding: models of transformers, layers of torch.nn."""
    for path, module in model.named_modules():
        if (path and is_pretrained(module)) or takes_padding(module):
            yield path


def widths_of(model: nn.Module) -> tuple[set[int], set[int]]:
    """How many channels convolutions of a model have, and how wide its linear layers, norms and embeddings are."""
    channels: set[int] = set()
    widths: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            channels |= {module.in_channels, module.out_channels}
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            channels.add(module.num_features)
        elif isinstance(module, nn.Linear):
            widths |= {module.in_features, module.out_features}
        elif isinstance(module, nn.LayerNorm):
            widths.add(module.normalized_shape[-1])
        elif isinstance(module, nn.Embedding):
            widths.add(module.embedding_dim)
    return channels, widths


def _changed(draw: Draw | Weighed) -> UnsupportedSiteError:
    return UnsupportedSiteError(
        f"{draw.path or 'the model'}: the model changes what its dropped tensor, or its attention, works with in "
        "place, so that it is lost. Let it write a new tensor instead."
    )


def weight_energy(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scale: float | None,
    rows: Tensor | None, noise: Noise,
) -> Tensor:  # fmt: skip
    """½ v Σ_ij A_ij² ‖v_j‖² for A = softmax(scale · q kᵀ + mask), over all samples and heads.

    mask: boolean, True where something may be seen, or what is added to the scores. rows: the queries that count.
    """
    with without_autocast(queries):
        scores = (queries.shape[-1] ** -0.5 if scale is None else scale) * (wide(queries) @ wide(keys).mT)
        allowed = None
        if mask is not None:
            allowed = visible(mask)
            if mask.dtype != torch.bool:
                scores = scores + mask.masked_fill(~allowed, 0)
        if causal:
            triangle = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            allowed = triangle if allowed is None else allowed & triangle
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if allowed is not None:
            weights = weights.masked_fill(~allowed, 0)  # of a query that sees nothing, too
        return functional.attention_weights(weights, values, noise, mask=rows, reduction="none").sum()


def _number(lead: torch.Size, tokens: int, mask: Tensor | None) -> int | Tensor:
    return lead.numel() * tokens if mask is None else mask.sum()
