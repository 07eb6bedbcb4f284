"""What λ means on GTZAN: where penalties begin to act, and where training collapses. Validation clips only.

    explicit-dropout sweep experiments/strength_gtzan.py --engine vectorised --device cuda
    explicit-dropout report experiments/strength_gtzan.py

Cost: on an H200 the runs of a row are one program of 20 to 40 seconds, on a CPU a run takes minutes. Some rows are
Table 4's.

Clips have 120 tokens each, so a sum over tokens at λ is a mean over tokens at 120 λ: both reductions are one axis. As
sums the paper's λ, 1e-4 to 5e-3, are 0.012 to 0.6 of it; the study goes on to 9.6, and has 0.12 and 0.6 in both forms.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, module_of
from explicit_dropout.lab.rows import treatments

TABLE4 = module_of(Path(__file__).with_name("table4.py"))
TOKENS = 120
SUMS = (*TABLE4.STRENGTHS, 2e-2, 8e-2)
ROWS = ("explicit_v+explicit", "explicit_q+explicit", "none+explicit")
TREATMENTS = (
    *treatments("none+none", [0.0]),
    *treatments("none+implicit", [0.0]),
    *(
        t
        for law in ("paper", "inverted", "bernoulli")
        for row in ROWS
        for t in treatments(row, SUMS, law=law, reduction="sample")
    ),
    *treatments("explicit_v+explicit", (*TABLE4.STRENGTHS, TOKENS * 1e-3, TOKENS * 5e-3)),
    *(t for row in ROWS[1:] for t in treatments(row, TABLE4.STRENGTHS)),
)


def experiment() -> Experiment:
    return Experiment(
        name="strength_gtzan",
        title="GTZAN (YAMNet embeddings): validation accuracy over λ",
        runs=tuple(
            Run(replace(TABLE4.DATA, split=seed), TABLE4.MODEL, treatment, TABLE4.TRAINING, seed)
            for seed in TABLE4.SEEDS
            for treatment in TREATMENTS
        ),
        baseline="none+none",
        notes=(
            "Validation clips decide; what the test clips say plays no part.",
            f"{TOKENS} tokens: a sum over tokens at λ is a mean over tokens at {TOKENS} λ.",
        ),
    )
