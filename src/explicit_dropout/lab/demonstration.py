"""The demonstration: a small ViT on scikit-learn's handwritten digits, few enough of them to overfit.

    explicit-dropout demo            # or: make demo

Cost: 45 trainings of 50 epochs on 300 images, a minute or two on two cores. No table of the paper has these data.
"""

from __future__ import annotations

from explicit_dropout.lab.config import Data, Model, Run, Training
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.rows import BASELINE, treatments

SEEDS = range(5)
STRENGTHS = (0.3, 1.0, 3.0)
DATA = Data("digits", examples=300)
MODEL = Model(layers=2, width=48, heads=4, hidden=96, patch=2, read="mean")
TRAINING = Training(epochs=50, batch=60, learning_rate=2e-3, weight_decay=1e-2, validate_every=5)

TREATMENTS = (
    *treatments("none+none", STRENGTHS),
    *treatments("none+implicit", STRENGTHS),
    *treatments("drop_key+implicit", STRENGTHS),
    *treatments("explicit_v+explicit", STRENGTHS),
    *treatments("explicit_v+explicit", STRENGTHS, law="inverted"),
)


def experiment() -> Experiment:
    return Experiment(
        name="digits",
        title="Handwritten digits: a small ViT on 300 images",
        runs=tuple(Run(DATA, MODEL, treatment, TRAINING, seed) for seed in SEEDS for treatment in TREATMENTS),
        baseline=BASELINE,
        notes=(
            "300 training images of 8×8 pixels, cut into 16 patches; the rest validates and tests.",
            "λ is chosen on validation images for each row; rows without a penalty have nothing to choose.",
        ),
    )
