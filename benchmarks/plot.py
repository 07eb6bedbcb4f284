"""Figures as SVG that need nothing: one file each, its own colours for light and for dark backgrounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape, quoteattr

STYLE = """
svg { --paper: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d8dee4; --edge: #8c959f;
  --c0: #6e7781; --c1: #bc4c00; --c2: #0969da; --c3: #1a7f37; --c4: #8250df; --c5: #cf222e; --c6: #9a6700; }
@media (prefers-color-scheme: dark) { svg { --paper: #16191d; --ink: #e6edf3; --soft: #9aa4af; --line: #30363d;
  --edge: #6e7781; --c0: #9aa4af; --c1: #f0883e; --c2: #58a6ff; --c3: #3fb950; --c4: #bc8cff; --c5: #ff7b72;
  --c6: #d29922; } }
.paper { fill: var(--paper); }
text { font: 12px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.title { font-size: 14px; font-weight: 600; } .soft { fill: var(--soft); font-size: 11.5px; }
.rule { stroke: var(--line); stroke-width: 1; } .one { stroke: var(--edge); stroke-width: 1.5; }
.floor { stroke: var(--ink); stroke-width: 2; } .curve { fill: none; stroke-width: 2; }
""" + "".join(f".c{i} {{ stroke: var(--c{i}); fill: var(--c{i}); }} .curve.c{i} {{ fill: none; }}\n" for i in range(7))
LETTER = 6.6
"""About how wide a letter is, in pixels."""


def element(name: str, *children: str, **attributes: object) -> str:
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_short(value))}"
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(children)
    return f"<{name}{written}>{inner}</{name}>" if inner else f"<{name}{written}/>"


def text(x: float, y: float, content: str, class_: str | None = None, anchor: str | None = None) -> str:
    return element("text", escape(content), x=x, y=y, class_=class_, text_anchor=anchor)


def line(x: float, y: float, to_x: float, to_y: float, class_: str) -> str:
    return element("line", x1=x, y1=y, x2=to_x, y2=to_y, class_=class_)


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """A whole file; the label says what it shows to those who cannot see it."""
    inner = [element("title", escape(label)), element("style", escape(STYLE))]
    inner.append(element("rect", class_="paper", width=width, height=height, rx=6.0))
    return element(
        "svg", *inner, *parts,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {_short(width)} {_short(height)}",
        width=width, height=height, role="img", aria_label=label,
    ) + "\n"  # fmt: skip


def _short(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def mark(shape: int, x: float, y: float, class_: str, size: float = 4.5) -> str:
    """A dot, a diamond, a triangle or a square, for those who see no colours."""
    if shape % 4 == 0:
        return element("circle", cx=x, cy=y, r=size, class_=class_)
    corners = {
        1: [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
        2: [(0, -1.2), (1.1, 0.8), (-1.1, 0.8)],
        3: [(-0.9, -0.9), (0.9, -0.9), (0.9, 0.9), (-0.9, 0.9)],
    }[shape % 4]
    points = " ".join(f"{x + size * dx:.1f},{y + size * dy:.1f}" for dx, dy in corners)
    return element("polygon", points=points, class_=class_)


def legend(x: float, y: float, width: float, names: Sequence[str], colours: Sequence[int]) -> tuple[list[str], float]:
    """Marks with their names in as many lines as they need, and how high that is."""
    parts, left, top = [], x, y
    for number, name in enumerate(names):
        room = 18 + LETTER * len(name)
        if left > x and left + room > x + width:
            left, top = x, top + 20
        parts += [mark(number, left + 6, top - 4, f"c{colours[number]}"), text(left + 16, top, name, "soft")]
        left += room + 8
    return parts, top - y + 20


@dataclass(frozen=True)
class Scale:
    """From values to pixels, logarithmic."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low) if self.high > self.low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between the ends."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in (FINE, (1, 1.2, 1.5, 2, 3, 5, 7), (1, 1.5, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
            values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
            inside = [value for value in values if self.low * 0.999 <= value <= self.high * 1.001]
            if len(inside) <= most:
                return inside
        return inside[:: math.ceil(len(inside) / most)]


FINE = (1, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2, 3, 5, 7)


def number(value: float) -> str:
    return f"{value:,.4g}" if value < 1e5 else f"{value:.0e}"


@dataclass
class Bar:
    """A line of the chart: a value for each series that has one, a floor, or what stands there instead."""

    name: str
    values: dict[str, float] = field(default_factory=dict)
    floor: float | None = None
    remark: str = ""


WIDEST = 2.0
"""Ratios beyond are written instead of drawn: they would press all others together."""


def ratios(title: str, subtitle: str, groups: dict[str, list[Bar]], series: Sequence[str]) -> str:
    """Dots over a logarithmic axis of ratios, a panel for each group, a line for each bar, a mark for each series."""
    width, row, left = 860.0, 21.0, 30 + LETTER * max(len(bar.name) for bars in groups.values() for bar in bars)
    right, colours = width - 30, [(2, 1, 3, 4)[place % 4] for place in range(len(series))]
    keys, height = legend(16, 70, width - 150, series, colours)
    parts = [text(16, 28, title, "title"), text(16, 47, subtitle, "soft"), *keys]
    if any(bar.floor for bars in groups.values() for bar in bars):
        parts += [line(width - 110, 60, width - 110, 72, "floor"), text(width - 102, 70, "the floor", "soft")]
    top = 70 + height + 6
    for name, bars in groups.items():
        drawn = [v for bar in bars for v in (*bar.values.values(), bar.floor or 1) if v <= WIDEST]
        scale = Scale(min(0.97, *drawn), max(1.1, *drawn) * 1.02, left, right)
        bottom = top + 22 + row * len(bars)
        parts.append(text(16, top + 8, name, "title"))
        for tick in scale.ticks(8):
            parts.append(line(scale(tick), top + 18, scale(tick), bottom, "one" if tick == 1 else "rule"))
            parts.append(text(scale(tick), bottom + 15, f"{tick:.3g} ×", "soft", "middle"))
        for place, bar in enumerate(bars):
            y = top + 32 + row * place
            parts.append(text(left - 10, y + 4, bar.name, None, "end"))
            if bar.floor is not None:
                parts.append(line(scale(bar.floor), y - 8, scale(bar.floor), y + 8, "floor"))
            beyond = [f"{kind} {value:.1f} ×" for kind, value in bar.values.items() if value > WIDEST]
            said = ", ".join([*beyond, bar.remark] if bar.remark else beyond)
            parts.append(text(right, y + 4, said + (" →" if beyond else ""), "soft", "end") if said else "")
            for kind, value in bar.values.items():
                which = series.index(kind)
                if value <= WIDEST:
                    parts.append(mark(which, scale(value), y, f"c{colours[which]}"))
        top = bottom + 38
    return drawing(width, top - 8, title, parts)


@dataclass
class Curve:
    """Points of one series; `broken` is where it ended, and why."""

    name: str
    points: list[tuple[float, float]]
    broken: tuple[float, str] | None = None


def curves(title: str, subtitle: str, rows: dict[str, dict[str, list[Curve]]], series: Sequence[str]) -> str:
    """Small panels, both axes logarithmic: a row of them for each unit of y, a column for each quantity of x.

    Where the unit is a ratio (×), curves leave the panel at its upper edge.
    """
    width, high, gap = 940.0, 230.0, 56.0
    columns = max(len(row) for row in rows.values())
    wide = (width - 16 - gap * columns) / columns
    keys, height = legend(16, 70, width - 32, series, [place % 7 for place in range(len(series))])
    parts = [text(16, 28, title, "title"), text(16, 47, subtitle, "soft"), *keys]
    top = 70 + height + 10
    for unit, panels in rows.items():
        values = [y for panel in panels.values() for curve in panel for _, y in curve.points]
        if "×" in unit:
            values = [value for value in values if value <= WIDEST] or [1.0, WIDEST]
        margin = 1.02 if "×" in unit else 1.3
        scale_y = Scale(min(values) / margin, max(values) * margin, top + high, top + 14)
        parts.append(text(16, top + 4, unit, "soft"))
        for place, (quantity, panel) in enumerate(panels.items()):
            start = gap + place * (wide + gap)
            xs = sorted({x for curve in panel for x, _ in curve.points} | {c.broken[0] for c in panel if c.broken})
            scale_x = Scale(xs[0], xs[-1], start + 10, start + wide - 10)
            for tick in scale_y.ticks(7):
                kind = "one" if tick == 1 and "×" in unit else "rule"
                parts.append(line(start, scale_y(tick), start + wide, scale_y(tick), kind))
                parts.append(text(start - 6, scale_y(tick) + 4, number(tick), "soft", "end"))
            parts += [text(scale_x(x), top + high + 17, f"{x:g}", "soft", "middle") for x in xs]
            parts.append(text(start + wide / 2, top + high + 34, quantity, None, "middle"))
            drawn = [part for curve in panel for part in _drawn(curve, series.index(curve.name), scale_x, scale_y)]
            box = f"{start:.1f} {top + 8:.1f} {wide:.1f} {high - 4:.1f}"
            parts.append(element("svg", *drawn, x=start, y=top + 8, width=wide, height=high - 4, viewBox=box))
            for curve in panel:
                if curve.broken and "×" not in unit:
                    x, colour = scale_x(curve.broken[0]), f"c{series.index(curve.name) % 7}"
                    parts.append(text(x, top + 30, "×", colour, "middle"))
                    parts.append(text(x + 4, top + 12, curve.broken[1], "soft", "end"))
        top += high + 62
    return drawing(width, top - 12, title, parts)


def _drawn(curve: Curve, which: int, scale_x: Scale, scale_y: Scale) -> list[str]:
    points = [(scale_x(x), scale_y(y)) for x, y in sorted(curve.points)]
    marks = [mark(which, x, y, f"c{which % 7}", 3.5) for x, y in points]
    if len(points) < 2:
        return marks
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return [element("path", d=path, class_=f"curve c{which % 7}"), *marks]
