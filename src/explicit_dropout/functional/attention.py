"""Dropout measured at the attention output: attended values, attention weights, whole heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from explicit_dropout import checks
from explicit_dropout.errors import InputError
from explicit_dropout.functional.batch import (
    Batch,
    Reduction,
    coherent_part_needed,
    flat_mask,
    outside_autocast,
    per_sample,
    rows_zeroed,
)
from explicit_dropout.functional.layers import check_linear
from explicit_dropout.noise import Noise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@outside_autocast
def attended_value(
    x: Float[Tensor, "*batch context in"],
    value_weight: Float[Tensor, "out in"],
    attention: Float[Tensor, "*batch heads token context"] | None,
    noise: Noise,
    *,
    value_bias: Float[Tensor, " out"] | None = None,
    attended: Float[Tensor, "*batch token attended_out"] | None = None,
    heads: int = 1,
    key_heads: int | None = None,
    mask: Bool[Tensor, "*batch token"] | None = None,
    context_mask: Bool[Tensor, "*batch context"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """J_av, paper Eq. 17: dropout on the tokens before the value projection, measured at the attention output A V.

    ½ E‖A X̃ W_vᵀ‖² = ½ (μ² ‖A V̂‖² + v Σ_a (Σ_i A_ia²) Σ_j X_aj² ‖W_:j‖²), V̂ = X W_vᵀ, summed over heads.

    Args:
        x: what the values are made of.
        attention: the attention weights A. May be None when v = 0 and `attended` is given.
        attended: the attention's own output before the output projection, heads side by side, if the forward pass has
            it. It contains `value_bias` once for every token, since rows of A sum to one.
        heads, key_heads: numbers of attention heads and of value heads.
        mask, context_mask: real rows of A and real tokens of x; in self-attention, the same tensor for both.
    """
    optional = {"attention": attention, "attended": attended, "value_bias": value_bias}
    checks.floating({"x": x, "value_weight": value_weight}, optional)
    checks.tokens("x", x)
    lead, context = x.shape[:-2], x.shape[-2]
    groups, shared, width = _value_heads(x, value_weight, value_bias, heads, key_heads)
    checks.shaped("attention", attention, (*lead, heads, None, context), "(*batch, heads, token, context)")
    checks.shaped("attended", attended, (*lead, None, heads * width), "(*batch, token, heads · head width)")
    checks.boolean("context_mask", context_mask, (*lead, context), "(*batch, context)", x.device)
    if context_mask is not None and mask is None:
        raise InputError("mask", "given beside `context_mask` (in self-attention: the same tensor)", None)
    measured = attended if attended is not None else attention
    if measured is None:
        raise InputError("attention", "given, or `attended` in its place", None)
    rows = measured.shape[-2]
    if attention is not None and attention.shape[-2] != rows:
        raise InputError("attended", f"of {attention.shape[-2]} tokens, the rows of attention", f"{rows} tokens")

    batch = Batch.of(
        x, noise, reduction, strength, mask,
        required={"value_weight": value_weight}, tokens=(*lead, rows), **optional,
    )  # fmt: skip
    if attention is None and noise.variance:
        raise InputError("attention", f"given under {noise}: the squares of its columns enter", None)
    columns_real = flat_mask(context_mask, batch.size)
    tokens = rows_zeroed(batch.flat(x), columns_real)
    weights = None if attention is None else _grouped(attention, batch, groups, columns_real)
    energy = batch.zero()
    if coherent_part_needed(noise):
        if attended is not None:
            bias = None if value_bias is None else value_bias.reshape(groups, width).repeat_interleave(shared, 0)
            clean = batch.tokens(attended, less=None if bias is None else bias.flatten())
        else:
            values = torch.unflatten(tokens @ batch.cast(value_weight).mT, -1, (groups, width)).transpose(1, 2)
            clean = _given(weights) @ values
        energy = energy + noise.mean**2 * per_sample(clean.square())
    if noise.variance:
        columns = _given(weights).square().sum(2)
        norms = torch.unflatten(batch.cast(value_weight), 0, (groups, width)).square().sum(1)
        token_energy = tokens.square() @ norms.mT
        energy = energy + noise.variance * per_sample(columns.mT * token_energy)
    return batch.reduce(energy)


@outside_autocast
def attention_weights(
    attention: Float[Tensor, "*batch heads token context"],
    values: Float[Tensor, "*batch key_heads context width"],
    noise: Noise,
    *,
    mask: Bool[Tensor, "*batch token"] | None = None,
    context_mask: Bool[Tensor, "*batch context"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """½ E‖Ã V‖² = ½ (μ² ‖A V‖² + v Σ_ij A_ij² ‖v_j‖²): dropout on the attention weights, `attn_drop` of most models.

    Args:
        values: the values of each head, biases included.
        mask, context_mask: real rows of A and real keys.
    """
    checks.floating({"attention": attention, "values": values}, {})
    if attention.ndim < 3:
        raise InputError("attention", "of shape (*batch, heads, token, context)", f"shape {tuple(attention.shape)}")
    lead, (heads, rows, context) = attention.shape[:-3], attention.shape[-3:]
    checks.shaped("values", values, (*lead, None, context, None), "(*batch, key heads, context, width)")
    groups = values.shape[-3]
    if not groups or heads % groups:
        raise InputError("values", f"of a number of heads that divides the {heads} of attention", f"{groups} heads")
    batch = Batch.of(attention, noise, reduction, strength, mask, required={"values": values}, tokens=(*lead, rows))
    checks.boolean("context_mask", context_mask, (*lead, context), "(*batch, context)", attention.device)
    columns_real = flat_mask(context_mask, batch.size)
    weights = _grouped(attention, batch, groups, columns_real)
    by_group = rows_zeroed(batch.flat(values, 3), None if columns_real is None else columns_real[:, None])
    energy = batch.zero()
    if coherent_part_needed(noise):
        energy = energy + noise.mean**2 * per_sample((weights @ by_group).square())
    if noise.variance:
        columns, norms = weights.square().sum(2), by_group.square().sum(3)
        energy = energy + noise.variance * per_sample(columns * norms)
    return batch.reduce(energy)


@outside_autocast
def drop_head(
    x: Float[Tensor, "*batch token in"],
    weight: Float[Tensor, "out in"],
    noise: Noise,
    *,
    heads: int,
    bias: Float[Tensor, " out"] | None = None,
    output: Float[Tensor, "*batch token out"] | None = None,
    mask: Bool[Tensor, "*batch token"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """½ (μ² ‖Σ_h o_h W_hᵀ‖² + v Σ_h ‖o_h W_hᵀ‖²): DropHead, one draw for each head and sample.

    Args:
        x: the attention output, heads side by side.
        weight: the output projection, W_h its columns of head h.
        bias, output: of the output projection, as in `linear`.
    """
    batch = Batch.of(x, noise, reduction, strength, mask, required={"weight": weight}, bias=bias, output=output)
    check_linear(x, weight, bias, output)
    checks.count("heads", heads)
    if x.shape[-1] % heads:
        raise InputError("heads", f"a divisor of the width {x.shape[-1]} of x", heads)
    x, weight = batch.tokens(x), batch.cast(weight)
    energy = batch.zero()
    if coherent_part_needed(noise):
        clean = x @ weight.mT if output is None else batch.tokens(output, less=bias)
        energy = energy + noise.mean**2 * per_sample(clean.square())
    if noise.variance:
        per_head = torch.unflatten(x, -1, (heads, -1)).transpose(1, 2)
        head_weights = torch.unflatten(weight, -1, (heads, -1)).transpose(0, 1)
        grams = (per_head.mT @ per_head) * (head_weights.mT @ head_weights)
        energy = energy + noise.variance * per_sample(grams)
    return batch.reduce(energy)


def _value_heads(
    x: Tensor, weight: Tensor, bias: Tensor | None, heads: int, key_heads: int | None
) -> tuple[int, int, int]:
    """(value heads, attention heads for each of them, width of a head)."""
    checks.shaped("value_weight", weight, (None, x.shape[-1]), "(out, in) for the in of x")
    out = weight.shape[0]
    checks.shaped("value_bias", bias, (out,), "the out of value_weight")
    groups = checks.count("heads", heads) if key_heads is None else checks.count("key_heads", key_heads)
    if heads % groups:
        raise InputError("key_heads", f"a divisor of the {heads} heads", groups)
    if out % groups:
        name = "heads" if key_heads is None else "key_heads"
        raise InputError(name, f"a divisor of the {out} outputs of value_weight", groups)
    return groups, heads // groups, out // groups


def _grouped(attention: Tensor, batch: Batch, groups: int, columns_real: Tensor | None) -> Tensor:
    """The attention weights as (batch, value head, its rows in all of its query heads, context), padding zeroed."""
    weights = rows_zeroed(batch.flat(attention, 3), None if batch.mask is None else batch.mask[:, None])
    if columns_real is not None:
        weights = weights.masked_fill(~columns_real[:, None, None], 0)
    heads, rows, context = weights.shape[1:]
    return weights.reshape(batch.size, groups, heads // groups * rows, context)


def _given(weights: Tensor | None) -> Tensor:
    if weights is None:
        raise InputError("attention", "given", None)
    return weights
