"""Operators that the compiler looks into.

A compiled model calls an operator through the dispatcher and through Python, at every call anew: some hundred
microseconds, more than the kernel inside takes. Where an operator only launches Triton kernels (`wrap_triton`) and
calls torch, the compiler can have the inside instead, and launch them as it does its own. `torch.library.triton_op`
makes such operators, but imports Triton with the package and warns where there is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library.custom_ops import CustomOpDef
from torch._subclasses.functional_tensor import FunctionalTensorMode


def inlined(operator: CustomOpDef, serves: Callable[[Any], bool]) -> None:
    """Put the inside of an operator into compiled code, where its first argument is one that the kernels serve."""

    def inside(mode: Any, call: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not serves(args[0]):
            return mode.__torch_dispatch__(call, types, args, kwargs)
        with mode:
            return operator._init_fn(*args, **kwargs)

    operator.register_torch_dispatch(FunctionalTensorMode, inside)
