"""Training one run: `train`, and the pieces of it that other engines use."""

from explicit_dropout.lab.training.loop import build, train
from explicit_dropout.lab.training.watching import Watch

__all__ = ["Watch", "build", "train"]
