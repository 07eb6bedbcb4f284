"""What the library does not know of a model, has not checked or cannot check: said aloud, and never called proved."""

import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import explicit_dropout as xd
from explicit_dropout import sites, testing
from explicit_dropout.cli import main
from explicit_dropout.finding import told_once, unclaimed, unclaimed_line
from explicit_dropout.testing import CHECKS, RuleError, check_rule

WIDTH, HEADS = 32, 4
SCORES = ("query", "key", "query_key")
USUAL, ODD = ("q_proj", "k_proj", "v_proj", "out_proj"), ("seeker", "index", "content", "merge")
X = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(6, 6, dtype=torch.bool).tril()


class Attention(nn.Module):
    """Attention under any names, with a place for what is unusual about it."""

    scale_of = None

    def __init__(self, names=USUAL):
        super().__init__()
        self.num_heads, self.names = HEADS, names
        for name in names:
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def roles(self, q, k, v):
        return q, k, v

    def after(self, attended, _x):
        return attended

    def forward(self, x, attention_mask=None):
        parts = (getattr(self, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in self.names[:3])
        q, k, v = self.roles(*parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=self.scale_of)
        return getattr(self, self.names[3])(self.after(y.transpose(1, 2).flatten(2), x))


class NoScale(Attention):
    scale_of = 1.0


class ByTheWidth(Attention):
    scale_of = 1 / 8


class OddScale(Attention):
    scale_of = 0.77


class Swapped(Attention):
    """What is called value is the query."""

    def roles(self, q, k, v):
        return v, q, k


class Sharpened(Swapped):
    """The same, with a scale of which nobody would think."""

    scale_of = 0.77


class Gated(Attention):
    def after(self, attended, x):
        return attended * x.sigmoid()


class Multiplied(Attention):
    """Keys that are attended to, and values that gate them."""

    def forward(self, x, _=None):
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, k) * v.sigmoid()
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Demanding(Attention):
    """Cannot be tried with tokens alone."""

    def forward(self, x, attention_mask):
        return super().forward(x, attention_mask)


class DemandingSwapped(Swapped):
    def forward(self, x, attention_mask):
        return super().forward(x, attention_mask)


class Network(nn.Module):
    def __init__(self, *names, width=WIDTH, hidden=64):
        super().__init__()
        self.names = names or ("fc1", "fc2")
        for name in self.names[:-1]:
            setattr(self, name, nn.Linear(width, hidden))
        setattr(self, self.names[-1], nn.Linear(hidden, width))

    def forward(self, x):
        *before, after = (getattr(self, name) for name in self.names)
        return after(torch.stack([layer(x) for layer in before]).prod(0).relu())


class Block(nn.Module):
    def __init__(self, attention=None, network=None, **others):
        super().__init__()
        self.a, self.f = attention or Attention(), network or Network()
        for name, other in others.items():
            setattr(self, name, other)

    def forward(self, x, **told):
        x = x + self.a(x, **told)
        return x + self.f(x)


class Model(nn.Module):
    def __init__(self, *blocks, **others):
        super().__init__()
        self.layers = nn.ModuleList(blocks)
        for name, other in others.items():
            setattr(self, name, other)

    def forward(self, x, **told):
        for block in self.layers:
            x = block(x, **told)
        return x


@pytest.fixture(autouse=True)
def the_same_weights_and_a_wide_terminal(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs a command on a model of this file, and gives its exit status, its output and its complaints."""

    def run(name, model, *options, call=None):
        monkeypatch.setattr("explicit_dropout.cli.models._callable", lambda *_: _example(model, call))
        status = main([name, "a_file.py:build", *options])
        out, err = capsys.readouterr()
        return status, " ".join(out.split()), " ".join(err.split())

    return run


def _example(model, call):
    from explicit_dropout.cli.models import Example

    return Example(model, (), {"x": X, **(call or {})})


def check(model, **told):
    return check_rule(model, X, samples=40, compile=False, **told)


# ------------------------------------------------------------------------------------------------ what was not checked


def test_a_check_that_no_site_had_is_not_passed():
    """Attention that no rule claims has no scores that were looked at."""
    report = check(Model(Block(Attention(ODD)), Block(Attention(ODD))))
    assert report.passed == ["fires", "projection", "exact", "gradient", "deepcopy", "pickle"]
    assert "4 sites proved" in str(report)
    assert "No rule claims: layers.0.a.seeker" in str(report)
    assert not {"scores", "exact"} <= set(report.passed)


def test_a_check_that_one_site_missed_is_not_passed_and_the_others_are_counted():
    report = check(Model(Block(), Block(Gated())))
    assert not {"values", "pairs", "scores"} & set(report.passed)
    assert {"fires", "projection", "exact", "gradient"} <= set(report.passed)
    assert "9 of 14 sites proved: fires, projection, " in str(report)
    missed = {f"layers.1.a:{name}" for name in ("query", "key", "query_key", "value", "attended_value")}
    assert set(report.sites) - set(report.proved) == missed
    assert "scores" in report.had["layers.0.a:query"]
    assert "scores" in report.missed["layers.1.a:query"]


def test_a_layer_that_is_refused_as_a_whole_counts_as_one_that_missed_its_checks():
    report = check(Model(Block(), Block(Swapped())))
    assert not {"values", "scores"} & set(report.passed)
    assert "9 of 14 sites proved" in str(report)


def test_every_site_of_a_plain_model_has_every_check_that_is_for_it():
    report = check_rule(Model(Block()), X, samples=40)
    assert report.passed == [*CHECKS]
    assert report.proved == report.sites
    assert str(report) == f"7 sites proved: {', '.join(CHECKS)}."
    assert report.had["layers.0.f.fc1:feed_forward"].isdisjoint({"values", "pairs", "weights", "scores"})


def test_a_gradient_that_a_frozen_weight_cannot_have_is_not_passed():
    model = Model(Block())
    model.layers[0].f.fc1.weight.requires_grad_(False)
    report = check(model)
    assert "gradient" not in report.passed
    assert "gradient of layers.0.f.fc1:feed_forward: its own weight takes none" in str(report)
    assert set(report.sites) - set(report.proved) == {"layers.0.f.fc1:feed_forward"}


def test_copies_are_made_under_every_law_under_which_sites_are_exact(monkeypatch):
    """Scores behind a rotation are exact without variance alone: under the first law they are not attached to."""

    def rule(module):
        parts = (xd.Projection(getattr(module, name)) for name in USUAL[:3])
        return xd.Attention(module, *parts, output=module.out_proj, heads=HEADS, weights="compute", rotary=no_turn)

    monkeypatch.setitem(sites._RULES, Attention, rule)
    copied = []
    monkeypatch.setattr(
        testing.copies, "copied", lambda _host, law, those: copied.append((law, [site.name for site in those]))
    )
    report = check(Model(Block()))
    assert [law for law, _ in copied] == [xd.bernoulli(0.2), xd.paper(0.2)]
    assert sorted(name for _, names in copied for name in names) == sorted(report.sites)


def test_a_model_that_cannot_be_pickled_is_no_gap_in_what_is_proved_of_its_sites():
    model = Model(Block())
    model.layers[0].secret = lambda: None
    report = check(model)
    assert "pickle" not in report.passed
    assert report.proved == report.sites
    assert "Not checked: pickle: the model itself cannot be pickled" in str(report)


def no_turn(_attention, _call):
    return None


def test_a_mask_that_no_rule_understands_is_no_failure_but_leaves_scores_unproved():
    report = check(Model(Block()), attention_mask=MASK)
    assert {"values", "projection"} <= set(report.passed)
    assert not {"scores", "pairs", "exact"} & set(report.passed)
    assert "`attention_mask` must be understood" in str(report)
    with pytest.raises(RuleError, match=r"values failed for layers\.0\.a:value: attention does not average"):
        check(Model(Block(DemandingSwapped())), attention_mask=MASK)


# ------------------------------------------------------------------------------------------------ what no rule claims


def paths(model):
    return [layer.path for layer in unclaimed(model)]


def test_layers_of_attention_under_other_names_are_told_beside_a_block_that_is_known():
    odd = [f"layers.1.a.{name}" for name in ODD]
    assert paths(Model(Block(), Block(Attention(ODD)))) == odd
    assert paths(nn.Sequential(Block(), Block(Attention(ODD)))) == [path.removeprefix("layers.") for path in odd]
    assert paths(Block(Attention(ODD))) == [f"a.{name}" for name in ODD]
    assert paths(Model(Block())) == []


def test_layers_of_a_network_under_other_names_are_told_and_its_gate_with_them():
    assert paths(Model(Block(), Block(network=Network("expand", "shrink")))) == [
        "layers.1.f.expand",
        "layers.1.f.shrink",
    ]
    gated = Model(Block(network=Network("open", "expand", "shrink")), Block())
    assert paths(gated) == [f"layers.0.f.{name}" for name in ("open", "expand", "shrink")]


def test_a_fused_projection_under_another_name_is_told_with_its_output():
    fused = nn.ModuleDict({"mix_in": nn.Linear(WIDTH, 3 * WIDTH), "mix_out": nn.Linear(WIDTH, WIDTH)})
    assert paths(Model(Block(), Block(fused))) == ["layers.1.a.mix_in", "layers.1.a.mix_out"]


def test_blocks_that_are_lists_of_parts_are_blocks_too():
    lists = [nn.ModuleList([Attention(), Network()]), nn.ModuleList([Attention(ODD), Network("expand", "shrink")])]
    assert paths(nn.ModuleList(lists)) == [f"1.0.{name}" for name in ODD] + ["1.1.expand", "1.1.shrink"]


BESIDE = {
    "a router": lambda: {"router": nn.Linear(WIDTH, 4)},
    "modulation": lambda: {"modulation": nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))},
    "squeeze and excitation": lambda: {"se": Network("reduce", "expand", hidden=8)},
    "an adapter": lambda: {"adapter": Network("down", "up")},
    "a network of a normalisation": lambda: {"norm": Network("gamma", "beta")},
    "positions": lambda: {"rel_pos_bias": Network("hidden", "heads", width=2)},
    "a convolution": lambda: {"conv": Network("widen", "narrow")},
    "one layer": lambda: {"shortcut": nn.Linear(WIDTH, WIDTH)},
    "time": lambda: {"time": nn.Sequential(nn.Linear(16, 64), nn.SiLU(), nn.Linear(64, 64))},
}


@pytest.mark.parametrize("kind", BESIDE)
def test_what_blocks_have_beside_attention_and_network_is_not_told(kind):
    assert paths(Model(Block(**BESIDE[kind]()), Block(**BESIDE[kind]()))) == []


AROUND = {
    "embedding": lambda: nn.Linear(12, WIDTH),
    "pooler": lambda: nn.Linear(WIDTH, WIDTH),
    "head": lambda: nn.Linear(WIDTH, 1000),
    "projection": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)),
    "times": lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)),
    "boxes": lambda: nn.ModuleList([nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)]) for _ in range(2)]),
}


@pytest.mark.parametrize("kind", AROUND)
def test_what_models_have_around_their_blocks_is_not_told(kind):
    assert paths(Model(Block(), Block(), **{kind: AROUND[kind]()})) == []
    assert paths(nn.Sequential(Model(Block(), Block()), AROUND[kind]())) == []


def test_one_line_has_layers_of_one_shape_together_and_not_too_many():
    line = unclaimed_line(unclaimed(Model(Block(), Block(Attention(ODD), Network("expand", "shrink")))))
    assert line is not None
    assert "layers.1.a.seeker, layers.1.a.index, layers.1.a.content, layers.1.a.merge (32 → 32)" in line
    assert "layers.1.f.expand (32 → 64), layers.1.f.shrink (64 → 32)" in line
    many = unclaimed_line(unclaimed(Model(Block(), *(Block(Attention(ODD)) for _ in range(9)))))
    assert many is not None
    assert ", … (32 → 32)" in many
    assert many.count("seeker") == 2
    assert unclaimed_line([]) is None


@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_commands_end_with_what_no_rule_claims(command, name):
    options = ["--samples=20"] if name == "verify" else []
    status, out, _ = command(name, Model(Block(), Block(Attention(ODD))), *options)
    assert status == 0
    assert "No rule claims: layers.1.a.seeker, layers.1.a.index, layers.1.a.content, layers.1.a.merge (32 → 32)." in out
    assert "No rule claims" not in command(name, Model(Block(), Block()), *options)[1]


def test_json_has_what_no_rule_claims(command):
    found = json.loads(command("inspect", Model(Block(), Block(Attention(ODD))), "--json")[1])
    assert found["unclaimed"] == [{"module": f"layers.1.a.{name}", "in": 32, "out": 32} for name in ODD]
    assert json.loads(command("inspect", Model(Block()), "--json")[1])["unclaimed"] == []


# ------------------------------------------------------------------------------------------------ disproved by trial


@pytest.mark.parametrize("kind", [Swapped, Sharpened])
def test_roles_that_a_trial_disproves_have_no_penalty_at_all(kind):
    for component in (*SCORES, "value", "attended_value"):
        with pytest.raises(xd.UnsupportedSiteError, match=f"0.a:{component}: tried with .*{kind.__name__}"):
            xd.ExplicitDropout(Model(Block(kind())), xd.paper(0.2), **{component: 1.0})


def test_the_roles_that_explain_a_call_are_named():
    reason = xd.find_sites(Swapped())[0].source.described.refused["value"]
    assert "q_proj for key, k_proj for value, v_proj for query" in reason
    reason = xd.find_sites(Sharpened())[0].source.described.refused["value"]
    assert "what goes to the output projection has nothing to do with Sharpened's v_proj" in reason


def test_a_rule_of_ones_own_overrules_a_trial(monkeypatch):
    def rule(module):
        query, key, value = (xd.Projection(layer) for layer in (module.v_proj, module.q_proj, module.k_proj))
        return xd.Attention(module, query, key, value, output=module.out_proj, heads=HEADS, weights="compute")

    monkeypatch.setitem(sites._RULES, Swapped, rule)
    assert {"values", "scores", "exact"} <= set(check(Model(Block(Swapped()))).passed)


def test_values_that_are_gated_afterwards_are_still_values():
    described = xd.find_sites(Gated())[0].source.described
    assert "value" not in described.refused
    assert described.unconfirmed is None
    assert {*SCORES, "attended_value"} <= set(described.refused)


@pytest.mark.parametrize("grad", [True, False])
def test_a_trial_tells_roles_of_frozen_modules_and_without_gradients_too(grad):
    for kind, refused in ((Gated, False), (Sharpened, True)):
        model = kind().requires_grad_(False)
        with torch.set_grad_enabled(grad):
            described = xd.find_sites(model)[0].source.described
        assert ("value" in described.refused) is refused
        assert (described.unconfirmed is not None) is refused


@pytest.mark.parametrize("kind", [Swapped, Multiplied])
def test_verify_does_not_end_well_where_names_are_not_confirmed(command, kind):
    status, out, _ = command("verify", Model(Block(kind())), "--samples=20")
    assert status == 1
    assert f"not confirmed layers.0.a: tried with {'random tokens' if kind is Swapped else 'a random token'}, " in out
    assert "1 module not confirmed to be what the names say" in out
    assert "sites agree" not in out


def test_inspect_says_what_is_not_confirmed_once(command):
    out = command("inspect", Model(Block(Multiplied())))[1]
    assert "not confirmed layers.0.a: tried with a random token, what goes to the output projection" in out
    assert "not confirmed" not in command("inspect", Model(Block(Swapped())))[1]  # refused, with the same words
    assert "not confirmed" not in command("inspect", Model(Block(Gated())))[1]


def test_verify_sees_roles_that_are_not_right_through_a_mask_that_it_does_not_understand(command):
    status, out, _ = command("verify", Model(Block(DemandingSwapped())), "--samples=20", call={"attention_mask": MASK})
    assert status == 1
    assert "wrong rule values failed for layers.0.a:value" in out


# ------------------------------------------------------------------------------------------------ what a trial says


def test_a_trial_says_once_what_it_has_found_and_what_to_leave_out(command):
    for name in ("inspect", "verify"):
        out = command(name, Model(Block(OddScale())))[1]
        assert out.count("tried with random tokens") == 1
        assert (
            "tried with random tokens, OddScale does not compute softmax(q kᵀ / √8) v with 4 heads of 8, which its "
            "attribute names suggest. Another scale, head layout or order of q, k, v may be the reason. Leave query, "
            "key and query_key out here"
        ) in out


@pytest.mark.parametrize(("kind", "formula", "scale"), [(NoScale, "q kᵀ", 1.0), (ByTheWidth, "q kᵀ / 8", 0.125)])
def test_a_trial_names_a_scale_that_explains_the_call_and_takes_it_when_told(kind, formula, scale):
    model = kind()
    with pytest.raises(xd.UnsupportedSiteError) as caught:
        xd.ExplicitDropout(model, xd.paper(0.2), query=1.0)
    assert f"{kind.__name__} computes softmax({formula}) v, not softmax(q kᵀ / √8) v with 4 heads of 8" in str(
        caught.value
    )
    assert f"let its attribute `scale` be {scale:g}" in str(caught.value)
    model.scale = scale
    assert "query" not in xd.find_sites(model)[0].source.described.refused
    assert {"scores", "exact"} <= set(check(model).passed)


def test_reasons_that_differ_are_told_apart():
    reasons = {"a:query": "turned. Leave query out", "a:key": "turned. Leave key out", "b:key": "key by key"}
    assert told_once(reasons) == [(["a:query", "a:key"], "turned. Leave query and key out"), (["b:key"], "key by key")]


# ------------------------------------------------------------------------------------------------ masks, and files


def test_verify_checks_what_a_mask_does_not_touch_and_recommends_nothing_that_fails(command):
    for model in (Model(Block()), Model(Block(Demanding()))):
        status, out, err = command("verify", model, "--samples=20", call={"attention_mask": MASK})
        assert (status, err) == (0, "")
        assert "All 3 sites agree" in out
        assert "sites not exact in this call" in out
        assert "such as layers.0.a:query: `attention_mask` must be understood" in out
        assert "or use value or feed_forward here" in out
        assert out.count("must be understood") == 1


def test_a_mask_that_values_depend_on_is_told_without_recommending_values():
    class Parts(nn.Module):
        """Uses its weights without calling their layers, so that values are measured at its own call."""

        def __init__(self):
            super().__init__()
            self.abc, self.d = nn.Linear(8, 24), nn.Linear(8, 8)

    def rule(module):
        rows = (slice(8 * i, 8 * i + 8) for i in range(3))
        parts = (xd.Projection(module, one, "abc.weight", "abc.bias", called=False) for one in rows)
        return xd.Attention(module, *parts, output=module.d, heads=2, inputs=("x", "x", "x"))

    described, x = rule(Parts()), torch.randn(2, 6, 8)
    with pytest.raises(xd.InputError, match="leave this layer out by layers=") as caught:
        described.pairs(described, {"x": x, "attention_mask": MASK}, x, x)
    assert "use value" not in str(caught.value)


@pytest.mark.parametrize("name", ["x.txt", "x", "x.exe"])
def test_a_plot_of_another_kind_is_refused_before_anything_is_computed(command, tmp_path, monkeypatch, name):
    monkeypatch.setattr("explicit_dropout.cli.verifying.load", lambda *_, **__: pytest.fail("built a model"))
    status, out, err = command("verify", Model(Block()), "--plot", str(tmp_path / name))
    assert (status, out) == (2, "")
    assert "`--plot` must be a file name that ends in .png, .pdf or .svg" in err
