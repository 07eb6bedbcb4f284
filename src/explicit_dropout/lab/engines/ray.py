"""Runs on a Ray cluster. Every node has to see the store at the same path; Ray decides what runs where."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.engines import Event, OnEvent, execute, first_line, report
from explicit_dropout.lab.store import Store

RETRIES = 3
"""How often a run is taken up again, from its checkpoint, after its process or its node has died."""


@dataclass(frozen=True)
class Ray:
    """Tasks of a Ray cluster: one for each run, with a core for each of its threads, and a GPU if the cluster has any.

    Args:
        workers: the most runs at a time; None leaves that to the cluster.
        address: of the cluster, as in `ray.init`: HOST:PORT, ray://… or auto; None for $RAY_ADDRESS, or a cluster of
            this machine alone that lasts as long as the sweep.
    """

    workers: int | None = None
    address: str | None = None

    def __call__(self, runs: Sequence[Run], store: Store, execution: Execution, on_event: OnEvent, /) -> None:
        ray = _import_ray()
        ours = not ray.is_initialized()
        if ours:
            try:
                _knock(self.address)
                ray.init(address=self.address, include_dashboard=False, log_to_driver=False, logging_level="warning")
            except (OSError, ValueError, RuntimeError) as error:
                raise InputError("address", "that of a Ray cluster which runs", f"{self.address}: {error}") from error
        try:
            self._work_through(ray, runs, store, execution, on_event)
        finally:
            if ours:
                ray.shutdown()

    def _work_through(
        self, ray: Any, runs: Sequence[Run], store: Store, execution: Execution, on_event: OnEvent
    ) -> None:
        threads = execution.threads or 1
        wants_gpu = execution.device in ("auto", "cuda") and ray.cluster_resources().get("GPU", 0) > 0
        task = ray.remote(execute).options(
            num_cpus=threads, num_gpus=int(wants_gpu), max_retries=RETRIES, name="explicit-dropout"
        )
        written = replace(execution, threads=threads).to_json()
        root = str(store.root.absolute())
        pending = deque(runs)
        tasks: dict[Any, Run] = {}
        try:
            while pending or tasks:
                while pending and len(tasks) < (self.workers or len(runs)):
                    run = pending.popleft()
                    tasks[task.remote(run.to_json(), root, written)] = run
                    on_event(Event("started", run))
                done, _ = ray.wait(list(tasks), num_returns=1, timeout=1.0)
                for reference in done:
                    run = tasks.pop(reference)
                    try:
                        report(run, ray.get(reference), on_event)
                    except ray.exceptions.RayError as error:
                        on_event(Event("failed", run, f"{first_line(error)} (tried {RETRIES + 1} times)"))
        except BaseException:
            for reference in tasks:
                ray.cancel(reference, force=True)
            raise


def _knock(address: str | None) -> None:
    """Raise if nobody answers at HOST:PORT: Ray itself would keep trying for minutes."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would report to its makers
    try:
        import ray
    except ImportError as error:
        raise InputError("engine", "installed", "ray, which is not:  pip install 'explicit-dropout[ray]'") from error
    return ray
