"""Twins where models call their parts in ways of their own: twice, with other padding, frozen, interrupted."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import explicit_dropout as xd

X, OTHER = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)), torch.randn(3, 5, 8)
FIRST, SECOND = (torch.zeros(3, 5, dtype=torch.bool) for _ in range(2))
FIRST[0, 2:] = SECOND[1, 1:] = True  # padding, as torch.nn has it


class Own(nn.Module):
    """Two layers and a dropout, and a forward pass that a test writes."""

    def __init__(self, function, rate=0.2):
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(rate)
        self.function, self.seen = function, None

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Masked(Own):
    def forward(self, x, attention_mask=None):
        return self.function(self, x, attention_mask)


LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler does


def by_head(x):
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


def together(heads):
    return heads.transpose(1, 2).flatten(2)


def weight_energy(weights, values, tokens=15, rate=0.2):
    """½ p/(1−p) Σ A_ij² ‖v_j‖², a mean over tokens."""
    return 0.5 * rate / (1 - rate) * (weights.square() @ values.square().sum(-1, keepdim=True)).sum() / tokens


def layer(rate=0.1):
    return nn.TransformerEncoderLayer(8, 2, 16, rate, batch_first=True)


# ---------------------------------------------------------------------------------------------- parts called twice


class Pair(nn.Module):
    """Two sequences through one encoder, each with its own padding."""

    def __init__(self):
        super().__init__()
        self.project, self.encoder = nn.Linear(8, 8), layer()

    def forward(self, *pairs):
        return [self.encoder(self.project(x), src_key_padding_mask=padding) for x, padding in pairs]


@pytest.mark.parametrize(
    "second", [(OTHER, SECOND), (OTHER[:, :4], SECOND[:, :4]), (OTHER, None)], ids=["equal", "shorter", "no mask"]
)
def test_a_part_that_is_called_twice_has_the_padding_of_each_call(second):
    model = Pair()
    twins = xd.convert_dropout(model, 1.0)
    alone = []
    for pair in ((X, FIRST), second):
        model(pair)
        twins()
        alone.append(twins.terms())
    model((X, FIRST), second)
    twins()
    assert len(twins.terms()) == 2 * len(alone[0])
    for name, value in alone[0].items():
        assert_close(twins.terms()[name], value)
        assert_close(twins.terms()[f"{name} 2"], alone[1][name])


def test_a_call_without_gradients_does_not_change_the_padding_of_another():
    class Teacher(Pair):
        def forward(self, first, second=None):
            made = super().forward(first)
            if second is not None:
                with torch.no_grad():
                    super().forward(second)
            return made

    model = Teacher()
    twins = xd.convert_dropout(model, 1.0)
    model((X, FIRST))
    alone = twins()
    model((X, FIRST), (OTHER, SECOND))
    assert_close(twins(), alone)


def test_dropout_before_the_only_part_that_is_told_of_padding_has_its_mask():
    class Before(nn.Module):
        def __init__(self):
            super().__init__()
            self.project, self.dropout, self.encoder = nn.Linear(8, 8), nn.Dropout(0.2), layer(0.0)

        def forward(self, x, padding):
            return self.encoder(self.dropout(self.project(x)).relu(), src_key_padding_mask=padding)

    model = Before()
    twins = xd.convert_dropout(model, 1.0)
    model(X, FIRST)
    assert_close(twins(), 0.125 * model.project(X)[~FIRST].square().sum() / (~FIRST).sum())


@pytest.mark.parametrize("tokens", [5, 4])
def test_padding_of_the_source_is_not_that_of_the_target(tokens):
    model = nn.Transformer(8, 2, 1, 1, 16, 0.1, batch_first=True)
    twins, seen = xd.convert_dropout(model, 1.0), []
    model.decoder.layers[0].linear2.register_forward_hook(lambda _m, _i, output: seen.append(output))
    model(X, OTHER[:, :tokens], src_key_padding_mask=FIRST, memory_key_padding_mask=FIRST)
    twins()
    expected = 0.5 * 0.1 / 0.9 * seen[0].square().sum() / (3 * tokens)
    assert_close(twins.terms()["decoder.layers.0.dropout3:hidden"], expected)


def test_either_sequence_has_its_own_padding_in_a_model_that_is_told_of_both():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.src_embed, self.tgt_embed = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2))
            self.transformer = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

        def forward(self, src, tgt, src_key_padding_mask=None, tgt_key_padding_mask=None):
            return self.transformer(
                self.src_embed(src), self.tgt_embed(tgt), src_key_padding_mask=src_key_padding_mask,
                tgt_key_padding_mask=tgt_key_padding_mask,
            )  # fmt: skip

    model = Both()
    twins = xd.convert_dropout(model, 1.0)
    for source, target in ((FIRST, SECOND), (FIRST, None), (None, SECOND)):
        model(X, OTHER, source, target)
        twins()
        for name, x, padding in (("src_embed", X, source), ("tgt_embed", OTHER, target)):
            real = torch.ones(3, 5, dtype=torch.bool) if padding is None else ~padding
            made = getattr(model, name)[0](x)
            expected = 0.125 * made[real].square().sum() / real.sum()
            assert_close(twins.terms()[f"{name}.1:hidden"], expected)


def test_a_mask_of_fewer_samples_than_a_model_makes_of_them_is_an_error():
    model = Masked(lambda self, x, _mask: self.dropout(self.first(torch.cat([x, x]))).relu())
    xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.CollectionError, match=r"mask \(3, 5\) does not say which of the tokens \(6, 5\)"):
        model(X, attention_mask=~FIRST)


# ---------------------------------------------------------------------------------------------- frozen, interrupted


def test_freezing_layers_does_not_change_a_penalty():
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8)]
    model = nn.Sequential(*layers)
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    before = twins()
    layers[0].requires_grad_(False)
    layers[3].requires_grad_(False)
    model(X)
    assert_close(twins(), before)
    assert {site.component for site in twins.sites} == {"linear"}


LOOKS_AT = {
    "its norm": lambda hidden: float(hidden.norm()),
    "its mean": lambda hidden: hidden.mean().item(),
    "a copy of it": lambda hidden: hidden.cpu().clone(),
    "its spread": torch.no_grad()(lambda hidden: hidden.std(0)),
}


class Reverse(torch.autograd.Function):
    """The identity, whose gradient changes its sign."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return -gradient


@pytest.mark.parametrize("use", [Reverse.apply, lambda x: x * 1.0], ids=["a function of one's own", "torch"])
def test_what_a_function_of_ones_own_makes_of_a_result_is_a_use_of_it(use):
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.dropout = nn.Linear(8, 16), nn.Dropout(0.25)
            self.label, self.domain = nn.Linear(16, 3), nn.Linear(16, 2)

        def forward(self, x):
            hidden = self.dropout(self.body(x).relu())
            return self.label(hidden), self.domain(use(hidden))

    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(6, 8)
    twins = xd.convert_dropout(model, 1.0)
    model(x)
    torch.testing.assert_close(twins(), xd.functional.hidden(model.body(x).relu(), xd.inverted(0.25)))
    assert [site.component for site in twins.sites] == ["hidden"]


@pytest.mark.parametrize("look", LOOKS_AT.values(), ids=LOOKS_AT)
def test_looking_at_what_frozen_layers_make_does_not_change_its_twin(look):
    def run(self, x):
        hidden = self.dropout(self.first(x))
        look(hidden)
        return self.second(hidden)

    model = Own(run)
    model.first.requires_grad_(False)
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    twins()
    assert [site.component for site in twins.sites] == ["linear"]


def test_attention_weights_of_frozen_layers_are_recognised():
    def attend(self, x):
        queries = by_head(self.first(x))
        heads = self.dropout((queries @ queries.mT).softmax(-1)) @ queries
        return self.dropout(self.second(together(heads))).relu()

    model = Own(attend)
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    before = twins()
    model.first.requires_grad_(False)
    model(X)
    assert_close(twins(), before)


def test_ctrl_c_in_a_pass_leaves_no_dice_off_after_remove():
    interrupted = [True]

    def run(self, x):
        hidden = self.dropout(self.first(x))
        if interrupted:
            raise KeyboardInterrupt
        return self.second(hidden)

    model = Own(run)
    twins = xd.convert_dropout(model, 1.0)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    twins.remove()
    interrupted.clear()
    assert not torch.equal(model(X), model(X))


def test_a_model_that_was_interrupted_can_be_copied():
    def run(self, x):
        self.dropout(self.first(x))
        raise KeyboardInterrupt

    model = Own(run)
    twins = xd.convert_dropout(model, 1.0)
    with pytest.raises(KeyboardInterrupt):
        model(X)
    copy.deepcopy(model)
    twins.remove()


def test_stochastic_depth_of_a_part_without_gradients_is_not_counted():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = (nn.Sequential(nn.Linear(8, 8), xd.stochastic.DropPath(0.2)) for _ in range(2))

        def forward(self, x):
            with torch.no_grad():
                made = self.teacher(x)
            return self.student(x) - made

    model = Distilled()
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    assert_close(twins(), 0.125 * model.student[0](X).square().sum() / 15)
    assert [site.path for site in twins.sites] == ["student.1"]


# ---------------------------------------------------------------------------------------------- shapes of attention


@pytest.mark.parametrize(("of_keys", "of_values"), [(2, 1), (1, 1), (1, 2)])
def test_heads_that_fused_attention_shares_count_for_each_of_queries(of_keys, of_values):
    def attend(self, x):
        heads = by_head(self.first(x))
        self.seen = heads, heads[:, :of_keys], heads[:, :of_values]
        return F.scaled_dot_product_attention(*self.seen, dropout_p=0.2)

    model = Own(attend)
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    queries, keys, values = model.seen
    weights = (queries @ keys.mT / 2).softmax(-1)
    assert_close(twins(), weight_energy(weights, values.expand(-1, 2, -1, -1)))


def test_queries_that_samples_share_count_for_each():
    def attend(self, x):
        heads = by_head(self.first(x))
        self.seen = heads[:1], heads, heads
        return F.scaled_dot_product_attention(*self.seen, dropout_p=0.2)

    model = Own(attend)
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    queries, keys, values = model.seen
    assert_close(twins(), weight_energy((queries @ keys.mT / 2).softmax(-1), values))


def test_fused_attention_without_a_batch_has_one_sample():
    model = Own(lambda self, x: F.scaled_dot_product_attention(*[self.first(x)] * 3, dropout_p=0.2))
    twins = xd.convert_dropout(model, 1.0)
    model(X[0])
    made = model.first(X[0])
    assert_close(twins(), weight_energy((made @ made.T / 8**0.5).softmax(-1), made, tokens=5))


MARKED = {
    "a slice": lambda scores: scores.softmax(-1)[:, :],
    "a small number added": lambda scores: scores.softmax(-1) + 1e-6,
    "double precision in between": lambda scores: scores.double().softmax(-1).double().float(),
    "an axis more and less": lambda scores: scores.unsqueeze(1).softmax(-1).squeeze(1),
    "torch.special": lambda scores: torch.special.softmax(scores, -1),
}


@pytest.mark.parametrize("how", MARKED.values(), ids=MARKED)
def test_attention_weights_of_one_head_are_known_again(how):
    def attend(self, x):
        made = self.first(x)
        self.seen = how(made @ made.mT), made
        return self.dropout(self.seen[0]) @ made

    model = Own(attend)
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    assert_close(twins(), weight_energy(*model.seen))


def test_tokens_that_may_come_first_are_an_error_with_a_token_for_classes_too():
    def attend(self, x):
        x = torch.cat([torch.ones(1, x.shape[1], 8), x])
        heads = self.first(x).reshape(len(x), -1, 4).transpose(0, 1)
        return self.dropout((heads @ heads.mT).softmax(-1)) @ heads

    model = Own(attend)
    xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="how many samples there are is not known"):
        model(torch.randn(6, 3, 8))


@pytest.mark.parametrize("shape", [(5, 5), (1, 5, 5), (1, 5, 8)])
def test_arguments_that_all_samples_share_say_nothing_of_samples(shape):
    def attend(self, x, shared):
        heads = by_head(self.first(x + (shared if shared.shape[-1] == 8 else 0))).flatten(0, 1)
        self.seen = (heads @ heads.mT + (shared if shared.shape[-1] == 5 else 0)).softmax(-1), heads
        return self.dropout(self.seen[0]) @ heads

    model = Own(attend)
    twins = xd.convert_dropout(model, 1.0)
    model(X, torch.randn(shape))
    assert_close(twins(), weight_energy(*model.seen))


def test_arguments_that_differ_in_their_first_axis_do_not_tell_samples():
    def attend(self, bias, x):
        heads = by_head(self.first(x)).flatten(0, 1)
        return self.dropout((heads @ heads.mT + bias.repeat(len(x), 1, 1)).softmax(-1)) @ heads

    model = Own(attend)
    xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="how many samples there are is not known"):
        model(torch.randn(2, 5, 5), X)


@LOOKS
@pytest.mark.parametrize("compiled", [False, True])
def test_dropout_behind_a_layer_over_tokens_is_a_mean_over_them(compiled):
    class Mixer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.over_tokens, self.dropout = nn.LayerNorm(8), nn.Linear(32, 32), nn.Dropout(0.2)

        def forward(self, x):
            return x + self.dropout(self.over_tokens(self.norm(x).mT).mT)

    model, x = Mixer(), torch.randn(3, 32, 8)
    twins = xd.convert_dropout(model, 1.0)
    (torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model)(x)
    assert_close(twins(), 0.125 * model.over_tokens(model.norm(x).mT).square().sum() / 96)
    torch.compiler.reset()


# ---------------------------------------------------------------------------------------------- what has no twin


@pytest.mark.parametrize("strengths", [{}, {"hidden": 0.0}])
def test_a_product_that_is_not_recognised_is_an_error_whatever_has_a_strength(strengths):
    def mix(self, x):
        heads = by_head(self.first(x))
        weights = self.dropout((heads @ heads.mT).softmax(-1))
        return self.second(together(torch.einsum("bhij,hg->bgij", weights, torch.ones(2, 2)) @ heads))

    model = Own(mix)
    xd.convert_dropout(model, 1.0, **strengths)
    with pytest.raises(xd.UnsupportedSiteError, match="it was not recognised"):
        model(X)


def test_a_mask_that_is_drawn_of_ones_has_no_twin():
    def locked(self, x):
        hidden = self.first(x)
        return self.second(hidden * F.dropout(torch.ones_like(hidden[:, :1]), 0.3, self.training))

    model = Own(locked)
    xd.convert_dropout(model, 1.0)
    with pytest.raises(xd.UnsupportedSiteError, match="locked or variational dropout"):
        model(X)


POOLED = {
    "weighed by what is learnt": lambda self, x: (self.second(x).softmax(1) * self.dropout(self.first(x))).sum(1),
    "scaled": lambda self, x: self.second(self.dropout(self.first(x)) * self.second.bias),
}


@pytest.mark.parametrize("function", POOLED.values(), ids=POOLED)
def test_frozen_features_that_are_multiplied_are_no_mask(function):
    model = Own(function)
    model.first.requires_grad_(False)
    twins = xd.convert_dropout(nn.Sequential(model, nn.Dropout(0.2), nn.Linear(8, 2)), 1.0)
    twins.model(X)
    made = 0.125 * model.first(X).square().sum() / 15
    twins()
    assert_close(twins.terms()["0.dropout:hidden"], made)


def test_alpha_dropout_at_rate_0_draws_nothing():
    model = Own(lambda self, x: F.alpha_dropout(self.dropout(self.first(x)).relu(), 0.0, self.training))
    twins = xd.convert_dropout(model, 1.0)
    model(X)
    assert twins() > 0


def test_checkpointing_of_the_reentrant_kind_is_named_where_it_runs_a_part_again():
    def run(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True)

    model = Own(run)
    model.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8))
    xd.convert_dropout(model, 1.0)
    with pytest.raises((xd.CollectionError, xd.UnsupportedSiteError), match="checkpointing"):
        model(X).sum().backward()


# ---------------------------------------------------------------------------------------------- rates that change


@LOOKS
def test_rates_that_change_are_those_of_the_next_pass_compiled_or_not():
    model = Own(lambda self, x: self.second(self.dropout(self.first(x))))
    twins = xd.convert_dropout(model, 1.0)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for rate in (0.2, 0.37, 0.21, 0.5):
        model.dropout.p = rate
        compiled(X)
        found = twins()
        model(X)
        assert_close(found, twins())
        assert {site.rate for site in twins.sites} == {rate}
    torch.compiler.reset()


def test_dropout_of_everything_leaves_zeros():
    assert torch.equal(xd.stochastic.dropout(X, 1.0), F.dropout(X, 1.0))
