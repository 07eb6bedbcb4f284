"""The arguments of a module's forward call, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from explicit_dropout.errors import CollectionError

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel")
"""Models around a model, in `module`, that pass their arguments on."""


def argument_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the positional arguments of a module, in order."""
    while type(module).__name__ in WRAPPERS and isinstance(module.module, nn.Module):
        module = module.module
    parameters = inspect.signature(module.forward).parameters.values()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def named_call(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip(names, args, strict=False)), **kwargs}


def only_input(path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a layer of one input was called with."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Tensor):
        raise CollectionError(f"{path}: a layer of it was called with {type(x).__name__}, not with a tensor")
    return x
