"""Datasets: read from their official files, divided by a seed, handed out as batches on the device."""

from explicit_dropout.lab.data.catalogue import SOURCES, Source, data_root, examples, load, missing, source
from explicit_dropout.lab.data.dataset import Dataset, ImageSplit, SequenceSplit, Split, WindowSplit

__all__ = [
    "SOURCES",
    "Dataset",
    "ImageSplit",
    "SequenceSplit",
    "Source",
    "Split",
    "WindowSplit",
    "data_root",
    "examples",
    "load",
    "missing",
    "source",
]
