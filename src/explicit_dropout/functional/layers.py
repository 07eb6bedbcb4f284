"""Dropout on the input of a linear layer: the value projection and the feed-forward network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor

from explicit_dropout import checks
from explicit_dropout.errors import InputError
from explicit_dropout.functional.batch import (
    Batch,
    Reduction,
    coherent_part_needed,
    outside_autocast,
    per_sample,
)
from explicit_dropout.noise import Noise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@outside_autocast
def linear(
    x: Float[Tensor, "*batch token in"],
    weight: Float[Tensor, "out in"],
    noise: Noise,
    *,
    bias: Float[Tensor, " out"] | None = None,
    output: Float[Tensor, "*batch token out"] | None = None,
    mask: Bool[Tensor, "*batch token"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """½ E‖x̃ Wᵀ‖² = ½ (μ² ‖x Wᵀ‖² + v Σ_j ‖x_:j‖² ‖W_:j‖²): dropout on the input of any linear layer.

    Under `inverted(p)` this is the regulariser of Arora et al. (Eq. 103) up to its factor ½.

    Args:
        output: the layer's own output x Wᵀ + b, if the forward pass has it; saves computing it again.
        bias: the layer's bias. It takes no part in the penalty and is only taken off `output`.
    """
    batch = Batch.of(x, noise, reduction, strength, mask, required={"weight": weight}, bias=bias, output=output)
    check_linear(x, weight, bias, output)
    x, weight = batch.tokens(x), batch.cast(weight)
    energy = batch.zero()
    if coherent_part_needed(noise):
        clean = x @ weight.mT if output is None else batch.tokens(output, less=bias)
        energy = energy + noise.mean**2 * per_sample(clean.square())
    if noise.variance:
        energy = energy + noise.variance * (x.square().sum(1) @ weight.square().sum(0))
    return batch.reduce(energy)


class LinearOptions(TypedDict, total=False):
    """The optional arguments of `linear`."""

    bias: Tensor | None
    output: Tensor | None
    mask: Tensor | None
    reduction: Reduction
    strength: float


def value(
    x: Float[Tensor, "*batch token in"],
    weight: Float[Tensor, "out in"],
    noise: Noise,
    **options: Unpack[LinearOptions],
) -> Float[Tensor, "*reduced"]:
    """J_v, paper Eq. 16: dropout on the tokens before the value projection. `linear` with W_v; heads add up to it."""
    return linear(x, weight, noise, **options)


def feed_forward(
    inputs: Sequence[Float[Tensor, "*batch token _"]],
    weights: Sequence[Float[Tensor, "_ _"]],
    noise: Noise,
    *,
    biases: Sequence[Float[Tensor, " _"] | None] | None = None,
    outputs: Sequence[Float[Tensor, "*batch token _"] | None] | None = None,
    mask: Bool[Tensor, "*batch token"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """J_ff = Σ_m J_ff,m, paper Eq. 19: `linear` summed over the layers of a feed-forward network.

    Args:
        inputs: the input of each layer, x and σ(x W₁ᵀ) for the usual two; x, x and the gated product for a GLU.
        weights, biases, outputs: of each layer, in the same order.
    """
    if not isinstance(inputs, list | tuple):
        raise InputError("inputs", "a list or tuple with the input of each layer", type(inputs).__name__)
    layers = len(inputs)
    for name, sequence in (("weights", weights), ("biases", biases), ("outputs", outputs)):
        if sequence is not None and len(sequence) != layers:
            raise InputError(name, f"one for each of the {layers} `inputs`", f"{len(sequence)} of them")
    if not layers:
        raise InputError("inputs", "at least one layer's input", "none")
    terms = []
    for layer, x in enumerate(inputs):
        options: LinearOptions = {
            "bias": None if biases is None else biases[layer],
            "output": None if outputs is None else outputs[layer],
            "mask": mask,
            "reduction": reduction,
            "strength": strength,
        }
        try:
            terms.append(linear(x, weights[layer], noise, **options))
        except InputError as error:
            raise InputError(f"{error.argument} of layer {layer}", error.expected, error.given) from error
    return torch.stack(terms).sum(0)


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor | None) -> None:
    checks.shaped("weight", weight, (None, x.shape[-1]), "(out, in) for the in of x")
    checks.shaped("bias", bias, (weight.shape[0],), "the out of weight")
    checks.shaped("output", output, (*x.shape[:-1], weight.shape[0]), "(*batch, token, out)")
