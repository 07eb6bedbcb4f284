"""softmax(Q Kᵀ / √width) V with or without dropped keys, by whatever is fastest where it runs.

On a GPU, in half precision and for up to 128 tokens: one kernel for each direction, with the dropping inside, as an
operator that compiles. Elsewhere torch's fused attention, and explicit attention weights where keys are dropped.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import has_torch_function_unary

from explicit_dropout.kernels.energy import HAS_TRITON, by_triton
from explicit_dropout.kernels.plain import like
from explicit_dropout.stochastic import AttentionTreatment

LONGEST, WIDEST = 128, 64
"""Tokens, and features of a head, for which everything fits into the registers of one program."""


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, treatment: AttentionTreatment | None = None) -> Tensor:
    """What each query attends to, (sample, token, heads · width) like queries, keys and values."""
    active = treatment if treatment is not None and treatment.active else None
    watched = active is not None and has_torch_function_unary(q)  # by twins, which know functions of torch
    if not watched and _serves(q, heads):
        tokens, dropped, renormalise, rate = q.shape[1], None, False, 0.0
        if active is not None:
            dropped = bits(active.dropped((len(q), heads, tokens, tokens), q.device), tokens)
            renormalise, rate = active.renormalise, active.p
        return cast("Tensor", torch.ops.explicit_dropout.short_attention(q, k, v, heads, dropped, renormalise, rate))
    q, k, v = (x.view(*x.shape[:-1], heads, -1).transpose(1, 2) for x in (q, k, v))
    if active is None:
        attended = F.scaled_dot_product_attention(q, k, v)
    else:
        attended = active.weights(q @ k.mT * q.shape[-1] ** -0.5).to(v.dtype) @ v
    return attended.transpose(1, 2).flatten(2)


def bits(dropped: Tensor, keys: int) -> Tensor:
    """A boolean mask (*batch, key) as bits of int32 words (*batch, word), the first key in the lowest."""
    words = -(-keys // 32)
    padded = F.pad(dropped.expand(*dropped.shape[:-1], keys), (0, 32 * words - keys))
    places = torch.arange(32, dtype=torch.int32, device=dropped.device)
    split = padded.view(*dropped.shape[:-1], words, 32).to(torch.int32)
    return (split << places).sum(-1, dtype=torch.int32)


def _serves(q: Tensor, heads: int) -> bool:
    if not HAS_TRITON or q.ndim != 3 or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not 0 < q.shape[1] <= LONGEST or q.shape[2] > WIDEST * heads:
        return False
    if torch.compiler.is_compiling():
        return q.is_cuda
    return by_triton(q) and not torch._C._are_functorch_transforms_active()


@cache
def _triton() -> Any:
    from explicit_dropout.lab import triton_attention

    return triton_attention


@torch.library.custom_op("explicit_dropout::short_attention", mutates_args=())
def short_attention(
    q: Tensor, k: Tensor, v: Tensor, heads: int, dropped: Tensor | None, renormalise: bool, rate: float
) -> Tensor:
    """Attention over few tokens; `dropped`: bits of keys, broadcastable to (sample, head, query, word)."""
    q, k, v = (x.contiguous() for x in (q, k, v))
    return cast("Tensor", _triton().attend(q, k, v, heads, dropped, renormalise, rate))


@torch.library.custom_op("explicit_dropout::short_attention_gradients", mutates_args=())
def short_attention_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: int,
    dropped: Tensor | None,
    renormalise: bool,
    rate: float,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values."""
    q, k, v, gradient = (x.contiguous() for x in (q, k, v, gradient))
    found = _triton().gradients(q, k, v, heads, dropped, renormalise, rate, gradient)
    return cast("tuple[Tensor, Tensor, Tensor]", found)


@short_attention.register_fake
def _(q: Tensor, *others: object) -> Tensor:
    del others
    return like(q)


@short_attention_gradients.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    del others
    return like(q), like(k), like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    q, k, v, ctx.heads, dropped, ctx.renormalise, ctx.rate = inputs
    ctx.save_for_backward(q, k, v, dropped)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, dropped = ctx.saved_tensors
    operator = torch.ops.explicit_dropout.short_attention_gradients
    found = operator(q, k, v, ctx.heads, dropped, ctx.renormalise, ctx.rate, gradient)
    return (*found, None, None, None, None)


short_attention.register_autograd(_differentiate, setup_context=_keep)
