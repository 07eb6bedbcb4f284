"""The dice: stochastic dropout of Transformers as modules, each with its paper and its formula.

    treatment = DropKey(0.2)
    weights = treatment.weights(queries @ keys.mT / width**0.5)  # in train mode; the plain softmax in eval mode

All random numbers come from `uniform`, so a forward pass can be recorded and played again with numbers of one's own.
A number u drops where u < p: whatever the precision of a model, its masks are the same. What is dropped and rescaled
passes through `dropout` and `drop_heads`, which `convert_dropout` knows.
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from explicit_dropout import checks
from explicit_dropout.errors import CollectionError

__all__ = [
    "AttentionDropout",
    "AttentionTreatment",
    "DropAttention",
    "DropHead",
    "DropKey",
    "DropPath",
    "Dropout",
    "drop_heads",
    "dropout",
    "rates_over_depth",
    "recording",
    "replaying",
    "uniform",
]

Course = Literal["constant", "falling", "rising"]
Mode = Literal["element", "column"]


# ---------------------------------------------------------------------------------------------- random numbers


class _Tape(threading.local):
    """What this thread records or replays; nothing, most of the time."""

    recorded: list[tuple[int, ...]] | None = None
    replayed: list[Tensor] | None = None


_tape = _Tape()


def uniform(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Float32 numbers of [0, 1) from torch's own generator, or what is being replayed."""
    shape = tuple(shape)
    if _tape.recorded is not None:
        _tape.recorded.append(shape)
    if _tape.replayed is None:
        return torch.rand(shape, dtype=torch.float32, device=device)
    if not _tape.replayed:
        raise CollectionError(f"more random numbers are asked for, of shape {shape}, than there are to replay")
    numbers = _tape.replayed.pop(0)
    if numbers.shape != shape:
        raise CollectionError(f"random numbers of shape {shape} are asked for, and {tuple(numbers.shape)} come next")
    return numbers


@contextmanager
def recording() -> Iterator[list[tuple[int, ...]]]:
    """Collect the shapes of all random numbers that are asked for inside, in order."""
    before, _tape.recorded = _tape.recorded, []
    try:
        yield _tape.recorded
    finally:
        _tape.recorded = before


@contextmanager
def replaying(numbers: Sequence[Tensor]) -> Iterator[None]:
    """Hand out these tensors, in order, instead of random numbers. Each must fit, and all must be used.

    Under `torch.func.vmap` they may be mapped over: the shapes that count are those of one example.
    """
    before, _tape.replayed = _tape.replayed, list(numbers)
    try:
        yield
        if _tape.replayed:
            raise CollectionError(f"{len(_tape.replayed)} of {len(numbers)} tensors to replay were not asked for")
    finally:
        _tape.replayed = before


def rates_over_depth(rate: float, layers: int, course: Course = "constant") -> list[float]:
    """The rate of each layer: the same for all, falling from it to 0 (DropKey), or rising from 0 to it (DropPath)."""
    rate, layers = checks.rate(rate, "rate"), checks.count("layers", layers)
    checks.choice("course", course, Course)
    if course == "constant" or layers == 1:
        return [rate] * layers
    rising = [rate * layer / (layers - 1) for layer in range(layers)]
    return rising if course == "rising" else rising[::-1]


# ---------------------------------------------------------------------------------------------- inside attention


class AttentionTreatment(nn.Module, ABC):
    """Dropout inside attention: from scores S to attention weights A, with keys dropped in train mode.

    Which weights are dropped is all that a kind has to say (`dropped`). What becomes of the others is one of two:

    - renormalised: Ã_ij = m_ij A_ij / Σ_k m_ik A_ik. A row that would lose all of its keys keeps all of them, so that
      rows always sum to one. Computed as the softmax of the scores that are left, which is the same and cannot
      underflow in half precision.
    - rescaled: Ã_ij = m_ij A_ij / (1 − p), so that E[Ã] = A.
    """

    renormalise = False

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = checks.rate(p)

    @property
    def active(self) -> bool:
        """Whether the weights differ from the plain softmax; where not, no attention matrix is needed."""
        return self.training and self.p > 0

    @abstractmethod
    def dropped(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        """A fresh draw of what is dropped, boolean, broadcastable to scores of this shape."""

    def weights(self, scores: Tensor) -> Tensor:
        """The weights of scores (*batch, heads, query, key), which may be −inf where a mask forbids a key."""
        if not self.active:
            return scores.softmax(-1)
        if not self.renormalise:
            return self.rescaled(scores.softmax(-1))
        dropped = self.dropped(scores.shape, scores.device)
        nothing_left = (dropped | scores.isneginf()).all(-1, keepdim=True)
        return scores.masked_fill(dropped & ~nothing_left, -torch.inf).softmax(-1)

    def rescaled(self, weights: Tensor) -> Tensor:
        """What is left of the plain softmax, divided by 1 − p."""
        return _rescaled(weights, self.dropped(weights.shape, weights.device), self.p)

    def forward(self, scores: Tensor) -> Tensor:
        return self.weights(scores)

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


class AttentionDropout(AttentionTreatment):
    """Dropout on the attention weights, as `nn.MultiheadAttention` has it: Ã_ij = m_ij A_ij / (1 − p).

    Vaswani et al. 2017, "Attention Is All You Need". One draw for each sample, head, query and key.
    """

    def dropped(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        return uniform(shape, device) < self.p

    def rescaled(self, weights: Tensor) -> Tensor:
        return dropout(weights, self.p)


class DropAttention(AttentionTreatment):
    """DropAttention: weights dropped one by one or by whole keys, in spans, and rows renormalised to sum to one.

    Zehui et al. 2019, "DropAttention: A Regularization Method for Fully-Connected Self-Attention Networks":
    Ã_ij = m_ij A_ij / Σ_k m_ik A_ik. The gradient runs through the sum as well.

    Args:
        p: the share of weights that are dropped.
        mode: "element" draws for each query; "column" drops a key for all queries of a sample and head.
        span: this many neighbouring keys are dropped together: a span may begin anywhere, also before the first key,
            with the rate γ for which each key is dropped with probability 1 − (1 − γ)^span = p.
        renormalise: False rescales by 1/(1 − p) instead.
    """

    def __init__(self, p: float, *, mode: Mode = "element", span: int = 1, renormalise: bool = True) -> None:
        super().__init__(p)
        checks.choice("mode", mode, Mode)
        self.mode, self.span = mode, checks.count("span", span)
        self.renormalise = checks.flag("renormalise", renormalise)

    def dropped(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        *lead, queries, keys = shape
        rows = queries if self.mode == "element" else 1
        numbers = uniform((*lead, rows, keys + self.span - 1), device)
        begins = numbers < 1 - math.pow(1 - self.p, 1 / self.span)
        dropped = begins[..., :keys]
        for shift in range(1, self.span):
            dropped = dropped | begins[..., shift : shift + keys]
        return dropped

    def extra_repr(self) -> str:
        return f"p={self.p:g}, mode={self.mode!r}, span={self.span}, renormalise={self.renormalise}"


class DropKey(AttentionTreatment):
    """DropKey: keys are masked before the softmax, for each query and head: A = softmax(S + log m), log 0 = −∞.

    Li et al. 2023, "DropKey for Vision Transformer". The same as element-wise DropAttention with renormalisation. For
    rates that fall over depth: `rates_over_depth(p, layers, "falling")`.
    """

    renormalise = True

    def dropped(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        return uniform(shape, device) < self.p


class DropHead(AttentionTreatment):
    """DropHead: all weights of a head are dropped at once, for each sample: Ã^h = m_h A^h / (1 − p).

    Zhou et al. 2020, "Scheduled DropHead: A Regularization Method for Transformer Models". A head without weights has
    the output zero. The factor is that of `functional.drop_head` under `inverted(p)`, and not the share of heads that
    happen to be left, which has no value when none is.
    """

    def dropped(self, shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
        return uniform((*shape[:-2], 1, 1), device) < self.p

    def rescaled(self, weights: Tensor) -> Tensor:
        return drop_heads(weights, self.p)


def drop_heads(input: Tensor, p: float = 0.5) -> Tensor:
    """Attention weights (*batch, heads, query, key) without some of the heads, the others divided by 1 − p."""
    if has_torch_function_unary(input):
        return handle_torch_function(drop_heads, (input,), input, p)
    return _rescaled(input, uniform((*input.shape[:-2], 1, 1), input.device) < p, p)


# ---------------------------------------------------------------------------------------------- outside attention


class Dropout(nn.Dropout):
    """`nn.Dropout`, x̃ = m x / (1 − p), with its random numbers from `uniform`.

    Srivastava et al. 2014, "Dropout: A Simple Way to Prevent Neural Networks from Overfitting".
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__(checks.rate(p))

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p, self.training)


def dropout(input: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """`torch.nn.functional.dropout` with its random numbers from `uniform`."""
    if has_torch_function_unary(input):
        return handle_torch_function(dropout, (input,), input, p, training)
    if training and p == 1:
        return input * 0.0  # as torch has it, where nothing is left to divide
    return _rescaled(input, uniform(input.shape, input.device) < p, p) if training and p > 0 else input


class DropPath(nn.Module):
    """Stochastic depth: the whole residual branch of a sample, f̃(x) = m f(x) / (1 − p), one m for each sample.

    Huang et al. 2016, "Deep Networks with Stochastic Depth"; Larsson et al. 2017, "FractalNet". The first axis is
    that of the samples.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = checks.rate(p)

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return branch
        shape = (branch.shape[0],) + (1,) * (branch.ndim - 1)
        return _rescaled(branch, uniform(shape, branch.device) < self.p, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


def _rescaled(x: Tensor, dropped: Tensor, p: float) -> Tensor:
    return x.masked_fill(dropped, 0) / (1 - p)
