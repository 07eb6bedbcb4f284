"""Many models in one program: each comes to what it comes to alone, is written down the same, and disturbs no other."""

import json
import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from explicit_dropout import InputError
from explicit_dropout.lab import data
from explicit_dropout.lab.config import Data, Execution, Model, Run, Training, Treatment
from explicit_dropout.lab.engines import Event
from explicit_dropout.lab.engines.local import Local
from explicit_dropout.lab.engines.sharing import share_out
from explicit_dropout.lab.engines.vectorised import MOST, Program, Vectorised, groups
from explicit_dropout.lab.store import RunFolder, Store
from explicit_dropout.lab.training import Watch, build, evaluation, loop, stacked_step, together, train
from explicit_dropout.lab.training.batches import batches
from explicit_dropout.lab.training.evaluation import spread
from explicit_dropout.lab.training.stacked import Adam, Stack, StackedAttention, clip, mapped
from explicit_dropout.lab.training.stacked_step import Objective
from explicit_dropout.lab.training.together import Together
from explicit_dropout.stochastic import recording, replaying

SMALL = Model(layers=2, width=16, heads=2, hidden=24, patch=2, read="mean")
QUICK = Training(epochs=3, batch=32, learning_rate=5e-3)
DIGITS = Data("digits", examples=96)
EXPLICIT = Run(DIGITS, SMALL, Treatment("explicit_v", "explicit", strength=1e-2), QUICK)
STOCHASTIC = replace(EXPLICIT, treatment=Treatment("drop_key", "implicit", drop_path=0.2))
EXECUTION = Execution(device="cpu", threads=1, keep_checkpoint=True)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def dataset():
    return data.load(DIGITS, None)


def variations(run: Run) -> list[Run]:
    """Runs that fit together with this one and differ in all that they may."""
    strength = run.treatment.strength
    return [
        run,
        replace(run, seed=1, training=replace(run.training, learning_rate=1e-3, weight_decay=0.1)),
        replace(run, seed=2, treatment=replace(run.treatment, strength=10 * strength), data=replace(run.data, split=1)),
        replace(run, training=replace(run.training, schedule="constant", clip=0.1, select="best")),
    ]


def written(folder: RunFolder) -> tuple[list[dict], dict]:
    """Metrics and summary but for the seconds in them."""
    lines = [{name: value for name, value in line.items() if name != "timing"} for line in folder.metrics()]
    return lines, {name: value for name, value in folder.summary().items() if name != "timing"}


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return torch.load(folder.path / "checkpoint.pt", weights_only=True)["model"]


def numbers(content: object, place: str = "") -> dict[str, float]:
    if isinstance(content, dict):
        return {k: v for name, inner in content.items() for k, v in numbers(inner, f"{place}/{name}").items()}
    if isinstance(content, list | tuple):
        return {k: v for name, inner in enumerate(content) for k, v in numbers(inner, f"{place}/{name}").items()}
    return {place: content}


def assert_same_within_rounding(one: RunFolder, other: RunFolder) -> None:
    assert sorted(path.name for path in one.path.iterdir()) == sorted(path.name for path in other.path.iterdir())
    found, expected = numbers(written(one)), numbers(written(other))
    assert list(found) == list(expected), "the same fields in the same order"
    for name, value in expected.items():
        if isinstance(value, float):
            assert found[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        else:
            assert found[name] == value, name
    for name, tensor in weights(other).items():
        if not name.endswith("key.bias"):  # its gradient is zero but for rounding, and Adam makes steps of that
            assert_close(weights(one)[name], tensor, rtol=1e-2, atol=2e-4)


def carry_out(runs: list[Run], root: Path, engine: Vectorised | None = None, execution: Execution = EXECUTION):
    events = []
    (engine or Vectorised(len(runs), 1, Local(0)))(runs, Store(root), execution, events.append)
    return [(event.kind, event.run.key, event.message) for event in events]


def alone(run: Run, root: Path, execution: Execution = EXECUTION) -> RunFolder:
    folder = Store(root).folder(run)
    train(run, folder, execution)
    return folder


# ---------------------------------------------------------------------------------------------- Adam


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_stacked_adam_is_adam_of_torch_for_every_row(kind, dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3, 50, dtype=dtype, generator=generator)
    rates, decay = [1e-2, 1e-3, 3e-2], [0.1, 0.0, 0.5]
    rows = [nn.Parameter(row.clone()) for row in start]
    theirs = [kind([row], lr=rate, weight_decay=w) for row, rate, w in zip(rows, rates, decay, strict=True)]
    ours = Adam(start, decay, decoupled=kind is torch.optim.AdamW)
    for _ in range(4):
        coefficients = ours.coefficients([[rate * (1 + step) for rate in rates] for step in range(5)])
        for step in range(5):
            gradients = torch.randn(3, 50, dtype=dtype, generator=generator) * 10.0 ** (step - 3)
            for row, gradient, optimiser, rate in zip(rows, gradients, theirs, rates, strict=True):
                row.grad = gradient.clone()
                optimiser.param_groups[0]["lr"] = rate * (1 + step)
                optimiser.step()
            ours.step(start, gradients, coefficients[step])
    assert ours.steps == [20] * 3
    tolerance = 1e-14 if dtype == torch.float64 else 1e-6
    assert_close(start, torch.stack([row.detach() for row in rows]), rtol=tolerance, atol=tolerance)


def test_a_stacked_state_is_that_of_torch_and_can_be_taken_over(dataset) -> None:
    model = build(EXPLICIT, dataset)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    stack = Stack(model, [model.state_dict()] * 2)
    ours = Adam(stack.weights, [0.1, 0.1], decoupled=True)
    assert ours.state(0, stack, [])["state"] == optimiser.state_dict()["state"] == {}
    for _ in range(3):
        model(torch.randn(4, 1, 8, 8)).square().sum().backward()
        gradients = stack.row({name: parameter.grad for name, parameter in model.named_parameters()})
        ours.step(stack.weights, gradients.expand(2, -1), ours.coefficients([[1e-3, 1e-3]])[0])
        optimiser.step()
        optimiser.zero_grad()
    expected, found = optimiser.state_dict(), ours.state(1, stack, optimiser.state_dict()["param_groups"])
    assert_close(found["state"], expected["state"], rtol=1e-5, atol=1e-7)
    assert found["param_groups"] == expected["param_groups"]
    optimiser.load_state_dict(found)
    fresh = Adam(stack.weights, [0.1, 0.1], decoupled=True)
    fresh.restore(1, expected)
    assert fresh.steps == [0, 3]
    assert_close(fresh.second[1], ours.second[1], rtol=1e-5, atol=1e-7)
    assert not fresh.second[0].any()


def test_rows_are_clipped_each_to_its_own_norm() -> None:
    rows = torch.randn(4, 30)
    largest = torch.tensor([[0.5], [torch.inf], [100.0], [0.01]])
    clipped = clip(rows, largest)
    for row, limit, found in zip(rows, largest[:, 0].tolist(), clipped, strict=True):
        parameter = nn.Parameter(torch.zeros(30))
        parameter.grad = row.clone()
        nn.utils.clip_grad_norm_([parameter], limit)
        assert_close(found, parameter.grad)


# ---------------------------------------------------------------------------------------------- models


def treatments() -> list[Treatment]:
    strong = {"strength": 1.0}
    exact = [
        Treatment(f"explicit_{site}", "explicit", law=law, reading=reading, **strong)
        for site in ("q", "k", "qk", "v", "av")
        for law in ("paper", "bernoulli", "inverted")
        for reading in ("model", "paper")
    ]
    others = [Treatment(f"arora_{site}", "explicit", **strong) for site in ("q", "k", "v")]
    others += [Treatment(feed_forward=kind, **strong) for kind in ("explicit", "arora", "activation_l2")]
    others += [Treatment("explicit_v", "explicit", reduction="sample", extra_dropout=0.1, **strong)]
    dice = ["none", "dropout", "drop_attention", "drop_attention_column", "drop_key", "drop_head"]
    others += [Treatment("implicit_v", "implicit_inputs")]
    return [*exact, *others, *(Treatment(kind, "implicit", drop_path=0.1) for kind in dice)]


@pytest.mark.parametrize("treatment", treatments(), ids=lambda t: t.row + " " + t.law)
def test_losses_terms_and_gradients_are_those_of_each_model_alone(treatment, dataset) -> None:
    runs = [replace(EXPLICIT, treatment=treatment, seed=seed) for seed in range(3)]
    models = [build(run, dataset).double() for run in runs]
    examples = [next(batches(run, dataset.train, 0)) for run in runs]
    x = torch.stack([x for x, _ in examples]).double()
    y = torch.stack([y for _, y in examples])
    objective = Objective(models[0], runs[0])
    with recording() as shapes, torch.no_grad():
        models[0](x[0])
    dice = [torch.rand(3, *shape) for shape in shapes]
    stack = Stack(models[0], [model.state_dict() for model in models])
    rows = stack.weights.requires_grad_()
    task, penalty, accuracy, terms = mapped(objective, stack.by_name(rows, "model."), x, y, numbers=dice)
    (gradients,) = torch.autograd.grad((task + penalty).sum(), rows)
    for place, (run, model) in enumerate(zip(runs, models, strict=True)):
        single = objective if place == 0 else Objective(model, run)
        with replaying([numbers[place] for numbers in dice]):
            expected = single(x[place], y[place])
        found = task[place], penalty[place], accuracy[place], {name: term[place] for name, term in terms.items()}
        assert_close(found, expected, rtol=1e-5, atol=1e-8)
        by_name = stack.by_name(gradients[place])
        wanted = torch.autograd.grad(expected[0] + expected[1], list(model.parameters()))
        for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
            scale = gradient.abs().max().item() + 1e-6
            assert_close(by_name[name], gradient, rtol=0, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("tokens", [7, 33])
def test_stacked_attention_is_the_fused_one_without_a_loop_over_models(tokens) -> None:
    q, k, v = (torch.randn(3, 2, 4, tokens, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
    with StackedAttention():
        stacked = torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)  # torch's own would warn: an error in tests
        shared = torch.func.vmap(F.scaled_dot_product_attention, in_dims=(0, None, 0))(q, k[0], v)
    probe = torch.randn_like(q)
    expected = F.scaled_dot_product_attention(q, k, v)
    assert_close(stacked, expected)
    assert_close(shared, F.scaled_dot_product_attention(q, k[:1].expand_as(k), v))
    for found, wanted in zip(
        torch.autograd.grad((stacked * probe).sum(), (q, k, v)),
        torch.autograd.grad((expected * probe).sum(), (q, k, v)),
        strict=True,
    ):
        assert_close(found, wanted)


# ---------------------------------------------------------------------------------------------- whole runs


@pytest.mark.parametrize(
    "run",
    [
        EXPLICIT,
        STOCHASTIC,
        replace(EXPLICIT, treatment=Treatment("none", "weight_decay", strength=0.1)),
        replace(STOCHASTIC, data=replace(DIGITS, augmentation="crop_flip"), training=replace(QUICK, optimiser="adam")),
        replace(EXPLICIT, training=replace(QUICK, label_smoothing=0.1, warm_up_epochs=1, validate_every=2)),
    ],
    ids=["explicit", "stochastic", "weight decay", "augmented", "smoothed"],
)
def test_runs_trained_together_are_written_as_those_trained_alone(run, tmp_path: Path) -> None:
    runs = variations(run)
    events = carry_out(runs, tmp_path / "together")
    assert Counter(kind for kind, _, _ in events) == {"started": 4, "finished": 4}
    for member in runs:
        folder = Store(tmp_path / "together").folder(member)
        assert_same_within_rounding(folder, alone(member, tmp_path / "alone"))
        environment = json.loads((folder.path / "environment.json").read_text())
        assert environment["trained_together"] == 4


def test_together_as_alone_training_scores_are_of_examples_spread_over_the_split(tmp_path: Path, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(evaluation, "spread", lambda n, most=None: asked.append((n, most)) or spread(n, most))
    monkeypatch.setattr(loop, "TRAINING_EXAMPLES_SCORED", 50)
    monkeypatch.setattr(together, "TRAINING_EXAMPLES_SCORED", 50)
    carry_out([EXPLICIT], tmp_path / "together")
    (first,) = {pair for pair in asked if pair[1] is not None}
    assert first == (DIGITS.examples, 50)
    asked.clear()
    summaries = alone(EXPLICIT, tmp_path / "alone").summary(), Store(tmp_path / "together").folder(EXPLICIT).summary()
    assert first in asked
    for summary in summaries:
        assert summary["train_examples"] == "spread"
        assert summary["train"]["accuracy"] * 50 == pytest.approx(round(summary["train"]["accuracy"] * 50))


def test_half_precision_trains_together(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=seed, training=replace(QUICK, precision="bfloat16")) for seed in range(2)]
    carry_out(runs, tmp_path / "together")
    for run in runs:
        found = Store(tmp_path / "together").folder(run).metrics()
        expected = alone(run, tmp_path / "alone").metrics()
        assert found[0]["terms"] == pytest.approx(expected[0]["terms"], rel=0.02)
        assert found[-1]["train_loss"] == pytest.approx(expected[-1]["train_loss"], rel=0.05)


def test_a_compiled_step_of_models_together_is_that_of_each_alone(tmp_path: Path) -> None:
    """Masks too: random numbers come from outside, so that compiled code has the same here."""
    treatment = Treatment("drop_key", "explicit", strength=1e-2, drop_path=0.2)
    runs = variations(replace(EXPLICIT, treatment=treatment, model=replace(SMALL, layers=1)))
    events = carry_out(runs, tmp_path / "together", execution=replace(EXECUTION, compile=True))
    assert Counter(kind for kind, _, _ in events) == {"started": 4, "finished": 4}
    for member in runs:
        folder = Store(tmp_path / "together").folder(member)
        assert_same_within_rounding(folder, alone(member, tmp_path / "alone"))
        environment = json.loads((folder.path / "environment.json").read_text())
        assert environment["compile"]
        assert environment["trained_together"] == 4


def test_the_same_runs_together_twice_give_the_same_bits(tmp_path: Path) -> None:
    runs = variations(STOCHASTIC)
    for name in ("once", "again"):
        carry_out(runs, tmp_path / name)
    for run in runs:
        once, again = (Store(tmp_path / name).folder(run) for name in ("once", "again"))
        assert written(once) == written(again)
        assert all(torch.equal(weights(again)[name], tensor) for name, tensor in weights(once).items())


class Interrupt(Watch):
    def __init__(self, after: int) -> None:
        self.after = after

    def epoch(self, line) -> None:
        if line["epoch"] == self.after:
            raise KeyboardInterrupt


class Stopped(Together):
    """Is broken off after two epochs."""

    epochs = 0

    def _leave(self) -> None:
        super()._leave()
        self.epochs += 1
        if self.epochs == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("run", [EXPLICIT, STOCHASTIC], ids=["explicit", "stochastic"])
def test_runs_go_on_where_they_were_together_or_alone(run, tmp_path: Path, dataset) -> None:
    often = replace(EXECUTION, checkpoint_seconds=0.0)
    runs = [replace(run, seed=seed, training=replace(QUICK, epochs=4, select="best")) for seed in range(3)]
    whole = {member.key: alone(member, tmp_path / "whole") for member in runs}
    for member, after in zip(runs[1:], (1, 3), strict=True):  # the first has not begun, the others are not as far
        with pytest.raises(KeyboardInterrupt):
            train(member, Store(tmp_path / "resumed").folder(member), often, Interrupt(after))
    carry_out(runs, tmp_path / "resumed", execution=often)
    for member in runs:
        assert_same_within_rounding(Store(tmp_path / "resumed").folder(member), whole[member.key])

    store = Store(tmp_path / "broken off")
    members = [(member, store.folder(member), dataset) for member in runs]
    with pytest.raises(KeyboardInterrupt):
        Stopped(members, often, CPU).carry_out()
    assert all(store.status(runs)[member.key] == "resumable" for member in runs)
    assert_same_within_rounding(alone(runs[0], tmp_path / "broken off"), whole[runs[0].key])
    carry_out(runs[1:], tmp_path / "broken off")
    for member in runs[1:]:
        assert len(store.folder(member).metrics()) == 4
        assert_same_within_rounding(store.folder(member), whole[member.key])


def test_resumed_together_is_the_same_bits_as_never_broken_off(tmp_path: Path, dataset) -> None:
    often = replace(EXECUTION, checkpoint_seconds=0.0)
    runs = [replace(STOCHASTIC, seed=seed, training=replace(QUICK, epochs=4)) for seed in range(3)]
    carry_out(runs, tmp_path / "whole", execution=often)
    store = Store(tmp_path / "stopped")
    with pytest.raises(KeyboardInterrupt):
        Stopped([(run, store.folder(run), dataset) for run in runs], often, CPU).carry_out()
    carry_out(runs, tmp_path / "stopped", execution=often)
    for run in runs:
        whole = Store(tmp_path / "whole").folder(run)
        assert written(store.folder(run)) == written(whole)
        assert all(torch.equal(weights(store.folder(run))[name], tensor) for name, tensor in weights(whole).items())


def test_a_run_that_diverges_ends_early_and_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    good = [replace(EXPLICIT, seed=seed) for seed in range(2)]
    tame = replace(EXPLICIT, seed=7)
    wild = replace(tame, training=replace(QUICK, learning_rate=1e30))
    carry_out([good[0], wild, good[1]], tmp_path / "wild")
    carry_out([good[0], tame, good[1]], tmp_path / "tame")
    summary = Store(tmp_path / "wild").folder(wild).summary()
    assert summary["diverged"]
    assert summary["epochs"] < QUICK.epochs
    assert "NaN" not in (Store(tmp_path / "wild").folder(wild).path / "metrics.jsonl").read_text()
    for run in good:
        with_wild, with_tame = (Store(tmp_path / name).folder(run) for name in ("wild", "tame"))
        assert not with_wild.summary()["diverged"]
        assert with_wild.metrics()[0]["train_loss"] == with_tame.metrics()[0]["train_loss"], "bit by bit in company"
        assert_same_within_rounding(with_wild, with_tame)


def test_runs_of_unequal_length_train_together_until_each_is_over(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=n, training=replace(QUICK, epochs=n)) for n in (1, 2, 3)]
    events = carry_out(runs, tmp_path)
    assert [key for kind, key, _ in events if kind == "finished"] == [run.key for run in runs]
    for run in runs:
        assert Store(tmp_path).folder(run).summary()["epochs"] == run.training.epochs


def test_seconds_of_runs_together_add_up_to_what_passed(tmp_path: Path) -> None:
    import time

    runs = [replace(EXPLICIT, seed=seed) for seed in range(6)]
    began = time.perf_counter()
    carry_out(runs, tmp_path)
    passed = time.perf_counter() - began
    assert sum(Store(tmp_path).folder(run).summary()["timing"]["seconds"] for run in runs) < passed


# ---------------------------------------------------------------------------------------------- the engine


def test_runs_are_grouped_by_shape_and_none_is_lost() -> None:
    together = variations(EXPLICIT)
    apart = [
        replace(EXPLICIT, model=replace(SMALL, layers=1)),
        replace(EXPLICIT, treatment=replace(EXPLICIT.treatment, law="inverted")),
        replace(EXPLICIT, treatment=replace(EXPLICIT.treatment, rate=0.3)),
        replace(EXPLICIT, training=replace(QUICK, batch=16)),
        replace(EXPLICIT, training=replace(QUICK, optimiser="adam")),
        replace(EXPLICIT, data=replace(DIGITS, examples=64)),
        STOCHASTIC,
    ]
    found = groups([*together[:2], *apart, *together[2:]])
    assert sorted(len(group) for group in found) == [1] * 7 + [4]
    assert {run.key for run in found[0]} == {run.key for run in together}
    assert {run.key for group in found for run in group} == {run.key for run in (*together, *apart)}


@pytest.mark.parametrize(
    "treatment",
    [Treatment("loss_v", "loss", strength=1.0), Treatment("dropout", "implicit", strength=0.1, twins=True)],
    ids=["followed to the loss", "twins"],
)
def test_runs_that_cannot_be_mapped_over_are_trained_alone(treatment: Treatment, tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, treatment=treatment, seed=seed) for seed in range(2)]
    assert [len(group) for group in groups(runs)] == [1, 1]
    store, alone = Store(tmp_path / "engine"), Store(tmp_path / "alone")
    Vectorised(processes=1)(runs, store, EXECUTION, lambda _: None)
    train(runs[0], alone.folder(runs[0]), EXECUTION)
    assert written(store.folder(runs[0])) == written(alone.folder(runs[0]))


@pytest.mark.parametrize("processes", [1, 2])
def test_the_group_of_the_first_run_comes_first_however_small_it_is(processes, tmp_path: Path, monkeypatch) -> None:
    quick = replace(QUICK, epochs=1)
    base = [replace(STOCHASTIC, seed=seed, training=quick) for seed in range(2)]
    others = [replace(EXPLICIT, seed=seed, training=quick) for seed in range(3)]
    if processes > 1:  # what is shared out, without the processes
        monkeypatch.setattr(
            "explicit_dropout.lab.engines.vectorised.share_out",
            lambda parts, program, _, on_event: [run for part in parts for run in program(part, on_event)],
        )
    events = carry_out([base[0], *others, base[1]], tmp_path, Vectorised(3, processes, Local(0)))
    started = [key for kind, key, _ in events if kind == "started"]
    assert started == [run.key for run in (*base, *others)]


def test_the_engine_reports_runs_of_others_and_trains_the_rest(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=seed, training=replace(QUICK, epochs=1)) for seed in range(4)]
    store = Store(tmp_path)
    alone(runs[0], tmp_path)
    with store.folder(runs[1]).lock():
        events = carry_out(runs, tmp_path)
    ends = {key: kind for kind, key, _ in events if kind != "started"}
    assert [ends[run.key] for run in runs] == ["skipped", "busy", "finished", "finished"]


def test_groups_larger_than_allowed_are_trained_one_part_after_the_other(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=seed, training=replace(QUICK, epochs=1)) for seed in range(5)]
    carry_out(runs, tmp_path, Vectorised(2, 1, Local(0)))
    sizes = [json.loads((Store(tmp_path).folder(run).path / "environment.json").read_text()) for run in runs]
    assert [size.get("trained_together") for size in sizes] == [2, 2, 2, 2, None]


def test_the_engine_s_own_choice_is_many_small_models_and_large_ones_alone() -> None:
    program = Program("unused", EXECUTION)
    assert 4 <= program.worthwhile(EXPLICIT) <= MOST
    large = replace(EXPLICIT, model=Model(layers=12, width=384, heads=6, hidden=1536, patch=2))
    assert program.worthwhile(large) == 1


def test_what_goes_wrong_is_told_of_every_run(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=seed, training=replace(QUICK, batch=97)) for seed in range(2)]
    events = carry_out(runs, tmp_path, execution=replace(EXECUTION, threads=1))
    ends = {key: (kind, message) for kind, key, message in events if kind not in ("started", "note")}
    for run in runs:
        kind, message = ends[run.key]
        assert kind == "failed"
        assert "at most 96, the training examples at hand" in message
        assert (Store(tmp_path).folder(run).path / "error.txt").exists()


def test_a_run_that_cannot_be_resumed_leaves_the_others_together(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=seed) for seed in range(4)]
    carry_out(runs[:1], tmp_path / "elsewhere")
    with Store(tmp_path).folder(runs[2]).lock() as folder:  # begun on other data
        folder.write_config()
        folder.write_environment({"dataset": {"fingerprint": "another", "division": "another"}})
        folder.append_metrics({"epoch": 1})
        folder.save_checkpoint({"epoch": 1})
    events: list[Event] = []
    left = Program(str(tmp_path), EXECUTION, len(runs))(runs, events.append)
    assert [run.seed for run in left] == [2]
    assert [event.run.seed for event in events if event.kind == "finished"] == [0, 1, 3]


def test_runs_of_many_lengths_are_compiled_as_often_as_it_takes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stacked_step.torch, "compile", partial(torch.compile, backend="eager"))
    runs = [replace(EXPLICIT, seed=s, training=replace(QUICK, epochs=1 + s, weight_decay=0.1 * s)) for s in range(4)]
    with torch._dynamo.config.patch(recompile_limit=1):
        events = carry_out(runs, tmp_path, execution=replace(EXECUTION, compile=True))
    assert Counter(kind for kind, _, _ in events) == {"started": 4, "finished": 4}


def test_a_folder_that_cannot_be_written_fails_alone(tmp_path: Path) -> None:
    runs = [replace(EXPLICIT, seed=seed, training=replace(QUICK, epochs=1)) for seed in range(3)]
    store = Store(tmp_path)
    (store.folder(runs[1]).path / "metrics.jsonl").mkdir(parents=True)  # where a file should be
    events = carry_out(runs, tmp_path)
    ends = {key: kind for kind, key, _ in events if kind not in ("started", "note")}
    assert [ends[run.key] for run in runs] == ["finished", "failed", "finished"]
    assert not [message for kind, _, message in events if kind == "note"]


def test_processes_share_the_parts_and_come_to_the_same_bits(tmp_path: Path) -> None:
    runs = [replace(STOCHASTIC, seed=seed, training=replace(QUICK, epochs=1)) for seed in range(4)]
    events = carry_out(runs, tmp_path / "two", Vectorised(2, 2, Local(0)))
    carry_out(runs, tmp_path / "one", Vectorised(2, 1, Local(0)))
    assert Counter(kind for kind, _, _ in events) == {"started": 4, "finished": 4}
    for run in runs:
        two, one = (Store(tmp_path / name).folder(run) for name in ("two", "one"))
        assert written(two) == written(one)
        assert all(torch.equal(weights(two)[name], tensor) for name, tensor in weights(one).items())


class Deadly:
    """Finishes the first run of every list, leaves the last, and dies of the list that has a seed of 13."""

    def __call__(self, runs, on_event) -> list[Run]:
        on_event(Event("started", runs[0]))
        if runs[0].seed == 13:
            os._exit(3)
        on_event(Event("finished", runs[0]))
        return list(runs[1:])


def test_a_process_that_dies_fails_its_own_runs_and_another_takes_its_place() -> None:
    lists = [[replace(EXPLICIT, seed=seed), replace(EXPLICIT, seed=100 + seed)] for seed in (13, 1, 2)]
    events = []
    left = share_out(lists, Deadly(), [None], events.append)
    ends = {event.run.seed: event.kind for event in events if event.kind != "started"}
    assert ends == {13: "failed", 113: "failed", 1: "finished", 2: "finished"}
    assert "its process died (exit status 3)" in next(event.message for event in events if event.kind == "failed")
    assert [run.seed for run in left] == [101, 102]


def test_cuda_graphs_are_refused_where_there_is_no_gpu(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"execution\.cuda_graphs"):
        carry_out([EXPLICIT], tmp_path, execution=replace(EXECUTION, cuda_graphs=True))


def test_several_processes_are_refused(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="torchrun"):
        carry_out([EXPLICIT], tmp_path)
