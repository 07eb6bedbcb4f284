"""What dropout really does to a model: its own modules, called again on inputs that drawn masks have perturbed.

Nothing here uses a closed form. A forward pass is recorded by hooks that know nothing of the regulariser; then the real
projections, and for attended values the real attention, are called again with their inputs multiplied by masks, and the
change of their real outputs is measured. Attention weights are read out of the real attention by putting unit vectors
in place of its values, whatever kernel computes it and whatever it adds to the scores.

Where a model computes with parameters without calling a module (`nn.MultiheadAttention`), the same is recomputed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from explicit_dropout import stochastic
from explicit_dropout.errors import ExplicitDropoutError
from explicit_dropout.hooks.calls import argument_names, named_call
from explicit_dropout.hooks.torch_functions import DROPOUTS, HEADS, TIED
from explicit_dropout.sites import Attention, FeedForward, Layer, Pairs, Projection, samples_first

CACHES = {"past_key_value", "past_key_values", "layer_past"}
"""Arguments that keep keys and values from call to call, which a call that is repeated must not see."""


# ---------------------------------------------------------------------------------------------- a steady model

_DROPOUTS = {*DROPOUTS, *TIED, HEADS, F.alpha_dropout, F.feature_alpha_dropout}


class _WithoutDropout(TorchFunctionMode):
    """Every function of dropout, torch's and ours, does nothing, whatever module calls it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], *((0.0,) if len(args) > 4 else ()), *args[5:]), {**kwargs}
            kwargs.pop("dropout_p", None)
        elif func is F.multi_head_attention_forward:
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.arguments["dropout_p"] = 0.0
            args, kwargs = bound.args, bound.kwargs
        return func(*args, **kwargs)


@contextmanager
def steady(model: nn.Module) -> Iterator[None]:
    """The model in training mode, but the same at every call: no dropout, and one seed for what else it draws."""
    before = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(), _WithoutDropout():
        torch.manual_seed(0)
        model.train()
        for module in model.modules():
            if isinstance(module, stochastic.AttentionTreatment):  # of which some drop without a function
                module.training = False
        try:
            yield
        finally:
            for module, training in before.items():
                module.training = training


# ---------------------------------------------------------------------------------------------- recording


@dataclass(eq=False)
class Call:
    """One call of a layer: its arguments, and the input and output of each projection that was called in it."""

    arguments: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    inputs: dict[nn.Module, Tensor] = field(default_factory=dict)
    outputs: dict[nn.Module, Tensor] = field(default_factory=dict)


def record(model: nn.Module, layers: Iterable[Layer], inputs: Sequence[Any], keywords: Mapping[str, Any]) -> Record:
    """Run the model once and keep every call of its layers."""
    taken = Record()
    with ExitStack() as stack, steady(model), torch.no_grad():
        for layer in layers:
            _listen(layer.described, taken, stack)
        model(*inputs, **keywords)
    return taken


class Record:
    """The calls of each described layer in one forward pass."""

    def __init__(self) -> None:
        self.calls: dict[Attention | FeedForward, list[Call]] = {}
        self.open: dict[Attention | FeedForward, bool] = {}

    def of(self, layer: Layer) -> list[Call]:
        return self.calls.get(layer.described, [])

    def begin(self, item: Attention | FeedForward, arguments: Mapping[str, Any], args: Any, kwargs: Any) -> None:
        self.calls.setdefault(item, []).append(Call(arguments, args, kwargs))

    def projected(self, item: Attention | FeedForward, module: nn.Module, x: Tensor, out: Tensor) -> None:
        calls = self.calls.setdefault(item, [])
        if isinstance(item, FeedForward) and (not calls or module in calls[-1].inputs):
            calls.append(Call(calls[-1].arguments if calls else {}))
        if calls:
            calls[-1].inputs[module], calls[-1].outputs[module] = x, out


def _listen(item: Attention | FeedForward, taken: Record, stack: ExitStack) -> None:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kwargs = {name: None if name in CACHES else value for name, value in kwargs.items()}
        taken.begin(item, named_call(argument_names(module), args, kwargs), args, kwargs)

    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        taken.projected(item, module, args[0], output)

    if item.module is not None and (isinstance(item, Attention) or item.padding is not None):
        stack.enter_context(_removed(item.module.register_forward_pre_hook(before, with_kwargs=True)))
    for module in {p.module for p in item.projections if p.called}:
        stack.enter_context(_removed(module.register_forward_hook(after)))


@contextmanager
def _removed(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------------------------------------- one attention, again


class AttentionAgain:
    """A recorded call of attention that can be repeated with other queries, keys or values."""

    def __init__(self, attention: Attention, call: Call) -> None:
        self.attention, self.call = attention, call
        roles = {"query": attention.query, "key": attention.key, "value": attention.value}
        self.x: dict[str, Tensor] = {}
        for number, (role, projection) in enumerate(roles.items()):
            if projection.called:
                if projection.module not in call.inputs:
                    raise ExplicitDropoutError(f"its {role} projection was not called")
                self.x[role] = self.turned(call.inputs[projection.module])
            else:
                if attention.inputs is None:
                    raise ExplicitDropoutError(f"its {role} projection is not called, and no `inputs` say what it sees")
                self.x[role] = self.turned(call.arguments[attention.inputs[number]])
        self.roles = roles

    @cached_property
    def pairs(self) -> Pairs:
        """What the call says of tokens and pairs, for what depends on it: the rule may not understand its mask."""
        return self.attention.pairs(self.attention, self.call.arguments, self.x["query"], self.x["key"])

    def turned(self, x: Tensor) -> Tensor:
        """A tensor of the call with its samples in front of its tokens; of such a one, as the call has it."""
        return samples_first(self.attention, x)

    def heads(self, role: str) -> int:
        return self.attention.heads if role == "query" else self.attention.key_heads or self.attention.heads

    def projected(self, role: str, x: Tensor | None = None) -> Tensor:
        return projected(self.roles[role], self.x[role] if x is None else x)

    def by_head(self, role: str, out: Tensor) -> Tensor:
        heads = torch.unflatten(out, -1, (self.heads(role), -1)).transpose(-2, -3)
        return heads.repeat_interleave(self.attention.heads // self.heads(role), -3)

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The scores that the rule describes, (*, heads, token, context), of projected queries and keys."""
        q, k = self.by_head("query", queries), self.by_head("key", keys)
        rotary = None if self.attention.rotary is None else self.attention.rotary(self.attention, self.call.arguments)
        if rotary is not None:
            q, k = rotary(q.unsqueeze(-3)).squeeze(-3), rotary(k.unsqueeze(-3)).squeeze(-3)
        return self.attention.score_scale * q @ k.mT

    def allowed(self) -> Tensor:
        """Which pairs count by the rule, broadcastable to the scores."""
        x, context, pairs = self.x["query"], self.x["key"], self.pairs
        allowed = torch.ones(x.shape[-2], context.shape[-2], dtype=torch.bool, device=x.device)
        allowed = allowed.tril() if pairs.causal else allowed
        if pairs.allowed is not None:
            allowed = allowed & pairs.allowed
        if pairs.mask is not None:
            allowed = allowed & pairs.mask[..., None, :, None]
        if pairs.context_mask is not None:
            allowed = allowed & pairs.context_mask[..., None, None, :]
        return allowed

    def described_weights(self) -> Tensor:
        """softmax of the described scores."""
        scores = self.scores(self.projected("query"), self.projected("key"))
        if self.pairs.bias is not None:
            scores = scores + self.pairs.bias
        return scores.masked_fill(~self.allowed(), torch.finfo(scores.dtype).min).softmax(-1)

    def claimed_weights(self) -> Tensor | None:
        """A from where the rule says that it can be had; None where it says nothing."""
        source, seen = self.attention.weights, []
        if source == "compute":
            return self.described_weights()
        if isinstance(source, nn.Module):
            with _removed(source.register_forward_pre_hook(lambda _, args: seen.append(args[0]))):
                self.again()
            if not seen:
                raise ExplicitDropoutError("the module whose input the rule calls attention weights was not called")
            return cast("Tensor", seen[-1])
        if source == "output":
            result = self.attention.module(*self.call.args, **self.call.kwargs)
            return cast("Tensor", result[1]) if isinstance(result, tuple) and len(result) > 1 else None
        return None

    def known_weights(self) -> Tensor | None:
        """A by the rule: of the described scores, or, where it says that the model has others, what it claims A is."""
        others = self.attention.obstacle or self.attention.refused.get("query_key")
        return self.claimed_weights() if others else self.described_weights()

    def again(self, **outputs: Tensor) -> Tensor:
        """A V of the real attention when these projections (query=, key=, value=) yield something else."""
        attention, seen = self.attention, []

        def replace(part: Projection, new: Tensor, module: nn.Module, args: Any, output: Tensor) -> Tensor:
            del module, args
            return _put(part, output, self.turned(new))

        def keep(module: nn.Module, args: tuple[Any, ...]) -> None:
            del module
            seen.append(self.turned(args[0]))

        with ExitStack() as stack, torch.no_grad():
            for role, new in outputs.items():
                hook = partial(replace, self.roles[role], new)
                stack.enter_context(_removed(self.roles[role].module.register_forward_hook(hook)))
            if attention.output is not None:
                stack.enter_context(_removed(attention.output.register_forward_pre_hook(keep)))
            result = attention.module(*self.call.args, **self.call.kwargs)
        if attention.output is None:
            return self.turned(cast("Tensor", result[0] if isinstance(result, tuple) else result))
        if not seen:
            raise ExplicitDropoutError("its output projection was not called")
        return seen[-1]

    def weights(self, **outputs: Tensor) -> Tensor | None:
        """The real A, (*batch, heads, token, context), read by attending to unit vectors; None where that is no way."""
        attention = self.attention
        if isinstance(attention.module, nn.MultiheadAttention):
            arguments = {**self.call.arguments, "need_weights": True, "average_attn_weights": False}
            return cast("Tensor", attention.module(**arguments)[1])
        if not attention.value.called:
            return None
        groups, clean = self.heads("value"), self.projected("value")
        context, width = clean.shape[-2], clean.shape[-1] // groups
        columns = []
        for start in range(0, context, width):
            count = min(width, context - start)
            probe = clean.new_zeros(*clean.shape[:-1], groups, width)
            tokens = torch.arange(count, device=clean.device)
            probe[..., start + tokens, :, tokens] = 1
            attended = self.again(value=probe.flatten(-2), **outputs)
            if attended.shape[-1] != attention.heads * width:
                raise ExplicitDropoutError(
                    f"A V is {attended.shape[-1]} wide, not {attention.heads} heads of width {width}"
                )
            columns.append(torch.unflatten(attended, -1, (attention.heads, width)).transpose(-2, -3)[..., :count])
        return torch.cat(columns, -1)


def projected(projection: Projection, x: Tensor) -> Tensor:
    """What the real projection makes of x: by calling its module, or with its parameters where the model does so."""
    if projection.called:
        return projection.of(projection.module(x))
    weight, bias = projection.parameters()
    return F.linear(x, weight, bias)


def _put(projection: Projection, output: Tensor, part: Tensor) -> Tensor:
    rows = projection.rows
    if rows is None:
        return part
    output = output.clone()
    output[..., rows if isinstance(rows, slice) else list(rows)] = part
    return output
