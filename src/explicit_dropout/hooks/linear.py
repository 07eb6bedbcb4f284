"""The hooks of a linear layer whose input is dropped from: values and feed-forward layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout import kernels
from explicit_dropout.hooks.activation import Between, Left, arrived, free
from explicit_dropout.hooks.calls import only_input, with_input
from explicit_dropout.hooks.products import is_plain_linear, product_and_bias
from explicit_dropout.hooks.taps import Tap, TapHook, by_sample, in_order
from explicit_dropout.sites import Site, projection_of


class ColumnsHook(TapHook):
    """Before a projection: the column energies of its input, where kernels take them as it passes through.

    between: what is known of an activation that its input may come from.
    """

    def __init__(self, tap: Tap, site: Site, between: Between | None = None) -> None:
        super().__init__(tap)
        self.site, self.between = site, between
        self.plain = is_plain_linear(projection_of(site).module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.tap.watching(module):
            return None
        x = only_input(self.site.path, args, kwargs)
        if not kernels.serves(x):
            return None
        passed = self.tap.penalise(self.site, self._term, x)
        return None if passed is None else with_input(passed, args, kwargs)

    def _term(self, x: Tensor) -> Tensor | None:
        tokens, mask = by_sample(self.tap, x)
        lower = kernels.lowered(x) if self.plain else None
        known = None if self.between is None else self._known(self.between, x)
        if known is not None:
            self.tap.add(self.site, None, known, tokens, mask, self.tap.incoherence, self.tap.norms(self.site))
            return None
        flags, norms = in_order(mask, tokens, x), None
        if kernels.by_triton(x) and not self.tap.collector.sharded:  # both at once: launches are dear
            weight, _ = projection_of(self.site).parameters()
            passed, columns, norms = kernels.passing_to(weight, x, flags, lower)
        else:
            passed, columns = kernels.passing(x, mask=flags, lower=lower, by_column=True)
            norms = self.tap.norms(self.site)
        self.tap.add(self.site, None, columns, tokens, mask, self.tap.incoherence, norms)
        return passed

    def _known(self, between: Between, x: Tensor) -> Tensor | None:
        """The columns of x, if they were taken as an activation made it, in the precision that the layer sees."""
        activated = arrived(self.tap.collector.slot(), between, x, self.plain)
        if activated is None:
            return None
        if activated.columns is None:
            between.shown.add(activated.activation)
        return activated.columns


class LinearHook(TapHook):
    """After a projection: the penalty of a value or feed-forward site, as far as no hook before it has taken it.

    before, after: what is known of an activation that its input may come from, and of one that its output may go to.
    """

    def __init__(self, tap: Tap, site: Site, before: Between | None = None, after: Between | None = None) -> None:
        super().__init__(tap)
        self.site, self.before, self.after = site, before, after
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
        flags, bias, slot = in_order(mask, tokens, x), projection.offset(), tap.collector.slot()
        if self.before is not None and slot.activated is not None:  # no hook before the layer has looked at it
            arrived(slot, self.before, x, is_plain_linear(projection.module))
        left = self._left(output, bias, tokens, mask, flags)
        if left is not None and left.deferred:
            return None
        passed, energies = kernels.passing(output, bias=bias, mask=flags, rows=rows, copied=not self.untouched)
        if left is not None:
            left.output, left.version = passed, passed._version
        tap.add(self.site, energies, None, tokens, mask, tap.coherence, piece=tap.coherent_piece)
        if self.untouched is not False and slot.open:
            slot.passed.append((self, passed, passed._version))
        return passed

    def _left(
        self, output: Tensor, bias: Tensor | None, tokens: Tensor, mask: Tensor | None, flags: Tensor | None
    ) -> Left | None:
        """What is left for an activation to find, in eager code: the output as it is, with its energy or without."""
        between, slot = self.after, self.tap.collector.slot()
        if slot.left is not None:
            slot.left.settle()
        slot.left = left = None
        if between is not None and free(slot) and kernels.serves_activated(output) and not self.tap.collector.sharded:
            deferred = self.site.name in between.ready
            slot.left = left = Left(
                self.tap, between, self.site, output, output._version, output, bias, True, tokens, mask, flags, deferred
            )  # fmt: skip
        return left

    def _plain_term(self, x: Tensor, output: Tensor) -> None:
        tap = self.tap
        tokens, mask = by_sample(tap, x)
        tap.coherently(self.site, tokens, _like_tokens(projection_of(self.site).of(output), x, tokens), mask)
        if not kernels.serves(x):  # or the hook before the projection has taken its columns
            self._incoherently(x, tokens, mask)

    def _incoherently(self, x: Tensor, tokens: Tensor, mask: Tensor | None) -> None:
        """The part that columns of the input make; in compiled code an activation may have taken them."""
        tap, slot = self.tap, self.tap.collector.slot()
        if self.before is not None and torch.compiler.is_compiling():
            activated, slot.activated = slot.activated, None
            alone = len(projection_of(self.site).module._forward_pre_hooks) <= 1  # others might have changed x in place
            if activated is not None and activated.output is x and alone:
                tap.add(self.site, None, activated.columns, tokens, mask, tap.incoherence, tap.norms(self.site))
                return
        tap.incoherently(self.site, tokens, mask)

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """The product x Wᵀ by itself, and the bias, where compiled code should have them so.

        The energy is of the product without the bias, which has no gradient from it. Taken from the output it has two
        that cancel, each a pass over all tokens. Other hooks may have changed the output, and it stays as it is then.
        So does that of a layer which makes other things besides: adding their biases later takes more passes. An
        activation that kernels make adds the bias, and its gradient is a by-product there.
        """
        projection, between = projection_of(self.site), self.before or self.after
        made = between is not None and between.compiled
        wanted = self.tap.coherent or (made and self.after is not None)
        if not (torch.compiler.is_compiling() and wanted) or projection.rows is not None:
            return None
        if len(projection.module._forward_hooks) > 1:
            return None
        return product_and_bias(projection.module, x, written_out=not made)

    def _term_apart(self, x: Tensor, product: Tensor, bias: Tensor) -> Tensor:
        """The term from a product, and the output anew. The compiler drops the output that there was."""
        tap, projection = self.tap, projection_of(self.site)
        tokens, mask = by_sample(tap, x)
        output = product + bias.to(product.dtype)
        left = None
        if self.after is not None and self.after.compiled:
            flags = in_order(mask, tokens, x)
            left = Left(tap, self.after, self.site, output, None, product, bias, False, tokens, mask, flags)
        self._incoherently(x, tokens, mask)
        if tap.coherent:
            own, less = product, None
            if self.site.component == "value":  # attention keeps values, so their energy is made of what it keeps
                fixed = bias.detach()
                own, less = product + fixed.to(product.dtype), projection.of(fixed)
            energies = kernels.plain.energies(_like_tokens(projection.of(own), x, tokens), less, mask)
            tap.add(self.site, energies, None, tokens, mask, tap.coherence, piece=tap.coherent_piece)
            if left is not None and tap.collector.slot().open:
                left.link = tap.collector.slot().pending
        tap.collector.slot().left = left
        return output


def _like_tokens(made: Tensor, x: Tensor, tokens: Tensor) -> Tensor:
    """What a projection has made of x, in the order of the tokens that x is read as."""
    made = made.transpose(0, 1) if x.ndim > 2 and tokens is not x else made
    return made.reshape(*tokens.shape[:-1], -1)
