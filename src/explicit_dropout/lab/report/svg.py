"""Small parts that the figures are made of: elements with escaped text, scales and ticks.

Colours are classes of the style sheet, never values: so figures follow light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def element(name: str, *children: str, **attributes: object) -> Markup:
    """An element of SVG or HTML; text and attributes are escaped. `class_` is class, `stroke_width` stroke-width."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(children)
    return Markup(f"<{name}{written}>{inner}</{name}>") if inner else Markup(f"<{name}{written}/>")


def drawing(width: float, height: float, label: str, *children: str, class_: str = "") -> Markup:
    """An image of the given size that says what it shows to those who cannot see it."""
    return element(
        "svg", *children,
        class_=class_ or None, viewBox=f"0 0 {_short(width)} {_short(height)}", width=width, height=height,
        role="img", aria_label=label,
    )  # fmt: skip


def text(x: float, y: float, content: str, *, anchor: str = "start", class_: str | None = None) -> Markup:
    return element("text", content, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def window(x: float, y: float, width: float, height: float, *children: str) -> Markup:
    """A part of a drawing that shows nothing beyond its edges; coordinates inside are those outside."""
    box = " ".join(str(_short(float(value))) for value in (x, y, width, height))
    return element("svg", *children, x=x, y=y, width=width, height=height, viewBox=box)


def polyline(points: Iterable[tuple[float, float]], class_: str) -> Markup:
    return element("path", d=_path(points), class_=class_)


def band(upper: Sequence[tuple[float, float]], lower: Sequence[tuple[float, float]], class_: str) -> Markup:
    return element("path", d=_path([*upper, *reversed(lower)]) + "Z", class_=class_)


def _path(points: Iterable[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in points)


def _short(value: object) -> object:
    """Numbers to a tenth of a pixel: nobody sees more, and files stay small."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic. Values beyond the ends land beyond the pixels, though not far."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low * 1e-9))
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + min(max(share, -1.0), 2.0) * (self.end - self.start)

    def ticks(self, count: int = 4) -> list[float]:
        """Round values within the ends."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for factors in ((1, 2, 5), (1, 3), (1,)):
                values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
                inside = [value for value in values if self.low <= value <= self.high]
                if len(inside) <= count + 1:
                    return inside
            return inside[:: math.ceil(len(inside) / count)]
        return round_ticks(self.low, self.high, count)


def round_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from low to high, about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def tick_label(value: float) -> str:
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        mantissa, power = f"{value:.0e}".split("e")
        return ("" if mantissa == "1" else f"{mantissa}×") + "10" + str(int(power)).translate(_SUPERSCRIPT)
    return f"{value:.4g}".replace("-", "−")


_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def thinned(values: Sequence[int], most: int = 80) -> list[int]:
    """At most so many of them, evenly spread, first and last included."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
