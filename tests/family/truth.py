"""What a run of a model really did, caught by plain hooks and computed again with weights sliced by hand."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from family.table import Attention, Family, Part


def prepared(model: nn.Module) -> nn.Module:
    """In training mode, in float64, nothing stochastic, weights and biases large enough that all of them matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            random = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                parameter.copy_(0.3 * random + (1.0 if name.endswith("weight") else 0.0))
            else:
                parameter.copy_(1.5 * random / math.sqrt(parameter[0].numel()))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (isinstance(module, nn.Dropout) and name == "p")):
                setattr(module, name, 0.0)
    return model.double().train()


def build(family: Family) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = prepared(family.build())
    if isinstance(getattr(model, "rope", None), nn.Module):
        model.rope.float()  # type: ignore[union-attr]  # timm computes its angles in float32 whatever the model
    return model


@dataclass
class Call:
    arguments: dict[str, Any]
    output: Any


def record(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Call]:
    """The arguments and the output of every module in one forward pass, by plain hooks."""
    seen: dict[str, Call] = {}

    def hook(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        seen[path] = Call({**dict(zip(names, args, strict=False)), **kwargs, "": args[0] if args else None}, output)

    handles = [m.register_forward_hook(partial(hook, path), with_kwargs=True) for path, m in model.named_modules()]
    model(*args, **kwargs)
    for handle in handles:
        handle.remove()
    return seen


@dataclass
class Truth:
    """One attention call as the test itself reads it: inputs, weights, masks, and what came out."""

    spec: Attention
    module: nn.Module
    call: Call
    x: Tensor
    context: Tensor
    values: Tensor
    weights: list[Tensor]
    biases: list[Tensor | None]
    mask: Tensor | None
    context_mask: Tensor | None
    allowed: Tensor | None
    rotation: Callable[[Tensor], Tensor] | None
    score_bias: Tensor | None
    attended: Tensor
    weights_seen: Tensor | None = None

    @property
    def scale(self) -> float:
        width = self.weights[0].shape[0] // self.spec.heads
        return width**-0.5 if self.spec.scale is None else self.spec.scale

    def heads(self, tensor: Tensor, number: int) -> Tensor:
        return torch.unflatten(tensor, -1, (number, -1)).transpose(-2, -3)

    def projected(self, role: int, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weights[role], self.biases[role])

    def scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        """scale · Q Kᵀ, turned where the family turns, (*batch, heads, token, context)."""
        q, k = self.heads(queries, self.spec.heads), self.heads(keys, self.spec.key_heads or self.spec.heads)
        if self.rotation is not None:
            q, k = self.rotation(q), self.rotation(k)
        order = self.spec.kv_order
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3) if order is None else k[..., list(order), :, :]
        return self.scale * q @ k.mT

    def counted(self) -> Tensor:
        """The pairs of real tokens that may meet."""
        shape = (*self.x.shape[:-2], self.spec.heads, self.x.shape[-2], self.context.shape[-2])
        pairs = torch.ones(shape, dtype=torch.bool)
        for mask, axis in ((self.mask, -1), (self.context_mask, -2)):
            if mask is not None:
                pairs = pairs & mask[..., None, :].unsqueeze(axis)
        return pairs if self.allowed is None else pairs & self.allowed

    def attention(self) -> Tensor:
        """A = softmax(scores), as the family computes it; what the run had where scores are more than Q Kᵀ."""
        if self.weights_seen is not None:
            return self.weights_seen
        scores = self.scores(self.projected(0, self.x), self.projected(1, self.context))
        if self.score_bias is not None:
            scores = scores + self.score_bias
        if self.context_mask is not None:
            scores = scores.masked_fill(~self.context_mask[..., None, None, :], -1e9)
        if self.allowed is not None:
            scores = scores.masked_fill(~self.allowed, -1e9)
        return scores.softmax(-1)

    def computed_attended(self) -> Tensor:
        values = self.heads(self.projected(2, self.values), self.spec.key_heads or self.spec.heads)
        order = self.spec.kv_order
        repeated = values.repeat_interleave(self.spec.heads // values.shape[-3], -3)
        values = repeated if order is None else values[..., list(order), :, :]
        return (self.attention() @ values).transpose(-2, -3).flatten(-2)


def below(path: str, name: str) -> str:
    return f"{path}.{name}".strip(".") if name else path


def parameters(model: nn.Module, path: str, part: Part) -> tuple[Tensor, Tensor | None]:
    owner: Any = model.get_submodule(below(path, part.layer))
    weight = owner
    for name in part.weight.split("."):
        weight = getattr(weight, name)
    weight = weight.detach().T if part.transposed else weight.detach()
    bias = getattr(owner, part.bias, None)
    rows = part.rows
    if rows is not None:
        weight = weight[list(rows) if isinstance(rows, tuple) else rows]
    if bias is not None:
        chosen = rows if part.bias_rows == "rows" else part.bias_rows
        bias = bias.detach() if chosen is None else bias.detach()[list(chosen) if isinstance(chosen, tuple) else chosen]
    return weight, bias


def truth(model: nn.Module, family: Family, spec: Attention, seen: dict[str, Call]) -> Truth:
    call = seen[spec.path]
    turn = (lambda x: x) if spec.batch_first else (lambda x: x if x.ndim < 3 else x.transpose(0, 1))
    inputs = [
        turn(call.arguments[part.argument] if part.argument else seen[below(spec.path, part.layer)].arguments[""])
        for part in spec.parts
    ]
    x, context, values = (tensor.detach() for tensor in inputs)
    weights, biases = zip(*(parameters(model, spec.path, part) for part in spec.parts), strict=True)
    length, width = x.shape[-2], context.shape[-2]
    allowed = None
    if spec.causal:
        allowed = torch.ones(length, width, dtype=torch.bool).tril()
    if spec.pairs is not None and (found := spec.pairs(call.arguments, length, width)) is not None:
        allowed = found if allowed is None else allowed & found
    module = model.get_submodule(spec.path)
    result = Truth(
        spec, module, call, x, context, values, list(weights), list(biases),
        family.padding.get(spec.real or ""), family.padding.get(spec.context or ""), allowed,
        None if spec.rotation is None else spec.rotation(module, call.arguments),
        None if spec.bias is None else spec.bias(module, call.arguments, length, width).detach(),
        torch.empty(0),
    )  # fmt: skip
    if spec.weights is not None:
        caught = call.output[1] if spec.weights == "()" else seen[below(spec.path, spec.weights)].arguments[""]
        result.weights_seen = caught.detach()
    if spec.output == "out_proj()":
        result.attended = result.computed_attended()  # checked below, through the projection that the module applies
        through = nn.functional.linear(result.attended, module.out_proj.weight, module.out_proj.bias)  # type: ignore[arg-type, union-attr]
        output = turn(call.output[0])
        real = torch.ones(output.shape[:-1], dtype=torch.bool) if result.mask is None else result.mask
        torch.testing.assert_close(through[real], output[real], rtol=1e-5, atol=1e-6)
    elif spec.output is None:
        result.attended = (call.output[0] if isinstance(call.output, tuple) else call.output).detach()
    else:
        result.attended = seen[below(spec.path, spec.output)].arguments[""].detach()
    return result
