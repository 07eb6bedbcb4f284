"""Training on a GPU: CUDA graphs and compiled steps do what the eager step does. Needs a GPU; CI has none."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from explicit_dropout.lab.config import Data, Execution, Model, Run, Training
from explicit_dropout.lab.engines.vectorised import Vectorised
from explicit_dropout.lab.rows import treatments
from explicit_dropout.lab.store import RunFolder, Store
from explicit_dropout.lab.training import Watch, train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODEL = Model(layers=2, width=32, heads=4, hidden=32, patch=None, read="last")
TRAINING = Training(epochs=3, batch=16, learning_rate=2e-3, clip=1.0, label_smoothing=0.1, select="best")
EXACT = Execution(device="cuda", deterministic=True, keep_checkpoint=True)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Sequences whose class shows in the mean of some features."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    labels = random.integers(0, 4, 200)
    features = random.normal(size=(200, 6, 8)).astype(np.float32)
    features[np.arange(200), :, labels] += 1
    np.savez(folder / "made.npz", features=features, labels=labels, classes=np.array(["a", "b", "c", "d"]))
    return folder


def trained(
    row: str,
    root: Path,
    store: Path,
    law: str = "paper",
    watch: Watch | None = None,
    training: Training = TRAINING,
    **how,
) -> RunFolder:
    (treatment,) = treatments(row, [1e-2], law=law)
    run = Run(Data("features", folder="made.npz"), MODEL, treatment, training)
    folder = Store(store).folder(run)
    train(run, folder, replace(EXACT, data_root=str(root), **how), watch)
    return folder


def course(folder: RunFolder) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "timing"} for line in folder.metrics()]


ROWS = [
    ("none+none", "paper"), ("drop_key+implicit", "paper"), ("drop_attention+implicit", "paper"),
    ("explicit_v+explicit", "paper"), ("explicit_av+explicit", "inverted"), ("explicit_qk+explicit", "bernoulli"),
    ("arora_k+arora", "paper"), ("none+activation_l2", "paper"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "law"), ROWS)
def test_a_cuda_graph_trains_bit_for_bit_as_the_eager_step(row: str, law: str, root: Path, tmp_path: Path) -> None:
    eager = trained(row, root, tmp_path / "eager", law)
    graph = trained(row, root, tmp_path / "graph", law, cuda_graphs=True)
    assert course(eager) == course(graph)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has some for the user of a small model
@pytest.mark.parametrize("row", ["explicit_v+explicit", "drop_key+implicit"])
def test_a_compiled_graph_trains_as_the_eager_step_within_rounding(row: str, root: Path, tmp_path: Path) -> None:
    eager = trained(row, root, tmp_path / "eager")
    compiled = trained(row, root, tmp_path / "compiled", compile=True, cuda_graphs=True)
    first, second = course(eager)[0], course(compiled)[0]
    stochastic = "drop_key" in row  # compiled code draws other masks
    assert second["train_loss"] == pytest.approx(first["train_loss"], rel=0.1 if stochastic else 1e-3)
    assert course(compiled)[-1]["train_loss"] < first["train_loss"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has some for the user of a small model
@pytest.mark.parametrize("row", ["explicit_v+explicit", "drop_key+implicit"])
def test_a_compiled_run_made_again_is_the_same_run(row: str, root: Path, tmp_path: Path) -> None:
    how = {"compile": True, "cuda_graphs": True, "deterministic": False}
    first, second = (trained(row, root, tmp_path / name, **how) for name in ("first", "second"))
    assert course(first) == course(second)


def test_a_cuda_graph_holds_the_steps_of_muon(root: Path, tmp_path: Path) -> None:
    muon = replace(TRAINING, optimiser="muon", weight_decay=0.01)
    eager = trained("explicit_v+explicit", root, tmp_path / "eager", training=muon)
    graph = trained("explicit_v+explicit", root, tmp_path / "graph", training=muon, cuda_graphs=True)
    assert course(eager) == course(graph)


class Interrupt(Watch):
    def epoch(self, line) -> None:
        if line["epoch"] == 2:
            raise KeyboardInterrupt


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("row", ["explicit_v+explicit", "drop_key+implicit"])
def test_a_run_resumed_on_a_gpu_is_the_run_uninterrupted(row: str, graphs: bool, root: Path, tmp_path: Path) -> None:
    whole = trained(row, root, tmp_path / "whole", cuda_graphs=graphs)
    often = {"cuda_graphs": graphs, "checkpoint_seconds": 0.0}
    with pytest.raises(KeyboardInterrupt):
        trained(row, root, tmp_path / "parts", watch=Interrupt(), **often)
    resumed = trained(row, root, tmp_path / "parts", **often)
    assert course(whole) == course(resumed)


def trained_together(row: str, law: str, root: Path, store: Path, **how) -> list[RunFolder]:
    """Five runs at once, one of them shorter than the others and one without clipping."""
    (treatment,) = treatments(row, [1e-2], law=law)
    data, shorter = Data("features", folder="made.npz"), replace(TRAINING, epochs=2, learning_rate=1e-3)
    lengths = [TRAINING, shorter, TRAINING, replace(TRAINING, clip=0.0), TRAINING]
    runs = [Run(data, MODEL, treatment, length, seed) for seed, length in enumerate(lengths)]
    told = []
    Vectorised()(runs, Store(store), replace(EXACT, data_root=str(root), **how), told.append)
    assert [event.kind for event in told].count("finished") == len(runs), [event.message for event in told]
    return [Store(store).folder(run) for run in runs]


@pytest.mark.parametrize(("row", "law"), ROWS)
def test_a_cuda_graph_trains_models_together_bit_for_bit_as_the_eager_step(
    row: str, law: str, root: Path, tmp_path: Path
) -> None:
    eager = trained_together(row, law, root, tmp_path / "eager")
    graph = trained_together(row, law, root, tmp_path / "graph", cuda_graphs=True)
    for one, other in zip(eager, graph, strict=True):
        assert course(one) == course(other)
        assert "trained_together" in other.environment()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's compiler has some for the user of a small model
@pytest.mark.parametrize(("row", "law"), ROWS)
def test_a_compiled_graph_trains_models_together_as_the_eager_step_within_rounding(
    row: str, law: str, root: Path, tmp_path: Path
) -> None:
    eager = trained_together(row, law, root, tmp_path / "eager")
    compiled = trained_together(row, law, root, tmp_path / "compiled", compile=True, cuda_graphs=True)
    for one, other in zip(eager, compiled, strict=True):
        assert course(other)[0]["train_loss"] == pytest.approx(course(one)[0]["train_loss"], rel=1e-3)
        assert course(other)[0]["terms"] == pytest.approx(course(one)[0]["terms"], rel=1e-3)
        assert other.environment()["compile"]
        assert "trained_together" in other.environment()
