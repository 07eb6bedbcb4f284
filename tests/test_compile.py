"""The closed forms are one graph for `torch.compile`, with equal values and gradients."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

from cases import CASES, LAWS
from explicit_dropout import functional


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def value_and_gradients(function, leaves):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in leaves.items()}
    value = function(leaves)
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return value.detach(), [g for g in gradients if g is not None]


@pytest.mark.parametrize("case", CASES)
def test_compiled_whole_and_equal(case):
    case, noise = CASES[case], LAWS["bernoulli"]
    leaves = case.leaves()
    compiled = torch.compile(lambda tensors: case.closed_form(tensors, noise), fullgraph=True, backend="aot_eager")
    assert_close(
        value_and_gradients(compiled, leaves), value_and_gradients(lambda t: case.closed_form(t, noise), leaves)
    )


@pytest.mark.parametrize("case", ["linear", "query_key causal", "key masked"])
def test_the_default_compiler_agrees(case):
    case, noise = CASES[case], LAWS["bernoulli"]
    leaves = case.leaves()
    compiled = torch.compile(lambda tensors: case.closed_form(tensors, noise), fullgraph=True)
    assert_close(
        value_and_gradients(compiled, leaves), value_and_gradients(lambda t: case.closed_form(t, noise), leaves)
    )


@pytest.mark.parametrize(
    "case", ["linear", "hidden", "query", "key with biases", "query_key with padding", "attended_value"]
)
def test_vmap_and_grad_transforms_work(case):
    case, noise = CASES[case], LAWS["bernoulli"]
    first = case.leaves(seed=0)
    several = {name: torch.stack([case.leaves(seed=s)[name] for s in range(3)]) for name in first}
    mapped = torch.vmap(torch.func.grad(lambda leaves: case.closed_form(leaves, noise)))(several)
    alone = torch.func.grad(lambda leaves: case.closed_form(leaves, noise))(first)
    for name in first:
        assert_close(mapped[name][0], alone[name])


def test_recomputed_tiles_refuse_function_transforms_loudly():
    """Where pairs are forbidden, parts are recomputed in the backward pass, which torch.func does not allow."""
    case = CASES["query masked"]
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(lambda leaves: case.closed_form(leaves, LAWS["bernoulli"]))(case.leaves())


@pytest.mark.parametrize(
    ("site", "causal", "law"),
    [("query", True, "paper"), ("query_key", True, "bernoulli"), ("query_key", False, "bernoulli")],
)
def test_sequences_of_every_length_need_no_graph_each(site, causal, law):
    """Lengths below, at and beyond the block size of the causal form, in graphs of symbolic length."""
    noise = LAWS[law]
    weights = torch.randn(2, 8, 6, dtype=torch.float64)

    def penalty(x):
        return getattr(functional, site)(x, *weights, noise, heads=4, causal=causal)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(penalty, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 7, 40, 33, 64):
        x = torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
        value, expected = compiled(x), penalty(x)
        assert_close(value, expected)
        assert_close(torch.autograd.grad(value, x), torch.autograd.grad(expected, x))
    assert counter.frame_count <= 3


def test_a_strength_that_changes_does_not_compile_again():
    counter = CompileCounterWithBackend("aot_eager")
    x, weight = torch.randn(2, 5, 6), torch.randn(4, 6)
    compiled = torch.compile(functional.linear, fullgraph=True, dynamic=True, backend=counter)
    for strength in (0.1, 0.2, 0.3, 0.4):
        value = compiled(x, weight, LAWS["paper"], strength=strength)
        assert_close(value, functional.linear(x, weight, LAWS["paper"], strength=strength))
    assert counter.frame_count <= 2
