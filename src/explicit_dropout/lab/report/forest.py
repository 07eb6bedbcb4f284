"""The forest plot: each row's difference to the baseline with its interval, and a dot for every pair.

Rows are strips of HTML with positions in percent, so that the plot is as wide as the page and its text stays text.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from explicit_dropout.lab.report.svg import element, round_ticks, tick_label
from explicit_dropout.lab.report.tables import interval, percent
from explicit_dropout.lab.statistics import SIGNIFICANT, Analysis, Comparison

HEIGHT, MIDDLE = 30, 15


@dataclass(frozen=True)
class Strip:
    """One row of the plot. `verdict` is "higher" or "lower" where the Holm-adjusted p-value is below 5 %."""

    row: str
    drawing: Markup
    difference: str
    interval: str
    pairs: int
    verdict: str


@dataclass(frozen=True)
class Forest:
    strips: tuple[Strip, ...]
    axis: Markup
    clipped: bool


def forest(analysis: Analysis) -> Forest | None:
    """None where nothing can be compared yet."""
    compared = [(row.name, row.comparison) for row in analysis.rows if row.comparison is not None]
    if not compared:
        return None
    extents = [100 * value for _, comparison in compared for value in _ends(comparison)]
    low, high = min(0.0, *extents), max(0.0, *extents)
    # a collapsed row, tens of points below the others, would press all of them into one line
    most = 4 * median(abs(value) for value in extents)
    clipped = max(-low, high) > 2 * most > 0
    if clipped:
        near = [0.0, *(value for value in extents if abs(value) <= most)]
        low, high = min(near), max(near)
    room = 0.05 * (high - low) or 1.0
    low, high = low - room, high + room

    def place(value: float) -> float:
        return 100 * (value - low) / (high - low)

    ticks = round_ticks(low, high, 6)
    rules = [_line(place(tick), class_="zero" if tick == 0 else "rule") for tick in ticks]
    strips = []
    for name, comparison in compared:
        marks = _marks(comparison, low, high)
        strips.append(
            Strip(
                name,
                element("svg", *rules, *marks, class_="strip", width="100%", height=HEIGHT, aria_hidden="true"),
                percent(comparison.difference.mean, signed=True),
                interval(comparison.difference, signed=True),
                comparison.difference.n,
                verdict(comparison),
            )
        )
    labels = [
        element("text", tick_label(tick), x=f"{place(tick):.2f}%", y=12, text_anchor="middle", class_="tick")
        for tick in ticks
        if 3 < place(tick) < 97
    ]
    axis = element("svg", *labels, class_="strip", width="100%", height=16, aria_hidden="true")
    return Forest(tuple(strips), axis, clipped)


def verdict(comparison: Comparison | None) -> str:
    """Whether a row differs from the baseline after the correction for several comparisons."""
    if comparison is None or comparison.holm is None or comparison.holm >= SIGNIFICANT:
        return ""
    return "higher" if (comparison.difference.mean or 0) > 0 else "lower"


def _ends(comparison: Comparison) -> tuple[float, ...]:
    return comparison.difference.interval() or (comparison.difference.mean or 0.0,)


def _marks(comparison: Comparison, low: float, high: float) -> list[Markup]:
    def place(value: float) -> str:
        return f"{100 * (100 * value - low) / (high - low):.2f}%"

    def inside(value: float) -> bool:
        return low <= 100 * value <= high

    difference = comparison.difference
    marks = [
        element("circle", cx=place(value), cy=MIDDLE, r=2.5, class_="pair")
        for value in difference.values
        if inside(value)
    ]
    bounds = difference.interval()
    if bounds is not None:
        a, b = (min(max(100 * bound, low), high) / 100 for bound in bounds)
        marks.append(element("line", x1=place(a), x2=place(b), y1=MIDDLE, y2=MIDDLE, class_="whisker"))
    mean = difference.mean or 0.0
    if inside(mean):
        marks.append(element("circle", cx=place(mean), cy=MIDDLE, r=5, class_=f"mean {verdict(comparison)}".strip()))
    elif 100 * mean < low:
        marks.append(_arrow("0%", "M9 9L1 15L9 21Z"))
    else:
        marks.append(_arrow("100%", "M-9 9L-1 15L-9 21Z"))
    return marks


def _arrow(x: str, path: str) -> Markup:
    return element("svg", element("path", d=path, class_="beyond"), x=x, overflow="visible")


def _line(place: float, class_: str) -> Markup:
    return element("line", x1=f"{place:.2f}%", x2=f"{place:.2f}%", y1=0, y2=HEIGHT, class_=class_)
