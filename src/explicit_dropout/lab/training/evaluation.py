"""Scores of a model on validation and test examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from explicit_dropout.lab import metrics
from explicit_dropout.lab.data import Dataset, Split

EVALUATION_BATCH = 1024

TRAINING_EXAMPLES_SCORED = 10_000
"""At most so many training examples are scored at the end, for the generalisation gap."""


@torch.no_grad()
def predictions(
    predict: Callable[[Tensor], Tensor], split: Split, examples: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (float32) and targets of so many examples, spread evenly over the split, or of all, in order."""
    logits, targets = [], []
    for index in torch.split(spread(len(split), examples).to(split.device), EVALUATION_BATCH):
        x, y = split.batch(index)
        logits.append(predict(x).float())
        targets.append(y)
    return torch.cat(logits), torch.cat(targets)


def spread(n: int, most: int | None = None) -> Tensor:
    """Numbers of at most so many of n examples: i n / m for i < m, rounded down.

    The first ones would not do: examples may lie in the order of their classes, or of the videos that they are from.
    """
    m = n if most is None else min(n, most)
    return torch.arange(m) * n // max(m, 1)


def scores(dataset: Dataset, logits: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Everything that is reported of a set of examples. A number that is not finite is None: JSON knows no NaN."""
    found = {
        "accuracy": metrics.accuracy(logits, targets),
        "loss": metrics.loss(logits, targets),
        "calibration_error": metrics.calibration_error(logits.nan_to_num(), targets),
    }
    if dataset.metric == "mean_average_precision":
        positive = dataset.positive(targets)
        found["mean_average_precision"] = metrics.mean_average_precision(dataset.scores(logits).nan_to_num(), positive)
    return {name: finite(value) for name, value in found.items()}


def finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
