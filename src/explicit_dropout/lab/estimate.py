"""How long runs will take: from finished runs of the same shape, or by timing a few steps of one."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from statistics import median

import torch

from explicit_dropout.errors import StoreError
from explicit_dropout.lab.config import Execution, Run, Training
from explicit_dropout.lab.store import Store

WARM_UP, TIMED = 2, 5
"""Steps of a probe that do not count, and that do."""
LONGEST = 3.0
"""Seconds after which a probe leaves it at the steps that it has made."""


def shape(run: Run) -> Run:
    """The same run for everything that does not change the work of a step: seed, split, strength, learning rate, …"""
    training = Training(
        epochs=1,
        batch=run.training.batch,
        optimiser=run.training.optimiser,
        clip=float(run.training.clip > 0),
        precision=run.training.precision,
    )
    treatment = replace(run.treatment, strength=float(run.treatment.strength > 0))
    data = replace(run.data, split=0, label_noise=0.0)
    return replace(run, seed=0, data=data, treatment=treatment, training=training)


def known(runs: Iterable[Run], store: Store, device: str) -> dict[Run, float]:
    """Seconds per epoch by shape, of those shapes of which the store has a run that was trained on such a device."""
    wanted = {shape(run) for run in runs}
    found: dict[Run, list[float]] = {}
    for folder in store.folders(problems=[]):  # bad folders of others are no concern here; a sweep names its own
        kind = shape(folder.run)
        if kind not in wanted:
            continue
        with suppress(StoreError):
            if folder.finished and (folder.environment() or {}).get("device") == device:
                summary = folder.summary()
                found.setdefault(kind, []).append(summary["timing"]["seconds"] / max(summary["epochs"], 1))
    return {kind: median(seconds) for kind, seconds in found.items()}


def probe(run: Run, execution: Execution) -> float:
    """Seconds per epoch of a run, by a few steps of it on this machine; nothing is written."""
    from explicit_dropout.lab import data, penalties
    from explicit_dropout.lab.training import build
    from explicit_dropout.lab.training.batches import batches, steps_per_epoch
    from explicit_dropout.lab.training.environment import chosen_device
    from explicit_dropout.lab.training.step import Step

    torch.set_num_threads(execution.threads or 1)  # as a worker among others
    device = chosen_device(execution)
    dataset = data.load(run.data, execution.data_root).to(device)
    model = build(run, dataset, device)
    step = Step(model, model, penalties.attach(model, run.treatment), run, Execution(), device)
    steps = steps_per_epoch(run, dataset.train)
    ends = [time.perf_counter()]
    for x, y in islice(batches(run, dataset.train, 0), min(steps, WARM_UP + TIMED)):
        step(x, y, 0.0)
        step.means()  # waits for the device
        ends.append(time.perf_counter())
        if ends[-1] - ends[0] > LONGEST:
            break
    first = min(WARM_UP, len(ends) - 2)
    return (ends[-1] - ends[first]) / (len(ends) - 1 - first) * steps


def epochs_left(run: Run, store: Store) -> int:
    """All of them, with a warning, where the metrics so far cannot be read: such a run starts anew."""
    try:
        done = len(store.folder(run).metrics())
    except StoreError as problem:
        warnings.warn(str(problem), RuntimeWarning, stacklevel=2)
        done = 0
    return max(0, run.training.epochs - done)


def device_name(execution: Execution) -> str:
    """As it stands in environment.json."""
    from explicit_dropout.lab.training.environment import chosen_device

    device = chosen_device(execution)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def total(runs: Sequence[Run], store: Store, seconds_per_epoch: dict[Run, float]) -> float:
    """Seconds of work, one run after another."""
    return sum(epochs_left(run, store) * seconds_per_epoch[shape(run)] for run in runs)
