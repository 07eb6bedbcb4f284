"""Σ (l_i · r_j)² by head: the energy of attention scores, from Gram matrices that are never stored.

‖L Rᵀ‖² = ⟨LᵀL, RᵀR⟩ needs two width × width matrices for each head of each sample. Plain torch stores them, and float32
copies of both sides in the order of heads; here one program makes them where it needs them, forward and backward. On a
CPU it is plain torch that does so, and forgets them as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy, plain
from explicit_dropout.kernels.energy import serves
from explicit_dropout.kernels.inlining import inlined

WIDEST = 128
"""Features of a head whose Gram matrix still fits into the registers of a program."""


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_gram

    return triton_gram


def serves_scores(left: Tensor, right: Tensor, heads: int) -> bool:
    """Whether `scores` takes these two sides, (batch, token, feature) each, here and now."""
    if left.ndim != 3 or left.dtype != right.dtype:
        return False
    narrow = left.shape[-1] <= WIDEST * heads
    if torch.compiler.is_compiling():
        return narrow and energy.serves_compiled(left)
    return serves(left) and serves(right) and (narrow or not energy.by_triton(left))


def scores(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool
) -> Tensor:
    """Σ_ij (l_i · r_j)² for every sample and head, (batch, head); each side less its bias if one is given.

    Args:
        left, right: (batch, token, feature), heads side by side.
        causal: only pairs with j ≤ i.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.explicit_dropout.scores(left, right, left_bias, right_bias, heads, causal)
    else:
        found = _Scores.apply(left, right, left_bias, right_bias, heads, causal)  # type: ignore[no-untyped-call]
    return cast("Tensor", found)


def _by_triton(side: Tensor) -> bool:
    return side.is_cuda and energy.serves_compiled(side)


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None,
        heads: int, causal: bool,
    ) -> Tensor:  # fmt: skip
        # Copies of the biases: sharded ones come and go until the backward pass.
        kept = [None if bias is None else bias.detach().clone() for bias in (left_bias, right_bias)]
        ctx.save_for_backward(left, right, *kept)
        ctx.biases, ctx.heads, ctx.causal = (left_bias, right_bias), heads, causal
        if not energy.by_triton(left):
            return plain.scores(left, right, left_bias, right_bias, heads, causal)
        energies = _triton().score_energies(plain.even(left), plain.even(right), left_bias, right_bias, heads, causal)
        return cast("Tensor", energies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        left, right, *biases = ctx.saved_tensors
        if torch.is_grad_enabled():  # somebody goes on to differentiate this
            inputs = [left, right, *ctx.biases]
            energies = plain.scores(left, right, ctx.biases[0], ctx.biases[1], ctx.heads, ctx.causal)
            wanted = [x for x in inputs if x is not None and x.requires_grad]
            found = iter(torch.autograd.grad(energies, wanted, gradients[0], create_graph=True))
            return (*(None if x is None or not x.requires_grad else next(found) for x in inputs), None, None)
        made = _gradients if energy.by_triton(left) else plain.score_gradients
        results = made(left, right, biases[0], biases[1], ctx.heads, ctx.causal, gradients[0])
        return (*results, None, None)


def _gradients(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    results = plain.like(left), plain.like(right)
    slopes = _triton().score_gradients(
        plain.even(left), plain.even(right), left_bias, right_bias, heads, causal, weights, *results
    )
    biases = zip(slopes, (left_bias, right_bias), strict=True)
    first, second = (None if bias is None else slope.to(bias.dtype) for slope, bias in biases)
    return *results, first, second


@torch.library.custom_op("explicit_dropout::scores", mutates_args=())
def scores_operator(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool
) -> Tensor:
    """Σ_ij (l_i · r_j)² for every sample and head."""
    if not _by_triton(left):
        return plain.scores(left, right, left_bias, right_bias, heads, causal)
    found = _triton().score_energies(plain.even(left), plain.even(right), left_bias, right_bias, heads, causal)
    return cast("Tensor", found)


inlined(scores_operator, energy.serves_compiled)


@scores_operator.register_fake
def _(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool
) -> Tensor:
    del right, left_bias, right_bias, causal
    return left.new_empty((left.shape[0], heads), dtype=torch.promote_types(left.dtype, torch.float32))


@torch.library.custom_op("explicit_dropout::score_gradients", mutates_args=())
def score_gradients_operator(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of both sides and of both biases (empty where there is none)."""
    if _by_triton(left):
        found = _gradients(left, right, left_bias, right_bias, heads, causal, weights)
    else:
        found = plain.score_gradients(left, right, left_bias, right_bias, heads, causal, weights)
    first, second = (left.new_empty(0) if slope is None else slope for slope in found[2:])
    return found[0], found[1], first, second


inlined(score_gradients_operator, energy.serves_compiled)


@score_gradients_operator.register_fake
def _(
    left: Tensor, right: Tensor, left_bias: Tensor | None, right_bias: Tensor | None, heads: int, causal: bool,
    weights: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    del heads, causal, weights
    sides = plain.like(left), plain.like(right)
    biases = (left.new_empty(0) if bias is None else torch.empty_like(bias) for bias in (left_bias, right_bias))
    return (*sides, *biases)  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.heads, ctx.causal = inputs
    ctx.save_for_backward(*tensors)


def _scores_backward(ctx: Any, weights: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    results = torch.ops.explicit_dropout.score_gradients(*inputs, ctx.heads, ctx.causal, weights)
    return (*(None if x is None else result for x, result in zip(inputs, results, strict=True)), None, None)


scores_operator.register_autograd(_scores_backward, setup_context=_keep)
