"""Dropout on an output itself: hidden states, embeddings, residual branches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from explicit_dropout.functional.batch import Batch, Reduction, outside_autocast, per_sample
from explicit_dropout.noise import Noise

if TYPE_CHECKING:
    from jaxtyping import Bool, Float


@outside_autocast
def hidden(
    x: Float[Tensor, "*batch token width"],
    noise: Noise,
    *,
    mask: Bool[Tensor, "*batch token"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """½ E‖x̃‖² = ½ (μ² + v) ‖x‖²: dropout on a hidden state itself (embedding, projection or residual dropout)."""
    batch = Batch.of(x, noise, reduction, strength, mask)
    return batch.reduce((noise.mean**2 + noise.variance) * per_sample(batch.tokens(x).square()))


def drop_path(
    output: Float[Tensor, "*batch token width"],
    noise: Noise,
    *,
    mask: Bool[Tensor, "*batch token"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """½ (μ² + v) ‖f(x)‖²: DropPath, one draw for each sample's whole residual branch f(x).

    The same number as `hidden`: how draws are tied together does not show in the energy of the output itself.
    """
    return hidden(output, noise, mask=mask, reduction=reduction, strength=strength)
