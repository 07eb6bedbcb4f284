"""Archives and downloads: checked by checksum, never trusted with a path."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath

from explicit_dropout.errors import DataError

_CHUNK = 1 << 20


def md5(path: Path) -> str:
    """The checksum that official pages give; it tells damaged files, not forged ones."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(url: str, target: Path, checksum: str, progress: Callable[[int, int | None], None] | None = None) -> Path:
    """Download to `target`, which appears only when it is complete and its MD5 is `checksum`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as error:
        raise DataError(f"cannot write to {target.parent}: {error}") from error
    try:
        with os.fdopen(handle, "wb") as file, urllib.request.urlopen(url, timeout=60) as response:
            length = response.headers.get("Content-Length")
            total = int(length) if length else None
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                if progress:
                    progress(file.tell(), total)
            written = file.tell()
            file.flush()
            os.fsync(file.fileno())
        if total is not None and written != total:
            raise DataError(f"{url} broke off after {written:,} of {total:,} bytes. Nothing was kept; try again.")
        found = md5(Path(temporary))
        if found != checksum:
            raise DataError(f"{url} has the MD5 {found}; the official one is {checksum}. Nothing was kept.")
        os.replace(temporary, target)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        reason = getattr(error, "reason", None) or error
        raise DataError(
            f"{url} could not be downloaded: {reason}. Without a network, copy the file to {target} by other means."
        ) from error
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    return target


@contextlib.contextmanager
def _opened(archive: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(archive, "r:*") as tar:
            yield tar
            while tar.fileobj is not None and tar.fileobj.read(_CHUNK):
                pass  # the checksum of gzip stands at the very end
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        raise DataError(f"{archive} is damaged or incomplete: {error}") from error


def members(archive: Path, names: Iterable[str]) -> dict[str, bytes]:
    """The contents of the files with these names, whatever folder of the archive they are in. Nothing is written."""
    wanted, found = set(names), {}
    with _opened(archive) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name in wanted and member.isreg():
                stream = tar.extractfile(member)
                found[name] = stream.read() if stream else b""
                if len(found[name]) != member.size:
                    raise DataError(f"{archive} ends early: {name} has {len(found[name]):,} of {member.size:,} bytes.")
    missing = sorted(wanted - set(found))
    if missing:
        raise DataError(f"{archive} does not hold {', '.join(missing)}.")
    return found


def extract(archive: Path, folder: Path) -> list[Path]:
    """Unpack into a folder: all of it, or nothing if anything in it is not a plain file or folder inside.

    Returns the files and folders at its top.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".unpacking.", dir=folder) as temporary:
        aside = Path(temporary)
        with _opened(archive) as tar:
            entries = tar.getmembers()
            for member in entries:
                _refuse_strangers(member, archive)
            for member in entries:
                place = aside / member.name
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                    continue
                place.parent.mkdir(parents=True, exist_ok=True)
                stream = tar.extractfile(member)
                with place.open("wb") as file:
                    if stream:
                        shutil.copyfileobj(stream, file, _CHUNK)
                    if file.tell() != member.size:
                        raise DataError(
                            f"{archive} ends early: {member.name} has {file.tell():,} of {member.size:,} bytes."
                        )
        made = []
        for entry in sorted(aside.iterdir()):
            place = folder / entry.name
            if place.exists():
                raise DataError(f"{place} is there already; move it away before unpacking {archive.name}.")
            os.replace(entry, place)
            made.append(place)
    return made


def _refuse_strangers(member: tarfile.TarInfo, archive: Path) -> None:
    name = PurePosixPath(member.name)
    if name.is_absolute() or ".." in name.parts or "\\" in member.name or ":" in member.name:
        raise DataError(f"{archive} was not unpacked: it holds a path outside its folder, {member.name!r}.")
    if not (member.isreg() or member.isdir()):
        raise DataError(f"{archive} was not unpacked: {member.name!r} is a link or a device, not a plain file.")
