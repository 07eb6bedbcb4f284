"""Strengths: one for each component and layer, constant or following a schedule, saved and restored."""

import math
from collections import UserDict

import pytest
import torch
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout import strengths
from plain import encoder

X = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))


def attached(**settings):
    return xd.ExplicitDropout(encoder(layers=3), xd.inverted(0.2), **settings)


def value_strengths(reg):
    return {site.layer: reg.strengths()[site.name] for site in reg.sites}


@pytest.mark.parametrize(
    ("strength", "expected"),
    [
        (0.5, {0: 0.5, 1: 0.5, 2: 0.5}),
        (1, {0: 1.0, 1: 1.0, 2: 1.0}),
        ([0.1, 0.0, 0.3], {0: 0.1, 2: 0.3}),
        ((0.1, strengths.constant(0.2), 0), {0: 0.1, 1: 0.2}),
        ({1: 0.7}, {1: 0.7}),
        (UserDict({0: 0.2, 2: strengths.linear(1, 0, 4)}), {0: 0.2, 2: 1.0}),
        (strengths.cosine(0.4, 0.0, 10), {0: 0.4, 1: 0.4, 2: 0.4}),
    ],
)
def test_a_strength_is_for_all_layers_for_each_or_by_index(strength, expected):
    assert value_strengths(attached(value=strength)) == expected


def test_layers_selects_layers():
    for layers, expected in ((1, {1}), ([0, 2], {0, 2}), (range(2), {0, 1}), (None, {0, 1, 2}), (iter([2]), {2})):
        assert set(value_strengths(attached(value=0.5, layers=layers))) == expected
    reg = attached(value=[1.0, 2.0, 3.0], layers=[1, 2])
    assert value_strengths(reg) == {1: 2.0, 2: 3.0}


def test_the_penalty_is_the_weighted_sum_of_the_terms():
    reg = attached(value=[0.1, 0.2, 0.3], feed_forward={1: 0.5}, query=0.7)
    reg.model(X)
    total = reg()
    expected = sum(reg._schedules[name].at(0) * term for name, term in reg.terms().items())
    assert_close(total.detach(), expected)
    assert len(reg.terms()) == 3 + 2 + 3
    assert total.dtype == torch.float32
    assert not any(term.requires_grad for term in reg.terms().values())


SCHEDULES = [
    (strengths.constant(0.3), lambda _: 0.3),
    (strengths.linear(1.0, 0.2, 4), lambda s: 1.0 - 0.8 * min(s / 4, 1)),
    (strengths.cosine(0.0, 2.0, 4), lambda s: 1 - math.cos(math.pi * min(s / 4, 1))),
    (strengths.warm_up(0.6, 3), lambda s: 0.6 * min(s / 3, 1)),
]


@pytest.mark.parametrize(("schedule", "formula"), SCHEDULES)
def test_schedules_follow_their_formula_call_by_call(schedule, formula):
    reg = attached(value=schedule)
    for step in range(7):
        assert all(s == pytest.approx(formula(step), abs=1e-12) for s in reg.strengths().values())
        reg.model(X)
        penalty = reg()
        assert_close(penalty.detach(), torch.tensor(formula(step)) * sum(reg.terms().values()))


def train(reg, optimiser, steps):
    for _ in range(steps):
        optimiser.zero_grad()
        (reg.model(X).square().mean() + reg()).backward()
        optimiser.step()


def test_a_resumed_run_is_bit_identical():
    schedules = {"value": strengths.cosine(1.0, 0.0, 5), "feed_forward": strengths.warm_up(1.0, 4)}
    reg = attached(**schedules)
    optimiser = torch.optim.AdamW(reg.model.parameters(), lr=1e-2)
    train(reg, optimiser, 3)
    saved = [part.state_dict() for part in (reg, reg.model, optimiser)]
    saved = [torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, s) for s in saved]
    train(reg, optimiser, 4)
    resumed = attached(**schedules)
    second = torch.optim.AdamW(resumed.model.parameters(), lr=1e-2)
    for part, state in zip((resumed, resumed.model, second), saved, strict=True):
        part.load_state_dict(state)
    train(resumed, second, 4)
    assert resumed.state_dict() == reg.state_dict() == {"calls": 7}
    for name, parameter in reg.model.state_dict().items():
        assert torch.equal(parameter, resumed.model.state_dict()[name])


def test_a_call_that_fails_does_not_advance_the_schedule():
    reg = attached(value=strengths.linear(1.0, 0.0, 4))
    with pytest.raises(xd.CollectionError):
        reg()
    assert reg.state_dict() == {"calls": 0}


@pytest.mark.parametrize(
    "state", [{}, {"calls": -1}, {"calls": 1.5}, {"calls": True}, {"calls": 1, "x": 2}, None, 3, "calls"]
)
def test_a_foreign_state_is_refused(state):
    reg = attached(value=1.0)
    with pytest.raises(xd.InputError, match="state_dict"):
        reg.load_state_dict(state)


@pytest.mark.parametrize(
    "bad",
    [
        -0.1, math.nan, math.inf, True, "0.1", b"1", [0.1], [0.1] * 4, [0.1, -1.0, 0.1], [0.1, "a", 0.1], {3: 0.1},
        {-1: 0.1}, {"0": 0.1}, {True: 0.1}, {0: -1.0}, {0: math.nan}, torch.tensor(0.1), 1j, object(),
        [[0.1], 0.1, 0.1],
    ],
)  # fmt: skip
def test_bad_strengths_are_refused_and_nothing_is_attached(bad):
    model = encoder(layers=3)
    with pytest.raises(xd.InputError, match="`value` must be"):
        xd.ExplicitDropout(model, xd.inverted(0.2), value=bad)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: strengths.constant(-1.0), "start"),
        (lambda: strengths.linear(0.1, math.inf, 3), "end"),
        (lambda: strengths.linear(0.1, 0.2, 0), "steps"),
        (lambda: strengths.cosine(0.1, 0.2, 2.5), "steps"),
        (lambda: strengths.warm_up("1", 2), "end"),
        (lambda: strengths.Schedule(0.0, 1.0, 2, "square"), "shape"),
    ],
)
def test_bad_schedules_are_refused(make, argument):
    with pytest.raises(xd.InputError, match=f"`{argument}` must be"):
        make()


@pytest.mark.parametrize("layers", [3, -1, [0, 3], [], "all", "0", True, [True], 1.0, [0.5], [None], [[0]]])
def test_bad_layers_are_refused(layers):
    with pytest.raises(xd.InputError, match="`layers` must be indices from 0 to 2"):
        attached(value=1.0, layers=layers)
