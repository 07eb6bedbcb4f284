"""Runs in processes of this machine, each with its share of the cores and, if there are GPUs, one of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.engines import Event, OnEvent, execute, report
from explicit_dropout.lab.engines.sharing import share_out
from explicit_dropout.lab.store import Store


@dataclass(frozen=True)
class Local:
    """Worker processes on this machine.

    Args:
        workers: how many; None for one per GPU, or one per core without any; 0 for none: everything in this process,
            where a debugger can follow.
    """

    workers: int | None = None

    def __call__(self, runs: Sequence[Run], store: Store, execution: Execution, on_event: OnEvent, /) -> None:
        if self.workers == 0:
            OneByOne(store, execution)(runs, on_event)
            return
        gpus = gpus_to_deal(execution.device, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        count = min(len(runs), self.workers or len(gpus) or cores())
        threads = execution.threads or threads_of(max(1, count))
        places = [gpus[index % len(gpus)] if gpus else None for index in range(count)]
        work = OneByOne(Store(store.root.absolute()), replace(execution, threads=threads))
        share_out([[run] for run in runs], work, places, on_event)


@dataclass(frozen=True)
class OneByOne:
    """Carries out runs, one after the other."""

    store: Store
    execution: Execution

    def __call__(self, runs: Sequence[Run], on_event: OnEvent, /) -> list[Run]:
        for run in runs:
            on_event(Event("started", run))
            report(run, execute(run.to_json(), str(self.store.root), self.execution.to_json()), on_event)
        return []


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_of(workers: int) -> int:
    """The share of each worker in the cores; no more than OMP_NUM_THREADS says, where it says anything."""
    share, most = max(1, cores() // workers), os.environ.get("OMP_NUM_THREADS", "")
    return min(share, int(most)) if most.isdecimal() and int(most) else share


def gpus_to_deal(device: str, count: int, visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES can be set to for one worker each; none if runs stay on the CPU or on a chosen GPU.

    `count` GPUs can be seen, and `visible` is what the variable says now.
    """
    if device not in ("auto", "cuda"):
        return []
    listed = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return listed[:count] or [str(index) for index in range(count)]
