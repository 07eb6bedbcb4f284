"""`explicit-dropout data`: which datasets there are, which are here, and whether they are whole."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from explicit_dropout.cli import FAILED, FINE
from explicit_dropout.cli.output import complain, console, print_plainly
from explicit_dropout.errors import DataError, InputError, MissingDataError
from explicit_dropout.lab import config
from explicit_dropout.lab.data import SOURCES, Dataset, Source, data_root, load, missing, source
from explicit_dropout.lab.data.material import relative

NO_FOLDER = "there is no such folder, so only what is built in is here"


def data(
    name: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")] = None,
    /,
    download: bool = False,
    check: bool = False,
    root: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None,
    folder: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    size: Annotated[int | None, tyro.conf.arg(metavar="PIXELS")] = None,
    split: int = 0,
    json: bool = False,
) -> int:
    """List the datasets and what they need, or look into one.

    A dataset that is named is read, and divided as a run would divide it.

    Exit status:
      0 fine
      1 a check failed
      2 the command could not be carried out: what is named, or the folder that
        --root names, is not there or damaged

    Try:
      explicit-dropout data
      explicit-dropout data digits
      explicit-dropout data cifar10 --download --root ~/datasets
      explicit-dropout data --check
      explicit-dropout data images --folder flowers --size 32

    Args:
        name: Dataset; leave out to list all.
        download: Fetch the official files first, compare their checksum, unpack them.
        check: Read everything; compare with the published content where that is known.
        root: Folder of the datasets; else $EXPLICIT_DROPOUT_DATA, else ./data.
        folder: For images and features: where they are, inside the root.
        size: For images: side in pixels that they are resized to.
        split: Seed of the division into training, validation and test.
        json: Print JSON instead, for programs.
    """
    place = data_root(root)
    if name is None:
        for option, given in (("download", download), ("folder", folder), ("size", size), ("split", split)):
            if given:
                raise InputError(f"--{option}", "given together with the name of a dataset", "no name")
        if root is not None and not place.is_dir():  # the default may well be made later, by a download
            raise InputError("--root", "a folder that exists", place)
        return _check_all(place, json) if check else _list(place, json)
    wanted = source(name)
    if download:
        _download(wanted, place, quiet=json)
    settings = config.Data(name=name, folder=folder, size=size, split=split)
    dataset = load(settings, place)
    described = _described(dataset)
    if json:
        print_plainly(json_format.dumps(described, indent=2))
    else:
        _print(dataset, wanted)
    return FAILED if check and dataset.official is False else FINE


def _list(root: Path, as_json: bool) -> int:
    found = {entry.name: None if entry.asks_folder else entry.find(root) for entry in SOURCES.values()}
    if as_json:
        rows = [
            {
                "name": e.name,
                "title": e.title,
                "needs": e.needs,
                "obtain": e.obtain,
                "present": _present(e, found[e.name]),
            }
            for e in SOURCES.values()
        ]
        print_plainly(json_format.dumps({"root": str(root), "datasets": rows}, indent=2))
        return FINE
    out = console()
    out.print(f"[bold]Data root[/] {escape(str(root))}" + ("" if root.is_dir() else f": {NO_FOLDER}"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("name", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("what it is", overflow="fold")
    table.add_column("needs, in the data root", overflow="fold")
    for entry in SOURCES.values():
        mark = {True: "[green]yes[/]", False: "no", None: "[dim]–[/]"}[_present(entry, found[entry.name])]
        table.add_row(entry.name, mark, escape(entry.title), escape(entry.needs))
    out.print(table)
    out.print("[dim]More about one, with counts and fingerprint:[/]  explicit-dropout data NAME")
    return FINE


def _present(entry: Source, place: Path | None) -> bool | None:
    """None where a folder has to be given first."""
    return None if entry.asks_folder else place is not None


def _check_all(root: Path, as_json: bool) -> int:
    """Read whatever is here. Everything is tried, so that one damaged file does not hide another."""
    results: dict[str, dict[str, Any]] = {}
    out = console()
    for entry in SOURCES.values():
        if entry.asks_folder or entry.find(root) is None:
            continue
        try:
            dataset = load(entry.name, root)
        except DataError as error:
            results[entry.name] = {"name": entry.name, "error": str(error), "official": False}
            if not as_json:
                complain(str(error))
            continue
        results[entry.name] = _described(dataset)
        if not as_json:
            _print(dataset, entry)
    if as_json:
        print_plainly(json_format.dumps(list(results.values()), indent=2))
    else:
        bad = [name for name, result in results.items() if result["official"] is False]
        verdict = f"[bold red]not as published:[/] {', '.join(bad)}" if bad else "[bold green]nothing wrong[/]"
        folder = "" if root.is_dir() else f" (data root {escape(str(root))}: {NO_FOLDER})"
        out.print(f"{len(results)} of {len(SOURCES)} datasets are here{folder}; {verdict}")
    return FAILED if any(result["official"] is False for result in results.values()) else FINE


def _described(dataset: Dataset) -> dict[str, Any]:
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {
        "name": dataset.name,
        "shape": list(dataset.shape),
        "classes": list(dataset.classes),
        "metric": dataset.metric,
        "examples": {part: len(split) for part, split in parts.items()},
        "fingerprint": dataset.fingerprint,
        "official": dataset.official,
        "sources": list(dataset.sources),
        "notes": list(dataset.notes),
    }


def _print(dataset: Dataset, entry: Source) -> None:
    out = console()
    kind = "channels, height, width" if len(dataset.shape) == 3 else "tokens, features"
    shown = ", ".join(dataset.classes[:10]) + (", …" if len(dataset.classes) > 10 else "")
    official = {
        True: "[green]the published content[/]",
        False: "[red]not the published content[/]",
        None: "no published fingerprint to compare with",
    }[dataset.official]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(dataset.name, escape(entry.title))
    table.add_row(
        "examples", f"{len(dataset.train):,} train, {len(dataset.validation):,} validate, {len(dataset.test):,} test"
    )
    table.add_row("one input", f"{' × '.join(map(str, dataset.shape))} ({kind})")
    table.add_row("classes", escape(f"{len(dataset.classes)}: {shown}"))
    table.add_row("metric", dataset.metric.replace("_", " "))
    table.add_row("files", escape("\n".join(dataset.sources) or "none"))
    table.add_row("fingerprint", f"{dataset.fingerprint}\n{official}")
    for note in dataset.notes:
        table.add_row("note", escape(note))
    out.print(table)


def _download(wanted: Source, root: Path, *, quiet: bool) -> None:
    if wanted.download is None:
        raise MissingDataError(f"{wanted.name} cannot be downloaded from here. {missing(wanted, root)}")
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task(wanted.name, total=None)
        made = wanted.download(root, lambda done, total: progress.update(task, completed=done, total=total))
    if not quiet:
        console().print(f"in {escape(relative(made, root))} of the data root")
