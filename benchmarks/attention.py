"""Attention of one layer over few tokens: the laboratory's kernels beside torch's, forward and backward.

    python benchmarks/attention.py                                               # 512 × 65 tokens, 12 heads of 32
    python benchmarks/attention.py --output results/benchmarks/attention-h200

Needs a GPU. Each call is replayed from a CUDA graph of twenty, so that launches do not count; bfloat16.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from functional import environment
from measure import seconds
from steps import captured
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from written import about, write

from explicit_dropout.lab.attention import attention
from explicit_dropout.stochastic import AttentionDropout, AttentionTreatment, DropKey

CALLS = 20
HEADER = "| µs | forward | forward and backward |\n|---|---|---|"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def torchs(heads: int) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        split = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)

    return attend


def written_out(heads: int) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    return torch.compile(attend, fullgraph=True)


def ours(heads: int, treatment: AttentionTreatment | None = None) -> Attend:
    """As the compiled training step has it: masks are drawn and packed into bits by one kernel."""
    return torch.compile(lambda q, k, v: attention(q, k, v, heads, treatment), fullgraph=True)


def kinds(heads: int) -> dict[str, tuple[Attend, AbstractContextManager[object]]]:
    return {
        "softmax written out, compiled": (written_out(heads), nullcontext()),
        "torch, flash": (torchs(heads), sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        "torch, cuDNN": (torchs(heads), sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        "`lab/triton_attention.py`": (ours(heads), nullcontext()),
        "the same with dropped keys (DropKey), masks included": (ours(heads, DropKey(0.2)), nullcontext()),
        "the same with dropped weights, masks included": (ours(heads, AttentionDropout(0.2)), nullcontext()),
    }


def microseconds(call: Callable[[], object], budget: float) -> float:
    """Median time of a call that is replayed."""
    replay, _ = captured(lambda: [call() for _ in range(CALLS)])
    return 1e6 * seconds(replay, "cuda", budget=budget)[0] / CALLS


def measure(attend: Attend, shape: tuple[int, int, int], budget: float) -> tuple[float, float]:
    samples, tokens, width = shape
    sides = [
        torch.randn(samples, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    gradient = torch.randn(samples, tokens, width, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        forward = microseconds(lambda: attend(*sides), budget)
    both = microseconds(lambda: torch.autograd.grad(attend(*sides), sides, gradient), budget)
    return forward, both


def line(row: dict[str, Any]) -> str:
    return f"| {row['kind']} | {row['forward']:.1f} | {row['both']:.1f} |"


def opening(result: dict[str, Any]) -> str:
    return f"# Attention over few tokens, {result['shape']}\n\n`{result['command']}`: {about(result)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=32, help="of a head")
    parser.add_argument("--budget", type=float, default=0.2, help="seconds of measurement for each number")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and .md")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/attention.py needs a GPU, and torch sees none here")
    shape = (options.samples, options.tokens, options.heads * options.width)
    result: dict[str, Any] = {
        "command": "python benchmarks/attention.py " + shlex.join(sys.argv[1:]),
        "environment": environment("cuda"),
        "shape": f"{options.samples} × {options.tokens} tokens, {options.heads} heads of {options.width}",
        "rows": [],
    }
    print(HEADER)
    for kind, (attend, chosen) in kinds(options.heads).items():
        with chosen:
            forward, both = measure(attend, shape, options.budget)
        result["rows"].append({"kind": kind, "forward": forward, "both": both})
        print(line(result["rows"][-1]), flush=True)
        if options.output:
            write(options.output, result, opening(result), HEADER, line)


if __name__ == "__main__":
    main()
