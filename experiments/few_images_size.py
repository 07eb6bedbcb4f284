"""Few images, and how few: what dropout, its twins and simpler penalties are worth on 120, 300, 600 and 960 digits.

    explicit-dropout sweep experiments/few_images_size.py --engine vectorised
    explicit-dropout report experiments/few_images_size.py

Cost: ten to fifteen seconds on one core for each of 30 settings and ten seeds at each size; 90 minutes on two cores.
A regulariser replaces data that are missing, so its worth should fall as data are added: this says where it ends. Every
training takes about a thousand steps, whatever the number of images, since how long one trains changes which
regulariser is best (few_images_why.py). Rows, seeds, splits and the runs with 300 images are those of
few_images_twins_long.py with clean labels, whose results were known; this file was committed before any other of its
runs. Validation and test images are the same at every size.

In those runs most rows chose λ or p at an end of the values tried. WIDER goes on beyond these ends; it was committed
before any of its runs, when all others were known.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import named, treatments

LONG = module_of(Path(__file__).with_name("few_images_twins_long.py"))
EPOCHS = {120: 500, 300: 200, 600: 100, 960: 62}
"""Of 60 images a step, incomplete batches left out."""
NONE, L2, DECAY, VALUES, TWINS, DROPOUT = LONG.NONE, LONG.L2, LONG.DECAY, LONG.VALUES, LONG.TWINS, LONG.DROPOUT
WHOLE = LONG.WHOLE
WIDER_RATES = {DROPOUT: named(WHOLE, rate=0.7), LONG.SAME_RATES: named(WHOLE, twins=True, rate=0.05)}
WIDER = (
    *treatments(WHOLE, [0.0], rate=0.7),
    *treatments(WHOLE, [1.0], twins=True, rate=0.05),
    *treatments(WHOLE, (0.03, 0.1), twins=True),
    *treatments(VALUES, (0.01, 0.03)),
    *treatments(L2, (0.03, 0.1)),
    *treatments(DECAY, (0.1, 0.3)),
)

QUESTIONS = (
    Question("What is a regulariser worth here?", tuple((row, NONE) for row in (DROPOUT, TWINS, VALUES, L2, DECAY))),
    Question("Does explicit dropout match or beat stochastic dropout?", ((VALUES, DROPOUT), (TWINS, DROPOUT))),
    Question("Is explicit dropout better than weight decay?", ((VALUES, DECAY), (TWINS, DECAY))),
)


def table(images: int) -> Experiment:
    known = LONG.table(0.0)
    epochs = EPOCHS[images]
    plain = [run for run in known.runs if run.row == NONE]
    return Experiment(
        name=f"few_images_size_{images}",
        title=f"{images} handwritten digits, a thousand steps",
        runs=tuple(
            replace(
                run,
                data=replace(run.data, examples=images),
                training=replace(run.training, epochs=epochs, validate_every=epochs // 20),
            )
            for run in (*known.runs, *(replace(run, treatment=wider) for run in plain for wider in WIDER))
        ),
        baseline=NONE,
        pooled={row: (*members, WIDER_RATES[row]) for row, members in known.pooled.items()},
        questions=QUESTIONS,
        notes=(
            known.notes[0],
            "λ and p are chosen on the validation images of these ten seeds. Rows, questions and the values of λ and p "
            "tried first were committed before their runs. Most rows chose at an end of these, so values beyond it "
            "were added, and committed before their runs: rates 0.7 of dropout and 0.05 of twins, λ = 0.03 and 0.1 of "
            "twins and activation L2, 0.01 and 0.03 of explicit dropout, 0.1 and 0.3 of weight decay.",
        ),
    )


def experiment() -> list[Experiment]:
    return [table(images) for images in EPOCHS]
