"""Which data the runs of a report have seen, by fingerprint and division, and a warning where they are not the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from explicit_dropout.lab.config import Data, Run
from explicit_dropout.lab.report.reading import Part, Record, recorded
from explicit_dropout.lab.store import division_in, fingerprint_in


def datasets(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """The fingerprints of what the runs saw. Two for the same data mean that runs cannot be compared."""
    return [
        {"data": data.words, "fingerprints": prints.most_common(), "mixed": len(prints) > 1}
        for data, prints in _contents(recorded(parts)).items()
    ]


def warnings(part: Part) -> list[str]:
    """A sentence for all data that the results of an experiment have seen in several versions, or divisions."""
    records = part.having("finished")
    return [
        f"{opening}: the runs on {data.words} have seen {len(seen)} {what} of it "
        f"({', '.join(f'{name[:12]}: {number}' for name, number in seen.most_common())}), so their numbers cannot be "
        "compared."
        for opening, what, found in (
            ("Different data", "versions", _contents(records)),
            ("Different divisions", "divisions", _divisions(records)),
        )
        for data, seen in found.items()
        if len(seen) > 1
    ]


def divisions(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Data that runs have seen divided into training, validation and test examples in several ways, and in how many."""
    return [
        {"data": data.words, "number": len(seen)} for data, seen in _divisions(recorded(parts)).items() if len(seen) > 1
    ]


def fingerprints(part: Part, runs: Iterable[Run]) -> str:
    """Of the data that those of the runs have seen that are finished; several are set apart by spaces."""
    wanted = {run.key for run in runs}
    found = (fingerprint_in(r.environment) for r in part.having("finished") if r.run.key in wanted)
    return " ".join(sorted({name for name in found if name is not None}))


def _contents(records: Iterable[Record]) -> dict[Data, Counter[str]]:
    return _seen(records, lambda data: data.material, fingerprint_in)


def _divisions(records: Iterable[Record]) -> dict[Data, Counter[str]]:
    """A split has a division of its own, and so has a number of training examples."""
    return _seen(records, lambda data: data.divided, division_in)


def _seen(
    records: Iterable[Record],
    same: Callable[[Data], Data],
    digest: Callable[[Mapping[str, Any] | None], str | None],
) -> dict[Data, Counter[str]]:
    found: dict[Data, Counter[str]] = {}
    for record in records:
        name = digest(record.environment)
        if name is not None:
            found.setdefault(same(record.run.data), Counter())[name] += 1
    return found
