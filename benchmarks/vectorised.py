"""Runs together in one program against the same runs one by one: whole trainings, on one and on several cores.

    python benchmarks/vectorised.py                                              # digits; minutes
    python benchmarks/vectorised.py --data-root data --setups digits gtzan       # and the encoder for GTZAN
    python benchmarks/vectorised.py --device cuda --members 32 --places 1x1
    python benchmarks/vectorised.py --output results/benchmarks/vectorised-cpu

Every way carries out the same runs, from initial weights to summary, validation and files included: one by one as the
engine `local` does in each of its processes, or together as the engine `vectorised` does. "2 × 1" is two processes of
one thread each, side by side, each with half of the runs. Processes have carried out a run before the clock starts.
Wall time is what counts on a machine of its own; CPU time (of all threads, per run) says how much work there was, and
is the number to trust on a machine that has other things to do. Ratios are one by one / together, on the same cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import platform
import shlex
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import explicit_dropout as xd
from explicit_dropout.lab.config import Data, Execution, Model, Run, Training, Treatment
from explicit_dropout.lab.engines import Engine, Event
from explicit_dropout.lab.engines.local import Local
from explicit_dropout.lab.engines.vectorised import Vectorised
from explicit_dropout.lab.store import Store

SETUPS = {
    "digits": Run(
        Data("digits", examples=300),
        Model(layers=2, width=48, heads=4, hidden=96, patch=2, read="mean"),
        training=Training(epochs=6, batch=60, learning_rate=2e-3, weight_decay=1e-2),
    ),
    "gtzan": Run(
        Data("gtzan_yamnet", examples=128),
        Model(layers=2, width=192, heads=16, hidden=192, patch=None, read="last", norm="post"),
        training=Training(epochs=1, batch=32, learning_rate=1e-4, weight_decay=1e-4, schedule="constant"),
    ),
}
MEMBERS = {"digits": 16, "gtzan": 4}
TREATMENTS = (Treatment(), Treatment("explicit_v", "explicit", strength=1e-2), Treatment("drop_key", "implicit"))
PLACES = ("1x1", "2x1", "1x2")
"""Processes x threads of each."""


def work(barrier: Any, results: Any, runs: list[Run], members: int | None, execution: Execution, repeats: int) -> None:
    """What one process does: warm up, wait for the others, carry out its runs; several times, the best counts."""

    def fail(event: Event) -> None:
        if event.kind in ("failed", "note", "busy"):
            raise RuntimeError(event.message)

    engine: Engine = Local(0) if members is None else Vectorised(members, 1, Local(0))
    for repeat in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            short = [replace(run, training=replace(run.training, epochs=1)) for run in runs[: members or 1]]
            barrier.wait()
            wall, cpu = time.perf_counter(), time.process_time()
            engine(short if repeat == 0 else runs, Store(folder), execution, fail)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            barrier.wait()
        if repeat:
            results.put((wall, cpu))


def measure(
    runs: list[Run], processes: int, threads: int, members: int | None, execution: Execution, repeats: int
) -> dict[str, float]:
    """Seconds per run: wall time of the slowest process, and CPU time of all, each the best of the repeats."""
    context = mp.get_context("spawn")
    barrier, results = context.Barrier(processes), context.Queue()
    execution = replace(execution, threads=threads)
    shares = [runs[place::processes] for place in range(processes)]
    workers = [
        context.Process(target=work, args=(barrier, results, share, members, execution, repeats)) for share in shares
    ]
    for worker in workers:
        worker.start()
    found = [[results.get(timeout=3600) for _ in range(processes)] for _ in range(repeats)]
    for worker in workers:
        worker.join()
    return {
        "wall": min(max(wall for wall, _ in each) for each in found) / len(runs),
        "cpu": min(sum(cpu for _, cpu in each) for each in found) / len(runs),
    }


def compare(setup: str, treatment: Treatment, place: str, options: argparse.Namespace) -> dict[str, Any]:
    members = options.members or MEMBERS[setup]
    execution = Execution(device=options.device, data_root=options.data_root)
    processes, threads = map(int, place.split("x"))
    count = members * processes
    runs = [replace(SETUPS[setup], treatment=treatment, seed=seed) for seed in range(count)]
    row: dict[str, Any] = {"setup": setup, "treatment": treatment.row, "processes": processes, "threads": threads}
    row |= {"runs": count, "members": members}
    row["alone"] = measure(runs, processes, threads, None, execution, options.repeats)
    row["together"] = measure(runs, processes, threads, members, execution, options.repeats)
    return row | {f"{name}_ratio": row["alone"][name] / row["together"][name] for name in ("wall", "cpu")}


COLUMNS = (
    *("setup", "treatment", "processes × threads", "together", "one by one s/run", "together s/run", "wall ×"),
    *("one by one CPU s/run", "together CPU s/run", "CPU ×"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"


def line(row: dict[str, Any]) -> str:
    alone, together = row["alone"], row["together"]
    return (
        f"| {row['setup']} | {row['treatment']} | {row['processes']} × {row['threads']} | {row['members']} "
        f"| {alone['wall']:.2f} | {together['wall']:.2f} | {row['wall_ratio']:.2f} "
        f"| {alone['cpu']:.2f} | {together['cpu']:.2f} | {row['cpu_ratio']:.2f} |"
    )


def environment(device: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "cores": mp.cpu_count(),
        "explicit_dropout": xd.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--setups", nargs="+", choices=tuple(SETUPS), default=["digits"])
    parser.add_argument("--data-root", help="folder of the datasets, for gtzan")
    parser.add_argument("--members", type=int, help="models trained at once")
    parser.add_argument("--places", nargs="+", default=PLACES, help="processes x threads; 1x1 on a GPU")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and OUTPUT.json")
    options = parser.parse_args()

    print(HEADER)
    rows: list[dict[str, Any]] = []
    for setup in options.setups:
        for treatment in TREATMENTS:
            for place in options.places:
                rows.append(compare(setup, treatment, place, options))
                print(line(rows[-1]), flush=True)
                if options.output:
                    write(rows, options)


def write(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    words = [word for word in sys.argv if word not in ("--data-root", options.data_root)]
    command = "python " + shlex.join(words)
    facts = {"command": command, "environment": environment(options.device)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".json").write_text(json.dumps({**facts, "comparison": rows}, indent=1) + "\n")
    facts_line = ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
    text = f"""# Runs together against runs one by one

`{command}`: {facts_line}. Whole trainings, validation and files included; best of {options.repeats}.
Ratios are one by one / together, on the same cores: above 1, together is faster.

{HEADER}
{chr(10).join(map(line, rows))}
"""
    options.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
