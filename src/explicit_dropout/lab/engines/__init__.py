"""Ways to carry out runs: processes, many models in one program, a Ray cluster, Slurm. One interface for all.

An engine is called with runs and returns when each of them has ended in one way or another, which it reports by events.
It may run them in any order and on any machine that sees the store. A run that another process holds is reported as
busy and left alone: `sweep` comes back to it.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypedDict

from explicit_dropout.errors import InputError, StoreBusyError, StoreError
from explicit_dropout.lab.config import Execution, Run
from explicit_dropout.lab.store import Store

EngineName = Literal["local", "vectorised", "ray", "submitit"]
EventKind = Literal["started", "finished", "skipped", "busy", "failed", "note"]


@dataclass(frozen=True)
class Event:
    """Something that happened to a run.

    Every run ends in exactly one of: finished (now), skipped (another process has finished it meanwhile), busy (another
    process holds it) or failed. Notes are warnings that came up on the way.
    """

    kind: EventKind
    run: Run
    message: str = ""


OnEvent = Callable[[Event], None]


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class Engine(Protocol):
    def __call__(self, runs: Sequence[Run], store: Store, execution: Execution, on_event: OnEvent, /) -> None: ...


@dataclass(frozen=True)
class Options:
    """What engines can be told.

    Args:
        workers: runs side by side; None for the engine's own choice. For `local`, 0 runs them in this process.
        address: of a Ray cluster; None starts one on this machine.
        slurm: parameters of the cluster for submitit, such as partition or timeout_min. "local" as the value of
            `cluster` runs the jobs on this machine without Slurm.
    """

    workers: int | None = None
    address: str | None = None
    slurm: Mapping[str, str] = field(default_factory=dict)


def choose(name: EngineName, options: Options | None = None) -> Engine:
    """An engine by name. Its libraries are imported here and nowhere else."""
    given = options or Options()
    if given.workers is not None and given.workers < (0 if name == "local" else 1):
        raise InputError("workers", "0 (in this process) or more" if name == "local" else "1 or more", given.workers)
    if given.address is not None and name != "ray":
        raise InputError("address", "given with the engine ray only", repr(given.address))
    if given.slurm and name != "submitit":
        raise InputError("slurm", "given with the engine submitit only", dict(given.slurm))
    if name == "local":
        from explicit_dropout.lab.engines.local import Local

        return Local(given.workers)
    if name == "vectorised":
        from explicit_dropout.lab.engines.vectorised import Vectorised

        return Vectorised(given.workers)
    if name == "ray":
        from explicit_dropout.lab.engines.ray import Ray

        return Ray(given.workers, given.address)
    if name == "submitit":
        from explicit_dropout.lab.engines.submitit import Submitit

        return Submitit(given.workers, given.slurm)
    raise InputError("engine", "local, vectorised, ray or submitit", repr(name))


# ---------------------------------------------------------------------------------------------- one run


@contextmanager
def noting(notes: list[str]) -> Iterator[None]:
    """Add the warnings that come up inside to the notes, but for those of libraries about each other."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            yield
        finally:
            notes += dict.fromkeys(f"{w.category.__name__}: {w.message}" for w in caught)


class Outcome(TypedDict):
    """How a run ended, in plain types that travel between processes and machines."""

    kind: Literal["finished", "skipped", "busy", "failed"]
    message: str
    notes: list[str]


def execute(run: dict[str, Any], store_root: str, execution: dict[str, Any]) -> Outcome:
    """Carry out one run, wherever this process is. Errors of the run become its `error.txt` and the outcome."""
    from explicit_dropout.lab.training import train  # torch's slow parts, needed by workers only

    settings = Run.from_json(run)
    notes: list[str] = []
    try:
        folder = Store(store_root).folder(settings)
        with folder.lock(), noting(notes):
            try:
                if folder.finished:
                    return {"kind": "skipped", "message": "another process has finished it", "notes": []}
                train(settings, folder, Execution.from_json(execution))
            except Exception as error:
                text = traceback.format_exc()
                try:
                    folder.write_error(text)
                    where = str(Path("runs") / settings.key / "error.txt")
                except StoreError:  # a full disk may be why it failed
                    where = "not written, the disk being what it is" if isinstance(error, StoreError) else text
                message = f"{type(error).__name__}: {error} (traceback: {where})"
                return {"kind": "failed", "message": message, "notes": notes}
    except StoreBusyError as error:
        return {"kind": "busy", "message": str(error), "notes": []}
    except StoreError as error:
        return {"kind": "failed", "message": str(error), "notes": []}
    return {"kind": "finished", "message": "", "notes": notes}


def report(run: Run, outcome: Outcome, on_event: OnEvent) -> None:
    """An outcome as events."""
    for note in outcome["notes"]:
        on_event(Event("note", run, note))
    on_event(Event(outcome["kind"], run, outcome["message"]))
