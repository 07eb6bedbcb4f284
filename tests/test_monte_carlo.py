"""The closed forms equal what really happens on average when masks are drawn."""

import pytest
import torch

from cases import CASES, EXACT_LAWS, LAWS
from explicit_dropout import InputError, bernoulli, functional, paper
from explicit_dropout.reference import monte_carlo

SAMPLES = 6000
SITES = {case.site: name for name, case in reversed(CASES.items())}


@pytest.mark.parametrize("law", EXACT_LAWS)
@pytest.mark.parametrize("case", CASES)
def test_closed_form_is_within_four_standard_errors_of_the_drawn_mean(case, law):
    case, noise = CASES[case], EXACT_LAWS[law]
    leaves = case.leaves(seed=3)
    estimate = case.monte_carlo(leaves, noise, SAMPLES)
    assert estimate.standard_error < 0.05 * estimate.mean
    assert estimate.deviations(case.closed_form(leaves, noise)) < 4


@pytest.mark.parametrize("site", SITES)
def test_a_missing_diagonal_term_would_have_been_seen(site):
    """The paper's own slip, E[(1 − m)²] = p² where it is p, fails the same check by far at the same sample size."""
    case = CASES[SITES[site]]
    leaves = case.leaves(seed=3)
    estimate = case.monte_carlo(leaves, bernoulli(0.3), SAMPLES)
    assert estimate.deviations(case.closed_form(leaves, paper(0.3))) > 20
    assert estimate.deviations(case.closed_form(leaves, bernoulli(0.3))) < 4


@pytest.mark.parametrize("law", EXACT_LAWS)
def test_one_shared_mask_differs_from_two_by_more_than_the_error(law):
    case, noise = CASES["query_key, one mask with biases"], EXACT_LAWS[law]
    leaves = case.leaves(seed=3)
    estimate = case.monte_carlo(leaves, noise, 40_000)
    assert estimate.deviations(case.closed_form(leaves, noise)) < 4
    assert estimate.deviations(case.closed_form(leaves, noise, shared_mask=False)) > 8


def test_samples_keep_the_shape_of_the_batch():
    case = CASES["query_key of a large batch"]
    leaves = case.leaves()
    estimate = case.monte_carlo(leaves, LAWS["inverted"], SAMPLES, reduction="none")
    closed = case.closed_form(leaves, LAWS["inverted"], reduction="none")
    assert estimate.mean.shape == closed.shape == (2, 3)
    assert estimate.deviations(closed) < 4.5  # the largest of six


def test_the_same_generator_gives_the_same_estimate_and_chunks_do_not_matter_for_its_size():
    case = CASES["linear"]
    first = case.monte_carlo(case.leaves(), LAWS["gaussian"], 500, seed=7)
    second = case.monte_carlo(case.leaves(), LAWS["gaussian"], 500, seed=7)
    chunked = case.monte_carlo(case.leaves(), LAWS["gaussian"], 500, seed=7, chunk=7)
    assert torch.equal(first.mean, second.mean)
    assert chunked.samples == 500
    assert chunked.deviations(first.mean) < 4


def test_dropout_of_torch_itself_agrees():
    """No mask of ours at all: `torch.nn.functional.dropout` in front of a linear layer."""
    torch.manual_seed(0)
    x, weight = torch.randn(7, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    noisy = torch.nn.functional.dropout(x.expand(20_000, 7, 6), 0.2) @ weight.mT
    penalties = 0.5 * (noisy - x @ weight.mT).square().sum(-1).mean(-1)
    expected = functional.linear(x, weight, LAWS["inverted"].__class__(0.0, 0.25, "inverted"))
    assert abs(penalties.mean() - expected) < 4 * penalties.std() / 20_000**0.5


def test_the_paper_moments_cannot_be_drawn():
    with pytest.raises(InputError, match=r"no mask has its moments"):
        monte_carlo("hidden", paper(0.2), 10, torch.ones(2, 3))


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [(("nowhere", 10), "site"), (("hidden", 1), "samples"), (("hidden", 2.5), "samples")],
)
def test_a_call_that_makes_no_sense_is_refused(arguments, argument):
    site, samples = arguments
    with pytest.raises(InputError) as caught:
        monte_carlo(site, bernoulli(0.2), samples, torch.ones(2, 3))
    assert caught.value.argument == argument


def test_half_precision_is_drawn_in_float32():
    estimate = monte_carlo("linear", bernoulli(0.2), 10, torch.ones(2, 3).bfloat16(), torch.ones(4, 3).bfloat16())
    assert estimate.mean.dtype == torch.float32


@pytest.mark.parametrize(
    ("noise", "tensors", "argument"), [(0.2, [torch.ones(2, 3)], "noise"), (bernoulli(0.2), [], "tensors")]
)
def test_a_call_without_noise_or_tensors_is_refused(noise, tensors, argument):
    with pytest.raises(InputError) as caught:
        monte_carlo("hidden", noise, 10, *tensors)
    assert caught.value.argument == argument
