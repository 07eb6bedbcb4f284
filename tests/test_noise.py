"""The laws: their moments, their masks, and what they refuse."""

import dataclasses
import fractions
import json
import math

import numpy
import pytest
import torch

from explicit_dropout import InputError, Noise, bernoulli, gaussian, inverted, paper, strengths

LAWS = [bernoulli(0.3), inverted(0.3), gaussian(0.6), Noise(0.2, 0.5)]


@pytest.mark.parametrize(
    ("noise", "mean", "variance"),
    [
        (paper(0.2), 0.2, 0.0),
        (bernoulli(0.2), 0.2, 0.16),
        (inverted(0.2), 0.0, 0.25),
        (gaussian(0.5), 0.0, 0.25),
        (paper(0), 0.0, 0.0),
        (inverted(0), 0.0, 0.0),
    ],
)
def test_each_law_has_the_moments_of_the_theory(noise, mean, variance):
    assert (noise.mean, noise.variance) == pytest.approx((mean, variance))


@pytest.mark.parametrize("noise", LAWS)
def test_drawn_masks_have_the_moments_of_the_law(noise):
    n = 400_000
    epsilon = 1 - noise.draw((n,), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    deviation = epsilon - noise.mean
    assert abs(deviation.mean()) < 4 * deviation.std() / n**0.5
    squares = deviation.square()
    assert abs(squares.mean() - noise.variance) < 4 * squares.std() / n**0.5
    if noise.law != "moments":
        for power, moment in zip((3, 4), noise.higher_moments, strict=True):
            powers = deviation.pow(power)
            assert abs(powers.mean() - moment) < 4 * powers.std() / n**0.5


def test_inverted_masks_are_those_of_torch_dropout():
    mask = inverted(0.2).draw((1000,), dtype=torch.float64)
    torch.manual_seed(0)
    theirs = torch.nn.functional.dropout(torch.ones(1000, dtype=torch.float64), 0.2)
    torch.testing.assert_close(mask.unique(), theirs.unique())


def test_bernoulli_masks_are_zero_or_one():
    assert bernoulli(0.5).draw((100,)).unique().tolist() == [0.0, 1.0]


def test_a_draw_has_the_shape_dtype_and_seed_that_were_asked_for():
    draws = [
        gaussian(1.0).draw((2, 3), dtype=torch.float16, generator=torch.Generator().manual_seed(1)) for _ in range(2)
    ]
    assert draws[0].shape == (2, 3)
    assert draws[0].dtype == torch.float16
    assert torch.equal(*draws)


@pytest.mark.parametrize("noise", [paper(0.2), *LAWS])
def test_noise_survives_json(noise):
    assert Noise(**json.loads(json.dumps(dataclasses.asdict(noise)))) == noise


def test_noise_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        paper(0.2).mean = 0.5
    assert len({paper(0.2), paper(0.2), bernoulli(0.2)}) == 2


@pytest.mark.parametrize("law", [paper, bernoulli, inverted])
@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, math.nan, math.inf, "0.2", None, True, 1j])
def test_a_drop_rate_outside_zero_to_one_is_refused(law, p):
    with pytest.raises(InputError, match=r"`p` must be a drop rate in \[0, 1\)\. Got"):
        law(p)


@pytest.mark.parametrize("std", [-1, math.nan, math.inf, "1"])
def test_a_senseless_standard_deviation_is_refused(std):
    with pytest.raises(InputError, match="`std` must be a finite number ≥ 0"):
        gaussian(std)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ((math.nan, 0.1), "mean"),
        ((0.1, -0.1), "variance"),
        ((0.1, math.inf), "variance"),
        ((0.2, 0.2, "bernoulli"), "law"),
        ((0.2, 0.1, "paper"), "law"),
        ((0.2, 0.1, "inverted"), "law"),
        ((0.2, 0.1, "poisson"), "law"),
    ],
)
def test_moments_that_no_law_has_are_refused(arguments, argument):
    with pytest.raises(InputError) as caught:
        Noise(*arguments)
    assert caught.value.argument == argument


def test_the_paper_law_says_why_it_draws_no_masks():
    with pytest.raises(InputError, match=r"E\[\(1 − m\)²\] = p² on the diagonal"):
        paper(0.2).draw((3,))


def test_unnamed_moments_have_no_higher_ones_and_no_rate():
    for read in (lambda n: n.higher_moments, lambda n: n.rate):
        with pytest.raises(InputError, match="law"):
            read(Noise(0.2, 0.5))


@pytest.mark.parametrize(
    ("noise", "text"),
    [(paper(0.2), "paper(0.2)"), (inverted(0.25), "inverted(0.25)"), (gaussian(0.5), "gaussian(0.5)"),
     (bernoulli(0), "bernoulli(0)"), (Noise(0.2, 0.5), "Noise(0.2, 0.5)")],
)  # fmt: skip
def test_a_law_reads_as_it_was_made(noise, text):
    assert str(noise) == text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [numpy.float16, numpy.float32, numpy.float64])
def test_rates_and_strengths_may_be_numbers_of_numpy(kind):
    assert inverted(kind(0.25)) == inverted(0.25)
    assert strengths.linear(kind(0.0), kind(0.5), 4).at(4) == 0.5
    for value in (kind(numpy.inf), fractions.Fraction(10**400)):
        with pytest.raises(InputError, match="a drop rate"):
            inverted(value)
