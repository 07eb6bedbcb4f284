"""Tables in README.md and docs/findings.md: one row of explicit dropout against others, over many experiments.

`python experiments/results.py` puts them between their marks, <!-- begin NAME --> … <!-- end NAME -->.
"""

import re
from collections.abc import Mapping
from types import ModuleType

from explicit_dropout.lab.report.answers import ENOUGH, pairs
from explicit_dropout.lab.report.tables import MISSING, difference, measured
from explicit_dropout.lab.rows import BASELINE, named
from explicit_dropout.lab.statistics import Analysis, Row

SUMMARISED = {
    "no regulariser": "none+none",
    "`nn.Dropout` in feed-forward layers": BASELINE,
    "the same, and DropKey": "drop_key+implicit",
    "explicit, feed-forward": "none+explicit",
    "explicit, values and feed-forward": "explicit_v+explicit",
    "explicit, attended values and feed-forward": "explicit_av+explicit",
    "explicit, queries and feed-forward": "explicit_q+explicit",
    "activation L2": "none+activation_l2",
    "weight decay": "none+weight_decay",
}
"""Rows of the summary."""

COLUMNS = {
    "table1": "CIFAR-10", "table2": "CIFAR-100", "table3": "THUMOS14-I3D", "table4": "GTZAN-YAMNet",
    "label_noise_40": "CIFAR-10, 40 % label noise", "few_cifar_0": "1000 images of CIFAR-10",
    "few_images_again_0": "300 digits, 50 epochs", "few_images_why_long_0": "300 digits, 200 epochs",
}  # fmt: skip
"""Experiments of the summary."""
CONTRASTED = COLUMNS | {
    "few_images_again_40": "300 digits, 50 epochs, 40 % label noise",
    "few_images_why_long_40": "300 digits, 200 epochs, 40 % label noise",
}
"""Those whose differences are shown."""
COMPARED = "explicit_v+explicit"
"""The row of the summary whose differences to others are shown."""
OTHERS = {
    "`nn.Dropout`": BASELINE, "no regulariser": "none+none", "activation L2": "none+activation_l2",
    "weight decay": "none+weight_decay",
}  # fmt: skip
"""The rows that it is compared with."""
PAGES = ("README.md", "docs/findings.md")
"""Those that have places for them."""


def reductions(modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """How the experiments of the summary average J."""
    cifar = modules["table1"].REDUCTION
    others = {"table3": modules["table3"].REDUCTION, "table4": modules["table4"].REDUCTIONS[0]}
    return {**dict.fromkeys(CONTRASTED, "token"), "table1": cifar, "label_noise_40": cifar, "table2": cifar, **others}


def shown(analysis: Analysis, name: str) -> str:
    """What a row is called in an experiment: where its rate is chosen, it says so."""
    pooled = f"{name} [p chosen]"
    return pooled if pooled in analysis.experiment.rows else name


def row_of(analysis: Analysis, name: str) -> Row | None:
    """The row of that name, if the experiment has one."""
    return next((row for row in analysis.rows if row.name == shown(analysis, name)), None)


def scores(analyses: Mapping[str, Analysis], reductions: Mapping[str, str]) -> str:
    """Test numbers of the rows that answers are about, as far as there are five of each."""
    lines = ["| | " + " | ".join(COLUMNS.values()) + " |", "|---|" + "---|" * len(COLUMNS)]
    for words, row in SUMMARISED.items():
        cells = []
        for name in COLUMNS:
            found = row_of(analyses[name], named(row, reduction=reductions[name]))
            cells.append(measured(found.test) if found is not None and found.test.n >= ENOUGH else MISSING)
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compared(analyses: Mapping[str, Analysis], reductions: Mapping[str, str]) -> str:
    """One row of explicit dropout against others, where there are five pairs."""
    lines = [f"| | against {' | against '.join(OTHERS)} | n |", "|---|" + "---|" * len(OTHERS) + "---|"]
    for name, dataset in CONTRASTED.items():
        row, cells, numbers = named(COMPARED, reduction=reductions[name]), [], []
        for other in (named(other, reduction=reductions[name]) for other in OTHERS.values()):
            there = row_of(analyses[name], other) is not None
            found = pairs(analyses[name], row, shown(analyses[name], other)) if there else None
            enough = found is not None and found.n >= ENOUGH
            cells.append(difference(found.estimate) if found is not None and enough else MISSING)
            numbers += [found.n] if found is not None and enough else []
        if numbers:
            lines.append(f"| {dataset} | {' | '.join(cells)} | {min(numbers)} |")
    return "\n".join(lines)


def tables(analyses: Mapping[str, Analysis], modules: Mapping[str, ModuleType]) -> dict[str, str]:
    """Every table by its name."""
    averaged = reductions(modules)
    return {"scores": scores(analyses, averaged), "differences": compared(analyses, averaged)}


def filled(text: str, made: Mapping[str, str]) -> str:
    """A page with what stands between its marks made anew."""
    names = "|".join(made)  # benchmarks/cost_page.py fills in another table of the README
    return re.sub(
        rf"<!-- begin ({names}) -->.*?<!-- end \1 -->",
        lambda found: f"<!-- begin {found[1]} -->\n\n{made[found[1]]}\n\n<!-- end {found[1]} -->",
        text,
        flags=re.DOTALL,
    )
