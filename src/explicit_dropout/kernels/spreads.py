"""⟨XᵀX, W diag(s) Wᵀ⟩ by head: the incoherent energy of scores, with every pair of tokens allowed.

X are the keys where queries are dropped, W makes the queries, and s are the column energies of their input; or the
other way round. Where both are dropped, W diag(s) Wᵀ of one side meets that of the other as well. For each sample and
head these are matrices of the width of a head. On a GPU they are made where they are needed, forward and backward:
nothing is kept but what there is; operands of their products are bfloat16, sums float32. On a CPU, where making them
takes longer than anything else here, they are kept: a few numbers beside the tokens that they are made of.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from explicit_dropout.kernels import energy, plain, torch_energy
from explicit_dropout.kernels.gram import serves_scores
from explicit_dropout.kernels.inlining import inlined
from explicit_dropout.kernels.plain import tokens_by_head, weight_by_head


@cache
def _triton() -> Any:
    from explicit_dropout.kernels import triton_spread

    return triton_spread


def serves_spread(side: Tensor, heads: int) -> bool:
    """Whether `spread` takes this side of attention here and now: on a GPU only where float32 is not expected."""
    return serves_scores(side, side, heads) and (
        side.dtype != torch.float32 or not (torch.compiler.is_compiling() or energy.by_triton(side))
    )


def spread(others: Tensor, weight: Tensor, squares: Tensor, heads: int) -> Tensor:
    """⟨OᵀO, W diag(s) Wᵀ⟩ for every sample and head, (batch, head).

    Args:
        others: the side that is not dropped, (batch, token, feature), heads side by side.
        weight: of the side that is, (feature, in).
        squares: s, the column energies of that side's input, (batch, in).
    """
    return _energies([others, weight, squares], heads)[0]


def joint_spread(
    keys: Tensor, query_weight: Tensor, query_squares: Tensor,
    queries: Tensor, key_weight: Tensor, key_squares: Tensor, heads: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What dropout of queries adds, what dropout of keys adds, and what both at once add to that, (batch, head) each.

    The last is ⟨W diag(s) Wᵀ, V diag(u) Vᵀ⟩ of the weights W and V of queries and keys.
    """
    sides = [keys, query_weight, query_squares, queries, key_weight, key_squares]
    return cast("tuple[Tensor, Tensor, Tensor]", tuple(_energies(sides, heads)))


def _energies(sides: list[Tensor], heads: int) -> list[Tensor]:
    if torch.compiler.is_compiling():
        return cast("list[Tensor]", torch.ops.explicit_dropout.spread(sides, heads))
    return cast("list[Tensor]", _Spread.apply(heads, *sides))  # type: ignore[no-untyped-call]


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: int, *sides: Tensor) -> tuple[Tensor, ...]:
        kept = [] if energy.by_triton(sides[0]) else _of_heads(list(sides), heads)
        ctx.save_for_backward(*sides, *kept)
        ctx.heads, ctx.number = heads, len(sides)
        return tuple(_made(list(sides), heads, kept))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)  # once: checkpointing unpacks each a single time
        sides, kept = saved[: ctx.number], saved[ctx.number :]
        if torch.is_grad_enabled():
            if not kept:
                refuse_second()
            kept = []  # made again, with their own derivatives
        return None, *_gradients(sides, ctx.heads, list(slopes), kept)


def exactly(x: Tensor) -> Any:
    """No autocast inside: it would lower sums, and take bfloat16 for float16, whose range energies leave."""
    return torch.autocast(x.device.type, enabled=False)


def refuse_second() -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "the penalty of attention scores has no second derivative in half precision on a GPU; use float32"
        )


# ---------------------------------------------------------------------------------------------- how they are made


def _made(sides: list[Tensor], heads: int, kept: list[Tensor] | None = None) -> list[Tensor]:
    """One energy, of the three tensors of a side, or three, of those of both; `kept`: their matrices, if there are."""
    with exactly(sides[0]):
        if energy.by_triton(sides[0]):
            return cast("list[Tensor]", _triton().spread_energies(_given(sides), heads))
        grams, matrices = _halves(kept or _of_heads(sides, heads))
        pairs = [*zip(grams, matrices, strict=True), matrices][: 2 * len(matrices) - 1]
        return [(one * other).sum((2, 3)) for one, other in pairs]


def _gradients(sides: list[Tensor], heads: int, slopes: list[Tensor], kept: list[Tensor] | None = None) -> list[Tensor]:
    """Of all tensors of the sides, given those of the energies; `kept` as above."""
    with exactly(sides[0]):
        if energy.by_triton(sides[0]):
            slopes = [slope.contiguous() for slope in slopes]
            found = [
                gradient for of_side in _triton().spread_gradients(_given(sides), heads, slopes) for gradient in of_side
            ]
        else:
            found = _gradients_plainly(sides, heads, slopes, kept or _of_heads(sides, heads))
        return [gradient.to(tensor.dtype) for gradient, tensor in zip(found, sides, strict=True)]


def _given(sides: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The tensors of every side as kernels read them."""
    return [
        (plain.even(others), weight.detach().to(torch.bfloat16), squares.contiguous())
        for others, weight, squares in _by_side(sides)
    ]


def _by_side(sides: list[Tensor]) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(sides[start], sides[start + 1], sides[start + 2]) for start in range(0, len(sides), 3)]


def _of_heads(sides: list[Tensor], heads: int) -> list[Tensor]:
    """XᵀX of every sample and head, for each side, and then W diag(s) Wᵀ."""
    with exactly(sides[0]):
        grams = [x.mT @ x for x in (tokens_by_head(others, heads) for others in sides[::3])]
        by_head = (weight_by_head(weight, heads) for weight in sides[1::3])
        return [*grams, *(_weighted(rows, squares) for rows, squares in zip(by_head, sides[2::3], strict=True))]


def _halves(kept: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    return kept[: len(kept) // 2], kept[len(kept) // 2 :]


def _weighted(rows: Tensor, squares: Tensor) -> Tensor:
    """W diag(s) Wᵀ, heads first until the end: so a head's weight meets all samples at once and is never repeated."""
    scaled = _product(rows[:, None], squares[:, None])
    return torch.unflatten(scaled.flatten(1, 2) @ rows.mT, 1, (-1, rows.shape[1])).transpose(0, 1)


def _product(one: Tensor, other: Tensor) -> Tensor:
    """In memory that is kept, where nobody differentiates it; valid until the next one."""
    if torch.is_grad_enabled() or not one.is_cpu:
        return one * other
    shape = torch.broadcast_shapes(one.shape, other.shape)  # type: ignore[no-untyped-call]
    return torch.mul(one, other, out=torch_energy.room.of(shape))


def _gradients_plainly(sides: list[Tensor], heads: int, slopes: list[Tensor], kept: list[Tensor]) -> list[Tensor]:
    (grams, matrices), found = _halves(kept), []
    of_energies = [slope[..., None, None] for slope in slopes]
    for number, (others, weight, squares) in enumerate(_by_side(sides)):
        rows = weight_by_head(weight, heads)
        inner = of_energies[number] * grams[number]
        if len(matrices) == 2:
            inner = inner + of_energies[2] * matrices[1 - number]
        along = torch.unflatten(inner.transpose(0, 1).flatten(1, 2) @ rows, 1, (-1, rows.shape[1]))
        found += [
            (tokens_by_head(others, heads) @ (2 * of_energies[number] * matrices[number])).transpose(1, 2).flatten(2),
            2 * _product(along, squares[:, None]).sum(1).flatten(0, 1),
            _product(along, rows[:, None]).sum((0, 2)),
        ]
    return found


# ---------------------------------------------------------------------------------------------- operators


def _by_kernels(sides: list[Tensor]) -> bool:
    return sides[0].is_cuda and energy.serves_compiled(sides[0])  # inside plain torch a compiler finds what to keep


@torch.library.custom_op("explicit_dropout::spread", mutates_args=())
def spread_operator(sides: list[Tensor], heads: int) -> list[Tensor]:
    """One energy for every sample and head, of the three tensors of a side, or three, of those of both."""
    return _made(sides, heads)


inlined(spread_operator, _by_kernels)


@torch.library.custom_op("explicit_dropout::spread_gradients", mutates_args=())
def spread_gradients_operator(sides: list[Tensor], heads: int, slopes: list[Tensor]) -> list[Tensor]:
    """Of all tensors of the sides."""
    return _gradients(sides, heads, slopes)


inlined(spread_gradients_operator, _by_kernels)


@spread_operator.register_fake
def _(sides: list[Tensor], heads: int) -> list[Tensor]:
    shape = sides[0].shape[0], heads
    return [sides[0].new_empty(shape, dtype=torch.float32) for _ in range(2 * (len(sides) // 3) - 1)]


@spread_gradients_operator.register_fake
def _(sides: list[Tensor], heads: int, slopes: list[Tensor]) -> list[Tensor]:
    del heads, slopes
    return [plain.like(tensor) for tensor in sides]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    del output
    sides, ctx.heads = inputs
    ctx.save_for_backward(*sides)


def _backward(ctx: Any, slopes: list[Tensor]) -> tuple[list[Tensor], None]:
    return torch.ops.explicit_dropout.spread_gradients(list(ctx.saved_tensors), ctx.heads, list(slopes)), None


spread_operator.register_autograd(_backward, setup_context=_keep)
