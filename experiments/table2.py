"""Table 2: CIFAR-100, everything else as in Table 1.

    explicit-dropout sweep experiments/table2.py --only none+implicit --device cuda --compile --cuda-graphs
    explicit-dropout report experiments/table2.py

The paper's numbers: `none+implicit` 59.01 ± 1.13, `explicit_v+explicit` 55.15 ± 0.84.
"""

from dataclasses import replace
from pathlib import Path

from explicit_dropout.lab.experiment import Experiment, module_of
from explicit_dropout.lab.rows import paper_numbers

TABLE1 = module_of(Path(__file__).with_name("table1.py"))
DATA = replace(TABLE1.DATA, name="cifar100")


def experiment() -> Experiment:
    table1 = TABLE1.experiment()
    return replace(
        table1,
        name="table2",
        title="CIFAR-100, test accuracy",
        runs=tuple(replace(run, data=DATA) for run in table1.runs),
        paper=paper_numbers("table2", reduction=TABLE1.REDUCTION),
    )
