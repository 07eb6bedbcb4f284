"""What can go wrong in a sweep, done to real ones: killed at any moment, interrupted, workers lost, the disk full."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from explicit_dropout.lab.engines.local import Local
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.sweep import sweep
from small_disk import on_small_disk
from tiny_sweep import EXECUTION, experiment, results

HERE = Path(__file__).parent
LONG = {"seeds": 1, "epochs": 40}


def test_a_sweep_killed_at_25_random_moments_loses_nothing_and_comes_to_the_same_bits(tmp_path):
    """The script checks after every kill that what is there is whole, and at the end metrics, summaries and weights."""
    ran = subprocess.run(
        [sys.executable, "killed_sweeps.py", tmp_path, "25", "0"], cwd=HERE, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    seen = json.loads(ran.stdout)
    assert seen["kills"] == 25
    assert min(seen.get(status, 0) for status in ("new", "resumable", "finished")) > 0, seen


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp("undisturbed"))
    sweep([experiment(**LONG)], store, Local(0), EXECUTION)
    return results(store)


def wait_until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came about"
        time.sleep(0.01)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGINT], ids=["killed", "Ctrl-C"])
def test_workers_end_with_their_sweep_and_the_next_sweep_goes_on(tmp_path, blow, undisturbed):
    file, store = tmp_path / "long.py", Store(tmp_path / "results")
    file.write_text(f"import tiny_sweep\ndef experiment():\n    return tiny_sweep.experiment(**{LONG})\n")
    start = [sys.executable, "-m", "explicit_dropout", "sweep", file, "--store", store.root, "--workers=2"]
    start += ["--device=cpu", "--threads=1", "--deterministic", "--checkpoint-seconds=0"]
    parent = subprocess.Popen(
        start,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: list(store.root.rglob("checkpoint.pt")))
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 2
    if blow == signal.SIGINT:
        os.killpg(parent.pid, blow)  # as a terminal does
    else:
        parent.kill()
    out, err = parent.communicate(timeout=30)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    if blow == signal.SIGINT:
        assert parent.returncode == 130, err
        assert "The same command goes on from here." in " ".join(out.split())
        assert "Traceback" not in err
    states = store.status(experiment(**LONG).runs).values()
    assert "running" not in states
    assert "resumable" in states
    result = sweep([experiment(**LONG)], store, Local(0), EXECUTION)
    assert not result.failed
    assert results(store) == undisturbed


@pytest.mark.parametrize("engine", ["local", "vectorised"])
def test_a_sweep_stops_by_itself_when_its_time_is_over_and_the_next_goes_on(tmp_path, engine):
    store, endless = Store(tmp_path / "results"), {"seeds": 4, "epochs": 100_000}
    (tmp_path / "endless.py").write_text(
        f"import tiny_sweep\ndef experiment():\n    return tiny_sweep.experiment(**{endless})\n"
    )
    start = [sys.executable, "-m", "explicit_dropout", "sweep", tmp_path / "endless.py", "--store", store.root]
    start += [f"--engine={engine}", "--minutes=0.3", "--device=cpu", "--threads=1", "--checkpoint-seconds=0"]
    ended = subprocess.run(
        start,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),  # as under nohup
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (130, False), ended.stderr
    assert "Stopped: 0 runs of" in " ".join(ended.stdout.split())
    states = store.status(experiment(**endless).runs).values()
    assert "resumable" in states
    assert "running" not in states


def test_a_worker_that_dies_costs_its_run_no_more_than_another_sweep(tmp_path, undisturbed):
    store = Store(tmp_path)

    def strike():
        wait_until(lambda: list(store.root.rglob("checkpoint.pt")))
        for process in psutil.Process().children(recursive=True):
            if "spawn_main" in " ".join(process.cmdline()):
                process.kill()

    striker = threading.Thread(target=strike)
    striker.start()
    result = sweep([experiment(**LONG)], store, Local(1), EXECUTION)
    striker.join()
    (message,) = result.failed.values()
    assert message == "its process died (SIGKILL): perhaps memory ran out. Sweep again to resume it."
    assert result.finished == 2
    again = sweep([experiment(**LONG)], store, Local(0), EXECUTION)
    assert again.plan.count("resumable") == again.finished == 1
    assert results(store) == undisturbed


FULL = """
import subprocess, sys
from dataclasses import replace
from tiny_sweep import EXECUTION, experiment, results
from explicit_dropout.lab.engines.local import Local
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.sweep import sweep

store, made = Store(sys.argv[1]), [experiment(seeds=1)]
execution = replace(EXECUTION, keep_checkpoint=True)
first = sweep(made, store, Local(0), execution)
assert first.failed, "it fitted"
assert all("No space left on device" in message for message in first.failed.values()), first.failed
subprocess.run(["mount", "-o", "remount,size=10m", sys.argv[1]], check=True)
second = sweep(made, store, Local(0), execution)
assert not second.failed, second.failed
assert second.plan.count("finished") == first.finished
roomy = Store(sys.argv[2])
sweep(made, roomy, Local(0), execution)
assert results(store) == results(roomy)
print("survived", len(first.failed))
"""


def test_a_sweep_that_fills_the_disk_says_so_and_goes_on_once_there_is_room(tmp_path):
    """On a real file system with room for one run and a half."""
    small, roomy = tmp_path / "small", tmp_path / "roomy"
    small.mkdir()
    ran = on_small_disk(
        small, "128k", [sys.executable, "-c", f"import sys; sys.path.append({str(HERE)!r})\n" + FULL, small, roomy]
    )
    assert ran.stdout.startswith("survived"), ran.stderr


def test_options_that_leave_results_alone_leave_their_names_alone(tmp_path):
    """How a run is carried out is no part of its name: a finished one is found whatever the options."""
    store = Store(tmp_path)
    sweep([experiment(seeds=1)], store, Local(0), EXECUTION)
    again = sweep([experiment(seeds=1)], store, Local(0), replace(EXECUTION, deterministic=False, checkpoint_seconds=5))
    assert again.plan.todo == ()
