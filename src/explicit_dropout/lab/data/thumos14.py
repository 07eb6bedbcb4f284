"""THUMOS14 from the feature and label pickles that online action detection shares.

    features {video: {"rgb": (T, ·), "flow": (T, ·)}}    labels {video: {"anno": (T, 22), "feature_length": T}}

Columns of `anno`: background, 20 actions, ambiguous. One window of 64 steps ends at every step that is not ambiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explicit_dropout.errors import DataError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data.features import finite, recordings
from explicit_dropout.lab.data.material import Material, relative
from explicit_dropout.lab.data.pickles import load_pickle

ACTIONS = (
    "BaseballPitch", "BasketballDunk", "Billiards", "CleanAndJerk", "CliffDiving", "CricketBowling", "CricketShot",
    "Diving", "FrisbeeCatch", "GolfSwing", "HammerThrow", "HighJump", "JavelinThrow", "LongJump", "PoleVault",
    "Shotput", "SoccerPenalty", "TennisSwing", "ThrowDiscus", "VolleyballSpiking",
)  # fmt: skip
COLUMNS = 22
AMBIGUOUS = 21
PARTS = ("val", "test")
"""The videos of THUMOS14 that are called validation are what everyone trains on."""


def patterns(part: str) -> tuple[str, str]:
    """File names of features and labels; what stands for * differs between publications."""
    return f"thumos_all_feature_{part}*.pickle", f"thumos_{part}_anno*.pickle"


def find(name: str, root: Path) -> Path | None:
    """The folder with all four files, named like the dataset."""
    folder = root / name
    complete = all(any(folder.glob(pattern)) for part in PARTS for pattern in patterns(part))
    return folder if complete else None


def read(data: config.Data, root: Path) -> Material:
    """Training videos first, then test videos, each in the order of their names."""
    folder = find(data.name, root)
    if folder is None:
        raise MissingDataError(
            f"{root / data.name} must hold {', '.join(p for part in PARTS for p in patterns(part))}."
        )
    parts = [_part(folder, part) for part in PARTS]
    widths = {part.videos[0][1].shape[1] for part in parts}
    if len(widths) > 1:
        raise DataError(f"{folder}: training and test features differ in width: {sorted(widths)}.")
    videos = [video for part in parts for video in part.videos]
    marks = np.concatenate([anno for _, _, anno in videos])
    labels = marks[:, :AMBIGUOUS]
    bare = ~marks.any(1)
    labels[bare, 0] = True
    dropped = marks[:, AMBIGUOUS]
    notes = [f"{int(dropped.sum()):,} ambiguous steps are no examples"]
    if bare.any():
        notes.append(f"{int(bare.sum()):,} steps without any label count as background")
    notes += [note for part in parts for note in part.notes]
    return recordings(
        data.name,
        ("background", *ACTIONS),
        np.concatenate([features for _, features, _ in videos]),
        np.ones(1, dtype=np.float32),
        labels,
        np.array([len(anno) for _, _, anno in videos]),
        len(parts[0].videos),
        dropped=dropped,
        sources=tuple(relative(path, root) for part in parts for path in part.files),
        notes=tuple(notes),
    )


@dataclass(frozen=True)
class _Part:
    videos: list[tuple[str, NDArray[np.float32], NDArray[np.bool_]]]
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def _part(folder: Path, part: str) -> _Part:
    files = tuple(_only(folder, pattern) for pattern in patterns(part))
    features, labels = (_mapping(path) for path in files)
    without = sorted(set(labels) - set(features))
    if without:
        some = ", ".join(without[:5]) + (", …" if len(without) > 5 else "")
        raise DataError(f"{files[0]} has no features of {len(without)} labelled videos: {some}")
    if not labels:
        raise DataError(f"{files[1]} has no videos.")
    videos = [(name, *_video(name, features[name], labels[name], files)) for name in sorted(labels)]
    widths = {found.shape[1] for _, found, _ in videos}
    if len(widths) > 1:
        raise DataError(f"{files[0]}: the features of all videos must be equally wide. Found {sorted(widths)}.")
    beside = len(set(features) - set(labels))
    notes = (f"{beside} videos of {files[0].name} have no labels and are left out",) if beside else ()
    return _Part(videos, files, notes)


def _only(folder: Path, pattern: str) -> Path:
    files = sorted(folder.glob(pattern))
    if len(files) != 1:
        raise DataError(f"{folder} must hold one file {pattern}. Found {', '.join(f.name for f in files) or 'none'}.")
    return files[0]


def _mapping(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            found = load_pickle(file, path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise DataError(f"{path} must hold a dictionary by video name. Found {type(found).__name__}.")
    return found


def _video(
    name: str, streams: Any, label: Any, files: tuple[Path, ...]
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """RGB and flow side by side, and the marks, all of the same length."""
    if not isinstance(label, dict) or not isinstance(label.get("anno"), np.ndarray):
        raise DataError(f"{files[1]}: {name} must be a dictionary with an array `anno`.")
    anno = label["anno"]
    if anno.ndim != 2 or anno.shape[1] != COLUMNS or not len(anno) or not np.isin(anno, (0, 1)).all():
        raise DataError(f"{files[1]}: `anno` of {name} must be (steps, {COLUMNS}) of 0 and 1. Found {anno.shape}.")
    if label.get("feature_length", len(anno)) != len(anno):
        raise DataError(f"{files[1]}: {name} has {len(anno)} labels, but says {label['feature_length']} of itself.")
    if not isinstance(streams, dict):
        raise DataError(f"{files[0]}: {name} must be a dictionary with arrays `rgb` and `flow`.")
    found = []
    for stream in ("rgb", "flow"):
        array = streams.get(stream)
        if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind != "f" or len(array) != len(anno):
            given = f"{array.shape} of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataError(f"{files[0]}: `{stream}` of {name} must be ({len(anno)}, ·) of floats. Found {given}.")
        finite(array, f"{files[0]}: `{stream}` of {name}")
        found.append(array.astype(np.float32))
    return np.concatenate(found, axis=1), anno.astype(np.bool_)
