"""Work on tensors that stay where they are, captured once as a CUDA graph: then all its kernels are one launch."""

from __future__ import annotations

from collections.abc import Callable

import torch

WARM_UPS = 3
"""How often the work is done before it is captured: libraries allocate their workspaces meanwhile."""

Undo = Callable[[], None]


def captured(work: Callable[[], None], remember: Callable[[], Undo], device: torch.device) -> torch.cuda.CUDAGraph:
    """The work as a graph to be replayed. Nothing has changed by then.

    Args:
        work: what is done, on tensors of its own.
        remember: called first; it returns what puts everything back that the work changes.
    """
    undo = remember()
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):  # the stream that nodes kept from the warm-up know
        work()
    undo()
    return graph
