"""Lists of runs shared out among processes of this machine, which report what happens to each run as it happens."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.engines import Event, OnEvent


class Work(Protocol):
    """What a process does with a list of runs, of which it returns those that it leaves to others. Can be pickled."""

    def __call__(self, runs: Sequence[Run], on_event: OnEvent, /) -> list[Run]: ...


def share_out(lists: Sequence[list[Run]], work: Work, gpus: Sequence[str | None], on_event: OnEvent) -> list[Run]:
    """Have the lists worked on by one process for each GPU (None: for each place on the CPU); return what is left.

    A process that dies takes the runs that it had begun with it; another takes its place for the lists still waiting.
    """
    waiting, left = list(lists), []
    crew: dict[Connection, _Process] = {}
    try:
        for gpu in gpus[: len(waiting)]:
            process = _Process(work, gpu)
            crew[process.connection] = process
            process.give(waiting.pop(0))
        while crew:
            for ready in wait(list(crew)):
                process = crew[ready]  # type: ignore[index]
                try:
                    message = process.connection.recv()
                except (EOFError, OSError):
                    process.mourn(on_event)
                    crew.pop(process.connection).stop()
                    if not waiting:
                        continue
                    process = _Process(work, process.gpu)
                    crew[process.connection] = process
                    message = []
                if isinstance(message, Event):
                    process.follow(message)
                    on_event(message)
                    continue
                left += message
                if waiting:
                    process.give(waiting.pop(0))
                else:
                    crew.pop(process.connection).stop()
    finally:
        for process in crew.values():
            process.stop()
    return left


class _Process:
    """A process, the end of the pipe to it, and the runs that it has not brought to an end."""

    def __init__(self, work: Work, gpu: str | None) -> None:
        context = mp.get_context("spawn")  # a fork would inherit torch's threads and CUDA in a state it cannot use
        self.gpu, self.open = gpu, dict[str, Run]()
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, work, gpu), daemon=True)
        self.process.start()
        theirs.close()  # so that the pipe ends when the process does

    def give(self, runs: list[Run]) -> None:
        self.open = {run.key: run for run in runs}
        with suppress(OSError):  # if it has died already, that will be seen when it is listened to
            self.connection.send([run.to_json() for run in runs])

    def follow(self, event: Event) -> None:
        if event.kind not in ("started", "note"):
            self.open.pop(event.run.key, None)

    def mourn(self, on_event: OnEvent) -> None:
        """Report the runs that the process has died with."""
        self.process.join()
        code = self.process.exitcode or 0
        cause = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        hint = ": perhaps memory ran out" if code == -signal.SIGKILL else ""
        for run in self.open.values():
            on_event(Event("failed", run, f"its process died ({cause}){hint}. Sweep again to resume it."))

    def stop(self) -> None:
        """End the process. Whatever it writes is whole or not there, so it need not be asked politely."""
        self.process.terminate()
        self.process.join()
        self.connection.close()


def _serve(connection: Connection, work: Work, gpu: str | None) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends us
    threading.Thread(target=die_with_parent, daemon=True).start()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    while True:
        try:
            written: list[dict[str, Any]] = connection.recv()
        except EOFError:
            return
        connection.send(work([Run.from_json(run) for run in written], connection.send))


def die_with_parent() -> None:
    """Nobody collects the results of a worker whose parent was killed, and its GPU is wanted elsewhere."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
