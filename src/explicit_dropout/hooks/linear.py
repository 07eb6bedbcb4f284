"""The hooks of a linear layer whose input is dropped from: values and feed-forward layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout import kernels
from explicit_dropout.hooks.calls import only_input, with_input
from explicit_dropout.hooks.products import is_plain_linear, product_and_bias
from explicit_dropout.hooks.taps import Tap, TapHook, by_sample, projection_of
from explicit_dropout.sites import Site


class ColumnsHook(TapHook):
    """Before a projection: the column energies of its input, where kernels take them as it passes through."""

    def __init__(self, tap: Tap, site: Site) -> None:
        super().__init__(tap)
        self.site = site
        self.plain = is_plain_linear(projection_of(site).module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.tap.watching(module):
            return None
        x = only_input(self.site.path, args, kwargs)
        if not kernels.serves(x):
            return None
        passed = self.tap.penalise(self.site, self._term, x)
        return with_input(passed, args, kwargs)

    def _term(self, x: Tensor) -> Tensor:
        tokens, mask = by_sample(self.tap, x)
        lower = kernels.lowered(x) if self.plain else None
        flags, norms = in_order(mask, tokens, x), None
        if kernels.by_triton(x) and not self.tap.collector.sharded:  # both at once: launches are dear
            weight, _ = projection_of(self.site).parameters()
            passed, columns, norms = kernels.passing_to(weight, x, flags, lower)
        else:
            passed, columns = kernels.passing(x, mask=flags, lower=lower, by_column=True)
            norms = self.tap.norms(self.site)
        self.tap.add(self.site, None, columns, tokens, mask, self.tap.incoherence, norms)
        return passed


class LinearHook(TapHook):
    """After a projection: the penalty of a value or feed-forward site, as far as no hook before it has taken it."""

    def __init__(self, tap: Tap, site: Site) -> None:
        super().__init__(tap)
        self.site = site
        self.untouched: bool | None = None
        """Whether the model leaves the projection's output as it is; unknown before the first forward pass."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        if not self.tap.watching(module):
            return None
        x = only_input(self.site.path, args, kwargs)
        if not self.tap.coherent and kernels.serves(x):  # the hook before the projection has taken all there is
            return None
        return self.tap.penalise(self.site, self._term, x, output)

    def _term(self, x: Tensor, output: Tensor) -> Tensor | None:
        tap, projection = self.tap, projection_of(self.site)
        rows = projection.rows
        if isinstance(rows, tuple) or not kernels.serves(output):
            apart = self._apart(x)
            if apart is not None:
                return self._term_apart(x, *apart)
            self._plain_term(x, output)
            return None
        if not tap.coherent:
            return None
        tokens, mask = by_sample(tap, x)
        passed, energies = kernels.passing(
            output, bias=projection.offset(), mask=in_order(mask, tokens, x), rows=rows, copied=not self.untouched
        )
        tap.add(self.site, energies, None, tokens, mask, tap.coherence, piece=tap.coherent_piece)
        slot = tap.collector.slot()
        if self.untouched is not False and slot.open:
            slot.passed.append((self, passed, passed._version))
        return passed

    def _plain_term(self, x: Tensor, output: Tensor) -> None:
        tap = self.tap
        tokens, mask = by_sample(tap, x)
        tap.coherently(self.site, tokens, _like_tokens(projection_of(self.site).of(output), x, tokens), mask)
        if not kernels.serves(x):  # or the hook before the projection has taken its columns
            tap.incoherently(self.site, tokens, mask)

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The product x Wᵀ by itself, and the bias, where compiled code should have them so.

        The energy is of the product without the bias, which has no gradient from it. Taken from the output it has two
        that cancel, each a pass over all tokens. Other hooks may have changed the output, and it stays as it is then.
        So does that of a layer which makes other things besides: adding their biases later takes more passes.
        """
        projection = projection_of(self.site)
        fused = projection.rows is not None
        if not (torch.compiler.is_compiling() and self.tap.coherent) or fused:
            return None
        return None if len(projection.module._forward_hooks) > 1 else product_and_bias(projection.module, x)

    def _term_apart(self, x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
        """The term from a product, and the output anew. The compiler drops the output that there was."""
        tap, projection = self.tap, projection_of(self.site)
        tokens, mask = by_sample(tap, x)
        own, less = product, None
        if self.site.component == "value":  # attention keeps values, so their energy is made of what it keeps
            fixed = bias.detach()
            own, less = product + fixed.to(product.dtype), projection.of(fixed)
        energies = kernels.plain.energies(_like_tokens(projection.of(own), x, tokens), less, mask)
        tap.add(self.site, energies, None, tokens, mask, tap.coherence, piece=tap.coherent_piece)
        tap.incoherently(self.site, tokens, mask)
        return product + bias.to(product.dtype)


def _like_tokens(made: Tensor, x: Tensor, tokens: Tensor) -> Tensor:
    """What a projection has made of x, in the order of the tokens that x is read as."""
    made = made.transpose(0, 1) if x.ndim > 2 and tokens is not x else made
    return made.reshape(*tokens.shape[:-1], -1)


def in_order(mask: Tensor | None, tokens: Tensor, x: Tensor) -> Tensor | None:
    """The mask of tokens in the order in which x has them."""
    swapped = x.ndim > 2 and tokens is not x
    return mask.transpose(0, 1) if mask is not None and swapped else mask
