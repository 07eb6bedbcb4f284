"""A tap: where the penalties of one layer come from, inside a model's own forward pass; and the hooks that watch it.

A linear layer's weight is not kept for the backward pass here: the coherent part is made of the layer's own output, and
the incoherent part needs the weight only when the regulariser is called. So weights that are sharded over ranks may be
taken away in between.

Hooks are objects of top-level classes, so a model with hooks can be deep-copied and saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from explicit_dropout import functional, kernels
from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.functional.batch import coherent_part_needed
from explicit_dropout.hooks.calls import (
    argument_names,
    in_backward,
    in_transform,
    named_call,
    only_input,
    without_function,
)
from explicit_dropout.hooks.collector import Chain, Collector, Observed, Term
from explicit_dropout.hooks.products import lowered_input
from explicit_dropout.hooks.told import ENCODER, PADDING_ARGUMENTS, marks, shortened, shown, stream_of
from explicit_dropout.noise import Noise
from explicit_dropout.sites import Attention, FeedForward, Layer, Site, projection_of, samples_first

_Result = TypeVar("_Result")
Padding = Literal["auto"] | None | Callable[[str, Tensor], Tensor | None]
"""How padding is known: from the model's arguments, not at all, or by a function of module path and tokens."""


def check_padding(padding: object) -> None:
    if padding not in ("auto", None) and not callable(padding):
        raise InputError("padding", "'auto', None or a function of (module path, x)", repr(padding))


RECOMPUTED = (
    " (Activation checkpointing has run this layer again, after the same model was called with another batch: masks of "
    "the last call are all that is known then.)"
)


class Tap:
    """What the hooks of one layer share: its call, what they have seen of it, and where terms go."""

    def __init__(
        self, layer: Layer, noise: Noise, collector: Collector, *, merged_heads: bool, padding: Padding,
        holders: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.noise, self.collector = noise, collector
        self.coherent = coherent_part_needed(noise)
        self.coherence, self.incoherence = 0.5 * noise.mean**2, 0.5 * noise.variance
        """What a coherent energy is multiplied by, ½ μ², and what column energies times column norms are, ½ v."""
        self.coherent_piece = int(noise.variance > 0)
        """Where the coherent part of a firing stands among its terms: after the incoherent one, if there is one."""
        self.merged_heads, self.padding_source = merged_heads, padding
        self.described, self.path = layer.described, layer.path
        straight = self.described.batch_first and (  # projections see (batch, token, width), and nothing else says more
            isinstance(self.described, Attention)
            or (self.described.flattened is None and self.described.padding is None)
        )
        self.told_by_model = straight and padding == "auto"
        """Whether padding can only be what the whole model was told: nothing, mostly."""
        self.key = f"{type(self.described).__name__} {self.path} {noise}"  # a layer may have a tap for each of its laws
        self.holders = holders
        self.streams = [(holder, stream_of(self.path.removeprefix(holder))) for holder in holders]
        module = self.described.module
        self.names = () if module is None else argument_names(module)

    def __getstate__(self) -> dict[str, Any]:
        return without_function(self.__dict__, "padding_source")

    def watching(self, module: nn.Module) -> bool:
        """Whether a firing of this module is part of training.

        Under activation checkpointing the recomputed forward is one too: it must repeat the same computation, although
        nobody collects its result.
        """
        if self.collector.inert or not module.training:
            return False
        if torch.is_grad_enabled():
            return True
        if self.collector.slot().open:
            raise CollectionError(
                f"{self.path} runs without gradients inside a training forward pass, so its penalty would have none. "
                "Reentrant activation checkpointing does that: use checkpoint(..., use_reentrant=False), in "
                "transformers gradient_checkpointing_kwargs={'use_reentrant': False}. So does a model that runs a part "
                "of itself under torch.no_grad() first: let it run that in eval mode. Or leave it out by layers=. If a "
                "forward pass was interrupted (Ctrl-C), the next one of the whole model puts this right."
            )
        return False

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The layer is called."""
        self.collector.slot().observed[self.key] = Observed(named_call(self.names, args, kwargs))

    def observed(self) -> Observed:
        """What was seen of the call under way; nothing, where the layer is no module of its own."""
        found = self.collector.slot().observed.get(self.key)
        return Observed({}) if found is None else found

    def end(self) -> None:
        """The layer's call is over: nothing of it is kept alive."""
        self.collector.slot().observed.pop(self.key, None)

    def add(
        self,
        site: Site,
        penalty: Tensor | None,
        columns: Tensor | None,
        x: Tensor,
        mask: Tensor | None,
        factor: float = 1.0,
        norms: Tensor | None = None,
        piece: int = 0,
    ) -> None:
        """Leave a term for the tokens of x that the mask calls real."""
        if mask is not None and not (torch.compiler.is_compiling() or in_transform()):
            penalty = None if penalty is None else SameMask.apply(penalty, mask)  # type: ignore[no-untyped-call]
            columns = None if columns is None else SameMask.apply(columns, mask)  # type: ignore[no-untyped-call]
        slot = self.collector.slot()
        if slot.open:
            tokens = x.shape[:-1].numel() if mask is None else mask.sum()
            samples = x.shape[:-2].numel() if x.ndim > 2 else 0
            version = self.version(site)
            given = None if torch.compiler.is_compiling() else slot.samples
            term = Term(
                site.name, penalty, columns, tokens, samples, self.holders, factor, norms, piece, version, given
            )
            slot.pending = Chain(term, slot.pending)

    def padding(self, x: Tensor, stream: str | None = None) -> Tensor | None:
        """The real tokens of x, from the arguments of the whole model or as the user says."""
        if self.padding_source is None:
            return None
        if callable(self.padding_source):
            return self._checked(self.padding_source(self.path, x), x, "the mask of your padding function")
        masks = self.collector.padding()
        for holder, own in self.streams:
            kind = stream or own
            if kind == "main" and masks:
                self._refuse_either(masks, holder)
            if (holder, kind) in masks:
                mask, lengths = masks[holder, kind], self.collector.lengths.get(holder)
                if lengths is not None and mask.shape[-1] != x.shape[-2]:
                    mask = shortened(mask, x.shape[-2], lengths)
                if x.ndim > 2 and x.shape[-2] == 1 != mask.shape[-1]:
                    return None  # one token for each sample, which asks all others: there is no padding among it
                if x.ndim == 2 and x.shape[0] == mask.numel():
                    mask = mask.reshape(-1)  # all tokens in one row, as before experts that share them out
                name = f"the {PADDING_ARGUMENTS.get(kind)} of the call of {holder or 'the model'}"
                return self._checked(mask, x, name)
            if masks and (holder, kind) in self.collector.unpadded():
                return None
        return None

    def _refuse_either(self, masks: Mapping[tuple[str, str], Tensor], holder: str) -> None:
        """Where a model is told of two sequences, the name of a layer has to say which of them it works on."""
        told = {*masks, *self.collector.unpadded()}
        either = [masks.get((holder, kind)) for kind in ("main", "decoder") if (holder, kind) in told]
        if len(either) < 2 or either[0] is either[1]:
            return
        if not any(ENCODER.search(part) for part in self.path.removeprefix(holder).split(".")):
            raise CollectionError(
                f"{holder or 'the model'} takes an attention_mask and a decoder_attention_mask, and the name of "
                f"{self.path} does not say whether it is a part of the encoder or of the decoder. Attach with "
                "padding=function(module path, x) → boolean mask, or with padding=None to count all tokens."
            )

    def _checked(self, mask: Tensor | None, x: Tensor, what: str) -> Tensor | None:
        if mask is None:
            return None
        if not marks(mask, x.shape[:-1]):
            raise CollectionError(
                f"{what}, {shown(mask)}, does not say which of the tokens {tuple(x.shape[:-1])} of {self.path} are "
                "real. Attach with padding=None to count all tokens, or with padding=function(module path, x) → "
                "boolean mask." + (RECOMPUTED if in_backward() else "")
            )
        return mask

    def linear(self, site: Site, x: Tensor, mask: Tensor | None) -> None:
        """J of a linear layer whose output is not at hand."""
        if self.coherent:
            weight, _ = projection_of(site).parameters()
            coherent = Noise(self.noise.mean, 0.0)
            penalty = functional.linear(x, weight, coherent, mask=mask, reduction="none")
            self.add(site, penalty, None, x, mask, piece=self.coherent_piece)
        self.incoherently(site, x, mask)

    def incoherently(self, site: Site, x: Tensor, mask: Tensor | None) -> None:
        """The part of a linear layer that its input's columns make, if the law has it."""
        if not self.noise.variance:
            return
        if torch.compiler.is_compiling() and not self.collector.sharded:
            projection = projection_of(site)
            weight, _ = projection.parameters()
            if kernels.serves_incoherent(x, weight):
                columns, norms = kernels.incoherent(lowered_input(projection.module, x), weight, mask)
                self.add(site, None, columns, x, mask, self.incoherence, norms)
                return
        self.add(site, None, kernels.columns(x, mask), x, mask, self.incoherence, self.norms(site))

    def norms(self, site: Site) -> Tensor | None:
        """The column norms of a weight that may be another one when the regulariser is called; None if it stays.

        A compiled graph has them as a part of itself, `torch.func.functional_call` lends a model weights for a call,
        and adapters may be switched.
        """
        if self.collector.sharded:
            return None
        projection = projection_of(site)
        if not torch.compiler.is_compiling() and not projection.adapted and self._own(site) is not None:
            return None
        return kernels.columns(projection.parameters()[0])

    def version(self, site: Site) -> int | None:
        """How often the weight of a site has been changed so far, where that can be told."""
        if torch.compiler.is_compiling() or self.collector.sharded:
            return None
        held = self._own(site)
        return None if held is None else held._version

    def _own(self, site: Site) -> Tensor | None:
        """The weight of a site, if it is the one that it had when the regulariser was attached."""
        held = None if site.projection is None else site.projection.held
        return held if held is self.collector.held.get(site.name) else None

    def coherently(self, site: Site, x: Tensor, output: Tensor, mask: Tensor | None) -> None:
        """The part of a linear layer that its output makes, if the law has it."""
        if not self.coherent:
            return
        bias = projection_of(site).offset()
        if bias is None:
            output = output.clone()  # the model may go on to change its own in place
        energies = kernels.plain.energies(output, bias, mask)
        self.add(site, energies, None, x, mask, self.coherence, piece=self.coherent_piece)

    def penalise(self, site: Site, compute: Callable[..., _Result], *given: Any) -> _Result:
        """Run what leaves the term of a site; errors of the closed forms get the site in front."""
        if torch.compiler.is_compiling():
            return compute(*given)
        try:
            return compute(*given)
        except (InputError, UnsupportedSiteError) as error:
            raise UnsupportedSiteError(f"{site.name}: {error}") from error


class TapHook:
    """A hook of one layer. It is found by its collector, on whatever module it sits."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap

    @property
    def collector(self) -> Collector:
        return self.tap.collector


class BeginHook(TapHook):
    """Before a layer is called: keep the arguments that its penalties depend on."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.tap.watching(module):
            self.tap.begin(args, kwargs)


class EndHook(TapHook):
    """After a layer was called, or has failed: forget its arguments."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        del module, args, kwargs, output
        if not self.tap.collector.inert:
            self.tap.end()


def by_sample(tap: Tap, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """The input of a projection as (*batch, token, width), and which of its tokens are real."""
    if tap.told_by_model and not tap.collector.padding():
        return x, None
    described, mask = tap.described, None
    x = samples_first(described, x)
    if isinstance(described, FeedForward) and described.flattened is not None and x.ndim == 2:
        x = x.reshape(*tap.observed().call[described.flattened].shape[:-1], -1)
    if isinstance(described, FeedForward) and described.padding is not None:
        mask = described.padding(tap.observed().call)
    if mask is None:
        cross = isinstance(described, Attention) and described.cross
        mask = tap.padding(x, "context" if cross else None)
    return x, mask


def in_order(mask: Tensor | None, tokens: Tensor, x: Tensor) -> Tensor | None:
    """The mask of tokens in the order in which x has them."""
    swapped = x.ndim > 2 and tokens is not x
    return mask.transpose(0, 1) if mask is not None and swapped else mask


class SeenHook(TapHook):
    """On a projection inside attention: keep its input and output until the attention is done."""

    def __init__(self, tap: Tap, role: str) -> None:
        super().__init__(tap)
        self.role = role

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        if self.tap.watching(module):
            observed = self.tap.observed()
            if self.role in observed.tensors:
                observed.repeated = {*observed.repeated, self.role}
            observed.tensors[self.role] = only_input(self.tap.path, args, kwargs)
            observed.tensors[self.role + " out"] = output
            if not torch.compiler.is_compiling():
                observed.versions[self.role] = output._version


class WeightsHook(TapHook):
    """Before the dropout of attention weights: keep them."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.tap.watching(module):
            self.tap.observed().tensors["weights"] = only_input(self.tap.path, args, kwargs)


class SameMask(torch.autograd.Function):
    """A term as it is; its backward pass refuses a mask other than that of the forward pass.

    Checkpointing recomputes layers during the backward pass and takes for granted that they do the same again. The
    padding of the whole model is none of a layer's arguments: what was saved here comes back recomputed, and differs if
    other forward passes with other padding came in between.
    """

    @staticmethod
    def forward(ctx: Any, term: Tensor, mask: Tensor) -> Tensor:
        ctx.mask = mask
        ctx.save_for_backward(mask)
        return term.view_as(term)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (again,) = ctx.saved_tensors
        if again.data_ptr() != ctx.mask.data_ptr() and not torch.equal(again, ctx.mask):
            raise CollectionError(
                "activation checkpointing recomputed a layer with the padding of a later forward pass. With "
                "checkpointing and padded batches, run the backward pass of each forward pass before the next one. "
                "Where the model itself calls a part of it twice with different padding, attach with padding=None to "
                "count all tokens, or checkpoint whole calls of that part instead of its layers."
            )
        return grads[0], None
