"""Few images, twins, and time: do twins still help after 200 epochs, where simple penalties did more than the paper's?

    explicit-dropout sweep experiments/few_images_twins_long.py --engine vectorised
    explicit-dropout report experiments/few_images_twins_long.py

Cost: eight to fifteen seconds on one core for each of 20 settings, ten seeds and two shares of wrong labels; 50 minutes
on two cores. Data, model and all else are those of few_images_twins.py, whose results were known; the seeds are new,
and this file was committed before any of its runs. In few_images_why.py activation L2 and weight decay did best at 200
epochs, each at the largest value that was tried: here they may go three times as far.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import named, treatments

SHORT = module_of(Path(__file__).with_name("few_images_twins.py"))
WHY = SHORT.WHY
SEEDS = range(50, 60)
NONE, L2, DECAY, VALUES = WHY.NONE, WHY.L2, WHY.DECAY, WHY.VALUES
WHOLE, SAME_RATES, RATES = SHORT.WHOLE, SHORT.SAME_RATES, SHORT.RATES
TWINS, DROPOUT = named(WHOLE, twins=True), SHORT.chosen(WHOLE)

TREATMENTS = (
    *treatments(NONE, [0.0]),
    *WHY.at_rates(WHOLE, RATES),
    *treatments(WHOLE, (0.3, 1.0, 3.0, 10.0), twins=True),
    *(treatment for rate in RATES for treatment in treatments(WHOLE, [1.0], twins=True, rate=rate)),
    *treatments(VALUES, (0.1, 1.0, 3.0)),
    *treatments(L2, (0.3, 1.0, 3.0)),
    *treatments(DECAY, (1.0, 3.0, 10.0)),
)
QUESTIONS = (
    Question(
        "Do twins do more than the dropout that they stand for?",
        ((TWINS, DROPOUT), (SAME_RATES, DROPOUT)),
    ),
    Question("Do twins help, and the dropout that they stand for?", ((TWINS, NONE), (DROPOUT, NONE))),
    Question(
        "Are twins of a model's own dropout better than the paper's penalty, or than plain activation L2?",
        ((TWINS, VALUES), (TWINS, L2)),
    ),
    Question("Are twins of a model's own dropout better than weight decay?", ((TWINS, DECAY),)),
)


def table(share: float) -> Experiment:
    short = SHORT.table(share)
    return Experiment(
        name=f"few_images_twins_long_{100 * share:.0f}",
        title=short.title.replace("twins", "twins, 200 epochs"),
        runs=tuple(
            Run(replace(WHY.FIRST.DATA, label_noise=share, split=seed), WHY.FIRST.MODEL, treatment, WHY.LONG, seed)
            for seed in SEEDS
            for treatment in TREATMENTS
        ),
        baseline=NONE,
        pooled={row: short.pooled[row] for row in (DROPOUT, SAME_RATES)},
        questions=QUESTIONS,
        notes=(
            short.notes[0],
            "Rows, values of λ and p, and the questions were committed before its runs. λ and p are chosen on the "
            "validation images of these ten seeds.",
        ),
    )


def experiment() -> list[Experiment]:
    return [table(share) for share in WHY.SHARES]
