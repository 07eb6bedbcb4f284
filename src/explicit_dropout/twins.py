"""convert_dropout: every stochastic dropout of a model becomes its deterministic twin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Never, get_args

import torch
from torch import Tensor, nn

from explicit_dropout import checks
from explicit_dropout.attached import LayerLevel, firings, uncompiled
from explicit_dropout.errors import CollectionError, InputError, UnsupportedSiteError
from explicit_dropout.hooks.calls import in_transform
from explicit_dropout.hooks.collector import Term
from explicit_dropout.hooks.dice import Interception, Others
from explicit_dropout.hooks.draws import Kind
from explicit_dropout.hooks.parts import DropPathHook, GuardHook, LayerMaskHook, PlaceAfter, PlaceBefore
from explicit_dropout.hooks.plan import Plan
from explicit_dropout.hooks.taps import Padding, check_padding
from explicit_dropout.hooks.tokens import takes_padding, told_parts
from explicit_dropout.hooks.told import is_pretrained
from explicit_dropout.hooks.total import Share
from explicit_dropout.hooks.twins import EnterHook, LeaveHook, Twin
from explicit_dropout.hooks.widths import Width
from explicit_dropout.refusals import chunk_of, no_forward, refuse_second, refuse_unknown
from explicit_dropout.selection import drop_path_rate, is_drop_path
from explicit_dropout.sites import Dropout
from explicit_dropout.strengths import Schedule, by_layer
from explicit_dropout.table import table

__all__ = ["KINDS", "DropoutTwins", "Twin", "convert_dropout"]

KINDS: tuple[Kind, ...] = get_args(Kind)


class DropoutTwins(LayerLevel):
    """What `convert_dropout` returns; called like an `ExplicitDropout`."""

    def __init__(
        self, model: nn.Module, schedules: Mapping[Kind, Schedule], padding: Padding, width: Width, others: Others
    ) -> None:
        super().__init__()
        self._schedules = schedules
        self.model = model = uncompiled(model)
        refuse_second(model)
        _refuse_chunks(model)
        with self._attaching():
            self._leave = self._attach(padding, width, others)

    def _attach(self, padding: Padding, width: Width, others: Others) -> LeaveHook:
        model, collector = self.model, self._collector
        dice = Interception(model, collector, others)
        plan = Plan(collector, model, padding)
        entering = EnterHook(collector, dice)
        off = [kind for kind, schedule in self._schedules.items() if schedule.is_off]
        leaving = LeaveHook(entering, model, padding, width, off)
        plan.hook_before(model, entering)
        for path in told_parts(model):
            part = model.get_submodule(path)
            if path and is_pretrained(part):
                plan.watch(path)
                plan.hook_before(part, GuardHook(entering, path))
            if takes_padding(part):
                plan.hook_before(part, LayerMaskHook(collector, dice, path, part))
            plan.hook_before(part, PlaceBefore(collector, dice, path))
            plan.hook_after(part, PlaceAfter(collector, dice))
        for path, module in model.named_modules():
            if others == "refuse" and isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
                raise UnsupportedSiteError(
                    f"{path or 'the model'}: the dropout between layers of {type(module).__name__} has no twin here. "
                    "Build it with dropout=0, or let it be random: others='keep'."
                )
            if isinstance(module, nn.modules.dropout._DropoutNd | nn.MultiheadAttention) or is_drop_path(module):
                plan.hook_before(module, GuardHook(entering, path or "the model"))
            rate = drop_path_rate(module)
            if rate is not None:
                name, p = rate
                rescaled = bool(getattr(module, "scale_by_keep", True))
                self.silenced.switch_off(Dropout(module, name))
                plan.hook_after(module, DropPathHook(collector, dice, path, p, rescaled))
        plan.hook_after(model, leaving)
        plan.register(self._handles)
        return leaving

    @property
    def sites(self) -> list[Twin]:  # type: ignore[override]
        """The places where dropout was found, as far as forward passes have shown them."""
        return list(self._leave.found.values())

    def _penalty(self, forwards: list[list[Term]]) -> Tensor:
        if not forwards:
            raise no_forward(self.model)
        if all(schedule.is_off for schedule in self._schedules.values()):
            self.calls += 1
            return torch.zeros(())
        shares = [
            Share(term.site, self._schedules[self._kind(term)].at(self.calls), term.factor, counted, term.penalty)
            for terms, counted in firings(forwards, "token")
            for term in terms
            if term.penalty is not None
        ]
        if not shares:
            raise CollectionError(
                f"{type(self.model).__name__} has drawn no dropout in its forward pass that has a strength: its rates "
                "are 0, the modules that draw are in eval mode, or their kinds are switched off. Build it with rates "
                "above 0, or attach xd.ExplicitDropout, which needs none."
            )
        learns = in_transform() or any(share.energies.requires_grad for share in shares)
        if not learns and any(parameter.requires_grad for parameter in self.model.parameters()):
            raise CollectionError(
                f"no parameter of {type(self.model).__name__} moves this penalty: it drops from what it is given, and "
                "from nothing that it makes of that. Such dropout has no twin that regularises: leave it random."
            )
        self.calls += 1
        return self._total.of(shares)

    def _kind(self, term: Term) -> Kind:
        return self._leave.found[term.site].component

    def remove(self) -> None:
        """Take every hook off and give the model its dice back, after a pass that was interrupted, too."""
        if hasattr(self, "_leave"):
            self._leave.abandon()
        super().remove()

    def _schedule(self, site: Twin) -> Schedule:
        return self._schedules[site.component]

    def summary(self) -> str:
        """Where the model draws dropout, and what stands for it, as a table: after a forward pass in train mode."""
        sites = self.sites
        lines = [f"DropoutTwins of {type(self.model).__name__}: {len(sites)} places"]
        if sites:
            strengths = self.strengths()
            rows = [[s.path or "(model)", s.component, f"{s.rate:g}", f"{strengths[s.name]:g}"] for s in sites]
            lines.append(table(["module", "twin", "p", "λ"], rows))
        else:
            lines.append("They show in the first forward pass in train mode.")
        if self._removed:
            lines.append("Removed: the model has its dice back.")
        return "\n".join(lines)


def convert_dropout(
    model: nn.Module,
    strength: float | Schedule = 1e-3,
    *,
    linear: float | Schedule | None = None,
    attention_weights: float | Schedule | None = None,
    drop_head: float | Schedule | None = None,
    hidden: float | Schedule | None = None,
    drop_path: float | Schedule | None = None,
    padding: Padding = "auto",
    width: Width = None,
    others: Others = "refuse",
    **unknown: Never,
) -> DropoutTwins:
    """Switch all dice of a model off, and have the expected effect of each as a penalty instead.

        twins = xd.convert_dropout(model, 1e-3)
        loss = criterion(model(x), y) + twins()

    Every dropout that the model draws in train mode counts, at its own rate p and under `inverted(p)`, the law of
    `nn.Dropout`: modules, functions and the `dropout_p` of fused attention. Its twin is ½ E‖deviation‖², a mean over
    real tokens, measured where the mask meets the next linear map:

    - `linear`: the result goes to one linear layer and nowhere else (dropout inside feed-forward networks);
    - `attention_weights`: they are dropped from, and multiplied with values;
    - `drop_head`: the same, whole heads at once (`stochastic.DropHead`);
    - `hidden`: anything else (residual branches, embeddings), measured at the result itself;
    - `drop_path`: whole branches (stochastic depth), measured at the branch.

    Args:
        strength: λ, a number or a schedule over calls. There is no value that makes a penalty equal to dropout: choose
            it by validation.
        linear, attention_weights, drop_head, hidden, drop_path: a λ of their own; 0 for neither dice nor penalty.
        padding: "auto" takes `attention_mask` of models and `src_key_padding_mask` of torch.nn's layers as real tokens;
            None counts all tokens; a function of (module path, x) returns the mask.
        width: a function of (module path, x) that returns the axis of a tensor that is its width, where the layers
            around it do not tell: the last as a rule, the second between convolutions.
        others: "refuse" raises where the model draws random numbers that have no twin; "keep" lets it.
    """
    refuse_unknown(unknown, convert_dropout)
    check_padding(padding)
    if width is not None and not callable(width):
        raise InputError("width", "None or a function of (module path, x)", repr(width))
    checks.choice("others", others, Others)
    given = zip(KINDS, (linear, attention_weights, drop_head, hidden, drop_path), strict=True)
    schedules = {kind: _of_kind(kind, strength if own is None else own) for kind, own in given}
    return DropoutTwins(model, schedules, padding, width, others)


def _of_kind(kind: str, strength: float | Schedule) -> Schedule:
    if isinstance(strength, Mapping | list | tuple):
        raise InputError(kind, "one strength: a finite number ≥ 0 or a schedule", repr(strength))
    return by_layer(kind, strength, 1)[0]


def _refuse_chunks(model: nn.Module) -> None:
    for path, part in model.named_modules():
        if size := chunk_of(part):
            raise UnsupportedSiteError(
                f"{path or 'the model'} runs its feed-forward layers on {size} tokens at a time, so that each chunk "
                "would count as a batch of its own. Set chunk_size_feed_forward = 0 in the model's configuration."
            )
