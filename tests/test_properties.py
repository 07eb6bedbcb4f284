"""Laws that every closed form obeys, on inputs that hypothesis makes up."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout import functional as F

settings.register_profile("steady", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("steady")

SITES = [
    *("linear", "value", "feed_forward", "query", "key", "query_key", "attended_value", "attention_weights"),
    *("hidden", "drop_path", "drop_head"),
]
SCORES = ["query", "key", "query_key"]

rates = st.floats(0.01, 0.9)
laws = st.one_of(
    st.builds(xd.paper, rates),
    st.builds(xd.bernoulli, rates),
    st.builds(xd.inverted, rates),
    st.builds(xd.gaussian, st.floats(0.01, 3)),
)
seeds = st.integers(0, 2**31)
sizes = st.fixed_dictionaries({"batch": st.integers(1, 3), "tokens": st.integers(1, 9), "heads": st.integers(1, 3)})


class Layer:
    """One attention layer with random weights, and every form called on the same input x (batch, token, in)."""

    def __init__(self, seed, batch, tokens, heads, width=2):
        generator = torch.Generator().manual_seed(seed)
        self.random = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
        self.heads, out, inputs = heads, heads * width, heads * width
        self.x = self.random(batch, tokens, inputs)
        self.wq, self.wk, self.wv, self.wo = (self.random(out, inputs) for _ in range(4))
        self.bq, self.bk = self.random(out), self.random(out)

    def call(self, site, noise, x=None, mask=None, scale_weights=1.0, **options):
        x = self.x if x is None else x
        heads = options.pop("heads", self.heads)
        wq, wk, wv, wo = (scale_weights * w for w in (self.wq, self.wk, self.wv, self.wo))
        if site in SCORES:
            biases = {"query_bias": self.bq * scale_weights, "key_bias": self.bk * scale_weights}
            return getattr(F, site)(x, wq, wk, noise, heads=heads, mask=mask, **biases, **options)
        values = (x @ wv.mT).unflatten(-1, (heads, -1)).transpose(-2, -3)
        clean = x if mask is None else x.masked_fill(~mask[..., None], 0)  # attention as a model with masks has it
        queries, keys = ((clean @ w.mT).unflatten(-1, (heads, -1)).transpose(-2, -3) for w in (self.wq, self.wk))
        scores = queries @ keys.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None, None, :], -torch.inf)
        attention = scores.softmax(-1)
        match site:
            case "linear" | "value":
                return getattr(F, site)(x, wv, noise, mask=mask, **options)
            case "feed_forward":
                return F.feed_forward([x, (x @ self.wv.mT).relu()], [wv, wo], noise, mask=mask, **options)
            case "attended_value":
                return F.attended_value(x, wv, attention, noise, heads=heads, mask=mask, context_mask=mask, **options)
            case "attention_weights":
                return F.attention_weights(attention, values, noise, mask=mask, context_mask=mask, **options)
            case "hidden" | "drop_path":
                return getattr(F, site)(scale_weights * x, noise, mask=mask, **options)
            case "drop_head":
                return F.drop_head(x, wo, noise, heads=heads, mask=mask, **options)


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_never_negative(site, seed, sizes, noise):
    assert Layer(seed, **sizes).call(site, noise) >= 0


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("law", [xd.paper, xd.bernoulli, xd.inverted, xd.gaussian])
@given(seed=seeds, sizes=sizes)
def test_zero_at_rate_zero_and_so_is_its_gradient(site, law, seed, sizes):
    layer = Layer(seed, **sizes)
    x = layer.x.clone().requires_grad_()
    penalty = layer.call(site, law(0), x)
    assert penalty == 0
    assert not torch.autograd.grad(penalty, x)[0].any()


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws, strength=st.floats(0, 1e3))
def test_linear_in_the_strength(site, seed, sizes, noise, strength):
    layer = Layer(seed, **sizes)
    assert_close(layer.call(site, noise, strength=strength), strength * layer.call(site, noise))


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws, factor=st.floats(0.1, 10))
def test_weights_scale_it_by_their_square_and_by_the_fourth_power_in_scores(site, seed, sizes, noise, factor):
    layer = Layer(seed, **sizes)
    power = 4 if site in SCORES else 2
    assert_close(layer.call(site, noise, scale_weights=factor), factor**power * layer.call(site, noise))


@pytest.mark.parametrize("site", SCORES)
@given(seed=seeds, sizes=sizes, noise=laws, scale=st.floats(0.1, 10))
def test_the_scale_of_scores_enters_by_its_square(site, seed, sizes, noise, scale):
    layer = Layer(seed, **sizes)
    assert_close(layer.call(site, noise, scale=scale), scale**2 * layer.call(site, noise))


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws, data=st.data())
def test_the_order_of_tokens_does_not_matter(site, seed, sizes, noise, data):
    layer = Layer(seed, **sizes)
    order = data.draw(st.permutations(range(sizes["tokens"])))
    assert_close(layer.call(site, noise, layer.x[:, order]), layer.call(site, noise))


@pytest.mark.parametrize("site", SCORES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_heads_add_up(site, seed, sizes, noise):
    layer = Layer(seed, **sizes)
    projections = [w.chunk(layer.heads) for w in (layer.wq, layer.wk, layer.bq, layer.bk)]
    parts = [
        getattr(F, site)(layer.x, wq, wk, noise, query_bias=bq, key_bias=bk)
        for wq, wk, bq, bk in zip(*projections, strict=True)
    ]
    assert_close(layer.call(site, noise), torch.stack(parts).sum())


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws, junk=st.sampled_from([0.0, 1e3, torch.nan, torch.inf]))
def test_masked_tokens_have_no_effect_whatever_they_hold(site, seed, sizes, noise, junk):
    layer = Layer(seed, **sizes)
    alone = layer.call(site, noise)
    padded = torch.cat((layer.x, torch.full_like(layer.x[:, :1], junk)), 1)
    mask = torch.ones(padded.shape[:2], dtype=torch.bool)
    mask[:, -1] = False
    x = padded.requires_grad_()
    penalty = layer.call(site, noise, x, mask)
    assert_close(penalty, alone)
    assert not torch.autograd.grad(penalty, x)[0][:, -1].any()


@pytest.mark.parametrize("junk", [1e3, torch.nan, torch.inf])
@pytest.mark.parametrize("site", SITES)
def test_not_even_a_nan_in_the_padding_gets_through(site, junk):
    layer = Layer(0, batch=2, tokens=4, heads=2)
    mask = torch.tensor([[True, True, True, False], [True, False, False, False]])
    dirty = layer.x.masked_fill(~mask[..., None], junk).requires_grad_()
    clean = layer.x.masked_fill(~mask[..., None], 0).requires_grad_()
    dirty_penalty, penalty = (layer.call(site, xd.bernoulli(0.2), x, mask) for x in (dirty, clean))
    assert_close(dirty_penalty, penalty)
    assert_close(torch.autograd.grad(dirty_penalty, dirty), torch.autograd.grad(penalty, clean))


@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_a_batch_is_the_mean_of_its_samples(site, reduction, seed, sizes, noise):
    layer = Layer(seed, **sizes)
    alone = [layer.call(site, noise, x, reduction=reduction) for x in layer.x]
    assert_close(layer.call(site, noise, reduction=reduction), torch.stack(alone).mean())


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_reductions_are_three_readings_of_one_sum(site, seed, sizes, noise):
    layer = Layer(seed, **sizes)
    each = layer.call(site, noise, reduction="none")
    assert each.shape == (sizes["batch"],)
    assert_close(layer.call(site, noise, reduction="sample"), each.mean())
    assert_close(layer.call(site, noise, reduction="token"), each.mean() / sizes["tokens"])


@pytest.mark.parametrize("site", SITES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_leading_axes_are_one_batch(site, seed, sizes, noise):
    layer = Layer(seed, **sizes)
    folded = layer.x[None, :, None].expand(2, -1, 1, -1, -1)
    each = layer.call(site, noise, folded, reduction="none")
    assert each.shape == (2, sizes["batch"], 1)
    assert_close(each[1, :, 0], layer.call(site, noise, reduction="none"))


@pytest.mark.parametrize("site", SCORES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_causal_is_the_triangular_mask(site, seed, sizes, noise):
    layer = Layer(seed, **sizes)
    triangle = torch.ones(sizes["tokens"], sizes["tokens"], dtype=torch.bool).tril()
    assert_close(layer.call(site, noise, causal=True), layer.call(site, noise, attention_mask=triangle))


@pytest.mark.parametrize("site", SCORES)
@given(seed=seeds, sizes=sizes, noise=laws)
def test_pairs_split_between_two_masks_add_up(site, seed, sizes, noise):
    layer = Layer(seed, **sizes)
    some = layer.random(sizes["tokens"], sizes["tokens"]) > 0
    parts = [layer.call(site, noise, attention_mask=mask) for mask in (some, ~some)]
    assert_close(layer.call(site, noise), torch.stack(parts).sum())


@pytest.mark.parametrize("site", SITES)
def test_an_empty_batch_has_no_penalty(site):
    layer = Layer(0, batch=2, tokens=3, heads=2)
    for reduction in ("token", "sample"):
        assert layer.call(site, xd.bernoulli(0.2), layer.x[:0], reduction=reduction) == 0
    assert layer.call(site, xd.bernoulli(0.2), layer.x[:0], reduction="none").shape == (0,)


@pytest.mark.parametrize("site", ["linear", "query", "key", "query_key", "hidden"])
def test_a_batch_without_a_real_token_has_no_penalty(site):
    layer = Layer(0, batch=2, tokens=3, heads=2)
    assert layer.call(site, xd.bernoulli(0.2), mask=torch.zeros(2, 3, dtype=torch.bool)) == 0
