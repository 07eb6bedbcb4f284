"""Pickles without their danger: plain containers, numbers, text and NumPy arrays, and nothing else.

A pickle is a program. Here it may call the few names that arrays are written with, each replaced by a stand-in that
merely remembers its arguments; arrays are made from those afterwards, once type, shape and size are found to agree.
No import happens, and no method of NumPy runs on what the file says.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from explicit_dropout.errors import DataError

_DTYPE = re.compile(r"[<>=|]?([biuf][1248]|c(8|16)|f16|[SU]\d{1,6})")


class _RefusedError(Exception):
    """What the pickle asks for is not allowed, or makes no sense."""


class _Type:
    """Stands for a NumPy dtype: its name, and the byte order that its state adds."""

    def __init__(self, name: object = None, *_: object) -> None:
        if not isinstance(name, str) or not _DTYPE.fullmatch(name):
            raise _RefusedError(f"arrays of type {name!r}")
        self.name, self.order = name.lstrip("<>=|"), name[0] if name[0] in "<>" else "<"

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 5 or state[2:5] != (None, None, None):
            raise _RefusedError("arrays of structured types")
        if state[1] in ("<", ">"):
            self.order = state[1]

    def made(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.name)


class _Array:
    """Stands for an array until everything has been read."""

    def __init__(self, kind: object = None, shape: object = None, raw: object = None, order: object = "C") -> None:
        self.kind, self.shape, self.raw, self.order = kind, shape, raw, order

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _RefusedError("an array without type, shape and content")
        _, self.shape, self.kind, fortran, self.raw = state
        self.order = "F" if fortran else "C"

    def made(self) -> Any:
        raw = self.raw.encode("latin1") if isinstance(self.raw, str) else self.raw
        if not isinstance(self.kind, _Type) or not isinstance(raw, bytes | bytearray | pickle.PickleBuffer):
            raise _RefusedError("an array that does not hold plain numbers")
        if not isinstance(self.shape, tuple) or not all(type(n) is int and n >= 0 for n in self.shape):
            raise _RefusedError(f"an array of shape {self.shape!r}")
        dtype, flat = self.kind.made(), memoryview(raw).cast("B")
        if math.prod(self.shape) * dtype.itemsize != flat.nbytes:
            raise _RefusedError(f"{flat.nbytes} bytes for an array of shape {self.shape} and type {dtype}")
        return np.frombuffer(flat, dtype).reshape(self.shape, order="F" if self.order == "F" else "C")


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _from_buffer(raw: object, kind: object, shape: object, order: object = "C", *_: object) -> _Array:
    return _Array(kind, shape, raw, order)


def _scalar(kind: object, raw: object = b"") -> _Array:
    return _Array(kind, (), raw)


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise _RefusedError("text in another encoding than Latin-1")
    return text.encode("latin1")


def _no_bytes(*given: object) -> bytes:
    """How protocol 2 writes no bytes at all."""
    if given:
        raise _RefusedError("bytes made of something else")
    return b""


def _ndarray(*_: object) -> None:
    """Only ever an argument of _reconstruct."""
    raise _RefusedError("a call of numpy.ndarray")


def _dictionary(*given: object) -> dict[Any, Any]:
    """An OrderedDict, which is filled afterwards."""
    if given:
        raise _RefusedError("an OrderedDict made of something else")
    return {}


class _Name:
    """A name that a pickle may call, and do nothing else with: it has no attributes to set."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: object) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: object) -> None:
        raise _RefusedError("a change of a name that it may only call")


_ALLOWED = {
    ("numpy", "ndarray"): _Name(_ndarray),
    ("numpy", "dtype"): _Name(_Type),
    ("_codecs", "encode"): _Name(_encode),
    ("__builtin__", "bytes"): _Name(_no_bytes),
    ("collections", "OrderedDict"): _Name(_dictionary),
}
for _package in ("numpy.core", "numpy._core"):
    _ALLOWED[f"{_package}.multiarray", "_reconstruct"] = _Name(_reconstruct)
    _ALLOWED[f"{_package}.multiarray", "scalar"] = _Name(_scalar)
    _ALLOWED[f"{_package}.numeric", "_frombuffer"] = _Name(_from_buffer)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _RefusedError(f"{module}.{name}") from None


def load_pickle(file: BinaryIO, path: Path | str) -> Any:
    """What a pickle holds, if it holds nothing but plain containers, numbers, text and arrays.

    Text and arrays of Python 2 are read as well.
    """
    try:
        loaded = _Unpickler(file, encoding="latin1").load()
        return _made(loaded, {})
    except _RefusedError as refused:
        raise DataError(
            f"{path} was not read: this pickle asks for {refused}; only plain containers and arrays are allowed."
        ) from None
    except (pickle.UnpicklingError, EOFError) as error:
        raise DataError(f"{path} is damaged or ends early: {error}") from error
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OverflowError,
        RecursionError,
        MemoryError,
        ImportError,
    ) as error:
        raise DataError(f"{path} is no readable pickle: {type(error).__name__}: {error}") from error


def _made(value: Any, done: dict[int, Any]) -> Any:
    """The same containers with arrays in the place of their stand-ins; what is shared stays shared."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if id(value) not in done:
        if isinstance(value, _Array):
            made = value.made()
            done[id(value)] = made if made.ndim else made[()]
        elif isinstance(value, dict):
            done[id(value)] = {_made(key, done): _made(entry, done) for key, entry in value.items()}
        elif isinstance(value, list | tuple):
            done[id(value)] = type(value)([_made(entry, done) for entry in value])
        else:
            raise _RefusedError(f"a value of type {type(value).__name__}")
    return done[id(value)]
