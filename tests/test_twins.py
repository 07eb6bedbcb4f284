"""convert_dropout: every draw of a real model has its twin, equal to what masks do on average, and no dice are left."""

import copy
import gc
import io
import random
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import explicit_dropout as xd
from explicit_dropout.hooks import deviations
from explicit_dropout.hooks.draws import Weighed, kind_of
from explicit_dropout.hooks.generators import PATIENCE
from explicit_dropout.hooks.twins import LeaveHook
from explicit_dropout.kernels import energy
from families import all_families
from family.truth import build

transformers = pytest.importorskip("transformers")
timm = pytest.importorskip("timm")
torchvision = pytest.importorskip("torchvision")

IDS = torch.randint(3, 50, (2, 6), generator=torch.Generator().manual_seed(1))
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
TOKENS = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3))
TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
SEQUENCES = {
    "vocab_size": 50, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "attention_dropout": 0.2,
    "activation_dropout": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def layers(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 24, 0.2, **{"batch_first": True, **options})
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def bert(attention="sdpa"):
    return transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, attn_implementation=attention))


def gpt2():
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=4, n_positions=8, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def bart():
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQUENCES))


def t5():
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def llama():
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, attention_dropout=0.2, pad_token_id=0)
    return transformers.LlamaForCausalLM(config)


def timm_vit():
    return timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=4, mlp_ratio=1.5, num_classes=3, drop_rate=0.1,
        pos_drop_rate=0.1, proj_drop_rate=0.2, attn_drop_rate=0.3, drop_path_rate=0.4,
    )  # fmt: skip


def torchvision_vit():
    return torchvision.models.VisionTransformer(32, 8, 2, 4, 16, 24, dropout=0.1, attention_dropout=0.2, num_classes=3)


class Own(nn.Module):
    """A layer with dropout of this library, of one kind of treatment inside attention."""

    def __init__(self, treatment):
        super().__init__()
        self.project, self.out, self.treatment = nn.Linear(16, 48), nn.Linear(16, 16), treatment
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.dropout, self.nothing = xd.stochastic.Dropout(0.2), xd.stochastic.Dropout(0.0)
        self.attended, self.branch = xd.stochastic.Dropout(0.1), xd.stochastic.DropPath(0.3)

    def forward(self, x):
        queries, keys, values = torch.unflatten(self.project(x), -1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        heads = self.treatment(queries @ keys.mT / 2) @ values
        x = x + self.branch(self.out(self.nothing(self.attended(heads.transpose(1, 2).flatten(2)))))
        return x + self.down(self.dropout(self.up(x).relu()))


MASKED = {"attention_mask": MASK}
PADDED = {"src_key_padding_mask": MASK == 0}
BOTH = {**MASKED, "decoder_input_ids": IDS}
MODELS = {
    "torch.nn": (layers, (TOKENS,), {}, 8),
    "torch.nn, norm first, padded": (lambda: layers(norm_first=True), (TOKENS,), PADDED, 8),
    "torch.nn, tokens first": (lambda: layers(batch_first=False), (TOKENS.transpose(0, 1),), PADDED, 8),
    "BERT": (bert, (IDS,), MASKED, 8),
    "BERT, eager": (lambda: bert("eager"), (IDS,), MASKED, 8),
    "GPT-2": (gpt2, (IDS,), MASKED, 7),
    "BART": (bart, (IDS,), BOTH, 12),
    "T5": (t5, (IDS,), BOTH, 14),
    "Llama": (llama, (IDS,), MASKED, 2),
    "timm ViT": (timm_vit, (IMAGES,), {}, 12),
    "torchvision ViT": (torchvision_vit, (IMAGES,), {}, 9),
    "own attention dropout": (lambda: Own(xd.stochastic.AttentionDropout(0.3)), (TOKENS,), {}, 4),
    "own DropHead": (lambda: Own(xd.stochastic.DropHead(0.3)), (TOKENS,), {}, 4),
}


def made(name):
    make, args, kwargs, number = MODELS[name]
    torch.manual_seed(0)
    return make().train(), args, kwargs, number


def converted(model, strength=1.0, **options):
    others = "keep" if "Bart" in type(model).__name__ else "refuse"  # it draws for LayerDrop, at rate 0 as well
    return xd.convert_dropout(model, strength, others=others, **options)


@pytest.fixture
def draws(monkeypatch):
    """The draws of forward passes by name, as the library hands them to the closed forms."""
    found, add = {}, LeaveHook._add

    def noted(self, model, name, kind, draw):
        found[name] = draw
        return add(self, model, name, kind, draw)

    monkeypatch.setattr(LeaveHook, "_add", noted)
    return found


# ---------------------------------------------------------------------------------------------- what they are equal to


def sampled(draw, number=4000):
    """½ ‖deviation‖² of a draw for so many masks that torch's own dropout draws, padded tokens included."""
    if isinstance(draw, Weighed):
        query, key, value, mask, causal, scale = draw.call()
        clean = F.scaled_dot_product_attention(query, key, value, mask, 0.0, causal, scale=scale)
        many = [t.expand(number // 100, *t.shape) for t in (query, key, value)]
        noisy = [F.scaled_dot_product_attention(*many, mask, draw.rate, causal, scale=scale) for _ in range(100)]
        return 0.5 * (torch.cat(noisy) - clean).square().flatten(1).sum(1)
    kind = kind_of(draw)
    operand = draw.uses[0].x if kind in ("linear", "attention_weights", "drop_head") else draw.x
    many = operand.expand(number, *operand.shape)
    if kind == "drop_path":
        shape = (number, operand.shape[0], *(1 for _ in operand.shape[1:]))
        deviation = many * (torch.rand(shape) >= draw.rate) / (1 - draw.rate) - many
    elif kind == "drop_head":
        deviation = F.dropout1d(many.flatten(0, 1).flatten(2), draw.rate).view(many.shape) - many
    else:
        deviation = F.dropout(many, draw.rate) - many
    if kind == "linear":
        deviation = deviation @ draw.uses[0].other.mT
    elif kind in ("attention_weights", "drop_head"):
        deviation = deviation @ draw.uses[0].other
    return 0.5 * deviation.square().flatten(1).sum(1)


def counted(draw):
    """The tokens of a draw: positions of a tensor, queries of attention."""
    if isinstance(draw, Weighed) or kind_of(draw) in ("attention_weights", "drop_head"):
        weights = draw.call()[0] if isinstance(draw, Weighed) else draw.uses[0].x
        samples = weights.shape[:-3].numel() if weights.ndim > 3 else 2  # of BLOOM, which has heads in the same axis
        return samples * weights.shape[-2]
    return draw.x.shape[:-1].numel()


def agree_with_masks(terms, draws, number):
    with torch.no_grad():
        for site, draw in draws.items():
            energies = sampled(draw, number).double() / counted(draw)
            error = energies.std().item() / number**0.5
            assert abs(energies.mean().item() - terms[site].item()) < 4.5 * error + 1e-5 * terms[site].item(), site


@pytest.mark.parametrize("name", MODELS)
def test_every_twin_is_what_masks_do_on_average(name, draws):
    model, args, kwargs, number = made(name)
    twins = converted(model, padding=None)
    model(*args, **kwargs)
    twins()
    assert len(twins.sites) == number == len(draws)
    agree_with_masks(twins.terms(), draws, 4000)


@pytest.mark.parametrize("name", MODELS)
def test_no_dice_are_left_and_the_model_computes_what_it_does_in_eval_mode(name):
    model, args, kwargs, _ = made(name)
    quiet = copy.deepcopy(model).eval()
    twins = converted(model, 0.1)
    state = torch.get_rng_state()
    found = model(*args, **kwargs)
    if name != "BART":
        assert torch.equal(state, torch.get_rng_state())
    penalty = twins()
    (_first(found).square().mean() + penalty).backward()
    assert_close(_first(found), _first(quiet(*args, **kwargs)), rtol=1e-5, atol=1e-5)
    model(*args, **kwargs)
    assert twins() == penalty


FAMILIES = all_families()


def with_dice(model):
    """Every rate of dropout that a model has, 0.2: of modules, and of attributes that are named for it."""
    for module in model.modules():
        for name, rate in list(vars(module).items()):
            own = isinstance(module, nn.modules.dropout._DropoutNd) and name == "p"
            if own or (isinstance(rate, float) and "drop" in name and "layer" not in name and "tokens" not in name):
                setattr(module, name, 0.2)
    return model


@pytest.mark.filterwarnings("ignore:.*enable_nested_tensor is True")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_converted_without_a_rule(name, draws):
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = with_dice(build(family))
    args, kwargs = family.call()
    first, second = (_all_tensors(model(*args, **kwargs)) for _ in range(2))
    drawing = not all(map(torch.equal, first, second))
    twins = xd.convert_dropout(model, 0.1, others="keep", padding=None)
    found = _all_tensors(model(*args, **kwargs))
    if not drawing:  # some have no dropout anywhere, or none that they use
        with pytest.raises(xd.CollectionError, match="has drawn no dropout"):
            twins()
        return
    penalty = twins()
    penalty.backward()
    assert penalty > 0
    agree_with_masks(twins.terms(), draws, 400)
    for ours, theirs in zip(found, _all_tensors(model.eval()(*args, **kwargs)), strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def _all_tensors(output):
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in _all_tensors(value)]


def _first(output):
    return output if isinstance(output, torch.Tensor) else output["logits"]


def test_the_penalty_is_lambda_times_terms_and_its_gradient_is_theirs():
    model, args, kwargs, _ = made("timm ViT")
    schedule = xd.strengths.linear(0.0, 1.0, 2)
    twins = xd.convert_dropout(model, 0.5, hidden=schedule, attention_weights=0)
    for step in range(3):
        model(*args, **kwargs)
        strengths = twins.strengths()
        penalty, terms = twins(), twins.terms()
        by_kind = {site.name: site.component for site in twins.sites}
        assert not any(by_kind[name] == "attention_weights" for name in terms)
        wanted = {"linear": 0.5, "drop_path": 0.5, "hidden": schedule.at(step)}
        assert_close(penalty, sum(wanted[by_kind[name]] * term for name, term in terms.items()))
        assert all(strengths[name] == wanted[by_kind[name]] for name in terms if name in strengths)
    assert twins.state_dict() == {"calls": 3}


def test_a_step_that_is_refused_does_not_move_the_schedule_on():
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True)
    twins = xd.convert_dropout(layer, xd.strengths.linear(1.0, 0.0, 10))
    layer(TOKENS)
    with pytest.raises(xd.CollectionError, match="has drawn no dropout"):
        twins()
    assert twins.state_dict() == {"calls": 0}


def test_gradients_are_those_of_the_closed_forms_written_by_hand():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.dropout = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.25)

        def forward(self, x):
            return x + F.dropout(self.down(self.dropout(self.up(x).relu())), 0.5, self.training)

    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(3, 4, 8, dtype=torch.float64)
    twins = xd.convert_dropout(model, 0.7)
    model(x)
    penalty = twins()
    found = torch.autograd.grad(penalty, list(model.parameters()))
    inner = model.up(x).relu()
    by_hand = 0.7 * (
        xd.functional.linear(inner, model.down.weight, xd.inverted(0.25))
        + xd.functional.hidden(model.down(inner), xd.inverted(0.5))
    )
    assert_close(penalty.double(), by_hand, rtol=1e-6, atol=0)
    for ours, theirs in zip(found, torch.autograd.grad(by_hand, list(model.parameters())), strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_kernels_make_the_same_penalties_and_gradients_as_the_closed_forms(name, masked, monkeypatch):
    model, args, kwargs, number = made(name)
    kwargs = kwargs if masked else {name: value for name, value in kwargs.items() if "mask" not in name}
    twins = converted(model, 1.0)
    found = []
    for dtypes in (energy.DTYPES, ()):
        monkeypatch.setattr(energy, "DTYPES", dtypes)
        model.zero_grad()
        model(*args, **kwargs)
        twins().backward()
        found.append((twins.terms(), [p.grad for p in model.parameters() if p.grad is not None]))
    (ours, slopes), (theirs, expected) = found
    assert len(ours) == number
    for term, value in ours.items():
        assert_close(value, theirs[term], rtol=1e-5, atol=0)
    for mine, other in zip(slopes, expected, strict=True):
        assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_attention_weights_that_kernels_make_again_are_not_kept():
    queries, keys, values = (torch.randn(2, 3, 300, 8, requires_grad=True) for _ in range(3))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        penalty = deviations.fused_attention((queries, keys, values, None, True, None), xd.inverted(0.2), None)
    assert max(sizes) <= queries.numel()
    penalty.backward()
    exact = [side.detach().double().requires_grad_() for side in (queries, keys, values)]
    expected = deviations.fused_attention((*exact, None, True, None), xd.inverted(0.2), None)
    expected.backward()
    assert_close(penalty.double(), expected, rtol=1e-5, atol=0)
    for ours, theirs in zip((queries, keys, values), exact, strict=True):
        assert_close(ours.grad.double(), theirs.grad, rtol=1e-3, atol=1e-5)


def test_twins_can_be_differentiated_twice():
    model, args, kwargs, _ = made("BERT, eager")  # fused attention cannot
    weight = model.bert.encoder.layer[0].attention.self.query.weight
    twins, twice = converted(model), []
    for precision in (torch.float32, torch.float64):  # by kernels, and by the closed forms
        model.to(precision)
        model(*args, **kwargs)
        (slope,) = torch.autograd.grad(twins(), [weight], create_graph=True)
        twice.append(torch.autograd.grad(slope.square().sum(), [weight])[0].double())
    assert_close(*twice, rtol=1e-3, atol=1e-8)


def test_a_result_that_goes_to_a_linear_layer_and_elsewhere_is_measured_at_itself():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            dropped = F.dropout(x, 0.2, self.training)
            return dropped.view(-1, 8) + self.layer(dropped.reshape(-1, 8))

    twins = xd.convert_dropout(Net(), 1.0)
    twins.model(torch.randn(2, 3, 8))
    assert [(site.path, site.component) for site in twins.sites] == [("", "hidden")]


def test_results_changed_in_place_leave_the_penalty_as_it_was():
    class Net(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.layer, self.in_place = nn.Linear(8, 8), in_place

        def forward(self, x):
            dropped = F.dropout(self.layer(x), 0.2, self.training, inplace=self.in_place)
            if self.in_place:
                dropped += 1
                return dropped
            return dropped + 1

    torch.manual_seed(0)
    x, found = torch.randn(2, 3, 8), []
    for in_place in (False, True):
        torch.manual_seed(1)
        model = Net(in_place)
        twins = xd.convert_dropout(model, 1.0)
        output = model(x)
        penalty = twins()
        found.append((output, penalty, *torch.autograd.grad(penalty, list(model.parameters()))))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def test_drop_path_that_does_not_rescale_has_the_moments_of_the_plain_mask():
    model = nn.Sequential(nn.Linear(4, 4), timm.layers.DropPath(0.3, scale_by_keep=False))
    twins = xd.convert_dropout(model, 1.0)
    found = model(torch.randn(5, 6, 4))
    assert_close(twins(), xd.functional.drop_path(found, xd.bernoulli(0.3)))


class Function(nn.Module):
    """Two layers, and what a function of them and the input makes."""

    def __init__(self, function, width=8):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.function = nn.Linear(width, width), nn.Linear(width, width), function

    def forward(self, x, *args, **kwargs):
        return self.function(self, x, *args, **kwargs)

    def dropped(self, x, **options):
        return F.dropout(x, 0.2, self.training, **options)


def changed_input(self, x):
    x = self.first(x)
    dropped = self.dropped(x)
    x.mul_(3)
    return x + dropped


def added_in_place(self, x):
    x = self.first(x)
    x += self.second(self.dropped(x))
    return x


def written_to(self, x):
    dropped = self.dropped(self.first(x))
    dropped[..., 0] = 100.0
    return self.second(dropped)


CHANGES = {
    "by a module": (lambda self, x: F.relu(self.dropped(self.first(x)), inplace=True), "hidden"),
    "in its input": (changed_input, "hidden"),
    "into what it came from": (added_in_place, "linear"),
    "by an index": (written_to, "hidden"),
    "in place from the start": (lambda self, x: self.dropped(self.first(x), inplace=True) + 1, "hidden"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_a_model_changes_in_place_does_not_move_the_penalty(change, compiled):
    function, kind = CHANGES[change]
    model, x = Function(function), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    clean = model.first(x)
    output = 4 * clean if function is changed_input else copy.deepcopy(model).eval()(x)  # where dropout is no copy
    noise = xd.inverted(0.2)
    wanted = xd.functional.hidden(clean, noise)
    if kind == "linear":
        wanted = xd.functional.linear(clean, model.second.weight, noise)
    gradients = torch.autograd.grad(wanted, list(model.first.parameters()))
    twins = xd.convert_dropout(model, 1.0)
    found = (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(x)
    penalty = twins()
    assert_close(found, output)
    assert_close(penalty, wanted)
    assert [site.component for site in twins.sites] == [kind]
    for ours, theirs in zip(torch.autograd.grad(penalty, list(model.first.parameters())), gradients, strict=True):
        assert_close(ours, theirs)
    torch.compiler.reset()


def test_what_both_tensors_have_lost_is_an_error():
    def both(self, x):
        x = self.first(x)
        dropped = self.dropped(x)
        x.mul_(3)
        dropped.mul_(2)
        return x + dropped

    twins = xd.convert_dropout(Function(both), 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="both the input and the result"):
        twins.model(torch.randn(2, 3, 8))


def test_uses_are_all_that_happens_to_a_result():
    def kinds(function):
        twins = xd.convert_dropout(Function(function), 1.0)
        twins.model(torch.randn(2, 3, 8))
        return [site.component for site in twins.sites]

    def returned(self, x):
        dropped = self.dropped(x)
        return self.second(dropped), {"features": [dropped]}

    assert kinds(returned) == ["hidden"]
    assert kinds(lambda self, x: self.second(x.type_as(self.dropped(x)))) == ["hidden"]
    assert kinds(lambda self, x: torch.matmul(input=self.dropped(x), other=self.second.weight)) == ["linear"]
    assert kinds(lambda self, x: torch.addmm(self.second.bias, self.dropped(x).view(-1, 8), self.second.weight)) == [
        "linear"
    ]


def test_own_kinds_are_known_by_what_is_done_with_them_and_rate_0_does_nothing():
    twins = xd.convert_dropout(Own(xd.stochastic.DropHead(0.3)), 1.0, drop_head=0.5)
    twins.model(TOKENS)
    twins()
    assert [(site.name, site.rate) for site in twins.sites] == [
        ("treatment:drop_head", 0.3), ("attended:linear", 0.1), ("branch:drop_path", 0.3), ("dropout:linear", 0.2)
    ]  # fmt: skip
    assert twins.strengths()["treatment:drop_head"] == 0.5


def test_padded_queries_of_whole_heads_do_not_count():
    model = Own(xd.stochastic.DropHead(0.3))
    twins = xd.convert_dropout(model, 1.0, padding=lambda _path, _x: MASK.bool())
    model(TOKENS)
    twins()
    queries, keys, values = torch.unflatten(model.project(TOKENS), -1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    heads = (queries @ keys.mT / 2).softmax(-1) @ values
    real = heads.transpose(1, 2)[MASK.bool()]
    assert_close(twins.terms()["treatment:drop_head"], 0.5 * 0.3 / 0.7 * real.square().sum() / MASK.sum())


def test_a_product_that_is_scaled_counts_so():
    def penalty(alpha):
        model = Function(lambda self, x: torch.addmm(self.second.bias, self.dropped(x), self.first.weight, alpha=alpha))
        twins = xd.convert_dropout(model, 1.0)
        model(torch.ones(3, 8))
        return twins()

    assert_close(penalty(0.1), 0.01 * penalty(1))


def test_looking_at_a_result_is_no_use_of_it():
    seen = []
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    alone = twins()
    model[1].register_forward_hook(lambda _module, _args, output: seen.append(output.detach().abs().mean().item()))
    model(X)
    assert_close(twins(), alone)
    assert seen
    assert [site.component for site in twins.sites] == ["linear"]


def test_nothing_of_a_pass_is_kept():
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.dropout, self.second = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16)

        def forward(self, x):
            inner = self.first(x).relu()
            seen.append(weakref.ref(inner))
            return self.second(self.dropout(inner))

    model = Net()
    twins = xd.convert_dropout(model, 1.0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            loss = model(torch.randn(4, 16)).sum() + twins()
            loss.backward()
            del loss
        assert all(found() is None for found in seen)
    finally:
        gc.enable()


def test_a_mask_that_is_written_to_after_its_attention_is_an_error():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            mask = torch.zeros(3, 3)
            found = self.attention(x, x, x, attn_mask=mask)[0]
            mask[:, 1:] = -1e9
            return found

    twins = xd.convert_dropout(Model(), 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="attention: the model changes"):
        twins.model(X)


def test_keys_and_values_may_be_shared_by_a_batch_and_attention_may_have_no_batch():
    def shared(self, x, copies):
        queries, keys = (torch.unflatten(layer(x), -1, (2, 4)).transpose(1, 2) for layer in (self.first, self.second))
        keys = keys[:1].expand(copies, -1, -1, -1)
        return F.scaled_dot_product_attention(queries, keys, keys, dropout_p=0.2)

    penalties = []
    for copies in (1, 3):
        twins = xd.convert_dropout(Function(shared), 1.0)
        twins.model(torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)), copies)
        penalties.append(twins())
    assert_close(*penalties)

    def alone(self, x):
        queries, values = self.first(x), self.second(x)
        return self.dropped((queries @ values.mT).softmax(-1)) @ values

    penalties = []
    for x in (torch.ones(5, 8), torch.ones(1, 1, 5, 8)):
        twins = xd.convert_dropout(Function(alone), 1.0)
        twins.model(x)
        penalties.append(twins())
        assert [site.component for site in twins.sites] == ["attention_weights"]
    assert_close(*penalties)


def attention(product):
    """Attention of two heads with weights that are dropped from, and multiplied with values in one way or another."""

    def forward(self, x):
        parts = [torch.unflatten(layer(x), -1, (2, 4)).transpose(1, 2) for layer in (self.first, self.second)]
        queries, values = parts
        weights = (queries @ values.mT).softmax(-1)
        return product(self.dropped(weights), values)

    return Function(forward)


PRODUCTS = {
    "einsum": lambda a, v: torch.einsum("bhij,bhjd->bhid", a, v),
    "einsum, values first": lambda a, v: torch.einsum("b h j d, b h i j -> b i h d", v, a),
    "einsum, one head of values": lambda a, v: torch.einsum("bhij,bjd->bhid", a, v[:, 0]),
    "matmul by name": lambda a, v: torch.matmul(input=a, other=v),
    "five axes": lambda a, v: a.view(1, *a.shape) @ v[None],
}


@pytest.mark.parametrize("way", PRODUCTS)
def test_products_of_weights_and_values_are_recognised(way):
    x, penalties = torch.randn(3, 5, 8), []
    plain = (lambda a, v: a @ v[:, :1].expand_as(v)) if "one head" in way else (lambda a, v: a @ v)
    for product in (plain, PRODUCTS[way]):
        twins = xd.convert_dropout(attention(product), 1.0)
        twins.model(x)
        penalties.append(twins())
        assert [site.component for site in twins.sites] == ["attention_weights"]
    assert_close(*penalties)


BETWEEN = {
    "times a number in front": lambda a: 2.0 * a,
    "divided": lambda a: a / 0.5,
    "chosen by torch.where": lambda a: torch.where(torch.zeros(5, 5).bool(), torch.zeros(()), 2 * a),
    "chosen by its method": lambda a: (2 * a).where(torch.ones(5, 5).bool(), 0.0),
    "clamped": lambda a: (2 * a).clamp(0, 100),
    "at least nothing": lambda a: (2 * a).clamp_min(0),
    "numbers": lambda a: (2 * a).nan_to_num(),
}


@pytest.mark.parametrize("way", BETWEEN)
def test_what_is_done_to_weights_before_they_are_dropped_from_leaves_them_weights(way):
    """Each doubles them. So they are measured at their product with values, and refused where there is none."""

    def convert(product):
        def forward(self, x):
            parts = [torch.unflatten(layer(x), -1, (2, 4)).transpose(1, 2) for layer in (self.first, self.second)]
            return product(self.dropped(BETWEEN[way]((parts[0] @ parts[1].mT).softmax(-1))), parts[1])

        return xd.convert_dropout(Function(forward), 1.0)

    twins, plain = convert(lambda a, v: a @ v), xd.convert_dropout(attention(lambda a, v: a @ v), 1.0)
    x = torch.randn(3, 5, 8)
    for one in (twins, plain):
        one.model(x)
    assert_close(twins(), 4 * plain())
    assert [site.component for site in twins.sites] == ["attention_weights"]
    with pytest.raises(xd.UnsupportedSiteError, match="was not recognised"):
        convert(lambda a, v: (v.mT @ a.mT).mT).model(x)


def changed_in_place(weights, values):
    return weights.masked_fill_(weights < 0.1, 0) @ values


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (lambda a, v: (v.mT @ a.mT).mT, "was not recognised"),
        (lambda a, _v: a, "was not recognised"),
        (lambda a, v: (a @ v, a.mean(1)), "used elsewhere as well"),
        (lambda a, v: (a @ v, a @ v.square()), "used elsewhere as well"),
        (changed_in_place, "in place"),
    ],
)
def test_weights_that_do_not_go_into_one_product_are_refused_with_the_reason(product, words):
    twins = xd.convert_dropout(attention(product), 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match=words):
        twins.model(torch.randn(3, 5, 8))


def test_weights_that_are_returned_as_well_are_those_of_their_product():
    x, penalties = torch.randn(3, 5, 8), []
    for product in (lambda a, v: a @ v, lambda a, v: (a @ v, a), lambda a, v: (a @ v, a.detach().mean(1))):
        torch.manual_seed(0)
        twins = xd.convert_dropout(attention(product), 1.0)
        twins.model(x)
        penalties.append(twins())
        assert [site.component for site in twins.sites] == ["attention_weights"]
    assert penalties[0] == penalties[1] == penalties[2]


def test_a_model_of_transformers_may_return_its_attentions():
    model = bert("eager").train()
    twins = converted(model)
    model(IDS, **MASKED)
    wanted = twins()
    found = model(IDS, **MASKED, output_attentions=True)
    assert len(found.attentions) == 2
    assert twins() == wanted


def heads_in_one_axis(self, x, tokens_first=False):
    x = x.transpose(0, 1) if not tokens_first else x
    tokens, samples, _ = x.shape
    parts = [layer(x).reshape(tokens, samples * 2, 4).transpose(0, 1) for layer in (self.first, self.second)]
    weights = torch.bmm(parts[0], parts[1].mT).softmax(-1)
    return torch.bmm(self.dropped(weights), parts[1])


def test_samples_and_heads_in_one_axis_are_told_apart_or_refused():
    x = torch.randn(3, 5, 8)
    twins = xd.convert_dropout(attention(lambda a, v: a @ v), 1.0)
    twins.model(x)
    wanted = twins()
    twins = xd.convert_dropout(Function(heads_in_one_axis), 1.0)
    twins.model(x)
    assert_close(twins(), wanted)
    for tokens, samples in ((5, 3), (4, 2), (1, 2)):  # of 5 · 2 no 3 are samples, but of 4 · 2 there may be 4 or 2
        with pytest.raises(xd.UnsupportedSiteError, match="samples and heads in one axis"):
            twins.model(torch.randn(tokens, samples, 8), tokens_first=True)
    stacked = xd.convert_dropout(Function(lambda self, x: torch.bmm(self.dropped(x), x.mT)), 1.0)
    stacked.model(x)
    assert [site.component for site in stacked.sites] == ["hidden"]


@pytest.mark.parametrize("tokens_first", [False, True])
def test_as_many_samples_as_tokens_are_so_many_whichever_come_first(tokens_first):
    x = torch.randn(6, 6, 8)
    apart, together = (xd.convert_dropout(m, 1.0) for m in (attention(torch.matmul), Function(heads_in_one_axis)))
    apart.model(x.transpose(0, 1) if tokens_first else x)
    together.model(x, tokens_first=tokens_first)
    assert_close(together(), apart())


def deberta():
    config = transformers.DebertaV2Config(
        **TEXT, type_vocab_size=0, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=4
    )
    return transformers.DebertaV2Model(config)


def bloom():
    return transformers.BloomModel(
        transformers.BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=4, attention_dropout=0.1)
    )


def mvp():
    return transformers.MvpModel(transformers.MvpConfig(**SEQUENCES))


class Around(nn.Module):
    """A model of one's own that is given the same, tokens in front of samples."""

    def __init__(self, model):
        super().__init__()
        self.inner = model

    def forward(self, ids, mask):
        return self.inner(ids.T, attention_mask=mask.T)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("make", [deberta, bloom, mvp])
def test_models_of_transformers_are_given_samples_first_however_many(make, around):
    torch.manual_seed(0)
    model = make().train()
    twins = xd.convert_dropout(Around(model) if around else model, 1.0, others="keep")
    for samples, tokens in ((4, 6), (6, 4), (6, 6)):
        ids, mask = torch.randint(3, 50, (samples, tokens)), torch.ones(samples, tokens, dtype=torch.long)
        mask[1, 3:] = 0
        penalties = []
        for copies in (1, 2):  # a mean over samples is that of each twice
            given = [t.repeat(copies, 1) for t in (ids, mask)]
            twins.model(*(t.T for t in given)) if around else model(given[0], attention_mask=given[1])
            penalties.append(twins())
        assert_close(*penalties)


@pytest.mark.parametrize("samples", [1, 2, 4])
def test_a_mask_for_each_head_is_that_of_four_axes(samples):
    def forward(self, x, axes):
        queries, keys = (torch.unflatten(layer(x), -1, (4, 2)).transpose(1, 2) for layer in (self.first, self.second))
        bias = -torch.arange(5.0) * torch.arange(1, 5)[:, None, None]
        bias = bias.expand(4, 5, 5)
        return F.scaled_dot_product_attention(queries, keys, keys, bias if axes == 3 else bias[None], 0.2)

    twins = xd.convert_dropout(Function(forward), 1.0)
    penalties = []
    for axes in (3, 4):
        twins.model(torch.randn(samples, 5, 8, generator=torch.Generator().manual_seed(1)), axes)
        penalties.append(twins())
    assert_close(*penalties)


CHANNELS = {
    "Dropout2d": lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout2d(0.3)),
    "Dropout behind a convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Dropout(0.3)),
    "drop path of ConvNeXt": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), torchvision.ops.StochasticDepth(0.3, "row")
    ),
}


@pytest.mark.parametrize("way", CHANNELS)
def test_channels_in_front_are_the_width(way):
    model = CHANNELS[way]()
    twins = xd.convert_dropout(model, 1.0)
    found = model(torch.randn(2, 3, 5, 5))
    assert_close(twins(), xd.functional.hidden(found.movedim(1, -1).flatten(1, 2), xd.inverted(0.3)))


@pytest.mark.parametrize("length", [10, 12])
def test_channels_are_known_by_the_layer_that_made_them(length):
    """Also where the other axis happens to be as long as some layer is wide."""
    made = nn.Sequential(nn.Conv1d(4, 64, 1), nn.ReLU())
    model = nn.Sequential(made, nn.Dropout(0.5), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 10))
    x = torch.randn(2, 4, length)
    twins = xd.convert_dropout(model, 1.0)
    model(x)
    assert_close(twins(), xd.functional.hidden(made(x).mT, xd.inverted(0.5)))


def test_a_width_that_cannot_be_told_is_refused_unless_it_is_said():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Softplus(), nn.Linear(8, 8), nn.Softplus(), nn.Dropout(0.3))
    twins = xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="4: which axis of a tensor of shape"):
        model(torch.randn(2, 3, 8, 8))
    twins.remove()
    for axis in (1, -1):
        twins = xd.convert_dropout(model, 1.0, width=lambda _path, _x, axis=axis: axis)
        found = model(torch.randn(2, 3, 8, 8)).movedim(axis, -1)
        assert_close(twins(), xd.functional.hidden(found.flatten(1, 2), xd.inverted(0.3)))
        twins.remove()


@pytest.mark.parametrize("name", ["maxvit_t", "swin_t", "convnext_tiny", "efficientnet_b0"])
def test_real_vision_models_are_converted(name):
    if name == "maxvit_t":
        model = torchvision.models.MaxVit((64, 64), 64, 2, [64, 128], [1, 1], head_dim=32, stochastic_depth_prob=0.2)
    else:
        model = getattr(torchvision.models, name)(**{} if name == "swin_t" else {"stochastic_depth_prob": 0.2})
    twins = xd.convert_dropout(model, 1.0)
    model(torch.randn(2, 3, 64, 64))
    assert twins() > 0
    assert {site.component for site in twins.sites} >= {"drop_path"}


def test_real_convolutional_models_are_measured_at_their_branches():
    block = torchvision.models.convnext.CNBlock(8, 1e-6, 0.5)
    block.layer_scale.data.fill_(1.0)
    x = torch.randn(2, 8, 4, 4)
    branch = (block.layer_scale * block.block(x)).movedim(1, -1)
    twins = xd.convert_dropout(block, 1.0)
    block(x)
    assert_close(twins(), xd.functional.drop_path(branch.flatten(1, 2), xd.inverted(0.5)))


@pytest.mark.parametrize("padding", ["none", "boolean", "added"])
@pytest.mark.parametrize("mask", ["none", "boolean", "added", "by head"])
@pytest.mark.parametrize("width", [16, 12], ids=["one weight", "three weights"])
def test_heads_and_masks_of_multihead_attention_are_its_own(width, mask, padding, draws):
    """What the twin is made of, given to fused attention, makes the output of the module."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, 0.2, kdim=width, vdim=width, batch_first=True)
    nn.init.normal_(module.in_proj_bias)
    model = nn.ModuleDict({"attention": module})
    model.forward = lambda *args, **options: module(*args, **options)[0]
    context = torch.randn(2, 5, width)
    hidden = torch.rand(2 * 4, 6, 5) < 0.3
    hidden[..., 0] = False
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]) == 1
    masks = {"none": None, "boolean": hidden[0], "added": torch.randn(6, 5), "by head": hidden}
    paddings = {"none": None, "boolean": ~real, "added": torch.where(real, 0.0, -torch.inf)}
    options = {"attn_mask": masks[mask], "key_padding_mask": paddings[padding], "need_weights": False}
    if padding == "added" and mask in ("boolean", "by head"):
        options["attn_mask"] = torch.zeros_like(hidden, dtype=torch.float32).masked_fill(hidden, -torch.inf)
    if padding == "boolean" and mask == "added":
        options["key_padding_mask"] = paddings["added"]
    twins = xd.convert_dropout(model, 1.0, padding=None)
    output = model(TOKENS, context, context, **options)
    twins()
    (draw,) = draws.values()
    query, key, value, found, causal, scale = draw.call()
    attended = F.scaled_dot_product_attention(query, key, value, found, 0.0, causal, scale=scale)
    assert_close(module.out_proj(attended.transpose(1, 2).flatten(2)), output)


# ---------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("name", ["torch.nn, norm first, padded", "torch.nn, tokens first", "BERT", "GPT-2", "BART"])
def test_padded_tokens_do_not_count(name):
    """Two sequences, one of them padded: the terms are those of each alone, unpadded, weighted by its tokens."""
    model, args, kwargs, _ = made(name)
    model = model.double()
    tokens_first = name == "torch.nn, tokens first"

    def alone(tensor, sample, length):
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2:
            return tensor
        if tokens_first and tensor.ndim == 3:
            return tensor[:length, sample : sample + 1]
        return tensor[sample : sample + 1, :length]

    def terms(inputs, options):
        twins = converted(model)
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        model(*wide, **options)
        twins()
        found = twins.terms()
        twins.remove()
        return found

    together = terms(args, kwargs)
    parts = []
    for sample, length in enumerate((6, 4)):
        own = {key: alone(value, sample, length if "decoder" not in key else 6) for key, value in kwargs.items()}
        parts.append(terms([alone(t, sample, length) for t in args], own))
    for site, term in together.items():
        full = "decoder" in site or site.startswith("dropout")  # of which no mask speaks, or one for each sample
        weights = (1, 1) if full else (6, 4)
        wanted = sum(w * part[site] for w, part in zip(weights, parts, strict=True)) / sum(weights)
        assert_close(term, wanted, rtol=1e-5, atol=1e-8, msg=lambda text, site=site: f"{site}: {text}")


class InOneRow(Function):
    def forward(self, x, attention_mask):  # noqa: ARG002
        return self.dropped(self.first(x.reshape(-1, 8)))


class LikeTorch(Function):
    def forward(self, x, src_key_padding_mask):  # noqa: ARG002
        return self.dropped(self.first(x))


@pytest.mark.parametrize(("kind", "mask"), [(InOneRow, MASK), (LikeTorch, MASK == 0)])
def test_padding_is_known_of_tokens_in_one_row_and_by_the_names_of_torch_nn(kind, mask):
    found = []
    for content in (0.0, 50.0):
        x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(1))
        x[1, 4:] = content
        twins = xd.convert_dropout(kind(None), 1.0)
        twins.model(x, mask)
        found.append(twins())
    assert_close(*found)


def test_padding_that_one_model_inside_is_told_of_is_that_of_what_lies_beside_it():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bert, self.dropout = transformers.BertModel(transformers.BertConfig(**TEXT)), nn.Dropout(0.2)
            self.head = nn.Linear(16, 3)

        def forward(self, batch):
            return self.head(self.dropout(self.bert(**batch).last_hidden_state))

    found = []
    for word in (7, 9):
        model = Model()
        twins = xd.convert_dropout(model, 1.0)
        model({"input_ids": IDS.where(MASK == 1, word), "attention_mask": MASK})
        twins()
        found.append(twins.terms())
    for site, term in found[0].items():
        assert_close(term, found[1][site])


def test_a_mask_of_another_length_is_refused():
    class Model(Function):
        def forward(self, x, attention_mask):  # noqa: ARG002
            return self.dropped(torch.cat([x[:, :1], self.first(x)], 1))

    twins = xd.convert_dropout(Model(None), 1.0)
    with pytest.raises(xd.CollectionError, match=r"a padding mask \(2, 6\) does not say which of the tokens \(2, 7\)"):
        twins.model(torch.randn(2, 6, 8), MASK)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_layer_alone_and_as_many_tokens_as_samples(batch_first):
    """The mask is that of a layer which is the model, and it is not turned round where both axes are as long."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, 0.2, batch_first=batch_first)
    x, mask = torch.randn(4, 4, 8), torch.arange(4)[None] >= torch.tensor([4, 3, 2, 4])[:, None]
    found = []
    for content in (0.0, 50.0):
        content = torch.where(mask[..., None], torch.full_like(x, content), x)
        twins = xd.convert_dropout(layer, 1.0)
        layer(content if batch_first else content.transpose(0, 1), src_key_padding_mask=mask)
        twins()
        found.append(twins.terms())
        twins.remove()
    for site, term in found[0].items():
        assert_close(term, found[1][site])


def test_a_padding_function_and_none():
    model, args, kwargs, _ = made("torch.nn, norm first, padded")
    terms = []
    for padding in ("auto", lambda _path, x: (MASK == 1)[:, : x.shape[-2]], None):
        twins = xd.convert_dropout(model, 1.0, padding=padding)
        model(*args, **kwargs)
        terms.append(twins())
        twins.remove()
    assert_close(terms[0], terms[1])
    assert not torch.isclose(terms[0], terms[2])


# ---------------------------------------------------------------------------------------------- compiled


LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler does


@LOOKS
@pytest.mark.parametrize("name", ["torch.nn, tokens first", "timm ViT", "GPT-2", "BERT"])
def test_compiled_without_a_break_it_is_the_same(name):
    torch.compiler.reset()
    model, args, kwargs, _ = made(name)
    twins = converted(model)
    model(*args, **kwargs)
    eager = twins()
    wanted = torch.autograd.grad(eager, list(model.parameters()), allow_unused=True)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        fast(*args, **kwargs)
        penalty = twins()
        assert_close(penalty, eager)
        found = torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)
        for ours, theirs in zip(found, wanted, strict=True):
            if theirs is not None:
                assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    torch.compiler.reset()


@LOOKS
def test_compiled_for_any_shape_and_rate_it_is_the_same():
    torch.compiler.reset()
    model = Calling(lambda _self, x: x)
    twins = xd.convert_dropout(model, 1.0)
    fast = torch.compile(model, backend="aot_eager", dynamic=True)
    for batch in (X, torch.randn(4, 5, 4)):
        model(batch)
        eager = twins()
        fast(batch)
        assert_close(twins(), eager)
    torch.compiler.reset()


@LOOKS
def test_blocks_that_are_compiled_one_by_one_are_the_same():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.dropout, self.down = nn.Linear(16, 32), nn.Dropout(0.1), nn.Linear(32, 16)

        def forward(self, x):
            return x + self.down(self.dropout(self.up(x).relu()))

    torch.compiler.reset()
    model = nn.Sequential(Block(), Block())
    twins = xd.convert_dropout(model, 1.0)
    model(TOKENS)
    eager = twins()
    wanted = torch.autograd.grad(eager, list(model.parameters()), allow_unused=True)
    for block in model:
        block.compile(backend="aot_eager")
    model(TOKENS)
    penalty = twins()
    assert_close(penalty, eager)
    for ours, theirs in zip(
        torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True), wanted, strict=True
    ):
        if theirs is not None:
            assert_close(ours, theirs)
    torch.compiler.reset()


@LOOKS
def test_compiled_with_breaks_it_is_the_same():
    torch.compiler.reset()
    model, args, kwargs, _ = made("BART")
    twins = converted(model)
    model(*args, **kwargs)
    eager = twins()
    torch.compile(model, backend="aot_eager")(*args, **kwargs)
    assert_close(twins(), eager)
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------- what is refused


class Calling(nn.Module):
    """A model that does in its forward pass what it is told."""

    def __init__(self, function, rate=0.1):
        super().__init__()
        self.layer, self.dropout, self.function = nn.Linear(4, 4), nn.Dropout(rate), function

    def forward(self, x):
        return self.function(self, self.dropout(self.layer(x)))


X = torch.randn(2, 3, 4)


def several(model):
    """As many passes as it takes where other threads, such as those of the tests, may have drawn instead."""
    for _ in range(PATIENCE):
        model(X)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda _self, x: x * torch.rand(x.shape), "by rand"),
        (lambda _self, x: x * torch.empty_like(x).bernoulli_(0.5), "by bernoulli_"),
        (lambda self, x: F.alpha_dropout(x, 0.1, self.training), "by alpha_dropout"),
        (lambda _self, x: x * torch.ops.aten.native_dropout(x, 0.5, True)[1], "where torch does not let one look"),
        (lambda _self, x: x * random.random(), "by Python or numpy"),
        (lambda _self, x: x * float(np.random.rand()), "by Python or numpy"),
    ],
)
def test_other_dice_are_refused_or_kept(function, words):
    model = Calling(function)
    twins = xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match=words):
        several(model)
    twins.remove()
    twins = xd.convert_dropout(model, 1.0, others="keep")
    model(X)
    assert twins() > 0


@pytest.mark.parametrize("kind", [xd.stochastic.DropKey, xd.stochastic.DropAttention])
def test_own_weights_that_are_renormalised_have_no_twin(kind):
    twins = xd.convert_dropout(Own(kind(0.3)), 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="treatment draws random numbers by rand"):
        twins.model(TOKENS)


def test_own_dropout_in_compiled_code_is_refused_and_not_left_random():
    torch.compiler.reset()
    twins = xd.convert_dropout(Own(xd.stochastic.DropHead(0.3)), 1.0)
    with pytest.raises(Exception, match=r"xd\.stochastic have one in code that is not compiled"):
        torch.compile(twins.model, backend="aot_eager", fullgraph=True)(TOKENS)
    torch.compiler.reset()


def test_whole_heads_that_go_elsewhere_than_to_their_values_are_refused():
    twins = xd.convert_dropout(attention(lambda a, v: (a + 1) @ v), 1.0)
    twins.model.dropped = xd.stochastic.DropHead(0.3).rescaled
    with pytest.raises(xd.UnsupportedSiteError, match=r"one product A @ V"):
        twins.model(torch.randn(3, 5, 8))


def test_what_cannot_be_exact_is_refused_with_the_place():
    inner = Calling(lambda _self, x: x)

    class Outer(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    for reentrant, words in (
        (False, "inner.dropout: activation checkpointing"),
        (True, "inner.dropout: activation checkpointing"),
    ):
        twins = xd.convert_dropout(Outer(reentrant), 1.0)
        with pytest.raises(xd.ExplicitDropoutError, match=words):
            twins.model(X.clone().requires_grad_())
        twins.remove()
    twins = xd.convert_dropout(Calling(lambda _self, x: x, rate=1.0), 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="dropout: dropout at rate 1"):
        twins.model(X)
    appended = nn.TransformerEncoderLayer(4, 2, 8, 0.1, batch_first=True)
    appended.self_attn = nn.MultiheadAttention(4, 2, 0.1, add_bias_kv=True, batch_first=True)
    twins = xd.convert_dropout(appended, 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="self_attn: bias_k"):
        appended(X)


def test_dice_that_come_later_are_noticed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout, self.drawn = nn.Dropout(0.1), False

        def forward(self, x):
            return self.dropout(x) * (torch.ops.aten.native_dropout(x, 0.5, True)[0] if self.drawn else 1)

    twins = xd.convert_dropout(Model(), 1.0)
    twins.model(X.clone().requires_grad_())
    twins()
    twins.model.drawn = True
    with pytest.raises(xd.UnsupportedSiteError, match="has drawn random numbers"):
        several(twins.model)


def test_recurrent_layers_with_dropout_are_refused():
    model = nn.ModuleDict({"r": nn.LSTM(4, 4, 2, dropout=0.5)})
    with pytest.raises(xd.UnsupportedSiteError, match="r: the dropout between layers of LSTM"):
        xd.convert_dropout(model)
    xd.convert_dropout(model, others="keep").remove()


@pytest.mark.parametrize("make", [t5, bart])
def test_parts_that_are_called_alone_are_refused(make):
    model = make().train()
    twins = converted(model)
    with pytest.raises(xd.CollectionError, match="outside of a training pass"):
        model.get_encoder()(IDS)
    with torch.no_grad():
        model.get_encoder()(IDS)
    model.get_encoder().eval()(IDS)
    twins.remove()
    model.get_encoder().train()(IDS)


def test_replicas_of_data_parallel_are_refused():
    model = layers()
    twins = xd.convert_dropout(model)
    replica = model._replicate_for_data_parallel()
    with pytest.raises(xd.UnsupportedSiteError, match="DistributedDataParallel"):
        replica(TOKENS)
    twins.remove()


def test_two_threads_at_once_are_refused_and_one_after_the_other_are_not():
    entered, go_on, errors = threading.Event(), threading.Event(), []

    def wait(_self, x):
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            go_on.wait(20)
        return x

    model = Calling(wait)
    twins = xd.convert_dropout(model, 1.0)

    def run():
        try:
            model(X)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert entered.wait(20)
    with pytest.raises(xd.CollectionError, match="in another thread"):
        model(X)
    go_on.set()
    thread.join()
    assert not errors
    model(X)
    assert twins() > 0


def test_a_penalty_that_would_be_nothing_is_an_error():
    model = Calling(lambda _self, x: x, rate=0.0)
    twins = xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        twins()
    model(X)
    with pytest.raises(xd.CollectionError, match="has drawn no dropout"):
        twins()
    twins.remove()
    with pytest.raises(xd.CollectionError, match="was removed"):
        twins()
    model.dropout.p = 0.3
    twins = xd.convert_dropout(model, 1.0)
    model.eval()(X)
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        twins()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strength": -1.0}, "strength"),
        ({"hidden": [1.0, 2.0]}, "one strength"),
        ({"others": "allow"}, "others"),
        ({"padding": 3}, "padding"),
        ({"value": 1.0}, "'value'; the closest is"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(xd.InputError, match=words):
        xd.convert_dropout(nn.Dropout(), **options)


def test_one_regulariser_at_a_time():
    model = layers()
    twins = xd.convert_dropout(model)
    for attach in (xd.convert_dropout, lambda m: xd.ExplicitDropout(m, xd.paper(0.1), value=1.0)):
        with pytest.raises(xd.InputError, match="without a regulariser"):
            attach(model)
    twins.remove()
    xd.ExplicitDropout(model, xd.paper(0.1), value=1.0).remove()


# ---------------------------------------------------------------------------------------------- living with a model


def test_removed_it_leaves_the_model_as_it_was():
    model, args, kwargs, _ = made("timm ViT")
    keys = list(model.state_dict())
    torch.manual_seed(3)
    before = model(*args, **kwargs)
    with xd.convert_dropout(model) as twins:
        model(*args, **kwargs)
        assert list(model.state_dict()) == keys
        assert "12 places" in str(twins)
    torch.manual_seed(3)
    assert torch.equal(model(*args, **kwargs), before)


def test_copies_are_inert_and_the_model_can_be_saved():
    model = layers()
    twins = xd.convert_dropout(model, 1.0, padding=lambda _path, _x: None)
    model(TOKENS)
    twins()
    twin = copy.deepcopy(model)
    torch.manual_seed(0)
    assert not torch.equal(twin(TOKENS), twin(TOKENS))  # it has its dice
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.load(file, weights_only=False)(TOKENS)
    assert torch.equal(model(TOKENS), model(TOKENS))
    assert twins() > 0


def test_passes_without_gradients_have_no_dice_and_no_terms():
    model = layers()
    twins = xd.convert_dropout(model, 1.0)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), model(TOKENS))
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        twins()
    model(TOKENS)
    twins.discard()
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        twins()


def test_two_passes_are_one_batch():
    model = layers()
    twins = xd.convert_dropout(model, 1.0)
    model(TOKENS)
    whole = twins()
    model(TOKENS[:1])
    model(TOKENS[1:])
    assert_close(twins(), whole)


def test_a_pass_that_fails_or_is_interrupted_leaves_the_dice_of_others_alone():
    def stop(self, x):
        if self.error:
            raise self.error
        return x

    model, other = Calling(stop), nn.Dropout(0.5)
    twins = xd.convert_dropout(model, 1.0)
    for error in (ValueError(), KeyboardInterrupt()):
        model.error = error
        with pytest.raises(type(error)):
            model(X)
        assert (other(torch.ones(1000)) == 0).any()
        model.error = None
        model(X)
        assert twins() > 0
        assert (other(torch.ones(1000)) == 0).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_penalty_is_float32_under_autocast(dtype):
    model, args, kwargs, _ = made("timm ViT")
    twins = xd.convert_dropout(model, 1.0)
    model(*args, **kwargs)
    full = twins()
    with torch.autocast("cpu", dtype):
        model(*args, **kwargs)
        penalty = twins()
    assert penalty.dtype == torch.float32
    assert_close(penalty, full, rtol=2e-2, atol=0)


def test_autocast_inside_the_model_may_be_over_when_twins_are_made():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Linear(16, 16), layers()

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.layers(self.embed(x))

    torch.manual_seed(0)
    model = Model()
    twins = xd.convert_dropout(model, 1.0)
    model(TOKENS)
    half = twins()
    twins.remove()
    full = copy.deepcopy(model)
    full.forward = lambda x: full.layers(full.embed(x))
    twins = xd.convert_dropout(full, 1.0)
    full(TOKENS)
    assert_close(half, twins(), rtol=2e-2, atol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_eval_mode_is_left_alone():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 24, 0.2, batch_first=True), 1).eval()
    with torch.no_grad():
        before = model(TOKENS, src_key_padding_mask=MASK == 0)
        twins = xd.convert_dropout(model, 1.0)
        assert torch.equal(model(TOKENS, src_key_padding_mask=MASK == 0), before)  # by its fast path
    twins.remove()
    sampling = Calling(lambda self, x: x if self.training else torch.multinomial(x[0].exp(), 1))
    twins = xd.convert_dropout(sampling, 1.0)
    sampling.eval()(X)


def test_under_function_transforms_it_is_the_same():
    model = layers()
    twins = xd.convert_dropout(model, 1.0)
    parameters = dict(model.named_parameters())

    def penalty(given):
        torch.func.functional_call(model, given, (TOKENS,))
        return twins()

    found = torch.func.grad(penalty)(parameters)
    model(TOKENS)
    wanted = torch.autograd.grad(twins(), list(parameters.values()), allow_unused=True)
    for ours, theirs in zip(found.values(), wanted, strict=True):
        assert_close(ours, torch.zeros_like(ours) if theirs is None else theirs)


def test_a_part_that_the_model_runs_without_gradients_has_neither_dice_nor_twins():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = layers(), layers()

        def forward(self, x):
            with torch.no_grad():
                target = self.teacher(x)
            return self.student(x) - target

    model = Model()
    twins = xd.convert_dropout(model, 1.0)
    assert torch.equal(model(TOKENS), model(TOKENS))
    twins()
    assert {site.path.split(".")[0] for site in twins.sites} == {"student"}


def test_a_penalty_that_no_parameter_moves_is_an_error():
    model = nn.Sequential(nn.Dropout(0.2), nn.ReLU(), nn.Linear(4, 2))
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    with pytest.raises(xd.CollectionError, match="no parameter of Sequential moves"):
        twins()


class Meanwhile(nn.Module):
    """Another thread draws while the model runs, in so many passes of every four."""

    def __init__(self, passes):
        super().__init__()
        self.passes, self.calls = passes, 0

    def forward(self, x):
        self.calls += 1
        if self.calls % PATIENCE < self.passes:
            other = threading.Thread(target=random.random)
            other.start()
            other.join()
        return x


@pytest.fixture
def another_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()


@pytest.mark.usefixtures("another_thread")
def test_another_thread_that_draws_is_not_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), Meanwhile(PATIENCE - 1))
    twins = xd.convert_dropout(model, 1.0)
    for _ in range(30):
        model(X)
        twins()


@pytest.mark.usefixtures("another_thread")
def test_what_draws_in_every_pass_is_taken_for_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), Meanwhile(PATIENCE))
    twins = xd.convert_dropout(model, 1.0)
    for _ in range(PATIENCE - 1):
        model(X)
        twins()
    with pytest.raises(xd.UnsupportedSiteError, match="another thread of the program"):
        model(X)


@pytest.mark.parametrize("bad", [[True, False], torch.ones(3), torch.ones(1, 2, dtype=torch.bool)])
def test_a_padding_function_has_to_return_a_mask_of_the_tokens(bad):
    model = layers()
    xd.convert_dropout(model, 1.0, padding=lambda *_: bad)
    with pytest.raises(xd.CollectionError, match="the mask of your padding function"):
        model(TOKENS)


def test_training_with_it_lowers_the_penalty():
    torch.manual_seed(0)
    model = layers()
    twins = xd.convert_dropout(model, 1.0)
    optimiser, found = torch.optim.Adam(model.parameters(), 1e-2), []
    for _ in range(20):
        loss = F.mse_loss(model(TOKENS), TOKENS) + (penalty := twins())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(penalty.item())
    assert found[-1] < 0.5 * found[0]
