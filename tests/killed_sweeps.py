"""Sweeps that are killed at random moments and started again until they are done. Run by test_lab_faults.

Every sweep is a process of its own, ended by SIGKILL. They are forked from this one, which has imported everything, so
that the moments fall into the work and not into the imports.
"""

import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import replace

import torch

from explicit_dropout.lab.engines.local import Local
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.sweep import sweep
from tiny_sweep import EXECUTION, experiment, results

EXPERIMENT = experiment(epochs=6)


def start(store):
    process = os.fork()
    if process == 0:
        result = sweep([EXPERIMENT], store, Local(0), replace(EXECUTION, keep_checkpoint=True))
        os._exit(1 if result.failed else 0)
    return process


def whole(store, reference):
    """Whatever can be seen after a kill is whole, and a finished run is what it is without kills."""
    for folder in store.folders():
        folder.metrics()
        folder.environment()
    found = results(store)
    assert all(found[key] == reference[key] for key in found)
    status = store.status(EXPERIMENT.runs)
    assert "running" not in status.values(), "a killed process still holds a lock"
    return status.values()


def weights(store):
    return {
        folder.run.key: torch.load(folder.path / "checkpoint.pt", weights_only=True)["model"]
        for folder in store.folders()
    }


def same(first, second):
    return first.keys() == second.keys() and all(
        torch.equal(first[run][name], second[run][name]) for run in first for name in first[run]
    )


def main(root, kills, seed):
    sweep([EXPERIMENT], Store(f"{root}/warm-up"), Local(0), EXECUTION, seeds=[0])
    calm = Store(f"{root}/calm")
    began = time.monotonic()
    process = start(calm)
    while not list(calm.root.rglob("metrics.jsonl")):
        time.sleep(0.01)
    overhead = time.monotonic() - began  # no kill before this gets the sweep any further
    assert os.waitpid(process, 0)[1] == 0
    length = time.monotonic() - began
    reference = results(calm)
    dice = random.Random(seed)
    storms, seen = [], Counter()
    done = True
    while seen["kills"] < kills:
        if done:
            storms.append(Store(f"{root}/storm-{len(storms)}"))
        process = start(storms[-1])
        time.sleep(dice.uniform(0, overhead + 4 * length / kills))
        os.kill(process, signal.SIGKILL)
        status = os.waitpid(process, 0)[1]
        done = status == 0
        seen["kills"] += status == signal.SIGKILL
        seen.update(whole(storms[-1], reference))
    assert os.waitpid(start(storms[-1]), 0)[1] == 0
    for storm in storms:
        assert results(storm) == reference
        assert same(weights(storm), weights(calm))
        assert not list(storm.root.rglob("*.tmp"))
        assert not list(storm.root.rglob("*.corrupt"))
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
