"""The slow truth: the same names as `functional`, computed as the paper writes them, sample by sample.

Every function takes the arguments of its namesake and returns the same number. What the forward pass may already have
(`output`, `queries`, `keys`, `attended`) is accepted and computed again. The second moment B of the deviation stands as
a matrix and the penalty as a trace; pairs of tokens are summed one by one where a mask forbids some. `monte_carlo` does
without any formula: it draws masks and looks. For tests, for teaching, and for doubting `functional`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor

from explicit_dropout.errors import InputError
from explicit_dropout.functional.batch import Reduction
from explicit_dropout.functional.layers import LinearOptions
from explicit_dropout.functional.scores import ScoreOptions
from explicit_dropout.noise import Noise
from explicit_dropout.sampling import Estimate, monte_carlo

__all__ = [
    "Estimate",
    "attended_second_moment",
    "attended_value",
    "attention_weights",
    "conv",
    "drop_head",
    "drop_path",
    "feed_forward",
    "hidden",
    "key",
    "linear",
    "monte_carlo",
    "query",
    "query_key",
    "second_moment",
    "value",
]


def second_moment(X: Tensor, noise: Noise) -> Tensor:
    """B = E[X̃ᵀX̃] (Eqs. 12, 26) = μ² XᵀX + v (XᵀX) ⊙ I.

    The paper stops at p² XᵀX (Eqs. 13, 46). Under an exact law an element also meets itself, which adds its variance.
    """
    gram = X.mT @ X
    return noise.mean**2 * gram + noise.variance * torch.diag(gram.diagonal())


def attended_second_moment(X: Tensor, Y: Tensor, noise: Noise) -> Tensor:
    """ψ = E[X̃ᵀ Y X̃] (Eq. 71) = μ² XᵀYX (Eq. 92) + v diag_i(Σ_a Y_aa X_ai²)."""
    return noise.mean**2 * X.mT @ Y @ X + noise.variance * torch.diag(Y.diagonal() @ X.square())


def linear(
    x: Tensor,
    weight: Tensor,
    noise: Noise,
    *,
    bias: Tensor | None = None,  # noqa: ARG001
    output: Tensor | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """½ Tr(B WᵀW): Eqs. 58–61 and 97–100; as a fourfold sum, Eq. 106."""

    def penalty(sample: tuple[int, ...]) -> Tensor:
        X = _real(x, mask, sample)
        return 0.5 * torch.trace(second_moment(X, noise) @ (weight.mT @ weight))

    return _reduce(penalty, x.shape[:-1], mask, reduction, strength)


def value(x: Tensor, weight: Tensor, noise: Noise, **options: Unpack[LinearOptions]) -> Tensor:
    """J_v = ½ Tr(B W_vᵀW_v): Eqs. 16, 61."""
    return linear(x, weight, noise, **options)


def feed_forward(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    noise: Noise,
    *,
    biases: Sequence[Tensor | None] | None = None,  # noqa: ARG001
    outputs: Sequence[Tensor | None] | None = None,  # noqa: ARG001
    **options: Unpack[LinearOptions],
) -> Tensor:
    """J_ff = Σ_m ½ Tr(B_m W_mᵀW_m): Eqs. 19, 22, 100."""
    terms = [linear(x, weight, noise, **options) for x, weight in zip(inputs, weights, strict=True)]
    return torch.stack(terms).sum(0)


def query(x: Tensor, query_weight: Tensor, key_weight: Tensor, noise: Noise, **options: Unpack[ScoreOptions]) -> Tensor:
    """J_q = ½ Tr(B Λ_q), Λ_q = W_qᵀ KᵀK W_q: Eqs. 10–14, 23–26. Without bias KᵀK is W_k XᵀX W_kᵀ, as in Eq. 12."""

    def penalty(head: _Head) -> Tensor:
        if head.allowed is None:
            if head.biasless:
                Lambda = (head.Wq.mT @ head.Wk) @ (head.Y.mT @ head.Y) @ (head.Wk.mT @ head.Wq)
            else:
                Lambda = head.Wq.mT @ (head.K.mT @ head.K) @ head.Wq
            return 0.5 * torch.trace(second_moment(head.X, noise) @ Lambda)
        total = head.X.new_zeros(())
        for i in range(head.X.shape[0]):
            B, K = second_moment(head.X[i : i + 1], noise), head.K[head.allowed[i]]
            total = total + 0.5 * torch.trace(B @ (head.Wq.mT @ K.mT @ K @ head.Wq))
        return total

    return _over_heads(penalty, ("query",), noise, x, query_weight, key_weight, **options)


def key(x: Tensor, query_weight: Tensor, key_weight: Tensor, noise: Noise, **options: Unpack[ScoreOptions]) -> Tensor:
    """J_k = ½ Tr(B Λ_k), Λ_k = W_kᵀ QᵀQ W_k: Eqs. 15, 47–52. Without bias QᵀQ is W_q XᵀX W_qᵀ, as in Eq. 15."""

    def penalty(head: _Head) -> Tensor:
        if head.allowed is None:
            if head.biasless:
                Lambda = (head.Wk.mT @ head.Wq) @ (head.X.mT @ head.X) @ (head.Wq.mT @ head.Wk)
            else:
                Lambda = head.Wk.mT @ (head.Q.mT @ head.Q) @ head.Wk
            return 0.5 * torch.trace(second_moment(head.Y, noise) @ Lambda)
        total = head.Y.new_zeros(())
        for j in range(head.Y.shape[0]):
            B, Q = second_moment(head.Y[j : j + 1], noise), head.Q[head.allowed[:, j]]
            total = total + 0.5 * torch.trace(B @ (head.Wk.mT @ Q.mT @ Q @ head.Wk))
        return total

    return _over_heads(penalty, ("key",), noise, x, query_weight, key_weight, **options)


def query_key(
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    noise: Noise,
    *,
    shared_mask: bool = False,
    **options: Unpack[ScoreOptions],
) -> Tensor:
    """½ Σ_ij E[(q̃_i·k_j + q_i·k̃_j − q̃_i·k̃_j)²], the square multiplied out, pair by pair.

    With M = E[q̃q̃ᵀ] = W_q B_i W_qᵀ, N = E[k̃k̃ᵀ] = W_k B_j W_kᵀ and the means m = μq̂_i, n = μk̂_j of q̃ and k̃:
    kᵀMk + qᵀNq + tr(MN) + 2 (m·k)(q·n) − 2 kᵀMn − 2 qᵀNm. A shared mask ties the two sides of a pair (i, i).
    """

    def penalty(head: _Head) -> Tensor:
        total = head.X.new_zeros(())
        for i, j in itertools.product(range(head.X.shape[0]), range(head.Y.shape[0])):
            if head.allowed is not None and not head.allowed[i, j]:
                continue
            if shared_mask and i == j:
                total = total + 0.5 * _one_mask_twice(head, i, noise)
                continue
            q, k = head.Q[i], head.K[j]
            m, n = noise.mean * head.Wq @ head.X[i], noise.mean * head.Wk @ head.Y[j]
            M = head.Wq @ second_moment(head.X[i : i + 1], noise) @ head.Wq.mT
            N = head.Wk @ second_moment(head.Y[j : j + 1], noise) @ head.Wk.mT
            squares = k @ M @ k + q @ N @ q + torch.trace(M @ N)
            products = (m @ k) * (q @ n) - k @ M @ n - q @ N @ m
            total = total + 0.5 * (squares + 2 * products)
        return total

    return _over_heads(penalty, ("query", "key"), noise, x, query_weight, key_weight, **options)


def _one_mask_twice(head: _Head, i: int, noise: Noise) -> Tensor:
    """E[(aᵀε − εᵀMε)²] for one token whose query and key see the same ε: all moments up to the fourth, spelt out."""
    x, width = head.X[i], head.X.shape[1]
    a = x * (head.Wq.mT @ head.K[i] + head.Wk.mT @ head.Q[i])
    M = x[:, None] * (head.Wq.mT @ head.Wk) * x[None, :]
    raw = _raw_moments(noise)
    second, third, fourth = (_moment_tensor(raw, width, order).to(x) for order in (2, 3, 4))
    return (
        torch.einsum("a,b,ab->", a, a, second)
        - 2 * torch.einsum("a,bc,abc->", a, M, third)
        + torch.einsum("ab,cd,abcd->", M, M, fourth)
    )


def _raw_moments(noise: Noise) -> list[float]:
    """E[ε⁰], …, E[ε⁴], from the definition of each law."""
    orders = range(5)
    match noise.law:
        case "paper":
            return [noise.mean**k for k in orders]
        case "bernoulli":  # ε = 1 with probability p, else 0
            return [noise.rate if k else 1.0 for k in orders]
        case "inverted":  # ε = 1 with probability p, else 1 − 1/(1 − p)
            p = noise.rate
            return [p + (1 - p) * (1 - 1 / (1 - p)) ** k for k in orders]
        case "gaussian":
            return [1.0, 0.0, noise.variance, 0.0, 3 * noise.variance**2]
        case _:
            raise InputError("noise", "a named law (paper, bernoulli, inverted, gaussian)", noise)


def _moment_tensor(raw: list[float], width: int, order: int) -> Tensor:
    """E[ε_a ε_b …] for i.i.d. elements: the product of a raw moment for each element that occurs."""
    moments = torch.empty((width,) * order, dtype=torch.float64)
    for index in itertools.product(range(width), repeat=order):
        product = 1.0
        for element in set(index):
            product *= raw[index.count(element)]
        moments[index] = product
    return moments


def attended_value(
    x: Tensor,
    value_weight: Tensor,
    attention: Tensor | None,
    noise: Noise,
    *,
    value_bias: Tensor | None = None,  # noqa: ARG001
    attended: Tensor | None = None,  # noqa: ARG001
    heads: int = 1,
    key_heads: int | None = None,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """J_av = ½ Tr(ψ W_vᵀW_v) with Y = AᵀA: Eqs. 17, 67–72."""
    if attention is None:
        raise InputError("attention", "given: the trace is written with A", None)
    groups = key_heads or heads

    def penalty(sample: tuple[int, ...]) -> Tensor:
        X, total = _real(x, context_mask, sample), x.new_zeros(())
        for h in range(heads):
            A = _real(attention[sample][h], mask, sample, of_sample=True)
            A = A if context_mask is None else A[:, context_mask[sample]]
            W = value_weight.chunk(groups)[h * groups // heads]
            total = total + 0.5 * torch.trace(attended_second_moment(X, A.mT @ A, noise) @ (W.mT @ W))
        return total

    return _reduce(penalty, (*x.shape[:-2], attention.shape[-2]), mask, reduction, strength)


def attention_weights(
    attention: Tensor,
    values: Tensor,
    noise: Noise,
    *,
    mask: Tensor | None = None,
    context_mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """½ Tr(B V Vᵀ), the rows of A in the place of tokens: B = E[ÃᵀÃ]."""
    heads, groups = attention.shape[-3], values.shape[-3]

    def penalty(sample: tuple[int, ...]) -> Tensor:
        total = attention.new_zeros(())
        for h in range(heads):
            A, V = _real(attention[sample][h], mask, sample, of_sample=True), values[sample][h * groups // heads]
            if context_mask is not None:
                A, V = A[:, context_mask[sample]], V[context_mask[sample]]
            total = total + 0.5 * torch.trace(second_moment(A, noise) @ V @ V.mT)
        return total

    return _reduce(penalty, (*attention.shape[:-3], attention.shape[-2]), mask, reduction, strength)


def drop_head(
    x: Tensor,
    weight: Tensor,
    noise: Noise,
    *,
    heads: int,
    bias: Tensor | None = None,  # noqa: ARG001
    output: Tensor | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """½ Σ_gh E[ε_g ε_h] ⟨O_g, O_h⟩ with O_h = o_h W_hᵀ, one ε for each head."""

    def penalty(sample: tuple[int, ...]) -> Tensor:
        X, total = _real(x, mask, sample), x.new_zeros(())
        outputs = [o @ W.mT for o, W in zip(X.chunk(heads, -1), weight.chunk(heads, -1), strict=True)]
        for g, h in itertools.product(range(heads), repeat=2):
            moment = noise.mean**2 + (noise.variance if g == h else 0)
            total = total + 0.5 * moment * (outputs[g] * outputs[h]).sum()
        return total

    return _reduce(penalty, x.shape[:-1], mask, reduction, strength)


def hidden(
    x: Tensor,
    noise: Noise,
    *,
    mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """½ Tr(B): the linear form with the identity for its weight."""

    def penalty(sample: tuple[int, ...]) -> Tensor:
        return 0.5 * torch.trace(second_moment(_real(x, mask, sample), noise))

    return _reduce(penalty, x.shape[:-1], mask, reduction, strength)


def drop_path(
    output: Tensor,
    noise: Noise,
    *,
    mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """½ E[ε²] Tr(f fᵀ), one ε for the whole sample."""

    def penalty(sample: tuple[int, ...]) -> Tensor:
        f = _real(output, mask, sample)
        return 0.5 * (noise.mean**2 + noise.variance) * torch.trace(f @ f.mT)

    return _reduce(penalty, output.shape[:-1], mask, reduction, strength)


def conv(
    x: Tensor,
    weight: Tensor,
    noise: Noise,
    *,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] | str = 0,
    dilation: int | tuple[int, ...] = 1,
    groups: int = 1,
    bias: Tensor | None = None,  # noqa: ARG001
    output: Tensor | None = None,  # noqa: ARG001
    mask: Tensor | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """½ Σ_positions Tr(B WᵀW), B the second moment of the patch under the kernel, as the paper's Section 5 proposes."""
    kernel = weight.shape[2:]
    rank = len(kernel)
    strides, dilations = _tuple(stride, rank), _tuple(dilation, rank)
    spans = [step * (size - 1) for step, size in zip(dilations, kernel, strict=True)]
    if padding == "same":
        edges = [(span // 2, span - span // 2) for span in spans]
    else:
        sizes = (0,) * rank if isinstance(padding, str) else _tuple(padding, rank)
        edges = [(size, size) for size in sizes]
    lead = x.shape[: -rank - 1]
    space = [size + sum(edge) for size, edge in zip(x.shape[-rank:], edges, strict=True)]
    starts = [range(0, space[d] - spans[d], strides[d]) for d in range(rank)]
    windows = [
        tuple(slice(s, s + spans[d] + 1, dilations[d]) for d, s in enumerate(start))
        for start in itertools.product(*starts)
    ]
    flat_edges = [size for edge in reversed(edges) for size in edge]
    padded_mask = None if mask is None else torch.nn.functional.pad(mask, flat_edges)
    counted = None
    if padded_mask is not None:
        whole = (slice(None),) * len(lead)
        touched = [padded_mask[(*whole, *window)].flatten(-rank).any(-1) for window in windows]
        counted = torch.stack(touched, -1)

    def penalty(sample: tuple[int, ...]) -> Tensor:
        real = x[sample] if mask is None else torch.where(mask[sample], x[sample], 0)
        maps, total = torch.nn.functional.pad(real, flat_edges), x.new_zeros(())
        for window in windows:
            for channels, W in zip(maps.chunk(groups), weight.chunk(groups), strict=True):
                patch = channels[(slice(None), *window)].reshape(1, -1)
                matrix = W.flatten(1)
                total = total + 0.5 * torch.trace(second_moment(patch, noise) @ (matrix.mT @ matrix))
        return total

    return _reduce(penalty, (*lead, len(windows)), counted, reduction, strength)


class _Head:
    """The matrices of one sample and head; padded tokens are not in them."""

    def __init__(
        self,
        X: Tensor,
        Y: Tensor,
        query_layer: tuple[Tensor, Tensor | None],
        key_layer: tuple[Tensor, Tensor | None],
        allowed: Tensor | None,
    ) -> None:
        self.X, self.Y, self.allowed = X, Y, allowed
        (self.Wq, query_bias), (self.Wk, key_bias) = query_layer, key_layer
        self.biasless = query_bias is None and key_bias is None
        self.Q = X @ self.Wq.mT if query_bias is None else X @ self.Wq.mT + query_bias
        self.K = Y @ self.Wk.mT if key_bias is None else Y @ self.Wk.mT + key_bias


def _over_heads(
    penalty: Callable[[_Head], Tensor],
    dropped: Sequence[str],
    noise: Noise,
    x: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    *,
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
    rotary: Callable[[Tensor], Tensor] | None = None,
    reduction: Reduction = "token",
    strength: float = 1.0,
) -> Tensor:
    """The penalty summed over the heads of every sample.

    Under rotary embeddings the noise has no variance, so the dropped sides simply shrink: scores before less after.
    """
    if rotary is not None and noise.variance:
        raise InputError("noise", "of variance 0 (such as paper(p)) under rotary embeddings", noise)
    source, source_mask = (x, mask) if context is None else (context, context_mask)
    groups, lead = key_heads or heads, x.shape[:-2]
    allowed = None
    if causal or attention_mask is not None:
        allowed = torch.ones(*lead, heads, x.shape[-2], source.shape[-2], dtype=torch.bool, device=x.device)
        allowed = allowed.tril() if causal else allowed
        allowed = allowed if attention_mask is None else allowed & attention_mask

    def head_layer(weight: Tensor, bias: Tensor | None, index: int, count: int) -> tuple[Tensor, Tensor | None]:
        return weight.chunk(count)[index], None if bias is None else bias.chunk(count)[index]

    def shrunk(head: _Head, rotary: Callable[[Tensor], Tensor], sample: tuple[int, ...]) -> Tensor:
        def turned(tokens: Tensor, real: Tensor | None) -> Tensor:
            """Rotation by position in the padded sample, which all batches of the caller's rotation share."""
            places = slice(None) if real is None else real[sample]
            full = tokens.new_zeros(1, 1, 1, len(tokens) if real is None else real.shape[-1], tokens.shape[-1])
            full[..., places, :] = tokens
            return rotary(full)[0, 0, 0, places]

        q_shrinks, k_shrinks = (noise.mean * (side in dropped) for side in ("query", "key"))
        after_q = head.Q - q_shrinks * head.X @ head.Wq.mT
        after_k = head.K - k_shrinks * head.Y @ head.Wk.mT
        before = turned(head.Q, mask) @ turned(head.K, source_mask).mT
        difference = before - turned(after_q, mask) @ turned(after_k, source_mask).mT
        return difference if head.allowed is None else difference[head.allowed]

    def sample_penalty(sample: tuple[int, ...]) -> Tensor:
        X, Y = _real(x, mask, sample), _real(source, source_mask, sample)
        total = x.new_zeros(())
        for h in range(heads):
            pairs = None if allowed is None else allowed[sample][h]
            if pairs is not None and mask is not None:
                pairs = pairs[mask[sample]]
            if pairs is not None and source_mask is not None:
                pairs = pairs[:, source_mask[sample]]
            query_layer = head_layer(query_weight, query_bias, h, heads)
            key_layer = head_layer(key_weight, key_bias, h * groups // heads, groups)
            head = _Head(X, Y, query_layer, key_layer, pairs)
            total = total + (penalty(head) if rotary is None else 0.5 * shrunk(head, rotary, sample).square().sum())
        return scale**2 * total

    return _reduce(sample_penalty, x.shape[:-1], mask, reduction, strength)


def _real(x: Tensor, mask: Tensor | None, sample: tuple[int, ...], *, of_sample: bool = False) -> Tensor:
    """The rows of one sample that count; `of_sample` when x is that sample already."""
    rows = x if of_sample else x[sample]
    return rows if mask is None else rows[mask[sample]]


def _reduce(
    penalty: Callable[[tuple[int, ...]], Tensor],
    tokens: Sequence[int],
    mask: Tensor | None,
    reduction: Reduction,
    strength: float,
) -> Tensor:
    lead = torch.Size(tokens[:-1])
    penalties = [strength * penalty(sample) for sample in itertools.product(*map(range, lead))]
    stacked = torch.stack(penalties).reshape(lead) if penalties else torch.zeros(lead)
    if reduction == "none":
        return stacked
    counted = torch.Size(tokens).numel() if mask is None else int(mask.sum())
    return stacked.sum() / max(lead.numel() if reduction == "sample" else counted, 1)


def _tuple(size: int | tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (size,) * rank if isinstance(size, int) else tuple(size)
