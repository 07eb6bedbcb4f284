"""The stochastic baselines: their masks in distribution, their weights, and their random numbers."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from explicit_dropout.errors import CollectionError, InputError
from explicit_dropout.stochastic import (
    AttentionDropout,
    DropAttention,
    DropHead,
    DropKey,
    Dropout,
    DropPath,
    drop_heads,
    dropout,
    rates_over_depth,
    recording,
    replaying,
    uniform,
)

RATE = 0.3
ATTENTION = {
    "attention dropout": AttentionDropout(RATE),
    "element": DropAttention(RATE),
    "element, rescaled": DropAttention(RATE, renormalise=False),
    "element, spans": DropAttention(RATE, span=3),
    "column": DropAttention(RATE, mode="column"),
    "column, spans": DropAttention(RATE, mode="column", span=2),
    "drop key": DropKey(RATE),
    "drop head": DropHead(RATE),
}
OTHERS = {"dropout": Dropout(RATE), "drop path": DropPath(RATE)}
RENORMALISED = [name for name, treatment in ATTENTION.items() if treatment.renormalise]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def scores(*shape, dtype=torch.float64):
    return torch.randn(*(shape or (4, 3, 5, 7)), dtype=dtype, generator=torch.Generator().manual_seed(1))


def literal_renormalisation(scores, dropped):
    kept = scores.softmax(-1) * ~dropped
    return kept / kept.sum(-1, keepdim=True)


# ---------------------------------------------------------------------------------------------- what the weights are


def test_drop_key_is_element_wise_drop_attention_with_renormalisation():
    s, numbers = scores(16, 3, 5, 7), uniform((16, 3, 5, 7))
    s.requires_grad_()
    found = []
    for treatment in (DropKey(RATE), DropAttention(RATE)):
        with replaying([numbers]):
            found.append(treatment.weights(s))
    dropped = numbers < RATE
    assert not dropped.all(-1).any()
    found.append(literal_renormalisation(s, dropped))
    probe = torch.randn_like(s)
    gradients = [torch.autograd.grad((weights * probe).sum(), s)[0] for weights in found]
    for weights, gradient in zip(found, gradients, strict=True):
        assert_close(weights, found[-1], rtol=0, atol=1e-12)
        assert_close(gradient, gradients[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RENORMALISED)
def test_renormalised_rows_sum_to_one_and_lose_what_is_dropped(name):
    treatment, s = ATTENTION[name], scores()
    numbers = _numbers(treatment, s)
    with replaying([numbers]):
        weights = treatment.weights(s)
    with replaying([numbers]):
        dropped = treatment.dropped(s.shape).expand_as(s)
    some_left = ~dropped.all(-1)
    assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)), rtol=0, atol=1e-12)
    assert (weights[some_left] == 0)[dropped[some_left]].all()
    assert_close(weights[some_left], literal_renormalisation(s, dropped)[some_left], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(ATTENTION) - set(RENORMALISED)))
def test_rescaled_weights_are_right_on_average(name):
    treatment, s = ATTENTION[name], scores(2, 2, 3, 4)
    draws = torch.stack([treatment.weights(s) for _ in range(4000)])
    error = draws.std(0) / math.sqrt(len(draws))
    assert ((draws.mean(0) - s.softmax(-1)).abs() < 5 * error).all()


def test_attention_dropout_is_dropout_of_the_weights():
    s = scores()
    numbers = uniform(s.shape)
    with replaying([numbers]):
        weights = AttentionDropout(RATE).weights(s)
    with replaying([numbers]):
        assert torch.equal(weights, Dropout(RATE)(s.softmax(-1)))


def test_what_a_mask_forbids_stays_forbidden():
    s = scores(64, 2, 6, 6).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    for treatment in ATTENTION.values():
        weights = treatment.weights(s)
        assert (weights.triu(1) == 0).all()
        assert not weights.isnan().any()
        if treatment.renormalise:
            assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


# ---------------------------------------------------------------------------------------------- rows without keys


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ATTENTION)
def test_dropping_everything_gives_no_nan(name, dtype):
    treatment = ATTENTION[name]
    s = (30 * scores()).to(dtype).requires_grad_()
    with replaying([torch.zeros_like(_numbers(treatment, s))]):
        weights = treatment.weights(s)
    expected = s.softmax(-1) if treatment.renormalise else torch.zeros_like(s)
    assert torch.equal(weights, expected), "renormalised rows keep all of their keys, others become zero"
    (weights * torch.randn_like(weights)).sum().backward()
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_keys_whose_weight_has_underflown_can_be_all_that_is_left(dtype):
    s = torch.tensor([[[[40.0, 0.0, 0.5]]]], dtype=dtype, requires_grad=True)
    for treatment in (DropKey(RATE), DropAttention(RATE)):
        with replaying([torch.tensor([[[[0.0, 1.0, 1.0]]]])]):
            weights = treatment.weights(s)
        assert_close(
            weights.double().flatten(), torch.tensor([0, 0.3775, 0.6225], dtype=torch.double), rtol=0, atol=2e-3
        )
        (gradient,) = torch.autograd.grad(weights[..., 1].sum(), s)
        assert gradient.isfinite().all()
        assert gradient[..., 1] > 0


# ---------------------------------------------------------------------------------------------- masks in distribution


def within_binomial_bounds(dropped, p):
    share, error = dropped.double().mean().item(), math.sqrt(p * (1 - p) / dropped.numel())
    return abs(share - p) < 4.5 * error


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (AttentionDropout, (40, 4, 10, 10)),
        (DropAttention, (40, 4, 10, 10)),
        (lambda p: DropAttention(p, mode="column"), (40, 4, 1, 10)),
        (DropKey, (40, 4, 10, 10)),
        (DropHead, (40, 4, 1, 1)),
    ],
)
def test_the_share_that_is_dropped_is_the_rate(kind, shape, p):
    dropped = torch.stack([kind(p).dropped((40, 4, 10, 10)) for _ in range(10)])
    assert dropped.shape[1:] == shape
    assert within_binomial_bounds(dropped, p)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.8])
def test_dropout_and_drop_path_drop_at_their_rate_and_rescale(p):
    x = torch.ones(3000, 4, 5)
    kept = Dropout(p)(x)
    assert within_binomial_bounds(kept == 0, p)
    assert set(kept.unique().tolist()) == {0.0, (x[0, 0, 0] / (1 - p)).item()}
    paths = DropPath(p)(x)
    assert (paths == paths[:, :1, :1]).all(), "a branch is dropped whole"
    assert within_binomial_bounds(paths[:, 0, 0] == 0, p)
    assert paths.max() == kept.max()


def test_functions_draw_what_modules_draw():
    x = scores(dtype=torch.float32)
    weights = x.softmax(-1)
    for module, given, function in (
        (Dropout(RATE), x, lambda: dropout(x, RATE)),
        (AttentionDropout(RATE), x, lambda: dropout(weights, RATE)),
        (DropHead(RATE), x, lambda: drop_heads(weights, RATE)),
    ):
        torch.manual_seed(1)
        wanted = module(given)
        torch.manual_seed(1)
        assert torch.equal(function(), wanted)
    assert dropout(x, RATE, training=False) is x


def test_a_column_is_dropped_for_all_queries():
    weights = DropAttention(RATE, mode="column").weights(scores(50, 2, 6, 8))
    gone = weights == 0
    assert gone.any()
    assert torch.equal(gone, gone[..., :1, :].expand_as(gone))


def test_elements_are_dropped_for_each_query_and_head():
    gone = DropKey(RATE).dropped((50, 2, 6, 8))
    assert not torch.equal(gone[..., :1, :].expand_as(gone), gone)
    assert not torch.equal(gone[:, :1].expand_as(gone), gone)


def test_a_head_is_dropped_whole_and_for_each_sample():
    weights = DropHead(RATE).weights(scores(200, 3, 4, 5))
    gone = (weights == 0).flatten(2)
    assert torch.equal(gone.all(-1), gone.any(-1))
    assert within_binomial_bounds(gone.any(-1), RATE)


@pytest.mark.parametrize("mode", ["element", "column"])
@pytest.mark.parametrize("span", [2, 4])
def test_spans_drop_neighbours_together_at_the_same_rate_everywhere(mode, span):
    dropped = DropAttention(RATE, mode=mode, span=span).dropped((4000, 4, 3, 9))
    if mode == "element":
        dropped = dropped[..., 0, :]
    for key in range(9):
        assert within_binomial_bounds(dropped[..., key], RATE), "edges are dropped as often as the middle"
    # Both of two neighbours are dropped unless no span covers the one, or none the other: γ from 1 − (1 − γ)^span = p.
    none = (1 - RATE) ** (1 / span)
    both = 1 - 2 * (1 - RATE) + none ** (span + 1)
    pairs = (dropped[..., 3] & dropped[..., 4]).double()
    assert abs(pairs.mean().item() - both) < 4.5 * math.sqrt(both * (1 - both) / pairs.numel())
    runs = dropped[..., 0] | ~dropped[..., 1] | dropped[..., span]  # keys 1 … span−1 follow a beginning at 1
    assert runs.all(), "a run of dropped keys inside a row is never shorter than a span"


# ---------------------------------------------------------------------------------------------- as modules


@pytest.mark.parametrize("name", [*ATTENTION, *OTHERS])
def test_off_in_eval_mode_and_at_rate_zero(name):
    treatment, s = {**ATTENTION, **OTHERS}[name], scores()
    plain = s.softmax(-1) if name in ATTENTION else s
    try:
        with recording() as shapes:
            assert torch.equal(treatment.eval()(s), plain)
            treatment.train().p = 0.0
            assert torch.equal(treatment(s), plain)
        assert not shapes
    finally:
        treatment.train().p = RATE


@pytest.mark.parametrize("name", [*ATTENTION, *OTHERS])
def test_gradients_are_those_of_finite_differences(name):
    treatment, s = {**ATTENTION, **OTHERS}[name], scores(2, 2, 3, 4).requires_grad_()
    numbers = _numbers(treatment, s)

    def replayed(x):
        with replaying([numbers]):
            return treatment(x)

    assert torch.autograd.gradcheck(replayed, s)


@pytest.mark.parametrize("bad", [-0.1, 1.0, 1.5, math.nan, True, "0.2"])
@pytest.mark.parametrize("kind", [AttentionDropout, DropAttention, DropKey, DropHead, Dropout, DropPath])
def test_a_rate_outside_of_0_to_1_is_refused(kind, bad):
    with pytest.raises(InputError, match=r"drop rate in \[0, 1\)"):
        kind(bad)


@pytest.mark.parametrize("options", [{"mode": "row"}, {"span": 0}, {"span": 1.5}, {"renormalise": 1}])
def test_unknown_ways_to_drop_attention_are_refused(options):
    with pytest.raises(InputError, match=next(iter(options))):
        DropAttention(RATE, **options)


def test_dropout_is_an_nn_dropout_and_says_its_rate():
    assert isinstance(Dropout(0.1), nn.Dropout)
    assert "0.1" in repr(Dropout(0.1))
    assert repr(DropAttention(0.1, span=2)) == "DropAttention(p=0.1, mode='element', span=2, renormalise=True)"


def test_rates_over_depth():
    assert rates_over_depth(0.2, 3) == [0.2, 0.2, 0.2]
    assert_close(rates_over_depth(0.2, 5, "falling"), [0.2, 0.15, 0.1, 0.05, 0.0])
    assert_close(rates_over_depth(0.2, 3, "rising"), [0.0, 0.1, 0.2])
    assert rates_over_depth(0.2, 1, "falling") == [0.2]
    for arguments in ((1.0, 3), (0.2, 0), (0.2, 3, "steep")):
        with pytest.raises(InputError):
            rates_over_depth(*arguments)


# ---------------------------------------------------------------------------------------------- record and replay


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.treatments = nn.ModuleList([*ATTENTION.values(), *OTHERS.values()])

    def forward(self, x):
        for treatment in self.treatments:
            x = treatment(x)
        return x


def _numbers(treatment, x):
    with recording() as shapes:
        treatment(x)
    (shape,) = shapes
    return torch.rand(shape)


def test_a_replay_repeats_a_recorded_pass_bit_by_bit():
    model, x = Layers(), scores(dtype=torch.float32)
    torch.manual_seed(5)
    with recording() as shapes:
        first = model(x)
    assert len(shapes) == len(model.treatments)
    generator = torch.Generator().manual_seed(5)
    numbers = [torch.rand(shape, generator=generator) for shape in shapes]
    with replaying(numbers):
        assert torch.equal(model(x), first)


def test_a_replay_maps_over_many_models_at_once():
    model, x = Layers(), torch.stack([scores(2, 3, 4, 5, dtype=torch.float32) for _ in range(3)])
    with recording() as shapes:
        model(x[0])
    numbers = [torch.rand(3, *shape) for shape in shapes]

    def one(x, numbers):
        with replaying(numbers):
            return model(x)

    mapped = torch.func.vmap(one)(x, numbers)
    for member in range(3):
        assert_close(mapped[member], one(x[member], [n[member] for n in numbers]))


def test_a_replay_that_does_not_fit_is_refused():
    treatment, s = DropKey(RATE), scores()
    numbers = torch.rand(s.shape)
    with pytest.raises(CollectionError, match="come next"), replaying([numbers[:2]]):
        treatment(s)
    with pytest.raises(CollectionError, match="than there are to replay"), replaying([]):
        treatment(s)
    with pytest.raises(CollectionError, match="1 of 2 tensors"), replaying([numbers, numbers]):
        treatment(s)
    assert uniform((2,)).shape == (2,), "afterwards, numbers are random again"


def test_an_error_inside_a_replay_is_the_one_that_is_seen():
    with pytest.raises(ZeroDivisionError), replaying([torch.rand(3)]):
        raise ZeroDivisionError


def test_random_numbers_do_not_depend_on_the_precision_of_a_model():
    torch.manual_seed(0)
    single = DropKey(RATE)(scores(dtype=torch.float32)) == 0
    torch.manual_seed(0)
    assert single.any()
    assert torch.equal(DropKey(RATE)(scores(dtype=torch.float64)) == 0, single)


def test_all_compile_into_one_graph():
    torch._dynamo.reset()
    model, x = Layers(), scores(dtype=torch.float32)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.manual_seed(3)
    first = compiled(x)
    torch.manual_seed(3)
    assert_close(first, model(x))
    torch._dynamo.reset()
