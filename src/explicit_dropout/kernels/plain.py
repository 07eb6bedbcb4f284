"""The energies in plain torch, for where the kernels do not serve. Any device, precision and transform."""

from __future__ import annotations

import torch
from torch import Tensor

WIDE = (torch.float32, torch.float64)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return tensor if tensor.dtype in WIDE else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def even(side: Tensor) -> Tensor:
    """The tensor with its features next to each other, as kernels read them."""
    return side if side.stride(-1) == 1 else side.contiguous()


def like(x: Tensor) -> Tensor:
    """A new tensor of the same shape and precision, without gaps."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def tokens_by_head(side: Tensor, heads: int) -> Tensor:
    """(batch, token, feature) as (batch, head, token, width)."""
    return torch.unflatten(wide(side), -1, (heads, -1)).transpose(1, 2)


def weight_by_head(weight: Tensor, heads: int) -> Tensor:
    """(feature, in) as (head, width, in)."""
    return torch.unflatten(wide(weight), 0, (heads, -1))


def deviation(x: Tensor, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """x − b, float32 at least, with the rows that do not count replaced by zeros, NaN included."""
    shifted = wide(x) if bias is None else wide(x) - wide(bias)
    return shifted if mask is None else shifted.masked_fill(~mask[..., None], 0)


def columns(x: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Σ_i (x_ij − b_j)² for every column j, over the rows that count."""
    return deviation(x, bias, mask).reshape(-1, x.shape[-1]).square().sum(0)


def squares(x: Tensor) -> Tensor:
    """Σ_i x_sij² for every sample and column of x (sample, token, column)."""
    return wide(x).square().sum(1)


def energies(x: Tensor, bias: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Numbers that add up to Σ_ij (x_ij − b_j)²: the whole sum, or in compiled code that of every row.

    A compiler makes sums of rows a part of whatever else reads the rows. The rows of all layers are added up at once
    when the penalty is read.
    """
    rows = deviation(x, bias, mask).square().sum(-1)
    return rows if torch.compiler.is_compiling() else rows.sum()


def scores(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool
) -> Tensor:
    """Σ_ij (l_i · r_j)² for every sample and head, (batch, head), of two sides (batch, token, feature)."""
    first, second = _by_head(left, left_bias, heads), _by_head(right, right_bias, heads)
    if causal:
        return (first @ second.mT).tril().square().sum((-2, -1))
    return ((first.mT @ first) * (second.mT @ second)).sum((-2, -1))


def score_gradients(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradients of `scores` weighted by (batch, head): of both sides and of both biases."""
    first, second = _by_head(left, left_bias, heads), _by_head(right, right_bias, heads)
    if causal:
        own = (first @ second.mT).tril()
        slopes = own @ second, own.mT @ first
    else:
        slopes = first @ (second.mT @ second), second @ (first.mT @ first)
    sides = [(2 * weights[..., None, None] * slope).transpose(1, 2).flatten(2) for slope in slopes]
    biases = [
        None if bias is None else -side.sum((0, 1)).to(bias.dtype)
        for side, bias in zip(sides, (left_bias, right_bias), strict=True)
    ]
    return sides[0].to(left.dtype), sides[1].to(right.dtype), biases[0], biases[1]


def _by_head(side: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """The tokens of every head, less its bias."""
    return tokens_by_head(deviation(side, bias, None), heads)
