"""Few images, and twins: does the dropout that a model has do more with its dice, or as the penalty of each draw?

    explicit-dropout sweep experiments/few_images_twins.py --engine vectorised
    explicit-dropout report experiments/few_images_twins.py

Cost: two to five seconds on one core for each of 61 settings, ten seeds and two shares of wrong labels; 40 minutes on
two cores. Data, model and all else are those of few_images_why.py, the seeds are new; this file was committed before
any of its runs. A row of `[twins]` is that row without dice: `convert_dropout` puts a penalty in the place of whatever
it draws. Twins are of the rate 0.2, with λ; their energies are p / (1 − p) times something, so that λ = 1, 3 are those
of rates 0.2 and 0.43 with λ = 1. Where both rows choose a rate and λ is 1, it says so.

The second question is one that no table here has asked: penalties of the scores under dropout before the projections
of queries and keys at once, against that of queries alone.

Which values of λ to try was found in a trial of 45 settings on two other seeds, by validation accuracy.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import BASELINE, named, treatments

WHY = module_of(Path(__file__).with_name("few_images_why.py"))
SEEDS = range(40, 50)
SHARES = (0.0, 0.4)
RATES = (0.1, 0.3, 0.5)
STRENGTHS, SCORES = (0.1, 0.3, 1.0, 3.0), (0.003, 0.01, 0.03, 0.1)
NONE, L2, VALUES = WHY.NONE, WHY.L2, WHY.VALUES
WHOLE, WEIGHTS, HEADS, PATH = "dropout+implicit", "dropout+none", "drop_head+none", "none+none [drop path chosen]"
KINDS = (BASELINE, WEIGHTS, WHOLE, HEADS)
TWINS = {row: named(row, twins=True) for row in KINDS} | {PATH: named(NONE, twins=True, drop_path=0.2)}
SAME_RATES = f"{WHOLE} [twins, λ = 1, p chosen]"
QUERIES, JOINT = "explicit_q+explicit", "explicit_qk+explicit"


def chosen(row: str) -> str:
    return row if row == PATH else f"{row} [p chosen]"


TREATMENTS = (
    *treatments(NONE, [0.0]),
    *(treatment for row in KINDS for treatment in WHY.at_rates(row, RATES)),
    *(treatment for row in KINDS for treatment in treatments(row, STRENGTHS, twins=True)),
    *(treatment for rate in RATES for treatment in treatments(WHOLE, [1.0], twins=True, rate=rate)),
    *(treatment for rate in RATES for treatment in treatments(NONE, [0.0], drop_path=rate)),
    *treatments(NONE, STRENGTHS, twins=True, drop_path=0.2),
    *treatments(VALUES, (0.3, 1.0, 3.0)),
    *treatments(L2, (0.1, 0.3, 1.0)),
    *(
        treatment
        for law in ("paper", "inverted")
        for row in (QUERIES, JOINT)
        for treatment in treatments(row, SCORES, law=law)
    ),
)
QUESTIONS = (
    Question(
        "Do twins do more than the dropout that they stand for?",
        (*((TWINS[row], chosen(row)) for row in (*KINDS, PATH)), (SAME_RATES, chosen(WHOLE))),
    ),
    Question(
        "Do twins help, and the dropout that they stand for?",
        tuple((row, NONE) for kind in (*KINDS, PATH) for row in (TWINS[kind], chosen(kind))),
    ),
    Question(
        "Are twins of a model's own dropout better than the paper's penalty, or than plain activation L2?",
        ((TWINS[WHOLE], VALUES), (TWINS[WHOLE], L2)),
    ),
    Question(
        "Do queries and keys at once do more than queries alone?",
        tuple((named(JOINT, law=law), named(QUERIES, law=law)) for law in ("paper", "inverted")),
    ),
)


def table(share: float) -> Experiment:
    noise = f", {100 * share:.0f} % label noise" if share else ""
    data, model, training = replace(WHY.FIRST.DATA, label_noise=share), WHY.FIRST.MODEL, WHY.FIRST.TRAINING
    return Experiment(
        name=f"few_images_twins_{100 * share:.0f}",
        title=f"300 handwritten digits, twins{noise}",
        runs=tuple(
            Run(replace(data, split=seed), model, treatment, training, seed)
            for seed in SEEDS
            for treatment in TREATMENTS
        ),
        baseline=NONE,
        pooled={
            **{chosen(row): tuple(named(row, rate=p) for p in RATES) for row in KINDS},
            PATH: tuple(named(NONE, drop_path=p) for p in RATES),
            SAME_RATES: tuple(named(WHOLE, twins=True, rate=p) for p in RATES),
        },
        questions=QUESTIONS,
        notes=(
            f"{BASELINE} is nn.Dropout after the activation and at the end of feed-forward layers, {WEIGHTS} that of "
            f"attention weights, {WHOLE} both; [twins] are these without dice (`convert_dropout`), of p = 0.2.",
            "Rows, values of λ and p, and the questions were committed before its runs. λ and p are chosen on the "
            "validation images of these ten seeds; which values to try was found on two others.",
        ),
    )


def experiment() -> list[Experiment]:
    return [table(share) for share in SHARES]
