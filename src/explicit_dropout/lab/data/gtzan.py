"""GTZAN from its folder of audio: ten genres of a hundred clips of 30 s.

Features are computed once and kept in `cache` in the data root, under a name made of the content of all files. Clips
whose sound is equal to the last sample get one group, so that they never lie on both sides of a split. A file that
cannot be read stops everything with its name; it is left out only if `skip.txt` in the folder says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from explicit_dropout.errors import DataError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data import audio, features
from explicit_dropout.lab.data.images import folders
from explicit_dropout.lab.data.material import Material, relative

ENDINGS = (".wav", ".au")
SKIP = "skip.txt"


def find(root: Path) -> Path | None:
    """The folder that holds one folder per genre."""
    for folder in (root / "gtzan" / "genres", root / "gtzan" / "genres_original", root / "genres", root / "gtzan"):
        if folder.is_dir() and any(_clips(genre) for genre in folders(folder)):
            return folder
    return None


def read(data: config.Data, root: Path) -> Material:  # noqa: ARG001
    """Features of every clip, from the cache if the very same files have been read before."""
    folder = find(root)
    if folder is None:
        raise MissingDataError(f"no folder of audio clips, one folder per genre, in {root}.")
    classes = tuple(genre.name for genre in folders(folder) if _clips(genre))
    clips = [clip for genre in folders(folder) for clip in _clips(genre)]
    skipped = _skipped(folder, clips)
    clips = [clip for clip in clips if clip.name not in skipped]
    cache = root / "cache" / f"gtzan-{_key(clips, folder)}.npz"
    arrays = features.load_arrays(cache) if cache.is_file() else _computed(clips, classes, cache)
    notes = (f"left out, as {SKIP} says: {', '.join(skipped)}",) if skipped else ()
    return features.sequences(
        arrays,
        cache,
        "gtzan",
        relative(folder, root),
        test_share=0.1,
        validation_share=0.2,
        standardise=True,
        notes=notes,
    )


def _clips(genre: Path) -> list[Path]:
    named = [entry for entry in genre.iterdir() if entry.suffix.lower() in ENDINGS and not entry.name.startswith(".")]
    return sorted(named)


def _skipped(folder: Path, clips: list[Path]) -> list[str]:
    """The file names in skip.txt, one a line; `#` starts a remark."""
    listed = folder / SKIP
    if not listed.is_file():
        return []
    lines = (line.split("#")[0].strip() for line in listed.read_text(encoding="utf-8").splitlines())
    names = sorted({line for line in lines if line})
    unknown = [name for name in names if name not in {clip.name for clip in clips}]
    if unknown:
        raise DataError(f"{listed} names {', '.join(unknown)}, which is not among the clips in {folder}.")
    return names


def _key(clips: list[Path], folder: Path) -> str:
    """What the features follow from: the front end, and names and bytes of all clips."""
    digest = hashlib.sha256(f"front end {audio.VERSION}".encode())
    for clip in clips:
        digest.update(f"\n{clip.relative_to(folder).as_posix()} ".encode())
        try:
            digest.update(hashlib.sha256(clip.read_bytes()).digest())
        except OSError as error:
            raise DataError(f"{clip} cannot be read: {error}") from error
    return digest.hexdigest()[:16]


def _computed(clips: list[Path], classes: tuple[str, ...], cache: Path) -> dict[str, NDArray[Any]]:
    seen: dict[bytes, int] = {}
    made, groups = [], []
    for clip in clips:
        samples, rate = _samples(clip)
        made.append(audio.tokens(torch.from_numpy(samples.mean(1)), rate).numpy())
        sound = hashlib.sha256(samples.tobytes()).digest()
        groups.append(seen.setdefault(sound, len(seen)))
    arrays: dict[str, NDArray[Any]] = {
        "features": np.stack(made),
        "labels": np.array([classes.index(clip.parent.name) for clip in clips]),
        "classes": np.array(classes),
        "clips": np.array([clip.name for clip in clips]),
        "groups": np.array(groups),
    }
    _keep(arrays, cache)
    return arrays


def _samples(clip: Path) -> tuple[NDArray[np.float32], int]:
    """Samples (n, channels) from −1 to 1, and the sampling rate."""
    try:
        soundfile = importlib.import_module("soundfile")
    except (ImportError, OSError) as error:
        raise DataError(f"audio needs soundfile:  pip install 'explicit-dropout[audio]'  ({error})") from error
    try:
        samples, rate = soundfile.read(clip, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(
            f"{clip} is no readable audio: {error}. GTZAN is known for one such file, jazz.00054. To go on without it, "
            f"write its name into {clip.parent.parent / SKIP}; the results will say so."
        ) from error
    if len(samples) < rate or not np.isfinite(samples).all():
        raise DataError(f"{clip} must hold at least 1 s of finite samples. Found {len(samples)} samples at {rate} Hz.")
    if rate < 2 * audio.HIGHEST:
        raise DataError(f"{clip} must have a sampling rate of at least {2 * audio.HIGHEST:.0f} Hz. Found {rate} Hz.")
    return samples, int(rate)


def _keep(arrays: dict[str, NDArray[Any]], cache: Path) -> None:
    """Write the features, whole or not at all. Where nothing can be written, they are computed again next time."""
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=".gtzan-", suffix=".npz", dir=cache.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]
            os.replace(temporary, cache)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
