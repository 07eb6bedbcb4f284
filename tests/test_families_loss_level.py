"""What a factor on the input of a projection does to a loss, inside the models of every family.

Factors of 1 are put into the model by plain hooks, where the family's table says its projections are. How the outputs
move with them, and how the loss curves, is written out one sample and one output at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close

import explicit_dropout as xd
from family.attached import FAMILIES, model_of
from family.table import Attention, Family, Part
from family.truth import below

ROLES = ("query", "key", "value")
CLASSES = 3
# Outputs of CLIP are of pairs of samples.
REFUSED = {"CLIP": "samples that are apart", "x-transformers Encoder, flash attention": "differentiated twice"}
NOISE = xd.inverted(0.3)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in REFUSED])
def test_terms_and_gradients_are_those_of_factors_on_the_inputs(name: str) -> None:
    family, model = FAMILIES[name], model_of(name)
    for component in (*ROLES, "feed_forward"):
        if component == "feed_forward" and not family.feed_forward:
            continue
        model.zero_grad()
        with xd.LossLevelDropout(model, NOISE, **{component: 1.0}) as reg:
            penalty = reg(logits(family, model))
        penalty.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        energies = Factors(family, model, component).energies()
        sum(energies.values()).backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert reg.terms().keys() == energies.keys()
        for site, term in reg.terms().items():
            assert term > 0
            known = energies[site].detach().float()
            assert_close(term, known, rtol=1e-4, atol=1e-9, msg=lambda m, site=site: f"{site}: {m}")
        largest = max(gradient.abs().max() for gradient in expected.values())
        for parameter, gradient in expected.items():
            other = found.get(parameter, torch.zeros_like(gradient))
            assert_close(other, gradient, rtol=1e-4, atol=1e-6 * largest, msg=lambda m, p=parameter: f"{p}: {m}")


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused(name: str) -> None:
    model = model_of(name)
    with (
        xd.LossLevelDropout(model, NOISE, value=1.0) as reg,
        pytest.raises(xd.ExplicitDropoutError, match=REFUSED[name]),
    ):
        reg(logits(FAMILIES[name], model))


def logits(family: Family, model: nn.Module) -> Tensor:
    """All that the model returns for a sample, mixed into a few outputs."""
    args, kwargs = family.call()
    found = model(*args, **kwargs)
    if not isinstance(found, Tensor):
        found = next(value for value in tensors(found) if value.is_floating_point())
    if found.ndim == 2 and family.name.endswith("unbatched"):
        found = found[None]
    elif found.ndim == 3 and not family.attention[0].batch_first:
        found = found.transpose(0, 1)
    rows = found.flatten(1)
    mix = torch.randn(rows.shape[1], CLASSES, generator=torch.Generator().manual_seed(5), dtype=rows.dtype)
    return rows @ mix / rows.shape[1] ** 0.5


def tensors(output: Any) -> list[Tensor]:
    values = output.values() if hasattr(output, "values") else output
    return [value for value in values if isinstance(value, Tensor)]


class Factors:
    """Runs a model whose projections of one kind have factors on their inputs."""

    def __init__(self, family: Family, model: nn.Module, component: str) -> None:
        self.family, self.model, self.component = family, model, component
        self.factors: dict[str, list[Tensor]] = {}

    def energies(self) -> dict[str, Tensor]:
        """½ v Σ_i ∂²KL/∂factor_i², as a mean over samples, by site."""
        handles = [handle for place in self.places() for handle in place]
        try:
            with sdpa_kernel(SDPBackend.MATH):
                outputs = logits(self.family, self.model)
        finally:
            for handle in handles:
                handle.remove()
        inputs = [(site, factor) for site, factors in self.factors.items() for factor in factors]
        found = {site: torch.zeros((), dtype=torch.float64) for site in self.factors}
        for row in outputs:
            probabilities = row.softmax(-1)
            hessian = torch.diag(probabilities) - torch.outer(probabilities, probabilities)
            jacobian = [torch.autograd.grad(out, [f for _, f in inputs], create_graph=True) for out in row]
            for number, (site, _) in enumerate(inputs):
                rows = torch.stack([gradients[number].flatten() for gradients in jacobian])
                curved = torch.einsum("ci,cd,di->", rows, hessian, rows)
                found[site] = found[site] + NOISE.variance / 2 * curved / len(outputs)
        return found

    def places(self) -> Any:
        if self.component == "feed_forward":
            for linear in self.family.feed_forward:
                yield [self.before(f"{linear.path}:feed_forward", self.model.get_submodule(linear.path), None)]
            return
        for spec in self.family.attention:
            yield [self.place(spec, spec.parts[ROLES.index(self.component)])]

    def place(self, spec: Attention, part: Part) -> Any:
        site, module = f"{spec.path}:{self.component}", self.model.get_submodule(spec.path)
        if part.argument is not None:
            return self.before(site, module, part.argument)
        layer = self.model.get_submodule(below(spec.path, part.layer))
        if part.rows is None:
            return self.before(site, layer, None)
        rows = list(part.rows) if isinstance(part.rows, tuple) else part.rows

        def hook(layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
            output = output.clone()
            output[..., rows] = layer.forward(self.multiplied(site, args[0]))[..., rows]
            return output

        return layer.register_forward_hook(hook)

    def before(self, site: str, module: nn.Module, argument: str | None) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if argument in kwargs:
                return args, kwargs | {argument: self.multiplied(site, kwargs[argument])}
            place = ("query", "key", "value").index(argument) if argument in ROLES else 0
            return (*args[:place], self.multiplied(site, args[place]), *args[place + 1 :]), kwargs

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def multiplied(self, site: str, x: Tensor) -> Tensor:
        factor = torch.ones_like(x, requires_grad=True)
        self.factors.setdefault(site, []).append(factor)
        return x * factor
