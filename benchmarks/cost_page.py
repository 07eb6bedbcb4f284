"""Make the numbers of docs/cost.md from the files in results/benchmarks, and the summary of them in README.md.

    python benchmarks/cost_page.py            # rewrite what stands between markers of these pages, and figures
    python benchmarks/cost_page.py --check    # say whether that would change anything

Measurements stand in places marked `<!-- begin NAME -->` … `<!-- end NAME -->`, which are filled in here. A result that
has not been measured says so there, with the command that measures it. The text explains some of them, and what it says
has to be read again when they change: nothing checks it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import augmentation as augmenting
import growth
import step_time
from steps import MODES, by_kind
from treatments import TREATMENTS

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results" / "benchmarks", ROOT / "docs" / "cost.md"
README = ROOT / "README.md"
FIGURES = PAGE.parent / "figures"
COMMANDS = {
    "step-time-h200": "python benchmarks/step_time.py --device cuda --output results/benchmarks/step-time-h200",
    "step-time-cpu": "python benchmarks/step_time.py --output results/benchmarks/step-time-cpu",
    "growth-h200": "python benchmarks/growth.py --device cuda --output results/benchmarks/growth-h200",
    "growth-cpu": "python benchmarks/growth.py --output results/benchmarks/growth-cpu",
    "trainer-h200": "python benchmarks/trainer.py --output results/benchmarks/trainer-h200",
    "recipe-h200": "python benchmarks/trainer.py --optimiser muon --augmentation autoaugment --output "
    "results/benchmarks/recipe-h200",
    "attention-h200": "python benchmarks/attention.py --output results/benchmarks/attention-h200",
    "augmentation-h200": "python benchmarks/augmentation.py --output results/benchmarks/augmentation-h200",
    "functional-cpu": "python benchmarks/functional.py --output results/benchmarks/functional-cpu",
    "functional-h200": "python benchmarks/functional.py --device cuda --output results/benchmarks/functional-h200",
    "overhead-cpu": "python benchmarks/overhead.py --output results/benchmarks/overhead-cpu",
    "vectorised-cpu": "python benchmarks/vectorised.py --output results/benchmarks/vectorised-cpu",
}  # fmt: skip
STEPS = ("step-time-h200", "step-time-cpu")
STOCHASTIC = tuple(name for name, treatment in TREATMENTS.items() if treatment.kind != "explicit")
"""What has no penalty."""
FLATTERED = {("GPT-2 small, 16 × 1024", "eager"), ("GPT-2 small, 16 × 1024", "graph")}
"""Where kernels replace an activation that the step without dropout makes by one operation after the other."""
Row = dict[str, Any]


# ---------------------------------------------------------------------------------------------- reading and writing


def load(name: str, folder: Path = RESULTS) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *body = ("| " + " | ".join(cells) + " |" for cells in (columns, *rows))
    return "\n".join([head, "|" + "---|" * len(columns), *body])


def ratio(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def ratios(rows: Iterable[Row], name: str) -> str:
    """A ratio that modes share, or from where to where it goes: 1.06–1.24."""
    values = [row[name] for row in rows if row.get(name)]
    ends = dict.fromkeys(ratio(end) for end in (min(values), max(values))) if values else {ratio(None): None}
    return "–".join(ends)


def machine(result: dict[str, Any]) -> str:
    about = result["environment"]
    threads = f", {about['threads']} threads" if str(about["device"]).startswith(("x86", "arm", "aarch")) else ""
    return f"{about['device']}{threads}, torch {about['torch']}"


def missing(name: str) -> str:
    return f"Not measured yet: `{COMMANDS[name]}`."


def whole(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if "error" not in row]


# ---------------------------------------------------------------------------------------------- training steps


def summary(results: dict[str, Any]) -> str:
    """A line for each model and mode: what most people would attach."""
    shown = ("stochastic V+FF", "V+FF paper", "V+FF inverted", "Q+FF paper")
    lines = []
    for name in STEPS:
        result = results[name]
        for model, mode in cells_of(result):
            cell = [row for row in whole(result["rows"]) if (row["model"], row["mode"]) == (model, mode)]
            found = {row["treatment"]: row for row in cell}
            times = [ratio(found[treatment]["time_ratio"]) if treatment in found else "–" for treatment in shown]
            memory = [
                ratio(found[treatment]["memory_ratio"]) if treatment in found else "–" for treatment in shown[1:3]
            ]
            if set(shown) & set(found):
                place = "CPU" if name.endswith("cpu") else result["environment"]["device"].removeprefix("NVIDIA ")
                lines.append([f"{place}: {model}", mode, *times, " / ".join(memory)])
    return table(["model", "mode", *shown, "memory, V+FF paper / inverted"], lines)


def cells_of(result: dict[str, Any] | None) -> list[tuple[str, str]]:
    rows = [] if result is None else result["rows"]
    models = dict.fromkeys(row["model"] for row in rows)
    return [
        (model, mode)
        for model in models
        for mode in MODES
        if any((r["model"], r["mode"]) == (model, mode) for r in rows)
    ]


def steps(name: str) -> Callable[[dict[str, Any]], str]:
    def section(results: dict[str, Any]) -> str:
        """The figure and a table for each model: treatments down, modes across."""
        result = results[name]
        if result is None:
            return missing(name)
        parts = [
            f"{machine(result)}.{step_time.measured_ceilings(result)}{turns(result)}",
            f"![Time of a training step](figures/{name}.svg)",
        ]
        for model in dict.fromkeys(row["model"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["model"] == model]
            modes = [mode for mode in MODES if any(row["mode"] == mode for row in rows)]
            lines = []
            for treatment in dict.fromkeys([*TREATMENTS, *(row["treatment"] for row in rows)]):
                own = {row["mode"]: row for row in rows if row["treatment"] == treatment}
                if own:
                    floor, memory = (ratios(whole(own.values()), name) for name in ("floor_ratio", "memory_ratio"))
                    words = "none, beside itself" if treatment == "none" else treatment
                    lines.append([words, *(time_of(own.get(mode)) for mode in modes), floor, memory])
            said = ", ".join(filter(None, (baseline(rows, mode) for mode in modes)))
            parts.append(f"**{model}**" + (f"; without dropout {said}" if said else ""))
            parts.append(table(["treatment", *modes, "floor", "memory"], lines))
        return "\n\n".join([*parts, *notes(result)])

    return section


def baseline(rows: list[Row], mode: str) -> str:
    """What a step without dropout took beside each of the treatments: the median, and from where to where."""
    times = sorted(1e3 * row["none_seconds"] for row in whole(rows) if row["mode"] == mode and "none_seconds" in row)
    if not times:
        return ""
    middle, few, many = (f"{time:.1f}" for time in (median(times), times[0], times[-1]))
    return f"{middle} ms {mode}" + (f" ({few} to {many})" if few != many else "")


def turns(result: dict[str, Any]) -> str:
    """Over how many turns ratios are medians."""
    numbers = [row["turns"] for row in whole(result["rows"]) if "turns" in row]
    return f" Ratios are medians over {min(numbers)} to {max(numbers)} turns." if numbers else ""


def time_of(row: Row | None) -> str:
    if row is None:
        return "–"
    if "error" in row:
        return row["error"] if len(row["error"]) < 20 else "fails"
    return f"{row['time_ratio']:.2f} ± {row.get('ratio_spread', 0) / 2:.2f}"


def notes(result: dict[str, Any]) -> list[str]:
    """What fails, in its own words, and what those who measured had to say."""
    errors = {}
    for row in result["rows"]:
        if len(row.get("error", "")) >= 20:
            errors.setdefault(row["error"], []).append(f"{row['treatment']} ({row['model']}, {row['mode']})")
    said = [f"- Fails: {'; '.join(where)}: {error}" for error, where in errors.items()]
    if result.get("note"):
        said.append(f"- {result['note']}")
    return ["\n".join(said)] if said else []


def floors(results: dict[str, Any]) -> str:
    """What must be moved, how long that takes at best, and how long the GPU was busy, or the step took."""
    result, lines = results["step-time-h200"], []
    for row in [] if result is None else whole(result["rows"]):
        if row.get("floor_ratio"):
            least, own = row["floor_seconds"], row.get("profile", {}).get("busy_ms")
            lines.append([
                row["model"], row["mode"], row["treatment"],
                f"{row['floor_bytes'] / 1e9:.2f}", f"{1e3 * least:.2f}",
                ratio(row["floor_ratio"]), ratio(own / row["none_busy_ms"]) if own else "–", ratio(row["time_ratio"]),
            ])  # fmt: skip
    if not lines:
        return missing("step-time-h200")
    return table(["model", "mode", "treatment", "GB", "ms", "floor ×", "GPU busy ×", "step ×"], lines)


ADDED = {
    "energies": r"^_(energies|gradients|column|sample|squares)",
    "attention weights": r"^_(attended|short)",
    "scores": r"^_(gram|score|spread|reach)",
    "products of matrices": r"nvjet|gemm|cublas|cutlass|wgmma|splitKreduce",
}
"""What kernels of a penalty do, by their names; all others are torch's."""


def added(results: dict[str, Any]) -> str:
    """What treatments add to the time that the GPU is busy in an eager step, by what kernels do."""
    result, lines = results["step-time-h200"], []
    rows = (
        [] if result is None else [row for row in whole(result["rows"]) if "profile" in row and row["mode"] == "eager"]
    )
    base = {row["model"]: row["profile"] for row in rows if row["treatment"] == "none"}
    for row in rows:
        if row["treatment"] in (*STOCHASTIC, "none") or row["model"] not in base:
            continue
        before, after = base[row["model"]], row["profile"]
        more = {kind: total(after, pattern) - total(before, pattern) for kind, pattern in ADDED.items()}
        busy = after["busy_ms"] - row["none_busy_ms"]
        lines.append([
            row["model"], row["treatment"], *map(signed, more.values()),
            signed(busy - sum(more.values())), signed(busy), f"{after['launches'] - before['launches']:.0f}",
        ])  # fmt: skip
    if not lines:
        return missing("step-time-h200")
    return table(["model", "treatment", *ADDED, "torch's additions and copies", "in all, ms", "launches"], lines)


def signed(ms: float) -> str:
    return f"{ms:.2f}".replace("-", "−") if abs(ms) >= 0.005 else "–"


def total(profile: dict[str, Any], pattern: str) -> float:
    """Milliseconds of the kernels of such names."""
    return sum(kernel["ms"] for kernel in profile["kernels"] if re.search(pattern, kernel["name"]))


def overhead(results: dict[str, Any]) -> str:
    """What a site costs on the CPU, whatever its tensors."""
    result = results["overhead-cpu"]
    if result is None:
        return missing("overhead-cpu")
    lines = [[row["treatment"], f"{row['microseconds']:.0f} ± {row['spread'] / 2:.0f}"] for row in result["rows"]]
    return f"{machine(result)}.\n\n" + table(["", "µs for each site"], lines)


# ---------------------------------------------------------------------------------------------- growth, training loop


def curves(name: str) -> Callable[[dict[str, Any]], str]:
    def section(results: dict[str, Any]) -> str:
        """The figure, and the ends of each curve."""
        result = results[name]
        if result is None:
            return missing(name)
        lines = []
        for axis in dict.fromkeys(row["axis"] for row in result["rows"]):
            values = sorted({row[axis] for row in result["rows"] if row["axis"] == axis})
            for treatment in dict.fromkeys(row["treatment"] for row in result["rows"]):
                own = {
                    row[axis]: row for row in result["rows"] if row["axis"] == axis and row["treatment"] == treatment
                }
                if treatment != "none":
                    ends = [grown(own[value]) if value in own else "not measured" for value in values]
                    lines.append([f"{axis} {', '.join(map(str, values))}", treatment, ", ".join(ends)])
        said = f"{machine(result)}, {result['mode']}, batch {result['batch']}."
        picture = f"![Time and memory of a training step as the model grows](figures/{name}.svg)"
        return f"{said}\n\n{picture}\n\n{table(['grows', 'treatment', 'time × (memory ×)'], lines)}"

    return section


def grown(row: Row) -> str:
    if "error" in row:
        return row["error"]
    memory = row.get("memory_ratio")
    return ratio(row.get("time_ratio")) + (f" ({memory:.2f})" if memory else "")


def speeds(name: str) -> Callable[[dict[str, Any]], str]:
    def section(results: dict[str, Any]) -> str:
        """Images per second of the training loop."""
        result = results[name]
        if result is None:
            return missing(name)
        lines = [
            [
                str(row["batch"]),
                row["mode"],
                f"`{row['row']}`",
                f"{row['images_per_second']:,.0f}",
                f"{row['least']:,.0f} – {row['most']:,.0f}",
            ]
            for row in whole(result["rows"])
        ]
        parts = [f"{machine(result)}.", table(["batch", "mode", "row", "images/s", "from – to"], lines)]
        return "\n\n".join([*parts, *notes(result)])

    return section


def trainer(results: dict[str, Any]) -> str:
    """The same, and where the time of a step goes."""
    name = "trainer-h200"
    rows = [] if results[name] is None else whole(results[name]["rows"])
    return "\n\n".join([speeds(name)(results), *busy([row for row in rows if row["batch"] == 512])])


def busy(rows: Sequence[Row]) -> Iterator[str]:
    """Where the time of a step goes, for the rows that were profiled."""
    profiled = {row["row"]: by_kind(row["profile"]) for row in rows if "profile" in row}
    if not profiled:
        return
    kinds = dict.fromkeys(kind for found in profiled.values() for kind in list(found)[:-1])
    kinds |= dict.fromkeys(list(found)[-1] for found in profiled.values())
    lines = [
        [kind, *(f"{1000 * found[kind]:,.0f}" if kind in found else "–" for found in profiled.values())]
        for kind in kinds
    ]
    lines.append(["**in all**", *(f"**{1000 * sum(found.values()):,.0f}**" for found in profiled.values())])
    yield "Microseconds that the GPU is busy in a step at batch 512, by what its kernels are for:"
    yield table(["", *(f"`{row}`" for row in profiled)], lines)


def short_attention(results: dict[str, Any]) -> str:
    result = results["attention-h200"]
    if result is None:
        return missing("attention-h200")
    lines = [[row["kind"], f"{row['forward']:.0f}", f"{row['both']:.0f}"] for row in result["rows"]]
    return f"{machine(result)}, {result['shape']}.\n\n" + table(["µs", "forward", "forward and backward"], lines)


def augmentation(results: dict[str, Any]) -> str:
    result = results["augmentation-h200"]
    if result is None:
        return missing("augmentation-h200")
    lines = [[f"`{row['kind']}`", str(row["batch"]), *augmenting.cells(row)] for row in result["rows"]]
    columns = ["augmentation", "batch", *(f"{way} images/s" for way in augmenting.WAYS.values())]
    return f"{machine(result)}.\n\n" + table(columns, lines)


# ---------------------------------------------------------------------------------------------- goals, commands


def goals(results: dict[str, Any]) -> str:
    """What was aimed at, in how many cells it was reached, and the cell that is furthest from it."""
    gpu, cpu = ([] if results[name] is None else whole(results[name]["rows"]) for name in STEPS)
    plain = [
        row
        for row in gpu
        if row["treatment"].endswith((" paper", " inverted")) and (row["model"], row["mode"]) not in FLATTERED
    ]
    linear = [row for row in plain if row["treatment"].startswith(("V+", "AV+"))]
    scores = [row for row in plain if row["treatment"].startswith(("Q+", "QK+"))]
    small = [row for row in cpu if row["treatment"] in ("V+FF paper", "V+FF bernoulli", "V+FF inverted")]
    lines = [
        goal("GPU: V+FF, AV+FF take at most 1.03 ×", linear, lambda row: row["time_ratio"], 1.03),
        goal("GPU: V+FF, AV+FF need at most 1.02 × the memory", linear, lambda row: row["memory_ratio"], 1.02),
        goal("GPU: Q+FF, QK+FF take at most 1.06 ×", scores, lambda row: row["time_ratio"], 1.06),
        goal("GPU: no slower than stochastic dropout at the same sites", plain, against_stochastic(gpu), 1.0),
        goal("CPU, one small ViT: V+FF takes at most 1.10 ×", small, lambda row: row["time_ratio"], 1.10),
        goal("CPU, one small ViT: no slower than stochastic dropout", small, against_stochastic(cpu), 1.0),
    ]
    found = results["trainer-h200"]
    rows = [] if found is None else [r for r in whole(found["rows"]) if r["row"].startswith("explicit_v+explicit")]
    large = [row for row in rows if row["batch"] == 512]
    if large:
        best = max(large, key=lambda row: row["images_per_second"])
        reached = best["images_per_second"] >= 100_000
        lines.append([
            "Training loop: 100,000 images/s with V+FF, batch 512", "reached" if reached else "missed",
            f"{best['images_per_second']:,.0f} at best ({best['mode']})",
        ])  # fmt: skip
    return table(["aim", "reached in", "furthest from it"], lines)


def goal(name: str, rows: list[Row], value: Callable[[Row], float | None], limit: float) -> list[str]:
    known = [(found, row) for row in rows if (found := value(row)) is not None]
    if not known:
        return [name, "not measured", "–"]
    worst, row = max(known, key=lambda pair: pair[0])
    met = sum(found <= limit for found, _ in known)
    return [name, f"{met} of {len(known)}", f"{worst:.2f} × ({row['model']}, {row['mode']}, {row['treatment']})"]


def against_stochastic(rows: list[Row]) -> Callable[[Row], float | None]:
    times = {(row["model"], row["mode"], row["treatment"]): row["time_ratio"] for row in rows}

    def value(row: Row) -> float | None:
        sites = row["treatment"].split(" ")[0].replace("AV+", "V+")
        other = times.get((row["model"], row["mode"], f"stochastic {sites}"))
        return None if other is None else row["time_ratio"] / other

    return value


def commands(results: dict[str, Any]) -> str:
    """How each file was made, or is to be made."""
    lines = []
    for name, command in COMMANDS.items():
        result = results[name] or {}
        about = result.get("environment", {})
        made = result.get("commands") or [result.get("command") or about.get("command") or command]
        lines += [f"# {name}" + ("" if result else ": not measured yet"), *made]
    return "```\n" + "\n".join(lines) + "\n```"


# ---------------------------------------------------------------------------------------------- the page

SECTIONS: dict[str, Callable[[dict[str, Any]], str]] = {
    "summary": summary,
    "goals": goals,
    "step-time-h200": steps("step-time-h200"),
    "step-time-cpu": steps("step-time-cpu"),
    "floor": floors,
    "added": added,
    "overhead-cpu": overhead,
    "growth-h200": curves("growth-h200"),
    "growth-cpu": curves("growth-cpu"),
    "trainer-h200": trainer,
    "recipe-h200": speeds("recipe-h200"),
    "attention-h200": short_attention,
    "augmentation-h200": augmentation,
    "commands": commands,
}


def filled(text: str, results: dict[str, Any]) -> str:
    """The page with what stands between its markers made anew."""

    def section(found: re.Match[str]) -> str:
        name = found[1]
        made = SECTIONS.get(name)  # others fill in other tables of the README
        return f"<!-- begin {name} -->\n\n{made(results)}\n\n<!-- end {name} -->" if made else found[0]

    return re.sub(r"<!-- begin (\S+) -->.*?<!-- end \1 -->", section, text, flags=re.DOTALL)


def pages() -> dict[Path, str]:
    """Every file that the page is made of, as it should be."""
    results = {name: load(name) for name in COMMANDS}
    text = PAGE.read_text()
    marked = re.findall(r"<!-- begin (\S+) -->", text)
    if sorted(marked) != sorted(SECTIONS):
        raise SystemExit(f"docs/cost.md has places for {sorted(marked)}, and there is {sorted(SECTIONS)} to fill in")
    found = {PAGE: filled(text, results), README: filled(README.read_text(), results)}
    for name, draw in {
        **dict.fromkeys(STEPS, step_time.figure),
        **dict.fromkeys(("growth-h200", "growth-cpu"), growth.figure),
    }.items():
        result = results[name]
        if result is not None:
            found[FIGURES / f"{name}.svg"] = draw(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if something would change")
    options = parser.parse_args()
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        print(("would change " if options.check else "changed ") + str(path.relative_to(ROOT)))
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    if options.check and stale:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
