"""Heat maps over λ × learning rate: one for each row, all of an experiment on one scale of colours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from explicit_dropout.lab.report.svg import drawing, element, text
from explicit_dropout.lab.report.tables import METRICS, paper_cell, percent
from explicit_dropout.lab.statistics import Analysis, Configuration, Grid, grids

STEPS = 9
CELL_WIDTH, CELL_HEIGHT, GAP, LEFT, TOP, BOTTOM = 68, 46, 2, 52, 4, 36


@dataclass(frozen=True)
class Shown:
    """What a cell says: its mean and sd in fractions, and a second line."""

    mean: float
    sd: float | None
    n: int | None
    planned: int | None


@dataclass(frozen=True)
class View:
    """The same grids by one quantity: validation, test or the paper's numbers."""

    key: str
    title: str
    maps: tuple[tuple[str, str, Markup], ...]
    legend: Markup


def views(analysis: Analysis) -> list[View]:
    """Validation and test, and the paper's grid where there is one. None without results or without a choice."""
    shown = [grid for row in analysis.rows for grid in grids(row)]
    if not any(len(grid.cells) > 1 for grid in shown) or not analysis.finished:
        return []
    metric = METRICS[analysis.experiment.metric]

    def paper(configuration: Configuration) -> Shown | None:
        found = paper_cell(analysis, configuration)
        return None if found is None else Shown(found["mean"] / 100, found.get("std", 0) / 100, None, None)

    readings: list[tuple[str, str, Callable[[Configuration], Shown | None]]] = [
        ("validation", f"validation {metric}", lambda c: _ours(c, "validation")),
        ("test", f"test {metric}", lambda c: _ours(c, "test")),
    ]
    if analysis.experiment.paper_cells:
        readings.append(("paper", f"test {metric} in the paper", paper))
    return [_view(analysis, shown, *reading) for reading in readings]


def _ours(configuration: Configuration, part: str) -> Shown | None:
    estimate = configuration.validation if part == "validation" else configuration.test
    if estimate.mean is None:
        return None
    return Shown(estimate.mean, estimate.sd, estimate.n, configuration.planned)


def _view(
    analysis: Analysis, shown: Sequence[Grid], key: str, title: str, read: Callable[[Configuration], Shown | None]
) -> View:
    values = {id(c): read(c) for grid in shown for c in grid.cells.values()}
    means = [value.mean for value in values.values() if value is not None]
    low, high = colour_range(means)
    chosen = {id(row.chosen) for row in analysis.rows}
    maps = tuple(
        (grid.row, grid.label, _map(grid, f"{grid.row}, {title}", values, chosen, (low, high))) for grid in shown
    )
    return View(key, title, maps, _legend(low, high, clipped=bool(means) and min(means) < low))


def colour_range(means: Sequence[float]) -> tuple[float, float]:
    """From worst to best; but a few collapsed configurations must not make all the others look alike."""
    if not means:
        return 0.0, 1.0
    worst, best, middle = min(means), max(means), median(means)
    return (worst if middle == best else max(worst, best - 3 * (best - middle))), best


def step(value: float, low: float, high: float) -> int:
    share = (value - low) / (high - low) if high > low else 1.0
    return min(STEPS - 1, max(0, int(share * STEPS)))


def _map(
    grid: Grid, label: str, values: Mapping[int, Shown | None], chosen: set[int], ends: tuple[float, float]
) -> Markup:
    across = LEFT + len(grid.learning_rates) * CELL_WIDTH / 2
    width = max(2 * across - LEFT, across + 42)  # room for the words below a single cell
    height = TOP + len(grid.strengths) * CELL_HEIGHT + BOTTOM
    parts, spoken = [], []
    for i, strength in enumerate(reversed(grid.strengths)):
        y = TOP + i * CELL_HEIGHT
        if grid.strengths != (0.0,):
            parts.append(text(LEFT - 8, y + CELL_HEIGHT / 2 + 4, f"{strength:g}", anchor="end", class_="tick"))
        for j, rate in enumerate(grid.learning_rates):
            configuration = grid.cells.get((strength, rate))
            value = None if configuration is None else values[id(configuration)]
            is_chosen = configuration is not None and id(configuration) in chosen
            place = (f"λ {strength:g}, " if strength else "") + f"learning rate {rate:g}"
            parts.append(_cell(LEFT + j * CELL_WIDTH, y, value, configuration, place, is_chosen, ends))
            said = "not run" if value is None else percent(value.mean)
            spoken.append(f"{place}: {said}{' (selected)' if is_chosen else ''}")
    bottom = TOP + len(grid.strengths) * CELL_HEIGHT
    for j, rate in enumerate(grid.learning_rates):
        parts.append(text(LEFT + (j + 0.5) * CELL_WIDTH, bottom + 14, f"{rate:g}", anchor="middle", class_="tick"))
    parts.append(text(across, bottom + 30, "learning rate", anchor="middle", class_="axis"))
    if grid.strengths != (0.0,):
        parts.append(text(LEFT - 8, bottom + 14, "λ", anchor="end", class_="axis"))
    return drawing(width, height, f"{label}. {'; '.join(spoken)}", *parts, class_="heat")


def _cell(
    x: float, y: float, value: Shown | None, configuration: Configuration | None, place: str, is_chosen: bool,
    ends: tuple[float, float],
) -> Markup:  # fmt: skip
    inner = CELL_WIDTH - GAP, CELL_HEIGHT - GAP
    if configuration is None:
        return element("g")
    middle = x + inner[0] / 2
    box = element("rect", x=x, y=y, width=inner[0], height=inner[1], rx=4)
    if value is None:
        return element("g", box, text(middle, y + 26, "not run", anchor="middle", class_="small"), class_="cell none")
    parts: list[Markup] = [box, text(middle, y + 19, percent(value.mean), anchor="middle", class_="value")]
    second = "" if value.sd is None else f"±{percent(value.sd)}"
    if value.n is not None:
        second += f" n={value.n}"
    parts.append(text(middle, y + 34, second.strip(), anchor="middle", class_="small"))
    if is_chosen:
        outline = element(
            "rect", x=x + 1.5, y=y + 1.5, width=inner[0] - 3.0, height=inner[1] - 3.0, rx=3, class_="chosen"
        )
        parts.append(outline)
    counted = "" if value.n is None else f", n = {value.n} of {value.planned}"
    spread = "" if value.sd is None else f" ± {percent(value.sd)}"
    mark = ", selected on validation" if is_chosen else ""
    parts.append(element("title", f"{place}: {percent(value.mean)}{spread}{counted}{mark}"))
    incomplete = " incomplete" if value.n is not None and value.n != value.planned else ""
    return element("g", *parts, class_=f"cell h{step(value.mean, *ends)}{incomplete}")


def _legend(low: float, high: float, *, clipped: bool) -> Markup:
    width, size = 150, 150 / STEPS
    squares = [
        element("rect", x=i * size, y=0, width=size + 0.5, height=10, class_=f"swatch h{i}") for i in range(STEPS)
    ]
    ends = (("≤ " if clipped else "") + percent(low), percent(high))
    return drawing(
        width, 28, f"Colours from {ends[0]} to {ends[1]}", *squares,
        text(0, 24, ends[0], class_="tick"), text(width, 24, ends[1], anchor="end", class_="tick"), class_="legend",
    )  # fmt: skip
