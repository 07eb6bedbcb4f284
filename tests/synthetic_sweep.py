"""A store full of invented results, for tests of reports: plausible numbers that no model has made.

python tests/synthetic_sweep.py FOLDER     # write one, and its report, to look at
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

from explicit_dropout import __version__
from explicit_dropout.lab.config import Data, Model, Run, Training, Treatment
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.rows import treatments
from explicit_dropout.lab.store import Store

ROWS = (
    "none+implicit", "none+none", "drop_key+implicit", "arora_q+explicit", "none+explicit",
    "explicit_q+explicit", "explicit_v+explicit", "explicit_av+explicit",
)  # fmt: skip
PAPER = {
    "none+implicit": {"mean": 85.14, "std": 0.63},
    "drop_key+implicit": {"mean": 85.45, "std": 0.41},
    "arora_q+explicit": {"mean": 61.08, "std": 0.8},
    "none+explicit": {"mean": 86.14, "std": 0.36},
    "explicit_q+explicit": {"mean": 83.92, "std": 0.98},
    "explicit_v+explicit": {"mean": 86.38, "std": 0.44},
    "explicit_av+explicit": {"mean": 86.11, "std": 0.41},
}
EFFECT = {"none+none": -1.4, "drop_key+implicit": 0.25, "arora_q+explicit": -23, "none+explicit": 0.9}
EFFECT |= {"explicit_q+explicit": -1.2, "explicit_v+explicit": 1.3, "explicit_av+explicit": 0.4}
RATES = STRENGTHS = (1e-4, 5e-4, 1e-3, 5e-3)
MODEL = Model(layers=4, width=48, heads=4, hidden=96, patch=2, read="mean")


def experiment(
    rows=ROWS, seeds=range(5), rates=RATES, strengths=STRENGTHS, epochs=30, *, name="synthetic", laws=(), **fields
):
    """Runs over the whole grid; `laws` adds the explicit rows under other laws."""
    made: list[Treatment] = [t for row in rows for t in treatments(row, strengths)]
    made += [t for law in laws for row in rows if "explicit" in row for t in treatments(row, strengths, law=law)]
    runs = tuple(
        Run(Data("digits"), MODEL, treatment, Training(epochs=epochs, learning_rate=rate), seed)
        for seed in seeds
        for treatment in made
        for rate in rates
    )
    known: dict = {
        "title": "Synthetic numbers, not measured by anyone",
        "baseline": "none+implicit" if "none+implicit" in rows else rows[0],
        "paper": {row: PAPER[row] for row in rows if row in PAPER},
        "notes": ("Every number of this report is invented to try the report.",),
    }
    return Experiment(name=name, runs=runs, **(known | fields))


def level(run):
    """The accuracy that a run would have without chance."""
    score = 85.0 + EFFECT.get(run.row.split(" [")[0], 0.0)
    score -= 2.2 * abs(math.log10(run.training.learning_rate / 1e-3)) ** 1.5
    if run.treatment.has_strength:
        score -= 1.6 * abs(math.log10(run.treatment.strength / 1e-3)) ** 1.5
    return score / 100


def metrics(run, final, random):
    """Lines of metrics.jsonl, with terms for rows that have a penalty."""
    lines = []
    epochs = run.training.epochs
    for epoch in range(1, epochs + 1):
        done = epoch / epochs
        accuracy = final * (1 - 0.8 * math.exp(-9 * done)) + random.normal(0, 0.004)
        loss = 2.3 * math.exp(-3.5 * done) + 0.02 + abs(random.normal(0, 0.01))
        terms = {}
        if run.treatment.has_penalty:
            for layer in range(run.model.layers):
                size = (1 + 2 * layer) * math.exp(-1.5 * done) + 0.2
                terms[f"blocks.{layer}.attention:value"] = size
                terms[f"blocks.{layer}.feed_forward.fc1:feed_forward"] = 5 * size
        lines.append(
            {
                "epoch": epoch,
                "step": 10 * epoch,
                "learning_rate": run.training.learning_rate,
                "train_loss": loss,
                "penalty": run.treatment.strength * sum(terms.values()),
                "train_accuracy": min(1.0, accuracy - 0.05 + 0.15 * done),
                "terms": terms,
                "validation": {"accuracy": accuracy, "loss": loss + 0.4 * done},
                "timing": {"seconds": 1.5, "examples_per_second": 2000.0},
            }
        )
    return lines


def summary(run, random=None):
    """What a finished run says; the same for the same run."""
    random = random or np.random.default_rng(int(run.key, 16))
    shared = np.random.default_rng([run.seed, run.data.split]).normal(0, 0.004)  # what makes pairs worth having
    test = level(run) + shared + random.normal(0, 0.003)
    validation = level(run) + 0.005 + shared + random.normal(0, 0.003)
    return {
        "row": run.row,
        "metric": "accuracy",
        "validation": {"accuracy": validation, "loss": 0.55, "calibration_error": 0.04},
        "test": {"accuracy": test, "loss": 0.6 - test / 10, "calibration_error": 0.05 + random.normal(0, 0.003)},
        "train": {"accuracy": min(1.0, test + 0.13), "loss": 0.05 + abs(random.normal(0, 0.01))},
        "epochs": run.training.epochs,
        "selected_epoch": run.training.epochs,
        "diverged": False,
        "parameters": 123456,
        "timing": {"seconds": 45 + random.normal(0, 1), "examples_per_second": 2000 + random.normal(0, 30)},
    }


ENVIRONMENT = {
    "explicit_dropout": "0.1.0",
    "python": "3.11.7",
    "torch": "2.13.0",
    "libraries": {"numpy": "2.4.6"},
    "system": "Linux x86_64",
    "device": "CPU",
    "threads": 1,
    "compile": False,
    "deterministic": True,
    "dataset": {"name": "digits", "fingerprint": "0123456789abcdef"},
}


def write(store, runs, *, fast=True):
    """Finish runs in a store. `fast` writes the same files without waiting for the disk."""
    for run in runs:
        random = np.random.default_rng(int(run.key, 16))
        told = summary(run, random)
        lines = metrics(run, told["validation"]["accuracy"], random)
        if fast:
            write_files(store, run, lines, told)
            continue
        folder = store.folder(run)
        with folder.lock():
            folder.write_config()
            folder.write_environment(ENVIRONMENT)
            for line in lines:
                folder.append_metrics(line)
            folder.finish(told)


def write_files(store, run, lines, told=None):
    path = store.root / "runs" / run.key
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"format": 1, "version": __version__, "run": run.to_json()}))
    (path / "environment.json").write_text(json.dumps(ENVIRONMENT))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if told is not None:
        (path / "summary.json").write_text(json.dumps({"format": 1, "key": run.key, **told}))


def begin(store, run, epochs=7):
    """A run that is under way."""
    random = np.random.default_rng(int(run.key, 16))
    write_files(store, run, metrics(run, level(run), random)[:epochs])


def fail(store, run, text):
    """A run that ended with an error."""
    write_files(store, run, [])
    folder = store.folder(run)
    folder.write_error(text)


def partial_store(root):
    """A store with a row that is complete, one under way, one that failed and one not run; and its experiment."""
    store = Store(root)
    rows = ("none+implicit", "explicit_q+explicit", "explicit_v+explicit", "explicit_av+explicit")
    made = experiment(rows, seeds=range(3), rates=(1e-3,), strengths=(1e-3,), epochs=12)
    by_row = {row: [run for run in made.runs if run.row == row] for row in rows}
    write(store, [*by_row["none+implicit"], *by_row["explicit_q+explicit"][:2]])
    begin(store, by_row["explicit_q+explicit"][2], epochs=7)
    fail(store, by_row["explicit_v+explicit"][0], "Traceback:\n  …\nOutOfMemoryError: no room")
    return store, made


def main(folder):
    store = Store(Path(folder) / "store")
    complete, partial = experiment(), experiment(seeds=range(3), rates=(5e-4, 1e-3), epochs=20, name="partial")
    write(store, complete.runs)
    for number, run in enumerate(partial.runs):
        if run.row == "explicit_av+explicit":
            continue
        if number % 23 == 5:
            fail(store, run, "Traceback (most recent call last):\n  …\ntorch.OutOfMemoryError: CUDA out of memory")
        elif number % 17 == 3:
            begin(store, run)
        elif run.seed < 2:
            write(store, [run])
    return store, [complete, partial]


if __name__ == "__main__":
    from explicit_dropout.lab.report import build, write_report

    made, experiments = main(sys.argv[1])
    report = build(made, [(one, f"experiments/{one.name}.py") for one in experiments])
    for path in write_report(report, Path(sys.argv[1])):
        print(path)
