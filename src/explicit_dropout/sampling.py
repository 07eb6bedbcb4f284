"""Monte Carlo: draw masks, run the site again with the masked input, and measure how far its output moved."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from explicit_dropout import checks
from explicit_dropout.errors import InputError
from explicit_dropout.functional.batch import Reduction
from explicit_dropout.noise import Noise

Draw = Callable[..., Tensor]
"""draw(*shape): masks 1 − ε of that shape, behind one axis for the draws of a chunk."""
Energy = tuple[Tensor, int | Tensor]
"""‖clean − perturbed output‖² for each draw and sample, (draw, *batch); and the number of output tokens that count."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A Monte Carlo mean and its standard error; scalars, or in the shape of the batch for reduction="none"."""

    mean: Tensor
    standard_error: Tensor
    samples: int

    def deviations(self, value: Tensor) -> float:
        """How many standard errors the value is away from the mean (the largest, where there are several)."""
        return float(((value.detach() - self.mean).abs() / self.standard_error).max())


def monte_carlo(
    site: str,
    noise: Noise,
    samples: int,
    *tensors: Tensor | Sequence[Tensor],
    generator: torch.Generator | None = None,
    chunk: int = 256,
    reduction: Reduction = "token",
    strength: float = 1.0,
    **options: object,
) -> Estimate:
    """½ E‖clean − perturbed output‖² by really drawing masks and recomputing the output.

    Args:
        site: the name of a closed form in `functional`.
        samples: how many masks to draw.
        tensors, reduction, strength, options: what that function takes, without the noise.
        generator: for the same draws again.
        chunk: how many draws are computed at once.
    """
    if site not in _SITES:
        raise InputError("site", "one of " + ", ".join(sorted(_SITES)), repr(site))
    if checks.count("samples", samples) < 2:
        raise InputError("samples", "at least 2, or there is no standard error", samples)
    checks.count("chunk", chunk)
    checks.choice("reduction", reduction, Reduction)
    strength = checks.number("strength", strength, "a finite number ≥ 0", low=0)
    if not isinstance(noise, Noise):
        raise InputError("noise", "a Noise: bernoulli(p), inverted(p) or gaussian(std)", repr(noise))
    given = [t for group in tensors for t in ([group] if isinstance(group, Tensor) else group)]
    given += [value for value in options.values() if isinstance(value, Tensor) and value.is_floating_point()]
    if not given:
        raise InputError("tensors", f"those that functional.{site} takes", "none")
    first = given[0]
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in given), torch.float32)
    tensors = tuple(g.to(dtype) if isinstance(g, Tensor) else [t.to(dtype) for t in g] for g in tensors)
    options = {
        name: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in options.items()
    }
    penalties = []
    with torch.no_grad():
        for start in range(0, samples, chunk):
            drawn = min(chunk, samples - start)

            def draw(*shape: int, drawn: int = drawn) -> Tensor:
                return noise.draw((drawn, *shape), generator=generator, dtype=dtype, device=first.device)

            energies, tokens = _SITES[site](draw, *tensors, **options)
            if reduction != "none":
                count = energies.shape[1:].numel() if reduction == "sample" else tokens
                energies = energies.reshape(drawn, -1).sum(1) / count
            penalties.append(0.5 * strength * energies)
    drawn_penalties = torch.cat(penalties)
    return Estimate(drawn_penalties.mean(0), drawn_penalties.std(0) / samples**0.5, samples)


def _energy(change: Tensor, mask: Tensor | None, *, axes: int, tokens: int | None = None) -> Energy:
    """The energy of a change of output, whose last `axes` axes belong to a sample; rows are tokens if not said."""
    energies = change.square().flatten(-axes).sum(-1)
    per_sample = change.shape[-2] if tokens is None else tokens
    return energies, energies.shape[1:].numel() * per_sample if mask is None else mask.sum()


def _zeroed(output: Tensor, mask: Tensor | None) -> Tensor:
    return output if mask is None else torch.where(mask[..., None], output, 0)


def _columns_zeroed(attention: Tensor, mask: Tensor | None) -> Tensor:
    return attention if mask is None else torch.where(mask[..., None, None, :], attention, 0)


def _linear(
    draw: Draw,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    output: Tensor | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
) -> Energy:
    x = _zeroed(x, mask)
    change = F.linear(x, weight, bias) - F.linear(x * draw(*x.shape), weight, bias)
    return _energy(change, mask, axes=2)


def _feed_forward(
    draw: Draw,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    biases: Sequence[Tensor | None] | None = None,
    outputs: Sequence[Tensor | None] | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
) -> Energy:
    shifts = biases or [None] * len(inputs)
    layers = [_linear(draw, x, w, bias=b, mask=mask) for x, w, b in zip(inputs, weights, shifts, strict=True)]
    return torch.stack([energies for energies, _ in layers]).sum(0), layers[0][1]


def _scores(
    draw: Draw,
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    *,
    dropped: str,
    shared_mask: bool = False,
    query_bias: Tensor | None = None,
    key_bias: Tensor | None = None,
    context: Tensor | None = None,
    queries: Tensor | None = None,  # noqa: ARG001
    keys: Tensor | None = None,  # noqa: ARG001
    heads: int = 1,
    key_heads: int | None = None,
    scale: float = 1.0,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    attention_mask: Tensor | None = None,
    causal: bool = False,
) -> Energy:
    source, source_mask = (x, mask) if context is None else (context, context_mask)
    x, source = _zeroed(x, mask), _zeroed(source, source_mask)
    groups = key_heads or heads
    allowed = torch.ones(x.shape[-2], source.shape[-2], dtype=torch.bool, device=x.device)
    allowed = allowed.tril() if causal else allowed
    if attention_mask is not None:
        allowed = allowed & attention_mask
    if mask is not None:
        allowed = allowed & mask[..., None, :, None]
    if source_mask is not None:
        allowed = allowed & source_mask[..., None, None, :]

    def scores(query_input: Tensor, key_input: Tensor) -> Tensor:
        q = torch.unflatten(F.linear(query_input, query_weight, query_bias), -1, (heads, -1)).transpose(-2, -3)
        k = torch.unflatten(F.linear(key_input, key_weight, key_bias), -1, (groups, -1)).transpose(-2, -3)
        return torch.where(allowed, scale * q @ k.repeat_interleave(heads // groups, -3).mT, 0)

    masks = draw(*x.shape) if "query" in dropped else None
    query_input = x if masks is None else x * masks
    key_input = source
    if "key" in dropped:
        key_input = source * (masks if shared_mask and masks is not None else draw(*source.shape))
    return _energy(scores(x, source) - scores(query_input, key_input), mask, axes=3)


def _query(draw: Draw, *tensors: Tensor, **options: object) -> Energy:
    return _scores(draw, *tensors, dropped="query", **options)  # type: ignore[arg-type]


def _key(draw: Draw, *tensors: Tensor, **options: object) -> Energy:
    return _scores(draw, *tensors, dropped="key", **options)  # type: ignore[arg-type]


def _query_key(draw: Draw, *tensors: Tensor, **options: object) -> Energy:
    return _scores(draw, *tensors, dropped="query and key", **options)  # type: ignore[arg-type]


def _attended_value(
    draw: Draw,
    x: Tensor,
    value_weight: Tensor,
    attention: Tensor,
    *,
    value_bias: Tensor | None = None,
    attended: Tensor | None = None,  # noqa: ARG001
    heads: int = 1,
    key_heads: int | None = None,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Energy:
    x, groups = _zeroed(x, context_mask), key_heads or heads
    attention = _columns_zeroed(attention, context_mask)

    def output(tokens: Tensor) -> Tensor:
        values = torch.unflatten(F.linear(tokens, value_weight, value_bias), -1, (groups, -1)).transpose(-2, -3)
        return attention @ values.repeat_interleave(heads // groups, -3)

    change = output(x) - output(x * draw(*x.shape))
    return _energy(_zeroed(change, None if mask is None else mask[..., None, :]), mask, axes=3)


def _attention_weights(
    draw: Draw,
    attention: Tensor,
    values: Tensor,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
) -> Energy:
    attention = _columns_zeroed(attention, context_mask)
    values = _zeroed(values, None if context_mask is None else context_mask[..., None, :])
    values = values.repeat_interleave(attention.shape[-3] // values.shape[-3], -3)
    change = attention @ values - (attention * draw(*attention.shape)) @ values
    return _energy(_zeroed(change, None if mask is None else mask[..., None, :]), mask, axes=3)


def _drop_head(
    draw: Draw,
    x: Tensor,
    weight: Tensor,
    *,
    heads: int,
    bias: Tensor | None = None,
    output: Tensor | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
) -> Energy:
    x = _zeroed(x, mask)
    per_head = torch.unflatten(x, -1, (heads, -1)) * draw(*x.shape[:-2], 1, heads, 1)
    change = F.linear(x, weight, bias) - F.linear(per_head.flatten(-2), weight, bias)
    return _energy(change, mask, axes=2)


def _hidden(draw: Draw, x: Tensor, *, mask: Tensor | None = None) -> Energy:
    x = _zeroed(x, mask)
    return _energy(x - x * draw(*x.shape), mask, axes=2)


def _drop_path(draw: Draw, output: Tensor, *, mask: Tensor | None = None) -> Energy:
    output = _zeroed(output, mask)
    return _energy(output - output * draw(*output.shape[:-2], 1, 1), mask, axes=2)


def _conv(
    draw: Draw,
    x: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    output: Tensor | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
    **geometry: object,
) -> Energy:
    rank = weight.ndim - 2
    convolution: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[rank - 1]

    def outputs(maps: Tensor) -> Tensor:
        lead = maps.shape[: -rank - 1]
        flat = convolution(maps.reshape(lead.numel(), *maps.shape[-rank - 1 :]), weight, bias, **geometry)
        return flat.reshape(*lead, *flat.shape[1:])

    real = x if mask is None else torch.where(mask.unsqueeze(-rank - 1), x, 0)
    change = outputs(real) - outputs(real * draw(*x.shape))
    touched = None
    if mask is not None:
        window = torch.ones(1, 1, *weight.shape[2:], dtype=x.dtype, device=x.device)
        options = {name: value for name, value in geometry.items() if name != "groups"}
        touched = convolution(mask.to(x).reshape(-1, 1, *mask.shape[-rank:]), window, None, **options) > 0
    return _energy(change, touched, axes=rank + 1, tokens=change.shape[-rank:].numel())


_SITES: dict[str, Callable[..., Energy]] = {
    "linear": _linear,
    "value": _linear,
    "feed_forward": _feed_forward,
    "query": _query,
    "key": _key,
    "query_key": _query_key,
    "attended_value": _attended_value,
    "attention_weights": _attention_weights,
    "drop_head": _drop_head,
    "hidden": _hidden,
    "drop_path": _drop_path,
    "conv": _conv,
}
