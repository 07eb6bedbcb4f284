"""Which axis of a tensor is its width: by the layers that made it."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

ELEMENTWISE = re.compile(
    r"(Relu|Gelu|Silu|Mish|Hardswish|Hardtanh|Elu|LeakyRelu|Sigmoid|Tanh|Add|Sub|Mul|Div|Clone|ToCopy|Alias|Clamp|"
    r"NativeDropout|ViewAs)Backward"
)
CHANNELS_SECOND = re.compile(
    r"(Convolution|BatchNorm|GroupNorm|InstanceNorm|Pool\dD?|Upsample\w*)Backward", re.IGNORECASE
)
WIDTH_LAST = re.compile(r"(Addmm|Mm|Bmm|LayerNorm|Embedding|Linear|RmsNorm)Backward", re.IGNORECASE)


def axis_by_history(x: Tensor, most: int = 24) -> int | None:
    """Which axis of a tensor is its width, by the layer that made it; None if none of a known kind did."""
    return _axis(x.grad_fn, x.ndim, most)


def _axis(node: Any, ndim: int, most: int) -> int | None:
    if node is None or not most:
        return None
    name = node.name()
    if CHANNELS_SECOND.search(name):
        return 1
    if WIDTH_LAST.search(name):
        return ndim - 1
    if "Permute" in name or name.startswith("Transpose"):
        order = list(range(ndim))
        if "Permute" in name:
            order = [_signed(dim) % ndim for dim in node._saved_dims]
        else:
            first, second = (_signed(dim) % ndim for dim in (node._saved_dim0, node._saved_dim1))
            order[first], order[second] = order[second], order[first]
        before = _axis(node.next_functions[0][0], ndim, most - 1)
        return None if before is None or len(order) != ndim else order.index(before)
    if "View" in name and "ViewAs" not in name:  # how a linear layer of many axes ends
        before = len(node._saved_self_sym_sizes)
        return ndim - 1 if _axis(node.next_functions[0][0], before, most - 1) == before - 1 else None
    if not ELEMENTWISE.search(name):
        return None
    found = {_axis(following, ndim, most - 1) for following, _ in node.next_functions if following is not None} - {None}
    return found.pop() if len(found) == 1 else None


def _signed(dim: int) -> int:
    """A dimension as autograd keeps it: negative ones as very large numbers."""
    return dim - 2**64 if dim > 2**63 else dim
