"""Few images, and why: which part of the penalty helps there, whether dropout at its places does, and for how long.

    explicit-dropout sweep experiments/few_images_why.py --engine vectorised
    explicit-dropout report experiments/few_images_why.py

Cost: two or three seconds on one core for each of 35 settings, ten seeds and two shares of wrong labels, and four times
that for each of 16 that are trained for 200 epochs instead of 50. Data, model and all else are those of few_images.py,
the seeds are new; this file was committed before any of its runs. `implicit_v+implicit_inputs` is `nn.Dropout` on the
inputs of values and of both feed-forward layers, the very places that the penalties of `explicit_v+explicit` are of;
[inverted] is its exact counterpart. Values of λ and p reach further than before, so that fewer are chosen at an end.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run, Training, Treatment
from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import BASELINE, named, treatments

FIRST = module_of(Path(__file__).with_name("few_images.py"))
SEEDS = range(20, 30)
SHARES = (0.0, 0.4)
LONG = replace(FIRST.TRAINING, epochs=200, validate_every=10)
NONE, L2, DECAY, VALUES, SAME = (
    "none+none", "none+activation_l2", "none+weight_decay", "explicit_v+explicit", "implicit_v+implicit_inputs"
)  # fmt: skip
DROPPED, DROPOUT = f"{SAME} [p chosen]", f"{BASELINE} [p chosen]"
INVERTED = named(VALUES, law="inverted")
BERNOULLI, HALF = named(VALUES, law="bernoulli"), named(VALUES, law="bernoulli", rate=0.5)


def at_rates(row: str, rates: tuple[float, ...]) -> tuple[Treatment, ...]:
    return tuple(treatment for rate in rates for treatment in treatments(row, [0.0], rate=rate))


SHORT_TREATMENTS = (
    *treatments(NONE, [0.0]),
    *at_rates(BASELINE, (0.1, 0.3, 0.5, 0.7)),
    *at_rates(SAME, (0.05, 0.1, 0.2, 0.3, 0.5)),
    *treatments(VALUES, (0.1, 0.3, 1.0, 3.0, 10.0)),
    *treatments(VALUES, (0.03, 0.1, 0.3, 1.0), law="bernoulli"),
    *treatments(VALUES, (0.01, 0.03, 0.1, 0.3), law="bernoulli", rate=0.5),
    *treatments(VALUES, (0.01, 0.03, 0.1, 0.3), law="inverted"),
    *treatments("none+explicit", (0.1, 0.3, 1.0, 3.0)),
    *treatments(L2, (0.03, 0.1, 0.3, 1.0)),
)
LONG_TREATMENTS = (
    *treatments(NONE, [0.0]),
    *at_rates(SAME, (0.1, 0.3, 0.5)),
    *treatments(VALUES, (0.03, 0.1, 0.3, 1.0, 3.0)),
    *treatments(L2, (0.03, 0.1, 0.3, 1.0)),
    *treatments(DECAY, (0.3, 1.0, 3.0)),
)
MATCHING = "Does explicit dropout match or beat stochastic dropout?"
CONTROLS = "Does it beat plain activation L2, and no regulariser at all?"
SHORT_QUESTIONS = (
    Question(MATCHING, ((VALUES, DROPPED), (VALUES, DROPOUT))),
    Question(
        "Does dropout at the very places that a penalty is of do what the exact penalty does?",
        ((INVERTED, DROPPED), (DROPPED, NONE), (INVERTED, NONE)),
    ),
    Question(
        "Do exact laws beat the paper's approximation?", tuple((row, VALUES) for row in (BERNOULLI, HALF, INVERTED))
    ),
    Question(CONTROLS, ((VALUES, L2), (VALUES, NONE), ("none+explicit", NONE))),
)
LONG_QUESTIONS = (
    Question(MATCHING, ((VALUES, DROPPED),)),
    Question(CONTROLS, ((VALUES, L2), (VALUES, DECAY), (VALUES, NONE))),
)


def table(
    share: float, training: Training, chosen: tuple[Treatment, ...], questions: tuple[Question, ...]
) -> Experiment:
    long, noise = training is LONG, f", {100 * share:.0f} % label noise" if share else ""
    at_rate = {
        name: tuple(t.row for t in chosen if f"{t.attention}+{t.feed_forward}" == row)
        for name, row in ((DROPOUT, BASELINE), (DROPPED, SAME))
    }
    return Experiment(
        name=f"few_images_why_{'long_' if long else ''}{100 * share:.0f}",
        title=f"300 handwritten digits, which part helps{', 200 epochs' if long else ''}{noise}",
        runs=tuple(
            Run(replace(FIRST.DATA, label_noise=share, split=seed), FIRST.MODEL, treatment, training, seed)
            for seed in SEEDS
            for treatment in chosen
        ),
        baseline=NONE,
        pooled={name: rows for name, rows in at_rate.items() if rows},
        questions=questions,
        notes=(
            f"{SAME} is nn.Dropout at the inputs that the penalties of {VALUES} are of; {BASELINE} has it elsewhere.",
            "Rows, values of λ and p, and the questions were committed before its runs. λ and p are chosen on the "
            "validation images of these ten seeds.",
        ),
    )


def experiment() -> list[Experiment]:
    return [
        *(table(share, FIRST.TRAINING, SHORT_TREATMENTS, SHORT_QUESTIONS) for share in SHARES),
        *(table(share, LONG, LONG_TREATMENTS, LONG_QUESTIONS) for share in SHARES),
    ]
