"""The closed forms equal the paper's traces, written out, in value and in every gradient."""

import pytest
import torch

from cases import CASES, LAWS

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def value_and_gradients(function, leaves, noise, **overrides):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    value = function(leaves, noise, **overrides)
    gradients = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    filled = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves.values(), gradients, strict=True)]
    return value.detach(), dict(zip(leaves, filled, strict=True))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", CASES)
def test_closed_form_equals_literal_trace_in_value_and_gradient(case, law):
    case, noise = CASES[case], LAWS[law]
    leaves = case.leaves()
    value, gradients = value_and_gradients(case.closed_form, leaves, noise)
    expected, expected_gradients = value_and_gradients(case.literal, leaves, noise)
    assert value > 0
    torch.testing.assert_close(value, expected, **TOLERANCE)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reduction", ["token", "sample", "none"])
@pytest.mark.parametrize("case", CASES)
def test_every_reduction_and_strength_equals_the_literal_one(case, reduction):
    case, noise = CASES[case], LAWS["bernoulli"]
    leaves = case.leaves(seed=1)
    value = case.closed_form(leaves, noise, reduction=reduction, strength=0.25)
    torch.testing.assert_close(value, case.literal(leaves, noise, reduction=reduction, strength=0.25), **TOLERANCE)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", CASES)
def test_gradcheck(case, law):
    case, noise = CASES[case], LAWS[law]
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves(seed=2).items()}

    def penalty(*tensors):
        return case.closed_form(dict(zip(leaves, tensors, strict=True)), noise)

    assert torch.autograd.gradcheck(penalty, tuple(leaves.values()), fast_mode=True)


@pytest.mark.parametrize("case", ["linear", "query_key with biases", "key causal", "query masked", "conv 2d"])
def test_second_derivatives_are_right_too(case):
    case = CASES[case]
    leaves = {name: leaf.requires_grad_() for name, leaf in case.leaves(seed=2).items()}

    def penalty(*tensors):
        return case.closed_form(dict(zip(leaves, tensors, strict=True)), LAWS["bernoulli"])

    assert torch.autograd.gradgradcheck(penalty, tuple(leaves.values()), fast_mode=True)
