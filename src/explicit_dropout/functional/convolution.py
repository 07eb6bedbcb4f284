"""Dropout on the input of a convolution of one, two or three spatial dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

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

_CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@outside_autocast
def conv(
    x: Float[Tensor, "*batch_channel_space"],
    weight: Float[Tensor, "out channel_of_group *kernel"],
    noise: Noise,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    bias: Float[Tensor, " out"] | None = None,
    output: Float[Tensor, "*batch_out_space"] | None = None,
    mask: Bool[Tensor, "*batch_space"] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Float[Tensor, "*reduced"]:
    """½ E‖conv(x̃, w)‖² = ½ (μ² ‖conv(x, w)‖² + v Σ conv(x², Σ_o w_o²)): dropout on the elements of the input map.

    The convolution that the paper's conclusion speaks of. A token is an output position; with a `mask` one whose window
    holds at least one real input position. Stride, padding (with zeros), dilation and groups as in `torch.nn.Conv2d`.

    Args:
        x: the input map, (*batch, channel, *space).
        weight: the kernel; its rank says how many spatial dimensions there are.
        mask: real positions of the input map, the others are taken as zero.
        bias, output: of the layer, as in `linear`; no output beside a mask.
    """
    dtype = checks.floating({"x": x, "weight": weight}, {"bias": bias, "output": output})
    dimensions = weight.ndim - 2
    if dimensions not in _CONVOLUTIONS:
        raise InputError("weight", "of shape (out, in / groups, *kernel), 1 to 3 sizes", f"shape {tuple(weight.shape)}")
    if x.ndim <= dimensions:
        expected = f"of shape (*batch, channel, {', '.join(['space'] * dimensions)})"
        raise InputError("x", expected, f"shape {tuple(x.shape)}")
    lead, channels, space = (
        x.shape[: -dimensions - 1],
        x.shape[-dimensions - 1],
        x.shape[x.ndim - dimensions :],
    )
    checks.count("groups", groups)
    if channels % groups or weight.shape[0] % groups:
        raise InputError("groups", f"a divisor of {channels} channels in and {weight.shape[0]} out", groups)
    checks.shaped("weight", weight, (None, channels // groups, *[None] * dimensions), "(out, in / groups, *kernel)")
    checks.shaped("bias", bias, (weight.shape[0],), "the out of weight")
    checks.boolean("mask", mask, (*lead, *space), "(*batch, *space)", x.device)
    if mask is not None and output is not None:
        raise InputError("output", "None beside a `mask`: windows reach over the edge of the padding", "a tensor")

    def convolve(maps: Tensor, kernel: Tensor, groups: int) -> Tensor:
        return _CONVOLUTIONS[dimensions](maps, kernel, None, stride, padding, dilation, groups)

    size = lead.numel()
    maps = x.to(dtype).reshape(size, channels, *space)
    real: Tensor | None = None
    if mask is not None:
        real = mask.reshape(size, 1, *space)
        maps = maps.masked_fill(~real, 0)
    ones = torch.ones((1, 1, *weight.shape[2:]), dtype=dtype, device=x.device)
    try:  # a dry run: shapes alone
        dry = torch.empty((1, 1, *space), dtype=dtype, device="meta")
        positions = convolve(dry, ones.to("meta"), 1).shape[2:]
    except (RuntimeError, ValueError, TypeError, ZeroDivisionError) as error:
        shapes = f"x {tuple(x.shape)} and weight {tuple(weight.shape)}"
        geometry = f"stride={stride}, padding={padding!r}, dilation={dilation}"
        raise InputError("stride, padding, dilation", f"such that {shapes} convolve", geometry) from error
    counted = None
    if real is not None:
        counted = (convolve(real.to(dtype), ones, 1) > 0).reshape(*lead, positions.numel())
    checks.shaped("output", output, (*lead, weight.shape[0], *positions), "(*batch, out, *out_space)")
    tokens = (*lead, positions.numel())
    batch = Batch.of(x, noise, reduction, strength, counted, required={"weight": weight}, tokens=tokens)
    energy = batch.zero()
    if coherent_part_needed(noise):
        if output is None:
            clean = convolve(maps, batch.cast(weight), groups)
        else:
            clean = batch.flat(output, dimensions + 1)
            if bias is not None:
                clean = clean - batch.cast(bias).reshape(-1, *[1] * dimensions)
        energy = energy + noise.mean**2 * per_sample(clean.square())
    if noise.variance:
        squared = torch.unflatten(batch.cast(weight).square(), 0, (groups, -1)).sum(1)
        energy = energy + noise.variance * per_sample(convolve(maps.square(), squared, groups))
    return batch.reduce(energy)
