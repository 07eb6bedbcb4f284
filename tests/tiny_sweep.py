"""An experiment file whose runs take a moment each, and what tests ask about its results."""

import json

from explicit_dropout.lab.config import Data, Execution, Model, Run, Training, Treatment
from explicit_dropout.lab.experiment import Experiment

EXECUTION = Execution(device="cpu", threads=1, deterministic=True, checkpoint_seconds=0)
TREATMENTS = (Treatment(), Treatment("dropout"), Treatment("explicit_v", "explicit", strength=0.1))


def run(treatment=TREATMENTS[0], seed=0, epochs=4, batch=64, learning_rate=1e-2, examples=256):
    model = Model(layers=1, width=16, heads=2, hidden=16, patch=4)
    training = Training(epochs=epochs, batch=batch, learning_rate=learning_rate)
    return Run(Data(examples=examples), model, treatment, training, seed)


def experiment(seeds=2, **settings):
    runs = tuple(run(treatment, seed, **settings) for treatment in TREATMENTS for seed in range(seeds))
    return Experiment("tiny", "Three treatments of digits", runs, baseline="none+none")


def failing():
    """An experiment whose middle row cannot be trained: its batch is larger than its data."""
    runs = (run(TREATMENTS[0]), run(TREATMENTS[1], batch=300), run(TREATMENTS[2]))
    return Experiment("failing", "One of three fails", runs, baseline="none+none")


def results(store):
    """Everything that the finished runs of a store came to, without the time that it took."""
    found = {}
    for folder in store.folders():
        if not folder.finished:
            continue
        lines = [{name: value for name, value in line.items() if name != "timing"} for line in folder.metrics()]
        summary = {name: value for name, value in folder.summary().items() if name != "timing"}
        found[folder.run.key] = json.dumps([summary, lines], sort_keys=True)
    return found
