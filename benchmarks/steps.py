"""A training step in every mode, and how long it takes beside another one."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from hosts import Host
from measure import peak_memory
from treatments import Treatment

MODES = ("eager", "graph", "compiled", "compiled graph")
NAMED = 40
"""Kernels of a profile that are named, the longest."""
WARM_UP = 4
"""Steps before anything is measured: what is compiled and allocated once is so by then. Two if they are slow."""

Step = Callable[[], object]


def prepare_compiler() -> None:
    """Or it takes a model with hooks for the one without them that it has compiled already."""
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    torch._dynamo.config.recompile_limit = 64


def training_step(host: Host, treatment: Treatment, device: str, mode: str) -> tuple[Step, int]:
    """One step, forward to optimiser (AdamW), ready to be timed; and the bytes that it needs at its peak.

    A step of mode graph is captured once and replayed. Its gradients, set to None in the step itself, and everything
    else it allocates live in the graph's own pool, so its peak is that of the capture. (A compiled step on a CPU has no
    peak: 0.)
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}. Got {mode!r}")
    torch.manual_seed(0)
    with torch.device(device):
        model = host.make(treatment.own_rate).train()
    batch = {name: tensor.to(device) for name, tensor in host.batch.items()}
    penalty = treatment.attach(model)
    on_gpu, graphed = device == "cuda", "graph" in mode
    if graphed and not on_gpu:
        raise RuntimeError("a CUDA graph needs a GPU")
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu, capturable=on_gpu and graphed)
    forward = torch.compile(model) if "compiled" in mode else model

    def step() -> None:
        with autocast(device):
            loss = forward(**batch).loss
        if penalty is not None:
            loss = loss + penalty()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    if graphed:
        return captured(step)
    warm_up(step, device)
    return step, 0 if "compiled" in mode and not on_gpu else peak_memory(step, device)


def autocast(device: str) -> Any:
    """bfloat16 on a GPU, float32 on a CPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()


def captured(step: Step) -> tuple[Step, int]:
    """The step as a CUDA graph, and the bytes that its pool needs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up(step, "cuda")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, stream=side):  # the stream that nodes kept from the warm-up know
            step()

    size = peak_memory(capture, "cuda")
    replay = Replay(graph, step)
    replay()
    return replay, size


class Replay:
    """A captured step. It keeps the step itself: the graph reads and writes weights that are the model's."""

    def __init__(self, graph: torch.cuda.CUDAGraph, step: Step) -> None:
        self.graph, self.step = graph, step

    def __call__(self) -> None:
        self.graph.replay()


def warm_up(step: Step, device: str) -> None:
    for number in range(WARM_UP):
        if turn(step, device, 1) > 0.3 and number:
            return


def turn(step: Step, device: str, steps: int) -> float:
    """Seconds of a step, over a turn of so many: enough for the CPU to run ahead of a GPU as it does in training."""
    wait(device)
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait(device)
    return (time.perf_counter() - begin) / steps


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def beside(none: Step, step: Step, device: str, budget: float) -> dict[str, float]:
    """Both steps in turns until the budget, in seconds, is spent on each."""
    turns: list[tuple[float, float]] = []
    steps = 4 if turn(none, device, 1) < 0.04 else 2
    while len(turns) < 3 or (sum(mine for _, mine in turns) * steps < budget and len(turns) < 400):
        if len(turns) % 2:  # who comes first takes turns as well
            turns.append((turn(none, device, steps), turn(step, device, steps)))
        else:
            mine = turn(step, device, steps)
            turns.append((turn(none, device, steps), mine))
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


def gpu_profile(step: Step) -> dict[str, Any]:
    """Milliseconds that the GPU is busy in a step, in all and by kernel: the longest and the library's."""
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
    own = [entry for entry in totals[NAMED:] if entry[2].startswith(OWN)]
    return {
        "busy_ms": sum(total for total, _, _ in totals),
        "launches": sum(number for _, number, _ in totals),
        "kernels": [{"name": name, "ms": total, "launches": number} for total, number, name in totals[:NAMED] + own],
    }


OWN = (
    "_energies", "_gradients", "_column", "_sample", "_squares", "_gram", "_score", "_spread", "_reach", "_attended",
    "_short",
)  # fmt: skip
"""How the names of this library's kernels begin."""

KINDS = {
    "attention": r"^_forward|^_backward|sdpa|flash|fmha",
    "products of matrices": r"nvjet|gemm|cublas|cutlass|wgmma|splitKreduce",
    "penalties": "|".join(f"^{name}" for name in OWN),
    "optimiser": r"multi_tensor_apply|[Aa]dam|lerp",
    "LayerNorm, with what is fused into it": r"layer_norm|GammaBeta",
    "GELU, with what is fused into it": r"gelu|^_activate",
    "dropout": r"dropout|philox|rand|bernoulli",
    "sums over rows, such as gradients of biases": r"reduce_kernel|_red_fused|_per_fused",
    "copies, casts and zeros": r"copy|Memcpy|Memset|FillFunctor|CatArray|zero",
}
"""What kernels do, by their names: the first pattern that is found decides."""


def by_kind(profile: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a profile by what kernels are for, the most first; those that it does not name come last."""
    found: dict[str, float] = {}
    for kernel in profile["kernels"]:
        kind = next((words for words, pattern in KINDS.items() if re.search(pattern, kernel["name"])), "all else")
        found[kind] = found.get(kind, 0.0) + kernel["ms"]
    rest = profile["busy_ms"] - sum(found.values())
    return {**dict(sorted(found.items(), key=lambda entry: -entry[1])), "kernels that take little each": rest}


def failure(error: Exception) -> str:
    """What went wrong, in a line."""
    cause: BaseException | None = error
    while cause is not None:  # a capture that runs out of memory ends with an error of its own
        if isinstance(cause, torch.OutOfMemoryError):
            return "out of memory"
        cause = cause.__cause__ or cause.__context__
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}"
    return text if len(text) <= 300 else text[:299] + "…"


def tidy(device: str) -> None:
    """Give back what the last cell has left behind: models and hooks refer to each other."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
