"""ExplicitDropout as an object: what it computes, what it leaves alone, what it refuses and in which words."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explicit_dropout as xd
from plain import (
    COMPONENTS,
    assert_same,
    encoder,
    images,
    llama,
    llama_penalties,
    plain_step,
    step,
    tokens,
    vit,
    vit_penalties,
)

NOISE = xd.bernoulli(0.2)
ALL = dict.fromkeys(COMPONENTS, 1.0)


def run_images(model):
    return model(images()).square().sum()


def hooks(model):
    kinds = [
        "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    ]  # fmt: skip
    return [(path, kind) for path, module in model.named_modules() for kind in kinds if getattr(module, kind)]


def rates(model):
    return [module.p for module in model.modules() if isinstance(module, nn.Dropout)] + [
        module.dropout for module in model.modules() if isinstance(module, nn.MultiheadAttention)
    ]


# ---------------------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2), xd.inverted(0.2), xd.gaussian(0.5)])
@pytest.mark.parametrize("reduction", ["token", "sample"])
def test_every_component_equals_the_plain_computation(noise, reduction):
    model = vit()
    expected = plain_step(
        model, run_images, lambda calls: vit_penalties(model, calls, noise, COMPONENTS, reduction=reduction)
    )
    reg = xd.ExplicitDropout(model, noise, **ALL, reduction=reduction)
    assert_same(step(model, reg, run_images), expected)


def test_the_reading_of_the_paper_merges_heads_without_scale_and_sums_over_tokens():
    model, components = vit(), ("query", "key", "query_key", "value", "feed_forward")

    def literal(calls):
        return {
            **vit_penalties(model, calls, NOISE, components[:3], heads=1, scale=1.0, reduction="sample"),
            **vit_penalties(model, calls, NOISE, components[3:], reduction="sample"),
        }

    expected = plain_step(model, run_images, literal)
    reg = xd.ExplicitDropout(model, NOISE, **dict.fromkeys(components, 1.0), reading="paper")
    assert reg.reduction == "sample"
    assert_same(step(model, reg, run_images), expected)


def test_the_reading_of_the_paper_under_rotary_embeddings_turns_each_head():
    model, noise = llama(num_key_value_heads=4), xd.paper(0.2)

    def run(model):
        return model(tokens(), labels=tokens()).loss

    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    def literal(calls):
        terms = {}
        for path, module in model.named_modules():
            if path.endswith("self_attn"):
                _, call, _ = calls[path][0]
                x = calls[f"{path}.q_proj"][0][0][0]
                q, k = (
                    torch.unflatten(layer(x), -1, (4, -1)).transpose(1, 2) for layer in (module.q_proj, module.k_proj)
                )
                q, k = apply_rotary_pos_emb(q, k, *call["position_embeddings"])
                scores = (q @ k.mT).sum(1)  # heads merged: one score for all of them
                terms[f"{path}:query"] = 0.5 * noise.mean**2 * scores.tril().square().sum() / x.shape[0]
        return terms

    expected = plain_step(model, run, literal)
    reg = xd.ExplicitDropout(model, noise, query=1.0, reading="paper")
    assert_same(step(model, reg, run), expected)


@pytest.mark.parametrize("make", [vit, encoder, llama])
def test_each_component_may_have_a_law_of_its_own(make):
    model = make()
    x = {vit: images(), encoder: torch.randn(2, 5, 16), llama: tokens()}[make]
    given = {
        "query": xd.paper(0.1), "value": xd.inverted(0.2), "attended_value": xd.bernoulli(0.3),
        "feed_forward": xd.gaussian(0.4),
    }  # fmt: skip
    strengths = dict(zip(given, (1.0, 0.5, 0.25, 2.0), strict=True))

    def run(laws, **strengths):
        model.zero_grad()
        with xd.ExplicitDropout(model, laws, **strengths) as reg:
            model(x)
            total = reg()
            total.backward()
            return total.detach(), reg.terms(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    total, terms, gradients = run(given, **strengths)
    alone = [run(given[component], **{component: strength}) for component, strength in strengths.items()]
    assert_close(total, sum(part for part, _, _ in alone))
    expected = {name: term for _, found, _ in alone for name, term in found.items()}
    assert terms.keys() == expected.keys()
    for name, term in terms.items():
        assert_close(term, expected[name])
    for name, gradient in gradients.items():
        assert_close(gradient, sum(found[name] for *_, found in alone if name in found), rtol=1e-4, atol=1e-6)
    with xd.ExplicitDropout(model, given, **strengths) as reg:
        assert "query: paper(0.1)" in reg.summary()


@pytest.mark.parametrize(
    ("noise", "words"),
    [
        (0.2, "a mapping from components"),
        ({"value": xd.paper(0.1)}, "none for feed_forward"),
        ({"value": xd.paper(0.1), "feed_forward": 0.1}, r"noise\['feed_forward'\]"),
        ({"value": xd.paper(0.1), "feed_forward": xd.paper(0.1), "query": xd.paper(0.1)}, "'query'"),
    ],
)
def test_laws_that_do_not_fit_the_components_are_refused(noise, words):
    with pytest.raises(xd.InputError, match=words):
        xd.ExplicitDropout(vit(), noise, value=1.0, feed_forward=1.0)


def test_padding_is_read_switched_off_or_given_by_a_function():
    model, noise = llama(), xd.bernoulli(0.2)
    mask = torch.arange(6) < torch.tensor([[6], [3], [4]])
    paths = []

    def given(path, x):
        paths.append(path)
        assert x.shape[:2] == mask.shape
        return mask

    def run(model):
        return model(tokens(), attention_mask=mask.long()).logits.square().sum()

    components = ["value", "feed_forward"]
    for padding, counted in (("auto", mask), (None, None), (given, mask)):
        expected = plain_step(model, run, lambda calls, m=counted: llama_penalties(model, calls, noise, components, m))
        with xd.ExplicitDropout(model, noise, value=1.0, feed_forward=1.0, padding=padding) as reg:
            assert_same(step(model, reg, run), expected)
    assert {f"model.layers.{layer}.self_attn" for layer in range(2)} < set(paths)


def small_bert(**settings):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).train()


class Around(nn.Module):
    """A model whose arguments have names of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Identity(), inner

    def forward(self, numbers, real):
        return self.inner(self.first(numbers), attention_mask=real).last_hidden_state


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2)])
def test_padding_is_read_from_a_model_inside_the_model(noise, compiled):
    inner, components = small_bert(), {"value": 1.0, "feed_forward": 1.0, "query": 1.0}
    numbers, real = torch.randint(20, (3, 6)), torch.arange(6) < torch.tensor([[6], [4], [1]])
    with xd.ExplicitDropout(inner, noise, **components) as reg:
        inner(numbers, attention_mask=real)
        expected = reg()
        expected_terms = reg.terms()
    outer = Around(inner)
    torch._dynamo.reset()
    with xd.ExplicitDropout(outer, noise, **components) as reg:
        run = torch.compile(outer, backend="eager") if compiled else outer
        for mask in (real.flip(0), real):
            run(numbers, mask)
            found = reg()
        assert_close(found, expected)
        for mine, other in zip(reg.terms().values(), expected_terms.values(), strict=True):
            assert_close(mine, other)


def test_padding_is_read_from_the_mask_of_pairs_that_a_part_of_a_model_is_given():
    model = small_bert()
    numbers, real = torch.randint(20, (3, 6)), torch.arange(6) < torch.tensor([[6], [4], [1]])
    with xd.ExplicitDropout(model, NOISE, value=1.0, feed_forward=1.0) as reg:
        model(numbers, attention_mask=real)
        expected = reg()
    hidden = model.embeddings(numbers)
    pairs = torch.zeros(3, 1, 1, 6).masked_fill(~real[:, None, None], -1e9)
    for mask in (pairs, pairs == 0, pairs.expand(3, 1, 6, 6)):
        with xd.ExplicitDropout(model.encoder, NOISE, value=1.0, feed_forward=1.0) as reg:
            model.encoder(hidden, attention_mask=mask)
            assert_close(reg(), expected)


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2)])
@pytest.mark.parametrize("samples", [4, 5])
def test_token_first_layers_have_the_same_penalty_in_every_precision(noise, samples):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=False).double().train()
    x, padded = torch.randn(5, samples, 8).double(), torch.arange(5) >= torch.tensor([[5, 4, 2, 1, 3][:samples]]).T
    found = []
    for dtype in (torch.float64, torch.float32):
        layer.to(dtype)
        with xd.ExplicitDropout(layer, noise, feed_forward=1.0) as reg:
            layer(x.to(dtype), src_key_padding_mask=padded)
            found.append(reg())
    assert_close(*found)


def test_a_sample_is_one_of_the_model_even_where_layers_see_windows_or_rows():
    class Rows(nn.Module):
        """Feed-forward layers on all tokens in one row, then on a map."""

        def __init__(self):
            super().__init__()
            self.one = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

        def forward(self, x):
            return self.one(x.reshape(-1, 2, 8)).view_as(x)  # windows of two tokens

    model, x = Rows().train(), torch.randn(3, 6, 8)
    found = {}
    for reduction in ("token", "sample"):
        with xd.ExplicitDropout(model, NOISE, value=1.0, feed_forward=1.0, reduction=reduction) as reg:
            model(x)
            found[reduction] = reg()
    assert_close(found["sample"], 6 * found["token"])


def test_feed_forward_layers_that_are_run_in_chunks_are_refused():
    model = small_bert(chunk_size_feed_forward=2)
    with pytest.raises(
        xd.UnsupportedSiteError, match=r"encoder\.layer\.0 runs it on 2 tokens.*chunk_size_feed_forward"
    ):
        xd.ExplicitDropout(model, NOISE, feed_forward=1.0)
    with xd.ExplicitDropout(model, NOISE, value=1.0) as reg:
        model(torch.randint(20, (2, 6)))
        assert reg() > 0


# ---------------------------------------------------------------------------------------------- what it leaves alone


@pytest.mark.parametrize("make", [vit, encoder, llama])
def test_outputs_and_state_are_bit_identical_with_it_and_no_hook_stays(make):
    model = make()
    x = {vit: images(), encoder: torch.randn(2, 5, 16), llama: tokens()}[make]

    def output():
        found = model(x)
        return found if isinstance(found, torch.Tensor) else found.logits

    before, keys = output(), list(model.state_dict())
    noise = xd.paper(0.2) if make is llama else NOISE
    components = [c for c in COMPONENTS if make is vit or c in ("query", "value", "feed_forward")]
    reg = xd.ExplicitDropout(model, noise, **dict.fromkeys(components, 1.0))
    assert torch.equal(output(), before)
    assert list(model.state_dict()) == keys
    assert hooks(model)
    reg.remove()
    assert not hooks(model)
    assert torch.equal(output(), before)


def trained(regularise, steps=4):
    model = vit(proj_drop_rate=0.1, attn_drop_rate=0.1)
    reg = regularise(model)
    torch.manual_seed(1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        optimiser.zero_grad()
        loss = model(images(seed=number)).square().mean()
        (loss if reg is None else loss + reg()).backward()
        optimiser.step()
    return model.state_dict()


def test_strength_zero_everywhere_is_bit_identical_to_no_library():
    without = trained(lambda _: None)
    for zero in (0.0, [0.0, 0.0], {}, xd.strengths.constant(0.0)):
        found = trained(lambda model, zero=zero: xd.ExplicitDropout(model, NOISE, **dict.fromkeys(COMPONENTS, zero)))
        assert all(torch.equal(without[name], found[name]) for name in without)


def test_only_the_dropout_of_regularised_sites_is_off_and_only_until_removed():
    model = encoder(dropout=0.1)
    before = rates(model)
    layer = model.layers[0]
    reg = xd.ExplicitDropout(model, NOISE, feed_forward=1.0, layers=0)
    assert layer.dropout.p == 0.0
    assert layer.self_attn.dropout == layer.dropout1.p == layer.dropout2.p == 0.1
    assert rates(model.layers[1]) == before[: len(rates(model.layers[1]))]
    assert "switched off at 1 places until remove(): layers.0.dropout.p = 0.1" in reg.summary()
    reg.remove()
    assert rates(model) == before
    with xd.ExplicitDropout(model, NOISE, value=1.0) as reg:
        assert all(block.self_attn.dropout == 0.0 for block in model.layers)
        assert all(block.dropout.p == 0.1 for block in model.layers)
        assert "layers.0.self_attn.dropout = 0.1" in reg.summary()
    assert rates(model) == before
    with xd.ExplicitDropout(model, NOISE, value=1.0, feed_forward=1.0, disable_dropout=False) as reg:
        assert rates(model) == before
        assert "switched off" not in reg.summary()


def test_the_context_manager_removes_it_after_an_error_too():
    model = encoder(dropout=0.1)
    before = rates(model)
    with pytest.raises(ZeroDivisionError), xd.ExplicitDropout(model, NOISE, value=1.0):
        1 / 0  # noqa: B018
    assert not hooks(model)
    assert rates(model) == before


def test_the_summary_names_every_site():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, **ALL)
    text = reg.summary()
    for site in reg.sites:
        assert any(site.path in line and site.component in line for line in text.splitlines())
    assert repr(reg) == text
    assert "14 sites" in text
    reg.remove()
    assert "Removed" in reg.summary()


# ---------------------------------------------------------------------------------------------- bad input


def assert_untouched(model, before):
    assert not hooks(model)
    assert rates(model) == before


@pytest.mark.parametrize(
    ("settings", "argument"),
    [
        ({}, "strengths"),
        ({"noise": 0.2, "value": 1.0}, "noise"),
        ({"value": 1.0, "reading": "literal"}, "reading"),
        ({"value": 1.0, "reduction": "mean"}, "reduction"),
        ({"value": 1.0, "padding": "left"}, "padding"),
        ({"value": 1.0, "padding": 3}, "padding"),
        ({"value": 1.0, "disable_dropout": "no"}, "disable_dropout"),
        ({"value": 1.0, "require_all": 1}, "require_all"),
        ({"value": 1.0, "layers": 2}, "layers"),
        ({"value": {5: 1.0}}, "value"),
        ({"model": "vit", "value": 1.0}, "model"),
    ],
)
def test_wrong_arguments_are_named_and_nothing_is_attached(settings, argument):
    model = encoder(dropout=0.1)
    before = rates(model)
    with pytest.raises(xd.InputError, match=f"`{argument}` must be"):
        xd.ExplicitDropout(**{"model": model, "noise": NOISE, **settings})
    assert_untouched(model, before)


def test_a_model_without_sites_is_told_its_closest_modules():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(xd.UnmatchedModelError, match=r"'0' \(3 → 4\), '2' \(4 → 2\).*register_rule"):
        xd.ExplicitDropout(model, NOISE, value=1.0)
    with pytest.raises(xd.UnmatchedModelError, match="none of them is a linear layer"):
        xd.ExplicitDropout(nn.Conv2d(1, 1, 1), NOISE, value=1.0)


def test_a_model_whose_attention_lacks_its_number_of_heads_is_told_so():
    attention = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("wq", "wk", "wv", "wo")})
    said = r"'0\.wv' \(4 → 4\) and 1 more\. '0' has projections of attention, but no number of heads: set num_heads"
    with pytest.raises(xd.UnmatchedModelError, match=said):
        xd.ExplicitDropout(nn.Sequential(attention), NOISE, value=1.0)


@pytest.mark.parametrize(
    ("slip", "said"),
    [
        ("values", "`arguments` must be among query, .* Got 'values'; the closest is 'value'"),
        ("layer", "the closest is 'layers'"),
        ("drop_path", "not attached to models: call xd.functional.drop_path in your forward pass"),
    ],
)
def test_an_unknown_argument_is_named_with_what_may_be_meant(slip, said):
    with pytest.raises(xd.InputError, match=said):
        xd.ExplicitDropout(nn.TransformerEncoderLayer(8, 2), NOISE, **{slip: 1e-3})


def test_a_component_that_the_model_lacks_is_named_with_what_there_is():
    class Mlp(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc2(self.fc1(x).relu())

    model = nn.Sequential(Mlp())
    with pytest.raises(xd.UnmatchedModelError, match=r"has no value site, only feed_forward .*register_rule"):
        xd.ExplicitDropout(model, NOISE, feed_forward=1.0, value=1.0)
    assert not hooks(model)


def test_a_second_regulariser_on_a_model_or_a_part_of_it_is_refused():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, value=1.0)
    with pytest.raises(xd.InputError, match=r"without a regulariser: call remove\(\)"):
        xd.ExplicitDropout(model, NOISE, feed_forward=1.0)
    for whole_or_part in (model.blocks, nn.Sequential(model)):
        with pytest.raises(xd.InputError, match=r"call remove\(\) of the one it has"):
            xd.ExplicitDropout(whole_or_part, NOISE, value=1.0)
    number = len(hooks(model))
    reg.remove()
    again = xd.ExplicitDropout(model, NOISE, value=1.0)
    assert len(hooks(model)) == number
    run_images(model)
    again()


def test_calls_out_of_order_are_errors():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, value=1.0)
    with pytest.raises(xd.CollectionError, match="no training forward pass of VisionTransformer since the last call"):
        reg()
    run_images(model)
    reg()
    with pytest.raises(xd.CollectionError, match="no training forward pass"):
        reg()
    model.forward(images())
    with pytest.raises(xd.CollectionError, match="not its forward method"):
        reg()
    reg.remove()
    reg.remove()
    with pytest.raises(xd.CollectionError, match="removed"):
        reg()


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.skip = vit(), True

    def forward(self, x):
        x = self.body.patch_embed(x)
        return self.body.blocks[0](x) if self.skip else self.body.blocks(x)


def test_sites_that_never_fired_are_named():
    model = Skipping()
    reg = xd.ExplicitDropout(model, NOISE, value=1.0)
    run_images(model)
    with pytest.raises(xd.CollectionError, match=r"1 of 2 sites did not fire.*body\.blocks\.1\.attn:value.*layers="):
        reg()
    reg.remove()
    reg = xd.ExplicitDropout(model, NOISE, value=1.0, require_all=False)
    run_images(model)
    reg()
    assert list(reg.terms()) == ["body.blocks.0.attn:value"]


def test_a_part_in_eval_mode_is_named():
    model = vit()
    reg = xd.ExplicitDropout(model, NOISE, value=1.0)
    model.blocks[1].eval()
    run_images(model)
    with pytest.raises(xd.CollectionError, match=r"blocks\.1\.attn:value"):
        reg()


def test_a_padding_mask_that_does_not_fit_is_an_error_with_the_remedy():
    model = llama()
    for bad in (torch.ones(3, 5, dtype=torch.bool), torch.ones(3, 6), "left"):
        with (
            xd.ExplicitDropout(model, NOISE, value=1.0, padding=lambda *_, bad=bad: bad),
            pytest.raises(xd.CollectionError, match=r"layers\.0\.self_attn.*padding=None"),
        ):
            model(tokens())


class Reshaping(nn.Module):
    """Cuts its sequence in two before the Transformer, so the mask of its own argument no longer fits."""

    def __init__(self):
        super().__init__()
        self.body = encoder()

    def forward(self, x, attention_mask=None):  # noqa: ARG002
        return self.body(x.reshape(2 * x.shape[0], x.shape[1] // 2, x.shape[2]))


def test_a_mask_of_the_whole_model_that_does_not_fit_is_an_error_with_the_remedy():
    model = Reshaping()
    x, mask = torch.randn(2, 4, 16), torch.ones(2, 4)
    with (
        xd.ExplicitDropout(model, NOISE, feed_forward=1.0),
        pytest.raises(xd.CollectionError, match=r"attention_mask .*\(2, 4\).*\(4, 2\).*layers\.0.*padding=None"),
    ):
        model(x, mask)
    with xd.ExplicitDropout(model, NOISE, feed_forward=1.0, padding=None) as reg:
        model(x, mask)
        assert_close(reg().detach(), sum(reg.terms().values()))


def test_a_constructor_that_fails_half_way_leaves_nothing_behind(monkeypatch):
    model = encoder(dropout=0.1)
    before = rates(model)
    registered = nn.TransformerEncoderLayer.register_forward_hook

    def fails(*_, **__):
        raise RuntimeError("no more hooks")

    monkeypatch.setattr(nn.TransformerEncoderLayer, "register_forward_hook", fails)
    with pytest.raises(RuntimeError, match="no more hooks"):
        xd.ExplicitDropout(model, NOISE, value=1.0, feed_forward=1.0)
    monkeypatch.setattr(nn.TransformerEncoderLayer, "register_forward_hook", registered)
    assert_untouched(model, before)

    class Stubborn(nn.Dropout):
        def __setattr__(self, name, value):
            if name == "p" and "p" in self.__dict__:
                raise RuntimeError("fixed rate")
            super().__setattr__(name, value)

    model.layers[1].dropout = Stubborn(0.1)
    before = rates(model)
    with pytest.raises(RuntimeError, match="fixed rate"):
        xd.ExplicitDropout(model, NOISE, feed_forward=1.0)
    assert_untouched(model, before)


def test_what_cannot_be_exact_is_refused_by_name():
    with pytest.raises(xd.UnsupportedSiteError, match=r"model\.layers\.0\.self_attn:query: rotary.*paper\(p\)"):
        xd.ExplicitDropout(llama(), xd.inverted(0.2), query=1.0)
    with pytest.raises(
        xd.UnsupportedSiteError, match=r"as many key heads as query heads, not 2 and 4.*reading='model'"
    ):
        xd.ExplicitDropout(llama(), xd.paper(0.2), query=1.0, reading="paper")


def test_adapters_that_are_no_plain_lora_are_refused():
    from peft import IA3Config, LoraConfig, get_peft_model

    for config in (
        LoraConfig(r=2, target_modules=["v_proj"], use_dora=True),
        LoraConfig(r=2, target_modules=["v_proj"], lora_bias=True, bias="none"),
        IA3Config(target_modules=["v_proj"], feedforward_modules=[]),
    ):
        model = get_peft_model(llama(attention_bias=True), config)
        with pytest.raises(xd.UnsupportedSiteError, match=r"self_attn:value: its adapter 'default' .*no plain LoRA"):
            xd.ExplicitDropout(model, NOISE, value=1.0)


def test_a_weight_that_was_replaced_or_taken_apart_is_refused():
    model = encoder()
    reg = xd.ExplicitDropout(model, NOISE, feed_forward=1.0)
    model(torch.randn(2, 4, 16))
    model.layers[0].linear1.weight = nn.Parameter(torch.zeros(512))
    with pytest.raises(
        xd.UnsupportedSiteError, match=r"layers\.0\.linear1:feed_forward: its weight has the shape \(512,\)"
    ):
        reg()


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.bernoulli(0.2), xd.inverted(0.2)])
def test_weights_that_are_lent_for_a_call_are_the_ones_that_count(noise):
    """`functional_call` puts a model's own weights back before the regulariser is called."""
    model, x = encoder(), torch.randn(2, 4, 16)
    reg = xd.ExplicitDropout(model, noise, feed_forward=1.0, value=1.0)
    lent = {name: (2 * weight.detach()).requires_grad_() for name, weight in model.named_parameters()}
    torch.func.functional_call(model, lent, (x,))
    found = torch.autograd.grad(reg(), list(lent.values()), allow_unused=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(2)
    model(x)
    expected = torch.autograd.grad(reg(), list(model.parameters()), allow_unused=True)
    for mine, theirs in zip(found, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            assert_close(mine, theirs)


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.inverted(0.2)])
def test_nothing_of_a_forward_pass_is_kept_once_its_loss_is_gone(noise):
    model, made = vit(), []
    reg = xd.ExplicitDropout(model, noise, **dict.fromkeys(("value", "query", "feed_forward"), 1.0))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda *call: made.append(weakref.ref(call[-1])))
    loss = run_images(model) + reg()
    assert made
    assert any(output() is not None for output in made)
    del loss
    gc.collect()
    assert not any(output() is not None for output in made)
    assert reg.terms()


def test_forward_passes_that_make_a_penalty_in_different_ways_are_one_batch():
    """With padding the plain form makes one term of the penalty, without it kernels make two."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=50,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertModel(config).train()
    reg = xd.ExplicitDropout(model, xd.bernoulli(0.3), attended_value=1.0)
    tokens, padded = torch.arange(12).reshape(2, 6), torch.ones(2, 6, dtype=torch.long)
    padded[0, 4:] = 0
    calls = {"input_ids": tokens, "attention_mask": padded}, {"input_ids": torch.arange(18).reshape(3, 6) + 12}
    alone = []
    for call in calls:
        model(**call)
        alone.append(reg())
    for call in calls:
        model(**call)
    assert_close(reg(), (10 * alone[0] + 18 * alone[1]) / 28)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_model_that_is_checkpointed_as_a_whole_leaves_nothing_for_the_next_step(early_stop):
    from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    reg = xd.ExplicitDropout(model, xd.bernoulli(0.2), value=1.0, feed_forward=1.0)
    batches = [scale * torch.randn(2, 5, 8) for scale in (1, 3, 1)]
    expected, found = [], []
    for x in batches:
        model(x)
        expected.append(reg().detach())
    for x in batches:
        with set_checkpoint_early_stop(early_stop):
            output = checkpoint(model, x, use_reentrant=False)
            penalty = reg()
            (output.sum() + penalty).backward()
        found.append(penalty.detach())
    assert_close(found, expected)
