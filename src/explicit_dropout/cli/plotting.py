"""The plot of `verify`: closed form against drawn masks, and how far apart they are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from explicit_dropout.errors import ExplicitDropoutError, InputError
from explicit_dropout.sites import COMPONENTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from explicit_dropout.cli.verifying import Result


def check_file(path: Path) -> None:
    """Refuse a file that could not be written, before anything is computed for it."""
    if not path.parent.is_dir():
        raise InputError("--plot", "a file in a folder that exists", path)
    if path.is_dir() or path.suffix.lower().lstrip(".") not in _figure().canvas.get_supported_filetypes():
        raise InputError("--plot", "a file name that ends in .png, .pdf or .svg", path)


def _figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ExplicitDropoutError("a plot needs matplotlib:  pip install 'explicit-dropout[lab]'") from error
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw(results: list[Result], title: str, path: Path) -> None:
    figure = _figure()
    left, right = figure.subplots(1, 2)
    colours = {component: f"C{number}" for number, component in enumerate(COMPONENTS)}
    for component in COMPONENTS:
        chosen = [(number, r) for number, r in enumerate(results) if r.site.component == component]
        if not chosen:
            continue
        numbers, own = [number for number, _ in chosen], [r for _, r in chosen]
        left.errorbar(
            [r.closed for r in own],
            [float(r.drawn.mean) for r in own],
            [2 * float(r.drawn.standard_error) for r in own],
            fmt="o", markersize=4, color=colours[component], label=component.replace("_", " "),
        )  # fmt: skip
        apart = [r.deviation if r.deviation is not None else 0.0 for r in own]
        right.plot(numbers, apart, "o", markersize=4, color=colours[component])
    values = [r.closed for r in results] + [float(r.drawn.mean) for r in results]
    low, high = min(values), max(values)
    if low > 0:
        left.set_xscale("log")
        left.set_yscale("log")
        low, high = low / 1.3, high * 1.3
    left.plot([low, high], [low, high], color="0.6", linewidth=1, zorder=0)
    left.set(xlabel="closed form", ylabel="drawn masks (± 2 standard errors)", title="penalty at each site")
    left.legend(frameon=False, fontsize="small")
    right.axhspan(-2, 2, color="0.92", zorder=0)
    right.axhline(0, color="0.6", linewidth=1, zorder=0)
    furthest = max([3.0, *(abs(r.deviation) for r in results if r.deviation is not None)])
    right.set(
        xlabel="site, in the order of the model",
        ylabel="standard errors",
        title="closed form − drawn masks",
        ylim=(-1.15 * furthest, 1.15 * furthest),
    )
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
