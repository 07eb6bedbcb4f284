"""Runs as jobs of a Slurm cluster, by submitit: an array of jobs, which resume when they are preempted or time out."""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.engines import Event, OnEvent, Outcome, execute, first_line, report
from explicit_dropout.lab.engines.local import cores
from explicit_dropout.lab.store import Store

try:
    import submitit
except ImportError as error:
    raise InputError(
        "engine", "installed", "submitit, which is not:  pip install 'explicit-dropout[submitit]'"
    ) from error

SHARED = (
    "name",
    "timeout_min",
    "mem_gb",
    "nodes",
    "cpus_per_task",
    "gpus_per_node",
    "tasks_per_node",
    "stderr_to_stdout",
)
"""Parameters that submitit has for every cluster; it wants others, such as partition, with `slurm_` in front."""

LARGEST_ARRAY = 1000
"""Slurm's own limit, unless its administrator has set another."""


class Resumable(submitit.helpers.Checkpointable):
    """`execute`, which submitit may stop and submit again with the same arguments: the run then resumes."""

    def __call__(self, run: dict[str, Any], store_root: str, execution: dict[str, Any]) -> Outcome:
        return execute(run, store_root, execution)


@dataclass(frozen=True)
class Submitit:
    """Jobs of Slurm.

    Args:
        workers: the most jobs of the array at a time; None leaves that to the cluster.
        slurm: parameters of the jobs, such as partition, timeout_min, gpus_per_node, account. cluster=local runs them
            on this machine without Slurm.
    """

    workers: int | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, runs: Sequence[Run], store: Store, execution: Execution, on_event: OnEvent, /) -> None:
        executor = self._executor(store)
        root, written = str(store.root.absolute()), execution.to_json()
        # Slurm queues an array and counts its jobs; without it every job of an array would start at once
        size = LARGEST_ARRAY if executor.cluster == "slurm" else self.workers or cores()
        task: Any = Resumable()  # type: ignore[no-untyped-call]
        pending = deque(runs)
        while pending:
            batch = [pending.popleft() for _ in range(min(size, len(pending)))]
            with executor.batch():
                jobs = [executor.submit(task, run.to_json(), root, written) for run in batch]
            _follow(dict(zip(batch, jobs, strict=True)), on_event, 5.0 if executor.cluster == "slurm" else 0.1)

    def _executor(self, store: Store) -> Any:
        given = {name.removeprefix("slurm_"): _parsed(value) for name, value in self.slurm.items() if name != "cluster"}
        cluster = self.slurm.get("cluster", "slurm")
        if cluster == "slurm" and shutil.which("srun") is None:  # or submitit takes this machine instead
            raise InputError("slurm", "used where Slurm is; cluster=local does without it", "no srun on this machine")
        try:
            executor = submitit.AutoExecutor((store.root / "submitit").absolute(), cluster)
            parameters = {name if name in SHARED else f"slurm_{name}": value for name, value in given.items()}
            parameters.setdefault("name", "explicit-dropout")
            if self.workers is not None:
                parameters["slurm_array_parallelism"] = self.workers
            executor.update_parameters(**parameters)
        except (NameError, TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise InputError("slurm", "parameters that submitit knows", f"{dict(self.slurm)}: {error}") from error
        return executor


def _follow(jobs: dict[Run, Any], on_event: OnEvent, pause: float) -> None:
    """Report what becomes of the jobs until all have ended; cancel them if that is interrupted."""
    started: set[Run] = set()
    waiting = dict(jobs)
    try:
        while waiting:
            for run, job in list(waiting.items()):
                done = job.done()
                if run not in started and (done or job.state == "RUNNING"):
                    started.add(run)
                    on_event(Event("started", run))
                if not done:
                    continue
                del waiting[run]
                try:
                    outcome = job.result()
                except Exception as error:
                    on_event(Event("failed", run, f"{first_line(error)} (log: {job.paths.stderr})"))
                else:
                    report(run, outcome, on_event)
            if waiting:
                time.sleep(pause)
    except BaseException:
        for job in waiting.values():
            job.cancel(check=False)
        raise


def _parsed(value: str) -> int | str:
    return int(value) if value.removeprefix("-").isdecimal() else value
