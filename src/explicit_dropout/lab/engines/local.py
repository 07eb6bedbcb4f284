"""Runs in processes of this machine, each with its share of the cores and, if there are GPUs, one of them."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.engines import Event, OnEvent, execute, report
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
            for run in runs:
                on_event(Event("started", run))
                report(run, execute(run.to_json(), str(store.root), execution.to_json()), on_event)
            return
        gpus = gpus_to_deal(execution.device, torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        count = min(len(runs), self.workers or len(gpus) or cores())
        threads = execution.threads or max(1, cores() // max(1, count))
        written = replace(execution, threads=threads).to_json()
        pending = deque(runs)
        pool: dict[Connection, _Worker] = {}
        try:
            for index in range(count):
                worker = _Worker(gpus[index % len(gpus)] if gpus else None)
                pool[worker.connection] = worker
            for worker in pool.values():
                worker.start(pending.popleft(), store, written, on_event)
            while pool:
                for ready in wait(list(pool)):
                    assert isinstance(ready, Connection)
                    worker = pool[ready]
                    lives = worker.collect(on_event)
                    if not (lives and pending):
                        pool.pop(ready).stop()
                    if pending:
                        worker = worker if lives else _Worker(worker.gpu)
                        pool[worker.connection] = worker
                        worker.start(pending.popleft(), store, written, on_event)
        finally:
            for worker in pool.values():
                worker.stop()


class _Worker:
    """A process that carries out one run after another, and the end of the pipe to it."""

    def __init__(self, gpu: str | None) -> None:
        context = mp.get_context("spawn")  # a fork would inherit torch's threads and CUDA in a state it cannot use
        self.gpu = gpu
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, gpu), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends when the process does
        self.run: Run | None = None

    def start(self, run: Run, store: Store, execution: dict[str, Any], on_event: OnEvent) -> None:
        self.run = run
        on_event(Event("started", run))
        with suppress(OSError):  # if it has died already, `collect` will report it
            self.connection.send((run.to_json(), str(store.root.absolute()), execution))

    def collect(self, on_event: OnEvent) -> bool:
        """Report how the run ended; False if the process has died of it."""
        assert self.run is not None
        try:
            outcome = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            hint = ": perhaps memory ran out" if code == -signal.SIGKILL else ""
            on_event(Event("failed", self.run, f"its process died ({cause}){hint}. Sweep again to resume it."))
            return False
        report(self.run, outcome, on_event)
        return True

    def stop(self) -> None:
        """End the process. Whatever it writes is whole or not there, so it need not be asked politely."""
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, gpu: str | None) -> None:
    """What a worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    threading.Thread(target=die_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    while True:
        try:
            run, root, execution = connection.recv()
        except EOFError:
            return
        connection.send(execute(run, root, execution))


def die_with_parent() -> None:
    """Nobody collects the results of a worker whose parent was killed, and its GPU is wanted elsewhere."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def cores() -> int:
    """The CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus_to_deal(device: str, count: int, visible: str | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES can be set to for one worker each; none if runs stay on the CPU or on a chosen GPU.

    `count` GPUs can be seen, and `visible` is what the variable says now.
    """
    if device not in ("auto", "cuda"):
        return []
    listed = [name.strip() for name in (visible or "").split(",") if name.strip()]
    return listed[:count] or [str(index) for index in range(count)]
