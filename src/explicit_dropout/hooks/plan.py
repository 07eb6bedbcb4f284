"""Which hooks go where: at most one of ours before and one after the call of each module."""

from __future__ import annotations

from collections import Counter
from itertools import takewhile
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from explicit_dropout import kernels
from explicit_dropout.adapters.generic import author, is_read
from explicit_dropout.hooks.activation import Activation, AfterActivation, BeforeActivation, Between
from explicit_dropout.hooks.attention import AttendedHook, AttentionHook, SquaresHook
from explicit_dropout.hooks.collector import Collector, PartBefore, RootAfter, RootBefore, failed
from explicit_dropout.hooks.linear import ColumnsHook, LinearHook
from explicit_dropout.hooks.loss_level import ArgumentsReached, InputReached, LeaveAttention
from explicit_dropout.hooks.steps import watch_steps
from explicit_dropout.hooks.taps import BeginHook, EndHook, Padding, SeenHook, Tap, WeightsHook
from explicit_dropout.hooks.told import lengths_of
from explicit_dropout.hooks.twins import LeaveHook
from explicit_dropout.sites import SCORES, Attention, FeedForward, Layer, Site, projection_of

TAKING = ColumnsHook, SquaresHook, AttendedHook, WeightsHook, InputReached, ArgumentsReached
"""Hooks that take the input of a module, and so have to see what it is in the end, whatever others make of it."""
READING = *TAKING, BeginHook, PartBefore
"""The same, with those that read the arguments of a call. Those of the whole model are read by who opens its pass."""
TIDYING = EndHook, LeaveHook, LeaveAttention, RootAfter
"""Hooks that have to run after a call that failed, too."""


class Before:
    """Hooks before the call of a module, as one."""

    def __init__(self, collector: Collector, hooks: list[Any]) -> None:
        self.collector, self.hooks = collector, hooks

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = None
        for hook in self.hooks:
            found = hook(module, args, kwargs)
            if found is not None:
                changed = args, kwargs = found
        return changed


class After:
    """Hooks after the call of a module, as one. A call that failed has no output: only what tidies up runs then."""

    def __init__(self, collector: Collector, hooks: list[Any]) -> None:
        self.collector, self.hooks = collector, hooks
        self.tidying = [hook for hook in hooks if isinstance(hook, TIDYING)]

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        changed = None
        for hook in self.tidying if failed(output) else self.hooks:
            found = hook(module, args, kwargs, output)
            if found is not None:
                changed = output = found
        return changed


class Plan:
    """The hooks of a whole model, collected first and registered together."""

    def __init__(self, collector: Collector, model: nn.Module, padding: Padding) -> None:
        self.collector, self.model, self.doubting = collector, model, padding == "auto"
        self.root = RootBefore(collector, model, doubting=self.doubting)
        self.before: dict[nn.Module, list[Any]] = {model: [self.root]}
        self.after: dict[nn.Module, list[Any]] = {}
        self.parts: set[str] = {""}
        named = {path: lengths_of(module) for path, module in model.named_modules()}
        collector.lengths = {path: lengths for path, lengths in named.items() if lengths is not None}
        self.places = Counter(module for _, module in model.named_modules(remove_duplicate=False))

    def add(self, layer: Layer, sites: list[Site], tap: Tap) -> None:
        """What the sites of one layer need."""
        described = layer.described
        self.root.batch_first &= described.batch_first
        for holder in tap.holders:
            self.watch(holder)
        if isinstance(described, Attention):
            self._add_attention(described, sites, tap)
            return
        between = self._between(layer, described, sites, tap)
        for site in sites:
            last = site.projection is described.layers[-1]
            self._add_linear(site, tap, before=between if last else None, after=None if last else between)
        if described.module is not None and described.padding is not None:
            self.hook_before(described.module, BeginHook(tap))
            self.hook_after(described.module, EndHook(tap))

    def watch(self, holder: str) -> None:
        """Have the model inside the model at this path say what it is told of padding."""
        if holder not in self.parts:
            self.parts.add(holder)
            part = self.model.get_submodule(holder)
            told = PartBefore(self.collector, part, holder, self.model, doubting=self.doubting)
            self.before.setdefault(part, []).insert(0, told)

    def _add_linear(self, site: Site, tap: Tap, before: Between | None = None, after: Between | None = None) -> None:
        module = projection_of(site).module
        if tap.noise.variance:
            self.hook_before(module, ColumnsHook(tap, site, before))
        self.hook_after(module, LinearHook(tap, site, before, after))

    def _between(self, layer: Layer, network: FeedForward, sites: list[Site], tap: Tap) -> Between | None:
        """Hooks on the activations of a feed-forward network, if it has some that kernels make."""
        if callable(tap.padding_source):  # it may look at what it is given, and say another thing of the activation
            return None
        parents = zip(*(path.split(".")[:-1] for path in layer.layer_paths), strict=False)
        common = ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, parents))
        around = list(self.model.get_submodule(common).modules())
        found = {
            module: kind
            for module in around
            if (kind := kernels.activation_of(module)) is not None and self.places[module] == 1
        }
        if not found:
            return None
        gated = len(network.layers) != 2  # compiled code does better to make activation and product at once
        between = Between(compiled=not gated and len(found) == 1 and all(is_known(module) for module in around))
        self.collector.networks.append(between)
        last = any(site.projection is network.layers[-1] for site in sites)
        for module, kind in found.items():
            self.places[module] += 1  # another network around this one leaves it alone
            activation = Activation(tap, between, kind, by_column=last and not gated)
            self.hook_before(module, BeforeActivation(activation))
            self.hook_after(module, AfterActivation(activation))
        return between

    def _add_attention(self, attention: Attention, sites: list[Site], tap: Tap) -> None:
        at_projection = [site for site in sites if site.component == "value" and attention.value.called]
        for site in at_projection:
            self._add_linear(site, tap)
        at_attention = [site for site in sites if site not in at_projection]
        if not at_attention:
            return
        self.hook_before(attention.module, BeginHook(tap))
        if attention.inputs is None:
            roles = {"query": attention.query, "key": attention.key, "value": attention.value}
            if all(site.component in SCORES for site in at_attention):  # of which values are no part
                del roles["value"]
            for role, projection in roles.items():
                self.hook_after(projection.module, SeenHook(tap, role))
            if tap.noise.variance:
                self._add_squares(attention, {site.component for site in at_attention}, tap)
        for site in at_attention:
            if site.component != "attended_value":
                continue
            if attention.output is not None:
                self.hook_before(attention.output, AttendedHook(tap, attention, site))
            if isinstance(attention.weights, nn.Module):
                self.hook_before(attention.weights, WeightsHook(tap))
        self.hook_after(attention.module, AttentionHook(tap, attention, at_attention))
        self.hook_after(attention.module, EndHook(tap))

    def _add_squares(self, attention: Attention, components: set[str], tap: Tap) -> None:
        """Column energies for the scores: at the query and the key projection, or once where they are one layer."""
        by_module: dict[nn.Module, list[str]] = {}
        for role, module in (("query", attention.query.module), ("key", attention.key.module)):
            if components & {role, "query_key"}:
                by_module.setdefault(module, []).append(role)
        for module, roles in by_module.items():
            self.hook_before(module, SquaresHook(tap, attention, roles))

    def hook_before(self, module: nn.Module, hook: Any) -> None:
        self.before.setdefault(module, []).append(hook)

    def hook_after(self, module: nn.Module, hook: Any) -> None:
        self.after.setdefault(module, []).append(hook)

    def register(self, handles: list[RemovableHandle]) -> None:
        """Register everything, leaving a handle of each hook."""
        watch_steps(self.collector, self.model)
        self.hook_after(self.model, RootAfter(self.collector))
        for module, hooks in self.before.items():
            first = module is self.model and bool(module._forward_pre_hooks)
            before = hooks[0] if len(hooks) == 1 else Before(self.collector, hooks)
            handle = module.register_forward_pre_hook(before, with_kwargs=True, prepend=first)
            in_order(module._forward_pre_hooks)
            handles.append(handle)
            if any(isinstance(hook, TAKING if module is self.model else READING) for hook in hooks):
                self.root.last.append((module, handle.id))
        for module, hooks in self.after.items():
            # In front of sharding wrappers, whose hooks take the weights away again, and of others that change outputs.
            first = bool(module._forward_hooks)
            alone = len(hooks) == 1 and not isinstance(hooks[0], TIDYING)
            after = hooks[0] if alone else After(self.collector, hooks)
            handle = module.register_forward_hook(after, with_kwargs=True, prepend=first, always_call=not alone)
            in_order(module._forward_hooks)
            handles.append(handle)


def in_order(hooks: dict[int, Any]) -> None:
    """Put hooks in anew as they come. What was moved to the front stands there for Python alone: the compiler of torch
    2.11 goes by the order of insertion, and takes one hook for another."""
    found = list(hooks.items())
    hooks.clear()
    hooks.update(found)


def is_known(module: nn.Module) -> bool:
    """Whether a module's forward is of a library, and changes nothing in place."""
    if "forward" in vars(module) or getattr(module, "inplace", False):
        return False
    return is_read(author(module))
