"""Engines on real clusters, if small ones: two Ray nodes of which a worker is killed, jobs that are preempted."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from explicit_dropout.errors import InputError
from explicit_dropout.lab.engines import Options, choose
from explicit_dropout.lab.engines.local import Local, gpus_to_deal, threads_of
from explicit_dropout.lab.experiment import Experiment, load_experiments
from explicit_dropout.lab.report import build
from explicit_dropout.lab.store import Store
from explicit_dropout.lab.sweep import sweep
from tiny_sweep import EXECUTION, TREATMENTS, experiment, failing, results, run


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the tiny experiment comes to in this process."""
    store = Store(tmp_path_factory.mktemp("reference"))
    assert not sweep([experiment()], store, Local(0), EXECUTION).failed
    return results(store)


def carry_out(engine, store, made=None):
    events = []
    result = sweep([made or experiment()], store, engine, EXECUTION, on_event=events.append)
    return result, events


# ---------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", Options(), "`engine` must be local, vectorised, ray or submitit"),
        ("local", Options(workers=-1), "`workers` must be 0"),
        ("ray", Options(workers=0), "`workers` must be 1 or more"),
        ("local", Options(address="auto"), "`address` must be given with the engine ray only"),
        ("ray", Options(slurm={"partition": "gpu"}), "`slurm` must be given with the engine submitit only"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(name, options, message):
    with pytest.raises(InputError, match=message):
        choose(name, options)


def test_every_engine_can_be_chosen_by_name():
    for name in ("local", "vectorised", "ray", "submitit"):
        assert type(choose(name, Options(workers=1))).__name__.lower() == name


def test_an_engine_whose_library_is_missing_says_what_to_install(monkeypatch, tmp_path):
    for name in ("ray", "submitit"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"explicit_dropout.lab.engines.{name}", raising=False)
        with pytest.raises(InputError, match=rf"pip install 'explicit-dropout\[{name}\]'"):
            choose(name)([run()], Store(tmp_path), EXECUTION, print)


# ---------------------------------------------------------------------------------------------- local


def test_local_workers_come_to_the_same_bits_as_one_process(tmp_path, reference):
    result, events = carry_out(Local(2), Store(tmp_path))
    assert not result.failed
    assert result.finished == 6
    assert results(Store(tmp_path)) == reference
    kinds = [event.kind for event in events]
    assert (kinds.count("started"), kinds.count("finished"), len(kinds)) == (6, 6, 12)


def test_gpus_are_dealt_out_one_to_a_worker_unless_one_was_chosen():
    assert gpus_to_deal("auto", 2, None) == ["0", "1"]
    assert gpus_to_deal("cuda", 2, "4,GPU-5af") == ["4", "GPU-5af"]
    assert gpus_to_deal("auto", 0, "") == []
    assert gpus_to_deal("cuda:1", 2, None) == gpus_to_deal("cpu", 2, None) == []


# ---------------------------------------------------------------------------------------------- ray


@pytest.fixture(scope="module")
def two_nodes():
    """A Ray cluster of two nodes with a core each, as processes of this machine."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def strike_midway(store, struck, words, blow):
    """Once some run has a checkpoint, send a signal to a process below this one that has these words in its name."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True) if list(store.root.rglob("checkpoint.pt")) else ():
            with suppress(psutil.Error):
                if words in " ".join(process.cmdline()):
                    process.send_signal(blow)
                    struck.append(process.pid)
                    return
        time.sleep(0.01)


def test_a_ray_cluster_survives_the_death_of_a_worker(tmp_path, two_nodes, reference):
    store, killed = Store(tmp_path), []
    long = run(TREATMENTS[2], seed=7, epochs=200)
    both = Experiment("tiny", "Tiny", (long, *experiment().runs), baseline="none+none")
    hunter = threading.Thread(target=strike_midway, args=(store, killed, "ray::explicit", signal.SIGKILL))
    hunter.start()
    result, events = carry_out(choose("ray", Options(address=two_nodes)), store, both)
    hunter.join()
    assert killed
    assert not result.failed
    assert sum(event.kind == "finished" for event in events) == 7
    found = results(store)
    assert len(store.folder(long).metrics()) == 200
    assert {key: found[key] for key in reference} == reference


def test_a_run_that_fails_on_ray_does_not_stop_the_others(tmp_path, two_nodes):
    store = Store(tmp_path)
    result, _ = carry_out(choose("ray", Options(workers=1, address=two_nodes)), store, failing())
    check_the_failure(result, store)


def test_an_address_where_no_ray_answers_is_a_clear_error(tmp_path):
    with pytest.raises(InputError, match=r"`address` must be that of a Ray cluster which runs"):
        carry_out(choose("ray", Options(address="127.0.0.1:1")), Store(tmp_path))


# ---------------------------------------------------------------------------------------------- submitit


def test_a_job_of_submitit_that_is_preempted_goes_on_and_one_that_fails_stops_no_other(tmp_path):
    """With submitit's local executor, whose jobs are processes with the same signals and requeueing as on Slurm."""
    store, preempted = Store(tmp_path), []
    long = run(TREATMENTS[2], seed=7, epochs=150)
    fails = failing().runs[1]
    made = Experiment("two", "One is preempted, one fails", (long, fails), baseline=long.row)
    hunter = threading.Thread(target=strike_midway, args=(store, preempted, "submitit.core._submit", signal.SIGUSR2))
    hunter.start()
    slurm = {"cluster": "local", "timeout_min": "5", "partition": "gpu"}
    result, events = carry_out(choose("submitit", Options(workers=2, slurm=slurm)), store, made)
    hunter.join()
    assert preempted
    check_the_failure(result, store, finished=1)
    assert sum(event.kind == "started" for event in events) == 2
    assert [line["epoch"] for line in store.folder(long).metrics()] == list(range(1, 151))
    log = "".join(path.read_text() for path in (tmp_path / "submitit").glob("*_log.*"))
    assert "Requeued job" in log


SLURM = {
    "sbatch": """
script="${@: -1}"
cp "$script" "$FAKE_SLURM/submitted.sh"
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
export SLURM_ARRAY_JOB_ID=77 SLURM_NTASKS=1 SLURM_JOB_NUM_NODES=1 SLURM_NODEID=0 SLURM_PROCID=0 SLURM_LOCALID=0
export SLURM_JOB_NODELIST=here
for task in $(seq 0 $last); do
    SLURM_JOB_ID=$((77 + task)) SLURM_ARRAY_TASK_ID=$task bash "$FAKE_SLURM/submitted.sh" >/dev/null 2>&1 &
done
echo "Submitted batch job 77"
""",
    "srun": 'while [[ "$1" == -* ]]; do case "$1" in --output|--error) shift 2;; *) shift;; esac; done; exec "$@"',
    "sacct": "printf 'JobID|State|NodeList\\n77_0|RUNNING|here\\n77_1|RUNNING|here\\n'",
    "scontrol": "echo here",
}
"""The commands of Slurm that submitit calls, as scripts that start every job of the array on this machine at once."""


def test_slurm_gets_one_array_of_jobs_with_the_parameters_given(tmp_path, monkeypatch, reference):
    commands, store = tmp_path / "bin", Store(tmp_path / "results")
    commands.mkdir()
    for name, text in SLURM.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}\n")
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(tmp_path))
    slurm = {"partition": "gpu", "timeout_min": "60", "gpus_per_node": "1", "account": "lab"}
    two = replace(experiment(), runs=experiment().runs[:2])
    result, _ = carry_out(choose("submitit", Options(workers=1, slurm=slurm)), store, two)
    assert not result.failed
    assert result.finished == 2
    assert results(store) == {run.key: reference[run.key] for run in two.runs}
    asked = (tmp_path / "submitted.sh").read_text()
    for line in (
        "array=0-1%1",
        "partition=gpu",
        "time=60",
        "gpus-per-node=1",
        "account=lab",
        "job-name=explicit-dropout",
    ):
        assert f"#SBATCH --{line}\n" in asked


def test_where_there_is_no_slurm_nothing_runs_on_this_machine_instead(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=r"where Slurm is; cluster=local does without it\. Got no srun"):
        carry_out(choose("submitit", Options(slurm={"partition": "gpu"})), Store(tmp_path / "results"))


def test_workers_share_the_cores_and_heed_the_limit_of_threads(monkeypatch):
    monkeypatch.setattr("explicit_dropout.lab.engines.local.cores", lambda: 8)
    for limit, expected in ((None, 4), ("1", 1), ("3", 3), ("16", 4), ("many", 4), ("0", 4)):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if limit is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", limit)
        assert threads_of(2) == expected
    assert threads_of(20) == 1


@pytest.mark.parametrize("slurm", [{"cluster": "nonsense"}, {"cluster": "local", "timeout_min": "soon"}])
def test_parameters_that_submitit_does_not_know_are_refused(tmp_path, slurm):
    with pytest.raises(InputError, match="`slurm` must be parameters that submitit knows"):
        carry_out(choose("submitit", Options(slurm=slurm)), Store(tmp_path))


def check_the_failure(result, store, finished=2):
    (key, message), *others = result.failed.items()
    assert others == []
    assert "`training.batch` must be at most" in message
    assert result.finished == finished
    assert "steps_per_epoch" in (store.root / "runs" / key / "error.txt").read_text()
    assert store.status([failing().runs[1]])[key] == "failed"


# ---------------------------------------------------------------------------------------------- all of them


def test_one_experiment_file_gives_the_same_table_under_every_engine(tmp_path, two_nodes):
    (made,) = load_experiments(Path(__file__).with_name("tiny_sweep.py"))
    engines = {
        "local": Local(2),
        "ray": choose("ray", Options(address=two_nodes)),
        "submitit": choose("submitit", Options(workers=2, slurm={"cluster": "local"})),
        "vectorised": choose("vectorised", Options(workers=6)),
    }
    rows = {}
    for name, engine in engines.items():
        store = Store(tmp_path / name)
        assert not sweep([made], store, engine, EXECUTION).failed
        rows[name] = build(store, [(made, None)]).parts[0].analysis.rows
    for name, found in rows.items():
        assert [row.name for row in found] == list(made.rows)
        for row, reference in zip(found, rows["local"], strict=True):
            ours, theirs = row.chosen.test.mean, reference.chosen.test.mean
            few = 1 / 359 if name == "vectorised" else 0.0  # rounding may turn a test image over
            assert ours == pytest.approx(theirs, abs=few)
            assert row.chosen.test.n == 2
