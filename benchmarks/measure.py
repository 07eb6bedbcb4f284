"""What a computation costs: the tensors alive at once, the largest of them, and its time."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of tensors made inside and still alive, on any device, forward and backward.

    `peak_bytes` is the most that was alive at once, `largest_elements` the size of the largest tensor. What a single
    kernel uses for itself while it runs is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak_bytes = self.largest_elements = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in before | self._seen:
                self._watch(leaf.untyped_storage(), leaf.element_size())
        return result

    def _watch(self, storage: torch.UntypedStorage, element_size: int) -> None:
        size, key = storage.nbytes(), id(storage)
        self._seen.add(key)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.largest_elements = max(self.largest_elements, size // element_size)

        def gone() -> None:
            self._seen.discard(key)
            self.bytes -= size

        weakref.finalize(storage, gone)


def peak_memory(function: Callable[[], object], device: str) -> int:
    """Bytes that the function needs at its peak, beyond what was there before."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - before
    with LiveTensors() as live:
        function()
    return live.peak_bytes


def seconds(function: Callable[[], object], device: str, *, budget: float = 0.5, most: int = 50) -> tuple[float, float]:
    """Median and interquartile range of the time of a call, over repeats that fill the budget."""
    function()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget and len(times) < most):
        times.append(_once(function, device))
    quartiles = statistics.quantiles(times, n=4)
    return statistics.median(times), quartiles[2] - quartiles[0]


def _once(function: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1000
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin
