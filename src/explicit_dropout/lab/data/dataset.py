"""What a loader returns: a dataset of three splits that hand out batches by index, on whatever device they are on.

Storage stays as compact as the files (bytes for pixels and quantised features); a batch becomes float32 when it is
asked for. An index may have any shape: `split.batch(index)` of an index (m, b) is (m, b, …), for several models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Metric


@dataclass(frozen=True)
class Split(ABC):
    """Examples that can be asked for by number.

    Args:
        labels: class indices int64 (n,), or multi-hot float32 (n, classes) where an example may belong to several.
    """

    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    def to(self, device: torch.device | str) -> Self:
        """The same examples on a device."""
        moved = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return replace(self, **{name: value.to(device) for name, value in moved.items() if isinstance(value, Tensor)})

    @abstractmethod
    def inputs(self, index: Tensor) -> Tensor:
        """What a model sees: float32 (…, channels, height, width) or (…, tokens, features)."""

    def raw(self, index: Tensor) -> Tensor:  # noqa: ARG002
        """The stored bytes of images, uint8."""
        raise self._no_images()

    def normalise(self, pixels: Tensor) -> Tensor:  # noqa: ARG002
        """Bytes of images to the float32 that a model sees."""
        raise self._no_images()

    def _no_images(self) -> InputError:
        return InputError("data.augmentation", "none for data that are no images", type(self).__name__)

    def targets(self, index: Tensor) -> Tensor:
        return self.labels[index.to(self.device)]

    def batch(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the examples with these numbers."""
        index = index.to(self.device)
        return self.inputs(index), self.targets(index)


@dataclass(frozen=True)
class ImageSplit(Split):
    """Images as bytes (n, channels, height, width); augmentation belongs between `raw` and `normalise`."""

    pixels: Tensor
    mean: Tensor
    deviation: Tensor

    def raw(self, index: Tensor) -> Tensor:
        return self.pixels[index.to(self.device)]

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bytes to float32 of mean 0 and deviation 1 per channel, as measured on the training images."""
        return (pixels.to(torch.float32) - self.mean) / self.deviation

    def inputs(self, index: Tensor) -> Tensor:
        return self.normalise(self.raw(index))


@dataclass(frozen=True)
class SequenceSplit(Split):
    """One feature sequence (tokens, features) per example: stored value × scale + shift."""

    features: Tensor
    scale: Tensor
    shift: Tensor

    def inputs(self, index: Tensor) -> Tensor:
        return self.features[index.to(self.device)].to(torch.float32) * self.scale + self.shift


@dataclass(frozen=True)
class WindowSplit(Split):
    """Windows over long recordings that lie one after the other in `features` (steps, features): stored value × scale.

    Window i ends at step `ends[i]`, its example's own step, and never reaches back beyond `begins[i]`, where its
    recording begins: what would lie before is the first step again. Windows are gathered on the device, batch by batch.
    """

    features: Tensor
    scale: Tensor
    begins: Tensor
    ends: Tensor
    length: int

    def inputs(self, index: Tensor) -> Tensor:
        index = index.to(self.device)
        back = torch.arange(1 - self.length, 1, device=self.device)
        steps = torch.maximum(self.ends[index][..., None] + back, self.begins[index][..., None])
        return self.features[steps].to(torch.float32) * self.scale


@dataclass(frozen=True)
class Dataset:
    """Training, validation and test examples, and what they are.

    Args:
        classes: names of what a model tells apart, one per output.
        shape: of one input: (channels, height, width) or (tokens, features).
        fingerprint: SHA-256 of all examples and labels as they were read, whatever split or subset is asked for.
        division: SHA-256 of which example is in which part.
        metric: what results are reported in.
        sources: the files that were read, relative to the data root.
        background: the class that is trained on but not scored, if there is one.
        notes: what a reader of the results has to know, such as files that were left out.
        official: whether the content is the published one; None where no published checksum exists.
    """

    name: str
    classes: tuple[str, ...]
    train: Split
    validation: Split
    test: Split
    shape: tuple[int, ...]
    fingerprint: str
    division: str = ""
    metric: Metric = "accuracy"
    sources: tuple[str, ...] = ()
    background: int | None = None
    notes: tuple[str, ...] = ()
    official: bool | None = None

    def to(self, device: torch.device | str) -> Dataset:
        """The same dataset on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("train", "validation", "test")}
        return replace(self, **moved)

    @property
    def scored_classes(self) -> list[int]:
        """Numbers of the classes that enter the metric: all but the background."""
        return [index for index in range(len(self.classes)) if index != self.background]

    def scores(self, logits: Tensor) -> Tensor:
        """Model outputs (n, classes) to the probabilities that the metric ranks: softmax over all, the scored kept."""
        probabilities = torch.softmax(logits.to(torch.float32), dim=-1)
        return probabilities if self.background is None else probabilities[..., self.scored_classes]

    def positive(self, targets: Tensor) -> Tensor:
        """Multi-hot targets (n, classes) as what average precision is of: bool (n, scored classes)."""
        return targets[:, self.scored_classes] > 0
