"""Sweeps: what is run, in which order, what is said about it, and that two of them share the work."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from explicit_dropout.cli import main, sweeping
from explicit_dropout.cli.sweep_display import Display, span
from explicit_dropout.errors import InputError, StoreError
from explicit_dropout.lab import estimate
from explicit_dropout.lab.config import Data, Model, Run, Training
from explicit_dropout.lab.engines import Event
from explicit_dropout.lab.engines.local import Local
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.sweep import check_data, order, plan, select, sweep
from explicit_dropout.lab.training.step import Step
from tiny_sweep import EXECUTION, TREATMENTS, experiment, failing, results, run

FILE = Path(__file__).with_name("tiny_sweep.py")
QUICK = ("--workers=0", "--device=cpu", "--threads=1", "--deterministic")


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def command(capsys, *arguments):
    """(exit status, stdout, stderr) of `explicit-dropout sweep`."""
    try:
        status = main(("sweep", *map(str, arguments)))
    except SystemExit as left:
        status = int(left.code or 0)
    out, err = capsys.readouterr()
    too_long = [line for line in (out + err).splitlines() if len(line.rstrip()) > 80 and " " in line.strip()]
    assert not too_long, too_long
    return status, out, " ".join(err.replace("│", " ").split())


# ---------------------------------------------------------------------------------------------- what is run


def test_a_run_that_two_experiments_share_is_run_once(store):
    shared = experiment(seeds=1)
    result = sweep([shared, shared], store, Local(0), EXECUTION)
    assert result.finished == 3
    assert len(list(store.finished_runs())) == 3


def test_what_is_finished_is_left_alone_and_what_is_new_is_run(store):
    sweep([experiment(seeds=1)], store, Local(0), EXECUTION)
    before = {path: path.stat().st_mtime_ns for path in store.root.rglob("*") if path.is_file()}
    events = []
    result = sweep([experiment(seeds=2)], store, Local(0), EXECUTION, on_event=events.append)
    assert result.plan.count("finished") == 3
    assert result.finished == 3
    assert {event.run.seed for event in events} == {1}
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_rows_and_seeds_can_be_chosen(store):
    result = sweep([experiment(seeds=3)], store, Local(0), EXECUTION, only=["dropout+none"], seeds=[0, 2])
    assert [(run.row, run.seed) for run in result.plan.todo] == [("dropout+none", 0), ("dropout+none", 2)]
    assert {(run.row, run.seed) for run, _ in store.finished_runs()} == {("dropout+none", 0), ("dropout+none", 2)}


def test_a_row_or_seed_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(InputError, match=r"one of none\+none, dropout\+none, .*closest is 'dropout\+none'"):
        select([experiment()], ["dropuot"])
    with pytest.raises(InputError, match=r"`seeds` must be among 0, 1\. Got 5"):
        select([experiment()], seeds=[0, 5])


def test_a_dry_run_writes_nothing(store):
    result = sweep([experiment()], store, Local(0), EXECUTION, dry_run=True)
    assert len(result.plan.todo) == 6
    assert not store.root.exists()


def test_begun_runs_come_first_then_seed_by_seed_the_rows_in_turn():
    runs = [run(treatment, seed, learning_rate=rate) for treatment in TREATMENTS for rate in (1, 2) for seed in (0, 1)]
    begun = runs[-1]
    ordered = order(runs, {begun.key: "resumable", runs[0].key: "running"})
    assert ordered[0] == begun
    assert ordered[-1] == runs[0]
    rest = [(run.seed, run.training.learning_rate, run.row) for run in ordered[1:-1]]
    rows = [treatment.row for treatment in TREATMENTS]
    expected = [(seed, rate, row) for seed in (0, 1) for rate in (1, 2) for row in rows]
    expected.remove((0, 1, rows[0]))
    expected.remove((1, 2, rows[2]))
    assert rest == expected


def test_a_failing_run_leaves_its_traceback_and_does_not_stop_the_others(store):
    result = sweep([failing()], store, Local(1), EXECUTION)
    (key, message), *others = result.failed.items()
    assert others == []
    assert key == failing().runs[1].key
    assert "`training.batch` must be at most 256" in message
    assert f"runs/{key}/error.txt" in message
    assert "Traceback" in (store.root / "runs" / key / "error.txt").read_text()
    assert len(list(store.finished_runs())) == 2
    again = sweep([failing()], store, Local(0), EXECUTION)
    assert (again.plan.count("finished"), again.plan.count("failed"), len(again.failed)) == (2, 1, 1)


def test_a_damaged_checkpoint_is_reported_and_the_run_is_done_all_the_same(store):
    tiny = run(epochs=2)
    folder = store.folder(tiny)
    with folder.lock():
        folder.write_config()
        folder.append_metrics({"epoch": 1})
        (folder.path / "checkpoint.pt").write_bytes(b"no archive")
    events = []
    sweep([Experiment("one", "One", (tiny,), tiny.row)], store, Local(0), EXECUTION, on_event=events.append)
    assert [event.kind for event in events] == ["started", "note", "finished"]
    assert "kept as checkpoint.pt.corrupt; the run starts from scratch" in events[1].message
    assert (folder.path / "checkpoint.pt.corrupt").read_bytes() == b"no archive"


def test_the_baseline_comes_first_wherever_the_experiment_has_it(store):
    made = replace(experiment(), baseline=TREATMENTS[1].row)
    rows = [run.row for run in plan(select([made]), store).todo]
    assert rows == 2 * [TREATMENTS[1].row, TREATMENTS[0].row, TREATMENTS[2].row]


def features(path, seed, **more):
    """A file of feature sequences, others for another seed."""
    random = np.random.default_rng(seed)
    labels = np.arange(60) % 2
    arrays = random.normal(size=(60, 4, 6)).astype(np.float32)
    np.savez(path, features=arrays, labels=labels, classes=np.array(["no", "yes"]), **more)


def test_runs_on_changed_data_are_not_put_beside_those_on_the_data_before(store, tmp_path):
    features(tmp_path / "mine.npz", seed=0)
    model = Model(layers=1, width=8, heads=2, hidden=8, patch=None, read="mean")
    runs = [
        Run(Data("features", folder="mine.npz", split=split), model, treatment, Training(epochs=1, batch=8))
        for treatment in TREATMENTS[:2]
        for split in range(4)
    ]
    here = replace(EXECUTION, data_root=str(tmp_path))
    made = Experiment("mine", "Mine", tuple(runs), "none+none")
    sweep([made], store, Local(0), here, only=["none+none"])
    assert sweep([made], store, Local(0), replace(here, data_root="elsewhere"), only=["none+none"]).finished == 0
    features(tmp_path / "mine.npz", seed=1)
    with pytest.raises(StoreError, match="seen other data than those at hand under the name features") as refused:
        sweep([made], store, Local(0), here, only=["dropout+none"])
    told = str(refused.value)
    assert "4 finished runs" in told
    assert f"{runs[3].key}  none+none, seed 0, split 3" in told
    assert f"move these folders out of {store.root / 'runs'}" in told
    assert len(list(store.finished_runs())) == 4
    for old in runs[:4]:
        shutil.rmtree(store.folder(old).path)
    assert sweep([made], store, Local(0), here).finished == 8


def test_runs_on_data_that_are_divided_otherwise_are_not_put_beside_those_before(store, tmp_path):
    features(tmp_path / "mine.npz", seed=0, groups=np.arange(60))
    model = Model(layers=1, width=8, heads=2, hidden=8, patch=None, read="mean")
    runs = [
        Run(Data("features", folder="mine.npz", split=split, label_noise=noise), model, treatment, Training(1, 8))
        for treatment, noise in zip(TREATMENTS[:2], (0.0, 0.1), strict=True)
        for split in range(2)
    ]
    here = replace(EXECUTION, data_root=str(tmp_path))
    made = Experiment("mine", "Mine", tuple(runs), "none+none")
    sweep([made], store, Local(0), here, only=["none+none"])
    check_data([made], store, here)
    features(tmp_path / "mine.npz", seed=0, groups=np.arange(60) // 4)
    with pytest.raises(
        StoreError, match="has seen another division into parts than that of the data at hand"
    ) as refused:
        sweep([made], store, Local(0), here, only=["dropout+none"])
    told = str(refused.value)
    assert f"{runs[0].key}  none+none, seed 0: division {store.folder(runs[0]).division[:12]}" in told
    for old in runs[:2]:  # runs of early versions do not say how their data were divided
        path = store.folder(old).path / "environment.json"
        path.write_text(path.read_text().replace('"division"', '"other"'))
    check_data([made], store, here)


# ---------------------------------------------------------------------------------------------- how long it takes


def test_an_estimate_comes_from_finished_runs_of_the_same_shape(store):
    sweep([experiment(seeds=1)], store, Local(0), EXECUTION)
    others = [run(TREATMENTS[1], seed=5, epochs=40, learning_rate=0.5), run(TREATMENTS[1], batch=32)]
    known = estimate.known(others, store, "CPU")
    assert list(known) == [estimate.shape(others[0])]
    summary = store.folder(run(TREATMENTS[1])).summary()
    assert known[estimate.shape(others[0])] == pytest.approx(summary["timing"]["seconds"] / 4)
    assert estimate.known(others, store, "another device") == {}
    assert estimate.total([others[0]], store, known) == pytest.approx(summary["timing"]["seconds"] * 10)


def test_a_probe_times_some_steps_and_is_no_run(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seconds = estimate.probe(run(), EXECUTION)
    sweep([experiment(seeds=1)], store, Local(0), EXECUTION)
    real = estimate.known([run()], store, "CPU")[estimate.shape(run())]
    assert real / 20 < seconds < real * 20
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_damaged_folders_stop_no_estimate(store):
    sweep([experiment(seeds=1)], store, Local(0), EXECUTION)
    later = run(epochs=6)
    seconds = estimate.known([later], store, "CPU")
    folder = store.folder(later)
    with folder.lock():
        folder.write_config()
    (folder.path / "metrics.jsonl").write_text("{\n")
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl, line 1 is not JSON"):
        assert estimate.epochs_left(later, store) == 6
    (store.folder(run(TREATMENTS[1])).path / "config.json").write_text("{")
    (store.folder(run(TREATMENTS[2])).path / "summary.json").write_text("{")
    assert estimate.known([later, run(TREATMENTS[2])], store, "CPU") == seconds


def test_times_are_in_the_unit_that_people_use():
    shown = [span(seconds) for seconds in (0.0123, 1.5, 59, 119, 125, 7300, 86400 * 3)]
    assert shown == ["12 ms", "1.5 s", "59 s", "119 s", "2.1 min", "2.0 h", "3.0 d"]


# ---------------------------------------------------------------------------------------------- the command


def test_the_command_sweeps_and_says_how_it_went(capsys, store):
    status, out, err = command(capsys, FILE, "--store", store.root, "--seeds", "0", *QUICK)
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == "3 runs: 3 new."
    assert "2/3 finished dropout+none, learning rate 0.01, seed 0" in out
    assert "All 3 runs finished." in out
    status, out, _ = command(capsys, FILE, "--store", store.root, "--seeds", "0-1", *QUICK)
    assert status == 0
    assert out.splitlines()[0] == "6 runs: 3 finished already, 3 new."
    status, out, _ = command(capsys, FILE, "--store", store.root, *QUICK)
    assert status == 0
    assert out.splitlines()[0] == "6 runs: 6 finished already."


def test_the_command_ends_with_1_and_says_which_run_failed(capsys, store, tmp_path):
    file = tmp_path / "half.py"
    file.write_text("from tiny_sweep import failing as experiment")
    status, out, err = command(capsys, file, "--store", store.root, *QUICK)
    assert status == 1
    assert "3/3 finished" in out
    assert "1 of 3 runs failed" in err
    assert failing().runs[1].key in err
    assert "at most 256" in err
    assert "error.txt" in err


def test_runs_that_fail_alike_are_reported_together(capsys, store, tmp_path):
    file = tmp_path / "none.py"
    file.write_text(
        "import tiny_sweep\n"
        "from explicit_dropout.lab.experiment import Experiment\n"
        "def experiment():\n"
        "    runs = tuple(tiny_sweep.run(seed=seed, batch=300) for seed in range(7))\n"
        "    return Experiment('none', 'None works', runs, 'none+none')\n"
    )
    status, _, err = command(capsys, file, "--store", store.root, *QUICK)
    assert status == 1
    assert "7 of 7 runs failed" in err
    assert "and 2 more" in err
    assert err.count("at most 256") == 1


def test_a_dry_run_shows_rows_and_an_estimate_and_trains_nothing(capsys, store):
    sweep([experiment(seeds=1)], store, Local(0), EXECUTION, only=["none+none"])
    status, out, _ = command(capsys, FILE, "--store", store.root, "--dry-run", "--device=cpu")
    assert status == 0
    rows = {line.split()[0]: line.split()[1:4] for line in out.splitlines()[1:4]}
    assert rows == {
        "none+none": ["1", "0", "1"],
        "dropout+none": ["0", "0", "2"],
        "explicit_v+explicit": ["0", "0", "2"],
    }
    said = " ".join(out.split())
    assert "Would carry out 5 of 6 runs." in said
    assert re.search(r"One after another on this machine: about [\d.]+ (ms|s) of training\.", said)
    assert len(list(store.finished_runs())) == 1


def test_a_dry_run_of_slow_runs_times_few_steps_and_then_no_more(capsys, store, monkeypatch):
    steps, one = [], Step.__call__
    monkeypatch.setattr(Step, "__call__", lambda *given: steps.append(given) or one(*given))
    monkeypatch.setattr(estimate, "LONGEST", 0.0)
    monkeypatch.setattr(sweeping, "PATIENCE", 0)
    status, out, _ = command(capsys, FILE, "--store", store.root, "--dry-run", "--device=cpu")
    assert status == 0
    assert len(steps) == 1
    rows = {line.split()[0]: line.split()[-1] for line in out.splitlines()[1:4]}
    assert rows.pop("none+none") != "unknown"
    assert set(rows.values()) == {"unknown"}
    said = " ".join(out.split())
    assert "without 4 runs of unknown length" in said
    assert "no estimate: steps take so long here" in said


def test_a_dry_run_without_the_data_says_that_the_time_is_unknown_and_why(capsys, store, tmp_path):
    file = tmp_path / "cifar.py"
    file.write_text(
        "from explicit_dropout.lab.config import Data, Run\n"
        "from explicit_dropout.lab.experiment import Experiment\n"
        "def experiment():\n"
        "    return Experiment('cifar', 'CIFAR', (Run(Data('cifar10')),), 'none+none')\n"
    )
    status, out, _ = command(capsys, file, "--store", store.root, "--dry-run", "--data-root", tmp_path)
    assert status == 0
    assert "unknown" in out
    assert "no estimate" in out


BAD = {
    ("nowhere.py",): "nowhere.py, which is not there",
    (FILE, "--only", "noen+none"): "the closest is 'none+none'",
    (FILE, "--seeds", "x"): "whole numbers and ranges",
    (FILE, "--seeds", "3-1"): "ranges that go up",
    (FILE, "--seeds", ","): "whole numbers and ranges",
    (FILE, "--seeds", "9"): "`seeds` must be among 0, 1. Got 9",
    (FILE, "--engine", "cloud"): "invalid choice",
    (FILE, "--workers=-1"): "`workers` must be 0",
    (FILE, "--minutes=0"): "`minutes` must be above 0",
    (FILE, "--minutes=nan"): "`minutes` must be above 0",
    (FILE, "--minutes=inf"): "`minutes` must be above 0 and at most",
    (FILE, "--address", "auto"): "with the engine ray only",
    (FILE, "--slurm", "partition"): "key=value,key=value",
    (FILE, "--device", "abacus"): "auto, cpu, cuda or cuda:N",
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(map(str, arguments[-2:])))
def test_a_sweep_that_makes_no_sense_ends_with_2_and_says_why(capsys, store, arguments):
    status, out, err = command(capsys, *arguments, "--store", store.root)
    assert (status, out) == (2, "")
    assert BAD[arguments] in err
    assert not store.root.exists()


def test_a_store_of_another_format_ends_with_2_and_names_the_folder(capsys, store):
    tiny = experiment().runs[0]
    with store.folder(tiny).lock() as folder:
        folder.write_config()
    config = folder.path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"format": 99}))
    status, _, err = command(capsys, FILE, "--store", store.root, *QUICK)
    assert status == 2
    assert "has format 99" in err


def test_a_store_that_is_a_file_is_refused_once(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/inside"):
        status, out, err = command(capsys, FILE, "--store", tmp_path / place, *QUICK)
        assert (status, out) == (2, "")
        assert err.count("is a file, where the store") == 1


def test_a_sweep_ends_its_work_when_nobody_reads_along_any_more(store):
    start = [sys.executable, "-m", "explicit_dropout", "sweep", FILE, "--store", store.root, *QUICK]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "6 runs: 6 new.\n"
        process.stdout.close()  # as `| head -1` does
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert len(list(store.finished_runs())) == 6


def test_rows_keep_their_names_in_thirty_columns(capsys, store, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    status, out, _ = command(capsys, FILE, "--store", store.root, "--dry-run", "--device=cpu")
    assert status == 0
    assert all(len(line.rstrip()) <= 30 for line in out.splitlines())
    assert [line.split()[0] for line in out.splitlines()[:3]] == ["row", "none+none", "dropout+none"]
    assert "explicit_v+explic" in out


def test_help_teaches_by_example(capsys):
    status, out, _ = command(capsys, "--help")
    assert status == 0
    assert "explicit-dropout sweep experiments/digits.py --dry-run" in out
    for option in (
        "--engine",
        "--store",
        "--only",
        "--seeds",
        "--workers",
        "--slurm",
        "--data-root",
        "--deterministic",
    ):
        assert option in out


def test_a_terminal_shows_rows_runs_and_the_time_left(store):
    made = experiment()
    screen = Console(file=StringIO(), force_terminal=True, width=80, color_system=None)
    display = Display(plan(made.runs, store), store, screen)
    first, second = made.runs[0], made.runs[2]
    display.on_event(Event("started", first))
    display.on_event(Event("started", second))
    with store.folder(first).lock() as folder:
        folder.append_metrics({"epoch": 1})
    screen.print(display._render())
    display.on_event(Event("finished", second))
    display.on_event(Event("failed", first, "it broke"))
    screen.print(display._render())
    shown = screen.file.getvalue()
    assert re.search(r"0/6 runs, .* so far, about .* left", shown)
    assert re.search(r"none\+none, learning rate 0.01, seed 0 +epoch 1/4", shown)
    assert re.search(r"dropout\+none +1/2", shown)
    assert re.search(r"none\+none +0/2 +1 failed", shown)
    assert display.done == 1
    assert all(len(line) <= 80 for line in shown.splitlines())


# ---------------------------------------------------------------------------------------------- together


TOGETHER = """
import os, time
from pathlib import Path
from tiny_sweep import experiment as tiny

def experiment():
    here = Path(__file__).parent
    (here / f"{os.getpid()}.ready").touch()
    while len(list(here.glob("*.ready"))) < 2:
        time.sleep(0.01)
    return tiny(epochs=20)
"""


def test_two_sweeps_of_one_store_share_the_work_and_do_no_run_twice(tmp_path):
    """Two commands that begin at the same moment: each run is finished by exactly one of them."""
    file, store = tmp_path / "together.py", Store(tmp_path / "shared")
    file.write_text(TOGETHER)
    start = [sys.executable, "-m", "explicit_dropout", "sweep", file, "--store", store.root, *QUICK]
    paths = os.environ | {"PYTHONPATH": str(FILE.parent)}
    both = [
        subprocess.Popen(start, env=paths, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    printed = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], printed
    done = [set(re.findall(r"\d/\d finished (.*)", out)) for out, _ in printed]
    assert all(done), "one of them did all the work"
    assert not done[0] & done[1]
    assert len(done[0] | done[1]) == 6
    alone = Store(tmp_path / "alone")
    sweep([experiment(epochs=20)], alone, Local(0), EXECUTION)
    assert results(store) == results(alone)


def test_a_run_that_another_process_holds_is_waited_for_and_taken_over_if_it_is_dropped(store):
    held = experiment(seeds=1).runs[0]
    script = (
        "import sys, time\n"
        "from tiny_sweep import experiment\n"
        "from explicit_dropout.lab.store import Store\n"
        "with Store(sys.argv[1]).folder(experiment(seeds=1).runs[0]).lock():\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    start = [sys.executable, "-c", script, store.root]
    with subprocess.Popen(start, stdout=subprocess.PIPE, text=True, cwd=FILE.parent) as holder:
        assert holder.stdout.readline() == "held\n"
        events = []

        def follow(event):
            events.append((event.kind, event.run.key))
            if event.kind == "busy":
                holder.kill()  # the others are done; now it dies without a result

        result = sweep([experiment(seeds=1)], store, Local(0), EXECUTION, on_event=follow)
        holder.wait()
    assert result.finished == 3
    assert ("busy", held.key) in events
    assert events[-1] == ("finished", held.key)


def test_data_that_are_not_there_fail_each_run_with_the_reason(store, tmp_path):
    missing = replace(run(), data=Data("cifar10"))
    made = Experiment("cifar", "CIFAR", (missing,), missing.row)
    result = sweep([made], store, Local(0), replace(EXECUTION, data_root=str(tmp_path)))
    assert "cifar" in result.failed[missing.key].lower()
