"""The closed forms are one graph for `torch.compile`, with equal values and gradients; models are what they were."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.testing import assert_close

import explicit_dropout as xd
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


# ---------------------------------------------------------------------------------------------- models


class Attending(nn.Module):
    """Attention with or without a projection of its output, and its input added in place."""

    def __init__(self, projected: bool, bias: bool = True) -> None:
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, 8, bias=bias) for _ in range(3))
        self.out_proj = nn.Linear(8, 8) if projected else None

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        attended = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        attended = attended.transpose(1, 2).flatten(2)
        return attended if self.out_proj is None else self.out_proj(attended)


class Block(nn.Module):
    def __init__(self, projected: bool, bias: bool = True) -> None:
        super().__init__()
        self.attention = Attending(projected, bias)

    def forward(self, x):
        out = self.attention(x)
        out += x
        return out.tanh()


@xd.register_rule(Attending)
def described(module):
    sides = (xd.Projection(side) for side in (module.q_proj, module.k_proj, module.v_proj))
    return xd.Attention(module, *sides, output=module.out_proj, heads=module.num_heads, weights="compute")


def block(projected, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return Block(projected, bias).to(dtype), torch.randn(3, 5, 8).to(dtype)


def penalty_and_gradients(model, x, noise, backend=None):
    reg = xd.ExplicitDropout(model, noise, value=0.7, attended_value=0.3)
    torch._dynamo.reset()
    out = (model if backend is None else torch.compile(model, backend=backend))(x)
    penalty = reg()
    found = torch.autograd.grad(penalty + out.sum(), list(model.parameters()), allow_unused=True)
    reg.remove()
    return penalty.detach(), out.detach(), [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("law", ["paper", "bernoulli", "inverted"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_what_attention_returns_may_be_changed_in_place(law, bias, backend):
    noise = LAWS[law]
    model, x = block(projected=False, bias=bias)
    penalty, out, gradients = penalty_and_gradients(model, x, noise, backend)
    alike, _ = block(projected=True, bias=bias)  # with a projection that changes nothing
    alike.load_state_dict(model.state_dict(), strict=False)
    with torch.no_grad():
        alike.attention.out_proj.weight.copy_(torch.eye(8))
        alike.attention.out_proj.bias.zero_()
    expected = penalty_and_gradients(alike, x, noise)
    assert_close(penalty, expected[0])
    assert_close(out, expected[1])
    assert_close(gradients, expected[2][: len(gradients)])


@pytest.mark.parametrize("law", ["paper", "bernoulli"])
@pytest.mark.parametrize("component", ["value", "attended_value", "feed_forward"])
def test_second_derivatives_of_a_model_whose_graph_is_not_compiled_further(law, component):
    """A compiler that makes a backward pass refuses them; one that only takes the graph must not get them wrong."""
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model, _ = block(projected=True, dtype=torch.float64)
        if component == "feed_forward":
            model = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).double()
        reg = xd.ExplicitDropout(model, LAWS[law], **{component: 1.0})
        x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (torch.compile(model, backend="eager") if compiled else model)(x)
        weights = [p for name, p in model.named_parameters() if name.endswith(("v_proj.weight", "linear1.weight"))]
        slopes = torch.autograd.grad(reg(), weights, create_graph=True)
        found.append(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), weights))
        reg.remove()
    assert_close(*found)


@pytest.mark.parametrize("first", [False, True])
def test_a_hook_of_the_user_that_changes_an_output_is_not_undone(first):
    results = []
    for backend in (None, "aot_eager"):
        model, x = block(projected=True)
        reg = xd.ExplicitDropout(model, LAWS["paper"], value=1.0)
        model.attention.v_proj.register_forward_hook(lambda _module, _args, output: 2 * output, prepend=first)
        torch._dynamo.reset()
        out = (model if backend is None else torch.compile(model, backend=backend))(x)
        results.append((out, reg()))
    assert_close(*results)
