"""Cells of a table in processes of their own: made ready at the same time, measured one after the other.

Compiling takes most of the time of a compiled cell, and one core. Here all of them compile at once. None is measured
before the last is ready, and none beside another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection, wait
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import multiprocessing

Cell = tuple[Any, ...]
Alone = Callable[[], AbstractContextManager[None]]
"""What a cell enters to measure, and leaves when it has."""


def together(measure: Callable[[Cell, Alone], dict[str, Any]], cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """What `measure`, a function at the top of a module, finds for each cell, as it comes."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    ready, turn = context.Barrier(len(cells)), context.Lock()
    open_ends: dict[Connection, Cell] = {}
    processes = []
    for cell in cells:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(measure, cell, ready, turn, theirs))
        process.start()
        theirs.close()
        open_ends[mine] = cell
        processes.append(process)
    try:
        while open_ends:
            for end in wait(list(open_ends)):
                cell = open_ends.pop(end)  # type: ignore[arg-type]
                try:
                    yield end.recv()  # type: ignore[union-attr]
                except EOFError:
                    ready.abort()  # or the others would wait for it
                    raise RuntimeError(f"the process of {cell} ended without a result") from None
    finally:
        for process in processes:
            process.terminate() if open_ends else process.join()


def _work(measure: Callable[[Cell, Alone], dict[str, Any]], cell: Cell, ready: Any, turn: Any, end: Any) -> None:
    waited = False

    def all_ready() -> None:
        nonlocal waited
        if waited:
            return
        waited = True
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # what was needed to get ready, others may need
        try:
            ready.wait()
        except BrokenBarrierError:
            raise SystemExit(1) from None

    @contextmanager
    def alone() -> Iterator[None]:
        all_ready()
        with turn:
            yield

    found = measure(cell, alone)
    all_ready()  # what failed before it was ready holds nobody up
    end.send(found)
    end.close()
