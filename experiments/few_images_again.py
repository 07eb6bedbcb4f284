"""Few images once more: what few_images.py found, put to ten fresh seeds, with rates chosen, too.

    explicit-dropout sweep experiments/few_images_again.py --engine vectorised
    explicit-dropout report experiments/few_images_again.py

Cost: two or three seconds on one core for each of 37 settings, ten seeds and three shares of wrong labels. Data, model,
training and the values of λ are those of few_images.py; this file was committed before any of its runs. The rates of
`nn.Dropout` and DropKey are chosen on validation images from as many values as explicit dropout has of λ, and attended
values and queries have a row.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import BASELINE, EXACT, named, treatments

FIRST = module_of(Path(__file__).with_name("few_images.py"))
SEEDS = range(10, 20)
RATES = (0.1, 0.2, 0.3, 0.5)
DROPOUT, DROP_KEY = f"{BASELINE} [p chosen]", "drop_key+implicit [p chosen]"
VALUES, ATTENDED, QUERIES = "explicit_v+explicit", "explicit_av+explicit", "explicit_q+explicit"
SCORE_STRENGTHS = (0.01, *FIRST.EXACT_STRENGTHS[:-1])

TREATMENTS = (
    *treatments("none+none", [0.0]),
    *(t for row in (BASELINE, "drop_key+implicit") for rate in RATES for t in treatments(row, [0.0], rate=rate)),
    *treatments(VALUES, FIRST.STRENGTHS),
    *(t for law in EXACT for t in treatments(VALUES, FIRST.EXACT_STRENGTHS, law=law)),
    *treatments(ATTENDED, FIRST.STRENGTHS),
    *treatments(QUERIES, SCORE_STRENGTHS),
    *treatments("none+activation_l2", FIRST.EXACT_STRENGTHS),
    *treatments("none+weight_decay", FIRST.DECAYS),
)
QUESTIONS = (
    Question(
        "Does explicit dropout match or beat stochastic dropout?",
        ((VALUES, DROPOUT), (VALUES, DROP_KEY), (ATTENDED, DROPOUT), (QUERIES, DROPOUT)),
    ),
    Question(
        "Does stochastic dropout itself help, against no regulariser at all?",
        tuple((row, "none+none") for row in (DROPOUT, DROP_KEY)),
    ),
    Question("Do exact laws beat the paper's approximation?", tuple((named(VALUES, law=law), VALUES) for law in EXACT)),
    Question(
        "Does it beat plain activation L2, and no regulariser at all?",
        tuple((VALUES, other) for other in ("none+activation_l2", "none+weight_decay", "none+none")),
    ),
)


def experiment() -> list[Experiment]:
    return [
        Experiment(
            name=f"few_images_again_{100 * share:.0f}",
            title="300 handwritten digits, fresh seeds" + (f", {100 * share:.0f} % label noise" if share else ""),
            runs=tuple(
                Run(replace(FIRST.DATA, label_noise=share, split=seed), FIRST.MODEL, treatment, FIRST.TRAINING, seed)
                for seed in SEEDS
                for treatment in TREATMENTS
            ),
            baseline=DROPOUT,
            pooled={
                DROPOUT: tuple(named(BASELINE, rate=rate) for rate in RATES),
                DROP_KEY: tuple(named("drop_key+implicit", rate=rate) for rate in RATES),
            },
            questions=QUESTIONS,
            notes=(
                "A confirmation on fresh seeds, splits and wrong labels: rows and values of λ were committed before "
                "its runs.",
                f"λ is chosen on validation images for each row, and so is the rate of stochastic dropout, of "
                f"{', '.join(f'{rate:g}' for rate in RATES)}. Penalties have p = 0.2.",
            ),
        )
        for share in FIRST.SHARES
    ]
