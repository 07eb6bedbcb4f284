"""Real masks on the real input of a projection, inside the attention modules of every family.

The family's own module runs again, on as many copies of its recorded arguments as there are draws, with everything
fixed but the input of one projection. What its projections, its kernel and its output projection then see is caught by
plain hooks, and the deviation between that and a clean run is measured.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import explicit_dropout as xd
from family.attached import FAMILIES, run, supported, truths
from family.truth import Truth

DRAWS = 600
BATCHED = [name for name in FAMILIES if "unbatched" not in name and name != "timm Swin V2"]
"""Families whose attention can be run for many draws at once. Swin V2 calls neither its projection nor a kernel."""
ROLES = ("query", "key", "value")


@pytest.mark.parametrize("name", BATCHED)
def test_masks_on_the_input_of_a_projection_cost_on_average_the_closed_form(name: str) -> None:
    """Queries and keys at the scores, where a law with variance is exact there, and values at their projection."""
    family, last = FAMILIES[name], list(truths(name))[-1]
    checked = [c for c in ROLES if supported(family, c, "inverted")]
    assert "value" in checked
    for component in checked:
        noise = xd.bernoulli(0.3) if component == "key" else xd.inverted(0.3)
        clean, masked = runs(last, component, noise)
        if component == "value":
            before, after = (seen.get("value", seen.get("v")) for seen in (clean, masked))
            mask = None if family.value_counts_padding else last.context_mask
            counted, tokens = rows(mask, last.context, before.ndim), last.context.shape[:-1].numel()
        else:
            before, after = (scores(last, seen) for seen in (clean, masked))
            mask, counted, tokens = last.mask, last.counted(), last.x.shape[:-1].numel()
        expect(name, last, component, noise, after - before, counted, tokens if mask is None else int(mask.sum()))


# EVA02 fused is left out: it has one argument and calls no layer, so masks would reach queries and keys too.
@pytest.mark.parametrize(
    "name",
    [n for n in BATCHED if supported(FAMILIES[n], "attended_value", "bernoulli") and n != "timm EVA02, fused qkv"],
)
def test_masks_on_the_values_cost_on_average_the_closed_form_at_the_attention_output(name: str) -> None:
    """All of attention runs again, its own kernel included: the test recomputes nothing."""
    last, noise = list(truths(name))[-1], xd.bernoulli(0.3)
    clean, masked = runs(last, "value", noise)
    before, after = (seen.get("attended", seen.get("kernel")) for seen in (clean, masked))
    tokens = last.x.shape[:-1].numel() if last.mask is None else int(last.mask.sum())
    expect(name, last, "attended_value", noise, after - before, rows(last.mask, last.x, before.ndim), tokens)


def expect(
    name: str, truth: Truth, component: str, noise: xd.Noise, deviation: Tensor, counted: Tensor, tokens: int
) -> None:
    """The term of a site is the mean of ½ ‖deviation‖² over the draws, by tokens, within four standard errors."""
    energy = deviation.square().unflatten(0, (DRAWS, -1)) * counted
    draws = 0.5 * energy.flatten(1).sum(1) / tokens
    mean, error = draws.mean().item(), (draws.std() / DRAWS**0.5).item()
    reg, _ = run(name, noise, component)
    term = reg.terms()[f"{truth.spec.path}:{component}"].item()
    assert 0 < error < 0.1 * mean, "too few draws to tell"
    assert abs(term - mean) < 4 * error, f"{component}: {term:.6g} is not {mean:.6g} ± {error:.2g}"


def rows(mask: Tensor | None, x: Tensor, axes: int) -> Tensor:
    """The real tokens, to be multiplied with (batch, token, width) or, from a kernel, (batch, head, token, width)."""
    if mask is None:
        return torch.ones(())
    return mask.reshape(mask.shape[0], *(1,) * (axes - 3), x.shape[-2], 1)


def scores(truth: Truth, seen: dict[str, Tensor]) -> Tensor:
    """Of what the projections really gave: their layers' outputs or, where none are called, what reached the kernel."""
    return truth.scores(seen["query"], seen["key"]) if "query" in seen else truth.scale * seen["q"] @ seen["k"].mT


# ---------------------------------------------------------------------------------------------- running modules again


def runs(truth: Truth, component: str, noise: xd.Noise) -> list[dict[str, Tensor]]:
    """A clean run and one with the input of a projection masked."""
    role, spec = ROLES.index(component), truth.spec
    x = (truth.x, truth.context, truth.values)[role]
    shape = (DRAWS * x.shape[0], *x.shape[1:])
    masks = noise.draw(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    given = {k: tiled(v, x.shape[0], x.shape[0] * spec.heads) for k, v in truth.call.arguments.items() if k}
    names = [part.argument for part in spec.parts]
    if names[0] is not None:  # token first, the batch is not the first axis: arguments are made of the inputs
        inputs = (tiled(t, t.shape[0]) for t in (truth.x, truth.context, truth.values))
        given |= {name: token_first(t, spec.batch_first) for name, t in zip(names, inputs, strict=True)}
    moved = dict(given)
    if names[role] is not None:
        moved[names[role]] = moved[names[role]] * token_first(masks, spec.batch_first)
    return [Spy(truth).run(given), Spy(truth, role, masks).run(moved)]


class Spy:
    """Catches what happens inside one call of an attention module, and masks the input of one of its layers."""

    def __init__(self, truth: Truth, role: int | None = None, masks: Tensor | None = None) -> None:
        self.truth, self.role, self.masks = truth, role, masks
        self.caught: dict[str, Tensor] = {}
        self.kernel = nn.functional.scaled_dot_product_attention

    def run(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        module, spec, handles = self.truth.module, self.truth.spec, []
        for role, part in enumerate(spec.parts):
            if part.argument is None:
                handles.append(module.get_submodule(part.layer).register_forward_hook(self.projection(role)))
        if spec.output not in (None, "out_proj()"):
            handles.append(module.get_submodule(spec.output).register_forward_pre_hook(self.output))
        nn.functional.scaled_dot_product_attention = self.attend
        try:
            with torch.no_grad():
                result = module(**arguments)
        finally:
            nn.functional.scaled_dot_product_attention = self.kernel
            for handle in handles:
                handle.remove()
        if spec.output is None:
            self.caught["attended"] = result[0]
        return self.caught

    def projection(self, role: int) -> Any:
        part = self.truth.spec.parts[role]
        chosen = slice(None) if part.rows is None else list(part.rows) if isinstance(part.rows, tuple) else part.rows

        def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            if role == self.role:  # of a fused layer, only the rows of this projection see the masked input
                output = output.clone()
                output[..., chosen] = layer.forward(args[0] * self.masks)[..., chosen]
            self.caught[ROLES[role]] = output[..., chosen]
            return output

        return hook

    def output(self, layer: nn.Module, args: tuple[Tensor]) -> None:
        del layer
        self.caught["attended"] = args[0]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = self.kernel(q, k, v, *args, **kwargs)
        self.caught |= {"q": q, "k": k, "v": v, "kernel": out}
        return out


def tiled(value: Any, *sizes: int) -> Any:
    """An argument for as many copies of the batch (or of all heads of the batch) as there are draws."""
    if isinstance(value, tuple) and value and all(isinstance(item, Tensor) for item in value):
        return tuple(tiled(item, *sizes) for item in value)
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] in sizes:
        return value.detach().repeat(DRAWS, *(1,) * (value.ndim - 1))
    return value.detach() if isinstance(value, Tensor) else value


def token_first(x: Tensor, batch_first: bool) -> Tensor:
    return x if batch_first else x.transpose(0, 1)
