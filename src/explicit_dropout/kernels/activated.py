"""An activation, with the energies of what goes into it and of what comes out, in one pass each way.

Between the layers of a feed-forward network lie its widest tensors. Their energies by themselves cost four passes over
each, forward and backward, though the activation reads and writes them anyway. So here it is made anew, and they with
it: Σ (h − b)² of its input h, whose layer has the bias b, and Σ_i σ(h)_ij² of every column of its output.

Given h with its bias in it (`added`), as eager models have it, or without, as compiled code can: then the bias is added
here, and its gradient is a by-product of the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from explicit_dropout.kernels import energy, plain
from explicit_dropout.kernels.inlining import inlined


def quick_gelu(h: Tensor) -> Tensor:
    """h σ(1.702 h), the GELU of CLIP."""
    return h * torch.sigmoid(QUICK * h)


QUICK = 1.702
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}
"""The activations that there are kernels for, by name, in torch: those that keep their input, as the kernels do."""

TIMM = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
"""Those of timm.layers.activations, by class."""

HUGGING_FACE = {
    "GELUActivation": F.gelu, "PytorchGELUTanh": "gelu_tanh", "GELUTanh": "gelu_tanh", "SiLUActivation": "silu",
    "NewGELUActivation": "gelu_tanh", "FastGELUActivation": "gelu_tanh", "AccurateGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
}  # fmt: skip
"""Those of transformers.activations: what their `act` has to be, or what they are. Some are written out, operation by
operation, which takes as many passes over the tensor, and under autocast may give float32 back."""


def activation_of(module: nn.Module) -> str | None:
    """The name of the activation that a module is, and nothing besides; None for any other module."""
    kind = type(module)
    if "forward" in vars(module):
        return None
    if kind is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if kind is nn.SiLU:
        return None if module.inplace else "silu"
    if kind.__module__ == "timm.layers.activations":
        return TIMM.get(kind.__name__)
    if kind.__module__ != "transformers.activations" or kind.__name__ not in HUGGING_FACE:
        return None
    known, own = HUGGING_FACE[kind.__name__], getattr(module, "act", None)
    if isinstance(known, str):  # GELUTanh has a form in Python for torch of long ago
        return None if getattr(own, "__self__", None) is module else known
    return "gelu" if own is known else None


def serves_activated(x: Tensor) -> bool:
    """Whether there are kernels for this input of an activation, in eager or in compiled code."""
    if torch.compiler.is_compiling():
        return energy.serves_compiled(x)
    return energy.serves(x) and energy.by_triton(x)


def activated(
    kind: str, x: Tensor, bias: Tensor | None, mask: Tensor | None = None, *, added: bool = True, coherent: bool = True,
    by_column: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """σ(h), numbers that add up to Σ (h − b)², and Σ_i σ(h)_ij² of every column, as (part, column).

    Args:
        kind: a name in `PLAIN`.
        x: h (*batch, width) if `added`, else h − b, on a device that the kernels serve.
        bias: b (width), or None for zero.
        mask: boolean, (*batch), True for rows whose energies count.
        coherent, by_column: which energies are wanted; the other is empty.
    """
    given = x, bias, mask, kind, added, coherent, by_column
    if torch.compiler.is_compiling():
        return cast("tuple[Tensor, Tensor, Tensor]", torch.ops.explicit_dropout.activated(*given))
    return cast("tuple[Tensor, Tensor, Tensor]", _apply(*given))


def in_torch(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, kind: str, added: bool, coherent: bool, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch, in float32 at least; one part."""
    wide, mask = plain.wide(x), None if mask is None else mask.reshape(x.shape[:-1])
    shift = wide.new_zeros(()) if bias is None else bias.to(wide.dtype)
    result = PLAIN[kind](wide if added else wide + shift).to(x.dtype)
    deviations = plain.deviation(wide - shift if added else wide, None, mask)
    energies = deviations.square().sum().reshape(1, 1) if coherent else wide.new_zeros((0, 0))
    columns = plain.columns(result, None, mask).unsqueeze(0) if by_column else wide.new_zeros((0, x.shape[-1]))
    return result, energies, columns


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_activated

    return triton_activated


def _forward(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, kind: str, added: bool, coherent: bool, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if not energy.by_triton(x):
        return in_torch(x, bias, mask, kind, added, coherent, by_column)
    flags = None if mask is None else mask.reshape(-1).view(torch.uint8)
    return cast("tuple[Tensor, Tensor, Tensor]", _triton().activate(x, bias, flags, kind, added, coherent, by_column))


def _gradients(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, gradient: Tensor | None, of_energies: Tensor | None,
    of_columns: Tensor | None, kind: str, added: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients of x and of the bias, (part, width), to be added up; without parts if nothing reaches the bias.

    of_energies, of_columns: of every part, or one for all of them.
    """
    if energy.by_triton(x):
        flags = None if mask is None else mask.reshape(-1).view(torch.uint8)
        found = _triton().gradients(x, bias, flags, gradient, of_energies, of_columns, kind, added)
        return cast("tuple[Tensor, Tensor]", found)
    return gradients_in_torch(x, bias, mask, gradient, of_energies, of_columns, kind, added)


def gradients_in_torch(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, gradient: Tensor | None, of_energies: Tensor | None,
    of_columns: Tensor | None, kind: str, added: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same in plain torch, which can be differentiated. Parts are only ever added up, so all have one gradient."""
    wide, mask = plain.wide(x), None if mask is None else mask.reshape(x.shape[:-1])
    shift = wide.new_zeros(()) if bias is None else bias.to(wide.dtype)
    h = wide if added else wide + shift
    total = torch.zeros_like(wide) if gradient is None else gradient.to(wide.dtype)
    if of_columns is not None:
        total = total + 2 * of_columns.reshape(-1, x.shape[-1])[0] * plain.deviation(PLAIN[kind](h), None, mask)
    total = total * slope_of(kind, h)
    reaching = None if added else total
    if of_energies is not None:
        own = 2 * of_energies.reshape(-1)[0] * plain.deviation(wide - shift if added else wide, None, mask)
        total, reaching = total + own, -own if added else reaching
    if bias is None or reaching is None:
        return total.to(x.dtype), wide.new_zeros((0, x.shape[-1]))
    return total.to(x.dtype), reaching.reshape(-1, x.shape[-1]).sum(0, keepdim=True)


def reaches(bias: Tensor | None, of_energies: Tensor | None, added: bool) -> bool:
    """Whether the bias has a gradient: where x has it in it, the energies alone know of it as something else."""
    return bias is not None and (not added or of_energies is not None)


def slope_of(kind: str, h: Tensor) -> Tensor:
    """σ′(h)."""
    root: float = (2 / math.pi) ** 0.5
    if kind == "gelu":
        return 0.5 * (1 + torch.erf(h * 0.5**0.5) + h * root * torch.exp(-0.5 * h * h))
    if kind == "gelu_tanh":
        below = torch.sigmoid(2 * root * (h + 0.044715 * h**3))
        return below + 2 * h * below * (1 - below) * root * (1 + 3 * 0.044715 * h * h)
    steep = QUICK if kind == "quick_gelu" else 1.0
    below = torch.sigmoid(steep * h)
    return below * (1 + steep * h * (1 - below))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    del output
    x, bias, mask, ctx.kind, ctx.added, ctx.coherent, ctx.by_column = inputs
    ctx.save_for_backward(x, bias, mask)
    ctx.set_materialize_grads(False)
    ctx.gradients = torch.ops.explicit_dropout.activated_gradients


def _backward(
    ctx: Any, gradient: Tensor | None, of_energies: Tensor | None, of_columns: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, bias, mask = ctx.saved_tensors
    of_energies = of_energies if ctx.coherent else None
    of_columns = of_columns if ctx.by_column else None
    given = x, bias, mask, gradient, of_energies, of_columns, ctx.kind, ctx.added
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # somebody goes on to differentiate this
        of_x, parts = gradients_in_torch(*given)
    else:
        of_x, parts = ctx.gradients(*given)
    of_bias = None
    if bias is not None and ctx.needs_input_grad[1] and reaches(bias, of_energies, ctx.added):
        of_bias = (parts if parts.ndim == 1 else parts.sum(0)).to(bias.dtype)
    return of_x, of_bias, None, None, None, None, None


class _Activated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        found = _forward(*given)
        _keep(ctx, given, found)
        ctx.gradients = _gradients
        return found

    backward = staticmethod(_backward)


_apply: Callable[..., tuple[Tensor, ...]] = super(torch.autograd.Function, _Activated).apply
"""`_Activated.apply` without its look for function transforms, of which `serves_activated` says that there are none."""


@torch.library.custom_op("explicit_dropout::activated", mutates_args=())
def activated_operator(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, kind: str, added: bool, coherent: bool, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """σ(h), its energies whole, and columns (width), or none of them."""
    make = _forward if x.is_cuda else in_torch
    made, energies, columns = make(x, bias, mask, kind, added, coherent, by_column)
    return made, energies.sum(), columns.sum(0) if by_column else columns.new_empty(0)


@torch.library.custom_op("explicit_dropout::activated_gradients", mutates_args=())
def gradients_operator(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, gradient: Tensor | None, of_energies: Tensor | None,
    of_columns: Tensor | None, kind: str, added: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Of h and its bias; that of the bias is empty if nothing reaches it."""
    make = _gradients if x.is_cuda else gradients_in_torch
    of_x, parts = make(x, bias, mask, gradient, of_energies, of_columns, kind, added)
    return of_x, parts.sum(0) if len(parts) else parts.new_empty(0)


for operator in (activated_operator, gradients_operator):
    inlined(operator, energy.serves_compiled)


@activated_operator.register_fake
def _(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, kind: str, added: bool, coherent: bool, by_column: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del bias, mask, kind, added, coherent
    dtype = torch.promote_types(x.dtype, torch.float32)
    return plain.like(x), x.new_empty((), dtype=dtype), x.new_empty(x.shape[-1] if by_column else 0, dtype=dtype)


@gradients_operator.register_fake
def _(
    x: Tensor, bias: Tensor | None, mask: Tensor | None, gradient: Tensor | None, of_energies: Tensor | None,
    of_columns: Tensor | None, kind: str, added: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    del mask, gradient, of_columns, kind
    dtype = torch.promote_types(x.dtype, torch.float32)
    return plain.like(x), x.new_empty(x.shape[-1] if reaches(bias, of_energies, added) else 0, dtype=dtype)


activated_operator.register_autograd(_backward, setup_context=_keep)
