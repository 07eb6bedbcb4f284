"""How the cost of a training step grows with tokens, width and depth, until the literal traces run out of memory.

    python benchmarks/growth.py                                                       # small, on this CPU, a minute
    python benchmarks/growth.py --device cuda --output results/benchmarks/growth-h200

A ViT of Hugging Face transformers with a feed-forward network four times as wide as the model and heads 64 wide (on a
CPU 16). One quantity grows at a time, from a point that the three curves share. On a GPU each step is measured alone,
with all of its memory, as a CUDA graph: launches would hide how the work grows (`--mode eager` to see them). On a CPU
it takes turns with `none`, as in step_time.py. Times are medians, memory is the peak of a step. "out of memory" is a
result, and ends the curve. OUTPUT.json, .md and .svg are written after every point.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plot
import written
from functional import environment
from hosts import Host, images, vit
from measure import seconds
from steps import MODES, beside, failure, prepare_compiler, tidy, training_step
from treatments import TREATMENTS

SERIES = (
    "none", "stochastic V+FF", "V+FF paper", "V+FF inverted", "Q+FF paper",
    "V+FF paper, literal traces", "Q+FF paper, literal traces",
)  # fmt: skip
PATCH = 4


@dataclass(frozen=True)
class Plan:
    """The point that all curves share, and where each of them goes. Tokens are squares: patches of an image."""

    batch: int
    head: int
    tokens: tuple[int, ...]
    width: tuple[int, ...]
    depth: tuple[int, ...]
    base: dict[str, int]

    def points(self) -> dict[str, list[dict[str, int]]]:
        return {axis: [{**self.base, axis: value} for value in getattr(self, axis)] for axis in AXES}

    def host(self, point: dict[str, int]) -> Host:
        side, width = PATCH * math.isqrt(point["tokens"]), point["width"]
        if (side // PATCH) ** 2 != point["tokens"]:
            raise ValueError(f"tokens must be the square of a number. Got {point['tokens']}")
        sizes = {"width": width, "layers": point["depth"], "heads": width // self.head, "inner": 4 * width}
        return Host(lambda p: vit(p, image=side, patch=PATCH, **sizes), images(self.batch, side))


AXES = ("tokens", "width", "depth")
PLANS = {
    "cpu": Plan(4, 16, (16, 64, 256), (48, 96, 192), (1, 2, 4), {"tokens": 64, "width": 96, "depth": 2}),
    "cuda": Plan(
        64, 64, (64, 256, 1024, 4096), (192, 384, 768, 1536), (2, 6, 12, 24), {"tokens": 64, "width": 384, "depth": 6}
    ),
}


def measure(host: Host, name: str, device: str, mode: str, budget: float) -> dict[str, Any]:
    treatment = TREATMENTS[name]
    try:
        with treatment.context():
            step, size = training_step(host, treatment, device, mode)
            found: dict[str, Any] = {"bytes": size}
            if device == "cuda":
                found["seconds"], found["spread"] = seconds(step, device, budget=budget, most=30)
            else:
                none, _ = training_step(host, TREATMENTS["none"], device, mode)
                found |= beside(none, step, device, budget)
    except Exception as error:
        found = {"error": failure(error)}
    step = None  # or the next one has less room
    tidy(device)
    return found


HEADER = (
    "| grows | tokens | width | depth | treatment | ms | ± | time × | MB | memory × |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    cells = [row["axis"], str(row["tokens"]), str(row["width"]), str(row["depth"]), row["treatment"]]
    if "error" in row:
        return "| " + " | ".join([*cells, row["error"].replace("|", "/"), *["–"] * 4]) + " |"
    cells += [f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['spread'] / 2:.2f}", ratio(row.get("time_ratio"))]
    cells += [f"{row['bytes'] / 1e6:.0f}" if row["bytes"] else "–", ratio(row.get("memory_ratio"))]
    return "| " + " | ".join(cells) + " |"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def figure(result: dict[str, Any]) -> str:
    """Milliseconds, the ratio to `none` and peak memory, over each quantity."""
    series = [name for name in TREATMENTS if any(row["treatment"] == name for row in result["rows"])]
    most = max(row.get("bytes", 0) for row in result["rows"])
    size, unit = (1e9, "GB") if most > 1e9 else (1e6, "MB")
    units: dict[str, Callable[[dict[str, Any]], float | None]] = {
        "ms": lambda row: 1e3 * row["seconds"],
        "time ×": lambda row: row.get("time_ratio"),
        unit: lambda row: row["bytes"] / size or None,
    }
    rows: dict[str, dict[str, list[plot.Curve]]] = {}
    for unit, value in units.items():
        for axis in dict.fromkeys(row["axis"] for row in result["rows"]):
            panel = []
            for name in series:
                own = [row for row in result["rows"] if row["axis"] == axis and row["treatment"] == name]
                found = [(row[axis], value(row)) for row in own if "error" not in row]
                bad = [(row[axis], row["error"]) for row in own if "error" in row]
                points = [(x, y) for x, y in found if y is not None]
                panel.append(plot.Curve(name, points, (bad[0][0], bad[0][1][:32]) if bad else None))
            if any(curve.points for curve in panel):
                rows.setdefault(unit, {})[axis] = panel
    place, about = result["environment"], result["base"]
    others = ", ".join(f"{axis} {value}" for axis, value in about.items())
    subtitle = (
        f"{place['device']}, torch {place['torch']}, {result['mode']}, batch {result['batch']}; "
        f"what does not grow: {others}"
    )
    return plot.curves("A training step, as the model grows", subtitle, rows, series)


def write(output: Path, result: dict[str, Any]) -> None:
    setting = f"{result['mode']}, batch {result['batch']}, {written.about(result)}"
    opening = f"# Growth of a training step\n\n`{result['command']}`: {setting}."
    written.write(output, result, opening, HEADER, line)
    if any("error" not in row for row in result["rows"]):
        output.with_suffix(".svg").write_text(figure(result))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--mode", choices=MODES, help="default: eager, on a GPU graph")
    parser.add_argument("--treatments", nargs="+", choices=tuple(TREATMENTS), default=SERIES, metavar="TREATMENT")
    parser.add_argument("--axes", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--budget", type=float, help="seconds of repeats for each point; 0.5, on a GPU 0.1")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, .md and .svg")
    options = parser.parse_args(arguments)
    device, plan = options.device, PLANS[options.device]
    prepare_compiler()
    mode = options.mode or ("graph" if device == "cuda" else "eager")
    command = "python " + shlex.join(sys.argv if arguments is None else ["benchmarks/growth.py", *arguments])
    result: dict[str, Any] = {"command": command, "environment": environment(device), "mode": mode}
    result |= {"batch": plan.batch, "base": plan.base, "rows": []}
    budget = options.budget or (0.1 if device == "cuda" else 0.5)
    known: dict[tuple[Any, ...], dict[str, Any]] = {}
    print(HEADER)
    for axis, points in plan.points().items():
        if axis not in options.axes:
            continue
        ended: set[str] = set()
        for point in points:
            for name in options.treatments:
                if name in ended:
                    continue
                cell = (name, *point.values())
                if cell not in known:
                    known[cell] = measure(plan.host(point), name, device, mode, budget)
                row = {"axis": axis, **point, "treatment": name, **known[cell]}
                none = known.get(("none", *point.values()), {})
                if "seconds" in row and "seconds" in none:
                    row.setdefault("time_ratio", row["seconds"] / none["seconds"])
                    row["memory_ratio"] = row["bytes"] / none["bytes"] if none["bytes"] else None
                elif "error" in row:
                    ended.add(name)
                result["rows"].append(row)
                print(line(row), flush=True)
                if options.output:
                    write(options.output, result)


if __name__ == "__main__":
    main()
