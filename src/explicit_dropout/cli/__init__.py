"""The command line `explicit-dropout`: look at models, check closed forms on them, and run the laboratory."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from explicit_dropout import __version__
from explicit_dropout.errors import ExplicitDropoutError

FINE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 130
"""Exit statuses: fine, a check failed, the command could not be carried out, Ctrl-C (as shells have it)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        print(
            f"The command line needs {error.name}, which is not installed:  pip install 'explicit-dropout[lab]'",
            file=sys.stderr,
        )
        return BAD_INPUT
    from explicit_dropout.cli import arguments as words
    from explicit_dropout.cli.datasets import data
    from explicit_dropout.cli.demo import demo
    from explicit_dropout.cli.inspecting import inspect
    from explicit_dropout.cli.output import complain, console, flush, silence, tolerate_any_character
    from explicit_dropout.cli.own_dropout import twins
    from explicit_dropout.cli.reporting import report
    from explicit_dropout.cli.sweeping import sweep
    from explicit_dropout.cli.training import train
    from explicit_dropout.cli.verifying import verify

    commands: dict[str, words.Command] = {
        "demo": demo,
        "inspect": inspect,
        "verify": verify,
        "twins": twins,
        "data": data,
        "train": train,
        "sweep": sweep,
        "report": report,
    }
    tolerate_any_character()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given == ["--version"]:
        print(f"explicit-dropout {__version__}")
        return FINE
    try:
        return words.read(commands, given, _DESCRIPTION)()
    except ExplicitDropoutError as error:
        complain(str(error))
        return BAD_INPUT
    except BrokenPipeError:  # whoever reads the help has read enough
        silence(sys.stdout)
        return FINE
    except KeyboardInterrupt:
        console(stderr=True).print("Stopped. What is finished is kept; the same command goes on from here.")
        return STOPPED
    finally:
        flush()


_DESCRIPTION = """Dropout without the dice: its effect as a term of the loss.

First steps:
  explicit-dropout demo
  explicit-dropout inspect timm:vit_tiny_patch16_224
  explicit-dropout verify hf:bert --set num_hidden_layers=2
  explicit-dropout sweep experiments/digits.py --dry-run
"""
