"""Feature sequences from one `.npz` file: embeddings of any network, one sequence per example or long recordings.

One sequence per example (`docs/data.md` has the table):

    features (n, tokens, d) u8, i8, f16 or f32    scale () or (d,), optional    labels (n,) integers
    classes (k,) text    clips (n,) text, optional    groups (n,) integers, optional    parts (n,) text, optional

Long recordings, one after the other, with a label for every step:

    {train,test}_features (steps, d)    {train,test}_labels (steps, k) 0 or 1    {train,test}_lengths (videos,)
    {train,test}_videos (videos,) text    scale    classes (k,)
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explicit_dropout.errors import DataError, InputError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data.material import TEST, TRAIN, VALIDATION, Material, Sequences, Windows, relative

KINDS = ("uint8", "int8", "float16", "float32")
PARTS = {"train": TRAIN, "validation": VALIDATION, "test": TEST}
STEPS = 64


def read(data: config.Data, root: Path) -> Material:
    """The file that `data.folder` names, in either form."""
    path = chosen(data, root)
    if path.is_dir():
        files = sorted(path.glob("*.npz"))
        if len(files) != 1:
            raise InputError("data.folder", f"an .npz file, or a folder with one: {path}", f"{len(files)} such files")
        path = files[0]
    if not path.is_file():
        raise MissingDataError(
            f"features: {path} is not there. `data.folder` names an .npz file inside the data root {root}."
        )
    arrays = load_arrays(path)
    source = relative(path, root)
    return (
        windows(arrays, path, "features", source)
        if "train_features" in arrays
        else sequences(arrays, path, "features", source)
    )


def chosen(data: config.Data, root: Path) -> Path:
    """The place that `data.folder` names, which has to lie inside the data root."""
    if data.folder is None:
        raise InputError("data.folder", f"a path inside the data root {root}, for {data.name}", "null")
    inside = PurePosixPath(data.folder)
    if inside.is_absolute() or ".." in inside.parts or Path(data.folder).is_absolute():
        raise InputError("data.folder", "relative to the data root, without ..", repr(data.folder))
    return root / data.folder


def load_arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of an .npz file; objects in it are refused, since reading them would run code."""
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream):  # a bare array would be read as well: not here
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{path} is no readable .npz file: {error}") from error


def sequences(arrays: Mapping[str, NDArray[Any]], path: Path, name: str, source: str, **rest: Any) -> Material:
    """One sequence of tokens per example."""
    file = _File(arrays, path)
    features = file.numbers("features", 3)
    n, _, d = features.shape
    classes = file.names("classes")
    labels = file.integers("labels", n)
    file.within("labels", labels, len(classes))
    groups = file.integers("groups", n) if "groups" in arrays else None
    roles = None
    if "parts" in arrays:
        parts = file.names("parts", n)
        for part in set(parts) - set(PARTS):
            file.fail("parts", f"of {', '.join(PARTS)}", repr(part))
        roles = np.array([PARTS[part] for part in parts], dtype=np.int8)
    content = Sequences(features, file.scale(d), standardise=bool(rest.pop("standardise", False)))
    return Material(name, classes, content, labels, groups, roles, sources=(source,), **rest)


def windows(arrays: Mapping[str, NDArray[Any]], path: Path, name: str, source: str) -> Material:
    """Windows over long recordings; steps without any class are background, which becomes class 0."""
    file = _File(arrays, path)
    classes = file.names("classes")
    features: list[NDArray[Any]] = []
    labels: list[NDArray[np.bool_]] = []
    lengths: list[NDArray[np.int64]] = []
    for part in ("train", "test"):
        found = file.numbers(f"{part}_features", 2)
        steps, d = found.shape
        if features and features[0].shape[1] != d:
            file.fail(f"{part}_features", f"of {features[0].shape[1]} features, as those of training", str(d))
        marks = file.array(f"{part}_labels")
        if marks.shape != (steps, len(classes)) or not np.isin(marks, (0, 1)).all():
            file.fail(f"{part}_labels", f"({steps}, {len(classes)}) of 0 and 1", f"{marks.shape} of {marks.dtype}")
        long = file.integers(f"{part}_lengths")
        if (long < 1).any() or long.sum() != steps:
            file.fail(
                f"{part}_lengths", f"positive with the sum {steps}, the steps of {part}_features", f"{long.sum()}"
            )
        if f"{part}_videos" in arrays:
            file.names(f"{part}_videos", len(long))
        features.append(found)
        labels.append(marks.astype(np.bool_))
        lengths.append(long)
    marked = np.concatenate(labels)
    with_background = np.concatenate([~marked.any(1, keepdims=True), marked], axis=1)
    return recordings(
        name,
        ("background", *classes),
        np.concatenate(features),
        file.scale(features[0].shape[1]),
        with_background,
        np.concatenate(lengths),
        len(lengths[0]),
        sources=(source,),
    )


def recordings(
    name: str,
    classes: tuple[str, ...],
    features: NDArray[Any],
    scale: NDArray[np.float32],
    labels: NDArray[np.bool_],
    lengths: NDArray[np.int64],
    training: int,
    *,
    dropped: NDArray[np.bool_] | None = None,
    **rest: Any,
) -> Material:
    """One window for every step that is not dropped; the first `training` recordings train and validate, rest test."""
    video = np.repeat(np.arange(len(lengths)), lengths)
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    last = np.arange(len(features), dtype=np.int64)
    kept = np.ones(len(features), dtype=np.bool_) if dropped is None else ~dropped
    return Material(
        name=name,
        classes=classes,
        content=Windows(features, scale, first[kept], last[kept], STEPS),
        labels=labels[kept],
        groups=video[kept],
        roles=np.where(video < training, TRAIN, TEST).astype(np.int8)[kept],
        count_groups=True,
        metric="mean_average_precision",
        background=0,
        **rest,
    )


class _File:
    """Arrays of one file, each checked as it is taken; a complaint names file, array, what was expected and found."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]], path: Path) -> None:
        self.arrays, self.path = arrays, path

    def fail(self, name: str, expected: str, found: str) -> None:
        raise DataError(f"{self.path}: `{name}` must be {expected}. Found {found}.")

    def array(self, name: str) -> NDArray[Any]:
        if name not in self.arrays:
            raise DataError(f"{self.path} has no array `{name}`; it has {', '.join(sorted(self.arrays)) or 'none'}.")
        return self.arrays[name]

    def numbers(self, name: str, dimensions: int) -> NDArray[Any]:
        found = self.array(name)
        shape = {2: "(steps, features)", 3: "(examples, tokens, features)"}[dimensions]
        if found.ndim != dimensions or 0 in found.shape:
            self.fail(name, f"{shape}, none of them 0", str(found.shape))
        if found.dtype.name not in KINDS:
            self.fail(name, f"of {', '.join(KINDS)}", found.dtype.name)
        if found.dtype.kind == "f":
            finite(found, f"{self.path}: `{name}`")
        return np.ascontiguousarray(found)

    def scale(self, d: int) -> NDArray[np.float32]:
        found = self.arrays.get("scale", np.ones((), dtype=np.float32))
        if found.shape not in ((), (1,), (d,)) or found.dtype.kind not in "fiu" or not np.isfinite(found).all():
            self.fail("scale", f"finite numbers of shape () or ({d},)", f"{found.shape} of {found.dtype}")
        return np.atleast_1d(found).astype(np.float32)

    def integers(self, name: str, length: int | None = None) -> NDArray[np.int64]:
        found = self.array(name)
        if found.dtype.kind not in "iu" or found.ndim != 1 or (length is not None and len(found) != length):
            wanted = "whole numbers, one dimension" if length is None else f"{length} whole numbers"
            self.fail(name, wanted, f"{found.shape} of {found.dtype}")
        return found.astype(np.int64)

    def within(self, name: str, found: NDArray[np.int64], classes: int) -> None:
        if found.min() < 0 or found.max() >= classes:
            self.fail(
                name, f"from 0 to {classes - 1}, since there are {classes} classes", f"{found.min()} to {found.max()}"
            )

    def names(self, name: str, length: int | None = None) -> tuple[str, ...]:
        found = self.array(name)
        if found.dtype.kind != "U" or found.ndim != 1 or len(found) != (len(found) if length is None else length):
            self.fail(
                name, "text, one dimension" if length is None else f"{length} texts", f"{found.shape} of {found.dtype}"
            )
        return tuple(map(str, found))


def finite(features: NDArray[Any], what: str) -> None:
    """Complains about the first example that has a NaN or an infinity."""
    for start in range(0, len(features), 1024):
        fine = np.isfinite(features[start : start + 1024]).reshape(len(features[start : start + 1024]), -1).all(1)
        if not fine.all():
            raise DataError(f"{what}: NaN or infinite values, first at example {start + int(np.argmin(fine))}.")
