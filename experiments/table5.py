"""Table 5: CIFAR-10, every pair of λ and learning rate, for penalties on keys, queries, values and attended values.

    explicit-dropout sweep experiments/table5.py --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/table5.py

Cost: half a minute on an H200 for each of 64 cells and each seed. The paper's rates are Adam's; steps of Muon are as
large as Adam's at the same rate, so that they can be kept.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment, module_of
from explicit_dropout.lab.rows import named, paper_numbers, treatments

TABLE1 = module_of(Path(__file__).with_name("table1.py"))
STRENGTHS = LEARNING_RATES = (1e-3, 5e-3, 1e-4, 5e-4)
ROWS = {component: f"explicit_{component.lower()}+explicit" for component in ("K", "Q", "V", "AV")}


def experiment() -> Experiment:
    cells = paper_numbers("table5")
    return Experiment(
        name="table5",
        title="CIFAR-10, test accuracy over λ and learning rate",
        runs=tuple(
            Run(TABLE1.DATA, TABLE1.MODEL, treatment, replace(TABLE1.TRAINING, learning_rate=rate), seed)
            for seed in TABLE1.SEEDS
            for row in ROWS.values()
            for treatment in treatments(row, STRENGTHS, reduction=TABLE1.REDUCTION)
            for rate in LEARNING_RATES
        ),
        baseline=named("explicit_v+explicit", reduction=TABLE1.REDUCTION),
        notes=(
            *TABLE1.experiment().notes[1:4],
            f"Table 1's learning rate, {TABLE1.LEARNING_RATE:g}, is not in the paper's grid.",
        ),
        paper_cells={named(row, reduction=TABLE1.REDUCTION): cells[part] for part, row in ROWS.items()},
    )
