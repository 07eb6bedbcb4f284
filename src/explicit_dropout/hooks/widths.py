"""Which axis of a tensor is its width: as the user says, by the layers that made it, or by those of the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import InputError, UnsupportedSiteError
from explicit_dropout.hooks.calls import without_function
from explicit_dropout.hooks.draws import Draw, kind_of

Width = Callable[[str, Tensor], int] | None
"""Which axis of a tensor is its width, by module path; None: it is told by the layers around it."""

ELEMENTWISE = re.compile(
    r"(Relu|Gelu|Silu|Mish|Hardswish|Hardtanh|Elu|LeakyRelu|Sigmoid|Tanh|Add|Sub|Mul|Div|Clone|ToCopy|Alias|Clamp|"
    r"NativeDropout|ViewAs)Backward"
)
CHANNELS_SECOND = re.compile(
    r"(Convolution|BatchNorm|GroupNorm|InstanceNorm|Pool\dD?|Upsample\w*)Backward", re.IGNORECASE
)
WIDTH_LAST = re.compile(r"(Addmm|Mm|Bmm|LayerNorm|Embedding|Linear|RmsNorm)Backward", re.IGNORECASE)


MOST_STEPS = 24
"""Operations between a tensor and the layer that made it."""


class Widths:
    """What is known of widths in a model, and what the user says of them."""

    def __init__(self, model: nn.Module, given: Width) -> None:
        self.given = given
        self.channels, self.widths = widths_of(model)
        self.norms = {module.normalized_shape[-1] for module in model.modules() if isinstance(module, nn.LayerNorm)}

    def __getstate__(self) -> dict[str, Any]:
        return without_function(self.__dict__, "given")

    def axis(self, draw: Draw, x: Tensor) -> int:
        """Which axis of a tensor is its width: the last, or the second where convolutions work on it."""
        if draw.axis is not None:
            return draw.axis
        if x.ndim < 3 or kind_of(draw) == "linear":
            return x.ndim - 1
        if self.given is not None:
            given = self.given(draw.path, x)
            if isinstance(given, bool) or not isinstance(given, int) or not -x.ndim <= given < x.ndim:
                raise InputError("width", f"a function that returns an axis of {tuple(x.shape)}", repr(given))
            return given % x.ndim
        known = None if torch.compiler.is_compiling() else axis_by_history(x)
        if known == 1 and x.shape[-1] in self.norms and x.shape[1] not in self.norms:
            return x.ndim - 1  # a linear layer over tokens, as mixers have them
        if known is not None:
            return known
        first, last = x.shape[1] in self.channels, x.shape[-1] in self.widths
        if first and not last:
            return 1
        if first == last and (first or x.ndim > 3):
            raise UnsupportedSiteError(
                f"{draw.path or 'the model'}: which axis of a tensor of shape {tuple(x.shape)} is its width, the "
                "second or the last, cannot be told from the layers of the model. Say so: "
                "convert_dropout(..., width=lambda path, x: axis)."
            )
        return x.ndim - 1


def widths_of(model: nn.Module) -> tuple[set[int], set[int]]:
    """How many channels convolutions of a model have, and how wide its linear layers, norms and embeddings are."""
    channels: set[int] = set()
    widths: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            channels |= {module.in_channels, module.out_channels}
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            channels.add(module.num_features)
        elif isinstance(module, nn.Linear):
            widths |= {module.in_features, module.out_features}
        elif isinstance(module, nn.LayerNorm):
            widths.add(module.normalized_shape[-1])
        elif isinstance(module, nn.Embedding):
            widths.add(module.embedding_dim)
    return channels, widths


def axis_by_history(x: Tensor) -> int | None:
    """Which axis of a tensor is its width, by the layer that made it; None if none of a known kind did."""
    return _axis(x.grad_fn, x.ndim, MOST_STEPS)


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
