"""Σ (x − b)² of a tensor on its way through a model, whole or by column.

Coherent energy is that of a layer's output less its bias; incoherent energy is made of the column energies of a layer's
input. Both belong to tensors that the model keeps for its own backward pass, nearly all. So the tensor passes through:
`passing` gives it back, to be put in its own place, and in the backward pass adds the gradient of the energy to the one
that comes by, in one pass. A tensor that autocast is about to lower is lowered on the way, in the pass that reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import plain

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TENSORS = (Tensor, torch.nn.Parameter)

HAS_TRITON = find_spec("triton") is not None
"""Not imported before it is needed: it takes its time."""


@cache
def _kernels(by_triton: bool) -> Any:
    """The module that has them: energies_of, gradient_of and sources."""
    if by_triton:
        from explicit_dropout.kernels import triton_energy

        return triton_energy
    from explicit_dropout.kernels import torch_energy

    return torch_energy


@cache
def interpreted() -> bool:
    """Whether Triton interprets its kernels (TRITON_INTERPRET=1), which then serve tensors on the CPU as well."""
    if not HAS_TRITON:
        return False
    import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]

    return bool(triton.knobs.runtime.interpret)


def serves(x: Tensor) -> bool:
    """Whether tensors can pass through here and now: in eager code, on a GPU or a CPU, up to float32."""
    if torch.compiler.is_compiling() or type(x) not in TENSORS or x.dtype not in DTYPES:
        return False
    return (x.is_cpu or (x.is_cuda and HAS_TRITON)) and not torch._C._are_functorch_transforms_active()


def by_triton(x: Tensor) -> bool:
    """Whether it is Triton that serves such a tensor."""
    return HAS_TRITON and (x.is_cuda or (x.is_cpu and interpreted()))


def serves_compiled(x: Tensor) -> bool:
    """Whether the operators that stand for the kernels in compiled code take this tensor."""
    return x.is_cuda and x.dtype in DTYPES and HAS_TRITON


def lowered(x: Tensor) -> torch.dtype | None:
    """The lower precision that autocast is about to give the input of a linear layer, if it is."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    dtype = torch.get_autocast_dtype(kind)
    return None if dtype == x.dtype or dtype not in DTYPES else dtype


def passing(
    x: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    rows: slice | None = None,
    lower: torch.dtype | None = None,
    by_column: bool = False,
    copied: bool = False,
    samples: int = 1,
) -> tuple[Tensor, Tensor]:
    """x itself, to be used in its own place, and partial sums of (x − b)² that add up to its energy.

    Args:
        x: (*batch, width), on a device that the kernels serve.
        bias: (width of the rows), which x contains.
        mask: boolean, (*batch), True for rows that count.
        rows: the columns of x that have an energy (the rows of a fused weight that made them); None for all.
        lower: give x back in this precision.
        by_column: the sums of each column for itself, (part, column), over the first axis.
        samples: sums of so many equal runs of rows for themselves, one after the other on the first axis.
        copied: keep a copy for the backward pass, for where x may be changed in place meanwhile.
    """
    found = _apply(x, bias, mask, None, (rows, lower, by_column, copied, samples))
    return found[0], found[1]


def passing_to(
    weight: Tensor, x: Tensor, mask: Tensor | None = None, lower: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The input x of a layer itself, its column energies and those of the layer's weight, each (part, column)."""
    found = _apply(x, None, mask, weight, (None, lower, True, False, 1))
    return cast("tuple[Tensor, Tensor, Tensor]", found)


class _Passing(torch.autograd.Function):
    """Gives the tensor back, its energies, and as a third those of a weight, or a copy, where one is asked for."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, mask: Tensor | None, weight: Tensor | None,
        options: tuple[slice | None, torch.dtype | None, bool, bool, int],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows, lower, by_column, copied, samples = options
        own = x if rows is None else x[..., rows]
        flags = None if mask is None else mask.reshape(-1).view(torch.uint8)
        kernels = _kernels(by_triton(x))
        energies, of_bias, low = kernels.energies_of(own, bias, flags, lower, by_column, samples)
        # Not a view of x, or autograd would forbid models to change their outputs in place.
        passed = x.detach() if low is None else low
        kept = x if low is None else low
        third: tuple[Tensor, ...] = ()
        if weight is not None:
            third = (kernels.energies_of(weight, None, None, None, True)[0],)
        elif copied:  # an output as well: only so are there second derivatives by way of it
            kept = kept.clone()
            third = (kept,)
        ctx.save_for_backward(kept, flags, weight, *of_bias)
        ctx.set_materialize_grads(False)
        # The bias itself is not saved: sharded parameters come and go meanwhile, and its values are known.
        ctx.facts = kernels, by_column, x.dtype, bias, 0 if rows is None else rows.start or 0, own.shape[-1], samples
        return passed, energies, *third

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None, weights: Tensor | None, third: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        kept, flags, weight, *of_bias = ctx.saved_tensors
        kernels, by_column, dtype, bias, offset, width, samples = ctx.facts
        of_weight = None
        if third is not None and weight is not None:
            of_weight = _of_weight(kernels, weight, third)
        elif third is not None:
            gradient = third if gradient is None else gradient + third
        if weights is None:
            result, slope = None if gradient is None else gradient.to(dtype), None
        elif torch.is_grad_enabled():
            result, slope = _differentiable(ctx, kept, flags, gradient, weights)
        else:
            result, slope = kernels.gradient_of(
                kept, of_bias, flags, gradient, weights, dtype, by_column, offset, width,
                None if bias is None else bias.dtype, samples,
            )  # fmt: skip
        return result, slope, None, of_weight, None


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Passing).apply
"""`_Passing.apply` without its look for function transforms, of which `serves` says that there are none."""


def _of_weight(kernels: Any, weight: Tensor, weights: Tensor) -> Tensor:
    """The gradient of the column energies of a layer's weight."""
    if torch.is_grad_enabled():
        row, column = kernels.sources(*weight.shape, 1, True, weight.device)
        return 2 * weights[row][:, column] * weight
    result, _ = kernels.gradient_of(weight, (), None, None, weights, weight.dtype, True, 0, weight.shape[1], None)
    return cast("Tensor", result)


def _differentiable(
    ctx: Any, x: Tensor, flags: Tensor | None, gradient: Tensor | None, weights: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The backward pass in plain torch, for whoever goes on to differentiate it (create_graph=True)."""
    kernels, by_column, dtype, bias, offset, width, samples = ctx.facts
    flat = x.reshape(-1, x.shape[-1])
    row, column = kernels.sources(flat.shape[0], width, samples, by_column, x.device)
    mask = None if flags is None else flags.bool()
    slope = 2 * weights[row][:, column] * plain.deviation(flat[:, offset : offset + width], bias, mask)
    result = torch.nn.functional.pad(slope, (offset, flat.shape[1] - offset - width)).view(x.shape)
    if gradient is not None:
        result = result + gradient
    return result.to(dtype), None if bias is None else -slope.sum(0).to(bias.dtype)


def columns(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Σ_i x_ij² for every column j, over the rows that count: (column), or (part, column) to be summed over parts."""
    if serves(x):
        return passing(x, mask=mask, by_column=True)[1]
    return plain.columns(x, None, mask)
