"""Modules whose layout is easily misread: grouped heads by any name, tokens first, filled windows, adapters."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout.testing import check_rule

INVERTED, PAPER = xd.inverted(0.2), xd.paper(0.2)


def terms(model, call, noise=INVERTED, **strengths):
    """The terms of one training pass."""
    with xd.ExplicitDropout(model.train(), noise, **strengths) as reg:
        model(**call) if isinstance(call, dict) else model(call)
        reg()
        return dict(reg.terms())


# ---------------------------------------------------------------------------------------------- grouped heads


class CausalSelfAttention(nn.Module):
    """As in LitGPT: one fused layer, fewer key heads than query heads."""

    def __init__(self, heads=4, groups=1, width=8, **kept):
        super().__init__()
        self.n_head, self.shape = heads, (heads * width, groups * width, groups * width)
        self.qkv, self.proj = nn.Linear(32, sum(self.shape), bias=False), nn.Linear(heads * width, 32)
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (-1, self.shape[0] // self.n_head)).transpose(1, 2)
            for part in self.qkv(x).split(self.shape, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(y.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("name", ["num_kv_heads", "n_query_groups", "num_heads_kv", "kv_n_heads", "whatever"])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (8, 2), (4, 4)])
def test_fused_key_heads_are_found_whatever_their_number_is_called(name, heads, groups):
    torch.manual_seed(0)
    model, x = CausalSelfAttention(heads, groups, **{name: groups}), torch.randn(2, 5, 32)
    query, key, value = model.qkv.weight.split(model.shape)
    found = terms(model, x, query=1.0, value=1.0)
    assert_close(found[":value"], xd.functional.linear(x, value, INVERTED).detach())
    grouped = xd.functional.query(x, query, key, INVERTED, heads=heads, key_heads=groups, scale=8**-0.5, causal=True)
    assert_close(found[":query"], grouped.detach())
    assert {"values", "pairs", "scores"} <= set(check_rule(model, x, samples=64, compile=False).passed)


@pytest.mark.parametrize("name", ["n_query_groups", "num_heads_kv", "kv_n_heads"])
def test_without_an_output_projection_the_name_says_how_many_key_heads_there_are(name):
    model = CausalSelfAttention(4, 1, **{name: 1})
    model.proj = nn.Identity()
    assert xd.find_sites(model)[0].key_heads == 1


def test_values_wider_than_queries_are_not_taken_for_fewer_key_heads():
    """As in LeViT: 4 heads of 4 + 4 + 8 rows, as many as 4 query heads and 2 key heads of 8 have."""
    assert not xd.find_sites(CausalSelfAttention(4, 2, key_dim=4))


@pytest.mark.parametrize("kept", [{"n_query_groups": 2}, {"head_dim": 4}], ids=["another number", "another width"])
def test_a_fused_layer_that_contradicts_what_its_module_says_is_not_cut(kept):
    assert not xd.find_sites(CausalSelfAttention(4, 1, **kept))


def test_a_fused_layer_that_holds_something_else_is_not_cut():
    gated = CausalSelfAttention()
    gated.qkv = nn.Linear(32, 4 * 32)  # a gate beside query, key and value
    assert not xd.find_sites(gated)
    uneven = CausalSelfAttention()
    uneven.qkv = nn.Linear(32, 32 + 2 * 24)  # three key heads for four query heads
    assert not xd.find_sites(uneven)


# ---------------------------------------------------------------------------------------------- tokens first


class TokenFirst(nn.Module):
    """As in fairseq: (token, batch, width)."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.batch_first = 4, False
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            layer(x).unflatten(-1, (4, 8)).permute(1, 2, 0, 3) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2))


def test_attention_that_says_it_is_not_batch_first_is_read_so():
    torch.manual_seed(0)
    model, x = TokenFirst(), torch.randn(20, 3, 32)
    turned = x.transpose(0, 1)
    q, k = model.q_proj, model.k_proj
    options = {"query_bias": q.bias, "key_bias": k.bias, "heads": 4, "scale": 8**-0.5}
    expected = xd.functional.query(turned, q.weight, k.weight, INVERTED, **options)
    assert_close(terms(model, x, query=1.0)[":query"], expected.detach())
    by_sample = xd.functional.linear(turned, model.v_proj.weight, INVERTED, reduction="sample")
    assert_close(terms(model, x, value=1.0, reduction="sample")[":value"], by_sample.detach())


def test_a_network_that_says_it_is_not_batch_first_is_read_so():
    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.batch_first, self.fc1, self.fc2 = False, nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.fc2(self.fc1(x).relu())

    model, x = Network(), torch.randn(7, 2, 8)
    found = terms(model, x, feed_forward=1.0, reduction="sample")["fc1:feed_forward"]
    expected = xd.functional.linear(x.transpose(0, 1), model.fc1.weight, INVERTED, reduction="sample")
    assert_close(found, expected.detach())


SIDES = {
    f"{side}_{name}": number
    for side in ("encoder", "decoder")
    for name, number in {"layers": 1, "attention_heads": 4, "ffn_dim": 48, "layerdrop": 0.0}.items()
}
"""A small encoder and a small decoder."""


def fsmt(transformers):
    return transformers.FSMTModel(
        transformers.FSMTConfig(
            langs=["en", "de"], src_vocab_size=60, tgt_vocab_size=60, d_model=32, pad_token_id=1, dropout=0.0,
            attention_dropout=0.0, activation_dropout=0.0, **SIDES,
        )
    )  # fmt: skip


def led(transformers):
    return transformers.LEDModel(
        transformers.LEDConfig(vocab_size=60, d_model=32, attention_window=4, pad_token_id=1, dropout=0.0, **SIDES)
    )


def longformer(transformers):
    return transformers.LongformerModel(
        transformers.LongformerConfig(
            vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48,
            attention_window=4, pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


@pytest.mark.parametrize("build", [fsmt, led, longformer])
@pytest.mark.parametrize("samples", [4, 6])
def test_padded_samples_count_as_they_do_alone_where_tokens_come_first(build, samples):
    """A sequence of 6 fills windows of 4 only with padding of the model's own."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, real = build(transformers), [6, 5, 4, 3, 2, 6][:samples]
    ids = torch.randint(5, 60, (samples, 6))
    mask = torch.arange(6) < torch.tensor(real)[:, None]
    ids[~mask] = 1
    targets = {} if build is longformer else {"decoder_input_ids": torch.randint(5, 60, (samples, 6))}
    strengths = {"value": {0: 1.0}, "feed_forward": {0: 1.0}}

    def run(call, given):
        told = {"decoder_attention_mask": torch.ones(len(call["input_ids"]), 6)} if given else {}
        return terms(model, {**call, **given, **told}, **strengths)

    together = run({"input_ids": ids, "attention_mask": mask.long()}, targets)
    alone = [
        run({"input_ids": ids[i : i + 1, :n]}, {name: x[i : i + 1] for name, x in targets.items()})
        for i, n in enumerate(real)
    ]
    for name in (name for name in together if not name.startswith("decoder")):
        expected = sum(n * part[name] for n, part in zip(real, alone, strict=True)) / sum(real)
        assert_close(together[name], expected, msg=name)


# ---------------------------------------------------------------------------------------------- windows that are filled


WINDOWS = {"patch_size": 4, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 7, "drop_path_rate": 0.0}


def window_model(name, pixels):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "Swin2SR":
        options = {**WINDOWS, "patch_size": 1, "upscale": 2}
        return transformers.Swin2SRModel(transformers.Swin2SRConfig(image_size=pixels // 4, **options)).double()
    return getattr(transformers, f"{name}Model")(
        getattr(transformers, f"{name}Config")(image_size=pixels, **WINDOWS)
    ).double()


def values_of(model, call):
    """The inputs of the value projections, window by window, and these projections."""
    seen, handles = {}, []
    for name, module in model.named_modules():
        if name.endswith(("v_proj", "value")) and isinstance(module, nn.Linear):
            hook = lambda module, args, _, name=name: seen.update({name: (args[0].detach(), module.weight.detach())})  # noqa: E731
            handles.append(module.register_forward_hook(hook))
    model(call)
    for handle in handles:
        handle.remove()
    return list(seen.values())


@pytest.mark.parametrize("name", ["Swin", "Swinv2", "DonutSwin", "MaskFormerSwin"])
@pytest.mark.parametrize("noise", [INVERTED, PAPER], ids=str)
@pytest.mark.parametrize(("built", "given"), [(40, 40), (56, 40), (56, 56), (40, 56)])
def test_what_fills_windows_of_images_does_not_count(name, noise, built, given):
    """10 × 10 patches fill 2 × 2 windows of 7 × 7 only with padding, in a layer that shifts them, too."""
    model, x = window_model(name, built).train(), torch.randn(2, 3, given, given, dtype=torch.float64)
    found, seen = terms(model, x, noise, value=1.0), values_of(model, x)
    assert len(found) == len(seen) == 2
    for term, (windows, weight) in zip(found.values(), seen, strict=True):
        real = windows.abs().sum(-1) > 0
        assert int(real.sum()) == 2 * (given // 4) ** 2  # two images
        assert real.all() == (given == 56)
        expected = xd.functional.linear(windows, weight, noise, mask=real)
        assert_close(term.double(), expected.double(), rtol=1e-5, atol=0)
        if given == 40:
            assert (expected / xd.functional.linear(windows, weight, noise) - 1).abs() > 0.5
    assert xd.find_sites(model)[0].path.endswith((".attention", ".attention.self"))


def test_attention_of_clap_and_swin2sr_is_measured_at_its_call():
    transformers = pytest.importorskip("transformers")
    audio = transformers.ClapAudioModel(
        transformers.ClapAudioConfig(
            window_size=4, num_mel_bins=8, spec_size=32, hidden_size=32, depths=[1], num_attention_heads=[2],
            patch_size=2, patch_stride=[2, 2], patch_embeds_hidden_size=16,
        )
    )  # fmt: skip
    for model in (audio, window_model("Swin2SR", 56)):
        values = [site for site in xd.find_sites(model) if site.component == "value"]
        assert values
        assert all(site.source.described.inputs == ("hidden_states",) * 3 for site in values)


def test_the_rule_of_windows_can_be_proved():
    report = check_rule(window_model("Swin", 56).float(), torch.randn(2, 3, 56, 56), samples=64, compile=False)
    assert {"exact", "gradient"} <= set(report.passed)


# ---------------------------------------------------------------------------------------------- adapters


def rates(model):
    return {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}


def test_dropout_of_lora_stays_and_that_of_attention_does_not():
    peft = pytest.importorskip("peft")

    class Attention(TokenFirst):
        def __init__(self):
            super().__init__()
            self.drop = nn.Sequential(nn.Dropout(0.3))

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = peft.get_peft_model(nn.Sequential(Attention()), config)
    before = rates(model)
    assert sorted(before.values()) == [0.1, 0.1, 0.3]
    with xd.ExplicitDropout(model, INVERTED, value=1.0):
        assert rates(model) == {name: 0.0 if "lora" not in name else rate for name, rate in before.items()}
    assert rates(model) == before


class Lora(nn.Module):
    """Somebody's own, which keeps the layer under the name that peft has for it."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.down, self.up = base_layer, nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.up(self.down(x))


@pytest.mark.parametrize("part", ["q_proj", "k_proj", "v_proj"])
def test_adapters_that_are_not_those_of_peft_are_refused_by_name(part):
    model = TokenFirst()
    setattr(model, part, Lora(getattr(model, part)))
    components = {"q_proj": ["query", "query_key"], "k_proj": ["key", "query_key"], "v_proj": ["value"]}[part]
    for component in components:
        for noise in (xd.paper(0.2), INVERTED):
            with pytest.raises(xd.UnsupportedSiteError, match=rf"{component}: .*Lora holds its layer as 'base_layer'"):
                xd.ExplicitDropout(model, noise, **{component: 1.0})


def test_matrices_of_lora_are_no_layers_of_a_feed_forward_network():
    peft, x_transformers = pytest.importorskip("peft"), pytest.importorskip("x_transformers")
    stack = x_transformers.Encoder(dim=16, depth=1, heads=2, attn_dim_head=8, ff_dropout=0.3, verbose=False)
    plain = [site.path for site in xd.find_sites(stack) if site.component == "feed_forward"]
    model = peft.get_peft_model(stack, peft.LoraConfig(r=2, target_modules=plain, lora_dropout=0.1))
    found = [site.path for site in xd.find_sites(model) if site.component == "feed_forward"]
    assert found == [f"base_model.model.{path}" for path in plain]
    with xd.ExplicitDropout(model, INVERTED, feed_forward=1.0):
        assert {rate for name, rate in rates(model).items() if "lora" in name} == {0.1}
