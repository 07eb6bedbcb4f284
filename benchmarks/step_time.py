"""What a training step costs with explicit dropout attached, against no dropout and against stochastic dropout.

    python benchmarks/step_time.py                                     # small models on this CPU, a minute or two
    python benchmarks/step_time.py --device cuda --output results/benchmarks/step-time-h200

Models of Hugging Face transformers, as they come: the paper's ViT for CIFAR (7 layers, width 384), ViT-B/16 and GPT-2
small. One step is forward, loss, penalty, backward and optimiser (AdamW), bfloat16 autocast on a GPU. Times are medians
over repeats with their interquartile range, memory is the peak of a step; ratios are against `none`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from functional import environment
from measure import peak_memory, seconds
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
    torch._dynamo.reset()
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--treatments", nargs="+", choices=tuple(TREATMENTS), default=tuple(TREATMENTS))
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=("eager",))
    parser.add_argument("--models", nargs="+", help="only models whose name contains one of these")
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of repeats for each cell")
    parser.add_argument("--output", type=Path, help="write OUTPUT.md and OUTPUT.json, after every cell")
    options = parser.parse_args()
    facts = {"command": "python " + shlex.join(sys.argv), "environment": environment(options.device)}
    rows: list[dict[str, Any]] = []
    for name, (make, batch) in models(options.device).items():
        if options.models and not any(part in name for part in options.models):
            continue
        for mode in options.modes:
            baseline: dict[str, Any] | None = None
            for treatment in options.treatments:
                step = training_step(make, batch, TREATMENTS[treatment], options.device, mode == "compiled")
                for _ in range(3):
                    step()
                median, spread = seconds(step, options.device, budget=options.budget, most=200)
                row = {"model": name, "mode": mode, "treatment": treatment, "seconds": median, "spread": spread}
                row["bytes"] = peak_memory(step, options.device) if options.device == "cuda" else None
                baseline = baseline or row
                row["time_ratio"] = median / baseline["seconds"]
                row["memory_ratio"] = row["bytes"] / baseline["bytes"] if row["bytes"] else None
                rows.append(row)
                print(line(row), flush=True)
                if options.output:
                    write(options.output, facts, rows)
                del step


HEADER = "| model | mode | treatment | ms | ± | time × | memory × |\n|---|---|---|---|---|---|---|"


def line(row: dict[str, Any]) -> str:
    memory = "–" if row["memory_ratio"] is None else f"{row['memory_ratio']:.3f}"
    cells = [row["model"], row["mode"], row["treatment"], f"{1e3 * row['seconds']:.2f}", f"{1e3 * row['spread']:.2f}"]
    return "| " + " | ".join([*cells, f"{row['time_ratio']:.3f}", memory]) + " |"


def write(output: Path, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".json").write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
    about = ", ".join(f"{name} {value}" for name, value in facts["environment"].items())
    table = "\n".join([HEADER, *map(line, rows)])
    text = f"# Training step time\n\n`{facts['command']}`: {about}. Ratios against `none`.\n\n{table}\n"
    output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
