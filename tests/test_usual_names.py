"""Modules of one's own under the usual names: what gives away that they are not what their names say."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import explicit_dropout as xd
from explicit_dropout import sites
from explicit_dropout.adapters import generic
from explicit_dropout.testing import check_rule

SCORES = ("query", "key", "query_key")
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
TRIANGLE = torch.ones(16, 16).tril()


class Attention(nn.Module):
    """Plain, with whatever else it keeps."""

    def __init__(self, **kept):
        super().__init__()
        self.num_heads = 2
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(8, 8) for _ in range(4))
        for name, value in kept.items():
            setattr(self, name, value)

    def forward(self, x, bias=None, is_causal=False):
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        scale = self.scale if isinstance(getattr(self, "scale", None), float) else None
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=is_causal, scale=scale)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Untried(Attention):
    """Cannot be called with one sample, so that only its names and what it keeps are known of it."""

    def forward(self, x, **options):
        if len(x) == 1:
            raise ValueError("one sample")
        return super().forward(x, **options)


class CausalAttention(Untried):
    pass


def refused(model, *reasons):
    """Scores, under every law; what does not depend on them is not."""
    for component in SCORES:
        for noise in (xd.paper(0.2), xd.inverted(0.2)):
            with pytest.raises(xd.UnsupportedSiteError, match=":" + component) as caught:
                xd.ExplicitDropout(model, noise, **{component: 1.0})
            for reason in (*reasons, "register_rule"):
                assert reason in str(caught.value)
    with pytest.raises(xd.UnsupportedSiteError, match="attention weights"):
        xd.ExplicitDropout(model, xd.inverted(0.2), attended_value=1.0)
    with xd.ExplicitDropout(model, xd.paper(0.2), value=1.0, attended_value=1.0) as reg:
        model(X)
        assert reg() > 0


# ---------------------------------------------------------------------------------------------- scale


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (nn.Parameter(torch.tensor(3.0)), "a parameter, which training moves"),
        (torch.tensor(3.0), "multiply the scores or divide them"),
        (math.sqrt(8), "as if scores were divided by it"),
        (True, "its scale is True"),
        (-0.5, "its scale is -0.5"),
    ],
)
def test_a_scale_that_is_no_plain_factor_is_refused(scale, reason):
    refused(Untried(scale=scale), reason, "scale=")


def test_a_buffer_of_scales_is_refused():
    model = Attention()
    model.register_buffer("scaling", torch.ones(2, 1, 1))
    refused(model, "its scale is a Tensor")


def test_a_temperature_is_refused():
    refused(Attention(temperature=nn.Parameter(torch.ones(()))), "its temperature acts on the scores")


@pytest.mark.parametrize("scale", [0.3, 1.0, 8**-0.5])
def test_a_scale_that_is_a_factor_is_taken(scale):
    found = xd.find_sites(Attention(scale=scale))[0].source.described
    assert found.scale == scale
    assert not found.refused


# ---------------------------------------------------------------------------------------------- masks that are kept


@pytest.mark.parametrize("name", ["mask", "tril", "causal_mask", "bias"])
@pytest.mark.parametrize(
    "mask",
    [TRIANGLE, TRIANGLE.bool()[None, None], ~TRIANGLE.bool(), torch.full((16, 16), -torch.inf).triu(1)],
    ids=["lower", "boolean", "hidden", "additive"],
)
def test_a_triangle_that_is_kept_is_refused_unless_the_module_is_causal(name, mask):
    for kind in (Attention, Untried, CausalAttention):
        model = kind()
        model.register_buffer(name, mask, persistent=False)
        if kind is not CausalAttention:
            refused(model, f"'{name}' looks like the mask of causal attention", "causal=")
        else:
            assert not xd.find_sites(model)[0].source.described.refused


def test_any_other_mask_is_refused_in_causal_attention_too():
    window = TRIANGLE.triu(-3)
    for kind in (Attention, CausalAttention):
        refused(kind(attn_mask=window), "'attn_mask' looks like a mask", "pairs=")


def test_other_tensors_are_none_of_its_business():
    model = Attention(table=torch.randn(16, 16), steps=torch.zeros(()))
    model.register_buffer("relative_position_index", torch.arange(256).view(16, 16))
    model.register_buffer("masked_value", torch.tensor(-1e4))
    assert not xd.find_sites(model)[0].source.described.refused


# ---------------------------------------------------------------------------------------------- arguments of a call


@pytest.mark.parametrize(
    "call", [{"bias": torch.zeros(5, 5)}, {"bias": torch.zeros(5, 5).fill_diagonal_(-9)}, {"is_causal": True}]
)
def test_a_call_that_says_more_than_its_rule_is_refused(call):
    model, name = Attention(), next(iter(call))
    for component in SCORES:
        with (
            xd.ExplicitDropout(model, xd.inverted(0.2), **{component: 1.0}),
            pytest.raises(xd.UnsupportedSiteError, match=f"`{name}` must be understood.*register_rule.*xd.Pairs"),
        ):
            model(X, **call)
    with xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0) as reg:
        model(X, **call)
        assert reg() > 0


def test_a_call_that_says_nothing_is_fine():
    model = Attention()
    with xd.ExplicitDropout(model, xd.inverted(0.2), query=1.0) as reg:
        model(X, bias=None, is_causal=False)
        assert reg() > 0


def with_bias(attention, call, x, context):  # noqa: ARG001
    bias = call.get("bias")
    return xd.Pairs() if bias is None else xd.Pairs(allowed=xd.visible(bias), bias=bias)


def test_a_rule_of_what_the_package_exports_explains_it(monkeypatch):
    def rule(m):
        projections = (xd.Projection(layer) for layer in (m.q_proj, m.k_proj, m.v_proj))
        return xd.Attention(m, *projections, output=m.out_proj, heads=2, pairs=with_bias, weights="compute")

    monkeypatch.setitem(sites._RULES, Attention, rule)
    torch.manual_seed(0)
    bias = torch.randn(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e4)
    report = check_rule(Attention(), X, bias, samples=64, compile=False)
    assert {"pairs", "weights", "scores"} <= set(report.passed)


# ---------------------------------------------------------------------------------------------- feed-forward networks


class Network(nn.Module):
    def __init__(self, width, hidden, out=None):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, out or width)

    def forward(self, x):
        return self.fc2(self.fc1(x).relu())


class RelPosMlp(nn.Module):
    """Two coordinates to two heads: the width does not give it away."""

    def __init__(self):
        super().__init__()
        self.mlp = Network(2, 16)


class Holding(nn.Module):
    """Modules under names."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, x):
        for child in self.children():
            x = x + child(x)
        return x


def networks(model):
    return [site.path for site in xd.find_sites(model) if site.component == "feed_forward"]


def test_a_network_that_changes_the_width_is_no_feed_forward():
    assert networks(Holding(attn=Attention(), mlp=Network(8, 16), head=Network(8, 24, 3))) == ["mlp.fc1", "mlp.fc2"]


def test_networks_that_make_position_biases_are_no_feed_forward():
    inside = Attention(meta_mlp=Network(2, 16))
    model = Holding(attn=inside, mlp=Network(8, 16), shared_rel_pos=RelPosMlp(), bias=Holding(cpb_mlp=Network(2, 16)))
    assert networks(model) == ["mlp.fc1", "mlp.fc2"]


@pytest.mark.parametrize("name", ["router", "token_gate", "gating", "norm2", "layer_norm"])
def test_networks_that_steer_experts_or_normalisations_are_no_feed_forward(name):
    def network():
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    block = nn.ModuleDict({"attn": Attention(), "network": network(), name: network()})
    inside = nn.ModuleDict({"attn": Attention(), "network": network(), name: nn.ModuleDict({"scale": network()})})
    for model in (block, inside, nn.ModuleDict({f"{name}_stack": nn.ModuleList([block])})):
        paths = [site.path for site in xd.find_sites(model) if site.component == "feed_forward"]
        assert [path[-9:] for path in paths] == ["network.0", "network.2"]


def test_a_block_that_keeps_its_own_projections_keeps_its_network():
    class Block(Attention):
        pass

    block = Block(mlp=Network(8, 16), bias_net=Network(2, 16))
    assert networks(nn.Sequential(block)) == ["0.mlp.fc1", "0.mlp.fc2"]


POSITIONS = {
    "vit_relpos_small_patch16_224": {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2},
    "vit_srelpos_small_patch16_224": {"img_size": 32, "embed_dim": 24, "num_heads": 3, "depth": 2},
    "swinv2_cr_tiny_224": {"img_size": 64, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "window_size": 4},
    "coatnet_rmlp_nano_rw_224": {},
    "maxxvit_rmlp_nano_rw_256": {},
}


@pytest.mark.parametrize("name", POSITIONS)
def test_timm_models_with_position_networks_have_their_blocks_networks_alone(name):
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        found = networks(timm.create_model(name, num_classes=3, **POSITIONS[name]))
    assert not any("rel_pos" in path or "meta_mlp" in path for path in found)
    if "depth" in POSITIONS[name]:
        assert found == [f"blocks.{i}.mlp.{layer}" for i in range(2) for layer in ("fc1", "fc2")]


def test_the_head_of_inception_next_is_no_feed_forward():
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        assert networks(timm.create_model("inception_next_tiny", num_classes=3)) == []


# ---------------------------------------------------------------------------------------------- nn.Sequential


def sequence(*between, width=8, hidden=16, out=None):
    return nn.Sequential(nn.Linear(width, hidden), *(between or (nn.GELU(),)), nn.Linear(hidden, out or width))


class Block(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.attn, self.mlp = nn.MultiheadAttention(8, 2, batch_first=True), mlp

    def forward(self, x):
        x = x + self.attn(x, x, x, need_weights=False)[0]
        return x + self.mlp(x)


SEQUENCES = {
    "plain": lambda: sequence(),
    "dropout between": lambda: sequence(nn.ReLU(), nn.Dropout(0.1)),
    "dropout before the activation": lambda: sequence(nn.Dropout(0.1), nn.SiLU()),
    "dropout after": lambda: nn.Sequential(*sequence(nn.Tanh(), nn.Identity()), nn.Dropout(0.1)),
    "norm before": lambda: nn.Sequential(nn.LayerNorm(8), *sequence()),
    "narrow": lambda: sequence(hidden=4),
    "one's own activation": lambda: sequence(QuickGELU()),
}


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * (1.702 * x).sigmoid()


@pytest.mark.parametrize("kind", SEQUENCES)
def test_two_linear_layers_around_an_activation_are_a_feed_forward_network(kind):
    torch.manual_seed(0)
    model = nn.Sequential(Block(SEQUENCES[kind]()), Block(SEQUENCES[kind]()))
    linear = [f"{i}.mlp.{j}" for i in range(2) for j, child in enumerate(model[i].mlp) if isinstance(child, nn.Linear)]
    assert networks(model) == linear
    assert [site.layer for site in xd.find_sites(model) if site.component == "feed_forward"] == [0, 0, 1, 1]
    report = check_rule(model, X, samples=64, compile=False)
    assert {"fires", "projection", "exact", "gradient"} <= set(report.passed)
    with xd.ExplicitDropout(model, xd.inverted(0.2), feed_forward=1.0) as reg:
        model(X)
        reg()
        assert all(module.p == 0 for module in model.modules() if isinstance(module, nn.Dropout))
        expected = 0.0
        for block in model:
            first, last = (layer for layer in block.mlp if isinstance(layer, nn.Linear))
            for layer in (first, last):
                seen = []
                handle = layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
                model.eval()(X)
                handle.remove()
                expected = expected + xd.functional.linear(seen[0], layer.weight, xd.inverted(0.2))
        torch.testing.assert_close(sum(reg.terms().values()), expected.detach())


NO_SEQUENCES = {
    "another width": lambda: sequence(out=3),
    "no activation": lambda: sequence(nn.Dropout(0.1)),
    "two activations": lambda: sequence(nn.ReLU(), nn.GELU()),
    "a norm between": lambda: sequence(nn.LayerNorm(16), nn.GELU()),
    "a convolution between": lambda: sequence(nn.GELU(), nn.Conv1d(5, 5, 1)),
    "a gate at its end": lambda: nn.Sequential(*sequence(), nn.Sigmoid()),
    "three layers": lambda: nn.Sequential(*sequence(), nn.GELU(), nn.Linear(8, 8)),
    "attention for an activation": lambda: sequence(nn.MultiheadAttention(16, 2)),
}


@pytest.mark.parametrize("kind", NO_SEQUENCES)
def test_other_sequences_are_none(kind):
    assert networks(nn.Sequential(Block(NO_SEQUENCES[kind]()))) == []


def test_a_sequence_is_a_feed_forward_network_only_beside_attention():
    assert networks(nn.Sequential(sequence())) == []
    deep = Holding(blocks=nn.ModuleList([Block(sequence())]), head=sequence(), time=Holding(embed=sequence()))
    assert networks(deep) == ["blocks.0.mlp.0", "blocks.0.mlp.2"]
    wrapped = nn.ModuleList([nn.ModuleList([Holding(fn=Attention()), Holding(fn=Holding(net=sequence()))])])
    assert networks(Holding(layers=wrapped)) == ["layers.0.1.fn.net.0", "layers.0.1.fn.net.2"]
    assert networks(Holding(attn=Attention(to_bias=sequence()), norm=nn.LayerNorm(8))) == []


def test_a_sequence_that_a_rule_speaks_of_is_counted_once(monkeypatch):
    def rule(block):
        return xd.FeedForward((xd.Projection(block.mlp[2]),))

    monkeypatch.setitem(sites._RULES, Block, rule)
    assert networks(nn.Sequential(Block(sequence()))) == ["0.mlp.2"]


def test_the_page_for_new_families_lists_the_usual_names():
    page = (Path(__file__).parents[1] / "docs" / "add-a-model-family.md").read_text()
    for names in (*generic.SEPARATE, *generic.FEED_FORWARD):
        assert " ".join(f"`{name}`" for name in names) in page
    for name in (*generic.FUSED, *generic.OUTPUT, *generic.HEADS, *generic.KEY_HEADS):
        assert f"`{name}`" in page
