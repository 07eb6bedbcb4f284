"""`explicit-dropout pack`: finished runs of a store as one file for each experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.markup import escape

from explicit_dropout.cli import AGREES
from explicit_dropout.cli.output import console, plural
from explicit_dropout.errors import InputError
from explicit_dropout.lab.experiment import load_experiments
from explicit_dropout.lab.store import Store

REST = "runs"
"""The archive of runs that no experiment was named for."""


def pack(
    experiments: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="[EXPERIMENT.py …]", help_behavior_hint="(default: every run of the store)"),
    ] = (),
    /,
    store: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("results"),
) -> int:
    """Pack finished runs into one file for each experiment, DIR/EXPERIMENT.zip.

    Sweeps and reports read them there. Runs that are not finished, or hold
    a checkpoint, stay folders. To have folders again, unpack:

      unzip results/table4.zip -d results/runs && rm results/table4.zip

    Try:
      explicit-dropout pack experiments/table4.py
      explicit-dropout pack --store build/digits

    Args:
        experiments: Experiment files.
        store: Folder of the results.
    """
    place, out = Store(store), console()
    place.check()
    if not place.exists:
        raise InputError("--store", "a folder that a sweep has written", store)
    named = {file.stem: [run for made in load_experiments(file) for run in made.runs] for file in experiments}
    for name, runs in (named or {REST: [folder.run for folder in place.folders()]}).items():
        packed, target = place.pack(name, runs), escape(f"{name}.zip")
        out.print(f"{target}: {plural(packed, 'run')} packed" if packed else f"{target}: nothing to add")
    return AGREES
