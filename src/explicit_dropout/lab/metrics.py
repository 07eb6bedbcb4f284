"""What is measured on validation and test examples: accuracy, average precision per class, likelihood, calibration.

All of them are fractions (0 to 1) but for the loss, and are summed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from explicit_dropout.errors import InputError


def task_loss(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy −Σ_c y_c log p_c, in float32 at least, of class indices or of weights y for the classes.

    Weights are taken as they are: an example of several classes (multi-hot) counts once for each of them, and one of
    none not at all. Label smoothing is made for weights that sum to one.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        logits, targets.to(logits.dtype) if targets.is_floating_point() else targets, label_smoothing=label_smoothing
    )


def hits(logits: Tensor, targets: Tensor) -> Tensor:
    """For each example whether the class of the highest score is (one of) its own."""
    best = logits.argmax(-1)
    if targets.is_floating_point():
        return targets.gather(-1, best[:, None])[:, 0] > 0
    return best == targets


def accuracy(logits: Tensor, targets: Tensor) -> float:
    """The share of examples whose highest score is at (one of) their classes."""
    _check(logits, targets)
    return hits(logits, targets).double().mean().item()


def loss(logits: Tensor, targets: Tensor) -> float:
    """Mean negative log-likelihood of the classes, no smoothing; summed over the classes of an example with several."""
    _check(logits, targets)
    return task_loss(logits.double(), targets).item()


def calibration_error(logits: Tensor, targets: Tensor, bins: int = 15) -> float:
    """Expected calibration error: Σ over equal-width bins of confidence of share · |accuracy − confidence|."""
    _check(logits, targets)
    confidence = logits.double().softmax(-1).amax(-1)
    excess = confidence - hits(logits, targets).double()
    bin_of = (confidence * bins).ceil().long().clamp(1, bins) - 1
    members = bin_of == torch.arange(bins, device=logits.device)[:, None]  # no index_add: on a GPU its order varies
    return ((members * excess).sum(1).abs().sum() / len(excess)).item()


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Σ over true positives of the precision at their rank / number of positives; no interpolation.

    Examples with equal scores are taken together, so that their order in the file means nothing.
    """
    if scores.ndim != 1 or positive.shape != scores.shape or positive.dtype != torch.bool:
        raise InputError("positive", "a boolean for each score", f"{tuple(positive.shape)} of {positive.dtype}")
    if not positive.any():
        raise InputError("positive", "at least one positive example", "none")
    order = scores.argsort(descending=True, stable=True)
    ranked, found = scores[order], positive[order].double().cumsum(0)
    last = torch.ones_like(ranked, dtype=torch.bool)
    last[:-1] = ranked[1:] != ranked[:-1]
    ends = last.nonzero()[:, 0]
    precision = found[ends] / (ends + 1)
    gained = found[ends].diff(prepend=found.new_zeros(1))
    return ((precision * gained).sum() / found[-1]).item()


def mean_average_precision(scores: Tensor, targets: Tensor) -> float:
    """The mean of `average_precision` over the classes that occur; scores and boolean targets are (n, classes)."""
    if targets.shape != scores.shape or targets.ndim != 2:
        raise InputError("targets", f"of the shape of scores, {tuple(scores.shape)}", tuple(targets.shape))
    occurring = targets.any(0).nonzero()[:, 0].tolist()
    if not occurring:
        raise InputError("targets", "positive somewhere", "no positive example of any class")
    return sum(average_precision(scores[:, c], targets[:, c].bool()) for c in occurring) / len(occurring)


def _check(logits: Tensor, targets: Tensor) -> None:
    if logits.ndim != 2 or len(logits) != len(targets) or not len(logits):
        raise InputError(
            "logits",
            "(examples, classes) with as many targets, at least one",
            f"{tuple(logits.shape)} and {len(targets)} targets",
        )
