"""Seeded choices: which examples train, validate and test, which are kept, and whose labels are replaced.

All of them follow from integer arithmetic alone, so that the same seed gives the same examples under every version of
NumPy and torch and on every machine.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]
Mask = NDArray[np.bool_]


def random_integers(n: int, seed: int, purpose: str) -> NDArray[np.uint64]:
    """n independent 64-bit numbers that depend on seed and purpose only (SplitMix64 counters)."""
    start = int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        state = np.uint64(start) + np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def shuffled(n: int, seed: int, purpose: str) -> Integers:
    """0 … n − 1 in a seeded order."""
    return np.argsort(random_integers(n, seed, purpose), kind="stable").astype(np.int64)


def apportion(weights: Integers, total: int) -> Integers:
    """Whole numbers that add up to `total`, proportional to the weights (largest remainders, then lowest index)."""
    whole = int(weights.sum())
    exact = weights.astype(object) * total  # Python integers: no overflow, no rounding
    quotas = np.array([value // whole for value in exact], dtype=np.int64)
    remainders = np.array([value % whole for value in exact], dtype=np.int64)
    quotas[np.argsort(-remainders, kind="stable")[: total - int(quotas.sum())]] += 1
    return quotas


def choose(
    strata: Integers, groups: Integers, total: int, seed: int, purpose: str, *, count_groups: bool = False
) -> Mask:
    """`total` examples, spread over the strata as all are, with every group taken as a whole or not at all.

    Args:
        strata: class of each example; a group counts for the class of its first member.
        groups: examples with the same number stay together.
        count_groups: `total` and the strata count groups (videos) instead of examples.

    Where groups of several do not fit, the number chosen falls short of `total` by less than the smallest group left.
    """
    _, first, member, sizes = np.unique(groups, return_index=True, return_inverse=True, return_counts=True)
    _, stratum = np.unique(strata[first], return_inverse=True)
    weight = np.ones(len(first), dtype=np.int64) if count_groups else sizes.astype(np.int64)
    quotas = apportion(np.bincount(stratum, weights=weight).astype(np.int64), total)
    left, missing = quotas.tolist(), total
    taken = np.zeros(len(first), dtype=np.bool_)
    order = shuffled(len(first), seed, purpose).tolist()
    for item in order:
        if weight[item] <= left[stratum[item]]:
            taken[item] = True
            left[stratum[item]] -= int(weight[item])
            missing -= int(weight[item])
    for item in order if missing else []:  # what strata of large groups could not fill comes from any
        if not taken[item] and weight[item] <= missing:
            taken[item] = True
            missing -= int(weight[item])
    return taken[member]


def noisy(labels: NDArray[np.generic], classes: int, share: float, seed: int) -> tuple[Mask, Integers]:
    """Whose label is replaced (exactly the share, rounded), and the class drawn for everyone, all equally likely."""
    replaced = np.zeros(len(labels), dtype=np.bool_)
    replaced[shuffled(len(labels), seed, "label noise")[: round(share * len(labels))]] = True
    drawn = random_integers(len(labels), seed, "noisy class") % np.uint64(classes)
    return replaced, drawn.astype(np.int64)
