"""Images per second of the laboratory's own training loop, augmentation and logging included.

    python benchmarks/trainer.py --output results/benchmarks/trainer-h200    # on a GPU, CIFAR-10 in data/
    python benchmarks/trainer.py --data digits --output build/trainer        # anywhere, in a minute

Each row is measured over whole epochs' worth of steps after the first steps have compiled, captured and warmed up.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from steps import gpu_profile
from written import write

from explicit_dropout.lab import data, penalties
from explicit_dropout.lab.config import Data, Execution, Model, Run, Training
from explicit_dropout.lab.rows import treatments
from explicit_dropout.lab.training import build
from explicit_dropout.lab.training.batches import batches
from explicit_dropout.lab.training.environment import chosen_device, environment, prepare
from explicit_dropout.lab.training.step import Step

ROWS = {
    "none+none": "paper", "none+implicit": "paper", "drop_key+implicit": "paper",
    "explicit_v+explicit": "paper", "explicit_v+explicit [inverted]": "inverted",
}  # fmt: skip
MODES = {
    "eager": Execution(),
    "graph": Execution(cuda_graphs=True),
    "compiled": Execution(compile=True),
    "compiled graph": Execution(compile=True, cuda_graphs=True),
}
SMALL = Model(layers=2, width=48, heads=4, hidden=96, patch=2, read="mean")


def measure(run: Run, execution: Execution, dataset: data.Dataset, budget: float, profile: bool) -> dict[str, Any]:
    """Median images per second over pieces of training of a tenth of the budget each, and their spread."""
    device = chosen_device(execution)
    torch.compiler.reset()
    model = build(run, dataset, device)
    penalty = penalties.attach(model, run.treatment)
    forward = torch.compile(model) if execution.compile else model
    step = Step(model, forward, penalty, run, execution, device)
    began = time.perf_counter()
    endless = (batch for epoch in range(10**6) for batch in batches(run, dataset.train, epoch))
    for _ in range(5):
        step(*next(endless), 1e-3)
    step.means()
    warm = time.perf_counter() - began
    speeds: list[float] = []
    began = time.perf_counter()
    while len(speeds) < 3 or time.perf_counter() - began < budget:
        start, done = time.perf_counter(), 0
        while time.perf_counter() - start < budget / 10 or done < 3:
            for _ in range(10 if device.type == "cuda" else 1):
                step(*next(endless), 1e-3)
                done += 1
        step.means()
        speeds.append(done * run.training.batch / (time.perf_counter() - start))
    found: dict[str, Any] = {
        "images_per_second": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "warm_up_s": warm,
    }
    if device.type == "cuda" and profile:
        batch = next(endless)
        found["profile"] = gpu_profile(lambda: step(*batch, 1e-3))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root")
    parser.add_argument("--augmentation", default="crop_flip")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--rows", nargs="+", default=list(ROWS))
    parser.add_argument("--optimiser", choices=["adamw", "muon"], default="adamw")
    parser.add_argument("--seconds", type=float, default=2.0, help="of measurement for each row")
    parser.add_argument("--profile", action="store_true", help="also say in the JSON what the GPU was busy with")
    parser.add_argument("--output", type=Path, help="path without ending: .json and .md are written after every row")
    options = parser.parse_args()
    small = options.data == "digits"
    dataset_settings = Data(options.data, augmentation="none" if small else options.augmentation)
    base = Execution(device=options.device, data_root=options.data_root)
    prepare(base)
    device = chosen_device(base)
    dataset = data.load(dataset_settings, options.data_root).to(device)
    model, precision = (SMALL, "float32") if small else (Model(residual="lowered"), "bfloat16")
    described = environment(base, device, dataset)
    described["command"] = "python benchmarks/trainer.py " + shlex.join(sys.argv[1:])
    rows: list[dict[str, object]] = []
    for size in options.batches:
        for mode in options.modes:
            if "graph" in mode and device.type != "cuda":
                continue
            for row in options.rows:
                (treatment,) = treatments(row.split(" [")[0], [1e-3], law=ROWS[row])
                training = Training(batch=size, precision=precision, label_smoothing=0.1, optimiser=options.optimiser)
                run = Run(dataset_settings, model, treatment, training)
                execution = replace(MODES[mode], device=options.device)
                found = measure(run, execution, dataset, options.seconds, options.profile)
                rows.append({"batch": size, "mode": mode, "row": row, **found})
                print(line(rows[-1]), flush=True)
                if options.output:
                    write(options.output, {"environment": described, "rows": rows}, opening(described), HEADER, line)


HEADER = "| batch | mode | row | images/s | least | most | warm-up s |\n|---|---|---|---|---|---|---|"


def line(row: dict) -> str:
    speeds = " | ".join(f"{row[name]:,.0f}" for name in ("images_per_second", "least", "most"))
    return f"| {row['batch']} | {row['mode']} | {row['row']} | {speeds} | {row['warm_up_s']:.1f} |"


def opening(described: dict) -> str:
    place = f"{described['device']}, torch {described['torch']}, {described['dataset']['name']}"
    return f"# Images per second of the training loop\n\n{place}. `{described['command']}`"


if __name__ == "__main__":
    main()
