"""From the words of a command line to a call: tyro reads them, and errors of ours among them are told as all others."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial, wraps
from typing import Any

import tyro

from explicit_dropout.errors import ExplicitDropoutError

Command = Callable[..., int]


def read(commands: Mapping[str, Command], arguments: Sequence[str], description: str) -> Callable[[], int]:
    """The command that is asked for, ready to be called.

    Settings that check themselves raise errors of ours while they are read. tyro wraps those in a box that names
    parameters of our functions, so they are taken out of it again.
    """
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            call: Callable[[], int] = tyro.extras.subcommand_cli_from_dict(
                {name: _later(command) for name, command in commands.items()},
                prog="explicit-dropout",
                description=description,
                config=(tyro.conf.FlagCreatePairsOff,),
                args=list(arguments),
            )
    except SystemExit as ended:
        cause = _ours(ended)
        if cause is not None:
            raise cause from None
        sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())
    return call


def _later(command: Command) -> Callable[..., Callable[[], int]]:
    @wraps(command)
    def call(*args: Any, **kwargs: Any) -> Callable[[], int]:
        return partial(command, *args, **kwargs)

    return call


def _ours(error: BaseException) -> ExplicitDropoutError | None:
    """The error of ours that another one was raised for."""
    behind: BaseException | None = error
    while behind is not None and not isinstance(behind, ExplicitDropoutError):
        behind = behind.__cause__ or behind.__context__
    return behind
