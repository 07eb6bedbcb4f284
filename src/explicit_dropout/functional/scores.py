"""Dropout before the query and the key projection, measured at the attention scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import Tensor

from explicit_dropout import checks
from explicit_dropout.errors import InputError
from explicit_dropout.functional.batch import (
    Batch,
    Reduction,
    coherent_part_needed,
    flat_mask,
    outside_autocast,
    rows_zeroed,
)
from explicit_dropout.functional.pairs import AllPairs, CausalPairs, MaskedPairs, Pairs, heads_of
from explicit_dropout.noise import Noise

if TYPE_CHECKING:
    from jaxtyping import Float


class ScoreOptions(TypedDict, total=False):
    """The optional arguments that `query`, `key` and `query_key` share.

    query_bias, key_bias: biases of the two projections. The undisturbed side enters with its bias, a dropped side's
        deviation has none.
    context: what the keys are made of, (*batch, context, in), for cross-attention; default x.
    queries, keys: the projections' own outputs, biases included and heads side by side, if the forward pass has them.
    heads, key_heads: numbers of query and of key heads (grouped-query attention when they differ). The scores of every
        head count on their own; heads=1 merges them, which is the paper's literal reading.
    scale: factor on the scores; 1 as in the paper, 1/√(head width) as in most models.
    mask, context_mask: real tokens of x and of the context, (*batch, token) and (*batch, context). Without a context
        they are the same.
    attention_mask: boolean, broadcastable to (*batch, heads, token, context), True where a query may see a key. A mask
        for each sample needs an axis of size 1 for the heads.
    causal: a query sees the keys up to its own position only.
    rotary: what turns projected heads, (batch, key head, query head, token, width), by position before scoring; linear.
        Laws with a variance are refused with it: the incoherent part would depend on how far apart tokens are.
    reduction, strength: as everywhere; a token is a query.
    """

    query_bias: Tensor | None
    key_bias: Tensor | None
    context: Tensor | None
    queries: Tensor | None
    keys: Tensor | None
    heads: int
    key_heads: int | None
    scale: float
    mask: Tensor | None
    context_mask: Tensor | None
    attention_mask: Tensor | None
    causal: bool
    rotary: Callable[[Tensor], Tensor] | None
    reduction: Reduction
    strength: float


@outside_autocast
def query(
    x: Float[Tensor, "*batch token in"],
    query_weight: Float[Tensor, "query_out in"],
    key_weight: Float[Tensor, "key_out context_in"],
    noise: Noise,
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*reduced"]:
    """J_q, paper Eq. 14: dropout on the tokens before the query projection, measured at the scores.

    ½ E‖X̃ W_qᵀ Kᵀ‖² = ½ (μ² ⟨Q̂ᵀQ̂, KᵀK⟩ + v ⟨KᵀK, W_q diag(s) W_qᵀ⟩), Q̂ = X W_qᵀ, s_j = ‖X_:j‖², summed over heads.
    See `ScoreOptions` for the options.
    """
    scores = _Scores.of(x, query_weight, key_weight, noise, **options)
    return scores.reduce(_one_sided(scores.query, scores.key, scores.pairs, noise))


@outside_autocast
def key(
    x: Float[Tensor, "*batch token in"],
    query_weight: Float[Tensor, "query_out in"],
    key_weight: Float[Tensor, "key_out context_in"],
    noise: Noise,
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*reduced"]:
    """J_k, paper Eq. 15: dropout on the tokens before the key projection, measured at the scores.

    ½ E‖Q (X̃ W_kᵀ)ᵀ‖² = ½ (μ² ⟨QᵀQ, K̂ᵀK̂⟩ + v ⟨QᵀQ, W_k diag(s) W_kᵀ⟩), K̂ = X W_kᵀ, s_j = ‖X_:j‖², summed over heads.
    Without biases and under `paper(p)` it is the same function as `query`. See `ScoreOptions` for the options.
    """
    scores = _Scores.of(x, query_weight, key_weight, noise, **options)
    return scores.reduce(_one_sided(scores.key, scores.query, scores.pairs.transposed(), noise))


def _one_sided(dropped: _Side, other: _Side, pairs: Pairs, noise: Noise) -> Tensor:
    """μ² Σ (d̂_i · o_j)² + v Σ o_jᵀ W diag(x_i²) Wᵀ o_j over the pairs (i dropped, j other)."""
    others = other.full()
    energy = dropped.x.new_zeros(dropped.x.shape[0])
    if coherent_part_needed(noise):
        energy = energy + noise.mean**2 * pairs.energy(dropped.bare(), others)
    if noise.variance:
        energy = energy + noise.variance * pairs.spread(dropped.x.square(), dropped.weight, others)
    return energy


@outside_autocast
def query_key(
    x: Float[Tensor, "*batch token in"],
    query_weight: Float[Tensor, "query_out in"],
    key_weight: Float[Tensor, "key_out context_in"],
    noise: Noise,
    *,
    shared_mask: bool = False,
    **options: Unpack[ScoreOptions],
) -> Float[Tensor, "*reduced"]:
    """Dropout before both projections at once, measured at the scores: the joint form that the paper leaves open.

    The mean deviation of the scores is D = μQ̂Kᵀ + μQK̂ᵀ − μ²Q̂K̂ᵀ = Q̂(μK)ᵀ + Q_μ(μK̂)ᵀ with Q_μ = Q − μQ̂, K_μ = K − μK̂:

    ½ (‖D‖² + v ⟨C_q, K_μᵀK_μ⟩ + v ⟨C_k, Q_μᵀQ_μ⟩ + v² ⟨C_q, C_k⟩),  C = W diag(s) Wᵀ, summed over heads.

    Args:
        shared_mask: False draws a mask for each projection. True draws one for X itself, which then feeds both; that
            changes the scores of a token with itself, and needs a law with known third and fourth moments.
        options: see `ScoreOptions`.
    """
    scores = _Scores.of(x, query_weight, key_weight, noise, **options)
    checks.flag("shared_mask", shared_mask)
    if shared_mask and options.get("context") is not None:
        raise InputError("shared_mask", "False in cross-attention: queries and keys have inputs of their own", True)
    mean, variance, pairs = noise.mean, noise.variance, scores.pairs
    bare_queries, queries = scores.query.both()
    bare_keys, keys = scores.key.both()
    shrunk_queries, shrunk_keys = queries - mean * bare_queries, keys - mean * bare_keys
    energy = scores.batch.zero()
    if coherent_part_needed(noise):
        left = torch.cat((bare_queries, shrunk_queries), -1)
        right = torch.cat((mean * keys, mean * bare_keys), -1)
        energy = energy + pairs.energy(left, right)
    if variance:
        query_squares, key_squares = scores.query.x.square(), scores.key.x.square()
        query_weights, key_weights = scores.query.weight, scores.key.weight
        energy = energy + variance * pairs.spread(query_squares, query_weights, shrunk_keys)
        energy = energy + variance * pairs.transposed().spread(key_squares, key_weights, shrunk_queries)
        energy = energy + variance**2 * pairs.joint_spread(query_squares, query_weights, key_squares, key_weights)
        if shared_mask:
            energy = energy + _shared_mask_correction(scores, noise)
    return scores.reduce(energy)


def _shared_mask_correction(scores: _Scores, noise: Noise) -> Tensor:
    """What one shared mask adds to E[(ΔS_ii)²] over two independent ones, summed over tokens and heads.

    With ε = μ + η, ΔS_ii = c + bᵀη − ηᵀMη, where M = diag(x) A diag(x), A = W_qᵀW_k and b = x ⊙ (u + w) with
    u = W_qᵀk_μ, w = W_kᵀq_μ. With m₃, m₄ the central moments of ε and t = tr M, the difference of second moments is

        v²t² − 2vct + 2v Σ x²uw − 2m₃ Σ x³ A_cc (u + w) + (m₄ − 3v²) Σ x⁴ A_cc² + v² ⟨M, Mᵀ⟩.
    """
    mean, variance = noise.mean, noise.variance
    third, fourth = noise.higher_moments
    x, correction = scores.query.x, scores.batch.zero()
    counted = scores.pairs.diagonal()
    counted = x.new_ones(1, 1, 1, 1, dtype=torch.bool) if counted is None else counted
    query, key = scores.query, scores.key
    per_head = heads_of(*query.both(), *key.both(), query.weight[None], key.weight[None], counted)
    for bare_q, q, bare_k, k, query_weight, key_weight, count in per_head:
        shrunk_q, shrunk_k = q - mean * bare_q, k - mean * bare_k
        deviation = mean * (bare_q * k + shrunk_q * bare_k).sum(-1)
        u, w = shrunk_k @ query_weight[0], shrunk_q @ key_weight[0]
        product = query_weight[0].mT @ key_weight[0]
        own = product.diagonal()
        trace = (x.square() * own).sum(-1)
        per_token = (
            variance**2 * trace.square()
            - 2 * variance * deviation * trace
            + 2 * variance * (x.square() * u * w).sum(-1)
            - 2 * third * (x.pow(3) * own * (u + w)).sum(-1)
            + (fourth - 3 * variance**2) * (x.pow(4) * own.square()).sum(-1)
            + variance**2 * ((x.square() @ (product * product.mT)) * x.square()).sum(-1)
        )
        correction = correction + per_token.masked_fill(~count, 0).sum(-1)
    return correction


@dataclass(frozen=True)
class _Side:
    """The queries or the keys: their input, zero where padded, and the projection that makes them.

    x (batch, token, in), weight (group, query or 1, e, in), bias and `given` output as the caller has them.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    given: Tensor | None
    mask: Tensor | None
    rotary: Callable[[Tensor], Tensor] | None

    def bare(self) -> Tensor:
        """Without bias: Q̂ or K̂, (batch, group, query or 1, token, e)."""
        if self.given is None:
            return self._turned(self._by_head(self.x @ self.weight.flatten(0, 2).mT))
        heads = self._by_head(self.given.to(self.x.dtype))
        return self._turned(self._zeroed(heads if self.bias is None else heads - self._shift(self.bias)))

    def full(self) -> Tensor:
        """With bias: Q or K."""
        if self.given is not None:
            return self._turned(self._zeroed(self._by_head(self.given.to(self.x.dtype))))
        if self.bias is None:
            return self.bare()
        heads = self._by_head(self.x @ self.weight.flatten(0, 2).mT)
        return self._turned(self._zeroed(heads + self._shift(self.bias)))

    def both(self) -> tuple[Tensor, Tensor]:
        """Without and with bias."""
        bare = self.bare()
        return bare, bare if self.bias is None else self.full()

    def _shift(self, bias: Tensor) -> Tensor:
        groups, queries, width, _ = self.weight.shape
        return bias.to(self.x.dtype).reshape(groups, queries, 1, width)

    def _turned(self, heads: Tensor) -> Tensor:
        if self.rotary is None:
            return heads
        turned = self.rotary(heads)
        if not isinstance(turned, Tensor) or turned.shape != heads.shape:
            given = tuple(turned.shape) if isinstance(turned, Tensor) else type(turned).__name__
            raise InputError("rotary", f"a function that keeps the shape {tuple(heads.shape)} of heads", given)
        return turned.to(heads.dtype)

    def _by_head(self, projections: Tensor) -> Tensor:
        return projections.reshape(*self.x.shape[:2], *self.weight.shape[:3]).permute(0, 2, 3, 1, 4)

    def _zeroed(self, heads: Tensor) -> Tensor:
        return rows_zeroed(heads, None if self.mask is None else self.mask[:, None, None])


@dataclass(frozen=True)
class _Scores:
    """An attention layer up to its scores, checked and in the shapes of `pairs`."""

    batch: Batch
    query: _Side
    key: _Side
    pairs: Pairs
    scale: float

    @classmethod
    def of(
        cls,
        x: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        noise: Noise,
        *,
        query_bias: Tensor | None = None,
        key_bias: Tensor | None = None,
        context: Tensor | None = None,
        queries: Tensor | None = None,
        keys: Tensor | None = None,
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
    ) -> _Scores:
        batch = Batch.of(
            x, noise, reduction, strength, mask, required={"query_weight": query_weight, "key_weight": key_weight},
            query_bias=query_bias, key_bias=key_bias, context=context, queries=queries, keys=keys,
        )  # fmt: skip
        if context is None and context_mask is not None:
            raise InputError("context_mask", "None without a `context`: `mask` serves both sides", "a mask")
        source, source_mask = (x, mask) if context is None else (context, context_mask)
        checks.shaped("context", context, (*x.shape[:-2], None, None), "(*batch, context, in) for the batch of x")
        checks.boolean("context_mask", context_mask, source.shape[:-1], "(*batch, context)", x.device)
        checks.shaped("query_weight", query_weight, (None, x.shape[-1]), "(out, in) for the in of x")
        checks.shaped("key_weight", key_weight, (None, source.shape[-1]), "(out, in) for the in of the keys' input")
        out, key_out = query_weight.shape[0], key_weight.shape[0]
        checks.shaped("query_bias", query_bias, (out,), "the out of query_weight")
        checks.shaped("key_bias", key_bias, (key_out,), "the out of key_weight")
        checks.shaped("queries", queries, (*x.shape[:-1], out), "(*batch, token, out)")
        checks.shaped("keys", keys, (*source.shape[:-1], key_out), "(*batch, context, out)")
        groups, shared, width = checks.heads(out, key_out, heads, key_heads)
        grid = torch.Size((*x.shape[:-2], heads, x.shape[-2], source.shape[-2]))
        checks.broadcastable("attention_mask", attention_mask, grid, "(*batch, heads, token, context)", x.device)
        checks.flag("causal", causal)
        if causal and x.shape[-2] != source.shape[-2]:
            numbers = f"{x.shape[-2]} queries and {source.shape[-2]} keys"
            raise InputError("causal", "False where queries and keys differ in number; use attention_mask", numbers)
        if rotary is not None and not callable(rotary):
            raise InputError("rotary", "a function of projected heads", repr(rotary))
        if rotary is not None and noise.variance:
            raise InputError("noise", "of variance 0 (such as paper(p)) under rotary embeddings", noise)
        pairs: Pairs = CausalPairs() if causal else AllPairs()
        if attention_mask is not None:
            pairs = MaskedPairs(_by_group(attention_mask, grid, groups), 1 if causal else 0)
        flat_source_mask = flat_mask(source_mask, batch.size)
        return cls(
            batch=batch,
            query=_Side(
                x=batch.tokens(x),
                weight=torch.unflatten(batch.cast(query_weight), 0, (groups, shared, width)),
                bias=query_bias,
                given=queries,
                mask=batch.mask,
                rotary=rotary,
            ),
            key=_Side(
                x=rows_zeroed(batch.flat(source), flat_source_mask),
                weight=torch.unflatten(batch.cast(key_weight), 0, (groups, 1, width)),
                bias=key_bias,
                given=keys,
                mask=flat_source_mask,
                rotary=rotary,
            ),
            pairs=pairs,
            scale=checks.number("scale", scale, "a finite number > 0", low=math.ulp(0)),
        )

    def reduce(self, energy: Tensor) -> Tensor:
        return self.batch.reduce(self.scale**2 * energy)


def _by_group(mask: Tensor, grid: torch.Size, groups: int) -> Tensor:
    """A mask that broadcasts to (*batch, heads, token, context) as `MaskedPairs` wants it, equal parts not repeated."""
    mask = mask.reshape((1,) * (len(grid) - mask.ndim) + tuple(mask.shape))
    *lead, heads, _, _ = mask.shape
    lead = [1] * len(lead) if math.prod(lead) == 1 else list(grid[:-3])
    split = (1, 1) if heads == 1 else (groups, heads // groups)
    return mask.expand(*lead, heads, *grid[-2:]).reshape(math.prod(lead), *split, *grid[-2:])
