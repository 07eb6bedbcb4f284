"""Finished runs packed into one file: `<store>/<name>.zip` holds their folders as they were.

A few hundred runs are a few thousand small files; packed they are one, and a quarter of the size. Whatever opens zip
files shows them, and unpacked into `<store>/runs` they are folders again. The same runs always make the same bytes.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from explicit_dropout.errors import StoreError
from explicit_dropout.lab import disk

FILES = ("config.json", "environment.json", "metrics.jsonl", "summary.json")
"""What a finished run consists of."""

DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
"""What reading a zip file raises if it is none, or not as it was written."""

_LONG_AGO = (1980, 1, 1, 0, 0, 0)
"""The time that all members have, so that the same runs make the same bytes."""


class Archive:
    """A zip file in memory, which takes no harm if the file is replaced or its reader is forked."""

    def __init__(self, path: Path) -> None:
        try:
            self.zip = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
        except OSError as error:
            raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
        except DAMAGED as error:
            raise damaged(path, error) from error
        self.zip.filename = str(path)  # by which zipfile.Path calls itself
        self.root = zipfile.Path(self.zip)
        self.keys = frozenset(name.split("/")[0] for name in self.zip.namelist() if name.endswith("/summary.json"))

    def folder(self, key: str) -> zipfile.Path:
        return self.root / key


def archives(root: Path) -> list[Archive]:
    """Those of a store as they are now, by name."""
    found = []
    for path in sorted(root.glob("*.zip")):
        status = path.stat()
        found.append(_opened(path, status.st_size, status.st_mtime_ns))
    return found


@lru_cache(maxsize=256)
def _opened(path: Path, size: int, written: int) -> Archive:
    del size, written  # another file has others
    return Archive(path)


def holding(root: Path, key: str) -> Archive | None:
    """The archive of a store that has a run."""
    return next((archive for archive in archives(root) if key in archive.keys), None)


def located(path: Path) -> Path | zipfile.Path:
    """A file by its path, which may lead into an archive: results/table4.zip/NAME/config.json."""
    for outer in path.parents:
        if outer.suffix == ".zip" and outer.is_file():
            return Archive(outer).root.joinpath(path.relative_to(outer).as_posix())
    return path


def write(path: Path, folders: Mapping[str, Mapping[str, bytes]]) -> None:
    """Add folders, by name, with their files to an archive, which need not exist yet."""
    whole = dict(folders)
    if path.exists():
        old = Archive(path)
        for entry in old.zip.infolist():
            folder, _, file = entry.filename.partition("/")
            if folder not in folders:
                whole[folder] = {**whole.get(folder, {}), file: old.zip.read(entry)}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for folder in sorted(whole):
            for file in sorted(whole[folder]):
                entry = zipfile.ZipInfo(f"{folder}/{file}", _LONG_AGO)
                entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                archive.writestr(entry, whole[folder][file])
    disk.replace(path, packed.getbuffer())


def damaged(path: Path | zipfile.Path, error: Exception) -> StoreError:
    reason = str(error) or type(error).__name__
    return StoreError(f"{path} is damaged ({reason}). Copy the archive again, or move it away.")
