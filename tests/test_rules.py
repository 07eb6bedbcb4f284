"""A rule of one's own: ten lines describe a model, and check_rule proves them or says what is wrong with them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout import finding, kernels, sites
from explicit_dropout.sites import Pairs
from explicit_dropout.testing import CHECKS, RuleError, check_rule, measuring, repeating

WIDTH, HEADS, KEY_HEADS, HIDDEN = 12, 4, 2, 20
HEAD = WIDTH // HEADS


class Mixer(nn.Module):
    """Causal attention with two key heads for four query heads, under names that no rule of the library knows."""

    def __init__(self):
        super().__init__()
        self.mix_in = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * HEAD)
        self.mix_out = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.noise = nn.Dropout(0.3)

    def forward(self, x):
        q, k, v = self.mix_in(x).split((HEADS * HEAD, KEY_HEADS * HEAD, KEY_HEADS * HEAD), -1)
        q, k, v = (torch.unflatten(part, -1, (-1, HEAD)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(HEADS // KEY_HEADS, 1) for part in (k, v))
        scores = 0.7 * q @ k.mT + self.position(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = self.noise(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        return self.mix_out((weights @ v).transpose(1, 2).flatten(2))

    def position(self, x):  # what the model adds to its scores, which is no business of the rule's
        return 0.1 * torch.arange(x.shape[1], dtype=x.dtype)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixer = Mixer()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.mixer(x)
        return x + self.down(F.gelu(self.up(x)))


def attention(module, **changes):
    ends = [0, HEADS * HEAD, (HEADS + KEY_HEADS) * HEAD, (HEADS + 2 * KEY_HEADS) * HEAD]
    query, key, value = (xd.Projection(module.mix_in, slice(*ends[i : i + 2])) for i in range(3))
    description = {
        "query": query, "key": key, "value": value, "output": module.mix_out, "heads": HEADS, "key_heads": KEY_HEADS,
        "scale": 0.7, "causal": True, "weights": module.noise,
    }  # fmt: skip
    return xd.Attention(module, **{**description, **changes})


def feed_forward(module):
    return xd.FeedForward((xd.Projection(module.up), xd.Projection(module.down)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


@pytest.fixture
def x():
    return torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(1))


def use(monkeypatch, rule=attention, block=feed_forward):
    monkeypatch.setitem(sites._RULES, Mixer, rule)
    monkeypatch.setitem(sites._RULES, Block, block)


def test_a_right_rule_passes_every_check(monkeypatch, x):
    use(monkeypatch)
    model = nn.Sequential(Block())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = check_rule(model, x)
    assert set(report.passed) == set(CHECKS)
    assert report.skipped == []
    assert len(report.sites) == 7
    assert "7 sites proved" in str(report)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def swapped(module):
    right = attention(module)
    return attention(module, key=right.value, value=right.key)


def queries_for_keys(module):
    """As many keys as queries, so that nothing but the roles is wrong."""
    right = attention(module)
    first = xd.Projection(module.mix_in, slice(0, KEY_HEADS * HEAD))
    return attention(module, query=right.key, key=first, heads=KEY_HEADS, key_heads=KEY_HEADS)


def shuffled(module):
    """The rows of the query heads, interleaved as some families have them."""
    rows = tuple(head * HEAD + i for i in range(HEAD) for head in range(HEADS))
    return attention(module, query=xd.Projection(module.mix_in, rows))


def data_dependent(attention, call, x, context):  # noqa: ARG001
    return Pairs(causal=bool(x.sum() < 1e9))


WRONG = {
    "key and value swapped": (swapped, "values", "do not|does not average"),
    "key projection never called": (lambda m: attention(m, key=xd.Projection(m.idle)), "fires", "never called"),
    "wrong number of heads": (
        lambda m: attention(m, heads=HEADS // 2, key_heads=KEY_HEADS // 2),
        "values|scores",
        "failed for",
    ),
    "wrong number of key heads": (lambda m: attention(m, key_heads=1), "values|scores", "failed for"),
    "wrong scale": (lambda m: attention(m, scale=0.8), "scores", "Check `heads`, `key_heads`, `scale`"),
    "scale left out": (lambda m: attention(m, scale=None), "scores", "relative gap"),
    "query rows in another order": (shuffled, "scores", "rows of `query`"),
    "queries and keys swapped": (queries_for_keys, "values|scores", "failed for"),
    "causal left out": (lambda m: attention(m, causal=False), "pairs", "never sees"),
    "weight transposed": (lambda m: attention(m, value=xd.Projection(m.idle, transposed=True)), "fires", "failed for"),
    "output projection elsewhere": (lambda m: attention(m, output=m.idle), "values", "output projection"),
    "weights computed past a bias": (lambda m: attention(m, weights="compute"), "weights", "attended_value"),
    "weights of another module": (lambda m: attention(m, weights=m.mix_out), "weights", "relative gap"),
    "pairs that depend on data": (lambda m: attention(m, pairs=data_dependent), "compile", "failed for"),
    "pairs that cannot be pickled": (lambda m: attention(m, pairs=lambda *_: Pairs(causal=True)), "pickle", "lambda"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_rule_is_caught_by_name(monkeypatch, model, x, mistake):
    rule, check, message = WRONG[mistake]
    use(monkeypatch, rule)
    with pytest.raises(RuleError, match=message) as caught:
        check_rule(model, x, samples=64, compile=check == "compile")
    first = caught.value.failures[0]
    assert first.check in check.split("|"), str(first)
    if check not in ("compile", "pickle"):
        assert "mixer" in first.site
    assert isinstance(caught.value, xd.ExplicitDropoutError)
    assert isinstance(caught.value, AssertionError)


def test_a_feed_forward_layer_that_is_never_called_is_caught(monkeypatch, model, x):
    use(monkeypatch, block=lambda m: xd.FeedForward((xd.Projection(m.up), xd.Projection(m.idle))))
    with pytest.raises(RuleError, match=r"fires failed for 0\.idle: the layer projection \(Linear\) is never called"):
        check_rule(model, x)


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.square = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.square(x)


def test_a_layer_stored_transposed_is_caught(monkeypatch, x):
    rule = lambda m: xd.FeedForward((xd.Projection(m.square, transposed=True),))  # noqa: E731
    monkeypatch.setitem(sites._RULES, Square, rule)
    with pytest.raises(RuleError, match=r"projection failed for square: .* not x Wᵀ \+ b"):
        check_rule(Square(), x)


def test_a_closed_form_that_is_wrong_is_caught(monkeypatch, model, x):
    """No rule can make it so; a slip in the library could."""
    use(monkeypatch)
    norms = kernels.norms
    monkeypatch.setattr(kernels, "norms", lambda weights: 1.5 * norms(weights))
    with pytest.raises(RuleError, match=r"exact failed for 0\.mixer:value: the closed form says .* perturbed calls"):
        check_rule(model, x, compile=False)


def test_a_site_without_gradient_is_caught(monkeypatch, model, x):
    use(monkeypatch)
    with torch.no_grad():
        model[1].up.weight.zero_()
        model[1].up.bias.zero_()  # gelu(0) = 0: the next layer sees nothing
    with pytest.raises(RuleError, match=r"gradient failed for 1\.down:feed_forward: that of the own weight is zero"):
        check_rule(model, x, samples=64, compile=False)


def test_all_mistakes_of_a_kind_are_told_at_once(monkeypatch, model, x):
    use(monkeypatch, lambda m: attention(m, scale=0.5))
    with pytest.raises(RuleError) as caught:
        check_rule(model, x)
    assert [failure.site for failure in caught.value.failures] == ["0.mixer:query_key", "1.mixer:query_key"]


def test_a_model_without_a_rule_is_no_pass():
    with pytest.raises(xd.UnmatchedModelError, match="register_rule"):
        check_rule(nn.Linear(3, 3), torch.randn(2, 3))


def test_what_cannot_be_checked_is_reported_not_passed_over(monkeypatch, model, x):
    use(monkeypatch, lambda m: attention(m, obstacle="queries are normalised"))
    report = check_rule(model, x, samples=64, compile=False)
    assert any("scores of 0.mixer: queries are normalised" in line for line in report.skipped)
    assert any("0.mixer:query, 0.mixer:key, " in line and ": queries are normalised" in line for line in report.skipped)
    assert report.proved == [
        s for s in report.sites if s.rpartition(":")[2] in ("value", "attended_value", "feed_forward")
    ]
    assert "8 of 14 sites proved" in str(report)
    assert {"fires", "projection", "values", "exact"} <= set(report.passed)
    assert "scores" not in report.passed


def test_the_rules_of_torch_nn_pass():
    torch.manual_seed(0)
    host = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
    report = check_rule(host, torch.randn(2, 6, 8), torch.randn(2, 4, 8), compile=False)
    assert len(report.sites) == 7 + 12


def test_the_rules_for_rotary_and_relative_positions_pass():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
    ids = torch.randint(5, 30, (2, 6))
    llama = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=30, num_key_value_heads=2, **size))
    assert "scores" in check_rule(llama, input_ids=ids, use_cache=False, samples=64, compile=False).passed
    config = transformers.T5Config(vocab_size=30, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    report = check_rule(
        transformers.T5Model(config), input_ids=ids, decoder_input_ids=ids, use_cache=False, compile=False
    )
    assert "exact" in report.passed


def test_the_rule_for_a_latent_query_passes():
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    small = {"img_size": 32, "embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5}
    host = timm.create_model("vit_base_patch16_siglip_224", **small)
    report = check_rule(host, torch.randn(2, 3, 32, 32), compile=False)
    assert report.skipped == []
    pool = {"attn_pool:query_key", "attn_pool:attended_value", "attn_pool.mlp.fc2:feed_forward"}
    assert pool <= set(report.sites)


# ------------------------------------------------------------------------------------------------ gates


class Gated(nn.Module):
    """last(silu(gate(x)) · first(x)), under any names."""

    def __init__(self, gate, first, last):
        super().__init__()
        self.names = gate, first, last
        for name, shape in zip(self.names, ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)), strict=True):
            setattr(self, name, nn.Linear(*shape))

    def forward(self, x):
        gate, first, last = (getattr(self, name) for name in self.names)
        return last(F.silu(gate(x)) * first(x))


def linear_layers(model):
    return {site.path for site in finding.find_sites(model) if site.component == "feed_forward"}


@pytest.mark.parametrize(
    "names",
    [
        ("gate", "fc1", "fc2"),
        ("fc3", "fc1", "fc2"),
        ("w_gate", "w1", "w2"),
        ("w0", "w1", "w2"),
        ("gate", "up_proj", "down_proj"),
        ("linear_v", "linear1", "linear2"),
        ("fc_gate", "fc_in", "fc_out"),
        ("gate_proj", "up_proj", "down_proj"),
        ("w1", "w3", "w2"),
    ],
)
def test_a_gate_is_a_site_by_whatever_name(names, x):
    torch.manual_seed(0)
    host = nn.Sequential(Gated(*names))
    assert linear_layers(host) == {f"0.{name}" for name in names}
    assert len(check_rule(host, x, samples=64, compile=False).sites) == 3


def test_the_gate_of_an_encoder_layer_of_ones_own_is_a_site(x):
    class GatedLayer(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(WIDTH, HEADS, HIDDEN, batch_first=True)
            self.linear3 = nn.Linear(WIDTH, HIDDEN)

        def _ff_block(self, x):
            return self.linear2(self.linear1(x) * self.linear3(x).sigmoid())

    torch.manual_seed(0)
    host = nn.Sequential(GatedLayer())
    assert linear_layers(host) == {"0.linear1", "0.linear2", "0.linear3"}
    assert "0.linear3:feed_forward" in check_rule(host, x, samples=64, compile=False).sites


def test_the_gates_of_vitamin_are_sites():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        host = timm.create_model("vitamin_small_224")
    assert {f"blocks.13.mlp.{name}" for name in ("w0", "w1", "w2")} <= linear_layers(host)


def test_projections_beside_a_network_are_no_gates():
    class Keeping(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = HEADS
            for name in ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"):
                setattr(self, name, nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            return x

    assert linear_layers(Keeping()) == {"fc1", "fc2"}


def test_an_encoder_layer_with_another_network_has_that():
    class Replaced(nn.TransformerEncoderLayer):
        def __init__(self):
            super().__init__(WIDTH, HEADS, HIDDEN, batch_first=True)
            del self.linear1, self.linear2
            self.mlp = Gated("gate", "fc1", "fc2")

        def _ff_block(self, x):
            return self.mlp(x)

    assert linear_layers(Replaced()) == {"mlp.gate", "mlp.fc1", "mlp.fc2"}


# ------------------------------------------------------------------------------------------------ masks, really drawn


def test_attention_weights_are_read_out_of_the_real_attention(monkeypatch, model, x):
    use(monkeypatch)
    layer = finding.find_layers(model)[0]
    taken = repeating.record(model, [layer], (x,), {})
    with repeating.steady(model):
        read = repeating.AttentionAgain(layer.described, taken.of(layer)[0]).weights()
    seen = []
    model[0].mixer.noise.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(x)
    torch.testing.assert_close(read, seen[0], rtol=1e-5, atol=1e-6)


def test_a_steady_model_draws_nothing_and_goes_back_to_what_it_was():
    torch.manual_seed(0)
    host = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 12, dropout=0.5, batch_first=True), nn.Dropout(0.5))
    host.eval()
    host[1].train()
    x = torch.randn(2, 5, 8)
    state = torch.get_rng_state()
    with repeating.steady(host):
        assert host.training
        first, second = host(x), host(x)
    assert torch.equal(first, second)
    assert [module.training for module in (host, host[0], host[1])] == [False, False, True]
    assert torch.equal(torch.get_rng_state(), state)


def test_one_mask_without_variance_is_measured_exactly(monkeypatch, model, x):
    use(monkeypatch)
    layer = finding.find_layers(model)[0]
    taken = repeating.record(model, [layer], (x,), {})
    value = next(site for site in sites.sites_of(layer) if site.component == "value")
    with repeating.steady(model):
        drawn = measuring.measure(value, taken.of(layer), xd.paper(0.3), 100)
    weight, _ = layer.described.value.parameters()
    assert drawn.samples == 1
    assert drawn.standard_error == 0
    torch.testing.assert_close(drawn.mean.float(), xd.functional.value(x, weight, xd.paper(0.3)).detach())


class TokensFirst(nn.Module):
    def __init__(self, *, tokens_first):
        super().__init__()
        self.tokens_first = tokens_first
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        parts = [layer(x) for layer in (self.a, self.b, self.c)]
        parts = [part.transpose(0, 1) for part in parts] if self.tokens_first else parts
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.d(attended.transpose(0, 1) if self.tokens_first else attended)


@xd.register_rule(TokensFirst)
def _tokens_first(module):
    parts = [xd.Projection(layer) for layer in (module.a, module.b, module.c)]
    return xd.Attention(
        module, *parts, output=module.d, heads=2, weights="compute", batch_first=not module.tokens_first
    )


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2)])
@pytest.mark.parametrize("component", ["query", "key", "query_key", "value", "attended_value"])
def test_attention_with_tokens_in_front_has_the_penalty_of_the_same_with_samples_in_front(component, noise):
    torch.manual_seed(0)
    usual, turned = TokensFirst(tokens_first=False), TokensFirst(tokens_first=True)
    turned.load_state_dict(usual.state_dict())
    x = torch.randn(3, 5, 8)
    penalties = []
    for model, given in ((usual, x), (turned, x.transpose(0, 1))):
        with xd.ExplicitDropout(model, noise, **{component: 1.0}) as reg:
            model(given)
            penalties.append(reg().detach())
    assert_close(*penalties)


def test_a_rule_for_attention_with_tokens_in_front_is_proved():
    torch.manual_seed(0)
    assert len(check_rule(TokensFirst(tokens_first=True), torch.randn(5, 3, 8), compile=False).sites) == 5


@pytest.mark.parametrize("rows", [slice(0, None, 3), slice(-4, None), slice(0, -1)])
def test_rows_that_are_no_plain_slice_are_refused(rows):
    with pytest.raises(xd.InputError, match="`rows` must be a slice from the front without a step"):
        xd.Projection(nn.Linear(4, 12), rows)


def test_indices_are_brought_to_a_device_once():
    projection, outputs = xd.Projection(nn.Linear(4, 6), (5, 1, 3)), torch.randn(2, 6)
    assert torch.equal(projection.of(outputs), outputs[:, [5, 1, 3]])
    with torch.inference_mode():
        kept = projection._index((5, 1, 3), outputs)
    assert projection._index((5, 1, 3), outputs) is kept
    projection.of(torch.randn(2, 6, requires_grad=True)).sum().backward()
