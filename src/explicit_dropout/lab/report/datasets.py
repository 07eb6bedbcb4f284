"""Which data the runs of a report have seen, by fingerprint, and a warning where they are not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from explicit_dropout.lab.config import Data, Run
from explicit_dropout.lab.report.reading import Part, Record, made
from explicit_dropout.lab.store import fingerprint_in


def datasets(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The fingerprints of what the runs saw. Two for the same data mean that runs cannot be compared."""
    return [
        {"data": data.words, "fingerprints": prints.most_common(), "mixed": len(prints) > 1}
        for data, prints in _seen(made(parts)).items()
    ]


def warnings(part: Part) -> list[str]:
    """A sentence for all data of an experiment that its results have seen in several versions."""
    return [
        f"Different data: the runs on {data.words} have seen {len(prints)} versions of it "
        f"({', '.join(f'{name[:12]}: {number}' for name, number in prints.most_common())}), so their numbers cannot be "
        "compared."
        for data, prints in _seen(part.having("finished")).items()
        if len(prints) > 1
    ]


def fingerprints(part: Part, runs: Iterable[Run]) -> str:
    """Of the data that those of the runs have seen that are finished; several are set apart by spaces."""
    wanted = {run.key for run in runs}
    found = (fingerprint_in(r.environment) for r in part.having("finished") if r.run.key in wanted)
    return " ".join(sorted({name for name in found if name is not None}))


def _seen(records: Iterable[Record]) -> dict[Data, Counter[str]]:
    found: dict[Data, Counter[str]] = {}
    for record in records:
        name = fingerprint_in(record.environment)
        if name is not None:
            found.setdefault(record.run.data.material, Counter())[name] += 1
    return found
