"""Which query meets which key, and the energies of the scores summed over those pairs.

With every pair allowed, ‖Q Kᵀ‖² = ⟨QᵀQ, KᵀK⟩ needs two small Gram matrices. A causal order keeps that identity block by
block, so its cost stays linear in the number of tokens. An arbitrary boolean mask is summed tile by tile, recomputed in
the backward pass. No kind of pairs ever stores an N×N matrix of scores.

Shapes: `group` key heads, each shared by `query` heads (`one` = 1 for keys); e is the width of a head.
    queries (batch, group, query, token, e)      query weight (group, query, e, in)
    keys    (batch, group, one, context, e)      key weight   (group, one, e, in)
    squares (batch, token, in), the element-wise square of the input that the dropout acts on
Every function returns one number for each sample, shape (batch,).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from explicit_dropout.functional.batch import per_sample

TILE_ELEMENTS = 2**22
"""How many scores of a tile are alive at once, over batch and heads, when a mask forces tiles."""


class Pairs(Protocol):
    """The allowed (query i, key j) pairs; all sums below run over them."""

    def energy(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Σ_ij (q_i · k_j)²."""

    def spread(self, squares: Tensor, weight: Tensor, others: Tensor) -> Tensor:
        """Σ_ij k_jᵀ W diag(x_i²) Wᵀ k_j: the squares belong to the queries, the others are the keys."""

    def joint_spread(
        self, query_squares: Tensor, query_weight: Tensor, key_squares: Tensor, key_weight: Tensor
    ) -> Tensor:
        """Σ_ij ⟨W_q diag(x_i²) W_qᵀ, W_k diag(y_j²) W_kᵀ⟩."""

    def diagonal(self) -> Tensor | None:
        """Which pairs (i, i) are allowed, (batch or 1, group or 1, query or 1, token); None for all."""

    def transposed(self) -> Pairs:
        """The same pairs with the roles of query and key exchanged."""


@dataclass(frozen=True)
class AllPairs:
    """Every query meets every key."""

    def energy(self, queries: Tensor, keys: Tensor) -> Tensor:
        return per_sample(_gram(queries) * _gram(keys))

    def spread(self, squares: Tensor, weight: Tensor, others: Tensor) -> Tensor:
        return per_sample(_gram(others) * _weight_gram(weight, squares.sum(-2)))

    def joint_spread(
        self, query_squares: Tensor, query_weight: Tensor, key_squares: Tensor, key_weight: Tensor
    ) -> Tensor:
        query_gram = _weight_gram(query_weight, query_squares.sum(-2))
        return per_sample(query_gram * _weight_gram(key_weight, key_squares.sum(-2)))

    def diagonal(self) -> Tensor | None:
        return None

    def transposed(self) -> AllPairs:
        return self


class _SomePairs(ABC):
    """What causal and masked pairs share: the spreads, once it is known which squares reach a key."""

    @abstractmethod
    def reach(self, squares: Tensor) -> Tensor:
        """Y_j = Σ_{i that may attend to j} x_i², (batch, group or 1, query or 1, context, in)."""

    def spread(self, squares: Tensor, weight: Tensor, others: Tensor) -> Tensor:
        # Σ_j Σ_c Y_jc (k_j · W_:c)², a head at a time: k W has the width of the input for each head.
        reached = self.reach(squares)
        energy = squares.new_zeros(squares.shape[0])
        for head_others, head_weight, head_reached in heads_of(others, weight[None], reached):
            energy = energy + _recomputed(_weighted_energy, head_others, head_weight[0], head_reached)
        return energy

    def joint_spread(
        self, query_squares: Tensor, query_weight: Tensor, key_squares: Tensor, key_weight: Tensor
    ) -> Tensor:
        # Σ_j Y_jᵀ (W_qᵀ W_k)∘² y_j², with the heads summed first where the pairs are the same for all of them.
        reached = self.reach(query_squares)
        squared_products = (query_weight.mT @ key_weight).square()
        if reached.shape[1:3] == (1, 1):
            squared_products = squared_products.sum((0, 1), keepdim=True)
        return per_sample((reached @ squared_products) * key_squares[:, None, None])


@dataclass(frozen=True)
class CausalPairs(_SomePairs):
    """Query i meets the keys j ≤ i (j ≥ i when `flipped`)."""

    flipped: bool = False

    def energy(self, queries: Tensor, keys: Tensor) -> Tensor:
        # A block of queries meets the blocks before it whole, through a Gram matrix, and its own block by half.
        if self.flipped:
            queries, keys = queries.flip(-2), keys.flip(-2)
        tile = max(16, queries.shape[-1])
        queries, keys = _blocks(queries, tile), _blocks(keys, tile)
        earlier = _gram(keys).cumsum(-3)[..., :-1, :, :]
        across = per_sample(_gram(queries[..., 1:, :, :]) * earlier)
        return across + per_sample((queries @ keys.mT).tril().square())

    def reach(self, squares: Tensor) -> Tensor:
        summed = squares.cumsum(-2) if self.flipped else squares.flip(-2).cumsum(-2).flip(-2)
        return summed[:, None, None]

    def diagonal(self) -> Tensor | None:
        return None

    def transposed(self) -> CausalPairs:
        return CausalPairs(flipped=not self.flipped)


@dataclass(frozen=True)
class MaskedPairs(_SomePairs):
    """Query i meets key j where `allowed[..., i, j]`, and `order` agrees: 1 for j ≤ i, −1 for j ≥ i, 0 for any.

    `allowed` is boolean, (batch or 1, group or 1, query or 1, token, context).
    """

    allowed: Tensor
    order: Literal[-1, 0, 1] = 0

    def energy(self, queries: Tensor, keys: Tensor) -> Tensor:
        energy = queries.new_zeros(queries.shape[0])
        rows = _tile_rows(queries.shape[0] * queries.shape[1] * queries.shape[2] * keys.shape[-2])
        for start in range(0, queries.shape[-2], rows):
            tile = self._tile(start, rows)
            energy = energy + _recomputed(_tile_energy, queries[..., start : start + rows, :], keys, tile)
        return energy

    def reach(self, squares: Tensor) -> Tensor:
        pairs = self.transposed()
        inputs = squares[:, None, None]
        rows = _tile_rows(self.allowed.shape[:-2].numel() * squares.shape[-2])
        tiles = [
            _recomputed(_tile_reach, pairs._tile(start, rows), inputs)
            for start in range(0, pairs.allowed.shape[-2], rows)
        ]
        if not tiles:
            return squares.new_zeros(*squares.shape[:1], *self.allowed.shape[1:3], 0, squares.shape[-1])
        return torch.cat(tiles, -2)

    def diagonal(self) -> Tensor | None:
        return self.allowed.diagonal(dim1=-2, dim2=-1)

    def transposed(self) -> MaskedPairs:
        flipped: dict[int, Literal[-1, 0, 1]] = {-1: 1, 0: 0, 1: -1}
        return MaskedPairs(self.allowed.mT, flipped[self.order])

    def _tile(self, start: int, rows: int) -> Tensor:
        tile = self.allowed[..., start : start + rows, :]
        if self.order:
            query = torch.arange(start, start + tile.shape[-2], device=tile.device)[:, None]
            key = torch.arange(tile.shape[-1], device=tile.device)
            tile = tile & (key <= query if self.order > 0 else key >= query)
        return tile


def heads_of(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors (batch, group or 1, query or 1, …) head by head, those with fewer heads repeated."""
    groups = max(tensor.shape[1] for tensor in tensors)
    queries = max(tensor.shape[2] for tensor in tensors)
    for group in range(groups):
        for query in range(queries):
            yield tuple(t[:, group if t.shape[1] > 1 else 0, query if t.shape[2] > 1 else 0] for t in tensors)


def _recomputed(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """The function's value, its intermediates dropped and computed again in the backward pass."""
    return cast("Tensor", checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False))


def _tile_energy(queries: Tensor, keys: Tensor, allowed: Tensor) -> Tensor:
    return per_sample((queries @ keys.mT).masked_fill(~allowed, 0).square())


def _tile_reach(allowed: Tensor, squares: Tensor) -> Tensor:
    return allowed.to(squares.dtype) @ squares


def _weighted_energy(others: Tensor, weight: Tensor, squares: Tensor) -> Tensor:
    return per_sample((others @ weight).square() * squares)


def _tile_rows(row_elements: int) -> int:
    return max(1, TILE_ELEMENTS // max(1, row_elements))


def _blocks(tokens: Tensor, size: int) -> Tensor:
    """(…, token, e) as (…, block, size, e), filled up with zeros and with one block more.

    The spare block changes no sum. With it there are always two blocks and something to pad, so that one compiled graph
    serves every number of tokens.
    """
    blocks = -(-tokens.shape[-2] // size) + 1
    padded = torch.nn.functional.pad(tokens, (0, 0, 0, blocks * size - tokens.shape[-2]))
    return torch.unflatten(padded, -2, (blocks, size))


def _gram(tokens: Tensor) -> Tensor:
    """XᵀX over the token axis."""
    return tokens.mT @ tokens


def _weight_gram(weight: Tensor, squares: Tensor) -> Tensor:
    """C = W diag(s) Wᵀ for each sample and head: (group, query, e, in), (batch, in) → (batch, group, query, e, e)."""
    if squares.shape[0] <= weight.shape[-2]:
        return (weight * squares[:, None, None, None]) @ weight.mT
    products = weight[..., :, None, :] * weight[..., None, :, :]
    return torch.unflatten((squares @ products.flatten(0, -2).mT), -1, products.shape[:-1])
