"""The paper's traces in a training step, as they are written: second moments and Λ as matrices, sample by sample.

All samples of a batch at once, in the precision of the model's own products (bfloat16 under autocast), so that the cost
is that of the formulas and not of a loop. Equal to `ExplicitDropout` in value and gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import explicit_dropout as xd
from explicit_dropout.finding import find_sites
from explicit_dropout.sites import Attention, Site


class LiteralTraces:
    """λ Σ ½ Tr(B WᵀW) of linear sites and λ Σ ½ Tr(B Λ_q) of queries, per token; called after each forward pass."""

    def __init__(self, model: nn.Module, noise: xd.Noise, components: Sequence[str], strength: float) -> None:
        self.noise, self.strength = noise, strength
        self.terms: list[Tensor] = []
        for site in find_sites(model):
            if site.component in components and site.projection is not None:
                site.projection.module.register_forward_hook(Hook(self, site))

    def __call__(self) -> Tensor:
        terms, self.terms = self.terms, []
        return self.strength * torch.stack(terms).sum()


class Hook:
    """After the projection of a site: its term, from the input of the projection."""

    def __init__(self, traces: LiteralTraces, site: Site) -> None:
        if site.component not in ("value", "feed_forward", "query"):
            raise NotImplementedError(f"no literal trace of {site.component} here")
        self.traces, self.site = traces, site
        self.attention = site.source.described
        if site.component == "query" and isinstance(self.attention, Attention) and self.attention.causal:
            raise NotImplementedError("the traces of scores have no causal order: they would need a loop over tokens")

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        del output
        if module.training:
            x = args[0]
            term = self.query(x) if self.site.component == "query" else self.linear(x)
            self.traces.terms.append(term / x.shape[:-1].numel())

    def linear(self, x: Tensor) -> Tensor:
        """½ Tr(B WᵀW)."""
        weight, _ = self.site.projection.parameters()  # type: ignore[union-attr]
        return 0.5 * trace(second_moment(x, self.traces.noise) @ (weight.mT @ weight))

    def query(self, x: Tensor) -> Tensor:
        """½ Tr(B Λ_q), Λ_q = W_qᵀ KᵀK W_q, for each head."""
        attention: Any = self.attention
        (query_weight, _), (key_weight, key_bias) = attention.query.parameters(), attention.key.parameters()
        keys = nn.functional.linear(x, key_weight, key_bias).unflatten(-1, (attention.heads, -1)).transpose(-2, -3)
        weights = query_weight.unflatten(0, (attention.heads, -1))
        matrices = weights.mT @ (keys.mT @ keys) @ weights
        return 0.5 * attention.score_scale**2 * trace(second_moment(x, self.traces.noise).unsqueeze(-3) @ matrices)


def second_moment(x: Tensor, noise: xd.Noise) -> Tensor:
    """B = μ² XᵀX + v (XᵀX) ⊙ I, for each sample."""
    gram = x.mT @ x
    coherent = noise.mean**2 * gram
    return coherent + noise.variance * torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1)) if noise.variance else coherent


def trace(matrices: Tensor) -> Tensor:
    """The sum of all traces, float32 at least."""
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    return diagonal.sum(dtype=torch.promote_types(diagonal.dtype, torch.float32))
