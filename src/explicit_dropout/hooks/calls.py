"""Calls of a module: their arguments by name, those under way, and the graph that they leave."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from explicit_dropout.errors import CollectionError

FUNCTIONS = str(Path("torch", "autograd", "function.py"))
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


def around(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The model and all that holds the module at a path, outermost first, each with its own path."""
    parts = path.split(".")
    for length in range(len(parts)):
        inner = ".".join(parts[:length])
        yield inner, model.get_submodule(inner)


def calls_itself(model: nn.Module) -> bool:
    """Whether more than one call of this model is under way in this thread; one that was interrupted is not."""
    calls, frame = 0, inspect.currentframe()
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model:
            calls += 1
        frame = frame.f_back
    return calls > 1


def only_input(path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a layer of one input was called with."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Tensor):
        raise CollectionError(f"{path}: a layer of it was called with {type(x).__name__}, not with a tensor")
    if x.is_nested:
        raise CollectionError(
            f"{path}: a layer of it was called with a nested tensor. Pad it, and pass a padding mask."
        )
    return x


def with_input(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of such a call with another tensor in its place."""
    if args:
        return (x, *args[1:]), kwargs
    return args, {**kwargs, next(iter(kwargs)): x}


def without_function(state: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The state of a copy. It is inert, and does without a function of the user's, which may not be one to be saved."""
    return {**state, name: None} if callable(state[name]) else {**state}


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: what runs now is run again, by checkpointing."""
    return torch._C._current_graph_task_id() != -1


def keeps_graph() -> bool:
    """Whether the backward pass that is under way leaves its graph for another."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def in_transform() -> bool:
    """Whether torch.func runs this: vmap, grad and the like."""
    return torch._C._are_functorch_transforms_active()


def is_checkpointing() -> bool:
    """Whether activation checkpointing runs this, of either kind."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():  # the reentrant kind has no gradients the first time
        return any("checkpoint.py" in code.co_filename and "torch" in code.co_filename for code in _codes())
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", "")


def is_in_function() -> bool:
    """Whether a `torch.autograd.Function` runs this, and no module that it calls."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    for code in _codes():
        if code is nn.Module._call_impl.__code__:
            return False
        if code.co_filename.endswith(FUNCTIONS):
            return True
    return False


def _codes() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def nodes_behind(nodes: Iterable[Any]) -> Iterator[Any]:
    """These nodes of a graph, and every one that has led to them."""
    waiting = list(nodes)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is not None:
            yield node
            following = [one for one, _ in node.next_functions]
            waiting += [one for one in following if one not in seen]
            seen.update(following)
