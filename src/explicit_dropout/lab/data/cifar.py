"""CIFAR-10 and CIFAR-100 from the official binary or python files, packed or unpacked."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from explicit_dropout.errors import DataError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data.archives import extract, fetch, md5, members
from explicit_dropout.lab.data.material import TEST, TRAIN, Images, Material, duplicates, relative
from explicit_dropout.lab.data.pickles import load_pickle

PIXELS = 3 * 32 * 32
OFFICIAL_COUNTS = (50_000, 10_000)
_ADDRESS = "https://www.cs.toronto.edu/~kriz/"

Contents = Mapping[str, bytes]


@dataclass(frozen=True)
class Layout:
    """One of the two official forms.

    Args:
        archive: name of the packed file, with its official MD5.
        folder: what the archive unpacks to.
        label: binary: the label's place among the bytes before the pixels, and how many there are; python: its key.
    """

    archive: str
    md5: str
    folder: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label: tuple[int, int] | str

    @property
    def files(self) -> tuple[str, ...]:
        return self.train + self.test


@dataclass(frozen=True)
class Variant:
    """CIFAR-10 or CIFAR-100. `published` is the fingerprint of the official images, whichever layout they come in."""

    name: str
    classes: tuple[str, ...]
    layouts: tuple[Layout, Layout]
    published: str


@dataclass(frozen=True)
class Found:
    """A layout and where it is: a folder with its files, or an archive."""

    layout: Layout
    place: Path


def find(variant: Variant, root: Path) -> Found | None:
    """Folders come before archives, and binary files before pickles."""
    places = [root, root / variant.name]
    for layout in variant.layouts:
        for folder in [place / inner for place in places for inner in (layout.folder, "")]:
            if any((folder / file).is_file() for file in layout.files):
                return Found(layout, folder)
    for layout in variant.layouts:
        for place in places:
            if (place / layout.archive).is_file():
                return Found(layout, place / layout.archive)
    return None


def download(variant: Variant, root: Path, progress: Callable[[int, int | None], None] | None = None) -> Path:
    """Fetch the binary archive (or take the one that is there), check its MD5 and unpack it into the data root."""
    layout = variant.layouts[0]
    archive = root / layout.archive
    if archive.is_file():
        found = md5(archive)
        if found != layout.md5:
            raise DataError(
                f"{archive} has the MD5 {found}; the official one is {layout.md5}. Remove it and try again."
            )
    else:
        fetch(_ADDRESS + layout.archive, archive, layout.md5, progress)
    if not (root / layout.folder).is_dir():
        extract(archive, root)
    return root / layout.folder


def reader(variant: Variant) -> Callable[[config.Data, Path], Material]:
    """What reads this variant."""

    def read(data: config.Data, root: Path) -> Material:  # noqa: ARG001
        found = find(variant, root)
        if found is None:
            raise MissingDataError(f"{variant.name} is not in {root}.")
        return _material(variant, found, root)

    return read


def _material(variant: Variant, found: Found, root: Path) -> Material:
    layout, place = found.layout, found.place
    contents = _files(layout, place) if place.is_dir() else members(place, layout.files)
    parts = [_part(variant, layout, place, names, contents) for names in (layout.train, layout.test)]
    pixels = np.concatenate([part[0] for part in parts]).reshape(-1, 3, 32, 32)
    counts = tuple(len(part[0]) for part in parts)
    groups = duplicates(pixels)
    return Material(
        name=variant.name,
        classes=variant.classes,
        content=Images(pixels),
        labels=np.concatenate([part[1] for part in parts]),
        groups=groups,
        roles=np.repeat(np.array([TRAIN, TEST], dtype=np.int8), counts),
        sources=tuple(relative(place / file, root) for file in layout.files)
        if place.is_dir()
        else (relative(place, root),),
        notes=_notes(counts, groups),
        published=variant.published,
    )


def _notes(counts: tuple[int, ...], groups: NDArray[np.int64]) -> tuple[str, ...]:
    notes = []
    if counts != OFFICIAL_COUNTS:
        notes.append(
            f"{counts[0]:,} training and {counts[1]:,} test images, where the official files have "
            f"{OFFICIAL_COUNTS[0]:,} and {OFFICIAL_COUNTS[1]:,}"
        )
    shared = int(np.isin(groups[: counts[0]], groups[counts[0] :]).sum())
    if shared:
        notes.append(f"{shared} training images are equal to a test image")
    return tuple(notes)


def _files(layout: Layout, folder: Path) -> Contents:
    missing = [name for name in layout.files if not (folder / name).is_file()]
    if missing:
        raise MissingDataError(
            f"{folder} is incomplete: {', '.join(missing)} not there. The set is {', '.join(layout.files)}."
        )
    try:
        return {name: (folder / name).read_bytes() for name in layout.files}
    except OSError as error:
        raise DataError(f"{folder} cannot be read: {error}") from error


def _part(
    variant: Variant, layout: Layout, place: Path, names: tuple[str, ...], contents: Contents
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    pixels, labels = [], []
    for name in names:
        content, path, label = contents[name], place / name, layout.label
        some, their = _pickled(content, path, label) if isinstance(label, str) else _binary(content, path, label)
        if len(their) and not 0 <= int(their.min()) <= int(their.max()) < len(variant.classes):
            raise DataError(
                f"{path}: labels must be from 0 to {len(variant.classes) - 1}. Found {their.min()} to {their.max()}."
            )
        pixels.append(some)
        labels.append(their)
    return np.concatenate(pixels), np.concatenate(labels)


def _binary(content: bytes, path: Path, label: tuple[int, int]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Records of label bytes and 3072 pixels, planes red, green, blue."""
    position, width = label
    record = width + PIXELS
    if not content or len(content) % record:
        raise DataError(
            f"{path} is damaged or incomplete: its size must be a multiple of {record} bytes, one record per image. "
            f"Found {len(content):,} bytes."
        )
    table = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    return table[:, width:], table[:, position].astype(np.int64)


def _pickled(content: bytes, path: Path, label: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """A dictionary of `data` (n, 3072) and a list of labels."""
    found = load_pickle(io.BytesIO(content), path)
    if not isinstance(found, dict) or not {"data", label} <= set(found):
        raise DataError(f"{path} must hold a dictionary with `data` and `{label}`.")
    pixels, labels = found["data"], found[label]
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.uint8 or pixels.shape != (len(labels), PIXELS):
        given = f"{pixels.shape} of {pixels.dtype}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise DataError(f"{path}: `data` must be ({len(labels)}, {PIXELS}) of uint8, one row per label. Found {given}.")
    if not len(labels) or not all(isinstance(entry, int | np.integer) for entry in labels):
        raise DataError(f"{path}: `{label}` must be whole numbers, at least one.")
    return pixels, np.array(labels, dtype=np.int64)


_CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale willow_tree
wolf woman worm"""
_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

CIFAR10 = Variant(
    "cifar10",
    tuple(_CIFAR10_CLASSES.split()),
    (
        Layout(
            "cifar-10-binary.tar.gz",
            "c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in _BATCHES),
            ("test_batch.bin",),
            (0, 1),
        ),
        Layout(
            "cifar-10-python.tar.gz",
            "c58f30108f718f92721af3b95e74349a",
            "cifar-10-batches-py",
            _BATCHES,
            ("test_batch",),
            "labels",
        ),
    ),
    published="2d3edd3c769a7aef9d63bb0202f9ad905965ef27eb79edbd3183469305ef21a4",
)
CIFAR100 = Variant(
    "cifar100",
    tuple(_CIFAR100_CLASSES.split()),
    (
        Layout(
            "cifar-100-binary.tar.gz",
            "03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
            ("train.bin",),
            ("test.bin",),
            (1, 2),
        ),
        Layout(
            "cifar-100-python.tar.gz",
            "eb9058c3a382ffc7106e4002c42a8d85",
            "cifar-100-python",
            ("train",),
            ("test",),
            "fine_labels",
        ),
    ),
    published="c0c7fbf1e32186abbe198b6bfc2acacfcc0f724e7d4306ebda5b0a6ae3dac8aa",
)
