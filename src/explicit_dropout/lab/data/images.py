"""Any folder of images: one folder per class, or train, val and test folders of such. Read by Pillow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from explicit_dropout.errors import DataError, InputError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data.features import chosen
from explicit_dropout.lab.data.material import FREE, TEST, TRAIN, VALIDATION, Images, Material, duplicates, relative

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
PARTS = {"train": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
GREY_MODES = ("1", "L", "LA")
WIDE_MODES = ("I", "F")


def read(data: config.Data, root: Path) -> Material:
    """Images cropped to the middle square and resized to `data.size`; grey if all are, else red, green and blue."""
    folder = chosen(data, root)
    if not folder.is_dir():
        raise MissingDataError(
            f"images: there is no folder {folder}. It holds one folder per class, or train, val, test."
        )
    parts = _parts(folder)
    classes = tuple(sorted({place.name for place, _ in parts}))
    files = [(path, classes.index(place.name), role) for place, role in parts for path in _files(place)]
    if not files or len(classes) < 2:
        found = f"{len(files)} images in {len(classes)} folders"
        raise DataError(f"{folder} must hold images in one folder per class, two at least. Found {found}.")
    modes = {_mode(path) for path, _, _ in files}
    mode = "L" if modes <= set(GREY_MODES) else "RGB"
    arrays = [_pixels(path, mode, data.size) for path, _, _ in files]
    sizes = {array.shape[1:] for array in arrays}
    if len(sizes) > 1:
        some = ", ".join(f"{width} × {height}" for height, width in sorted(sizes)[:4])
        raise InputError("data.size", f"given: the images in {folder} have {len(sizes)} sizes ({some} …)", "null")
    pixels = np.stack(arrays)
    return Material(
        name="images",
        classes=classes,
        content=Images(pixels),
        labels=np.array([label for _, label, _ in files], dtype=np.int64),
        groups=duplicates(pixels),
        roles=np.array([role for _, _, role in files], dtype=np.int8),
        sources=(relative(folder, root),),
    )


def _parts(folder: Path) -> list[tuple[Path, int]]:
    """Every folder of a class, with the part that it belongs to."""
    inside = folders(folder)
    named = [entry for entry in inside if entry.name in PARTS]
    if not any(entry.name == "train" for entry in named):
        return [(entry, FREE) for entry in inside]
    strangers = [entry.name for entry in inside if entry.name not in PARTS]
    if strangers:
        raise DataError(
            f"{folder} has a folder train, so that {', '.join(strangers)} beside it is neither part nor class."
        )
    return [(place, PARTS[part.name]) for part in named for place in folders(part)]


def folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS and path.is_file())


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise MissingDataError("images are read by Pillow, which is not installed:  pip install pillow") from error
    try:
        with Image.open(path) as image:
            yield image
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is no readable image: {error}") from error


def _mode(path: Path) -> str:
    """The kind of pixels, from the beginning of the file."""
    with _opened(path) as image:
        mode = str(image.mode)
    if mode.startswith(WIDE_MODES):
        raise DataError(f"{path} must have 8 bits per channel. Found pixels of type {mode}.")
    return mode


def _pixels(path: Path, mode: str, size: int | None) -> NDArray[np.uint8]:
    """Bytes (channels, height, width)."""
    with _opened(path) as image:
        from PIL import Image, ImageOps

        converted = image.convert(mode)
        if size is not None and converted.size != (size, size):
            converted = ImageOps.fit(converted, (size, size), Image.Resampling.BICUBIC)
        pixels = np.asarray(converted, dtype=np.uint8)
    return pixels[None] if mode == "L" else np.ascontiguousarray(pixels.transpose(2, 0, 1))
