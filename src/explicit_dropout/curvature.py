"""How a loss curves at a model's outputs: square roots of its Hessian, which does not depend on the labels.

For outputs z of one example and a matrix L with L Lᵀ = ∂²loss/∂z², the loss of slightly different outputs is, on
average over labels that the model itself would draw, larger by ½ ‖Lᵀ δz‖². Backward passes can start from its columns.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from explicit_dropout.kernels.plain import wide

Loss = Literal["cross_entropy", "binary_cross_entropy", "mse"]
"""By the names of torch.nn.functional (`binary_cross_entropy_with_logits`), as means over all that count."""


def columns(outputs: Tensor, loss: Loss) -> Tensor:
    """L, column by column: (column, *batch, output), as many columns as there are outputs."""
    unit = torch.eye(outputs.shape[-1], dtype=wide(outputs).dtype, device=outputs.device)
    signs = unit.reshape(-1, *(1,) * (outputs.ndim - 1), unit.shape[-1])
    return times_root(outputs, signs, loss)


def drawn(outputs: Tensor, loss: Loss, draws: int, generator: torch.Generator | None = None) -> Tensor:
    """Random combinations L r / √draws of those columns, with signs r: (draw, *batch, output).

    Squares of what any linear map makes of them have the same mean as the sum over columns: E[(aᵀLr)²] = ‖Lᵀa‖². The
    signs of different examples are independent, so nothing is left of how they mix, as positions of a sentence do.
    """
    kind = {"dtype": torch.int64, "device": outputs.device if generator is None else generator.device}
    bits = torch.randint(2, (draws, *outputs.shape), generator=generator, **kind)  # type: ignore[call-overload]
    signs = (2 * bits - 1).to(wide(outputs)) / draws**0.5
    return times_root(outputs, signs, loss)


def times_root(outputs: Tensor, vectors: Tensor, loss: Loss) -> Tensor:
    """L applied to vectors (…, *batch, output), at these outputs (*batch, output).

    Cross-entropy has the Hessian diag(π) − π πᵀ, for which column c of L is √π_c (e_c − π). Square roots are taken of
    logarithms: probabilities of 0 have gradients then.
    """
    outputs = wide(outputs)
    match loss:
        case "cross_entropy":
            logarithms = outputs.log_softmax(-1)
            weighted = vectors * (logarithms / 2).exp()
            return weighted - logarithms.exp() * weighted.sum(-1, keepdim=True)
        case "binary_cross_entropy":
            return vectors * ((F.logsigmoid(outputs) + F.logsigmoid(-outputs)) / 2).exp()
        case _:
            return (vectors * 2**0.5).expand(*vectors.shape[: -outputs.ndim], *outputs.shape)


def counted(outputs: Tensor, mask: Tensor | None, loss: Loss) -> int | Tensor:
    """What the loss is a mean over: examples, or all outputs of all examples."""
    rows = outputs.shape[:-1].numel() if mask is None else mask.sum().clamp(min=1)
    return rows if loss == "cross_entropy" else rows * outputs.shape[-1]
