"""A call of attention with random tokens, made by a copy of the module, and what it shows."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from explicit_dropout.sites import Attention, Projection

CLOSE = 1e-3
"""So far may what is attended to be from what is expected, relative to its norm."""
TOKENS_BY_NAME = re.compile(r"(x|hidden|inputs?|context|memory|source|encoder|quer|key|val|[qkv]$|kv|tokens?|states?)")
OTHERS_BY_NAME = re.compile(r"mask|bias|pos|freq|cos|sin|rope|cache|past|len|size|shape|step|layer|height|width|index")


@dataclass(frozen=True)
class Seen:
    """What a call has shown: the outputs of projections, and what goes on to the output projection, (token, width)."""

    outputs: dict[nn.Module, Tensor]
    attended: Tensor

    def of(self, projection: Projection) -> Tensor:
        return projection.of(self.outputs[projection.module])


def heads_of(attention: Attention, seen: Seen, projection: Projection) -> Tensor:
    """(query head, token, width) of queries, or of keys and values, as often as query heads need them."""
    number = attention.heads if projection is attention.query else attention.key_heads or attention.heads
    heads = torch.unflatten(seen.of(projection), -1, (number, -1)).transpose(0, 1)
    return heads.repeat_interleave(attention.heads // number, 0)


def attended(attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(scale · Q Kᵀ) V, (*batch, token, head · width), of (*batch, head, token, width); causal if it says so."""
    scores = attention.score_scale * query @ key.mT
    if attention.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return (scores.softmax(-1) @ value).transpose(-3, -2).flatten(-2)


def close(found: Tensor, expected: Tensor, most: float = CLOSE) -> bool:
    return found.shape == expected.shape and bool((found - expected).norm() <= most * expected.norm() + 1e-9)


class Trial:
    """A copy of an attention module, with its parameters, for calls that leave nothing behind.

    moved: those of which the copy has its own, with other values.
    """

    def __init__(self, attention: Attention, *, grid: bool = False, moved: Iterable[nn.Parameter] = ()) -> None:
        self.attention, self.grid = attention, grid
        self.copies: dict[nn.Module, nn.Module] = {}
        self.factor = 1.0
        if not can_be_copied(attention):
            return
        module = attention.module
        half = any(parameter.dtype in (torch.float16, torch.bfloat16) for parameter in module.parameters())
        shaken = {id(parameter) for parameter in moved}
        kept = {id(parameter): parameter for parameter in module.parameters() if id(parameter) not in shaken}
        memo: dict[int, Any] = {} if half else kept
        try:
            copied = copy.deepcopy(module, memo).eval()
            if half:
                copied.float()
            for parameter in (memo[key] for key in shaken if key in memo):  # a part may copy itself in a way of its own
                shake(parameter)
        except Exception:  # it holds what cannot be copied, or numbers that cannot be changed
            return
        self.copies = {part: memo[id(part)] for part in module.modules() if id(part) in memo}
        for part in copied.modules():
            part._forward_hooks.clear()
            part._forward_pre_hooks.clear()
            part._compiled_call_impl = None
        for dropout in attention.dropouts:
            setattr(self.copies.get(dropout.module, dropout.module), dropout.name, 0.0)

    def call(self, tokens: int, *, gradients: bool = False) -> Seen | None:
        """What a call with so many tokens shows; None if it cannot be made or shows too little."""
        if not self.copies:
            return None
        seen = self._call(tokens, gradients)
        if seen is None or tokens == 1 or self.factor != 1:
            return seen
        query, key = (heads_of(self.attention, seen, part) for part in self.attention.projections[:2])
        spread = float((self.attention.score_scale * query @ key.mT).std())
        if not 0 < spread < 1:
            return seen
        self.factor = min((2 / spread) ** 0.5, 100.0)  # so that weights differ
        return self._call(tokens, gradients)

    def role_of_values(self) -> Literal["all", "some", "none", "unknown"]:
        """How much what a token that sees itself alone attends to is made of its values, of all that is projected."""
        with torch.inference_mode(False), torch.enable_grad():
            seen = self.call(1, gradients=True)
            if seen is None or not all(x.requires_grad for x in (seen.attended, *seen.outputs.values())):
                return "unknown"
            outputs = seen.outputs
            anywhere = torch.randn(seen.attended.shape, generator=torch.Generator().manual_seed(1)).to(seen.attended)
            moved = (seen.attended * anywhere).sum()  # and not its square, which a normalisation leaves as it is
            gradients = torch.autograd.grad(moved, [*outputs.values()], materialize_grads=True)
        found = dict(zip(outputs, gradients, strict=True))
        values = self.attention.value.of(found[self.attention.value.module]).norm()
        every = torch.stack([gradient.square().sum() for gradient in found.values()]).sum()
        rest = (every - values.square()).clamp(min=0).sqrt()
        if values <= CLOSE * rest or not values > 0:
            return "none"
        return "all" if rest <= CLOSE * values else "some"

    def _call(self, tokens: int, gradients: bool) -> Seen | None:
        attention, given = self.attention, self._tokens(tokens)
        if given is None:
            return None
        module = self.copies[attention.module]
        output = None if attention.output is None else self.copies[attention.output]
        outputs: dict[nn.Module, list[Tensor]] = {part.module: [] for part in attention.projections}
        attended: list[Tensor] = []
        handles = [
            self.copies[layer].register_forward_hook(lambda _m, _args, out, kept=kept: kept.append(out))
            for layer, kept in outputs.items()
        ]
        if output is not None:
            handles.append(output.register_forward_pre_hook(lambda _m, args: attended.extend(args[:1])))
        try:
            with quietly(given[0].device, gradients):
                result = module(*(x.requires_grad_(gradients).clone() for x in given))
        except Exception:  # it wants something else
            return None
        finally:
            for handle in handles:
                handle.remove()
        if output is None:
            attended = [result[0] if isinstance(result, tuple | list) and result else result]
        every = [*outputs.values(), attended]
        if any(len(kept) != 1 or not isinstance(kept[0], Tensor) for kept in every):
            return None
        rows = {layer: kept[0] for layer, kept in outputs.items()}
        if any(kept[0].shape[:-1].numel() != tokens for kept in every):
            return None
        if gradients:  # of the outputs as the model has made them
            return Seen(rows, attended[0].reshape(tokens, -1))
        return Seen(
            {layer: out.reshape(tokens, -1).double() for layer, out in rows.items()},
            attended[0].reshape(tokens, -1).double(),
        )

    def _tokens(self, number: int) -> list[Tensor] | None:
        """An argument for each that the call needs, if all of them are tokens by their names and of one width."""
        attention = self.attention
        needed = [
            argument
            for argument in inspect.signature(attention.module.forward).parameters.values()
            if argument.default is argument.empty
            and argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD)
        ]
        widths = {part.shape[1] for part in attention.projections}
        if not needed or len(widths) > 1:
            return None
        others = [argument.name for argument in needed[1:]]
        if any(OTHERS_BY_NAME.search(name) or not TOKENS_BY_NAME.match(name) for name in others):
            return None
        held = attention.query.held
        device, dtype = (torch.device("cpu"), torch.float32) if held is None else (held.device, held.dtype)
        dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
        random = torch.Generator().manual_seed(0)
        shape = (1, number, *widths) if attention.batch_first else (number, 1, *widths)
        shape = (1, number, 1, *widths) if self.grid else shape
        return [self.factor * torch.randn(shape, generator=random).to(device, dtype) for _ in needed]


def shake(parameter: nn.Parameter) -> None:
    """Other values in the place of a parameter's, near them and the same every time."""
    size, random = parameter.numel(), torch.Generator().manual_seed(2)
    factor, added = 0.5 * torch.randn(2, 997, generator=random)  # again and again, whatever the size
    again = -(-size // 997)
    factor, added = (part.repeat(again)[:size].view(parameter.shape).to(parameter.device) for part in (factor, added))
    parameter.data.copy_(parameter.data.float() * (1 + factor) + added)


def can_be_copied(attention: Attention) -> bool:
    """Whether a module and its parameters are what plain PyTorch makes, and its projections are called inside it."""
    module, inside = attention.module, set(attention.module.modules())
    parameters = list(module.parameters())
    plain = all(
        type(parameter) is nn.Parameter and parameter.is_floating_point() and not parameter.is_meta
        for parameter in parameters
    )
    called = all(part.called and part.module in inside for part in attention.projections)
    own = not any("forward" in vars(part) for part in inside)
    return bool(parameters) and plain and called and own and (attention.output is None or attention.output in inside)


def quietly(device: torch.device, gradients: bool) -> ExitStack:
    """Without autocast, without a compiler, and with the random numbers of everybody else left as they are."""
    stack = ExitStack()
    stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
    stack.enter_context(torch.autocast(device.type, enabled=False))
    stack.enter_context(torch.set_grad_enabled(gradients))
    if "torch._dynamo" in sys.modules:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
    return stack
