"""Files that are whole or not there, locks that end with their process, and errors that say what is safe."""

from __future__ import annotations

import errno
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from explicit_dropout.errors import StoreBusyError, StoreError

PATIENCE = 0.2
"""Seconds that a lock is tried for: whoever only looks whether a run is at work holds it for a moment."""


@contextmanager
def reporting(path: Path) -> Iterator[None]:
    """Errors of the disk as errors of the store: which file, why, and that nothing old is lost."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "Free some space" if full else "Make it writable"
        raise StoreError(
            f"{path} could not be written: {error.strerror or error}. What was there before is intact. "
            f"{remedy} and start again: finished runs are skipped and begun ones go on."
        ) from error


def replace(path: Path, content: bytes | memoryview) -> None:
    """Write a file as a whole: whenever the power fails, either the old or the new one is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with reporting(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb", buffering=0) as file:
                _write_all(file, content)
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def append(path: Path, content: bytes) -> None:
    """Add to a file; what is added is on the disk, whole or not at all, when this returns or raises."""
    with reporting(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                _write_all(file, content)
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
        if before == 0:
            sync_folder(path.parent)


def _write_all(file: io.RawIOBase | io.FileIO, content: bytes | memoryview) -> None:
    rest = memoryview(content)
    while len(rest):
        rest = rest[file.write(rest) or 0 :]


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def acquire(descriptor: int, folder: Path, *, shared: bool = False) -> None:
    """Take the lock of an open file until it is closed; StoreBusyError if another process has it."""
    import fcntl  # not on every system, and reading results needs no lock

    deadline = time.monotonic() + (0 if shared else PATIENCE)
    try:
        while True:
            try:
                fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise StoreBusyError(f"{folder} is in use by another process.") from None
                time.sleep(0.02)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be locked: {error.strerror}. The store needs a file system with locks, such as a local "
            "disk, NFS 4, or Lustre mounted with `flock`."
        ) from error
