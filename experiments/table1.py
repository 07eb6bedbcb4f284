"""Table 1: CIFAR-10, the paper's ViT (6.27 million parameters), all rows.

    explicit-dropout sweep experiments/table1.py --only none+implicit --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/table1.py

Cost: one and a half minutes on an H200 for each run; the whole grid is 16 cells for each of 21 rows with a strength, 4
for each of the others, and 5 seeds. The recipe was chosen on validation images for `none+implicit` alone
(experiments/recipe.py), with a float32 residual stream; that the lowered one does as well is for its last run to show.
The paper's numbers: `none+implicit` 85.14 ± 0.63, `explicit_v+explicit` 86.38 ± 0.44.
"""

from dataclasses import replace
from typing import Literal

from explicit_dropout.lab.config import Data, LawName, Model, Run, Training
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.rows import BASELINE, COINCIDENCE, paper_numbers, paper_treatments

SEEDS = range(5)
STRENGTHS = LEARNING_RATES = (1e-3, 5e-3, 1e-4, 5e-4)
REDUCTION: Literal["token", "sample"] = "token"
"""How J is averaged, for all tables on CIFAR: chosen on validation images by experiments/strength.py."""

STRENGTH, LEARNING_RATE = 1e-3, 1e-3
LAW: LawName = "paper"
"""λ, learning rate and law where an experiment does not vary them: rates.py, label_noise.py, noise.py."""

DATA = Data("cifar10", augmentation="autoaugment")
MODEL = Model(residual="lowered")
TRAINING = Training(
    epochs=150,
    batch=512,
    optimiser="adam",
    weight_decay=5e-5,
    warm_up_epochs=5,
    final_learning_rate=1e-5,
    label_smoothing=0.1,
    precision="bfloat16",
    validate_every=5,
)


def training() -> Training:
    """The recipe at the frozen learning rate."""
    return replace(TRAINING, learning_rate=LEARNING_RATE)


def experiment() -> Experiment:
    return Experiment(
        name="table1",
        title="CIFAR-10, test accuracy",
        runs=tuple(
            Run(DATA, MODEL, treatment, replace(TRAINING, learning_rate=rate), seed)
            for seed in SEEDS
            for treatment in paper_treatments(STRENGTHS, reduction=REDUCTION)
            for rate in LEARNING_RATES
        ),
        baseline=BASELINE,
        paper=paper_numbers("table1", reduction=REDUCTION),
        notes=(
            COINCIDENCE,
            "35 000 training, 15 000 validation and 10 000 test images. λ and learning rate are chosen on validation "
            "images for each row.",
            f"The paper leaves epochs, batch size, augmentation and the reduction of J open; here: {TRAINING.epochs} "
            f"epochs, batch {TRAINING.batch}, AutoAugment, penalties as means over {REDUCTION}s, heads one by one.",
        ),
    )
