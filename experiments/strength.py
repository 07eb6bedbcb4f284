"""What λ means on CIFAR-10: where penalties begin to act, and where training collapses. Validation images only.

    explicit-dropout sweep experiments/strength.py --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/strength.py

Cost: 14 runs of 15 epochs, ten to twenty seconds each on an H200, with Table 1's recipe but for its length; and with
the whole of it half a minute for each of six, beside three that Table 1 has.

Images have 65 tokens each, so a sum over tokens at λ is a mean over tokens at 65 λ: both reductions are one axis. The
paper's λ, 1e-4 to 5e-3, are 0.0065 to 0.325 of that axis as sums, and end at 0.005 as means.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, module_of
from explicit_dropout.lab.rows import treatments

TABLE1 = module_of(Path(__file__).with_name("table1.py"))
EPOCHS = 15
SUMS, MEANS = (1e-3, 1e-4, 5e-3), (1e-3,)
LONG_MEANS = (1e-3, 5e-3, 2e-2, 1e-1)
ROWS = ("explicit_v+explicit", "explicit_q+explicit")
TREATMENTS = (
    *treatments("none+none", [0.0]),
    *treatments("none+implicit", [0.0]),
    *(t for row in ROWS for t in treatments(row, SUMS, reduction="sample")),
    *treatments("explicit_v+explicit", MEANS),
    *treatments("none+explicit", (1e-3,), reduction="sample"),
    *treatments("arora_q+explicit", (1e-3, 5e-3), reduction="sample"),
    *treatments("explicit_k+explicit", (1e-3,), reduction="sample"),  # explicit_q, but for the biases
    *treatments("explicit_v+explicit", (1e-3,), reduction="sample", law="inverted"),
)


def experiment() -> list[Experiment]:
    return [short(), long()]


def long() -> Experiment:
    """Whether a penalty helps once training is long enough to fit the training images."""
    made = (
        *treatments("none+none", [0.0]),
        *(t for row in ROWS for t in treatments(row, LONG_MEANS, reduction=TABLE1.REDUCTION)),
    )
    return Experiment(
        name="strength_long",
        title=f"CIFAR-10, {TABLE1.TRAINING.epochs} epochs: validation accuracy over λ",
        runs=tuple(Run(TABLE1.DATA, TABLE1.MODEL, treatment, TABLE1.TRAINING) for treatment in made),
        baseline="none+none",
        notes=(
            "One seed each. Validation images decide; what the test images say plays no part.",
            "Means over tokens. The largest λ of the paper's grid, as a sum over 65 tokens, is a mean at 0.325.",
            "From λ = 5e-3 on penalties cost validation accuracy in the long run as in the short. Against none+none "
            "values lose 0.8 points at 5e-3 and 6.9 at 0.1, queries 2.1 and 13.8. So Table 1 keeps 1e-3, the smallest "
            "of them, and the only one that costs values nothing; queries lose 0.9 points there, too, and may want "
            "less.",
        ),
    )


def short() -> Experiment:
    training = replace(TABLE1.TRAINING, epochs=EPOCHS)
    return Experiment(
        name="strength",
        title=f"CIFAR-10, {EPOCHS} epochs: validation accuracy over λ",
        runs=tuple(Run(TABLE1.DATA, TABLE1.MODEL, treatment, training) for treatment in TREATMENTS),
        baseline="none+none",
        notes=(
            "One seed each. Validation images decide; what the test images say plays no part.",
            "65 tokens: a sum over tokens at λ is a mean over tokens at 65 λ.",
            "As sums, penalties of queries, of keys and of Arora's form cost some 12 to 17 points from λ = 1e-3 on, "
            "those of values 7 to 11. At the smallest λ of the paper's grid they cost 2 points and half a point. The "
            "mean at λ = 1e-3, tried for values only, costs nothing.",
            "So sums over tokens explain the collapsed rows of the paper's tables only if λ was not chosen from the "
            "whole grid for them, or if their sums were larger still.",
        ),
    )
