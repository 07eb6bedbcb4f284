"""The batches of an epoch, on the device, augmented in large chunks: few kernels, and the same for every engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from explicit_dropout.errors import InputError
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.data import ImageSplit, Split
from explicit_dropout.lab.data.augment import augment
from explicit_dropout.lab.training.randomness import generator

CHUNK = 8192
"""Examples that are augmented at once: enough to keep a GPU busy, little enough to fit."""


def steps_per_epoch(run: Run, split: Split) -> int:
    """Whole batches only: an incomplete one at the end is left out (its examples come in other epochs)."""
    if run.training.batch > len(split):
        raise InputError("training.batch", f"at most {len(split)}, the training examples at hand", run.training.batch)
    return len(split) // run.training.batch


def batches(run: Run, split: Split, epoch: int, *, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of every step of an epoch, in the order that the seed gives.

    Of several processes each gets its share of every batch.
    """
    steps, size, device = steps_per_epoch(run, split), run.training.batch, split.device
    order = torch.randperm(len(split), generator=generator(run.seed, epoch, "order"))[: steps * size]
    share = order.view(steps, size)[:, rank::ranks].to(device)
    if run.data.augmentation == "none":
        for index in share:
            yield split.batch(index)
        return
    if not isinstance(split, ImageSplit):
        raise InputError("data.augmentation", f"none: {run.data.name} has no images", repr(run.data.augmentation))
    random = generator(run.seed, epoch, "augment", device, rank)
    together = max(CHUNK // share.shape[1], 1)
    for chunk in torch.split(share, together):
        flat = chunk.flatten()
        images = augment(split.raw(flat), run.data.augmentation, random)
        inputs = torch.split(split.normalise(images), share.shape[1])
        yield from zip(inputs, torch.split(split.targets(flat), share.shape[1]), strict=True)
