"""Metrics against scikit-learn, and against what can be said by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, average_precision_score, log_loss

from explicit_dropout import InputError
from explicit_dropout.lab import metrics


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("levels", [None, 7])
def test_average_precision_is_scikit_learns_on_random_scores_with_and_without_ties(
    seed: int, levels: int | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(300, 6, generator=generator, dtype=torch.float64)
    if levels is not None:
        scores = (scores * levels).floor()
    targets = torch.rand(300, 6, generator=generator) < 0.15
    expected = average_precision_score(targets.numpy(), scores.numpy(), average="macro")
    assert metrics.mean_average_precision(scores, targets) == pytest.approx(expected, abs=1e-12)


def test_average_precision_is_the_mean_precision_at_the_rank_of_every_positive() -> None:
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5])
    positive = torch.tensor([True, False, True, False, True])
    assert metrics.average_precision(scores, positive) == pytest.approx((1 / 1 + 2 / 3 + 3 / 5) / 3)


@given(st.permutations(range(8)))
def test_the_order_of_the_examples_means_nothing_even_among_ties(order: list[int]) -> None:
    scores, positive = torch.tensor([3.0, 3, 3, 2, 2, 1, 1, 0]), torch.tensor([1, 0, 0, 1, 0, 0, 1, 0]).bool()
    expected = metrics.average_precision(scores, positive)
    assert metrics.average_precision(scores[order], positive[order]) == pytest.approx(expected, abs=1e-15)


def test_a_class_without_positives_does_not_enter_the_mean() -> None:
    scores, targets = torch.rand(9, 3), torch.zeros(9, 3, dtype=torch.bool)
    targets[:4, 1] = True
    assert metrics.mean_average_precision(scores, targets) == metrics.average_precision(scores[:, 1], targets[:, 1])
    with pytest.raises(InputError, match="no positive example"):
        metrics.mean_average_precision(scores, torch.zeros_like(targets))


def test_accuracy_and_loss_are_scikit_learns() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(200, 5), torch.randint(5, (200,))
    assert metrics.accuracy(logits, targets) == pytest.approx(accuracy_score(targets, logits.argmax(-1)))
    expected = log_loss(targets.numpy(), logits.double().softmax(-1).numpy())
    assert metrics.loss(logits, targets) == pytest.approx(expected, abs=1e-12)


def test_distributions_as_targets_count_every_class_they_name() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
    targets = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    assert metrics.accuracy(logits, targets) == 0.5
    logs = logits.double().log_softmax(-1)
    assert metrics.loss(logits, targets) == pytest.approx(-(targets * logs).sum().item() / 2)


def test_calibration_error_is_zero_for_confidence_that_is_right_and_large_for_one_that_is_not() -> None:
    right = torch.log(torch.tensor([[0.75, 0.25]])).repeat(400, 1)
    labels = torch.tensor([0, 0, 0, 1] * 100)
    assert metrics.calibration_error(right, labels) == pytest.approx(0, abs=1e-6)
    certain = torch.tensor([[50.0, 0.0]]).repeat(400, 1)
    assert metrics.calibration_error(certain, labels) == pytest.approx(0.25, abs=1e-6)


def test_calibration_error_is_the_sum_over_bins_written_out() -> None:
    torch.manual_seed(1)
    logits, targets = 2 * torch.randn(500, 4), torch.randint(4, (500,))
    confidence, best = logits.double().softmax(-1).max(-1)
    expected = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            gap = (best[inside] == targets[inside]).double().mean() - confidence[inside].mean()
            expected += inside.double().mean().item() * abs(gap.item())
    assert metrics.calibration_error(logits, targets) == pytest.approx(expected, abs=1e-12)


def test_logits_that_do_not_fit_their_targets_are_an_error() -> None:
    with pytest.raises(InputError, match="logits"):
        metrics.accuracy(torch.zeros(3, 2), torch.zeros(4))
    with pytest.raises(InputError, match="logits"):
        metrics.accuracy(torch.zeros(0, 2), torch.zeros(0))
