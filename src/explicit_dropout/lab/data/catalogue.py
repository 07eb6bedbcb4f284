"""Every dataset that can be asked for by name: what it is, the files it needs, and how to get them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from explicit_dropout.errors import InputError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data import cifar, digits, features, gtzan, images, thumos14
from explicit_dropout.lab.data.dataset import Dataset
from explicit_dropout.lab.data.material import Material, relative

ROOT_VARIABLE = "EXPLICIT_DROPOUT_DATA"


@dataclass(frozen=True)
class Source:
    """A dataset by name.

    Args:
        title: what it is, in a few words.
        needs: the files, relative to the data root.
        obtain: where they come from.
        read: all of its examples.
        find: the files or folders that are there, or None; looks, does not read.
        download: fetch them into the data root; tells a function (bytes so far, bytes in all or None), if given one.
        asks_folder: whether `data.folder` has to say where.
    """

    name: str
    title: str
    needs: str
    obtain: str
    read: Callable[[config.Data, Path], Material]
    find: Callable[[Path], Path | None]
    download: Callable[..., Path] | None = None
    asks_folder: bool = False


def data_root(root: Path | str | None = None) -> Path:
    """The folder of the datasets: the argument, else $EXPLICIT_DROPOUT_DATA, else ./data."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or "data").expanduser()


def source(name: str) -> Source:
    """The dataset of this name."""
    if name not in SOURCES:
        raise InputError("data.name", f"one of {', '.join(SOURCES)}", repr(name))
    return SOURCES[name]


def load(data: config.Data | str = "digits", root: Path | str | None = None) -> Dataset:
    """A dataset, divided as the settings say.

    Args:
        data: which examples; a name stands for its default settings.
        root: the folder of the datasets; None for $EXPLICIT_DROPOUT_DATA, or `data`.
    """
    settings = config.Data(name=data) if isinstance(data, str) else data
    return examples(settings, root).divide(settings)


def examples(settings: config.Data, root: Path | str | None = None) -> Material:
    """All examples at hand, not yet divided."""
    found, folder = source(settings.name), data_root(root)
    if settings.folder is not None and not found.asks_folder:
        raise InputError(
            "data.folder", f"null: {settings.name} has its own place in the data root", repr(settings.folder)
        )
    if settings.size is not None and settings.name != "images":
        raise InputError("data.size", f"null: {settings.name} has one size", settings.size)
    if not found.asks_folder and found.find(folder) is None:
        raise MissingDataError(missing(found, folder))
    return found.read(settings, folder)


def missing(wanted: Source, root: Path) -> str:
    """What to do about a dataset that is not there."""
    command = f"  explicit-dropout data {wanted.name} --download --root {root}\n" if wanted.download else ""
    return (
        f"the dataset {wanted.name} is not in {root}.\n"
        f"It needs  {wanted.needs}\n"
        f"{command}"
        f"{wanted.obtain}\n"
        f"The data root is --data-root (of `data`: --root), else ${ROOT_VARIABLE}, else ./data."
    )


def _one_file(name: str) -> Callable[[Path], Path | None]:
    def find(root: Path) -> Path | None:
        return next((path for path in (root / name, root / Path(name).stem / name) if path.is_file()), None)

    return find


def _cifar(variant: cifar.Variant) -> Callable[[Path], Path | None]:
    def find(root: Path) -> Path | None:
        found = cifar.find(variant, root)
        return None if found is None else found.place

    return find


def _yamnet(data: config.Data, root: Path) -> Material:  # noqa: ARG001
    path = _one_file("gtzan_yamnet.npz")(root) or root / "gtzan_yamnet.npz"
    arrays = features.load_arrays(path)
    return features.sequences(arrays, path, "gtzan_yamnet", relative(path, root), test_share=0.1, validation_share=0.2)


def _i3d(data: config.Data, root: Path) -> Material:  # noqa: ARG001
    path = _one_file("thumos14_i3d.npz")(root) or root / "thumos14_i3d.npz"
    return features.windows(features.load_arrays(path), path, "thumos14_i3d", relative(path, root))


def _pickles(name: str, title: str, width: int) -> Source:
    files = ", ".join(pattern for part in thumos14.PARTS for pattern in thumos14.patterns(part))
    return Source(
        name,
        title,
        f"{name}/ with four pickles",
        f"The four are {files}, `val` being the training videos. Features (RGB and flow, {width} numbers together) "
        "and labels are shared by the authors of OadTR and Colar, linked from their repositories.",
        thumos14.read,
        partial(thumos14.find, name),
    )


_CIFAR = (
    "Official page: https://www.cs.toronto.edu/~kriz/cifar.html. The archive, its folder, or the files alone will do, "
    "here or in a folder {name}; the python version too."
)
_ARRAYS = "The arrays that it holds are described in the documentation (Data: feature sequences)."

SOURCES: dict[str, Source] = {
    entry.name: entry
    for entry in (
        Source(
            "digits",
            "1797 handwritten digits, 8 × 8, grey",
            "nothing: scikit-learn brings them",
            "pip install scikit-learn",
            digits.read,
            lambda root: root,
        ),
        Source(
            "cifar10",
            "60 000 images, 32 × 32, 10 classes",
            "cifar-10-binary.tar.gz",
            _CIFAR.format(name="cifar10"),
            cifar.reader(cifar.CIFAR10),
            _cifar(cifar.CIFAR10),
            partial(cifar.download, cifar.CIFAR10),
        ),
        Source(
            "cifar100",
            "60 000 images, 32 × 32, 100 classes",
            "cifar-100-binary.tar.gz",
            _CIFAR.format(name="cifar100"),
            cifar.reader(cifar.CIFAR100),
            _cifar(cifar.CIFAR100),
            partial(cifar.download, cifar.CIFAR100),
        ),
        Source(
            "gtzan",
            "1000 music clips of 30 s, 10 genres, as audio",
            "gtzan/genres/GENRE/*.wav (or .au), and the extra `audio`",
            "GTZAN has no official download any more; copies named genres.tar.gz or genres_original are shared widely. "
            "jazz.00054 is damaged in some: the documentation says how to leave it out.",
            gtzan.read,
            gtzan.find,
        ),
        Source(
            "gtzan_yamnet",
            "the same clips as YAMNet embeddings",
            "gtzan_yamnet.npz",
            f"Made by running YAMNet over the clips, 120 windows each, with a group for equal clips. {_ARRAYS}",
            _yamnet,
            _one_file("gtzan_yamnet.npz"),
        ),
        _pickles("thumos14_kinetics", "413 videos, TSN features (Kinetics), 20 actions", 4096),
        _pickles("thumos14_activitynet", "413 videos, TSN features (ActivityNet), 20 actions", 3072),
        Source(
            "thumos14_i3d",
            "386 videos, I3D features, 20 actions",
            "thumos14_i3d.npz",
            f"Made by running I3D over the videos. {_ARRAYS}",
            _i3d,
            _one_file("thumos14_i3d.npz"),
        ),
        Source(
            "images",
            "any folder of images",
            "FOLDER/CLASS/*.png (or .jpg, …), or FOLDER/{train,val,test}/CLASS/*",
            "Give the folder, relative to the data root, as data.folder, and data.size if sizes differ.",
            images.read,
            lambda root: root,
            asks_folder=True,
        ),
        Source(
            "features",
            "any feature sequences",
            "FILE.npz",
            f"Give the file, relative to the data root, as data.folder. {_ARRAYS}",
            features.read,
            lambda root: root,
            asks_folder=True,
        ),
    )
}
