"""Scores of a model on validation and test examples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from explicit_dropout.lab import metrics
from explicit_dropout.lab.data import Dataset, Split

EVALUATION_BATCH = 1024


@torch.no_grad()
def predictions(
    predict: Callable[[Tensor], Tensor], split: Split, examples: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits (float32) and targets of the first so many examples, or all, in order."""
    logits, targets = [], []
    for index in torch.split(torch.arange(len(split), device=split.device)[:examples], EVALUATION_BATCH):
        x, y = split.batch(index)
        logits.append(predict(x).float())
        targets.append(y)
    return torch.cat(logits), torch.cat(targets)


def scores(dataset: Dataset, logits: Tensor, targets: Tensor) -> dict[str, float | None]:
    """Everything that is reported of a set of examples. A number that is not finite is None: JSON knows no NaN."""
    found = {
        "accuracy": metrics.accuracy(logits, targets),
        "loss": metrics.loss(logits, targets),
        "calibration_error": metrics.calibration_error(logits.nan_to_num(), targets),
    }
    if dataset.metric == "mean_average_precision":
        positive = targets[:, dataset.scored_classes] > 0
        found["mean_average_precision"] = metrics.mean_average_precision(dataset.scores(logits).nan_to_num(), positive)
    return {name: finite(value) for name, value in found.items()}


def finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
