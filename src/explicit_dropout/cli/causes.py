"""Why the code of others failed, in one line instead of a traceback."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten

import torch

LONGEST = 400


def cause(error: BaseException, file: str | None = None) -> str:
    """What was raised, what that goes back to, where in `file` it happened, and what helps if that is known."""
    chain = list(_chain(error))
    said = _words(error)
    if len(chain) > 1 and _words(chain[-1]) not in said:
        said += f" It goes back to {_words(chain[-1])}"
    lines = [
        frame.lineno for frame in traceback.extract_tb(error.__traceback__) if file and _same(frame.filename, file)
    ]
    place = f"{file}, line {lines[-1]}: " if lines else ""
    hint = _torchvision_hint() if any("torchvision" in str(one) for one in chain) else ""
    return f"{place}{said}{hint}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those behind it, as a traceback would have them."""
    behind: BaseException | None = error
    while behind is not None:
        yield behind
        behind = behind.__cause__ or (None if behind.__suppress_context__ else behind.__context__)


def _words(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return shorten(f"{type(error).__name__}: {text}" if text else type(error).__name__, LONGEST, placeholder=" …")


def _same(one: str, other: str) -> bool:
    return Path(one).absolute() == Path(other).absolute()


def _torchvision_hint() -> str:
    """torchvision from another index than torch lacks its operators, and what imports it fails in odd ways."""
    build = torch.__version__.partition("+")[2]
    index = f" --index-url https://download.pytorch.org/whl/{build}" if build else ""
    return (
        f". torchvision may not fit torch {torch.__version__}: install it from the same index as torch:  "
        f"pip install --force-reinstall --no-deps torchvision{index}"
    )
