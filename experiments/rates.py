"""Dropout rates: CIFAR-10 at p from 0.05 to 0.5, explicit on values and feed-forward under three laws, and stochastic.

    explicit-dropout sweep experiments/rates.py --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/rates.py

Cost: half a minute on an H200 for each of 20 rows and 5 seeds; those at p = 0.2 are Table 1's. λ is the one that Table
1 has frozen. Under `paper` a penalty is λ p² times the coherent energy and under `inverted` λ p / (1 − p) times the
incoherent one: there p is another name for λ. Under `bernoulli` it also weighs the two against each other.
"""

from pathlib import Path

from explicit_dropout.lab.experiment import Experiment, module_of
from explicit_dropout.lab.rows import BASELINE, treatments

TABLE1 = module_of(Path(__file__).with_name("table1.py"))
RATES = (0.2, 0.05, 0.1, 0.3, 0.5)


def experiment() -> Experiment:
    made = [
        treatment
        for rate in RATES
        for treatment in (
            *treatments(BASELINE, [0.0], rate=rate),
            *(
                t
                for law in ("paper", "bernoulli", "inverted")
                for t in treatments(
                    "explicit_v+explicit", [TABLE1.STRENGTH], law=law, rate=rate, reduction=TABLE1.REDUCTION
                )
            ),
        )
    ]
    return Experiment(
        name="rates",
        title="CIFAR-10, test accuracy over the drop rate",
        runs=TABLE1.runs(made),
        baseline=BASELINE,
        notes=(
            f"λ = {TABLE1.STRENGTH:g} and learning rate {TABLE1.LEARNING_RATE:g} throughout; p = 0.2 if no p is named.",
        ),
    )
