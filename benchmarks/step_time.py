"""What a training step costs with explicit dropout attached, against no dropout and against stochastic dropout.

    python benchmarks/step_time.py                                     # small models on this CPU, a minute or two
    python benchmarks/step_time.py --device cuda --output results/benchmarks/step-time-h200

Models of Hugging Face transformers, as they come: the paper's ViT for CIFAR (7 layers, width 384), ViT-B/16 and GPT-2
small. One step is forward, loss, penalty, backward and optimiser (AdamW), bfloat16 autocast on a GPU. Every treatment
is timed beside `none`, in turns of a few steps each, so that a machine that slows down slows both: times are medians
with their interquartile range, the time ratio is the median over turns, memory is the peak of a step over that of
`none`. `--profile` adds what the GPU itself was busy with, and with which kernels.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from functional import environment
from measure import peak_memory
from torch import Tensor, nn

import explicit_dropout as xd

RATE, STRENGTH = 0.2, 1e-3
PAPER, INVERTED = xd.paper(RATE), xd.inverted(RATE)
TREATMENTS: dict[str, dict[str, Any]] = {
    "none": {},
    "stochastic": {"dropout": RATE},
    "V+FF paper": {"noise": PAPER, "components": ("value", "feed_forward")},
    "V+FF inverted": {"noise": INVERTED, "components": ("value", "feed_forward")},
    "AV+FF paper": {"noise": PAPER, "components": ("attended_value", "feed_forward")},
    "Q+FF paper": {"noise": PAPER, "components": ("query", "feed_forward")},
    "Q+FF inverted": {"noise": INVERTED, "components": ("query", "feed_forward")},
    "QK+FF inverted": {"noise": INVERTED, "components": ("query_key", "feed_forward")},
}


def vit(dropout: float, *, image: int, patch: int, width: int, layers: int, heads: int, inner: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=image, patch_size=patch, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=inner, num_labels=10, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return ViTForImageClassification(config)


def gpt2(dropout: float, *, width: int, layers: int, heads: int, length: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, n_positions=length,
        attn_pdrop=dropout, resid_pdrop=dropout, embd_pdrop=dropout, use_cache=False,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def images(batch: int, size: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(10, (batch,))}


def tokens(batch: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(50257, (batch, length))
    return {"input_ids": ids, "labels": ids}


def models(device: str) -> dict[str, tuple[Callable[[float], nn.Module], dict[str, Tensor]]]:
    if device == "cpu":
        return {
            "ViT-7 (CIFAR), batch 16": (
                lambda p: vit(p, image=32, patch=4, width=384, layers=7, heads=12, inner=384), images(16, 32)
            ),
        }  # fmt: skip
    return {
        "ViT-7 (CIFAR), batch 512": (
            lambda p: vit(p, image=32, patch=4, width=384, layers=7, heads=12, inner=384), images(512, 32)
        ),
        "ViT-B/16, batch 128": (
            lambda p: vit(p, image=224, patch=16, width=768, layers=12, heads=12, inner=3072), images(128, 224)
        ),
        "GPT-2 small, 16 × 1024": (lambda p: gpt2(p, width=768, layers=12, heads=12, length=1024), tokens(16, 1024)),
    }  # fmt: skip


def training_step(
    make: Callable[[float], nn.Module], batch: dict[str, Tensor], treatment: dict[str, Any], device: str, compiled: bool
) -> Callable[[], None]:
    torch.manual_seed(0)
    model = make(treatment.get("dropout", 0.0)).to(device).train()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    reg = None
    if "noise" in treatment:
        reg = xd.ExplicitDropout(model, treatment["noise"], **dict.fromkeys(treatment["components"], STRENGTH))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    runner = torch.compile(model) if compiled else model
    precision = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()

    def step() -> None:
        with precision:
            loss = runner(**batch).loss
        if reg is not None:
            loss = loss + reg()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    return step


TURN = 4
"""Steps timed at a time: enough for the CPU to run ahead of a GPU as it does in training."""


def turn(step: Callable[[], None], device: str) -> float:
    """Seconds of a step, over a turn of them."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(TURN):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / TURN


def beside(none: Callable[[], None], step: Callable[[], None], device: str, budget: float) -> dict[str, float]:
    """Both steps in turns until the budget is spent on each."""
    turns: list[tuple[float, float]] = []
    while len(turns) < 3 or (sum(mine for _, mine in turns) * TURN < budget and len(turns) < 400):
        if len(turns) % 2:  # who comes first takes turns as well
            turns.append((turn(none, device), turn(step, device)))
        else:
            mine = turn(step, device)
            turns.append((turn(none, device), mine))
    ratios = [mine / other for other, mine in turns]
    return {
        "seconds": statistics.median(mine for _, mine in turns),
        "spread": spread([mine for _, mine in turns]),
        "none_seconds": statistics.median(other for other, _ in turns),
        "time_ratio": statistics.median(ratios),
        "ratio_spread": spread(ratios),
        "turns": len(turns),
    }


def spread(values: list[float]) -> float:
    """The interquartile range."""
    first, _, third = statistics.quantiles(values, n=4)
    return third - first


def gpu_profile(step: Callable[[], None]) -> dict[str, Any]:
    """Milliseconds that the GPU is busy in a step, in all and by kernel, the longest twelve."""
    steps = 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name[:80], []).append(event.device_time / 1000 / steps)
    totals = sorted(((sum(times), len(times) / steps, name) for name, times in kernels.items()), reverse=True)
    own = [entry for entry in totals if entry[2].startswith(OWN)]
    return {
        "busy_ms": sum(total for total, _, _ in totals),
        "launches": sum(number for _, number, _ in totals),
        "kernels": [{"name": name, "ms": total, "launches": number} for total, number, name in totals[:12] + own],
    }


OWN = ("_energies", "_gradients", "_scores", "_causal", "_weight")
"""How the names of this library's kernels begin."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--treatments", nargs="+", choices=tuple(TREATMENTS), default=tuple(TREATMENTS))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=("eager",))
    parser.add_argument("--models", nargs="+", help="only models whose name contains one of these")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of repeats for each cell")
    parser.add_argument("--profile", action="store_true", help="also say what the GPU was busy with")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and OUTPUT.json, after every cell")
    options = parser.parse_args()
    # Or the compiler takes a model with hooks for the one without them that it has compiled already.
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.config.recompile_limit = 64
    facts = {"command": "python " + shlex.join(sys.argv), "environment": environment(options.device)}
    rows: list[dict[str, Any]] = []
    for name, (make, batch) in models(options.device).items():
        if options.models and not any(part in name for part in options.models):
            continue
        for mode in options.modes:
            torch._dynamo.reset()
            none = training_step(make, batch, {}, options.device, mode == "compiled")
            bytes_of_none = warm(none, options.device)
            for treatment in options.treatments:
                settings, compiled = TREATMENTS[treatment], mode == "compiled"
                step = none if treatment == "none" else training_step(make, batch, settings, options.device, compiled)
                row: dict[str, Any] = {"model": name, "mode": mode, "treatment": treatment}
                row["bytes"] = warm(step, options.device)
                row |= beside(none, step, options.device, options.budget)
                row["memory_ratio"] = row["bytes"] / bytes_of_none if bytes_of_none else None
                if options.profile and options.device == "cuda":
                    row["profile"] = gpu_profile(step)
                rows.append(row)
                print(line(row), flush=True)
                if options.output:
                    write(options.output, facts, rows)
                del step
            del none


def warm(step: Callable[[], None], device: str) -> int:
    """Let everything be compiled and allocated, and say how many bytes a step needs at its peak (GPU only)."""
    for _ in range(4):
        step()
    return peak_memory(step, device) if device == "cuda" else 0


HEADER = (
    "| model | mode | treatment | ms | ± | time × | ± | memory × | GPU busy ms | launches |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    memory = "–" if row["memory_ratio"] is None else f"{row['memory_ratio']:.3f}"
    cells = [row["model"], row["mode"], row["treatment"], f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['spread']:.2f}"]
    cells += [f"{row['time_ratio']:.3f}", f"{row['ratio_spread']:.3f}", memory]
    profile = row.get("profile")
    cells += ["–", "–"] if profile is None else [f"{profile['busy_ms']:.2f}", f"{profile['launches']:.0f}"]
    return "| " + " | ".join(cells) + " |"


def write(output: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
    table = "\n".join([HEADER, *map(line, rows)])
    text = f"# Training step time\n\n`{facts['command']}`: {about}. Ratios against `none`.\n\n{table}\n"
    output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
