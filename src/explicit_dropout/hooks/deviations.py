"""½ E‖deviation‖² of every twin, summed over real tokens: by kernels where they serve, elsewhere by the closed forms.

`mask` has the real tokens, (*batch, token). The gradient of a kernel is one pass, and nothing is kept for it that the
model does not keep: no squares, no float32 copies, no attention weights.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from explicit_dropout import functional, kernels
from explicit_dropout.functional.batch import without_autocast
from explicit_dropout.hooks.calls import in_transform
from explicit_dropout.hooks.draws import AttentionParts
from explicit_dropout.kernels.plain import wide
from explicit_dropout.noise import Noise
from explicit_dropout.sites import visible

SMALL = 2**20
"""So many attention weights may be kept for the backward pass, where no kernel serves; more are computed again."""


def hidden(x: Tensor, noise: Noise, mask: Tensor | None) -> Tensor:
    """½ (μ² + v) Σ x²."""
    if not _served(mask, x):
        return functional.hidden(x, noise, mask=mask, reduction="none").sum()
    _, energies = kernels.passing(x, mask=mask)
    return 0.5 * (noise.mean**2 + noise.variance) * energies.sum()


def linear(x: Tensor, weight: Tensor, noise: Noise, mask: Tensor | None) -> Tensor:
    """½ v Σ_j ‖x_:j‖² ‖W_:j‖², and the coherent part where the noise has a mean."""
    if noise.mean or not _served(mask, x, weight):
        return functional.linear(x, weight, noise, mask=mask, reduction="none").sum()
    _, columns, norms = kernels.passing_to(weight, x, mask)
    return 0.5 * noise.variance * (columns.sum(0) * norms.sum(0)).sum()


def attention_weights(weights: Tensor, values: Tensor, noise: Noise, mask: Tensor | None) -> Tensor:
    """½ v Σ_ij A_ij² ‖v_j‖² of attention weights that the model has, (*batch, head, token, context)."""
    heads = weights.shape[:-2]
    if noise.mean or values.shape[:-2] != heads or not _served(mask, weights, values):
        return functional.attention_weights(weights, values, noise, mask=mask, reduction="none").sum()
    rows = None if mask is None else mask.unsqueeze(-2).expand(weights.shape[:-1])
    _, energies = kernels.passing(weights, mask=rows, by_column=True, samples=heads.numel())
    columns = torch.unflatten(energies, 0, (heads.numel(), -1)).sum(1)
    return 0.5 * noise.variance * (columns * wide(values).square().sum(-1).flatten(0, -2)).sum()


def fused_attention(parts: AttentionParts, noise: Noise, mask: Tensor | None) -> Tensor:
    """The same of attention weights that only a fused kernel has had."""
    queries, keys, values, pairs, causal, scale = parts
    straight = pairs is None and mask is None and (not causal or queries.shape[-2] == keys.shape[-2])
    if straight and not noise.mean and queries.numel():
        heads, scale = queries.shape[-3], queries.shape[-1] ** -0.5 if scale is None else scale
        sides = [t.flatten(0, -4) if t.ndim > 3 else t[None] for t in (values, queries, keys)]
        values, queries, keys = (t.transpose(1, 2).flatten(2) for t in sides)
        if kernels.serves_attended(values, queries, keys, heads):
            with without_autocast(queries):
                energies = kernels.weights_spread(values, queries, keys, heads, float(scale), causal)
            return 0.5 * noise.variance * energies.sum()
    small = queries.shape[:-1].numel() * keys.shape[-2] <= SMALL
    if small or torch.compiler.is_compiling() or in_transform():
        return _weight_energy(*parts, mask, noise)
    made: Tensor = checkpoint(_weight_energy, *parts, mask, noise, use_reentrant=False, preserve_rng_state=False)
    return made


def _served(mask: Tensor | None, *tensors: Tensor) -> bool:
    fits = mask is None or mask.device == tensors[0].device  # or an error, which the closed forms raise
    return fits and all(kernels.serves(tensor) and tensor.numel() for tensor in tensors)


def _weight_energy(
    queries: Tensor, keys: Tensor, values: Tensor, pairs: Tensor | None, causal: bool, scale: float | None,
    mask: Tensor | None, noise: Noise,
) -> Tensor:  # fmt: skip
    """½ v Σ_ij A_ij² ‖v_j‖² for A = softmax(scale · q kᵀ + pairs), over all samples and heads.

    pairs: boolean, True where something may be seen, or what is added to the scores. mask: the queries that count.
    """
    with without_autocast(queries):
        scores = (queries.shape[-1] ** -0.5 if scale is None else scale) * (wide(queries) @ wide(keys).mT)
        allowed = None
        if pairs is not None:
            allowed = visible(pairs)
            if pairs.dtype != torch.bool:
                scores = scores + pairs.masked_fill(~allowed, 0)
        if causal:
            triangle = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            allowed = triangle if allowed is None else allowed & triangle
        if allowed is not None:
            scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if allowed is not None:
            weights = weights.masked_fill(~allowed, 0)  # of a query that sees nothing, too
        return attention_weights(weights, values, noise, mask)
