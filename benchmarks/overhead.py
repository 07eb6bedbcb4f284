"""What a site costs on the CPU, whatever its tensors: hooks, autograd and launches, in microseconds for each of them.

    python benchmarks/overhead.py                                                        # under a minute
    python benchmarks/overhead.py --output results/benchmarks/overhead-cpu

An eager step on a GPU waits for the CPU wherever this is more than the GPU has to do meanwhile. So it is measured on a
ViT of twelve layers whose tensors have next to no size, one thread, eager, in turns with the step without dropout, and
divided by its 36 sites (values, and both layers of every feed-forward network). Two lines are of no penalty: a hook
that does nothing, and one with the least that a penalty without plain autograd's copies needs, a Python function of
autograd that gives a tensor back with an empty energy and its gradient with an empty bias gradient. OUTPUT.json and .md
are written at the end.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import written
from functional import environment
from hosts import Host, images, vit
from steps import beside, training_step
from torch import Tensor, nn
from treatments import TREATMENTS

import explicit_dropout as xd

LAYERS, COMPONENTS = 12, ("value", "feed_forward")
HOST = Host(lambda p: vit(p, image=8, patch=4, width=16, layers=LAYERS, heads=2, inner=16), images(1, 8))
SHOWN = (
    "stochastic V+FF", "V+FF paper", "V+FF bernoulli", "V+FF inverted", "AV+FF paper", "AV+FF inverted", "Q+FF paper",
    "QK+FF inverted",
)  # fmt: skip


class Bare:
    """Hooks on the sites of V+FF that do nothing, or pass the output through a function of autograd."""

    own_rate = 0.0

    def __init__(self, *, function: bool) -> None:
        self.function = function

    def attach(self, model: nn.Module) -> Callable[[], Tensor] | None:
        energies: list[Tensor] = []
        for site in xd.find_sites(model):
            if site.component in COMPONENTS and site.projection is not None:
                hook = Through(energies) if self.function else nothing
                site.projection.module.register_forward_hook(hook)

        def penalty() -> Tensor:
            total = torch.cat(energies).sum()
            energies.clear()
            return total

        return penalty if self.function else None


def nothing(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    del module, args, output


class Through:
    def __init__(self, energies: list[Tensor]) -> None:
        self.energies = energies

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        del args
        passed, energy = Empty.apply(output, module.bias)  # type: ignore[no-untyped-call]
        self.energies.append(energy)
        return passed  # type: ignore[no-any-return]


class Empty(torch.autograd.Function):
    """What a penalty of a layer's output makes and keeps, with zeros in the place of results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, bias)
        return x.detach(), x.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        del gradients
        x, bias = ctx.saved_tensors
        return torch.zeros_like(x), torch.zeros_like(bias)


CASES = {
    "a hook that does nothing": Bare(function=False),
    "a hook with an empty function of autograd": Bare(function=True),
    **{name: TREATMENTS[name] for name in SHOWN},
}
HEADER = "| | µs for each site | ± | step × |\n|---|---|---|---|"


def line(row: dict[str, Any]) -> str:
    return f"| {row['treatment']} | {row['microseconds']:.0f} | {row['spread'] / 2:.0f} | {row['time_ratio']:.2f} |"


def measure(name: str, host: Host, sites: int, budget: float) -> dict[str, Any]:
    """Microseconds that a step takes longer for each of so many sites; the spread is an interquartile range."""
    none, _ = training_step(host, TREATMENTS["none"], "cpu", "eager")
    step, _ = training_step(host, CASES[name], "cpu", "eager")
    found = beside(none, step, "cpu", budget)
    one = 1e6 * found["none_seconds"] / sites
    return {
        "treatment": name,
        "microseconds": one * (found["time_ratio"] - 1),
        "spread": one * found["ratio_spread"],
        **{key: found[key] for key in ("time_ratio", "none_seconds", "turns")},
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=2.0, help="seconds of repeats for each line")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and .md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    command = "python " + shlex.join(sys.argv if arguments is None else ["benchmarks/overhead.py", *arguments])
    with torch.device("meta"):
        sites = sum(site.component in COMPONENTS for site in xd.find_sites(HOST.make(0.0)))
    result = {"command": command, "environment": environment("cpu"), "sites": sites, "rows": []}
    print(HEADER)
    for name in CASES:
        row = measure(name, HOST, sites, options.budget)
        result["rows"].append(row)
        print(line(row), flush=True)
    if options.output:
        opening = f"# What a site costs on the CPU\n\n`{command}`: {sites} sites, {written.about(result)}."
        written.write(options.output, result, opening, HEADER, line)


if __name__ == "__main__":
    main()
