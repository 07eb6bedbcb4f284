"""Classifiers without a network on the same few images, as `python experiments/references.py` has found them."""

import json
from pathlib import Path

from explicit_dropout.lab.report.tables import measured
from explicit_dropout.lab.statistics import Estimate

FOUND = Path("results") / "references.json"


def section(root: Path) -> list[str]:
    """What was found, for the page of results."""
    if not (root / FOUND).exists():
        return []
    found = json.loads((root / FOUND).read_text())
    shares = found["shares"]
    lines = [
        "## 300 handwritten digits, fresh seeds: classifiers without a network",
        "",
        "Test accuracy in %, mean ± sd over the ten splits of the fresh seeds, with the same images and wrong labels; "
        "settings are chosen on their validation images. What regularisers gain in the small ViT above, trained from "
        "scratch for 50 epochs, is to be seen beside these.",
        "",
        "| classifier | " + " | ".join(f"{100 * float(share):.0f} % label noise" for share in shares) + " |",
        "| --- |" + " ---: |" * len(shares),
    ]
    for rows in zip(*shares.values(), strict=True):
        scores = (measured(Estimate(tuple(row["test"]))) for row in rows)
        lines.append(f"| {rows[0]['classifier']} | {' | '.join(scores)} |")
    return [*lines, "", "```", found["command"], "```", ""]
