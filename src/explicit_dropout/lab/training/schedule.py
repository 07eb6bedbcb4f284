"""The learning rate at every step, as a pure function of the settings."""

from __future__ import annotations

import math

from explicit_dropout.lab.config import Training


def learning_rate(training: Training, step: int, steps_per_epoch: int) -> float:
    """The learning rate of the step of this number, counted from 0.

    A linear warm-up over `warm_up_epochs` comes first: step s of w has (s + 1)/w of the full rate. Then half a cosine
    wave falls towards `final_learning_rate`, which it would reach one step after the last; or the rate is divided by
    ten after every epoch; or it stays.
    """
    warm_up = round(training.warm_up_epochs * steps_per_epoch)
    if step < warm_up:
        return training.learning_rate * (step + 1) / warm_up
    match training.schedule:
        case "constant":
            return training.learning_rate
        case "step":
            return training.learning_rate * 0.1 ** (step // steps_per_epoch)
        case "cosine":
            last = training.epochs * steps_per_epoch - warm_up
            progress = (step - warm_up) / max(last, 1)
            wave = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
            return training.final_learning_rate + (training.learning_rate - training.final_learning_rate) * wave
