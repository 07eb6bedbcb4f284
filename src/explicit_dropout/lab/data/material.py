"""From all examples of a dataset to its three splits: the one place where examples are chosen and labels replaced."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from explicit_dropout.errors import DataError, InputError
from explicit_dropout.lab import config
from explicit_dropout.lab.data.dataset import Dataset, ImageSplit, SequenceSplit, Split, WindowSplit
from explicit_dropout.lab.data.splits import Integers, choose, noisy

FREE, TRAIN, VALIDATION, TEST = range(4)
"""Where an example belongs by the dataset's own division; FREE ones are divided by the seed."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Images:
    """Bytes (n, channels, height, width)."""

    pixels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.pixels.shape[1:]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.pixels,)

    def statistics(self, rows: Integers) -> tuple[Tensor, Tensor]:
        """Mean and deviation of each channel (exact: from counts of the 256 values)."""
        values = np.arange(256)
        moments = []
        for channel in range(self.pixels.shape[1]):
            counts = np.zeros(256, dtype=np.int64)
            for start in range(0, len(rows), 4096):  # bincount widens to int64: keep that small
                counts += np.bincount(self.pixels[rows[start : start + 4096], channel].ravel(), minlength=256)
            mean = float((counts * values).sum() / counts.sum())
            variance = float((counts * (values - mean) ** 2).sum() / counts.sum())
            moments.append((mean, variance**0.5 or 1.0))
        made = torch.tensor(moments, dtype=torch.float32)[:, :, None, None]
        return made[:, 0], made[:, 1]

    def split(self, rows: Integers, labels: Tensor, statistics: tuple[Tensor, ...]) -> Split:
        return ImageSplit(labels, torch.from_numpy(self.pixels[rows]), *statistics)


@dataclass(frozen=True)
class Sequences:
    """Features (n, tokens, features), each stored value × scale.

    `standardise` makes every feature of the training examples mean 0 and deviation 1; otherwise they stay as they are.
    """

    features: Array
    scale: NDArray[np.float32]
    standardise: bool = False

    def __len__(self) -> int:
        return len(self.features)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.features.shape[1:]

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.features, self.scale)

    def statistics(self, rows: Integers) -> tuple[Tensor, Tensor]:
        scale = torch.from_numpy(self.scale)
        if not self.standardise:
            return scale, torch.zeros(1)
        chosen = self.features[rows].astype(np.float64) * self.scale
        mean, deviation = chosen.mean((0, 1)), chosen.std((0, 1))
        deviation[deviation == 0] = 1
        return (scale / torch.from_numpy(deviation)).float(), torch.from_numpy(-mean / deviation).float()

    def split(self, rows: Integers, labels: Tensor, statistics: tuple[Tensor, ...]) -> Split:
        return SequenceSplit(labels, torch.from_numpy(self.features[rows]), *statistics)


@dataclass(frozen=True)
class Windows:
    """Windows of `length` steps over recordings that lie one after the other in features (steps, features)."""

    features: Array
    scale: NDArray[np.float32]
    first: Integers
    last: Integers
    length: int = 64

    def __len__(self) -> int:
        return len(self.last)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length, self.features.shape[1])

    @property
    def arrays(self) -> tuple[Array, ...]:
        return (self.features, self.scale, self.first, self.last)

    def statistics(self, rows: Integers) -> tuple[Tensor, ...]:  # noqa: ARG002
        return (torch.from_numpy(self.scale),)

    def split(self, rows: Integers, labels: Tensor, statistics: tuple[Tensor, ...]) -> Split:
        first, last = self.first[rows], self.last[rows]
        depth = np.zeros(len(self.features) + 1, dtype=np.int64)
        np.add.at(depth, first, 1)
        np.add.at(depth, last + 1, -1)
        used = depth.cumsum()[:-1] > 0  # steps between the beginning of a recording and a window's end
        place = used.cumsum() - 1
        return WindowSplit(
            labels,
            torch.from_numpy(self.features[used]),
            statistics[0],
            torch.from_numpy(place[first]),
            torch.from_numpy(place[last]),
            self.length,
        )


@dataclass(frozen=True)
class Material:
    """All examples of a dataset, not yet divided.

    Args:
        labels: class indices int64 (n,), or bool (n, classes).
        groups: examples with the same number never part (duplicates, videos); None if each stands alone.
        roles: FREE, TRAIN, VALIDATION or TEST for each example; None if all are free.
        test_share: share of the examples that tests, where the dataset has no test examples of its own.
        validation_share: share of the rest that validates, where the dataset has no validation examples of its own.
        count_groups: shares are of groups, not of examples.
        published: the fingerprint of the published content, if that is known.
    """

    name: str
    classes: tuple[str, ...]
    content: Images | Sequences | Windows
    labels: NDArray[Any]
    groups: Integers | None = None
    roles: NDArray[np.int8] | None = None
    test_share: float = 0.2
    validation_share: float = 0.3
    count_groups: bool = False
    metric: config.Metric = "accuracy"
    background: int | None = None
    sources: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    published: str | None = None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the examples, labels and the fixed division."""
        described = [self.name, self.classes, *([a.dtype.str, a.shape] for a in self.content.arrays)]
        digest = hashlib.sha256(json.dumps(described).encode())
        for array in (*self.content.arrays, self.labels, *(() if self.roles is None else (self.roles,))):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def strata(self) -> Integers:
        """One class for each example; for windows the commonest action of their recording."""
        if self.labels.ndim == 1:
            return np.asarray(self.labels, dtype=np.int64)
        if self.groups is None:
            return np.asarray(np.argmax(self.labels, axis=1), dtype=np.int64)
        _, member = np.unique(self.groups, return_inverse=True)
        counts = np.zeros((member.max() + 1, self.labels.shape[1]))
        np.add.at(counts, member, self.labels)
        if self.background is not None:
            counts[:, self.background] = 0.5  # wins where there is no action at all
        return np.asarray(np.argmax(counts, axis=1)[member], dtype=np.int64)

    def divide(self, data: config.Data) -> Dataset:
        """The splits that the settings ask for."""
        train, validation, test = rows = self._rows(data)
        statistics = self.content.statistics(train)
        labels = torch.from_numpy(self.labels.astype(np.int64 if self.labels.ndim == 1 else np.float32))
        training_labels = self._noisy(labels[train], data)
        return Dataset(
            name=self.name,
            classes=self.classes,
            train=self.content.split(train, training_labels, statistics),
            validation=self.content.split(validation, labels[validation], statistics),
            test=self.content.split(test, labels[test], statistics),
            shape=tuple(self.content.shape),
            fingerprint=(fingerprint := self.fingerprint),
            division=_digest(rows),
            metric=self.metric,
            sources=self.sources,
            background=self.background,
            notes=self.notes,
            official=None if self.published is None else fingerprint == self.published,
        )

    def division(self, data: config.Data) -> str:
        """SHA-256 of which example is in which part under these settings."""
        return _digest(self._rows(data))

    def _rows(self, data: config.Data) -> tuple[Integers, Integers, Integers]:
        roles = np.full(len(self.content), FREE, dtype=np.int8) if self.roles is None else self.roles.copy()
        if not (roles == TEST).any():
            at_hand = (roles == FREE) | (roles == TRAIN)
            roles[self._chosen(at_hand, self.test_share, data.split, "test")] = TEST
        if not (roles == VALIDATION).any():
            share = self.validation_share if data.validation is None else data.validation
            roles[self._chosen((roles == FREE) | (roles == TRAIN), share, data.split, "validation")] = VALIDATION
        elif data.validation is not None:
            raise InputError(
                "data.validation", f"null: {self.name} has validation examples of its own", data.validation
            )
        roles[roles == FREE] = TRAIN
        found = [np.flatnonzero(roles == role) for role in (TRAIN, VALIDATION, TEST)]
        for rows, part in zip(found, ("training", "validation", "test"), strict=True):
            if not len(rows):
                where = ", ".join(self.sources) or self.name
                raise DataError(f"{where}: no {part} examples are left of {len(self.content)}; more are needed.")
        train = found[0] if data.examples is None else self._kept(found[0], data)
        return train, found[1], found[2]

    def _chosen(self, at_hand: NDArray[np.bool_], share: float, seed: int, purpose: str) -> Integers:
        rows = np.flatnonzero(at_hand)
        if not len(rows):
            return rows
        groups = self._groups[rows]
        total = round(share * (len(np.unique(groups)) if self.count_groups else len(rows)))
        mask = choose(self.strata[rows], groups, total, seed, purpose, count_groups=self.count_groups)
        return rows[mask]

    @property
    def _groups(self) -> Integers:
        return np.arange(len(self.content), dtype=np.int64) if self.groups is None else self.groups

    def _kept(self, rows: Integers, data: config.Data) -> Integers:
        if data.examples is None or data.examples > len(rows):
            raise InputError(
                "data.examples", f"at most {len(rows)}, the training examples of {self.name}", data.examples
            )
        alone = np.arange(len(rows), dtype=np.int64)
        return rows[choose(self.strata[rows], alone, data.examples, data.split, "examples")]

    def _noisy(self, labels: Tensor, data: config.Data) -> Tensor:
        if data.label_noise == 0:
            return labels
        replaced, drawn = noisy(labels.numpy(), len(self.classes), data.label_noise, data.split)
        chosen, new = torch.from_numpy(replaced), torch.from_numpy(drawn)
        if labels.ndim == 1:
            return torch.where(chosen, new, labels)
        return torch.where(
            chosen[:, None], torch.nn.functional.one_hot(new, len(self.classes)).to(labels.dtype), labels
        )


def _digest(rows: tuple[Integers, ...]) -> str:
    return hashlib.sha256(b"|".join(part.tobytes() for part in rows)).hexdigest()


def duplicates(examples: NDArray[Any]) -> Integers:
    """A number for each example, the same for those that are equal to the last bit."""
    seen: dict[bytes, int] = {}
    flat = np.ascontiguousarray(examples).reshape(len(examples), -1)
    return np.array([seen.setdefault(hashlib.sha256(row.data).digest(), len(seen)) for row in flat], dtype=np.int64)


def relative(path: Path, root: Path) -> str:
    """How a file is named in results: no machine's folders in it."""
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.name
