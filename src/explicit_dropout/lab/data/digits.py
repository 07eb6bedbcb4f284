"""scikit-learn's digits: 1797 real 8 × 8 images of handwritten digits that come with the package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from explicit_dropout.errors import MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data.material import Images, Material, duplicates


def read(data: config.Data, root: Path) -> Material:  # noqa: ARG001
    """Values 0 … 16 become bytes 0 … 255, so that augmentation means the same as on other images."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingDataError(
            "digits come with scikit-learn, which is not installed:  pip install scikit-learn"
        ) from error
    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(np.asarray(images) * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Material(
        name="digits",
        classes=tuple("0123456789"),
        content=Images(pixels),
        labels=np.asarray(labels, dtype=np.int64),
        groups=duplicates(pixels),
        published=PUBLISHED,
    )


PUBLISHED = "049ce91572cfb04efd974e593f74042c7bcf3574bbbdc389828da56317315828"
"""The fingerprint of the digits of scikit-learn 1.9."""
