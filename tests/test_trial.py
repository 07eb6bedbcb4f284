"""Attention of one's own under the usual names: what a call shows, and what it leaves alone."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import explicit_dropout as xd
from explicit_dropout.testing import check_rule

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
SCORES = ("query", "key", "query_key")


class Separate(nn.Module):
    """Attention of four heads with a place for whatever comes between."""

    num_heads, causal_call, output = 4, False, "out_proj"

    def __init__(self, key_heads=4):
        super().__init__()
        self.num_key_value_heads = key_heads
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), *(nn.Linear(16, 4 * key_heads) for _ in range(2))
        setattr(self, self.output, nn.Linear(16, 16))

    def split(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        return q, *(self.repeated(part) for part in (k, v))

    def repeated(self, part):
        return part.repeat_interleave(4 // part.shape[1], 1)

    def attend(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal_call)

    def between(self, attended, _x):
        return attended

    def forward(self, x):
        attended = self.attend(*self.split(x)).transpose(1, 2).flatten(2)
        return getattr(self, self.output)(self.between(attended, x))


class Fused(Separate):
    """The same with one layer for all three, laid out as it likes."""

    def __init__(self):
        nn.Module.__init__(self)
        self.qkv, self.out_proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def split(self, x):
        return self.layout(self.qkv(x))

    def layout(self, rows):
        return torch.unflatten(rows, -1, (3, 4, 4)).permute(2, 0, 3, 1, 4)


class HeadByHead(Fused):
    def layout(self, rows):
        return torch.unflatten(rows, -1, (4, 12)).transpose(1, 2).chunk(3, -1)


class ValuesFirst(Fused):
    def layout(self, rows):
        v, q, k = super().layout(rows)
        return q, k, v


class NonCausalAttention(Separate):
    pass


class Reader(Separate):
    causal_call = True


class OtherName(Separate):
    output = "unify"


class Tiled(Separate):
    def repeated(self, part):
        return part.repeat(1, 4 // part.shape[1], 1, 1)


class Keeping(Separate):
    """With numbers and tensors that look like something else than they are."""

    def __init__(self, **kept):
        super().__init__()
        for name, value in kept.items():
            setattr(self, name, value)

    def attend(self, q, k, v):
        scores = q @ k.mT * (1 / self.divisor if hasattr(self, "divisor") else 0.5)
        if hasattr(self, "tril"):
            scores = scores.masked_fill(self.tril[: q.shape[-2], : q.shape[-2]] == 0, -torch.inf)
        return scores.softmax(-1) @ v


class Windowed(Separate):
    """Every token sees the four around it: of three tokens all."""

    def attend(self, q, k, v):
        place = torch.arange(q.shape[-2])
        near = (place[:, None] - place).abs() <= 4
        return F.scaled_dot_product_attention(q, k, v, attn_mask=near)


class Turned(Separate):
    """Queries and keys rotated by a plain function."""

    def attend(self, q, k, v):
        angles = torch.arange(q.shape[-2])[:, None] * torch.tensor([1.0, 0.1])
        q, k = (
            torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (2, 2)).contiguous()) * torch.exp(1j * angles))
            for part in (q, k)
        )
        return super().attend(q.flatten(-2), k.flatten(-2), v)


class Gated(Separate):
    def between(self, attended, x):
        return attended * torch.sigmoid(x)


class GatedFused(Fused):
    def between(self, attended, x):
        return attended * torch.sigmoid(x)


class OtherRoles(Separate):
    """What is called value is the query."""

    def split(self, x):
        q, k, v = super().split(x)
        return v, q, k


class SubNormalised(Separate):
    def between(self, attended, _x):
        return F.layer_norm(attended, (16,))


class Grid(Fused):
    """Takes (batch, height, width, channels), as segmentation models do."""

    def forward(self, x):
        batch, height, width, _ = x.shape
        return super().forward(x.reshape(batch, height * width, -1)).view(batch, height, width, -1)


def values_of(model, component, noise, x=X, **call):
    with xd.ExplicitDropout(model, noise, **{component: 1.0}) as reg:
        model(x, **call)
        return reg()


def as_described(model, component, noise, x=X, **facts):
    """The closed form of an attention whose projections are given."""
    q, k, v = facts.pop("projections", None) or [
        (layer.weight, layer.bias) for layer in (model.q_proj, model.k_proj, model.v_proj)
    ]
    if component == "value":
        return xd.functional.value(x, v[0], noise)
    facts = {"heads": 4, "scale": 0.5, **facts}
    return xd.functional.query(x, q[0], k[0], noise, query_bias=q[1], key_bias=k[1], **facts)


@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.inverted(0.2)], ids=["paper", "inverted"])
@pytest.mark.parametrize("component", ["query", "value"])
def test_rows_of_a_fused_layer_may_stand_head_by_head(component, noise):
    model = HeadByHead()
    weight, bias = (torch.unflatten(t, 0, (4, 3, 4)).transpose(0, 1).flatten(1, 2) for t in model.qkv.parameters())
    wanted = as_described(model, component, noise, projections=list(zip(weight, bias, strict=True)))
    assert_close(values_of(model, component, noise), wanted)
    plain = Fused()
    thirds = list(zip(plain.qkv.weight.chunk(3), plain.qkv.bias.chunk(3), strict=True))
    assert_close(values_of(plain, component, noise), as_described(plain, component, noise, projections=thirds))


@pytest.mark.parametrize(("kind", "causal"), [(NonCausalAttention, False), (Reader, True), (Separate, False)])
def test_what_a_query_sees_is_what_it_sees_on_trial(kind, causal):
    model, noise = kind(), xd.inverted(0.2)
    assert_close(values_of(model, "query", noise), as_described(model, "query", noise, causal=causal))


def test_an_output_projection_of_any_name_is_found():
    model = OtherName()
    seen = []
    model.unify.register_forward_pre_hook(lambda _m, args: seen.append(args[0]))
    found = values_of(model, "attended_value", xd.paper(0.2))
    assert_close(found, 0.5 * 0.04 * (seen[-1] - model.v_proj.bias).square().sum() / 10)


@pytest.mark.parametrize(
    ("model", "components"),
    [
        (Turned(), SCORES), (Windowed(), SCORES), (Tiled(2), (*SCORES, "attended_value")),
        (Gated(), (*SCORES, "attended_value")), (SubNormalised(), (*SCORES, "attended_value")),
        (GatedFused(), (*SCORES, "attended_value")), (ValuesFirst(), (*SCORES, "attended_value", "value")),
        (OtherRoles(), (*SCORES, "attended_value", "value")),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_what_no_reading_explains_is_refused_and_nothing_else(model, components):
    for component in (*SCORES, "attended_value", "value"):
        if component in components:
            with pytest.raises(xd.UnsupportedSiteError, match=f"{component}: tried with .*{type(model).__name__}"):
                xd.ExplicitDropout(model, xd.paper(0.2), **{component: 1.0})
        else:
            assert values_of(model, component, xd.paper(0.2)) > 0


def test_scores_of_a_grid_that_is_attended_to_as_one_sequence_are_refused():
    model, x = Grid(), torch.randn(2, 3, 4, 16)
    for component in SCORES:
        with pytest.raises(xd.UnsupportedSiteError, match="Grid attends to a grid of tokens"):
            xd.ExplicitDropout(model, xd.paper(0.2), **{component: 1.0})
    weight = model.qkv.weight.chunk(3)[2]
    assert_close(
        values_of(model, "value", xd.paper(0.2), x), xd.functional.value(x.flatten(1, 2), weight, xd.paper(0.2))
    )


class Demanding(Turned):
    """Cannot be called with tokens alone, so that it is taken at its word."""

    def forward(self, x, _size):
        return super().forward(x)


class Breaking(Turned):
    def forward(self, x):
        if x.shape[0] == 1:
            raise ValueError("one sample")
        return super().forward(x)


class Short(Turned):
    """Has room for five tokens."""

    def forward(self, x):
        return super().forward(x + torch.zeros(1, 5, 1)[:, : x.shape[1]])


def test_a_module_that_has_no_room_for_many_tokens_is_tried_with_few():
    assert "query" in xd.find_sites(Short())[0].source.described.refused


TRIL = torch.ones(64, 64).tril()


@pytest.mark.parametrize(
    ("kept", "scale", "causal"),
    [
        ({"scale": 2.0, "divisor": 2.0}, 0.5, False), ({"scale": 3.0, "divisor": 3.0}, 1 / 3, False),
        ({"scale": True}, 0.5, False), ({"tril": TRIL}, 0.5, True), ({"tril": TRIL, "scale": 2.0}, 0.5, True),
    ],
    ids=["the root", "a divisor", "a flag", "a triangle", "both"],
)  # fmt: skip
@pytest.mark.parametrize("noise", [xd.paper(0.2), xd.inverted(0.2)], ids=["paper", "inverted"])
def test_doubts_that_names_raise_are_settled_by_a_call_that_is_explained(kept, scale, causal, noise):
    model = Keeping(**kept)
    assert_close(values_of(model, "query", noise), as_described(model, "query", noise, scale=scale, causal=causal))


def test_doubts_that_a_call_does_not_settle_stay():
    class Unused(Separate):
        def __init__(self):
            super().__init__()
            self.tril, self.scale = TRIL, 2.0  # for a mask that other calls may ask for

    for model, words in (
        (Unused(), "looks like the mask of causal"),
        (Keeping(tril=TRIL.triu(-7)), "looks like a mask"),
    ):
        for component in SCORES:
            with pytest.raises(xd.UnsupportedSiteError, match=words):
                xd.ExplicitDropout(model, xd.paper(0.2), **{component: 1.0})


@pytest.mark.parametrize("model", [Separate(), Separate(2), Reader(), HeadByHead(), OtherName(), Keeping(tril=TRIL)])
@pytest.mark.parametrize("noise", [xd.bernoulli(0.2), xd.inverted(0.2)], ids=["bernoulli", "inverted"])
def test_attended_values_of_what_is_explained_have_every_law(model, noise):
    report = check_rule(model.double(), X.double(), compile=False)
    assert {"scores", "weights", "exact", "gradient"} <= set(report.passed)
    assert values_of(model, "attended_value", noise, X.double()) > 0


@pytest.mark.parametrize("model", [Demanding(), Breaking()], ids=["another argument", "an error"])
def test_what_cannot_be_tried_is_taken_at_its_word(model):
    xd.ExplicitDropout(model, xd.paper(0.2), query=1.0).remove()


class Changing(Separate):
    """Plain attention as long as parameters of its own are what they begin with."""

    def __init__(self, kind):
        super().__init__()
        width = self.q_proj.in_features
        self.kind = kind
        if kind == "low rank":
            self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
            nn.init.zeros_(self.up.weight)
        else:
            self.gain = nn.Parameter(torch.ones(self.num_heads, 1, 1))

    def forward(self, x):
        queries = self.q_proj(x) + (self.up(self.down(x)) if self.kind == "low rank" else 0)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in (queries, self.k_proj(x), self.v_proj(x))
        )
        q = q * self.gain if self.kind == "scale" else q
        attended = F.scaled_dot_product_attention(q, k, v)
        attended = attended * self.gain if self.kind == "heads" else attended
        result = self.out_proj(attended.transpose(1, 2).flatten(2))
        return result * self.gain.flatten()[0] if self.kind == "branch" else result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "name"), [("low rank", "up.weight"), ("scale", "gain"), ("heads", "gain")])
def test_what_parameters_will_change_is_refused_before_they_do(kind, name, dtype):
    model = Changing(kind).to(dtype)
    for component in (*SCORES, *(["attended_value"] if kind == "heads" else [])):
        with pytest.raises(xd.UnsupportedSiteError, match=rf"only while its `{name}` is what it is now"):
            xd.ExplicitDropout(model, xd.paper(0.2), **{component: 1.0})
    with pytest.raises(xd.UnsupportedSiteError):  # which needs the weights
        xd.ExplicitDropout(model, xd.inverted(0.2), attended_value=1.0)
    xd.ExplicitDropout(model, xd.inverted(0.2), value=1.0).remove()


@pytest.mark.parametrize("kind", ["low rank", "scale"])
def test_what_acts_on_scores_alone_leaves_attended_values(kind):
    model = Changing(kind)
    for parameter in (model.up.weight,) if kind == "low rank" else (model.gain,):
        nn.init.normal_(parameter)
    seen = []
    model.out_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(X)
    coherent = 0.5 * 0.2**2 * (seen[-1] - model.v_proj.bias).square().sum(-1).mean()
    assert_close(values_of(model, "attended_value", xd.paper(0.2)), coherent)


@pytest.mark.parametrize("std", [0.0, 0.5])
def test_gains_are_found_where_scores_are_unknown_too(std):
    class Biased(Changing):
        """A learned bias of the scores, which no reading explains unless it is 0."""

        def __init__(self):
            super().__init__("heads")
            self.table = nn.Parameter(std * torch.randn(self.num_heads, 64, 64))

        def forward(self, x):
            q, k, v = self.split(x)
            attended = F.scaled_dot_product_attention(q, k, v, self.table[:, : x.shape[1], : x.shape[1]])
            return self.out_proj((attended * self.gain).transpose(1, 2).flatten(2))

    with pytest.raises(xd.UnsupportedSiteError, match="only while its `gain` is what it is now"):
        xd.ExplicitDropout(Biased(), xd.paper(0.2), attended_value=1.0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, None], ids=["no arithmetic", "a copy of its own"])
def test_what_cannot_have_other_values_is_taken_as_it_is(dtype):
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def __deepcopy__(self, memo):
            return Stubborn()

    model = Separate()
    if dtype is None:
        model.other = Stubborn()
    else:
        model.register_parameter("other", nn.Parameter(torch.ones(3).to(dtype), requires_grad=False))
    xd.ExplicitDropout(model, xd.inverted(0.2), key=1.0, value=1.0).remove()


def test_constants_that_nobody_trains_are_not_moved():
    class Masked(Separate):
        def __init__(self):
            super().__init__()
            mask = torch.zeros(64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -torch.inf)
            self.hidden = nn.Parameter(mask, requires_grad=False)

        def attend(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, self.hidden[: q.shape[2], : q.shape[2]])

    assert xd.find_sites(Masked())[0].source.described.causal
    xd.ExplicitDropout(Masked(), xd.paper(0.2), query=1.0).remove()


def test_parameters_that_act_elsewhere_do_not_matter():
    model = Changing("branch")
    before = copy.deepcopy(model.state_dict())
    xd.ExplicitDropout(model, xd.inverted(0.2), key=1.0, attended_value=1.0).remove()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Counting(Separate):
    """With all that a trial could leave behind."""

    def __init__(self):
        super().__init__()
        self.calls, self.dropout = 0, 0.5
        self.register_buffer("seen", torch.zeros(()))
        self.cache = []

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        self.cache.append(x)
        return F.dropout(super().forward(x), 0.1, self.training)


def test_a_trial_leaves_nothing_behind():
    model, hooked = Counting().train(), []
    model.register_forward_hook(lambda *_: hooked.append(1))
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    site = next(site for site in xd.find_sites(model) if site.component == "query")
    assert not site.source.described.refused
    assert (model.calls, model.cache, hooked, model.training) == (0, [], [], True)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(parameter.grad.eq(1).all() for parameter in model.parameters())
    assert site.projection.module is model.q_proj


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_precision_is_tried(dtype):
    assert xd.find_sites(NonCausalAttention().to(dtype))[0].source.described.causal is False
    turned = Turned().to(dtype)
    assert "query" in xd.find_sites(turned)[0].source.described.refused
    assert {parameter.dtype for parameter in turned.parameters()} == {dtype}


def test_models_without_values_or_with_a_forward_of_their_own_are_not_tried():
    with torch.device("meta"):
        empty = Turned()
    assert not xd.find_sites(empty)[0].source.described.refused
    replaced = Turned()
    replaced.forward = lambda _x: pytest.fail("called")
    assert not xd.find_sites(replaced)[0].source.described.refused


def test_attention_to_another_sequence_is_tried_too():
    class Cross(Separate):
        def forward(self, x, context):
            q, k, v = (
                layer(side).unflatten(-1, (-1, 4)).transpose(1, 2)
                for layer, side in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
            )
            return self.out_proj(self.attend(q, k / math.sqrt(2), v).transpose(1, 2).flatten(2))

    assert "query" in xd.find_sites(Cross())[0].source.described.refused
