"""Activations made by kernels, with the energies around them: the kernels, and the hooks that put them into models."""

import copy
import importlib
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo import lookup_backend
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import explicit_dropout as xd
from explicit_dropout import kernels
from explicit_dropout.hooks.plan import is_known

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's, of activations
activated = importlib.import_module("explicit_dropout.kernels.activated")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
fused = pytest.mark.skipif(
    not kernels.by_triton(torch.zeros(1, device=DEVICE)), reason="no GPU, and Triton does not interpret its kernels"
)
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
KINDS = list(activated.PLAIN)
SHAPES = [(3, 5, 7), (2, 16, 256), (2, 50, 130), (0, 4, 8), (4, 0, 8), (1, 1, 1)]
if DEVICE == "cuda":
    SHAPES += [(33, 65, 384), (7, 197, 3072), (10007, 33)]
WANTED = {"coherent": (True, False), "columns": (False, True), "both": (True, True)}
LAWS = {"paper": xd.paper(0.2), "inverted": xd.inverted(0.2), "bernoulli": xd.bernoulli(0.2)}


def draw(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def plainly(kind, x, bias, mask, added):
    """σ(h) and both energies in float64, written down anew."""
    h = x if added else x + bias
    deviation = x - bias if added and bias is not None else x
    made = {
        "gelu": F.gelu,
        "gelu_tanh": lambda h: 0.5 * h * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3))),
        "quick_gelu": lambda h: h / (1 + torch.exp(-1.702 * h)),
        "silu": F.silu,
    }[kind](h)
    counted = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if mask is None else mask
    energies = (deviation.square() * counted[..., None]).sum()
    return made, energies, (made.square() * counted[..., None]).flatten(0, -2).sum(0)


def compare(function, kind, shape, dtype, *, added, masked, coherent, by_column, rounding):
    mask = draw(shape[:-1], seed=5) > -0.3 if masked else None
    passing, weights = draw(shape, seed=4), draw(shape[-1:], seed=3)
    found = []
    for exact in (False, True):
        x, bias = draw(shape, dtype, 1), draw(shape[-1:], seed=2) / 2
        x, bias = ((one.double() if exact else one).requires_grad_() for one in (x, bias))
        if exact:
            made, energies, columns = plainly(kind, x, bias, mask, added)
        else:
            made, energies, columns = function(kind, x, bias, mask, added=added, coherent=coherent, by_column=by_column)
            energies, columns = energies.sum(), columns.sum(0) if columns.ndim == 2 else columns
        loss = (made.double() * passing).sum()
        loss = loss + 0.7 * energies if coherent else loss
        loss = loss + (weights * columns).sum() if by_column else loss
        gradients = torch.autograd.grad(loss, (x, bias), allow_unused=True)
        wanted = [made, *([energies] if coherent else []), *([columns] if by_column else []), gradients[0]]
        wanted += [torch.zeros_like(bias) if gradients[1] is None else gradients[1]]
        found.append([one.detach().double() for one in wanted])
    for one, other in zip(*found, strict=True):
        scale = other.abs().max().item() if other.numel() else 0.0
        assert_close(one, other, rtol=rounding, atol=rounding * scale)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@fused
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wanted", WANTED)
@pytest.mark.parametrize("added", [True, False], ids=["with its bias", "without"])
def test_kernels_equal_what_is_written_down_in_float64(kind, wanted, added):
    coherent, by_column = WANTED[wanted]
    choices = {"added": added, "coherent": coherent, "by_column": by_column}
    for shape in SHAPES:
        for masked in (False, True):
            compare(
                kernels.activated,
                kind,
                shape,
                torch.float32,
                masked=masked,
                **choices,
                rounding=ROUNDING[torch.float32],
            )
    for dtype in (torch.bfloat16, torch.float16):
        compare(kernels.activated, kind, (2, 16, 256), dtype, masked=True, **choices, rounding=ROUNDING[dtype])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [True, False])
def test_the_operator_has_a_plain_form_for_other_devices_with_the_same_gradients(kind, added):
    def operator(kind, x, bias, mask, *, added, coherent, by_column):
        return torch.ops.explicit_dropout.activated(x, bias, mask, kind, added, coherent, by_column)

    for coherent, by_column in WANTED.values():
        compare(
            operator, kind, (2, 5, 7), torch.float32, added=added, masked=True, coherent=coherent, by_column=by_column,
            rounding=1e-5,
        )  # fmt: skip


def test_the_operators_are_registered_soundly():
    x, bias, mask = draw((2, 5, 7)).requires_grad_(), draw((7,), seed=2).requires_grad_(), draw((2, 5)) > 0
    for added in (True, False):
        torch.library.opcheck(torch.ops.explicit_dropout.activated, (x, bias, mask, "gelu", added, True, True))
        slopes = torch.ops.explicit_dropout.activated(x, bias, mask, "gelu", added, True, True)
        given = (x.detach(), bias.detach(), mask, *(slope.detach() for slope in slopes), "gelu", added)
        torch.library.opcheck(torch.ops.explicit_dropout.activated_gradients, given)


@fused
def test_the_same_bits_every_time():
    x, bias = draw((3, 40, 200), torch.bfloat16), draw((200,), seed=2)
    made = [kernels.activated("gelu", x, bias, by_column=True) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True))


@fused
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("added", [True, False])
def test_second_derivatives_are_right(kind, added):
    def second(function):
        x, bias = draw((2, 3, 5)).requires_grad_(), draw((5,), seed=2).requires_grad_()
        made, energies, columns = function(x, bias)
        loss = made.sin().sum() + energies.sum() + (columns.sum(0) if columns.ndim == 2 else columns).sum()
        first = torch.autograd.grad(loss, (x, bias), create_graph=True)
        return torch.autograd.grad(sum(one.square().sum() for one in first), (x, bias))

    found = second(lambda x, bias: kernels.activated(kind, x, bias, added=added, by_column=True))
    expected = second(lambda x, bias: plainly(kind, x, bias, None, added))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-4, atol=1e-4)


@on_gpu
@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_out_is_what_torch_makes_within_a_rounding(kind):
    x = draw((700, 3072), torch.bfloat16)
    made, expected = kernels.activated(kind, x, None, coherent=False)[0], activated.PLAIN[kind](x.float()).bfloat16()
    assert (made != expected).float().mean() < 1e-3
    assert_close(made, expected, rtol=2**-7, atol=1e-6)


# ---------------------------------------------------------------------------------------------- in models


class Network(nn.Module):
    def __init__(self, activation=nn.GELU, between=None, after=None):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(12, 20), activation(), nn.Linear(20, 12)
        self.between, self.after = between, after

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x if self.between is None else self.between(x))
        return self.fc2(x if self.after is None else self.after(x))


class Stack(nn.Module):
    def __init__(self, make=Network, layers=2):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.checkpointed = False

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x))
        return x


@pytest.fixture
def made(monkeypatch):
    """Which energies kernels are asked for as they make activations, one after the other."""
    found = []

    def counted(kind, *given, added, coherent, by_column):
        found.append((kind, coherent, by_column))
        return activated.activated(kind, *given, added=added, coherent=coherent, by_column=by_column)

    monkeypatch.setattr(kernels, "activated", counted)
    return found


def step(model, reg, x, forward=None):
    """The penalty, its terms and all gradients, in float64."""
    model.zero_grad()
    ((model if forward is None else forward)(x).square().mean() + (penalty := reg())).backward()
    gradients = {name: parameter.grad.double().clone() for name, parameter in model.named_parameters()}
    return penalty.item(), {name: term.item() for name, term in reg.terms().items()}, gradients


def same(found, expected, rounding=1e-5):
    assert_close(found[0], expected[0], rtol=rounding, atol=0)
    assert_close(found[1], expected[1], rtol=rounding, atol=0)
    for name, gradient in found[2].items():
        assert_close(gradient, expected[2][name], rtol=1e-4, atol=1e-5)


def both(model, law, **options):
    """A model and the same in float64, which no kernel serves, each with its penalty; and how to step either."""
    exact = copy.deepcopy(model).double()
    regs = [xd.ExplicitDropout(one, law, feed_forward=0.5, **options) for one in (model, exact)]
    x = draw((3, 5, 12), seed=9)
    return lambda: step(model, regs[0], x), lambda: step(exact, regs[1], x.double())


@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("activation", [nn.GELU, lambda: nn.GELU("tanh"), nn.SiLU, lambda: of_transformers("gelu_new")])
def test_from_the_second_pass_on_kernels_make_the_activation_and_nothing_changes(law, activation, made):
    found, expected = both(Stack(lambda: Network(activation)).to(DEVICE).train(), LAWS[law])
    wanted = {"paper": (True, False), "inverted": (False, True), "bernoulli": (True, True)}[law]
    for number in range(3):
        made.clear()
        same(found(), expected())
        assert [entry[1:] for entry in made] == ([wanted] * 2 if number else [])


class Widening(nn.Module):
    """GELU that gives float32 back, as autocast has it of some operations on a GPU."""

    def forward(self, x):
        return F.gelu(x.to(torch.promote_types(x.dtype, torch.float32)))


@pytest.fixture
def known(monkeypatch):
    """`Widening` counts among the activations that there are kernels for."""
    own = kernels.activation_of
    monkeypatch.setattr(kernels, "activation_of", lambda module: "gelu" if type(module) is Widening else own(module))


def lowered(model, regs, x):
    """A step of a model under autocast to bfloat16, and of the same in float64."""
    with torch.autocast(DEVICE, torch.bfloat16):
        found = step(model[0], regs[0], x)
    expected = step(model[1], regs[1], x.double())
    assert_close(found[0], expected[0], rtol=0.02, atol=0)
    for name, gradient in found[2].items():
        assert (gradient - expected[2][name]).norm() < 0.03 * expected[2][name].norm()


@pytest.mark.usefixtures("known")
@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("activation", [nn.GELU, Widening, lambda: of_transformers("gelu_new")])
def test_under_autocast_it_is_made_in_the_precision_that_the_last_layer_lowers_it_to(law, activation, made):
    model = Stack(lambda: Network(activation)).to(DEVICE).train()
    models, x = (model, copy.deepcopy(model).double()), draw((3, 5, 12), seed=9)
    regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in models]
    for number in range(4):
        made.clear()
        lowered(models, regs, x)
        assert len(made) == (2 if number else 0)


@pytest.mark.usefixtures("known")
@fused
@pytest.mark.parametrize("law", LAWS)
def test_what_gives_more_precision_back_is_left_alone_where_others_see_it(law, made):
    model = Stack(lambda: Network(Widening, after=lambda x: 1.5 * x)).to(DEVICE).train()
    models, x = (model, copy.deepcopy(model).double()), draw((3, 5, 12), seed=9)
    regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in models]
    seen = []
    for layer in model.layers:
        layer.after = lambda x: seen.append(x.dtype) or 1.5 * x
    for _ in range(4):
        lowered(models, regs, x)
    assert made == []
    assert set(seen) == {torch.float32}


@pytest.mark.usefixtures("known")
@fused
@pytest.mark.parametrize("law", LAWS)
def test_autocast_may_come_and_go(law, made):
    model = Stack(lambda: Network(Widening)).to(DEVICE).train()
    models, x = (model, copy.deepcopy(model).double()), draw((3, 5, 12), seed=9)
    regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in models]
    for number in range(8):
        made.clear()
        if number in (0, 1, 4, 5):
            lowered(models, regs, x)
        else:
            same(step(model, regs[0], x), step(models[1], regs[1], x.double()))
        assert len(made) == (0 if number in (0, 2) else 2)


@fused
@pytest.mark.parametrize("law", LAWS)
def test_masked_tokens_do_not_count_there(law, made):
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=8,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False).to(DEVICE).train()
    exact = copy.deepcopy(model).double()
    regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in (model, exact)]
    tokens, mask = torch.arange(15, device=DEVICE).reshape(3, 5), torch.ones(3, 5, dtype=torch.long, device=DEVICE)
    mask[1, 2:] = mask[2, 4:] = 0
    for _ in range(3):
        found, expected = (
            step(one, reg, tokens, lambda x, one=one: one(x, attention_mask=mask).last_hidden_state * mask[..., None])
            for one, reg in zip((model, exact), regs, strict=True)
        )
        same(found, expected, 1e-4)
    assert len(made) == 4


@fused
@pytest.mark.parametrize("law", LAWS)
def test_a_padding_function_may_look_at_what_it_is_given(law, made):
    found, expected = both(Stack().to(DEVICE).train(), LAWS[law], padding=lambda _, x: x[..., 0] > -0.3)
    for _ in range(3):
        same(found(), expected())
    assert made == []


@fused
@pytest.mark.parametrize("law", LAWS)
def test_checkpointed_layers_keep_their_activations_and_others_may_change_their_minds(law, made):
    model = Stack().to(DEVICE).train()
    model.checkpointed = True
    found, expected = both(model, LAWS[law])
    for number in range(6):
        model.checkpointed = number not in (2, 3)
        same(found(), expected())
    assert len(made) == 2


@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("later", [False, True])
def test_an_activation_that_is_checkpointed_by_itself_is_left_alone(law, later, made):
    class Apart(Network):
        def __init__(self):
            super().__init__()
            self.apart = not later

        def forward(self, x):
            x = self.fc1(x)
            return self.fc2(checkpoint(self.act, x, use_reentrant=False) if self.apart else self.act(x))

    model = Stack(Apart).to(DEVICE).train()
    exact = copy.deepcopy(model).double()
    regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in (model, exact)]
    x = draw((3, 5, 12), seed=9)
    for number in range(4):
        for layer in (*model.layers, *exact.layers):
            layer.apart = not later or number > 1
        same(step(model, regs[0], x), step(exact, regs[1], x.double()))
    assert len(made) == (2 if later else 0)


@fused
def test_two_passes_under_checkpointing_may_share_a_backward_pass():
    model = Stack().to(DEVICE).train()
    model.checkpointed = True
    exact, x = copy.deepcopy(model).double(), draw((3, 5, 12), seed=9)
    regs = [xd.ExplicitDropout(one, xd.bernoulli(0.2), feed_forward=0.5) for one in (model, exact)]
    twice = [lambda x, one=one: one(x) + one(x.flip(0)) for one in (model, exact)]
    for _ in range(3):
        same(step(model, regs[0], x, twice[0]), step(exact, regs[1], x.double(), twice[1]))


@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("where", ["between", "after"])
def test_what_stands_around_the_activation_is_seen_and_it_is_left_alone(where, law, made):
    model = Stack(lambda: Network(**{where: lambda x: 1.5 * x})).to(DEVICE).train()
    found, expected = both(model, LAWS[law])
    for _ in range(3):
        same(found(), expected())
    possible = {"between": (False, True), "after": (True, False)}[where]
    wanted = {"paper": (True, False), "inverted": (False, True), "bernoulli": (True, True)}[law]
    left = tuple(one and other for one, other in zip(possible, wanted, strict=True))
    assert [entry[1:] for entry in made] == ([left] * 4 if any(left) else [])


@fused
def test_an_activation_with_other_hooks_or_in_several_places_is_left_alone(made):
    model = Stack().to(DEVICE).train()
    seen = []
    model.layers[0].act.register_forward_hook(lambda _, args, __: seen.append(args[0].shape))
    shared = Stack().to(DEVICE).train()
    shared.layers[1].act = shared.layers[0].act
    for one, number in ((model, 1), (shared, 0)):
        made.clear()
        found, expected = both(one, xd.bernoulli(0.2))
        for _ in range(2):
            same(found(), expected())
        assert len(made) == number
    assert set(seen) == {(3, 5, 20)}


class Gated(nn.Module):
    """SwiGLU, as Llama has it, or with its two first layers one after the other."""

    def __init__(self, ahead=False):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)
        self.act, self.ahead = nn.SiLU(), ahead

    def forward(self, x):
        if self.ahead:
            gate, up = self.gate_proj(x), self.up_proj(x)
            return self.down_proj(self.act(gate) * up)
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("ahead", [False, True])
def test_a_gated_network_has_the_energy_of_its_gate_taken_and_no_columns(law, ahead, made):
    found, expected = both(Stack(lambda: Gated(ahead)).to(DEVICE).train(), LAWS[law])
    for _ in range(3):
        same(found(), expected())
    assert {entry[1:] for entry in made} == (set() if ahead or law == "inverted" else {(True, False)})


@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("change", [torch.tanh, lambda x: 1.5 * x])
@pytest.mark.parametrize("where", ["between", "after"])
def test_a_model_that_goes_another_way_one_day_is_followed(where, change, law, made):
    model = Stack().to(DEVICE).train()
    exact, x = copy.deepcopy(model).double(), draw((3, 5, 12), seed=9)
    regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in (model, exact)]
    for number in range(5):
        for layer in (*model.layers, *exact.layers):
            setattr(layer, where, change if number > 1 else None)
        same(step(model, regs[0], x), step(exact, regs[1], x.double()))
    assert made


@fused
def test_an_output_that_begins_to_be_changed_in_place_is_an_error_once(made):
    model = Stack(layers=1).to(DEVICE).train()
    found, expected = both(model, xd.paper(0.2))
    for _ in range(2):
        same(found(), expected())
    model.layers[0].between = lambda x: x.mul_(1.5)
    with pytest.raises(xd.CollectionError, match=r"layers\.0\.fc1.*changed the output.*in place.*run this step again"):
        found()
    model.layers[0].between = None
    made.clear()
    for _ in range(2):
        same(found(), expected())
    assert made == []


@fused
@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("where", ["between", "after"])
def test_what_is_changed_in_place_around_the_activation_is_not_taken_for_what_it_was(where, law):
    def in_place(x):
        return x.mul_(1.5)

    found, expected = both(Stack(lambda: Network(**{where: in_place})).to(DEVICE).train(), LAWS[law])
    for _ in range(3):
        same(found(), expected())


@fused
@pytest.mark.parametrize("law", LAWS)
def test_another_activation_beside_the_network_is_none_of_its_business(law, made):
    class Squeezed(Network):
        def __init__(self):
            super().__init__()
            self.se = nn.SiLU()

        def forward(self, x):
            return super().forward(x) * self.se(x.mean(1))[:, None]

    found, expected = both(Stack(Squeezed).to(DEVICE).train(), LAWS[law])
    for _ in range(3):
        same(found(), expected())
    assert {entry[0] for entry in made} == {"gelu"}


@fused
def test_a_copy_of_the_model_is_not_regularised_and_computes_as_before():
    model, x = Stack().to(DEVICE).train(), draw((3, 5, 12), seed=9)
    reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), feed_forward=0.5)
    for _ in range(2):
        model(x)
        reg()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(other(x), model(x))
        reg.discard()


@fused
def test_evaluation_leaves_the_activation_to_the_model(made):
    model, x = Stack().to(DEVICE).train(), draw((3, 5, 12), seed=9)
    expected = model(x)
    reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), feed_forward=0.5)
    for _ in range(2):
        model(x)
        reg()
    made.clear()
    assert torch.equal(model.eval()(x), expected)
    reg.remove()
    assert torch.equal(model.train()(x), expected)
    assert made == []


# ---------------------------------------------------------------------------------------------- compiled


@pytest.fixture
def operators(monkeypatch):
    """Trains what `make` makes, compiled, and gives the energies that each operator in its graphs is asked for.

    Without a GPU operators are in their plain form.
    """
    torch.compiler.reset()
    if DEVICE == "cpu":
        monkeypatch.setattr(kernels, "serves_activated", lambda x: torch.compiler.is_compiling() and bool(x.numel()))

    def operators(make, law, passes=2):
        found = []

        def compiler(graph, inputs):
            found.append([node.args[-2:] for node in graph.graph.nodes if "dropout.activated" in str(node.target)])
            return lookup_backend("inductor" if DEVICE == "cuda" else "aot_eager")(graph, inputs)

        model = Stack(make).to(DEVICE).train()
        exact, x = copy.deepcopy(model).double(), draw((3, 5, 12), seed=9)
        regs = [xd.ExplicitDropout(one, LAWS[law], feed_forward=0.5) for one in (model, exact)]
        fast = torch.compile(model, backend=compiler, fullgraph=True)
        for _ in range(passes):
            same(step(model, regs[0], x, fast), step(exact, regs[1], x.double()))
        return found

    return operators


def of_a_library(activation="gelu"):
    """fc1, activation_fn, fc2, as CLIP has them."""
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPMLP

    return CLIPMLP(CLIPVisionConfig(hidden_size=12, intermediate_size=20, hidden_act=activation))


def of_transformers(activation):
    from transformers.activations import ACT2FN

    return ACT2FN[activation]


def of_gpt2():
    """c_fc, act, c_proj, which hold their weights transposed, and an activation that is written out."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2MLP

    return GPT2MLP(20, GPT2Config(n_embd=12, resid_pdrop=0.0))


def gated_of_a_library():
    """down_proj(act_fn(gate_proj) * up_proj), with biases."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(LlamaConfig(hidden_size=12, intermediate_size=20, num_attention_heads=2, mlp_bias=True))


def hooked():
    network = of_a_library()
    network.activation_fn.register_forward_hook(lambda _, __, output: output.mul_(1.5))
    return network


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "silu", "quick_gelu", "gelu_new"])
def test_compiled_code_has_the_activation_made_from_the_first_pass_on(law, activation, operators):
    wanted = {"paper": (True, False), "inverted": (False, True), "bernoulli": (True, True)}[law]
    assert operators(lambda: of_a_library(activation), law, passes=3) == [[wanted] * 2]


@pytest.mark.parametrize("law", LAWS)
def test_compiled_gpt2_has_its_activation_made_and_its_biases_added_there(law, operators):
    wanted = {"paper": (True, False), "inverted": (False, True), "bernoulli": (True, True)}[law]
    assert operators(of_gpt2, law, passes=3) == [[wanted] * 2]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("make", [Network, Gated, gated_of_a_library, hooked])
def test_compiled_code_is_left_alone_if_it_is_ones_own_or_gated_or_others_look_at_it(make, law, operators):
    assert operators(make, law) == [[]]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("where", ["between", "after"])
def test_compiled_code_sees_what_is_changed_in_place_around_the_activation(where, law, operators):
    assert operators(lambda: Network(**{where: lambda x: x.mul_(1.5)}), law) == [[]]


def test_code_is_known_where_a_library_has_written_it_and_it_changes_nothing_in_place():
    assert all(is_known(module) for module in of_a_library().modules())
    changed = nn.GELU()
    changed.forward = torch.tanh  # type: ignore[method-assign]
    assert not any(is_known(module) for module in (Network(), nn.Dropout(0.1, inplace=True), changed))


# ---------------------------------------------------------------------------------------------- what is one


def test_activations_are_known_by_what_they_are():
    from transformers.activations import ACT2FN

    timm = pytest.importorskip("timm.layers.activations")

    class Own(nn.GELU):
        pass

    known = {nn.GELU(): "gelu", nn.GELU("tanh"): "gelu_tanh", nn.SiLU(): "silu"}
    changed = nn.GELU()
    changed.forward = lambda x: 3 * x  # type: ignore[method-assign]
    unknown = [nn.SiLU(inplace=True), nn.ReLU(), nn.Tanh(), nn.Linear(2, 2), Own(), changed]
    tanh = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_accurate")
    known |= {ACT2FN["gelu"]: "gelu", ACT2FN["silu"]: "silu", ACT2FN["quick_gelu"]: "quick_gelu"}
    known |= {ACT2FN[name]: "gelu_tanh" for name in tanh}
    known |= {timm.GELU(): "gelu", timm.GELUTanh(): "gelu_tanh", timm.QuickGELU(): "quick_gelu"}
    unknown += [ACT2FN["gelu_python"], ACT2FN["gelu_python_tanh"], ACT2FN["relu2"], ACT2FN["gelu_10"], timm.Swish()]
    assert {module: kernels.activation_of(module) for module in known} == known
    assert [kernels.activation_of(module) for module in unknown] == [None] * len(unknown)
    x = draw((50,)).cpu()
    for module, name in known.items():
        assert_close(module(x), activated.PLAIN[name](x))
