"""What many families share: inputs, layouts of projections, rotations and position biases."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from family.table import SCORES, Attention, Laws, Linear, Part

BATCH, TOKENS, TARGETS = 2, 7, 5
IDS = torch.tensor([[3, 14, 15, 9, 26, 5, 35], [8, 9, 7, 9, 32, 1, 1]])
REAL = torch.tensor([[True] * 7, [True] * 5 + [False] * 2])
TARGET_REAL = torch.tensor([[True] * 5, [True] * 4 + [False]])


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def separate(*names: str, **options: Any) -> tuple[Part, Part, Part]:
    query, key, value = (Part(name, **options) for name in names)
    return query, key, value


def fused(name: str, *widths: int, **options: Any) -> tuple[Part, Part, Part]:
    """query ‖ key ‖ value of these widths."""
    ends = [sum(widths[:i]) for i in range(4)]
    query, key, value = (Part(name, slice(ends[i], ends[i + 1]), **options) for i in range(3))
    return query, key, value


def interleaved(name: str, groups: int, queries: int, width: int) -> tuple[Part, Part, Part]:
    """For every group: its queries, its key, its value."""
    rows = torch.arange(groups * (queries + 2) * width).reshape(groups, queries + 2, width)
    parts = rows[:, :queries], rows[:, queries], rows[:, queries + 1]
    query, key, value = (Part(name, tuple(part.flatten().tolist())) for part in parts)
    return query, key, value


def layers(number: int, template: str, first: int = 0, **settings: Any) -> tuple[Attention, ...]:
    defaults: dict[str, Any] = {"heads": 4}
    return tuple(Attention(template.format(i), first + i, **{**defaults, **settings}) for i in range(number))


def networks(
    number: int, *templates: str, first: int = 0, wide: int = 64, narrow: int = 32, packed: int = 1, **settings: Any
) -> tuple[Linear, ...]:
    """Feed-forward layers; all but the last of a network go from narrow to wide, the first perhaps packed."""
    found = []
    for i in range(number):
        for place, template in enumerate(templates):
            last = place == len(templates) - 1
            shape = (narrow, wide) if last else (packed * wide, narrow)
            found.append(Linear(template.format(i), first + i, shape, **settings))
    return tuple(found)


ROTARY_LIMITS: dict[str, tuple[Laws, str]] = dict.fromkeys(SCORES, ("paper", "rotary"))
Q_K_V = ("q_proj", "k_proj", "v_proj")
SELF = {"real": "main", "context": "main"}
GROUPED = ((32, 32), (16, 32), (16, 32))


def half_rotation(cos: Tensor, sin: Tensor, heads: Tensor) -> Tensor:
    """Dimension i turns with dimension i + half."""
    width = cos.shape[-1]
    shape = (cos.shape[0], *(1,) * (heads.ndim - 3), *cos.shape[1:])
    cos, sin = (angle.reshape(shape)[..., : width // 2].double() for angle in (cos, sin))
    a, b = heads[..., : width // 2], heads[..., width // 2 : width]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, heads[..., width:]), -1)


def hf_rotation(module: nn.Module, call: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    del module
    return partial(half_rotation, *call["position_embeddings"])


def eva_rotation(module: Any, call: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Neighbouring dimensions turn together, as complex numbers; the class token does not."""
    sin, cos = call["rope"].double().chunk(2, -1)
    spin, prefix = torch.complex(cos, sin)[..., ::2], module.num_prefix_tokens

    def turn(heads: Tensor) -> Tensor:
        angles = spin if spin.ndim == 2 or heads.ndim == 4 else spin.unsqueeze(-3)
        pairs = torch.view_as_complex(heads[..., prefix:, :].unflatten(-1, (-1, 2)).contiguous())
        return torch.cat((heads[..., :prefix, :], torch.view_as_real(pairs * angles).flatten(-2)), -2)

    return turn


def x_rotation(module: nn.Module, call: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    del module
    angles = call["rotary_pos_emb"][0].double()[0, :, ::2]

    def turn(heads: Tensor) -> Tensor:
        width = 2 * angles.shape[-1]
        pairs = torch.view_as_complex(heads[..., :width].unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
        return torch.cat((turned, heads[..., width:]), -1)

    return turn


def within(window: int) -> Callable[[dict[str, Any], int, int], Tensor]:
    """Tokens less than a window apart."""
    return lambda _, n, m: (torch.arange(n)[:, None] - torch.arange(m)).abs() < window


def swin_pairs(call: dict[str, Any], length: int, width: int) -> Tensor | None:
    del length, width
    mask = call.get("mask")
    return None if mask is None else (mask == 0).repeat(BATCH, 1, 1)[:, None]


def swin_bias(module: Any, call: dict[str, Any], length: int, width: int) -> Tensor:
    del call
    index = module.relative_position_index.view(-1)
    return module.relative_position_bias_table[index].view(length, width, -1).permute(2, 0, 1)[None]


def t5_bias(module: Any, call: dict[str, Any], length: int, width: int) -> Tensor:
    bias = call.get("position_bias")
    if bias is not None:
        return bias
    if not module.has_relative_attention_bias:
        return torch.zeros(())
    return module.compute_bias(length, width)


def alibi_bias(module: Any, call: dict[str, Any], length: int, width: int) -> Tensor:
    del length
    return call["alibi"].view(BATCH, module.num_heads, 1, width)
