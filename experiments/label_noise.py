"""Label noise: CIFAR-10 with 20 and 40 % of the training labels drawn at random, four rows.

    explicit-dropout sweep experiments/label_noise.py --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/label_noise.py

Cost: half a minute on an H200 for each of two shares, four rows (that of explicit dropout at three λ) and 5 seeds.
Validation and test labels are as they were. Without noise the rows are Table 1's, at the same learning rate. Noise may
call for a stronger penalty than Table 1's, so λ is chosen on validation images here.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import BASELINE, named, treatments

TABLE1 = module_of(Path(__file__).with_name("table1.py"))
SHARES = (0.4, 0.2)
STRENGTHS = (TABLE1.STRENGTH, 1e-2, 1e-1)
EXPLICIT = named("explicit_v+explicit", law=TABLE1.LAW, reduction=TABLE1.REDUCTION)
ROWS = ("none+none", BASELINE, "explicit_v+explicit", "drop_key+implicit")


def experiment() -> list[Experiment]:
    made = [
        treatment
        for row in ROWS
        for treatment in treatments(row, STRENGTHS, law=TABLE1.LAW, reduction=TABLE1.REDUCTION)
    ]
    return [
        Experiment(
            name=f"label_noise_{100 * share:.0f}",
            title=f"CIFAR-10 with {100 * share:.0f} % label noise, test accuracy",
            runs=TABLE1.runs(made, replace(TABLE1.DATA, label_noise=share)),
            baseline=BASELINE,
            questions=(
                Question(
                    "Does it help against label noise?",
                    tuple((EXPLICIT, other) for other in (BASELINE, "none+none", "drop_key+implicit")),
                ),
            ),
            notes=(
                f"{100 * share:.0f} % of the training labels are replaced by a class drawn at random, which may be the "
                "right one; validation and test labels are clean.",
                f"Learning rate {TABLE1.LEARNING_RATE:g} throughout; λ of explicit dropout is the best of "
                f"{', '.join(f'{strength:g}' for strength in STRENGTHS)} on validation images.",
            ),
        )
        for share in SHARES
    ]
