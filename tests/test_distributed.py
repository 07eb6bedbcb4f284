"""Two processes, each with half of the batch, get the gradients of one process with all of it (tests/ranks.py)."""

import json

import pytest
import torch

import ranks


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torch.multiprocessing.spawn(ranks.work, (str(folder),), nprocs=2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", ranks.CASES)
def test_two_processes_equal_one(outcomes, case):
    for rank, outcome in enumerate(outcomes):
        assert outcome[case] == "exact", f"rank {rank}:\n{outcome[case]}"
