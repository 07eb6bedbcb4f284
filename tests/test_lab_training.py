"""Training: exact resume, the same bits twice, several processes, schedules, and what can go wrong."""

import json
import os
import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from explicit_dropout.errors import InputError, StoreError
from explicit_dropout.lab import data, penalties
from explicit_dropout.lab.config import Data, Execution, Model, Run, Training, Treatment
from explicit_dropout.lab.rows import treatments
from explicit_dropout.lab.store import RunFolder, Store
from explicit_dropout.lab.training import Watch, build, train
from explicit_dropout.lab.training.batches import batches, steps_per_epoch
from explicit_dropout.lab.training.evaluation import predictions, spread
from explicit_dropout.lab.training.schedule import learning_rate
from explicit_dropout.lab.training.step import Step
from launching import launched

SMALL = Model(layers=2, width=16, heads=2, hidden=16, patch=4, read="mean")
QUICK = Training(epochs=4, batch=32, learning_rate=5e-3)
DIGITS = Data("digits", examples=128)
RUN = Run(DIGITS, SMALL, Treatment("explicit_v", "explicit", strength=1e-2), QUICK)
STOCHASTIC = replace(RUN, treatment=Treatment("drop_key", "implicit", drop_path=0.1))
MUON = replace(RUN, training=replace(QUICK, optimiser="muon", weight_decay=0.01))
EXACT = Execution(device="cpu", deterministic=True, keep_checkpoint=True)


@pytest.fixture(autouse=True)
def _leave_determinism_as_it_was():
    yield
    torch.use_deterministic_algorithms(False)


def trained(run: Run, root: Path, execution: Execution = EXACT, watch: Watch | None = None) -> RunFolder:
    folder = Store(root).folder(run)
    train(run, folder, execution, watch)
    return folder


def timeless(folder: RunFolder) -> tuple[list, dict]:
    """Metrics and summary but for the seconds in them."""
    lines, summary = folder.metrics(), folder.summary()
    return [{k: v for k, v in line.items() if k != "timing"} for line in lines], {
        k: v for k, v in summary.items() if k != "timing"
    }


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return torch.load(folder.path / "checkpoint.pt", weights_only=True)["model"]


def assert_same_bits(one: RunFolder, other: RunFolder) -> None:
    assert timeless(one) == timeless(other)
    first, second = weights(one), weights(other)
    assert all(torch.equal(first[name], second[name]) for name in first)


class Interrupt(Watch):
    """Breaks a training off after so many epochs."""

    def __init__(self, after: int) -> None:
        self.after = after

    def epoch(self, line) -> None:
        if line["epoch"] == self.after:
            raise KeyboardInterrupt


def test_a_model_learns_and_its_course_is_written_down(tmp_path: Path) -> None:
    folder = trained(replace(RUN, training=replace(QUICK, epochs=12)), tmp_path)
    lines, summary = folder.metrics(), folder.summary()
    assert [line["epoch"] for line in lines] == list(range(1, 13))
    assert lines[-1]["train_loss"] < 0.6 * lines[0]["train_loss"]
    assert lines[-1]["step"] == 12 * 4
    assert summary["test"]["accuracy"] > 0.4
    assert summary["validation"] == lines[-1]["validation"]
    assert set(lines[0]["terms"]) == {
        f"blocks.{layer}.{site}"
        for layer in range(2)
        for site in ("attention:value", "feed_forward.fc1:feed_forward", "feed_forward.fc2:feed_forward")
    }
    assert lines[0]["penalty"] == pytest.approx(1e-2 * sum(lines[0]["terms"].values()), rel=1e-5)
    assert json.loads((folder.path / "environment.json").read_text())["dataset"]["name"] == "digits"


@pytest.mark.parametrize("run", [RUN, STOCHASTIC, MUON], ids=["explicit", "stochastic", "muon"])
def test_the_same_command_twice_gives_the_same_bits_resumed_or_not(run: Run, tmp_path: Path) -> None:
    whole, again = trained(run, tmp_path / "whole"), trained(run, tmp_path / "again")
    assert_same_bits(whole, again)
    often = replace(EXACT, checkpoint_seconds=0)
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            trained(run, tmp_path / f"stopped {stop}", often, Interrupt(stop))
        resumed = trained(run, tmp_path / f"stopped {stop}", often)
        assert_same_bits(whole, resumed)


def test_a_run_resumed_keeps_the_best_weights_it_had(tmp_path: Path) -> None:
    run = replace(RUN, training=replace(QUICK, select="best", learning_rate=0.02, schedule="constant"))
    whole = trained(run, tmp_path / "whole")
    often = replace(EXACT, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        trained(run, tmp_path / "stopped", often, Interrupt(3))
    assert_same_bits(whole, trained(run, tmp_path / "stopped", often))
    summary, lines = whole.summary(), whole.metrics()
    best = max(lines, key=lambda line: line["validation"]["accuracy"])  # the first of several
    assert summary["selected_epoch"] == best["epoch"]
    assert summary["validation"] == best["validation"]


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path) -> None:
    run = replace(RUN, data=Data("features", folder="made.npz"), model=replace(SMALL, patch=None))
    often = replace(EXACT, checkpoint_seconds=0, data_root=str(tmp_path))
    random = np.random.default_rng(0)
    arrays = {"features": random.normal(size=(300, 4, 6)).astype(np.float32), "labels": np.arange(300) % 3}
    for changed in ({}, {"features": arrays["features"] + 1}, {"groups": np.arange(300) // 2}):
        np.savez(tmp_path / "made.npz", classes=np.array(["a", "b", "c"]), **arrays)
        store = tmp_path / f"store {len(changed)} {'groups' in changed}"
        with pytest.raises(KeyboardInterrupt):
            trained(run, store, often, Interrupt(2))
        np.savez(tmp_path / "made.npz", classes=np.array(["a", "b", "c"]), **{**arrays, **changed})
        if changed:
            with pytest.raises(StoreError, match="begun on other data"):
                trained(run, store, often)
        else:
            assert trained(run, store, often).finished


def test_a_run_that_went_on_elsewhere_tells_both_places(tmp_path: Path) -> None:
    often = replace(EXACT, checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        trained(RUN, tmp_path, often, Interrupt(2))
    folder = trained(RUN, tmp_path, replace(often, deterministic=False))
    told = folder.environment()
    assert told is not None
    assert (told["deterministic"], told["before"]) == (False, [{"deterministic": True}])


def test_a_finished_run_is_not_trained_again(tmp_path: Path) -> None:
    folder = trained(RUN, tmp_path)
    before = {file.name: file.stat().st_mtime_ns for file in folder.path.iterdir()}
    trained(RUN, tmp_path)
    assert {file.name: file.stat().st_mtime_ns for file in folder.path.iterdir()} == before


def test_seeds_differ_in_weights_and_order() -> None:
    dataset = data.load(DIGITS, None)
    one, other = build(RUN, dataset), build(replace(RUN, seed=1), dataset)
    assert not torch.equal(one.head.weight, other.head.weight)
    orders = [next(batches(run, dataset.train, 0))[1].tolist() for run in (RUN, replace(RUN, seed=1), RUN)]
    assert orders[0] == orders[2] != orders[1]
    later = next(batches(RUN, dataset.train, 1))[1].tolist()
    assert later != orders[0]


def test_processes_share_every_batch_without_overlap() -> None:
    dataset = data.load(DIGITS, None)
    whole = list(batches(RUN, dataset.train, 0))
    shares = [list(batches(RUN, dataset.train, 0, rank=rank, ranks=2)) for rank in range(2)]
    for step, (x, _) in enumerate(whole):
        together = torch.cat([share[step][0] for share in shares])
        assert sorted(map(tuple, together.flatten(1).tolist())) == sorted(map(tuple, x.flatten(1).tolist()))


@pytest.mark.parametrize("seed", [0, 1])
def test_two_processes_under_torchrun_train_as_one_does(seed: int, tmp_path: Path) -> None:
    run = replace(RUN, seed=seed)
    alone = trained(run, tmp_path / "alone")
    folder = Store(tmp_path / "two").folder(run)
    with folder.lock():
        folder.write_config()
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(29600 + seed),
        "-m", "explicit_dropout", "train", "--config", str(folder.path / "config.json"),
        "--store", str(tmp_path / "two"), "--device", "cpu", "--deterministic", "--keep-checkpoint", "--quiet",
        "--threads", "1",
    ]  # fmt: skip
    done = launched(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = weights(alone), weights(folder)
    for name in first:
        if not name.endswith(
            "key.bias"
        ):  # the softmax takes no notice of it: its gradient is rounding, blown up by Adam
            torch.testing.assert_close(second[name], first[name], rtol=1e-3, atol=1e-4)
    losses = [[line["train_loss"] for line in found.metrics()] for found in (alone, folder)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert folder.summary()["test"]["accuracy"] == pytest.approx(alone.summary()["test"]["accuracy"], abs=0.01)
    assert json.loads((folder.path / "environment.json").read_text())["processes"] == 2


def test_a_compiled_training_is_the_eager_one_within_rounding(tmp_path: Path) -> None:
    run = replace(RUN, model=replace(SMALL, layers=1))
    eager = trained(run, tmp_path / "eager")
    compiled = trained(run, tmp_path / "compiled", replace(EXACT, compile=True))
    losses = [[line["train_loss"] for line in folder.metrics()] for folder in (eager, compiled)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


FOLLOWED = Treatment("loss_v", "loss", strength=1.0)


def test_a_penalty_that_is_followed_to_the_loss_trains_and_is_logged_by_site(tmp_path: Path) -> None:
    lines = trained(replace(RUN, treatment=FOLLOWED), tmp_path).metrics()
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    assert lines[-1]["penalty"] == pytest.approx(sum(lines[-1]["terms"].values()), rel=1e-5)
    assert [name for name in lines[-1]["terms"] if name.startswith("blocks.1")] == [
        "blocks.1.attention:value", "blocks.1.feed_forward.fc1:feed_forward", "blocks.1.feed_forward.fc2:feed_forward",
    ]  # fmt: skip


def test_a_penalty_that_is_followed_to_the_loss_refuses_a_step_that_is_compiled_or_replayed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"execution\.compile` must be false: loss_v\+loss"):
        trained(replace(RUN, treatment=FOLLOWED), tmp_path, replace(EXACT, compile=True))
    with pytest.raises(InputError, match=r"execution\.cuda_graphs` must be false"):
        penalties.refuse(FOLLOWED, replace(EXACT, cuda_graphs=True), "accuracy")


TWINS = Treatment("dropout", "implicit", strength=0.1, drop_path=0.1, twins=True)


def test_twins_train_and_are_logged_by_place(tmp_path: Path) -> None:
    lines = trained(replace(RUN, treatment=TWINS), tmp_path).metrics()
    assert lines[-1]["train_loss"] < lines[0]["train_loss"]
    assert lines[-1]["penalty"] == pytest.approx(TWINS.strength * sum(lines[-1]["terms"].values()), rel=1e-5)
    assert "blocks.1.attention.treatment:attention_weights" in lines[-1]["terms"]
    assert trained(replace(RUN, treatment=TWINS), tmp_path / "again").metrics()[-1]["penalty"] == lines[-1]["penalty"]


def test_twins_refuse_a_step_that_is_compiled_or_replayed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"execution\.compile` must be false: dropout\+implicit .*twins\] looks at"):
        trained(replace(RUN, treatment=TWINS), tmp_path, replace(EXACT, compile=True))
    with pytest.raises(InputError, match=r"execution\.cuda_graphs` must be false"):
        penalties.refuse(TWINS, replace(EXACT, cuda_graphs=True), "accuracy")
    penalties.refuse(TWINS, EXACT, "mean_average_precision")


def test_a_penalty_that_is_followed_to_the_loss_refuses_examples_of_several_classes() -> None:
    with pytest.raises(InputError, match="several classes"):
        penalties.refuse(FOLLOWED, EXACT, "mean_average_precision")
    penalties.refuse(FOLLOWED, EXACT, "accuracy")
    penalties.refuse(Treatment("explicit_v", "explicit", strength=1.0), EXACT, "mean_average_precision")


def test_compiled_runs_of_one_process_are_not_mistaken_for_each_other(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    plain = replace(RUN, treatment=Treatment("none", "none"))
    for run in (plain, RUN, replace(RUN, seed=1), replace(plain, seed=1)):
        eager = trained(run, tmp_path / "eager")
        compiled = trained(run, tmp_path / "compiled", replace(EXACT, compile=True))
        assert compiled.metrics()[-1]["terms"] == pytest.approx(eager.metrics()[-1]["terms"], rel=1e-4)


def test_half_precision_trains_and_its_penalty_is_the_same_within_rounding(tmp_path: Path) -> None:
    half = trained(replace(RUN, training=replace(QUICK, precision="bfloat16")), tmp_path)
    full = trained(RUN, tmp_path)
    for site, value in full.metrics()[0]["terms"].items():
        assert half.metrics()[0]["terms"][site] == pytest.approx(value, rel=0.05)


def test_tensorboard_finds_every_number_of_the_metrics(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = trained(RUN, tmp_path, replace(EXACT, tensorboard=True))
    events = accumulator.EventAccumulator(str(folder.path / "tensorboard"))
    events.Reload()
    found = [event.value for event in events.Scalars("validation/accuracy")]
    assert found == pytest.approx([line["validation"]["accuracy"] for line in folder.metrics()])
    assert "terms/blocks.0.attention:value" in events.Tags()["scalars"]


def test_a_loss_that_is_not_finite_ends_the_run_and_is_told(tmp_path: Path) -> None:
    run = replace(RUN, training=replace(QUICK, learning_rate=1e30))
    folder = trained(run, tmp_path)
    summary = folder.summary()
    assert summary["diverged"]
    assert summary["epochs"] < QUICK.epochs
    assert "NaN" not in (folder.path / "metrics.jsonl").read_text()


def test_validation_comes_as_often_as_asked_for_and_at_the_end(tmp_path: Path) -> None:
    folder = trained(replace(RUN, training=replace(QUICK, epochs=5, validate_every=2)), tmp_path)
    assert ["validation" in line for line in folder.metrics()] == [False, True, False, True, True]


def test_clipping_bounds_the_norm_of_the_gradient() -> None:
    dataset = data.load(DIGITS, None)
    for clip in (0.0, 0.01):
        run = replace(RUN, treatment=Treatment(), training=replace(QUICK, clip=clip))
        model = build(run, dataset)
        norms: list[float] = []
        step = Step(model, model, None, run, EXACT, torch.device("cpu"))
        step.optimiser.register_step_pre_hook(
            lambda *_, model=model, norms=norms: norms.append(
                torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
            )
        )
        step(*next(batches(run, dataset.train, 0)), 1e-3)
        assert (norms[0] <= 0.0101) == bool(clip)


def test_weight_decay_alone_is_decay_by_the_optimiser(tmp_path: Path) -> None:
    (treatment,) = treatments("none+weight_decay", [0.3])
    row = trained(replace(RUN, treatment=treatment), tmp_path)
    same = trained(replace(RUN, treatment=Treatment(), training=replace(QUICK, weight_decay=0.3)), tmp_path)
    first, second = weights(row), weights(same)
    assert all(torch.equal(first[name], second[name]) for name in first)


# ---------------------------------------------------------------------------------------------- scores


def test_examples_that_are_scored_are_spread_evenly_over_the_split() -> None:
    assert spread(10, 4).tolist() == [0, 2, 5, 7]
    assert spread(4, 10).tolist() == spread(4).tolist() == [0, 1, 2, 3]
    many = spread(36_598, 10_000)
    assert (len(many), many[0], many[-1]) == (10_000, 0, 36_594)
    assert set(many.diff().tolist()) == {3, 4}


def test_a_part_of_examples_that_lie_class_by_class_has_all_classes() -> None:
    split = data.load(DIGITS).train
    order = split.labels.argsort(stable=True)
    ordered = replace(split, labels=split.labels[order], pixels=split.pixels[order])
    _, targets = predictions(lambda x: x.flatten(1), ordered, 30)
    assert len(targets) == 30
    assert len(targets.unique()) == 10
    assert len(ordered.labels[:30].unique()) < 5  # the first 30 have not


# ---------------------------------------------------------------------------------------------- schedules


def test_the_learning_rate_rises_falls_and_ends_where_it_should() -> None:
    cosine = Training(epochs=10, learning_rate=1.0, warm_up_epochs=2, final_learning_rate=0.1)
    rates = [learning_rate(cosine, step, 5) for step in range(51)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[50] == pytest.approx(0.1)  # one step after the last
    assert rates[30] == pytest.approx(0.55)
    step = Training(epochs=3, learning_rate=1.0, schedule="step")
    assert [learning_rate(step, s, 4) for s in (0, 3, 4, 8)] == pytest.approx([1, 1, 0.1, 0.01])
    assert learning_rate(Training(schedule="constant", learning_rate=0.3), 999, 4) == 0.3


# ---------------------------------------------------------------------------------------------- bad input


def test_a_gpu_that_is_not_there_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        device, words = "cuda:77", "one of the"
    else:
        device, words = "cuda", "no GPU on this machine"
    with pytest.raises(InputError, match=words):
        trained(RUN, tmp_path, Execution(device=device))
    with pytest.raises(InputError, match=r"`device` must be auto"):
        trained(RUN, tmp_path, Execution(device="toaster"))
    with pytest.raises(InputError, match="CUDA graphs need a GPU"):
        trained(RUN, tmp_path, Execution(device="cpu", cuda_graphs=True))
    assert not list(tmp_path.glob("runs/*/config.json"))


def test_a_batch_larger_than_the_data_and_images_that_are_none_are_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at most 128, the training examples at hand"):
        trained(replace(RUN, training=replace(QUICK, batch=129)), tmp_path)
    assert steps_per_epoch(RUN, data.load(DIGITS, None).train) == 4
