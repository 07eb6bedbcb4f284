"""The laboratory's Transformer and its treatments: size, paths, and penalties against the closed forms."""

import copy
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import explicit_dropout as xd
from explicit_dropout import CollectionError, InputError
from explicit_dropout.lab.config import AttentionTreatment, FeedForwardTreatment, Model, Treatment
from explicit_dropout.lab.models import Attention, Transformer, patches
from explicit_dropout.lab.penalties import Penalty, attach
from explicit_dropout.lab.rows import CONTROLS, EXPLICIT, PAPER_ROWS, treatments
from explicit_dropout.stochastic import DropKey
from explicit_dropout.testing import check_rule

SMALL = Model(layers=2, width=16, heads=4, hidden=24, patch=2, read="class")
SEQUENCE = Model(layers=2, width=16, heads=4, hidden=24, patch=None, read="last", norm="post", qkv_bias=False)
STRENGTH = 0.7


def small(treatment: Treatment, model: Model = SMALL) -> Transformer:
    torch.manual_seed(0)
    shape = (3, 4, 4) if model.patch else (5, 7)
    built = Transformer(shape, 3, model, treatment)
    for parameter in built.parameters():  # biases and norms away from their trivial beginnings
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def images() -> Tensor:
    return torch.randn(6, 3, 4, 4, generator=torch.Generator().manual_seed(1))


def test_the_papers_vit_has_6_27_million_parameters() -> None:
    model = Transformer((3, 32, 32), 10, Model(), Treatment())
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_268_810
    assert model.positions.shape == (1, 65, 384)


def test_the_encoder_for_gtzan_reads_the_last_of_120_tokens() -> None:
    model = Transformer((120, 1024), 10, replace(SEQUENCE, width=192, heads=16, hidden=192), Treatment()).eval()
    x = torch.randn(2, 120, 1024)
    assert model(x).shape == (2, 10)
    other = x.clone()
    other[:, -1] += 1
    assert not torch.allclose(model(x), model(other), atol=1e-3)


def test_a_lowered_residual_stream_has_the_precision_of_the_layers_and_nothing_else_changes() -> None:
    x = torch.randn(2, 3, 8, 8)
    seen: dict[str, torch.dtype] = {}
    outputs = {}
    for residual in ("float32", "lowered"):
        torch.manual_seed(0)
        settings = Model(layers=2, width=16, heads=2, hidden=16, residual=residual)
        model = Transformer((3, 8, 8), 4, settings, Treatment()).eval()
        outputs[residual] = model(x)
        model.blocks[1].register_forward_pre_hook(lambda _, args, name=residual: seen.update({name: args[0].dtype}))
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    assert seen == {"float32": torch.float32, "lowered": torch.bfloat16}
    assert torch.equal(outputs["float32"], outputs["lowered"])


def test_patches_are_squares_of_the_image_row_by_row() -> None:
    image = torch.arange(2 * 4 * 6).reshape(1, 2, 4, 6)
    cut = patches(image, 2)
    assert cut.shape == (1, 6, 8)
    assert cut[0, 4].tolist() == image[0, :, 2:4, 2:4].flatten().tolist()


def test_fused_attention_equals_the_softmax_written_out() -> None:
    fused, written = Attention(16, 4, None), Attention(16, 4, DropKey(1e-9))
    written.load_state_dict(fused.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(written.train()(x), fused(x))


ALL = [
    *PAPER_ROWS,
    *CONTROLS,
    "dropout+implicit",
    "drop_head+none",
    "drop_attention_column+none",
    "explicit_qk+explicit",
]


@pytest.mark.parametrize("model", [SMALL, SEQUENCE], ids=["images", "sequences"])
@pytest.mark.parametrize("row", ALL)
def test_every_row_trains_and_is_deterministic_in_eval_mode(row: str, model: Model) -> None:
    (treatment,) = treatments(row, [STRENGTH], drop_path=0.3)
    built = small(treatment, model)
    penalty = attach(built, treatment)
    assert (penalty is None) == (not treatment.has_penalty)
    x = images() if model.patch else torch.randn(6, 5, 7)
    loss = built(x).square().mean()
    if penalty is not None:
        added = penalty()
        assert added > 0
        assert added.dtype == torch.float32
        loss = loss + added
    loss.backward()
    assert all(parameter.grad is not None for parameter in built.parameters())
    stochastic = not torch.equal(built(x), built(x))
    assert stochastic  # by drop_path alone
    built.eval()
    assert torch.equal(built(x), built(x))


@pytest.mark.parametrize("feed_forward", get_args(FeedForwardTreatment))
@pytest.mark.parametrize("attention", get_args(AttentionTreatment))
def test_every_pair_of_treatments_makes_a_training_step(attention: str, feed_forward: str) -> None:
    parts = attention.split("_")[0], feed_forward
    if "loss" in parts and {"explicit", "arora", "activation_l2", "weight_decay"} & set(parts):
        with pytest.raises(InputError, match="not both at once"):
            list(treatments(f"{attention}+{feed_forward}", [STRENGTH]))
        return
    (treatment,) = treatments(f"{attention}+{feed_forward}", [STRENGTH])
    built = small(treatment)
    penalty = attach(built, treatment)
    assert (penalty is not None) == treatment.has_penalty
    outputs = built(images())
    loss = outputs.square().mean() + (0 if penalty is None else penalty(outputs))
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    "row",
    [
        "drop_attention+none", "drop_key+none", "dropout+none", "drop_head+none", "none+implicit", "implicit_v+none",
        "none+implicit_inputs",
    ],
)  # fmt: skip
def test_a_stochastic_row_is_stochastic_by_itself(row: str) -> None:
    (treatment,) = treatments(row, [STRENGTH])
    built = small(treatment)
    x = images()
    assert not torch.equal(built(x), built(x))
    plain = small(Treatment())
    torch.testing.assert_close(built.eval()(x), plain.eval()(x))


def test_dropout_at_the_inputs_changes_what_the_penalties_are_of_and_nothing_before_it() -> None:
    """Values and both feed-forward layers see dropped inputs; queries and keys of the first layer do not."""
    treated, plain = small(Treatment("implicit_v", "implicit_inputs")), small(Treatment())
    treated.train(), plain.train()
    x = images()
    ours, theirs = Seen(treated, x), Seen(plain, x)
    block = "blocks.0."
    for path in ("attention.query", "attention.key"):
        assert torch.equal(ours.inputs[block + path], theirs.inputs[block + path])
    kept = ours.inputs[block + "attention.value"] / theirs.inputs[block + "attention.value"]
    assert torch.allclose(kept[kept != 0], torch.tensor(1.25))
    assert 0.1 < (kept == 0).float().mean() < 0.3
    for path in ("fc1", "fc2"):
        assert 0.1 < (ours.inputs[f"{block}feed_forward.{path}"] == 0).float().mean() < 0.3
        assert not (theirs.inputs[f"{block}feed_forward.{path}"] == 0).any()


class Seen:
    """What the linear layers of a model are given, and give, in one forward pass."""

    def __init__(self, model: Transformer, x: Tensor) -> None:
        self.inputs: dict[str, Tensor] = {}
        self.outputs: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(
                lambda _, args, output, path=path: self.note(path, args[0].detach(), output.detach())
            )
            for path, module in model.named_modules()
            if path and not isinstance(module, torch.nn.ModuleList)
        ]
        model(x)
        for handle in handles:
            handle.remove()

    def note(self, path: str, x: Tensor, output: Tensor) -> None:
        self.inputs[path], self.outputs[path] = x, output


def expected(model: Transformer, treatment: Treatment) -> Tensor:
    """The penalty of a row from the closed forms alone, in float64."""
    model = copy.deepcopy(model).double()
    seen = Seen(model, images().double())
    noise = {"paper": xd.paper, "bernoulli": xd.bernoulli, "inverted": xd.inverted}[treatment.law](treatment.rate)
    options = {"reduction": treatment.reduction}
    total = torch.zeros((), dtype=torch.float64)
    for index, block in enumerate(model.blocks):
        attention, inside = block.attention, f"blocks.{index}.attention"
        x = seen.inputs[inside]
        kind, _, letter = treatment.attention.partition("_")
        layer = {"q": attention.query, "k": attention.key, "v": attention.value}.get(letter)
        if kind == "arora":
            total += 2 * xd.functional.linear(x, layer.weight, xd.inverted(treatment.rate), **options)
        elif kind == "explicit" and letter == "v":
            total += xd.functional.value(x, layer.weight, noise, **options)
        elif kind == "explicit" and letter == "av":
            scores = [m(x).unflatten(-1, (4, -1)).transpose(1, 2) for m in (attention.query, attention.key)]
            weights = (scores[0] @ scores[1].mT / 2).softmax(-1)
            total += xd.functional.attended_value(x, attention.value.weight, weights, noise, heads=4, **options)
        elif kind == "explicit":
            form = {"q": xd.functional.query, "k": xd.functional.key, "qk": xd.functional.query_key}[letter]
            total += form(
                x, attention.query.weight, attention.key.weight, noise, query_bias=attention.query.bias,
                key_bias=attention.key.bias, heads=4, scale=0.5, **options,
            )  # fmt: skip
        for name in ("fc1", "fc2"):
            layer, given = getattr(block.feed_forward, name), seen.inputs[f"blocks.{index}.feed_forward.{name}"]
            if treatment.feed_forward == "explicit":
                total += xd.functional.linear(given, layer.weight, noise, **options)
            elif treatment.feed_forward == "arora":
                total += 2 * xd.functional.linear(given, layer.weight, xd.inverted(treatment.rate), **options)
        if treatment.feed_forward == "activation_l2":
            for branch in (inside, f"blocks.{index}.feed_forward"):
                out = seen.outputs[branch]
                total += 0.5 * out.square().sum() / (len(out) if treatment.reduction == "sample" else len(out) * 5)
    return treatment.strength * total


@pytest.mark.parametrize("reduction", ["token", "sample"])
@pytest.mark.parametrize(
    ("row", "law"),
    [(row, "paper") for row in ALL if "explicit" in row or "arora" in row or "l2" in row]
    + [(row, law) for row in (*EXPLICIT, "explicit_qk+explicit") for law in ("bernoulli", "inverted")],
)
def test_the_penalty_of_every_row_is_the_closed_form_of_what_its_layers_see(row: str, law: str, reduction: str) -> None:
    (treatment,) = treatments(row, [STRENGTH], law=law, reduction=reduction)
    model = small(treatment)
    penalty = attach(model, treatment)
    assert isinstance(penalty, Penalty)
    model(images())
    added = penalty()
    torch.testing.assert_close(added.double(), expected(model, treatment), rtol=1e-5, atol=0)
    torch.testing.assert_close(added.double(), STRENGTH * sum(penalty.terms().values()).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("row", "places"), [("loss_q+none", ["query"]), ("loss_v+loss", ["value", "feed_forward"])])
def test_a_row_that_is_followed_to_the_loss_has_the_term_of_dropout_at_its_rate(row: str, places: list[str]) -> None:
    (treatment,) = treatments(row, [STRENGTH], rate=0.3, reduction="sample")  # of which there is no choice here
    assert treatment.row == f"{row} [p = 0.3]"
    model = small(treatment)
    penalty = attach(model, treatment)
    added = penalty(model(images()))
    other = small(treatment)
    with xd.LossLevelDropout(other, xd.inverted(0.3), **dict.fromkeys(places, STRENGTH)) as reg:
        torch.testing.assert_close(added, reg(other(images())))
        assert penalty.terms().keys() == reg.terms().keys()
    model(images())
    with pytest.raises(InputError, match="outputs"):
        penalty()


TWINS = {
    "dropout+implicit": {"attention_weights", "linear", "hidden"},
    "implicit_v+implicit_inputs": {"linear"},
    "drop_head+none": {"drop_head"},
    "none+none": {"drop_path"},
}


@pytest.mark.parametrize("row", TWINS)
def test_twins_of_a_row_take_its_dice_away_and_are_of_every_place_that_draws(row: str) -> None:
    settings = {"drop_path": 0.3} if row == "none+none" else {}
    (treatment,) = treatments(row, [STRENGTH], twins=True, rate=0.3, reduction="sample", **settings)
    model = small(treatment)
    penalty = attach(model, treatment)
    outputs = model(images())
    added = penalty()
    assert {site.component for site in penalty.twins.sites} == TWINS[row]
    assert {site.rate for site in penalty.twins.sites} == {0.3}
    torch.testing.assert_close(added.double(), STRENGTH * sum(penalty.terms().values()).double(), rtol=1e-5, atol=0)
    with torch.no_grad():
        assert torch.equal(model(images()), outputs)  # in train mode
        torch.testing.assert_close(model.eval()(images()), outputs)  # by fused attention


def test_twins_of_dropout_at_the_inputs_are_the_row_under_the_exact_law() -> None:
    values = []
    for row, settings in (("implicit_v+implicit_inputs", {"twins": True}), ("explicit_v+explicit", {})):
        (treatment,) = treatments(row, [STRENGTH], law="inverted", **settings)
        model = small(treatment)
        penalty = attach(model, treatment)
        model(images())
        values.append(penalty())
        values[-1].backward()
        values.extend(model.blocks[0].feed_forward.fc1.weight.grad)
    half = len(values) // 2
    torch.testing.assert_close(values[:half], values[half:])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attention": "drop_key"}, "does not renormalise"),
        ({}, "a treatment that draws, without a penalty"),
        ({"feed_forward": "implicit", "rate": 0.0}, "a treatment that draws, without a penalty"),
        ({"attention": "dropout", "feed_forward": "explicit"}, "without a penalty"),
        ({"attention": "dropout", "feed_forward": "weight_decay"}, "without a penalty"),
        ({"attention": "dropout", "strength": 0.0}, "strength"),
        ({"attention": "dropout", "reduction": "sample"}, "changes nothing here"),
    ],
)
def test_twins_of_what_has_none_are_refused(settings: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Treatment(**{"twins": True, "strength": STRENGTH, **settings})


def test_rows_for_queries_and_keys_are_the_same_row_under_the_papers_law() -> None:
    values = []
    for row in ("explicit_q+none", "explicit_k+none"):
        (treatment,) = treatments(row, [STRENGTH])
        model = small(treatment, replace(SMALL, qkv_bias=False))
        penalty = attach(model, treatment)
        model(images())
        values.append(penalty())
    torch.testing.assert_close(*values)


def test_a_penalty_that_was_not_collected_is_an_error_and_no_quiet_zero() -> None:
    for row in ("arora_q+none", "none+activation_l2", "explicit_v+explicit"):
        (treatment,) = treatments(row, [STRENGTH])
        penalty = attach(small(treatment), treatment)
        with pytest.raises(CollectionError):
            penalty()


def test_a_model_that_does_not_fit_its_data_says_what_would() -> None:
    with pytest.raises(InputError, match="a divisor of height and width"):
        Transformer((3, 9, 9), 3, SMALL, Treatment())
    with pytest.raises(InputError, match="null: the data are sequences"):
        Transformer((5, 7), 3, SMALL, Treatment())
    with pytest.raises(InputError, match="a patch size: the data are images"):
        Transformer((3, 4, 4), 3, SEQUENCE, Treatment())


@pytest.mark.parametrize("row", ["none+arora", "explicit_v+explicit", "drop_key+implicit", "none+activation_l2"])
def test_a_compiled_model_has_the_same_penalty_and_gradients(row: str) -> None:
    (treatment,) = treatments(row, [STRENGTH])
    gradients = []
    for compiled in (False, True):
        model = small(treatment)
        penalty = attach(model, treatment)
        forward = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        torch.manual_seed(3)
        loss = forward(images()).square().mean() + (penalty() if penalty is not None else 0)
        loss.backward()
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*gradients)


OWN_DROPOUT = [
    {"attention": kind, "feed_forward": "implicit", "rate": 0.3}
    for kind in ("dropout", "drop_attention", "drop_key", "drop_head", "implicit_v")
]


@pytest.mark.parametrize("options", OWN_DROPOUT[:-1])
def test_its_dropout_inside_attention_is_switched_off_and_named_where_it_stays(options: dict[str, Any]) -> None:
    model = small(Treatment(**{**options, "feed_forward": "none"})).train()
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), attended_value=1.0)
    assert torch.equal(model(images()), model(images()))
    assert "switched off at 2 places until remove(): blocks.0.attention.treatment.p = 0.3" in reg.summary()
    reg.remove()
    assert model.blocks[0].attention.treatment.p == 0.3
    reg = xd.ExplicitDropout(model, xd.inverted(0.2), feed_forward=1.0)
    assert not torch.equal(model(images()), model(images()))
    assert "Still random: blocks.0.attention.treatment (0.3)" in reg.summary()


@pytest.mark.parametrize("options", OWN_DROPOUT)
def test_its_rule_is_right_whatever_dropout_it_has(options: dict[str, Any]) -> None:
    report = check_rule(small(Treatment(**options)), images(), samples=64, compile=False)
    assert {"values", "pairs", "scores", "exact"} <= set(report.passed)
