"""Table 3: THUMOS14, online action detection, per-frame mean average precision, all rows, on I3D features.

    explicit-dropout sweep experiments/table3.py --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/table3.py

The paper's TSN features (Kinetics, ActivityNet) were not available to us; the same settings run on them, where somebody
has the files, by EXPLICIT_DROPOUT_THUMOS14=thumos14_kinetics (or thumos14_activitynet). I3D rows are named for what
they are and stand beside no number of the paper. Cost: for each of 560 runs 4 epochs of 285 steps on 36 598 windows,
3.8 seconds of training on an H200 once a row is compiled. Six such programs side by side, each with --only a row of
its own, under NVIDIA's MPS, finished 132 runs in 475 seconds, compiling included. By --engine vectorised, ten runs at
once, a run took 6.5.
"""

import os
from typing import Literal

from explicit_dropout.lab.config import Data, Model, Run, Training
from explicit_dropout.lab.experiment import Experiment, Question
from explicit_dropout.lab.rows import (
    BASELINE,
    COINCIDENCE,
    EXPLICIT,
    paper_numbers,
    paper_questions,
    paper_treatments,
    treatments,
)

SEEDS = range(5)
STRENGTHS = (1e-3, 1e-4, 5e-3, 5e-4)
REDUCTION: Literal["token", "sample"] = "sample"
FEATURES = os.environ.get("EXPLICIT_DROPOUT_THUMOS14", "thumos14_i3d")
WEAK = (*EXPLICIT, "none+activation_l2")
"""Rows whose penalties are means over tokens as well, 64 times weaker: sums choose the smallest λ there is."""
DATA = Data(FEATURES)
MODEL = Model(layers=2, width=1024, heads=8, hidden=1024, patch=None, read="last", norm="pre", qkv_bias=False)
TRAINING = Training(
    epochs=4, batch=128, optimiser="adam", learning_rate=1e-4, weight_decay=1e-4, schedule="step", clip=1.0,
    precision="bfloat16",
)  # fmt: skip
MEANS = Question(
    "As means over tokens, 64 times weaker: do penalties beat stochastic dropout, or no regulariser?",
    tuple((row, other) for row in WEAK for other in (BASELINE, "none+none")),
)
PAPER = {"thumos14_kinetics": "table3_kinetics", "thumos14_activitynet": "table3_activitynet"}


def experiment() -> Experiment:
    as_means = (treatment for row in WEAK for treatment in treatments(row, STRENGTHS, reduction="token"))
    every = (*paper_treatments(STRENGTHS, reduction=REDUCTION), *as_means)
    return Experiment(
        name="table3",
        title=f"THUMOS14 ({FEATURES.removeprefix('thumos14_')} features), per-frame mean average precision",
        runs=tuple(Run(DATA, MODEL, treatment, TRAINING, seed) for seed in SEEDS for treatment in every),
        baseline=BASELINE,
        metric="mean_average_precision",
        paper=paper_numbers(PAPER[FEATURES], reduction=REDUCTION) if FEATURES in PAPER else {},
        questions=(*paper_questions(reduction=REDUCTION), MEANS),
        notes=(
            COINCIDENCE,
            "Windows of 64 steps, the label of the last; training videos split 70:30 by video.",
            "Penalties are sums over the 64 steps of a window if a row says token sums, means otherwise; λ is chosen "
            "on validation videos for each row.",
            "The question about means was put after their runs, and names all of their rows.",
            "Learning rate 1e-4; the protocol has a grid of rates.",
            *(
                []
                if FEATURES in PAPER
                else ["I3D features are not the paper's: none of its numbers stands beside them."]
            ),
        ),
    )
