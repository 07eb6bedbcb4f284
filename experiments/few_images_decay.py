"""Few images, on top of weight decay: where that is chosen too, is anything left for dropout or its penalties to do?

    explicit-dropout sweep experiments/few_images_decay.py --engine vectorised
    explicit-dropout report experiments/few_images_decay.py

Cost: ten to fifteen seconds on one core for each of 21 settings, ten seeds and two shares of wrong labels; an hour on
two cores. In few_images_twins_long.py weight decay did best, alone. Who trains a Transformer has it anyway, so here
every row has it, at a value that validation chooses together with λ or p. Data, model and 200 epochs are those of that
study, the seeds are new, and this file was committed before any of its runs.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run, Treatment
from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import named, treatments

LONG = module_of(Path(__file__).with_name("few_images_twins_long.py"))
SEEDS = range(60, 70)
NONE, VALUES, TWINS, DROPOUT = LONG.NONE, LONG.VALUES, LONG.TWINS, LONG.DROPOUT
RATES, STRENGTHS = (0.1, 0.3, 0.5), (0.03, 0.3, 3.0)
DECAYS, ALONE = (1.0, 3.0), (1.0, 3.0, 10.0)

TREATMENTS: tuple[tuple[Treatment, tuple[float, ...]], ...] = (
    *((treatment, ALONE) for treatment in treatments(NONE, [0.0])),
    *((treatment, DECAYS) for treatment in LONG.WHY.at_rates(LONG.WHOLE, RATES)),
    *((treatment, DECAYS) for treatment in treatments(LONG.WHOLE, STRENGTHS, twins=True)),
    *((treatment, DECAYS) for treatment in treatments(VALUES, STRENGTHS)),
)
"""Each with the values of weight decay that it is tried with."""
QUESTIONS = (
    Question(
        "With weight decay, does dropout help, or do its twins, or the paper's penalty?",
        tuple((row, NONE) for row in (DROPOUT, TWINS, VALUES)),
    ),
    Question("With weight decay, do twins do more than the dropout that they stand for?", ((TWINS, DROPOUT),)),
)


def table(share: float) -> Experiment:
    long = LONG.table(share)
    noise = f", {100 * share:.0f} % label noise" if share else ""
    data, model, training = long.runs[0].data, long.runs[0].model, long.runs[0].training
    return Experiment(
        name=f"few_images_decay_{100 * share:.0f}",
        title=f"300 handwritten digits, on top of weight decay{noise}",
        runs=tuple(
            Run(replace(data, split=seed), model, treatment, replace(training, weight_decay=decay), seed)
            for seed in SEEDS
            for treatment, decays in TREATMENTS
            for decay in decays
        ),
        baseline=NONE,
        pooled={DROPOUT: tuple(named(LONG.WHOLE, rate=p) for p in RATES)},
        questions=QUESTIONS,
        notes=(
            long.notes[0],
            f"Every row has weight decay, of {', '.join(f'{decay:g}' for decay in DECAYS)}, or alone "
            f"{', '.join(f'{decay:g}' for decay in ALONE)}: {NONE} is weight decay and nothing else.",
            "Rows, values and the questions were committed before its runs. Weight decay, λ and p are chosen together, "
            "on the validation images of these ten seeds.",
        ),
    )


def experiment() -> list[Experiment]:
    return [table(share) for share in LONG.WHY.SHARES]
