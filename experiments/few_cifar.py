"""Few photographs: a small ViT on 1000 images of CIFAR-10 without augmentation, clean and with 40 % wrong labels.

    explicit-dropout sweep experiments/few_cifar.py
    explicit-dropout report experiments/few_cifar.py

Cost: some twenty seconds on one core for each of 21 settings, five seeds and two shares of wrong labels. No table of
the paper has these data: it asks whether what few_images.py finds on digits holds for other images. Every seed draws
its own images and wrong labels, the same for all rows. λ, decay and the rate of `nn.Dropout` are chosen on 15 000
validation images. λ goes by powers of ten up to 1, since one trial of another model (four times the tokens, one seed)
was hurt by 0.1 and 1. This file was committed before any of its runs.
"""

from dataclasses import replace

from explicit_dropout.lab.config import Data, Model, Run, Training
from explicit_dropout.lab.experiment import Experiment, Question
from explicit_dropout.lab.rows import BASELINE, named, treatments

SEEDS = range(5)
SHARES = (0.0, 0.4)
RATES = (0.1, 0.2, 0.5)
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)
DATA = Data("cifar10", examples=1000)
MODEL = Model(layers=3, width=96, heads=6, hidden=192, patch=8, read="mean")
TRAINING = Training(epochs=40, batch=100, learning_rate=1e-3, weight_decay=1e-2, validate_every=10)
VALUES, DROPOUT = "explicit_v+explicit", f"{BASELINE} [p chosen]"
EXACT = named(VALUES, law="inverted")

TREATMENTS = (
    *treatments("none+none", [0.0]),
    *(treatment for rate in RATES for treatment in treatments(BASELINE, [0.0], rate=rate)),
    *treatments("drop_key+implicit", [0.0]),
    *treatments(VALUES, STRENGTHS),
    *treatments(VALUES, STRENGTHS, law="inverted"),
    *treatments("none+activation_l2", STRENGTHS),
    *treatments("none+weight_decay", (0.03, 0.1, 0.3, 1.0)),
)
QUESTIONS = (
    Question(
        "Does explicit dropout match or beat stochastic dropout?",
        ((VALUES, DROPOUT), (VALUES, "drop_key+implicit"), (EXACT, DROPOUT)),
    ),
    Question(
        "Does stochastic dropout itself help, against no regulariser at all?",
        tuple((row, "none+none") for row in (DROPOUT, "drop_key+implicit")),
    ),
    Question("Do exact laws beat the paper's approximation?", ((EXACT, VALUES),)),
    Question(
        "Does it beat plain activation L2, and no regulariser at all?",
        tuple((VALUES, other) for other in ("none+activation_l2", "none+weight_decay", "none+none")),
    ),
)


def experiment() -> list[Experiment]:
    return [
        Experiment(
            name=f"few_cifar_{100 * share:.0f}",
            title="1000 images of CIFAR-10" + (f" with {100 * share:.0f} % label noise" if share else ""),
            runs=tuple(
                Run(replace(DATA, label_noise=share, split=seed), MODEL, treatment, TRAINING, seed)
                for seed in SEEDS
                for treatment in TREATMENTS
            ),
            baseline=DROPOUT,
            pooled={DROPOUT: tuple(named(BASELINE, rate=rate) for rate in RATES)},
            questions=QUESTIONS,
            notes=(
                "A small ViT (3 layers, width 96, 16 patches of 8×8 pixels), no augmentation; each seed has 1000 "
                "images of its own.",
                *(
                    [f"{100 * share:.0f} % of the training labels are replaced by a class drawn at random."]
                    if share
                    else []
                ),
                "λ, decay and the rate of nn.Dropout are chosen on 15 000 validation images for each row.",
            ),
        )
        for share in SHARES
    ]
