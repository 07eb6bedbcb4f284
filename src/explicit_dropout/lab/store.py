"""Where results live: one folder for each run, named by its content, and never half-written.

`<root>/runs/<run.key>/` holds `config.json`, `environment.json`, `metrics.jsonl` (a line per epoch), `checkpoint.pt`
(after the last complete epoch) and, last of all, `summary.json`, whose existence means that the run is finished. Stores
of several machines merge by copying folders. A folder belongs to at most one process at a time: the one that holds the
lock of its file `lock`, which the operating system takes back however that process ends. Folders of finished runs may
be packed into archives, `<root>/*.zip`, and are read from there.
"""

from __future__ import annotations

import io
import json
import os
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Never, cast

import torch

from explicit_dropout import __version__
from explicit_dropout.errors import ExplicitDropoutError, StoreBusyError, StoreError
from explicit_dropout.lab import disk
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.packing import DAMAGED, FILES, Archive, archives, damaged, holding, write

FORMAT = 1
"""Written into every config.json and summary.json, and refused if it is another."""

SPREAD = "spread"
"""`train_examples` of a summary: its training scores are of examples spread evenly over the split. Those of a summary
that does not say so are of the first examples."""

Status = Literal["finished", "running", "resumable", "failed", "new"]


class Store:
    """All runs below one folder, which is made by the first write."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def folder(self, run: Run) -> RunFolder:
        """The folder of a run, which need not exist yet. One that belongs to something else is an error."""
        folder = RunFolder(self.root / "runs" / run.key, run)
        if not folder.finished:
            archive = holding(self.root, run.key)
            folder = folder if archive is None else PackedRun(archive.folder(run.key), run)
        folder.check()
        return folder

    def folders(self, problems: list[str] | None = None) -> Iterator[RunFolder]:
        """Every folder of the store that has a configuration, ordered by name, packed ones among them.

        One that cannot be used is an error, or, where there is a list for them, a line in `problems`.
        """
        for path in self._paths().values():
            try:
                written = _read_config(path)
            except StoreError as error:
                if problems is None:
                    raise
                problems.append(str(error))
                continue
            if written is not None:
                yield RunFolder(path, written) if isinstance(path, Path) else PackedRun(path, written)

    def _paths(self) -> dict[str, Path | zipfile.Path]:
        """Every folder by name, in order. A packed one gives way to one that is finished, too, and to no other."""
        runs = self.root / "runs"
        loose = [entry.name for entry in os.scandir(runs) if entry.is_dir()] if runs.is_dir() else []
        found: dict[str, Path | zipfile.Path] = {name: runs / name for name in loose if not name.startswith(".")}
        for archive in archives(self.root):
            for key in archive.keys:
                if not (key in found and (found[key] / "summary.json").exists()):
                    found[key] = archive.folder(key)
        return dict(sorted(found.items()))

    def keys(self) -> set[str]:
        """The names of all runs that have begun."""
        return {name for name, path in self._paths().items() if (path / "config.json").exists()}

    @property
    def exists(self) -> bool:
        """Whether anything has been written here."""
        return (self.root / "runs").is_dir() or bool(archives(self.root))

    def pack(self, name: str, runs: Iterable[Run]) -> int:
        """Move the folders of those runs that are finished into the archive `<root>/<name>.zip`; how many there were.

        A folder that holds more than an archive keeps (a checkpoint, say) stays as it is. The others go only when the
        archive is on the disk and has been read again.
        """
        taken: dict[RunFolder, dict[str, bytes]] = {}
        for run in runs:
            folder = self.folder(run)
            if folder.finished and folder.is_plain:
                folder.summary()  # what is damaged raises here, and stays where it can be mended
                folder.metrics()
                taken[folder] = folder.contents()
        if taken:
            path = self.root / f"{name}.zip"
            write(path, {folder.run.key: files for folder, files in taken.items()})
            written = Archive(path)
            for folder, files in taken.items():
                if PackedRun(written.folder(folder.run.key), folder.run).contents() != files:
                    raise StoreError(f"{path} does not hold {folder.path} as it is. Nothing was removed.")
            for folder in taken:
                folder.clear()
        return len(taken)

    def finished_runs(self) -> Iterator[tuple[Run, dict[str, Any]]]:
        """Every finished run of the store with its summary."""
        for folder in self.folders():
            if folder.finished:
                yield folder.run, folder.summary()

    def check(self) -> None:
        """Raise if there cannot be a store here, rather than once for every run."""
        runs = self.root / "runs"
        for place in (runs, *runs.parents):
            if place.exists() and not place.is_dir():
                raise StoreError(f"{place} is a file, where the store {self.root} needs a folder.")

    def prepare(self) -> None:
        """Make the folder of the runs."""
        with disk.reporting(self.root):
            (self.root / "runs").mkdir(parents=True, exist_ok=True)

    def status(self, runs: Iterable[Run]) -> dict[str, Status]:
        """How far each run is, by key. Folders that cannot be used are all named in one error."""
        self.check()
        found: dict[str, Status] = {}
        problems: list[str] = []
        for run in runs:
            try:
                found[run.key] = self.folder(run).status
            except StoreError as error:
                problems.append(str(error))
        if problems:
            raise StoreError("\n".join(problems))
        return found


class RunFolder:
    """The files of one run. Reading needs nothing; whoever writes holds the `lock`."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path = path
        self.run = run
        self._held = 0

    def __repr__(self) -> str:
        return f"RunFolder({str(self.path)!r})"

    # ------------------------------------------------------------------------------------------ state

    @property
    def finished(self) -> bool:
        return (self.path / "summary.json").exists()

    @property
    def status(self) -> Status:
        if self.finished:
            self.summary()
            return "finished"
        if self._is_locked():
            return "running"
        if (self.path / "error.txt").exists():
            return "failed"
        return "resumable" if (self.path / "checkpoint.pt").exists() else "new"

    def check(self) -> None:
        """Raise unless the folder is this run's, or not there yet."""
        _read_config(self.path)

    @contextmanager
    def lock(self) -> Iterator[RunFolder]:
        """Own the folder, or raise StoreBusyError at once if another process does. May be nested."""
        if self._held:
            self._held += 1
            try:
                yield self
            finally:
                self._held -= 1
            return
        with disk.reporting(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            disk.acquire(descriptor, self.path)
            self._held = 1
            for stray in self.path.glob(".*.tmp"):  # of a process that died while it wrote
                stray.unlink(missing_ok=True)
            yield self
        finally:
            self._held = 0
            os.close(descriptor)

    def _is_locked(self) -> bool:
        try:
            descriptor = os.open(self.path / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            disk.acquire(descriptor, self.path, shared=True)
        except StoreBusyError:
            return True
        finally:
            os.close(descriptor)
        return False

    # ------------------------------------------------------------------------------------------ configuration

    def write_config(self) -> None:
        """What is run. A folder that says so already keeps the version that it was begun with."""
        if _read_config(self.path) is None:
            self._write_json("config.json", {"format": FORMAT, "version": __version__, "run": self.run.to_json()})

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        self._write_json("environment.json", environment)

    def environment(self) -> dict[str, Any] | None:
        path = self.path / "environment.json"
        return _read_json(path) if path.exists() else None

    @property
    def fingerprint(self) -> str | None:
        """Of the data that the run has seen, if its environment says so."""
        return fingerprint_in(self.environment())

    @property
    def division(self) -> str | None:
        """Of these data into training, validation and test examples, if its environment says so."""
        return division_in(self.environment())

    # ------------------------------------------------------------------------------------------ epochs

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add the line of an epoch; it is on the disk, whole or not at all, when this returns or raises."""
        disk.append(self.path / "metrics.jsonl", json.dumps(dict(line), allow_nan=False).encode() + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The lines so far. One that a crash has torn at the end does not count."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return []
        *whole, _torn = _read(path).split(b"\n")
        lines: list[dict[str, Any]] = []
        for number, text in enumerate(whole, start=1):
            try:
                line = json.loads(text)
            except ValueError:
                line = None
            if not isinstance(line, dict):
                raise StoreError(f"{path}, line {number} is not JSON. Move {self.path} away, and the run starts anew.")
            lines.append(line)
        return lines

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Replace the checkpoint. `state["epoch"]` counts the epochs that are complete and stand in the metrics."""
        buffer = io.BytesIO()  # torch would report a full disk as an error of its archive writer, not of the disk
        torch.save(dict(state), buffer)
        self._write("checkpoint.pt", buffer.getbuffer())

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state to go on from, with the metrics cut back to it; None to start from scratch.

        A checkpoint that cannot be read, or does not fit its metrics, is kept as `checkpoint.pt.corrupt`, and a
        warning says that the run starts anew.
        """
        path = self.path / "checkpoint.pt"
        state: dict[str, Any] | None = None
        if path.exists():
            try:
                state = self._read_checkpoint(path)
            except (ValueError, StoreError) as error:
                aside = path.with_name("checkpoint.pt.corrupt")
                with disk.reporting(aside):
                    os.replace(path, aside)
                    disk.sync_folder(self.path)
                warnings.warn(
                    f"{path} cannot be used ({error}). It is kept as {aside.name}; the run starts from scratch.",
                    RuntimeWarning,
                    stacklevel=2,
                )
        self._keep_metrics(0 if state is None else state["epoch"])
        return state

    def _read_checkpoint(self, path: Path) -> dict[str, Any]:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, MemoryError):  # no fault of the file: it fails this time, and can be resumed another
            raise
        except Exception as error:  # a damaged archive fails as RuntimeError, EOFError, KeyError, UnpicklingError, …
            reason = (str(error).splitlines() or ["empty"])[0]
            raise ValueError(f"{type(error).__name__}: {reason}") from error
        if not isinstance(state, dict) or not isinstance(state.get("epoch"), int):
            raise ValueError("it names no epoch")
        epochs = [line.get("epoch") for line in self.metrics()]
        if epochs[: state["epoch"]] != list(range(1, state["epoch"] + 1)):
            raise ValueError(f"it is of epoch {state['epoch']}, but metrics.jsonl has {epochs or 'no lines'}")
        return state

    def _keep_metrics(self, epochs: int) -> None:
        """Drop what was written after the checkpoint: those epochs are trained again."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        kept = b"".join(path.read_bytes().splitlines(keepends=True)[:epochs])
        if kept != path.read_bytes():
            self._write("metrics.jsonl", kept)

    # ------------------------------------------------------------------------------------------ ends

    def finish(self, summary: Mapping[str, Any], *, keep_checkpoint: bool = False) -> None:
        """Write the summary, which makes the run finished; only then does the checkpoint go."""
        self._write_json("summary.json", {"format": FORMAT, "key": self.run.key, **summary})
        (self.path / "error.txt").unlink(missing_ok=True)
        if not keep_checkpoint:
            (self.path / "checkpoint.pt").unlink(missing_ok=True)

    def summary(self) -> dict[str, Any]:
        """What `finish` wrote."""
        path = self.path / "summary.json"
        if not path.exists():
            raise StoreError(f"{self.path} is not finished: it has no summary.json.")
        summary = _read_json(path)
        _check_format(summary, path)
        if summary.get("key") != self.run.key:
            raise StoreError(f"{path} is the summary of another run. Delete it, and the run is done again.")
        return summary

    def write_error(self, text: str) -> None:
        """Why the run failed; gone once it has finished."""
        self._write("error.txt", text.encode())

    # ------------------------------------------------------------------------------------------ writing

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self._write(name, (json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n").encode())

    def _write(self, name: str, content: bytes | memoryview) -> None:
        disk.replace(self.path / name, content)

    # ------------------------------------------------------------------------------------------ packing

    @property
    def is_plain(self) -> bool:
        """Whether an archive would keep all there is, the file of the lock aside."""
        return {entry.name for entry in self.path.iterdir()} <= {*FILES, "lock"}

    def contents(self) -> dict[str, bytes]:
        """What an archive keeps, by file."""
        return {name: _read(self.path / name) for name in FILES if (self.path / name).exists()}

    def clear(self) -> None:
        """Remove the folder of a run that is packed. What is left of it, if this is cut short, is not finished."""
        with disk.reporting(self.path):
            for name in ("summary.json", *FILES, "lock"):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


class PackedRun(RunFolder):
    """A finished run inside an archive. It can be read as any other and never changes."""

    def __init__(self, path: zipfile.Path, run: Run) -> None:
        super().__init__(cast("Path", path), run)  # the two are read alike

    is_plain = False

    @contextmanager
    def lock(self) -> Iterator[RunFolder]:
        yield self

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        del line
        self._write()

    def _write(self, *_: object) -> Never:
        raise StoreError(f"{self.path} is packed and finished. Unpack it into runs/ of its store to change it.")


# ---------------------------------------------------------------------------------------------- reading


def fingerprint_in(environment: Mapping[str, Any] | None) -> str | None:
    """The fingerprint of the data in an environment.json."""
    return _of_dataset(environment, "fingerprint")


def division_in(environment: Mapping[str, Any] | None) -> str | None:
    """The digest of which example is in which part in an environment.json; runs of early versions have none."""
    return _of_dataset(environment, "division")


def _of_dataset(environment: Mapping[str, Any] | None, name: str) -> str | None:
    dataset = (environment or {}).get("dataset")
    found = dataset.get(name) if isinstance(dataset, Mapping) else None
    return str(found) if found else None


def _read(path: Path | zipfile.Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
    except DAMAGED as error:
        raise damaged(path, error) from error


def _read_json(path: Path | zipfile.Path) -> dict[str, Any]:
    try:
        content = json.loads(_read(path))
    except ValueError as error:
        raise StoreError(f"{path} is not JSON ({error}). Move {path.parent} away, and the run starts anew.") from error
    if not isinstance(content, dict):
        raise StoreError(f"{path} is no JSON object. Move {path.parent} away, and the run starts anew.")
    return content


def _check_format(content: Mapping[str, Any], path: Path | zipfile.Path) -> None:
    if content.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {content.get('format')!r}, and this version ({__version__}) reads format {FORMAT}. "
            f"Use the version that wrote it ({content.get('version', 'unknown')}), or another store."
        )


def _read_config(path: Path | zipfile.Path) -> Run | None:
    """The run that a folder says it is; None if it does not say so yet."""
    config = path / "config.json"
    try:
        content = _read_json(config)
    except FileNotFoundError:
        if (path / "summary.json").exists():
            raise StoreError(f"{path} has a summary.json but no config.json. Copy the whole folder again.") from None
        return None
    _check_format(content, config)
    try:
        run = Run.from_json(content.get("run", {}))
    except ExplicitDropoutError as error:
        raise StoreError(
            f"{config} describes a run that this version ({__version__}) does not know: {error} "
            f"It was written by version {content.get('version', 'unknown')}."
        ) from error
    if run.key != path.name:
        raise StoreError(
            f"{path} holds the run {run.key}: folders are named by their content. Rename it if that run is not in the "
            "store yet; otherwise move it away."
        )
    return run
