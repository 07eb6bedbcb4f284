"""Few images, and how few: what dropout, its twins and simpler penalties are worth on 120, 300, 600 and 960 digits.

    explicit-dropout sweep experiments/few_images_size.py --engine vectorised
    explicit-dropout report experiments/few_images_size.py

Cost: ten to fifteen seconds on one core for each of 20 settings and ten seeds at each size; an hour on two cores.
A regulariser replaces data that are missing, so its worth should fall as data are added: this says where it ends. Every
training takes about a thousand steps, whatever the number of images, since how long one trains changes which
regulariser is best (few_images_why.py). Rows, seeds, splits and the runs with 300 images are those of
few_images_twins_long.py with clean labels, whose results were known; this file was committed before any other of its
runs. Validation and test images are the same at every size.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.experiment import Experiment, Question, module_of

LONG = module_of(Path(__file__).with_name("few_images_twins_long.py"))
EPOCHS = {120: 500, 300: 200, 600: 100, 960: 62}
"""Of 60 images a step, incomplete batches left out."""
NONE, L2, DECAY, VALUES, TWINS, DROPOUT = LONG.NONE, LONG.L2, LONG.DECAY, LONG.VALUES, LONG.TWINS, LONG.DROPOUT

QUESTIONS = (
    Question("What is a regulariser worth here?", tuple((row, NONE) for row in (DROPOUT, TWINS, VALUES, L2, DECAY))),
    Question("Does explicit dropout match or beat stochastic dropout?", ((VALUES, DROPOUT), (TWINS, DROPOUT))),
    Question("Is explicit dropout better than weight decay?", ((VALUES, DECAY), (TWINS, DECAY))),
)


def table(images: int) -> Experiment:
    known = LONG.table(0.0)
    epochs = EPOCHS[images]
    return Experiment(
        name=f"few_images_size_{images}",
        title=f"{images} handwritten digits, a thousand steps",
        runs=tuple(
            replace(
                run,
                data=replace(run.data, examples=images),
                training=replace(run.training, epochs=epochs, validate_every=epochs // 20),
            )
            for run in known.runs
        ),
        baseline=NONE,
        pooled=known.pooled,
        questions=QUESTIONS,
        notes=known.notes,
    )


def experiment() -> list[Experiment]:
    return [table(images) for images in EPOCHS]
