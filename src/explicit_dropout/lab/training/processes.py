"""One training in several processes, as `torchrun` starts them; or, most of the time, in one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.training.environment import chosen_device


@dataclass(frozen=True)
class Place:
    """Which of the processes this is, and its device."""

    rank: int
    ranks: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.ranks > 1:
            distributed.barrier()

    def shared(self, flag: bool) -> bool:
        """What the first process says."""
        if self.ranks == 1:
            return flag
        said = [flag]
        distributed.broadcast_object_list(said, src=0)
        return said[0]


@contextmanager
def processes(run: Run, execution: Execution) -> Iterator[Place]:
    """The place of this process in the training, by the variables that torchrun sets."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks == 1:
        device = chosen_device(execution)
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # graphs are captured on the current one
        yield Place(0, 1, device)
        return
    if run.training.batch % ranks:
        raise InputError("training.batch", f"a multiple of the {ranks} processes", run.training.batch)
    if execution.cuda_graphs:
        raise InputError("execution.cuda_graphs", f"off in a training of {ranks} processes", True)
    device = chosen_device(execution)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    begun = not distributed.is_initialized()
    if begun:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Place(rank, ranks, device)
    finally:
        if begun:
            distributed.destroy_process_group()
