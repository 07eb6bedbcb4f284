"""Masks that are added to the scores: what is never seen and what is a bias, told apart by one rule everywhere."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import explicit_dropout as xd

NOISE = xd.inverted(0.3)
HIDING = {"-inf": -torch.inf, "-1e9": -1e9, "-1e4": -1e4, "finfo.min": torch.finfo(torch.float32).min}
FINITE = pytest.mark.parametrize("fill", [pytest.param(fill, id=name) for name, fill in HIDING.items()][1:])
X = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
REAL = torch.tensor([[True] * 3 + [False] * 3, [True] * 6])


def terms(model, *args, components=("query", "value", "attended_value", "feed_forward"), **kwargs):
    with xd.ExplicitDropout(model.train(), NOISE, **dict.fromkeys(components, 1.0)) as reg:
        model(*args, **kwargs)
        reg()
        return reg.terms()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def triangle(fill):
    return torch.full((6, 6), fill).triu(1)


def equal(first, second):
    assert set(first) == set(second)
    for site in first:
        torch.testing.assert_close(first[site], second[site], msg=lambda m, s=site: f"{s}: {m}")


@FINITE
def test_a_finite_number_hides_a_pair_from_torch_attention_as_infinity_does(fill):
    model = encoder()
    equal(terms(model, X, mask=triangle(fill)), terms(model, X, mask=triangle(-torch.inf)))
    boolean = terms(model, X, mask=torch.ones(6, 6, dtype=torch.bool).triu(1))
    equal(terms(model, X, mask=triangle(fill)), boolean)


@FINITE
def test_padding_written_as_a_finite_number_counts_nowhere(fill):
    model = encoder()
    padding = torch.zeros(2, 6).masked_fill(~REAL, fill)
    equal(terms(model, X, src_key_padding_mask=padding), terms(model, X, src_key_padding_mask=~REAL))


@FINITE
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_finite_number_hides_a_pair_from_transformers_as_a_boolean_mask_does(fill, implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50,
        hidden_dropout_prob=0.0, attn_implementation=implementation,
    )  # fmt: skip
    model, ids = transformers.BertModel(config), torch.arange(12).view(2, 6)
    masks = (triangle(number).expand(2, 1, 6, 6) for number in (fill, torch.finfo(torch.float32).min))
    given, known = (terms(model, ids, attention_mask=mask, components=("query", "attended_value")) for mask in masks)
    equal(given, known)
    seen = terms(model, ids, components=("query",))
    assert seen["encoder.layer.0.attention.self:query"] > 1.2 * given["encoder.layer.0.attention.self:query"]


def test_timm_attention_reads_the_same_numbers():
    layers = pytest.importorskip("timm.layers.attention")
    torch.manual_seed(0)
    module = layers.Attention(8, num_heads=2)
    components = ("query", "attended_value")
    known = terms(module, X, attn_mask=torch.ones(6, 6, dtype=torch.bool).tril(), components=components)
    for fill in HIDING.values():
        equal(terms(module, X, attn_mask=triangle(fill), components=components), known)


@pytest.mark.parametrize("unbatched", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_float_padding_mask_that_hides_nothing_is_a_bias_of_the_weights(unbatched, with_mask):
    """Attention weights as the module itself returns them, with −2 added for some keys."""
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    x, padding = 2 * X, torch.zeros(2, 6).masked_fill(~REAL, -2.0)
    if unbatched:
        x, padding = x[0], padding[0]
    options = {"key_padding_mask": padding, "attn_mask": torch.linspace(-1, 1, 36).view(6, 6) if with_mask else None}
    with torch.no_grad():
        _, weights = model(x, x, x, average_attn_weights=False, **options)
        _, plain = model(x, x, x, average_attn_weights=False)
    expected = xd.functional.attended_value(x, model.in_proj_weight[16:], weights, NOISE, heads=2)
    found = terms(model, x, x, x, components=("attended_value", "query"), **options)
    torch.testing.assert_close(found[":attended_value"], expected.detach())
    without = xd.functional.attended_value(x, model.in_proj_weight[16:], plain, NOISE, heads=2)
    assert abs(without - expected) > 1e-3 * expected
    equal({":query": found[":query"]}, terms(model, x, x, x, components=("query",)))  # every pair still meets


def test_the_rule_lies_between_biases_and_masks():
    added = torch.tensor([0.0, -2.0, -100.0, -999.0, -1001.0, -1e4, -1e9, -torch.inf])
    assert xd.visible(added).tolist() == [True] * 4 + [False] * 4
    assert xd.visible(added.half()).tolist() == [True] * 4 + [False] * 4
    boolean = torch.tensor([True, False])
    assert xd.visible(boolean) is boolean
    weights = torch.tensor([[250.0, 0.0]], dtype=torch.float64) + torch.tensor([-1000.0, 0.0], dtype=torch.float64)
    assert weights.softmax(-1)[0, 0] == 0


@pytest.mark.parametrize("samples", [4, 8])
def test_longformer_is_masked_sample_by_sample_although_its_projections_see_tokens_first(samples):
    from transformers import LongformerConfig, LongformerModel

    torch.manual_seed(0)
    config = LongformerConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        attention_window=8, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = LongformerModel(config, add_pooling_layer=False).train()
    numbers, real = torch.randint(3, 30, (samples, 8)), torch.arange(8) <= torch.arange(samples)[:, None]
    seen = []
    handle = model.encoder.layer[0].attention.self.value.register_forward_hook(
        lambda m, _, out: seen.append(out - m.bias)
    )
    with xd.ExplicitDropout(model, xd.paper(0.2), value=1.0) as reg:
        model(numbers, attention_mask=real.long())
        found = reg()
    handle.remove()
    expected = 0.5 * 0.2**2 * seen[0].transpose(0, 1)[real].square().sum(-1).mean()
    torch.testing.assert_close(found, expected)


class Added(nn.Module):
    """Attention that adds its attention_mask, (batch, token), to the scores."""

    def __init__(self):
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, attention_mask=None):
        q, k, v = (layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / 2
        scores = scores if attention_mask is None else scores + attention_mask[:, None, None]
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_of_tokens_that_is_added_hides_what_is_far_below_zero():
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"attention": Added()}), torch.randn(2, 5, 8)
    model.forward = lambda x, attention_mask=None: model["attention"](x, attention_mask)
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0)

    def penalty(mask):
        model(x, attention_mask=mask)
        return reg().detach()

    padded = torch.zeros(2, 5)
    padded[0, 3:] = torch.finfo(torch.float32).min
    assert_close(penalty(torch.zeros(2, 5)), penalty(None))
    assert_close(penalty(padded), penalty((padded == 0).float()))
    assert_close(penalty(padded), penalty(padded == 0))
