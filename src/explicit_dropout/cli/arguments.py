"""From the words of a command line to a call: tyro reads them, and errors of ours among them are told as all others.

Errors name settings as Python has them (`data.folder`, `execution.threads`). Here they get the names that the command
has for them (`--folder` or `--data.folder`, `--threads`), and an option that was left out is said to be missing.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import Any, get_args, get_type_hints

import tyro

from explicit_dropout.errors import ExplicitDropoutError, InputError

Command = Callable[..., int]
UNSET = ((r"^(null|false), or\b", "left out, or given beside"), (r"^(null|false)\b", "left out"))
"""What Python calls an option that is left out, alone or in a choice."""


def read(commands: Mapping[str, Command], arguments: Sequence[str], description: str) -> Callable[[], int]:
    """The command that is asked for, ready to be called.

    Settings that check themselves raise errors of ours while they are read. tyro wraps those in a box that names
    parameters of our functions, so they are taken out of it again.
    """
    name = next((word for word in arguments if not word.startswith("-")), "")
    told = options(name, commands[name]) if name in commands else {}
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
    except (SystemExit, ExplicitDropoutError) as ended:
        cause = _ours(ended)
        if cause is not None:
            raise in_its_words(cause, told, arguments) from None
        sys.stderr.write(said.getvalue())
        raise
    sys.stderr.write(said.getvalue())
    return partial(_carried_out, call, told, arguments)


def _carried_out(call: Callable[[], int], told: Mapping[str, str], arguments: Sequence[str]) -> int:
    try:
        return call()
    except ExplicitDropoutError as error:
        raise in_its_words(error, told, arguments) from error


def options(name: str, command: Command) -> dict[str, str]:
    """What a command calls the settings that errors of ours name: {"execution.threads": "--threads", …}.

    Names without a dot are those of options already.
    """
    found: dict[str, str] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        kind, *marks = get_args(hints[parameter.name]) or (hints[parameter.name],)
        if is_dataclass(kind):  # whose options have no prefix
            found |= _of_settings(kind)
            continue
        option = f"--{parameter.name}".replace("_", "-")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            shown = (mark.metavar for mark in marks if getattr(mark, "metavar", None))
            option = next(shown, parameter.name.upper()).strip("[]")
        found[f"{name}.{parameter.name}"] = option  # `data` takes the settings `data.…` one by one
    return found


def _of_settings(kind: Any, prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    place = kind.__name__.lower()
    hints: dict[str, Any] = get_type_hints(kind)
    for entry in fields(kind):
        inner = hints[entry.name]
        if is_dataclass(inner):
            found |= _of_settings(inner, f"{entry.name}.")
            continue
        found[f"{place}.{entry.name}"] = f"--{prefix}{entry.name}".replace("_", "-")
    return found


def in_its_words(
    error: ExplicitDropoutError, told: Mapping[str, str], arguments: Sequence[str]
) -> ExplicitDropoutError:
    """The same error, in the words of the command line."""
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if "--config" in given:  # from there the settings of the run come, by the names that they have there
        told = {name: option for name, option in told.items() if not option.startswith("--") or option in given}
    if isinstance(error, InputError):
        option = told.get(error.argument)
        if option is None:
            return error
        expected = error.expected
        for unset, words in UNSET:
            expected = re.sub(unset, words, expected)
        if str(error.given) in ("None", "null") and option not in given:
            return ExplicitDropoutError(f"`{option}` is missing. It must be {expected}.")
        return InputError(option, expected, error.given)
    text = str(error)
    for name, option in told.items():
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w-])", option, text)
    return error if text == str(error) else ExplicitDropoutError(text)


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
