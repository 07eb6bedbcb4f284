"""Closed forms against the paper's literal traces: time and peak memory of value and gradient, in one run.

    python benchmarks/functional.py                                   # this machine's CPU, a few minutes
    python benchmarks/functional.py --device cuda --batch 16          # a GPU
    python benchmarks/functional.py --output results/benchmarks/functional-cpu

Both sides compute the same number, checked before anything is timed, for one attention or feed-forward layer: penalty
and gradients of input and weights, float32. Score forms come per head (heads 64 wide, what a model has) and with heads
merged (one head, the paper's formula as it stands). Ratios are literal / closed: they depend little on how fast the
machine is. "At hand" is the closed form given the projections that a forward pass has made anyway: what it adds to a
training step. With --output the table is written to OUTPUT.md and everything, environment included, to OUTPUT.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import peak_memory, seconds
from torch import Tensor

import explicit_dropout as xd
from explicit_dropout import functional, reference

TOKENS = (64, 197, 1024)
WIDTHS = (192, 384, 768)
GROWTH = (256, 512, 1024, 2048, 4096)
LAWS = {"paper": xd.paper(0.2), "bernoulli": xd.bernoulli(0.2)}


def call(module: Any, site: str, leaves: dict[str, Tensor], noise: xd.Noise, **options: Any) -> Tensor:
    x, wq, wk = leaves["x"], leaves["wq"], leaves["wk"]
    if site == "value":
        return module.value(x, wk, noise, **options)
    if site == "attended_value":
        return module.attended_value(x, wk, leaves["attention"], noise, **options)
    return getattr(module, site)(x, wq, wk, noise, **options)


def at_hand(site: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The layer's own outputs, as a forward pass would hand them over."""
    x, wq, wk = (leaves[name].detach() for name in ("x", "wq", "wk"))
    if site == "value":
        outputs = {"output": x @ wk.mT}
    elif site == "attended_value":
        outputs = {"attended": leaves["attention"][:, 0] @ (x @ wk.mT)}
    else:
        outputs = {"queries": x @ wq.mT, "keys": x @ wk.mT}
    return {name: output.requires_grad_() for name, output in outputs.items()}


def make_leaves(batch: int, tokens: int, width: int, device: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    leaves = {
        "x": torch.randn(batch, tokens, width, generator=generator),
        "wq": torch.randn(width, width, generator=generator) / width**0.5,
        "wk": torch.randn(width, width, generator=generator) / width**0.5,
    }
    leaves = {name: leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    leaves["attention"] = torch.randn(batch, 1, tokens, tokens, generator=generator).softmax(-1).to(device)
    return leaves


def step(penalty: Callable[[], Tensor], leaves: dict[str, Tensor]) -> Callable[[], None]:
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]

    def run() -> None:
        torch.autograd.grad(penalty(), wanted, allow_unused=True)

    return run


def measure(penalty: Callable[[], Tensor], leaves: dict[str, Tensor], device: str) -> dict[str, float]:
    run = step(penalty, leaves)
    median, spread = seconds(run, device)
    return {"seconds": median, "spread": spread, "bytes": peak_memory(run, device)}


def compare(batch: int, device: str, tokens: tuple[int, ...], widths: tuple[int, ...]) -> list[dict[str, Any]]:
    rows = []
    for width in widths:
        for count in tokens:
            leaves = make_leaves(batch, count, width, device)
            for site, heads in sites(width):
                for law, noise in LAWS.items():
                    options = {"heads": heads} if heads else {}
                    closed, literal = (
                        partial(call, module, site, leaves, noise, **options) for module in (functional, reference)
                    )
                    torch.testing.assert_close(closed(), literal(), rtol=1e-3, atol=0)
                    row: dict[str, Any] = {"site": site, "heads": heads, "law": law, "tokens": count, "width": width}
                    row["closed"], row["literal"] = (measure(p, leaves, device) for p in (closed, literal))
                    given = at_hand(site, leaves)
                    row["at_hand"] = measure(partial(closed, **given), {**leaves, **given}, device)
                    row["time_ratio"] = row["literal"]["seconds"] / row["closed"]["seconds"]
                    row["memory_ratio"] = row["literal"]["bytes"] / row["closed"]["bytes"]
                    rows.append(row)
                    print(line(row), flush=True)
    return rows


def sites(width: int) -> list[tuple[str, int | None]]:
    """What is compared, and with how many heads (None: the form knows no heads)."""
    per_head = width // 64
    return [("value", None), ("query", per_head), ("key", per_head), ("query", 1), ("attended_value", 1)]


def growth(batch: int, device: str, tokens: tuple[int, ...], width: int = 384) -> list[dict[str, Any]]:
    rows = []
    for count in tokens:
        leaves = make_leaves(batch, count, width, device)
        for site in ("query", "key", "query_key"):
            for name, options in (("all pairs", {}), ("causal", {"causal": True})):
                row = {"site": site, "law": "bernoulli", "pairs": name, "tokens": count, "width": width}
                penalty = partial(call, functional, site, leaves, LAWS["bernoulli"], heads=6, **options)
                row["closed"] = measure(penalty, leaves, device)
                rows.append(row)
                print(growth_line(row), flush=True)
    return rows


COLUMNS = (
    *("site", "heads", "law", "tokens", "width", "at hand ms", "closed ms", "literal ms", "time ×"),
    *("closed MB", "literal MB", "memory ×"),
)
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
GROWTH_HEADER = "| site | pairs | tokens | ms | MB |\n|---|---|---|---|---|"


def line(row: dict[str, Any]) -> str:
    closed, literal = row["closed"], row["literal"]
    return (
        f"| {row['site']} | {row['heads'] or '–'} | {row['law']} | {row['tokens']} | {row['width']} "
        f"| {1e3 * row['at_hand']['seconds']:.2f} | {1e3 * closed['seconds']:.2f} "
        f"| {1e3 * literal['seconds']:.2f} | {row['time_ratio']:.1f} "
        f"| {closed['bytes'] / 1e6:.1f} | {literal['bytes'] / 1e6:.1f} | {row['memory_ratio']:.1f} |"
    )


def growth_line(row: dict[str, Any]) -> str:
    closed = row["closed"]
    cells = row["site"], row["pairs"], row["tokens"], f"{1e3 * closed['seconds']:.2f}", f"{closed['bytes'] / 1e6:.1f}"
    return "| " + " | ".join(map(str, cells)) + " |"


def environment(device: str) -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "explicit_dropout": xd.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--growth", type=int, nargs="*", default=GROWTH, help="tokens of the growth curve")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and OUTPUT.json")
    options = parser.parse_args()
    command = "python " + shlex.join(sys.argv)

    print(HEADER)
    rows = compare(options.batch, options.device, tuple(options.tokens), tuple(options.widths))
    print("\n" + GROWTH_HEADER)
    curve = growth(options.batch, options.device, tuple(options.growth))
    if options.output:
        facts = {"command": command, "batch": options.batch, "environment": environment(options.device)}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {**facts, "comparison": rows, "growth": curve}
        options.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        table = "\n".join([HEADER, *map(line, rows)])
        growth_table = "\n".join([GROWTH_HEADER, *map(growth_line, curve)])
        facts_line = ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
        text = f"""# Closed forms against literal traces

`{command}`: batch {options.batch}, {facts_line}. Value and gradients of one layer, float32; medians over repeats.

{table}

## Growth with the number of tokens

Width 384, 6 heads, `bernoulli`, closed forms alone.

{growth_table}
"""
        options.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
