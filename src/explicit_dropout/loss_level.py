"""LossLevelDropout: what dropout on a layer's input does to the loss, to second order, as a term without dice.

`ExplicitDropout` measures the deviation that dropout causes at the layer itself. Here it is followed to the outputs of
the model, and weighed there by how the loss curves: the explicit regulariser of Wei, Kakade and Ma (2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Never

import torch
from torch import Tensor, nn

from explicit_dropout import checks
from explicit_dropout.attached import Attached, uncompiled
from explicit_dropout.curvature import Loss, columns, counted, drawn
from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.following import energies, refuse_mixed, refuse_once_differentiable, refuse_static_graph
from explicit_dropout.hooks.loss_level import (
    ArgumentsReached,
    Compiled,
    DifferentiableAttention,
    EnterAttention,
    InputReached,
    LeaveAttention,
    Reached,
    RowsReached,
)
from explicit_dropout.hooks.plan import Plan
from explicit_dropout.hooks.total import Share
from explicit_dropout.noise import Noise
from explicit_dropout.refusals import (
    check_reached,
    no_forward,
    places_of,
    refuse_replaced,
    refuse_silent,
    refuse_unknown,
)
from explicit_dropout.selection import Selection, select
from explicit_dropout.sites import Attention, Site, projection_of
from explicit_dropout.strengths import Strength
from explicit_dropout.table import shape, table
from explicit_dropout.weights import modules_under_fsdp

__all__ = ["Loss", "LossLevelDropout"]

SAME_HERE = {
    "attended_value": "value: whatever follows the value projection is part of the way to the loss",
    "query_key": "query and key together: to second order their effects on the loss add up",
}
"""Components of `ExplicitDropout` that another one covers here, and why."""


class LossLevelDropout(Attached):
    """R = Σ_sites λ · ½ v Σ_i x_i² (Jᵀ H J)_ii: how much larger dropout makes the loss, to second order in its noise.

        reg = xd.LossLevelDropout(model, xd.inverted(0.2), value=1.0, feed_forward=1.0)
        outputs = model(x)
        loss = criterion(outputs, y) + reg(outputs)

    x are all elements of a site's input, v the variance of the noise on them, J how the model's outputs move with them
    and H how the loss curves there. To that order it is the mean divergence of what the model predicts with dropout
    from what it predicts without, so λ = 1 stands for dropout itself and the rate is what is left to choose. It costs a
    backward pass that can be differentiated again for every output of the model, or for every draw.

    Args:
        model: any model with Transformer layers that a rule recognises (`find_sites` tells), in eager mode.
        noise: the law of the dropout, without a mean: `inverted(p)` or `gaussian(std)`; or one for each component.
        query, key, value, feed_forward: the strength λ of each component, as in `ExplicitDropout`.
        loss: "cross_entropy" over the last axis of the outputs, "binary_cross_entropy" of logits, or "mse". As a mean.
        draws: None takes all outputs: exact, for one row of outputs for each sample. A number takes this many random
            combinations of them instead, of any outputs: unbiased, and the only dice there are.
        generator: of those combinations; torch's own if None.
        layers: indices of the layers to regularise; None for all.
        disable_dropout: switch off the model's stochastic dropout at the sites that are regularised, until `remove`.
        require_all: raise if a site does not fire in a forward pass; False for models that skip layers at random.

    Samples that mix, as they do in batch normalisation, need draws. Tokens may mix.
    """

    def __init__(
        self,
        model: nn.Module,
        noise: Noise | Mapping[str, Noise],
        *,
        query: Strength | None = None,
        key: Strength | None = None,
        value: Strength | None = None,
        feed_forward: Strength | None = None,
        loss: Loss = "cross_entropy",
        draws: int | None = None,
        generator: torch.Generator | None = None,
        layers: int | Iterable[int] | None = None,
        disable_dropout: bool = True,
        require_all: bool = True,
        **unknown: Never,
    ) -> None:
        for component, instead in SAME_HERE.items():
            if component in unknown:
                raise InputError("strengths", "those of query, key, value, feed_forward", f"{component}; use {instead}")
        refuse_unknown(unknown, type(self))
        checks.choice("loss", loss, Loss)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise InputError("generator", "a torch.Generator or None", type(generator).__name__)
        super().__init__()
        self.loss, self.generator = loss, generator
        self.draws = None if draws is None else checks.count("draws", draws)
        self.require_all = checks.flag("require_all", require_all)
        checks.flag("disable_dropout", disable_dropout)
        self.model = uncompiled(model)
        given = {"query": query, "key": key, "value": value, "feed_forward": feed_forward}
        selection = select(self.model, noise, given, layers)  # type: ignore[arg-type]
        self.sites: list[Site] = selection.sites
        self._laws, self._schedules = selection.laws, selection.schedules
        for component, law in self._laws.items():
            if law.mean:
                raise InputError(
                    "noise", "a law without a mean, inverted(p) or gaussian(std): a mean is no noise, and shrinks what "
                    "the model predicts", f"{law} for {component}",
                )  # fmt: skip
        for site in self.sites:
            check_reached(site, self._laws[site.component])
        self._refuse_sharded()
        self._places = places_of(self.model, self.sites)
        self._known_smooth = self._known_apart = False  # what a first pass has shown: see where they are asked for
        with self._attaching():
            if self.sites:
                self._attach(selection)
            if disable_dropout:
                self.silenced.switch_off_at(self.sites)

    # ------------------------------------------------------------------------------------------ attaching

    def _attach(self, selection: Selection) -> None:
        plan, collector = Plan(self._collector, self.model, padding=None), self._collector
        attention = [layer.described.module for layer in selection.layers if isinstance(layer.described, Attention)]
        for module in dict.fromkeys((self.model, *attention)):
            around = DifferentiableAttention(collector)
            plan.hook_before(module, EnterAttention(around))
            plan.hook_after(module, LeaveAttention(around))
        fused: dict[nn.Module, list[Site]] = {}
        for layer, sites in selection.places:
            plan.root.batch_first &= layer.described.batch_first
            uncalled = [site for site in sites if not projection_of(site).called]
            if uncalled and isinstance(layer.described, Attention) and layer.described.inputs is not None:
                module = layer.described.module
                inputs = dict(zip(("query", "key", "value"), layer.described.inputs, strict=True))
                plan.hook_before(module, ArgumentsReached(collector, uncalled, module, inputs))
            for site in sites:
                module = projection_of(site).module
                if projection_of(site).rows is not None and site not in uncalled:
                    fused.setdefault(module, []).append(site)
                elif site not in uncalled:
                    plan.hook_before(module, InputReached(collector, [site]))
        for module, sites in fused.items():
            plan.hook_after(module, RowsReached(collector, sites))
        plan.register(self._handles)

    def _refuse_sharded(self) -> None:
        if modules_under_fsdp(self.model):
            raise UnsupportedSiteError(
                f"{type(self.model).__name__} is sharded by fully_shard, which takes weights away before the penalty "
                "can be differentiated. Use ExplicitDropout under FSDP2, or DistributedDataParallel."
            )

    # ------------------------------------------------------------------------------------------ reading

    def __call__(self, outputs: Any, mask: Tensor | None = None) -> Tensor:
        """Σ λ R for the forward pass that made these outputs, as one float32 number to add to the loss.

        Args:
            outputs: of the model, before any softmax: (sample, output) or (*batch, output); or what has them as
                `logits`.
            mask: (*batch), True where the loss counts; None for everywhere.
        """
        if torch.compiler.is_compiling():  # whoever compiles a whole step learns here that it cannot be
            outside = torch.compiler.disable(self._penalty)  # type: ignore[no-untyped-call]
            return outside(outputs, mask)  # type: ignore[no-any-return]
        return self._penalty(outputs, mask)

    def _penalty(self, outputs: Any, mask: Tensor | None) -> Tensor:
        forwards = self._collected()
        outputs = _tensor(outputs)
        if mask is not None:
            checks.boolean(
                "mask", mask, outputs.shape[:-1], "that of the outputs without their last axis", outputs.device
            )
        if not self.sites:
            self.calls += 1
            return torch.zeros(())
        if not forwards:
            raise no_forward(self.model)
        if len(forwards) > 1:
            raise CollectionError(
                f"{len(forwards)} forward passes in train mode wait for this call, which is for the outputs of one. "
                "Call the regulariser after each, with its outputs, or discard() those that are not to be regularised. "
                "All are dropped now."
            )
        reached: list[Reached] = []
        for firing in forwards[0]:
            if isinstance(firing, Compiled):
                raise firing.refuse()
            firing.refuse_changed()
            reached.append(firing)
        refuse_replaced(self._places)
        self._refuse_sharded()
        refuse_silent(self.sites, {one.site for one in reached}, require_all=self.require_all)
        if not self._known_smooth:
            refuse_static_graph(outputs)
        if self.draws is None:
            self._refuse_rows(outputs, reached)
            directions = columns(outputs, self.loss)
        else:
            directions = drawn(outputs, self.loss, self.draws, self.generator)
        if mask is not None:
            directions = directions.masked_fill(~mask.unsqueeze(-1), 0)  # also where outputs are no numbers
        found = energies(outputs, directions, reached)
        if not self._known_smooth:
            refuse_once_differentiable(found)
            self._known_smooth = True
        step, self.calls = self.calls, self.calls + 1
        number = counted(outputs, mask, self.loss)
        laws = {site.name: self._laws[site.component] for site in self.sites}
        return self._total.of(
            Share(one.site, self._schedules[one.site].at(step), laws[one.site].variance / 2, number, energy)
            for one, energy in zip(reached, found, strict=True)
        )

    def _refuse_rows(self, outputs: Tensor, reached: list[Reached]) -> None:
        """All samples are followed at once, which is right only if each has a row of outputs to itself."""
        samples = reached[0].samples
        if outputs.ndim != 2 or samples not in (None, outputs.shape[0]):
            raise InputError(
                "outputs",
                "one row for each sample, (sample, output), where all outputs are followed; draws=1 takes outputs of "
                "any shape",
                f"shape {tuple(outputs.shape)}" + ("" if samples is None else f" for {samples} samples"),
            )
        if not self._known_apart and len(outputs) > 1:
            refuse_mixed(outputs, reached)
            self._known_apart = True

    def summary(self) -> str:
        """What is attached, as a table."""
        strengths = self.strengths()
        rows = [
            [str(s.layer), s.component, s.path or "(model)", shape(s), str(self._laws[s.component]),
             f"{strengths[s.name]:g}"]
            for s in self.sites
        ]  # fmt: skip
        how = "all outputs" if self.draws is None else f"{self.draws} draw{'s' if self.draws > 1 else ''}"
        lines = [
            f"LossLevelDropout on {type(self.model).__name__}: {len(self.sites)} sites, loss={self.loss!r}, {how}",
            table(["layer", "component", "module", "in → out", "noise", "λ"], rows),
        ]
        return "\n".join([*lines, *self._state_lines()])


def _tensor(outputs: Any) -> Tensor:
    found = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logits", None)
    if not isinstance(found, Tensor):
        raise InputError("outputs", "a tensor, or something with logits", type(outputs).__name__)
    if found.dtype not in checks.FLOATS or found.ndim < 2 or not found.requires_grad:
        lacking = "" if found.requires_grad else ", without gradients"
        raise InputError(
            "outputs",
            "what the model has just returned, (*batch, output), with gradients and before any softmax",
            f"a tensor of {found.dtype}, shape {tuple(found.shape)}{lacking}",
        )
    return found
