"""Courses over the epochs, mean and band over seeds: validation, training loss, gap, and the penalty of every layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from markupsafe import Markup

from explicit_dropout.lab.report.svg import Scale, band, drawing, element, polyline, text, thinned, tick_label, window
from explicit_dropout.lab.report.tables import METRICS, hundredfold
from explicit_dropout.lab.statistics import Analysis, Result, Row

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 156, 40, 12, 24, 26
DEPTHS = 7
"""Shades that layers are told apart by, from the first layer to the last."""

Read = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Course:
    """A quantity over epochs: its mean over repetitions, and their sd (none for a single one)."""

    epochs: tuple[int, ...]
    mean: tuple[float, ...]
    sd: tuple[float, ...] | None

    def settled(self) -> list[float]:
        """Means with their band after the first quarter of the epochs, which would dwarf what follows."""
        first = self.epochs[0] + 0.25 * (self.epochs[-1] - self.epochs[0])
        late = [i for i, epoch in enumerate(self.epochs) if epoch >= first]
        sd = self.sd or (0.0,) * len(self.mean)
        return [self.mean[i] + sign * sd[i] for i in late for sign in (-1, 1)]


def course(results: Sequence[Result], read: Read) -> Course | None:
    """The epochs that every repetition has a finite number for, thinned."""
    found: list[dict[int, float]] = []
    for result in results:
        values = ((line.get("epoch"), read(line)) for line in result.metrics)
        found.append({e: v for e, v in values if isinstance(e, int) and v is not None and math.isfinite(v)})
    shared = sorted(set.intersection(*map(set, found))) if found else []
    if not shared:
        return None
    epochs = thinned(shared)
    table = np.array([[values[epoch] for epoch in epochs] for values in found])
    sd = tuple(table.std(axis=0, ddof=1).tolist()) if len(found) > 1 else None
    return Course(tuple(epochs), tuple(table.mean(axis=0).tolist()), sd)


# ---------------------------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class Panels:
    """The drawings of one row."""

    row: str
    subtitle: str
    drawings: tuple[Markup, ...]


def row_curves(analysis: Analysis) -> list[Panels]:
    """For every row with a choice: validation metric, training loss and gap, the baseline in grey behind it."""
    metric = analysis.experiment.metric
    named = METRICS[metric]
    quantities: list[tuple[str, Read, bool]] = [
        (f"validation {named}, %", lambda line: hundredfold(_inner(line, "validation", metric)), False),
        ("training loss", lambda line: _finite(line.get("train_loss")), True),
        _gap(analysis),
    ]
    rows = [row for row in analysis.rows if row.chosen is not None]
    courses = {
        (row.name, title): course(row.chosen.results if row.chosen else (), read)
        for row in rows
        for title, read, _ in quantities
    }
    if not any(courses.values()):
        return []
    shared = {title: _typical([c for (_, t), c in courses.items() if t == title and c]) for title, _, _ in quantities}
    made = []
    for row in rows:
        drawings = []
        for title, _, logarithmic in quantities:
            own, base = courses[row.name, title], courses.get((analysis.experiment.baseline, title))
            if own is not None:
                behind = base if row.name != analysis.experiment.baseline else None
                vertical = _scale([own, *shared[title]], logarithmic)
                drawings.append(_panel(title, own, behind, vertical, row.name))
        made.append(Panels(row.name, _repetitions(row), tuple(drawings)))
    return made


def _gap(analysis: Analysis) -> tuple[str, Read, bool]:
    """Training accuracy minus validation accuracy; where the metric is another, the gap of the losses."""
    if analysis.experiment.metric == "accuracy":

        def accuracy(line: Mapping[str, Any]) -> float | None:
            ours, theirs = _finite(line.get("train_accuracy")), _inner(line, "validation", "accuracy")
            return None if ours is None or theirs is None else 100 * (ours - theirs)

        return "gap: training − validation, %", accuracy, False

    def loss(line: Mapping[str, Any]) -> float | None:
        ours, theirs = _finite(line.get("train_loss")), _inner(line, "validation", "loss")
        return None if ours is None or theirs is None else theirs - ours

    return "gap: validation − training loss", loss, False


def _repetitions(row: Row) -> str:
    n = len(row.chosen.results) if row.chosen else 0
    return f"n = {n}" + (", mean ± sd" if n > 1 else "")


def _typical(courses: Sequence[Course]) -> list[Course]:
    """The courses that all panels have room for: those that do not end far away from the others."""
    ends = [one.mean[-1] for one in courses]
    if not ends:
        return []
    middle = median(ends)
    spread = median(abs(end - middle) for end in ends)
    return [one for one, end in zip(courses, ends, strict=True) if abs(end - middle) <= 8 * spread + 1e-9]


def _scale(courses: Sequence[Course], logarithmic: bool) -> Scale:
    means = [mean for one in courses for mean in one.mean]
    if logarithmic and min(means) > 0 and max(means) > 15 * min(means):
        return Scale(min(means) * 0.8, max(means) * 1.25, HEIGHT - BOTTOM, TOP, logarithmic=True)
    values = [value for one in courses for value in one.settled()]
    low, high = min(values), max(values)
    room = 0.06 * (high - low) or 0.5
    return Scale(low - room, high + room, HEIGHT - BOTTOM, TOP)


def _panel(title: str, own: Course, base: Course | None, vertical: Scale, name: str) -> Markup:
    across = Scale(own.epochs[0], own.epochs[-1], LEFT, WIDTH - RIGHT)
    parts = [_frame(title, across, vertical)]
    behind = [] if base is None else _line(base, across, vertical, "base")
    parts.append(_inside(*behind, *_line(own, across, vertical, "own")))
    first, last = own.mean[0], own.mean[-1]
    label = f"{name}: {title} from {first:.3g} at epoch {own.epochs[0]} to {last:.3g} at epoch {own.epochs[-1]}"
    return drawing(WIDTH, HEIGHT, label, *parts, class_="curve")


def _inside(*parts: Markup) -> Markup:
    return window(LEFT, TOP - 2, WIDTH - LEFT, HEIGHT - BOTTOM - TOP + 4, *parts)


def _line(one: Course, across: Scale, vertical: Scale, class_: str) -> list[Markup]:
    points = [(across(e), m) for e, m in zip(one.epochs, one.mean, strict=True)]
    parts = []
    if one.sd is not None:
        spread = list(zip(points, one.sd, strict=True))
        upper = [(x, vertical(m + s)) for (x, m), s in spread]
        lower = [(x, vertical(m - s)) for (x, m), s in spread]
        parts.append(band(upper, lower, f"{class_}-band"))
    parts.append(
        polyline([(x, vertical(m)) for x, m in points], f"{class_}-line")
        if len(points) > 1
        else element("circle", cx=points[0][0], cy=vertical(points[0][1]), r=2.5, class_=f"{class_}-dot")
    )
    return parts


def _frame(title: str, across: Scale, vertical: Scale) -> Markup:
    parts = [text(0, 12, title, class_="axis")]
    for value in vertical.ticks(4):
        y = vertical(value)
        parts.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="rule"))
        parts.append(text(LEFT - 6, y + 4, tick_label(value), anchor="end", class_="tick"))
    ends = sorted({round(across.low), round((across.low + across.high) / 2), round(across.high)})
    for i, epoch in enumerate(ends):
        anchor = "middle" if 0 < i < len(ends) - 1 or len(ends) == 1 else "end" if i else "start"
        label = f"epoch {epoch}" if i == 0 else str(epoch)
        parts.append(text(across(epoch), HEIGHT - BOTTOM + 18, label, anchor=anchor, class_="tick"))
    return element("g", *parts)


# ---------------------------------------------------------------------------------------------- penalties


def penalty_curves(analysis: Analysis) -> list[Panels]:
    """For every row with a penalty: a panel for each kind of site, a line for each layer, the mean over repetitions."""
    made = []
    for row in analysis.rows:
        results = row.chosen.results if row.chosen else ()
        kinds = sites(results)
        drawings = tuple(
            drawn for kind, layers in kinds.items() if (drawn := _layers(row.name, kind, layers, results)) is not None
        )
        if drawings:
            made.append(Panels(row.name, _repetitions(row).replace(", mean ± sd", ", mean"), drawings))
    return made


def sites(results: Sequence[Result]) -> dict[str, dict[int, str]]:
    """Names of terms by kind and layer: blocks.3.attention:value is of kind "attention: value" and layer 3."""
    names: dict[str, None] = {}
    for result in results:
        for line in result.metrics[:1]:
            names.update(dict.fromkeys(line.get("terms") or {}))
    kinds: dict[str, dict[int, str]] = {}
    for name in names:
        path, _, component = name.partition(":")
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
        rest = path[number.end() :] if number else path
        kind = rest if not component or component in rest else f"{rest}: {component}" if rest else component
        kinds.setdefault(kind.replace("_", " "), {})[int(number[1]) if number else 0] = name
    return kinds


def _layers(row: str, kind: str, layers: Mapping[int, str], results: Sequence[Result]) -> Markup | None:
    courses = {layer: course(results, _term(name)) for layer, name in sorted(layers.items())}
    found = {layer: one for layer, one in courses.items() if one is not None}
    if not found:
        return None
    means = [Course(one.epochs, one.mean, None) for one in found.values()]
    vertical = _scale(means, logarithmic=True)
    epochs = [epoch for one in means for epoch in one.epochs]
    across = Scale(min(epochs), max(epochs), LEFT, WIDTH - RIGHT - 16)
    parts = [_frame(f"J, {kind}", across, vertical)]
    ends, lines = [], []
    for layer, one in zip(found, means, strict=True):
        lines += [element("g", *_line(one, across, vertical, "layer"), class_=f"d{depth(layer, max(found))}")]
        ends.append((vertical(one.mean[-1]), layer))
    parts.append(_inside(*lines))
    labelled = [min(found), max(found)] if len(found) > 1 else []
    placed: list[float] = []
    for y, layer in sorted(ends):
        if layer in labelled:
            y = max(y, placed[-1] + 11) if placed else y
            placed.append(y)
            parts.append(text(WIDTH - RIGHT - 12, y + 4, str(layer), class_="tick"))
    first, last = means[0].mean[0], means[0].mean[-1]
    label = f"{row}: penalty J at {kind}, one line for each of {len(found)} layers; layer {min(found)} "
    return drawing(WIDTH, HEIGHT, label + f"from {first:.3g} to {last:.3g}", *parts, class_="curve")


def depth(layer: int, last: int) -> int:
    return 0 if last == 0 else round(layer / last * (DEPTHS - 1))


def _term(name: str) -> Read:
    return lambda line: _inner(line, "terms", name)


def spark(metrics: Sequence[Mapping[str, Any]], metric: str) -> Markup | None:
    """The validation metric so far, for a run in progress."""
    values = [v for line in metrics if (v := _inner(line, "validation", metric)) is not None]
    if len(values) < 2:
        return None
    kept = [values[i] for i in thinned(range(len(values)), 40)]
    across, vertical = Scale(0, len(kept) - 1, 1, 89), Scale(min(kept), max(kept), 21, 3)
    line = polyline([(across(i), vertical(v)) for i, v in enumerate(kept)], "own-line")
    return drawing(90, 24, f"validation so far, from {kept[0]:.3g} to {kept[-1]:.3g}", line, class_="spark")


def _inner(line: Mapping[str, Any], part: str, name: str) -> float | None:
    section = line.get(part)
    return _finite(section.get(name)) if isinstance(section, Mapping) else None


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
