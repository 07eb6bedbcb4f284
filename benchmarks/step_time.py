"""What a training step costs with explicit dropout attached, against no dropout and against other ways to have it.

    python benchmarks/step_time.py                                     # a small ViT on this CPU, about a minute
    python benchmarks/step_time.py --device cuda --output results/benchmarks/step-time-h200
    python benchmarks/step_time.py --device cuda --output results/benchmarks/step-time-h200 --add \\
        --models ViT-7 --modes compiled 'compiled graph'               # more rows for the same file

Models of Hugging Face transformers, as they come: the paper's ViT for CIFAR (7 layers, width 384), ViT-B/16 and GPT-2
small. One step is forward, loss, penalty, backward and optimiser (AdamW), bfloat16 autocast on a GPU; eager, replayed
from a CUDA graph, compiled, or both. Every treatment is timed beside `none`, in turns of a few steps each, so that a
machine that slows down slows both: times are medians with their interquartile range, the time ratio is the median over
turns, memory is the peak of a step over that of `none`. The floor is what the kernels of a penalty must move at least
at the bandwidth of a copy, over what the GPU is busy with in `none`. What fails is a row that says how.

`--profile` adds what the GPU itself was busy with, and with which kernels. OUTPUT.json, .md and .svg are written after
every cell.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import plot
import torch
import written
from floor import ceilings, least_bytes
from functional import environment
from hosts import Host, hosts
from steps import MODES, Step, beside, failure, gpu_profile, prepare_compiler, tidy, training_step, turn
from together import Alone, Cell, together
from treatments import TREATMENTS, Treatment

SHORT = (
    "none", "none, GELU by torch", "stochastic V+FF", "stochastic Q+FF", "DropKey+FF", "V+FF paper", "V+FF inverted",
    "AV+FF paper", "Q+FF paper", "QK+FF inverted", "V+FF paper, plain autograd", "V+FF paper, literal traces",
)  # fmt: skip
LONG = tuple(name for name in TREATMENTS if name in SHORT or name in (
    "model's own dropout", "model's own dropout, twins", "V+FF bernoulli", "Q+FF inverted",
    "V+FF inverted, plain autograd",
))  # fmt: skip
DEFAULTS = {"cpu": LONG, "cuda": SHORT}

Row = dict[str, Any]
Least = dict[str, tuple[int, float]]
"""Bytes that treatments have to move, and the seconds that a copy of so many takes."""


def measure(
    host: Host, treatments: Sequence[str], device: str, mode: str, budget: float, profile: bool, least: Least,
    alone: Alone = nullcontext,
) -> Iterator[Row]:  # fmt: skip
    """A row for each treatment of one model in one mode, as they come. `least`: what some move at least."""
    torch._dynamo.reset()
    busy = None
    try:
        none, bytes_of_none = training_step(host, Treatment(), device, mode)
    except Exception as error:
        told = failure(error)
        tidy(device)
        yield from ({"treatment": name, "error": told} for name in treatments)
        return
    for name in treatments:
        treatment, row = TREATMENTS[name], {"treatment": name}
        try:
            with treatment.context():
                step, size = (none, bytes_of_none) if name == "none" else training_step(host, treatment, device, mode)
                row |= {"bytes": size, "memory_ratio": size / bytes_of_none if bytes_of_none else None}
                with alone():
                    busy = busy or busy_ms(none, device, mode)
                    row |= beside(none, step, device, budget)
                    if profile and device == "cuda" and "graph" not in mode:
                        row["profile"] = gpu_profile(step)
            if busy:
                row["none_busy_ms"] = busy
            if busy and name in least:
                size, took = least[name]
                row |= {"floor_bytes": size, "floor_seconds": took, "floor_ratio": 1 + 1e3 * took / busy}
        except Exception as error:
            row = {"treatment": name, "error": failure(error)}
        step = None  # or the next one has less room
        tidy(device)
        yield row


def measure_alone(cell: Cell, alone: Alone) -> Row:
    """The row of one cell, in a process of its own."""
    model, mode, treatment, device, budget, profile, least = cell
    prepare_compiler()
    (row,) = measure(hosts(device)[model], [treatment], device, mode, budget, profile, least, alone)
    return {"model": model, "mode": mode, **row}


def busy_ms(none: Step, device: str, mode: str) -> float | None:
    """Milliseconds that the GPU is busy in a step: those of a replay, where it does not wait for launches."""
    if device != "cuda":
        return None
    return 1e3 * turn(none, device, 10) if "graph" in mode else gpu_profile(none)["busy_ms"]


def least_moved(host: Host, treatments: Sequence[str], ceilings: dict[str, float]) -> Least:
    """What explicit treatments must move."""
    explicit = [name for name in treatments if TREATMENTS[name].kind == "explicit"]
    sizes = {name: least_bytes(host, TREATMENTS[name], "cuda") for name in explicit}
    tidy("cuda")
    bandwidth = ceilings["copy_bytes_per_second"]
    return {name: (size, size / bandwidth) for name, size in sizes.items() if size is not None}


HEADER = (
    "| model | mode | treatment | ms | ± | time × | ± | floor × | memory × | GPU busy ms | launches |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    cells = [row["model"], row["mode"], row["treatment"]]
    if "error" in row:
        return "| " + " | ".join([*cells, row["error"].replace("|", "/"), *["–"] * 7]) + " |"
    profile = row.get("profile") or {}
    cells += [f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['spread'] / 2:.2f}"]
    cells += [f"{row['time_ratio']:.3f}", f"{row['ratio_spread'] / 2:.3f}", optional(row.get("floor_ratio"))]
    cells += [optional(row["memory_ratio"]), optional(profile.get("busy_ms"), 2), optional(profile.get("launches"), 0)]
    return "| " + " | ".join(cells) + " |"


def optional(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def figure(result: dict[str, Any]) -> str:
    """Time over that of `none`, a panel for each model."""
    rows = [row for row in result["rows"] if row["treatment"] != "none"]
    modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
    groups: dict[str, dict[str, plot.Bar]] = {}
    for row in rows:
        bars = groups.setdefault(row["model"], {})
        bar = bars.setdefault(row["treatment"], plot.Bar(row["treatment"]))
        if "error" in row:
            bar.remark = row["error"] if len(row["error"]) < 60 else row["error"][:59] + "…"
        else:
            bar.values[row["mode"]] = row["time_ratio"]
            bar.floor = bar.floor or row.get("floor_ratio")
    for bars in groups.values():
        for bar in bars.values():
            bar.remark = "" if bar.values else bar.remark
    environment = result["environment"]
    subtitle = f"{environment['device']}, torch {environment['torch']}; time of a step, times that without dropout"
    return plot.ratios("A training step", subtitle, {k: list(v.values()) for k, v in groups.items()}, modes)


def write(output: Path, result: dict[str, Any]) -> None:
    commands = "\n".join(f"- `{command}`" for command in result["commands"])
    ratios = f"Ratios against `none`, ± half the interquartile range.{measured_ceilings(result)}"
    opening = f"# Training step time\n\n{commands}\n\n{written.about(result)}. {ratios}"
    written.write(output, result, opening, HEADER, line)
    if any(row["treatment"] != "none" for row in result["rows"]):
        output.with_suffix(".svg").write_text(figure(result))


def measured_ceilings(result: dict[str, Any]) -> str:
    found = result.get("ceilings")
    if not found:
        return ""
    copy, product = found["copy_bytes_per_second"] / 1e12, found["matmul_flop_per_second"] / 1e12
    return (
        f" A copy moved {copy:.2f} TB/s here (read and written), a product of 8192 × 8192 made {product:.0f} TFLOP/s."
    )


def begin(output: Path | None, add: bool, facts: dict[str, Any]) -> dict[str, Any]:
    """An empty result, or the one that is there already, to be added to."""
    here = {"commands": [facts["command"]], "environment": facts["environment"], "ceilings": facts["ceilings"]}
    if not add:
        return {**here, "rows": []}
    if output is None:
        raise SystemExit("--add needs --output, the file to add to")
    old = json.loads(output.with_suffix(".json").read_text())
    if old["environment"] != facts["environment"]:
        raise SystemExit(f"{output}.json was measured elsewhere: {old['environment']}, here {facts['environment']}")
    return {**old, **here, "commands": [*old["commands"], facts["command"]]}


def put(rows: list[Row], row: Row) -> None:
    """Add a row, for an older one of the same cell; rows stand in the order of modes and treatments, whenever made."""
    cell = ("model", "mode", "treatment")
    rows[:] = [old for old in rows if any(old[name] != row[name] for name in cell)] + [row]
    orders = list(dict.fromkeys(row["model"] for row in rows)), MODES, list(TREATMENTS)
    rows.sort(key=lambda row: [order.index(row[name]) for name, order in zip(cell, orders, strict=True)])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    known = "; ".join(TREATMENTS)
    parser.add_argument("--treatments", nargs="+", choices=tuple(TREATMENTS), metavar="TREATMENT", help=known)
    parser.add_argument("--modes", nargs="+", choices=MODES, help="default: eager, and on a GPU graph")
    parser.add_argument("--models", nargs="+", help="only models whose name contains one of these")
    parser.add_argument("--budget", type=float, help="seconds of repeats for each cell; 1, on a GPU 0.4")
    parser.add_argument("--profile", action="store_true", help="also say what the GPU was busy with")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, .md and .svg")
    parser.add_argument("--add", action="store_true", help="keep the rows of other cells that OUTPUT.json has")
    parser.add_argument(
        "--together", action="store_true",
        help="a process for each cell, ready at the same time and timed one after the other: sooner, if they compile",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    device = options.device
    prepare_compiler()
    facts: dict[str, Any] = {
        "command": "python " + shlex.join(sys.argv if arguments is None else ["benchmarks/step_time.py", *arguments]),
        "environment": environment(device),
        "ceilings": ceilings() if device == "cuda" else None,
    }
    result = begin(options.output, options.add, facts)
    print(HEADER)
    treatments = options.treatments or DEFAULTS[device]
    budget = options.budget or (0.4 if device == "cuda" else 1.0)
    modes = options.modes or (("eager", "graph") if device == "cuda" else ("eager",))
    chosen = {
        model: host
        for model, host in hosts(device).items()
        if not options.models or any(part in model for part in options.models)
    }
    least = {
        model: least_moved(host, treatments, facts["ceilings"]) if device == "cuda" else {}
        for model, host in chosen.items()
    }

    def one_by_one() -> Iterator[Row]:
        for model, host in chosen.items():
            for mode in modes:
                for row in measure(host, treatments, device, mode, budget, options.profile, least[model]):
                    yield {"model": model, "mode": mode, **row}

    cells = [
        (model, mode, treatment, device, budget, options.profile, least[model])
        for model in chosen
        for mode in modes
        for treatment in treatments
    ]
    for row in together(measure_alone, cells) if options.together else one_by_one():
        put(result["rows"], row)
        print(line(row), flush=True)
        if options.output:
            write(options.output, result)


if __name__ == "__main__":
    main()
