"""Muon: torch's own, matrix by matrix, is what it has to agree with."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from explicit_dropout.lab import data
from explicit_dropout.lab.config import Data, Execution, Model, Run, Training, Treatment
from explicit_dropout.lab.engines.vectorised import groups
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.training import build, train
from explicit_dropout.lab.training.optimisers import Muon, optimiser, orthogonal

SHAPES = [(8, 8), (8, 8), (12, 8), (8, 20), (8, 8)]
RUN = Run(
    Data("digits", examples=128),
    Model(layers=2, width=16, heads=2, hidden=16, patch=4, read="mean"),
    Treatment("explicit_v", "explicit", strength=1e-2),
    Training(epochs=6, batch=32, optimiser="muon", learning_rate=1e-2, weight_decay=0.01),
)


@pytest.mark.parametrize("shape", [(16, 16), (40, 16), (16, 40)])
def test_steps_are_orthogonal_and_point_where_the_gradient_does(shape):
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    turned = orthogonal(matrices).double()
    for matrix, found in zip(matrices, turned, strict=True):
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        left = u.mT @ found @ vh.mT  # singular vectors stay; singular values come near 1
        assert (left.diagonal() - 1).abs().max() < 0.4
        assert (left - left.diagonal().diag()).abs().max() < 0.1


def test_many_matrices_take_the_steps_that_torch_takes_one_by_one():
    torch.manual_seed(0)
    start, others = [torch.randn(shape) for shape in SHAPES], [torch.randn(7), torch.randn(3, 5)]
    ours, theirs = ([nn.Parameter(p.clone()) for p in (*start, *others)] for _ in range(2))
    count = len(SHAPES)
    muon = Muon(ours[:count], ours[count:], lr=1e-2, weight_decay=0.1)
    parts = [
        torch.optim.Muon(theirs[:count], lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(theirs[count:], lr=1e-2, weight_decay=0.1),
    ]
    for step in range(6):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        for made in (muon, *parts):
            for group in made.param_groups:
                group["lr"] = 1e-2 / (1 + step)
            made.step()
    for mine, other in zip(ours[count:], theirs[count:], strict=True):
        assert_close(mine, other, rtol=1e-5, atol=1e-6)
    for mine, other, first in zip(ours[:count], theirs[:count], start, strict=True):
        moved = (mine - first).norm()
        assert moved > 0.02
        assert (mine - other).norm() < 0.02 * moved  # the rounds are made in bfloat16, in another order


def test_matrices_of_layers_are_turned_and_everything_else_is_left_to_adam():
    model = build(RUN, data.load(RUN.data, None))
    made = optimiser(model, RUN, torch.device("cpu"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    turned, others = ({names[p] for p in group["params"]} for group in made.param_groups)
    assert turned == {
        f"blocks.{layer}.{part}.weight"
        for layer in range(2)
        for part in (
            *(f"attention.{p}" for p in ("query", "key", "value", "out")),
            "feed_forward.fc1",
            "feed_forward.fc2",
        )
    }
    assert {"embedding.weight", "head.weight", "positions", "norm.weight", "blocks.0.attention.value.bias"} <= others
    assert turned | others == set(names.values())


def test_a_run_learns(tmp_path: Path) -> None:
    folder = Store(tmp_path).folder(RUN)
    train(RUN, folder, Execution(device="cpu"))
    losses = [line["train_loss"] for line in folder.metrics()]
    assert losses[-1] < 0.7 * losses[0]


def test_runs_with_muon_are_not_stacked():
    runs = [replace(RUN, seed=seed) for seed in range(3)]
    assert groups(runs) == [[run] for run in runs]
