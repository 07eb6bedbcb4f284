"""Is part of dropout's benefit its noise? CIFAR-10: explicit dropout, a little stochastic dropout, and both together.

    explicit-dropout sweep experiments/noise.py --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/noise.py

Cost: half a minute on an H200 for each of seven rows and 5 seeds; the first three rows are Table 1's. The small dropout
acts where `none+implicit` has its own, with the same masks for the same seed.
"""

from pathlib import Path

from explicit_dropout.lab.experiment import Experiment, Question, module_of
from explicit_dropout.lab.rows import BASELINE, named, treatments

TABLE1 = module_of(Path(__file__).with_name("table1.py"))
RATES = (0.05, 0.1)
ROW = "explicit_v+explicit"
EXPLICIT = {"law": TABLE1.LAW, "reduction": TABLE1.REDUCTION}


def experiment() -> Experiment:
    made = [
        *treatments(ROW, [TABLE1.STRENGTH], **EXPLICIT),
        *treatments(BASELINE, [0.0]),
        *treatments("none+none", [0.0]),
        *(t for rate in RATES for t in treatments(ROW, [TABLE1.STRENGTH], **EXPLICIT, extra_dropout=rate)),
        *(t for rate in RATES for t in treatments(BASELINE, [0.0], rate=rate)),
    ]
    return Experiment(
        name="noise",
        title="CIFAR-10, test accuracy: explicit dropout, noise, and both",
        runs=TABLE1.runs(made),
        baseline=named(ROW, **EXPLICIT),
        questions=(
            Question(
                "Is part of dropout's benefit its noise? Explicit dropout with a little noise against either alone.",
                tuple(
                    (named(ROW, **EXPLICIT, extra_dropout=rate), other)
                    for rate in RATES
                    for other in (named(ROW, **EXPLICIT), named(BASELINE, rate=rate))
                ),
            ),
        ),
        notes=(f"λ = {TABLE1.STRENGTH:g} and learning rate {TABLE1.LEARNING_RATE:g} throughout.",),
    )
