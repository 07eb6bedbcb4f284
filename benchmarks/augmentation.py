"""Images per second through each augmentation: torch, compiled and, on a GPU, by the kernels that AutoAugment has.

python benchmarks/augmentation.py            # 30 batches of 8192 images 3 × 32 × 32
python benchmarks/augmentation.py 128 1024   # other batch sizes
python benchmarks/augmentation.py --output results/benchmarks/augmentation-h200
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from functional import environment
from torch import Tensor
from written import about, write

from explicit_dropout.lab.config import Augmentation
from explicit_dropout.lab.data.augment import apply, apply_in_torch, draw, serves

REPEATS = 30
KINDS: tuple[Augmentation, ...] = ("crop_flip", "autoaugment")


def images_per_second(
    function: Callable[[Tensor, Augmentation, Tensor], Tensor], kind: Augmentation, images: Tensor, repeats: int
) -> float:
    def wait() -> None:
        if images.is_cuda:
            torch.cuda.synchronize()

    for _ in range(2):
        function(images, kind, draw(len(images), kind, None, images.device))
    wait()
    start = time.perf_counter()
    for _ in range(repeats):
        function(images, kind, draw(len(images), kind, None, images.device))
    wait()
    return repeats * len(images) / (time.perf_counter() - start)


WAYS = {"eager": "torch", "compiled": "compiled", "triton": "Triton"}
"""What the results call them, and the table."""
HEADER = "| augmentation | batch | torch images/s | compiled images/s | Triton images/s |\n|---|---|---|---|---|"


def cells(row: dict[str, Any]) -> list[str]:
    """The speed of each way, a dash where there is none."""
    return [f"{row[way]:,.0f}" if row.get(way) else "–" for way in WAYS]


def line(row: dict[str, Any]) -> str:
    return f"| {row['kind']} | {row['batch']} | {' | '.join(cells(row))} |"


def opening(result: dict[str, Any]) -> str:
    return f"# Images per second of augmentation\n\n`{result['command']}`: {about(result)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", nargs="*", type=int, default=[8192])
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and .md")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    repeats = REPEATS if device == "cuda" else 3
    result: dict[str, Any] = {"command": "python " + shlex.join(sys.argv), "environment": environment(device)}
    result["rows"] = []
    print(HEADER)
    for size in options.batches:
        images = torch.randint(0, 256, (size, 3, 32, 32), dtype=torch.uint8, device=device)
        for kind in KINDS:
            row: dict[str, Any] = {"kind": kind, "batch": size}
            row["eager"] = images_per_second(apply_in_torch, kind, images, repeats)
            row["compiled"] = images_per_second(torch.compile(apply, fullgraph=True), kind, images, repeats)
            if kind == "autoaugment" and serves(images):
                row["triton"] = images_per_second(apply, kind, images, repeats)
            result["rows"].append(row)
            print(line(result["rows"][-1]), flush=True)
            if options.output:
                write(options.output, result, opening(result), HEADER, line)


if __name__ == "__main__":
    main()
