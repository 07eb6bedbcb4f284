"""What the paper states, and what follows from it: each a claim that the code could refute."""

import pytest
import torch
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout import functional as F
from explicit_dropout import reference

torch.manual_seed(0)
X = torch.randn(2, 7, 6, dtype=torch.float64)
WQ, WK, WV = torch.randn(3, 6, 6, dtype=torch.float64).unbind()
BIASES = dict(zip(("query_bias", "key_bias"), torch.randn(2, 6, dtype=torch.float64).unbind(), strict=True))
P = 0.2


def test_equation_14_as_it_stands():
    x = X[0]
    trace = torch.trace((x.mT @ x) * P**2 @ WQ.mT @ WK @ x.mT @ x @ WK.mT @ WQ) / 2
    assert_close(F.query(x, WQ, WK, xd.paper(P), reduction="sample"), trace)


def test_equation_15_as_it_stands():
    x = X[0]
    trace = torch.trace((x.mT @ x) * P**2 @ WK.mT @ WQ @ x.mT @ x @ WQ.mT @ WK) / 2
    assert_close(F.key(x, WQ, WK, xd.paper(P), reduction="sample"), trace)


def test_equation_16_and_19_as_they_stand():
    x = X[0]
    trace = torch.trace((x.mT @ x) * P**2 @ WV.mT @ WV) / 2
    assert_close(F.value(x, WV, xd.paper(P), reduction="sample"), trace)
    assert_close(F.feed_forward([x], [WV], xd.paper(P), reduction="sample"), trace)


def test_equation_17_as_it_stands():
    x, attention = X[0], torch.randn(7, 7, dtype=torch.float64).softmax(-1)
    trace = torch.trace((x.mT @ attention.mT @ attention @ x) * P**2 @ WV.mT @ WV) / 2
    assert_close(F.attended_value(x, WV, attention[None], xd.paper(P), reduction="sample"), trace)


def test_equation_106_as_it_stands():
    x, total = X[0], 0.0
    for r in range(7):
        for k in range(6):
            for i in range(6):
                for j in range(6):
                    total += x[r, i] * x[r, j] * WV[k, i] * WV[k, j]
    assert_close(F.linear(x, WV, xd.paper(P)), P**2 / (2 * 7) * total)


def test_appendix_b_decomposition():
    """Eqs. 103–113: R = α R̂ + R_cross with α = p(1 − p)/2, R̂ the regulariser of Arora et al."""
    x = X[0]
    arora = P / (1 - P) * (WV.square().sum(0) * x.square().mean(0)).sum()
    outer = torch.einsum("ri,rj,ki,kj->ij", x, x, WV, WV) / x.shape[0]
    cross = P**2 / 2 * (outer.sum() - outer.trace())
    alpha = P * (1 - P) / 2
    assert_close(F.linear(x, WV, xd.paper(P)), alpha * arora + cross)
    assert_close(2 * F.linear(x, WV, xd.inverted(P)), arora)  # Eq. 103 has no factor ½
    assert_close(F.linear(x, WV, xd.paper(P)) - cross, alpha * 2 * F.linear(x, WV, xd.inverted(P)))


def test_equation_6_prints_a_root_that_equation_103_does_not_have():
    x = X[0]
    monte_carlo = reference.monte_carlo("linear", xd.inverted(P), 20_000, x, WV, generator=torch.Generator())
    squares = (WV.square().sum(0) * x.square().mean(0)).sum() / 2
    assert monte_carlo.deviations(P / (1 - P) * squares) < 4
    assert monte_carlo.deviations((P / (1 - P)) ** 0.5 * squares) > 50


@pytest.mark.parametrize("options", [{}, {"heads": 3}, {"heads": 3, "scale": 0.3}, {"causal": True}])
def test_query_and_key_penalties_are_one_function_under_the_paper_law(options):
    leaves = [t.clone().requires_grad_() for t in (X, WQ, WK)]
    values, gradients = [], []
    for form in (F.query, F.key):
        values.append(form(*leaves, xd.paper(P), **options))
        gradients.append(torch.autograd.grad(values[-1], leaves))
    assert_close(*values, rtol=1e-12, atol=0)
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("noise", [xd.bernoulli(P), xd.inverted(P), xd.gaussian(0.5)])
def test_query_and_key_penalties_differ_under_exact_laws(noise):
    one, other = F.query(X, WQ, WK, noise), F.key(X, WQ, WK, noise)
    assert abs(one - other) > 1e-3 * one


def test_biases_separate_query_and_key_even_under_the_paper_law():
    one, other = (form(X, WQ, WK, xd.paper(P), **BIASES) for form in (F.query, F.key))
    assert abs(one - other) > 1e-3 * one


def test_only_strength_times_squared_rate_is_identifiable_under_the_paper_law():
    assert_close(F.query(X, WQ, WK, xd.paper(0.1), strength=4), F.query(X, WQ, WK, xd.paper(0.2)))
    exact = F.query(X, WQ, WK, xd.bernoulli(0.1), strength=4), F.query(X, WQ, WK, xd.bernoulli(0.2))
    assert abs(exact[0] - exact[1]) > 0.1 * exact[1]


def test_value_and_feed_forward_are_activation_l2_under_the_paper_law():
    assert_close(F.value(X, WV, xd.paper(P), reduction="sample"), P**2 / 2 * (X @ WV.mT).square().sum() / 2)


@pytest.mark.parametrize(("p", "low", "high"), [(0.2, 0.19, 0.34), (0.3, 0.25, 0.45)])
def test_the_paper_value_is_a_fraction_of_the_truth(p, low, high):
    """On the diagonal E[ε²] is p, not p²; for inputs without much correlation that is most of the penalty."""
    ratio = F.value(X, WV, xd.paper(p)) / F.value(X, WV, xd.bernoulli(p))
    assert low < ratio < high


def test_one_head_is_the_literal_merged_reading():
    x = X[0]
    merged = 0.5 * P**2 * (x @ WQ.mT @ WK @ x.mT).square().sum()
    assert_close(F.query(x, WQ, WK, xd.paper(P), reduction="sample"), merged)
    per_head = sum(
        0.5 * P**2 * (x @ q.mT @ k @ x.mT).square().sum() for q, k in zip(WQ.chunk(2), WK.chunk(2), strict=True)
    )
    assert_close(F.query(x, WQ, WK, xd.paper(P), heads=2, reduction="sample"), per_head)
    assert not torch.isclose(merged, per_head)


@pytest.mark.parametrize("noise", [xd.paper(P), xd.bernoulli(P), xd.inverted(P)])
def test_joint_dropout_is_not_the_sum_of_the_two_sides(noise):
    """Adding J_q and J_k, as Eq. 20 does, leaves out how the two deviations meet."""
    apart = F.query(X, WQ, WK, noise) + F.key(X, WQ, WK, noise)
    assert abs(F.query_key(X, WQ, WK, noise) / apart - 1) > 0.02


def test_joint_dropout_without_a_mean_adds_exactly_the_product_of_the_spreads():
    noise, x = xd.inverted(P), X[0]
    apart = F.query(x, WQ, WK, noise, reduction="sample") + F.key(x, WQ, WK, noise, reduction="sample")
    spreads = [W @ torch.diag(x.square().sum(0)) @ W.mT for W in (WQ, WK)]
    product = noise.variance**2 / 2 * (spreads[0] * spreads[1]).sum()
    assert_close(F.query_key(x, WQ, WK, noise, reduction="sample"), apart + product)


def test_a_shared_mask_changes_the_diagonal_alone():
    off_diagonal = ~torch.eye(7, dtype=torch.bool)
    for noise in (xd.bernoulli(P), xd.inverted(P), xd.gaussian(0.5)):
        one, two = (
            F.query_key(X, WQ, WK, noise, attention_mask=off_diagonal, shared_mask=shared) for shared in (True, False)
        )
        assert_close(one, two)
        whole = [F.query_key(X, WQ, WK, noise, shared_mask=shared) for shared in (True, False)]
        assert not torch.isclose(*whole)


def rotation(heads):
    """Rotary embeddings in their usual form, angles by position."""
    tokens, width = heads.shape[-2:]
    angles = torch.arange(tokens, dtype=heads.dtype)[:, None] * 0.7 ** torch.arange(width // 2)
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.arange(7) < torch.tensor([[7], [4]])}])
@pytest.mark.parametrize("site", ["query", "key", "query_key"])
def test_under_rotary_embeddings_the_paper_law_is_exact(site, options):
    leaves = [t.clone().requires_grad_() for t in (X, WQ, WK, *BIASES.values())]
    results = []
    for module in (F, reference):
        biases = {"query_bias": leaves[3], "key_bias": leaves[4]}
        penalty = getattr(module, site)(*leaves[:3], xd.paper(P), heads=3, rotary=rotation, **biases, **options)
        results.append((penalty.detach(), torch.autograd.grad(penalty, leaves, materialize_grads=True)))
    assert_close(*(value for value, _ in results))
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert_close(one, other)
    plain = getattr(F, site)(*leaves[:3], xd.paper(P), heads=3, **options)
    assert not torch.isclose(results[0][0], plain)


def test_under_rotary_embeddings_a_variance_is_refused():
    for module in (F, reference):
        with pytest.raises(xd.InputError, match="variance 0"):
            module.query(X, WQ, WK, xd.inverted(P), rotary=rotation)
