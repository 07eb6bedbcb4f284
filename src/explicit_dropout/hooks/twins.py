"""The hooks that replace the dice of a whole model by penalties: in front of a forward pass, after it, and in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
from explicit_dropout.hooks.collector import Chain, Collector, Term, failed, holders_of, is_pretrained, shortened
from explicit_dropout.hooks.dice import Draw, Interception, Kind, Weighed, dice_thrown
from explicit_dropout.hooks.taps import Padding, stream
from explicit_dropout.kernels.plain import wide
from explicit_dropout.noise import Noise, bernoulli, inverted
from explicit_dropout.sites import visible

TORCH_LAYERS = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer


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
        self.before: tuple[Tensor, ...] | None = None
        self.known = dice.others == "keep"
        """Whether it is known that nothing random is left: one eager pass shows it."""

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del args, kwargs
        if self.collector.inert:
            return
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
        if collecting and not self.known and not torch.compiler.is_compiling():
            self.before = dice_thrown(device_of(model))
        self.dice.enter(collecting)


class LeaveHook(TwinHook):
    """After it: the penalties of all draws that were not made. Also after a pass that has failed."""

    def __init__(self, entering: EnterHook, model: nn.Module, padding: Padding, off: Iterable[Kind]) -> None:
        super().__init__(entering.collector, entering.dice)
        self.entering, self.padding_source, self.off = entering, padding, frozenset(off)
        self.found: dict[str, Twin] = {}
        self.holders: dict[str, tuple[str, ...]] = {"": ("",)}
        self.layers = {path for path, module in model.named_modules() if isinstance(module, TORCH_LAYERS)}
        for path in places_of(model):
            self._holders(model, path)

    def __getstate__(self) -> dict[str, Any]:
        """Copies are inert, so they do without a function of the user's, which may not be one that can be saved."""
        source = self.padding_source
        return {**self.__dict__, "padding_source": None if callable(source) else source}

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        del args, kwargs
        if self.collector.inert or not self.entering.entered:
            return
        self.dice.leave()
        self.entering.entered = False
        collecting, draws = self.dice.collecting, self.dice.take()
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

    def _refuse_thrown(self, model: nn.Module, before: tuple[Tensor, ...]) -> None:
        after = dice_thrown(device_of(model))
        if not all(map(torch.equal, before, after)):
            raise UnsupportedSiteError(
                f"{type(model).__name__} has drawn random numbers in its forward pass where torch does not let one "
                "look: by an extension (flash attention, xformers), by torch.ops, or in C++. Build it with rate 0 "
                "there, or let it: others='keep'."
            )
        self.entering.known = True

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
        x = draw.x if draw.x.ndim > 1 else draw.x[None]
        if kind == "attention_weights":
            use = draw.uses[0]
            if use.x is None or use.other is None:
                raise CollectionError(f"{draw.path}: what its attention weights are multiplied with is not known")
            weights, values = (self._by_sample(model, draw.path, t) for t in (use.x, use.other))
            mask = self._rows(model, draw.path, weights)
            return functional.attention_weights(weights, values, noise, mask=mask, reduction="none").sum(), _number(
                weights.shape[:-3], weights.shape[-2], mask
            )
        mask = self._mask(model, draw.path, x)
        if kind == "linear":
            weight = draw.uses[0].other
            if weight is None:
                raise CollectionError(f"{draw.path}: the linear layer behind it is not known")
            penalty = functional.linear(x, weight, noise, mask=mask, reduction="none")
        else:
            penalty = functional.hidden(x, noise, mask=mask, reduction="none")
        return penalty.sum(), _number(x.shape[:-2], x.shape[-2], mask)

    def _weighed(self, model: nn.Module, draw: Weighed) -> tuple[Tensor, int | Tensor]:
        queries, keys, values, mask, causal, scale = draw.call()
        queries, keys, values = (self._by_sample(model, draw.path, t) for t in (queries, keys, values))
        if mask is not None and mask.ndim == 3:
            mask = self._by_sample(model, draw.path, mask)
        rows = self._rows(model, draw.path, queries)
        given = (queries, keys, values, mask, causal, scale, rows, inverted(draw.rate))
        if torch.compiler.is_compiling():
            penalty = weight_energy(*given)
        else:  # the weights themselves are not kept for the backward pass
            penalty = checkpoint(weight_energy, *given, use_reentrant=False, preserve_rng_state=False)
        return penalty, _number(queries.shape[:-3], queries.shape[-2], rows)

    # ------------------------------------------------------------------------------------------ samples and padding

    def _holders(self, model: nn.Module, path: str) -> tuple[str, ...]:
        """The models and layers whose masks are about a place, innermost first."""
        if path not in self.holders:
            inside = sorted(layer for layer in self.layers if f"{path}.".startswith(f"{layer}."))
            own = [path] if is_pretrained(model.get_submodule(path)) else []
            self.holders[path] = tuple(dict.fromkeys((*inside[::-1], *own, *holders_of(model, path), "")))
        return self.holders[path]

    def _by_sample(self, model: nn.Module, path: str, tensor: Tensor) -> Tensor:
        """Heads apart from samples: (sample, head, token, width)."""
        if tensor.ndim != 3:
            return tensor
        given = self.collector.slot().samples
        samples = next((given[holder] for holder in self._holders(model, path) if holder in given), 1)
        return torch.unflatten(tensor, 0, (samples if tensor.shape[0] % samples == 0 else 1, -1))

    def _rows(self, model: nn.Module, path: str, by_head: Tensor) -> Tensor | None:
        """The real queries, (*sample, token)."""
        return self._fitting(model, path, torch.Size((*by_head.shape[:-3], by_head.shape[-2])), by_head)

    def _mask(self, model: nn.Module, path: str, x: Tensor) -> Tensor | None:
        """The real tokens of x, (*batch, token)."""
        return self._fitting(model, path, x.shape[:-1], x)

    def _fitting(self, model: nn.Module, path: str, shape: torch.Size, x: Tensor) -> Tensor | None:
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
        told = list(self._told(model, path, shape[-1]))
        for mask in told:
            if mask.shape == shape:
                return mask
        if len(shape) == 1 or all(mask.numel() != shape.numel() for mask in told):
            return None  # one token for each sample, or tokens that no mask is about
        for mask in told:  # all tokens in one row, or tokens in front of samples
            if shape.numel() == mask.numel() and 1 in shape:
                return mask.reshape(shape)
            if shape == mask.mT.shape:
                return mask.mT
        raise CollectionError(
            f"a padding mask {tuple(told[0].shape)} does not say which of the tokens {tuple(shape)} of {path} are "
            "real. Convert with padding=None to count all tokens, or with padding=function(module path, x) → boolean "
            "mask."
        )

    def _told(self, model: nn.Module, path: str, tokens: int) -> Iterator[Tensor]:
        """The masks that are about a place, (batch, token), those of the innermost model or layer first."""
        masks = self.collector.padding()
        for holder in self._holders(model, path):
            for kind in ("layer", "turned", stream(path.removeprefix(holder))):
                if (holder, kind) in masks:
                    mask, lengths = masks[holder, kind], self.collector.lengths.get(holder)
                    short = lengths is not None and mask.shape[-1] != tokens
                    yield shortened(mask, tokens, lengths) if short and lengths is not None else mask


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
    """Before a layer of torch.nn is called: the padding that it is told of."""

    def __init__(self, collector: Collector, dice: Interception, path: str, layer: nn.Module) -> None:
        super().__init__(collector, dice)
        self.path, self.names = path, argument_names(layer)
        self.batch_first = getattr(layer.self_attn, "batch_first", True)

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del layer
        if self.collector.inert or not self.collector.slot().open:
            return
        mask = layer_padding(named_call(self.names, args, kwargs))
        told = {} if mask is None else {(self.path, "layer"): mask}
        if mask is not None and not self.batch_first and mask.ndim == 2:
            told = {(self.path, "layer"): mask.mT, (self.path, "turned"): mask}
        self.collector.tell(self.path, told, None)


class DropPathHook(TwinHook):
    """After a module of stochastic depth, which draws no more: the branch that it would have dropped."""

    def __init__(self, collector: Collector, dice: Interception, path: str, rate: float, rescaled: bool) -> None:
        super().__init__(collector, dice)
        self.path, self.rate, self.rescaled = path, rate, rescaled

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        del args, kwargs
        if module.training and self.dice.collecting and not self.collector.inert:
            self.dice.draws.append(Draw(self.path, self.rate, output.view_as(output), "drop_path", self.rescaled))


def device_of(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def places_of(model: nn.Module) -> Iterator[str]:
    """The parts of a model that say what they are told of padding: models of transformers, layers of torch.nn."""
    for path, module in model.named_modules():
        if path and (is_pretrained(module) or isinstance(module, TORCH_LAYERS)):
            yield path


def kind_of(draw: Draw | Weighed) -> Kind:
    """Where a draw is measured: at the one linear map that its result goes to, or else at the result itself."""
    if isinstance(draw, Weighed):
        return "attention_weights"
    if draw.kind is None and len(draw.uses) == 1 and draw.uses[0].kind is not None:
        return draw.uses[0].kind
    return draw.kind or "hidden"


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
