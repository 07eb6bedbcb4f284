"""Few images, and the loss: does dropout's effect on the loss, without its dice, do what dropout at its places does?

    explicit-dropout sweep experiments/few_images_loss.py --workers 2 --threads 1
    explicit-dropout report experiments/few_images_loss.py

Cost: three seconds on one core for each of ten settings, ten seeds and two shares of wrong labels, and thirty for each
of five settings whose penalty is followed to the loss: half an hour on two cores. Data, model and all else are those of
few_images_why.py, the seeds are new; this file was committed before any of its runs. Which values of λ to try was found
in a trial of five runs on another seed, by validation accuracy.

Three things are of the very same inputs, those of values and of both feed-forward layers: `implicit_v+implicit_inputs`
is `nn.Dropout` there, `loss_v+loss` what it does to the loss to second order (`LossLevelDropout`), and
`explicit_v+explicit [inverted]` the exact mean of what it does at the outputs of these layers. Rates of the first are
chosen among the same values as those of the second, for which λ = 1. Beyond what a rate can say, λ multiplies the
variance 0.25 of the rate 0.2: λ = 12 and 40 are those that rates of 0.75 and 0.91 have.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import named, treatments

WHY = module_of(Path(__file__).with_name("few_images_why.py"))
SEEDS = range(30, 40)
SHARES = (0.0, 0.4)
RATES = (0.1, 0.3, 0.5)
NONE, SAME, DROPPED, VALUES = WHY.NONE, WHY.SAME, WHY.DROPPED, WHY.VALUES
INVERTED = named(VALUES, law="inverted")
STRONG = "loss_v+loss"
FOLLOWED = f"{STRONG} [p chosen]"

TREATMENTS = (
    *treatments(NONE, [0.0]),
    *WHY.at_rates(SAME, RATES),
    *(treatment for rate in RATES for treatment in treatments(STRONG, [1.0], rate=rate)),
    *treatments(STRONG, (12.0, 40.0)),
    *treatments(VALUES, (0.03, 0.1, 0.3), law="inverted"),
    *treatments(VALUES, (0.3, 1.0, 3.0)),
)
QUESTIONS = (
    Question(
        "Does dropout's effect on the loss, without its noise, do what dropout at the very same places does?",
        ((FOLLOWED, DROPPED), (DROPPED, NONE), (FOLLOWED, NONE)),
    ),
    Question(
        "Does a penalty that is followed to the loss beat those of the layers alone, and dropout?",
        tuple((STRONG, other) for other in (INVERTED, VALUES, DROPPED, NONE)),
    ),
)


def table(share: float) -> Experiment:
    noise = f", {100 * share:.0f} % label noise" if share else ""
    data, model, training = replace(WHY.FIRST.DATA, label_noise=share), WHY.FIRST.MODEL, WHY.FIRST.TRAINING
    return Experiment(
        name=f"few_images_loss_{100 * share:.0f}",
        title=f"300 handwritten digits, followed to the loss{noise}",
        runs=tuple(
            Run(replace(data, split=seed), model, treatment, training, seed)
            for seed in SEEDS
            for treatment in TREATMENTS
        ),
        baseline=NONE,
        pooled={name: tuple(named(row, rate=p) for p in RATES) for name, row in ((DROPPED, SAME), (FOLLOWED, STRONG))},
        questions=QUESTIONS,
        notes=(
            f"{SAME} is nn.Dropout at the inputs that all penalties here are of; {STRONG} is what that does to the "
            "loss, to second order in its noise, with λ = 1 where p is chosen and p = 0.2 where λ is.",
            "Rows, values of λ and p, and the questions were committed before its runs. λ and p are chosen on the "
            "validation images of these ten seeds; which values to try was found on another seed.",
        ),
    )


def experiment() -> list[Experiment]:
    return [table(share) for share in SHARES]
