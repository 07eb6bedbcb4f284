"""Many models in one program: runs of one shape are trained together, with an axis for the models in every tensor.

What takes hundreds of small kernels for each model takes as many larger ones for all of them. That pays where kernels
are too small to keep the device busy: small models on a GPU above all. On a CPU it saves the overhead of small steps;
steps that are large there already gain nothing, and are left alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch

from explicit_dropout.errors import ExplicitDropoutError, InputError, StoreBusyError, StoreError
from explicit_dropout.lab import data
from explicit_dropout.lab.config import Data, Execution, Run
from explicit_dropout.lab.data import Dataset
from explicit_dropout.lab.engines import Engine, Event, OnEvent, noting
from explicit_dropout.lab.engines.local import Local, cores, gpus_to_deal, threads_of
from explicit_dropout.lab.engines.sharing import share_out
from explicit_dropout.lab.store import RunFolder, Store
from explicit_dropout.lab.training.batches import steps_per_epoch
from explicit_dropout.lab.training.environment import chosen_device, prepare
from explicit_dropout.lab.training.together import Together, bytes_per_model, fits

MOST = 64
"""Models that are trained at once, at most: beyond, hardly anything is left to gain."""
CPU_BYTES = 128 * 2**20
"""What models trained together on a CPU may keep for the backward pass: more leaves its caches, and costs time."""
FEWEST_ON_CPU = 4
"""Fewer together on a CPU are slower than each alone: what `vmap` adds to a step is shared by too few."""
GPU_SHARE = 0.5
"""The share of free GPU memory that models trained together may take."""


@dataclass(frozen=True)
class Vectorised:
    """Runs of one shape together, in a process for each GPU, or for each core without any.

    Args:
        members: how many at once; None for what the memory of a GPU, or the caches of a CPU, makes worthwhile.
        processes: how many share the work; None for one per GPU or core, 1 for this one alone.
        others: how runs are carried out that have no company, or nothing to gain from it.
    """

    members: int | None = None
    processes: int | None = None
    others: Engine = field(default_factory=Local)

    def __call__(self, runs: Sequence[Run], store: Store, execution: Execution, on_event: OnEvent, /) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise InputError("engine", "local, for a training of several processes under torchrun", "vectorised")
        device = chosen_device(execution)
        on_gpu = device.type == "cuda"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = gpus_to_deal(execution.device, torch.cuda.device_count(), visible) if on_gpu else []
        places: list[str | None] = [*gpus] or ([None] if on_gpu else [None] * cores())
        places = places[: self.processes]
        parts = self._parts(runs, execution, device, len(places))
        alone = [part[0] for part in parts if len(part) == 1]
        parts = [part for part in parts if len(part) > 1]
        if len(places) == 1 or len(parts) < 2:
            program = Program(str(store.root), execution, self.members)
            alone += [run for part in parts for run in program(part, on_event)]
        else:
            count = min(len(places), len(parts))
            threads = execution.threads or threads_of(count)
            program = Program(str(store.root.absolute()), replace(execution, threads=threads), self.members)
            alone += share_out(_in_turn(parts), program, places, on_event)
        if alone:
            self.others(alone, store, execution, on_event)

    def _parts(
        self, runs: Sequence[Run], execution: Execution, device: torch.device, processes: int
    ) -> list[list[Run]]:
        """Lists of runs for one program each. On a GPU, its own process finds out how many fit at once."""
        program = Program("", execution, self.members)
        found = []
        for group in groups(runs):
            most = self.members or (MOST if device.type == "cuda" or len(group) == 1 else program.worthwhile(group[0]))
            count = math.ceil(len(group) / most)
            if count > 1 or len(group) >= 2 * FEWEST_ON_CPU * processes:  # so that processes end at the same time
                count = math.ceil(count / processes) * processes
            size = most if self.members else math.ceil(len(group) / count)
            found += [group[start : start + size] for start in range(0, len(group), size)]
        return found


def _in_turn(parts: Sequence[list[Run]]) -> list[list[Run]]:
    """Parts of the first run's group first, which is the baseline's; then large before small, to end together."""
    first = fits(parts[0][0])
    return sorted(parts, key=lambda part: (fits(part[0]) != first, -len(part)))


def groups(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that can be trained together: those that differ in seed, split, strength and the course of training only.

    The order is that of the runs, as far as it can be, with runs on the same examples side by side.
    """
    found: dict[Run, dict[Data, list[Run]]] = {}
    for run in runs:
        found.setdefault(fits(run), {}).setdefault(run.data, []).append(run)
    return [[run for same_data in group.values() for run in same_data] for group in found.values()]


@dataclass
class Program:
    """Trains runs of one shape, some at a time, in the process that it is called in."""

    root: str
    execution: Execution
    members: int | None = None
    datasets: dict[Data, Dataset] = field(default_factory=dict)

    def __call__(self, runs: Sequence[Run], on_event: OnEvent, /) -> list[Run]:
        """Train those that can be trained together, and return the others."""
        size = self.members or self.worthwhile(runs[0])
        parts = [runs[start : start + size] for start in range(0, len(runs), size)]
        left = [run for part in parts for run in self._of_equal_length(part, on_event)]
        self.datasets.clear()
        return left

    def worthwhile(self, run: Run) -> int:
        """How many runs like this one should be trained at once; 1 if it is better off alone, or in trouble."""
        device = chosen_device(self.execution)
        try:
            needed = bytes_per_model(run, self._dataset(run.data), device)
        except (ExplicitDropoutError, OSError):  # said again, and written down, when the run is carried out
            return 1
        if device.type == "cuda":
            return int(min(max(GPU_SHARE * torch.cuda.mem_get_info(device)[0] // needed, 1), MOST))
        count = min(CPU_BYTES // needed, MOST)
        return count if count >= FEWEST_ON_CPU else 1

    def _dataset(self, wanted: Data) -> Dataset:
        if wanted not in self.datasets:
            self.datasets[wanted] = data.load(wanted, self.execution.data_root).to(chosen_device(self.execution))
        return self.datasets[wanted]

    def _of_equal_length(self, runs: Sequence[Run], on_event: OnEvent) -> list[Run]:
        """Train those together whose epochs have as many steps; return those that have no company."""
        if len(runs) == 1:
            return list(runs)
        self.datasets = {wanted: found for wanted, found in self.datasets.items() if wanted in {r.data for r in runs}}
        by_steps: dict[int, list[Run]] = {}  # splits by group differ in size, and so may their epochs in length
        try:
            for run in runs:
                by_steps.setdefault(steps_per_epoch(run, self._dataset(run.data).train), []).append(run)
        except (ExplicitDropoutError, OSError):
            return list(runs)
        return [
            run for alike in by_steps.values() for run in (self._locked(alike, on_event) if len(alike) > 1 else alike)
        ]

    def _locked(self, runs: Sequence[Run], on_event: OnEvent) -> list[Run]:
        """Train those whose folders can be had; return what is better done alone."""
        with ExitStack() as held:
            mine: list[tuple[Run, RunFolder]] = []
            for run in runs:
                try:
                    folder = held.enter_context(Store(self.root).folder(run).lock())
                except StoreBusyError as error:
                    on_event(Event("busy", run, str(error)))
                except StoreError as error:
                    on_event(Event("failed", run, str(error)))
                else:
                    if folder.finished:
                        on_event(Event("skipped", run, "another process has finished it"))
                    else:
                        mine.append((run, folder))
            return self._train(mine, on_event) if len(mine) > 1 else [run for run, _ in mine]

    def _train(self, runs: list[tuple[Run, RunFolder]], on_event: OnEvent) -> list[Run]:
        """Train runs whose folders are ours. If that fails, those not finished are left to be trained alone."""
        for run, _ in runs:
            on_event(Event("started", run))
        members = [(run, folder, self._dataset(run.data)) for run, folder in runs]
        left = {run.key: run for run, _ in runs}

        def finished(run: Run) -> None:
            del left[run.key]
            on_event(Event("finished", run))

        prepare(self.execution)
        notes: list[str] = []
        with noting(notes):
            try:
                Together(members, self.execution, chosen_device(self.execution), finished).carry_out()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                for run in left.values():
                    on_event(Event("note", run, f"will be trained alone: {len(runs)} runs together failed. {reason}"))
        for note in notes:
            on_event(Event("note", runs[0][0], note))
        return list(left.values())
