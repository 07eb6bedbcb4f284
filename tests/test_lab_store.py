"""The store: what is written is whole, what is found is checked, and a folder has one owner at a time."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from explicit_dropout.errors import StoreBusyError, StoreError
from explicit_dropout.lab.config import Run, Training, Treatment
from explicit_dropout.lab.store import Store
from small_disk import on_small_disk

RUN = Run()
OTHER = Run(seed=1)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


def finished(store, run, accuracy=0.5):
    folder = store.folder(run)
    with folder.lock():
        folder.write_config()
        folder.write_environment({"torch": torch.__version__})
        folder.append_metrics({"epoch": 1})
        folder.finish({"row": run.row, "test": {"accuracy": accuracy}})
    return folder


def begun(store, run, *, epochs, checkpoint):
    folder = store.folder(run)
    with folder.lock():
        folder.write_config()
        for epoch in range(1, epochs + 1):
            folder.append_metrics({"epoch": epoch, "train_loss": 1 / epoch})
            if epoch == checkpoint:
                folder.save_checkpoint({"epoch": epoch, "model": {"weight": torch.full((3,), float(epoch))}})
    return folder


# ---------------------------------------------------------------------------------------------- a run's life


def test_a_run_is_new_then_running_then_resumable_then_finished(store):
    folder = store.folder(RUN)
    assert store.status([RUN]) == {RUN.key: "new"}
    with folder.lock():
        folder.write_config()
        assert store.status([RUN]) == {RUN.key: "running"}
        folder.append_metrics({"epoch": 1})
        folder.save_checkpoint({"epoch": 1})
    assert store.status([RUN, OTHER]) == {RUN.key: "resumable", OTHER.key: "new"}
    with folder.lock():
        folder.write_error("it broke")
    assert store.status([RUN]) == {RUN.key: "failed"}
    with folder.lock():
        folder.finish({"test": {"accuracy": 0.5}})
    assert store.status([RUN]) == {RUN.key: "finished"}
    assert folder.finished
    assert not (folder.path / "checkpoint.pt").exists()
    assert not (folder.path / "error.txt").exists()


def test_a_finished_run_keeps_its_checkpoint_if_that_is_wanted(store):
    folder = begun(store, RUN, epochs=1, checkpoint=1)
    folder.finish({}, keep_checkpoint=True)
    assert folder.load_checkpoint()["epoch"] == 1


def test_looking_at_a_store_that_is_not_there_makes_nothing(store):
    assert list(store.finished_runs()) == []
    assert store.status([RUN]) == {RUN.key: "new"}
    assert not store.root.exists()


def test_configuration_and_summary_come_back_as_they_were(store):
    run = replace(RUN, treatment=Treatment("explicit_v", strength=0.1), training=Training(epochs=2))
    finished(store, run, 0.75)
    (found, summary), *rest = store.finished_runs()
    assert rest == []
    assert found == run
    assert summary["test"] == {"accuracy": 0.75}
    assert (summary["format"], summary["key"]) == (1, run.key)
    assert store.folder(run).environment() == {"torch": torch.__version__}


def test_a_folder_begun_by_another_version_keeps_that_version(store):
    folder = begun(store, RUN, epochs=1, checkpoint=1)
    path = folder.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": "0.0.1"}))
    folder.write_config()
    assert json.loads(path.read_text())["version"] == "0.0.1"


def test_stores_merge_by_copying_folders(tmp_path):
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    finished(here, RUN, 0.5)
    finished(there, OTHER, 0.25)
    begun(there, Run(seed=2), epochs=2, checkpoint=2)
    shutil.copytree(there.root / "runs", here.root / "runs", dirs_exist_ok=True)
    assert {run.seed: summary["test"]["accuracy"] for run, summary in here.finished_runs()} == {0: 0.5, 1: 0.25}
    with here.folder(Run(seed=2)).lock() as folder:  # a lock file that came along holds nobody
        assert folder.load_checkpoint()["epoch"] == 2


# ---------------------------------------------------------------------------------------------- epochs


def test_metrics_after_the_checkpoint_are_dropped_on_resuming(store):
    folder = begun(store, RUN, epochs=5, checkpoint=3)
    assert len(folder.metrics()) == 5
    state = folder.load_checkpoint()
    assert state["epoch"] == 3
    assert torch.equal(state["model"]["weight"], torch.full((3,), 3.0))
    assert [line["epoch"] for line in folder.metrics()] == [1, 2, 3]


def test_metrics_without_a_checkpoint_are_dropped_and_the_run_starts_anew(store):
    folder = begun(store, RUN, epochs=2, checkpoint=None)
    assert folder.load_checkpoint() is None
    assert folder.metrics() == []


@pytest.mark.parametrize("torn", ['{"epoch": 4, "tr', "{", '{"epoch": 4}'])
def test_a_torn_last_line_does_not_count_and_is_gone_after_resuming(store, torn):
    folder = begun(store, RUN, epochs=3, checkpoint=3)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write(torn)  # and then the power failed
    assert [line["epoch"] for line in folder.metrics()] == [1, 2, 3]
    assert folder.load_checkpoint()["epoch"] == 3
    folder.append_metrics({"epoch": 4})
    assert [line["epoch"] for line in folder.metrics()] == [1, 2, 3, 4]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(store):
    folder = begun(store, RUN, epochs=3, checkpoint=None)
    path = folder.path / "metrics.jsonl"
    path.write_text(path.read_text().replace('"epoch": 2', '"epo'))
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 2"):
        folder.metrics()


def test_metrics_that_cannot_be_read_are_an_error_of_the_store(store):
    folder = begun(store, RUN, epochs=3, checkpoint=None)
    (folder.path / "metrics.jsonl").unlink()
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(StoreError, match=r"metrics\.jsonl cannot be read"):
        folder.metrics()


@pytest.mark.parametrize("damage", ["cut", "empty", "flipped", "pickle", "no epoch", "ahead of the metrics"])
def test_a_checkpoint_that_cannot_be_used_is_set_aside_and_the_run_starts_anew_and_says_so(store, damage):
    folder = begun(store, RUN, epochs=2, checkpoint=2)
    path = folder.path / "checkpoint.pt"
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(bytes(255 - byte for byte in content))
    elif damage == "pickle":
        torch.save({"epoch": 1, "code": subprocess.Popen}, path)  # would run code if it were unpickled freely
    elif damage == "no epoch":
        torch.save({"model": {}}, path)
    else:
        torch.save({"epoch": 3}, path)
    damaged = path.read_bytes()
    with pytest.warns(RuntimeWarning, match=r"kept as checkpoint\.pt\.corrupt; the run starts from scratch"):
        assert folder.load_checkpoint() is None
    assert (folder.path / "checkpoint.pt.corrupt").read_bytes() == damaged
    assert not path.exists()
    assert folder.metrics() == []


# ---------------------------------------------------------------------------------------------- what is refused


def change(folder, name, **values):
    path = folder.path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_another_format_is_refused_and_the_version_that_wrote_it_is_named(store):
    change(finished(store, RUN), "config.json", format=2, version="9.0")
    for look in (lambda: store.folder(RUN), lambda: list(store.finished_runs()), lambda: store.status([RUN])):
        with pytest.raises(StoreError, match=rf"{RUN.key}.config\.json has format 2.*version that wrote it \(9\.0\)"):
            look()


def test_a_folder_whose_content_is_not_what_its_name_says_is_refused(store):
    folder = finished(store, RUN)
    folder.path.rename(folder.path.with_name(OTHER.key))
    with pytest.raises(StoreError, match=rf"{OTHER.key} holds the run {RUN.key}.*Rename it"):
        store.folder(OTHER)
    with pytest.raises(StoreError, match="named by their content"):
        list(store.finished_runs())


def test_settings_of_a_future_version_are_refused_by_name(store):
    folder = finished(store, RUN)
    change(folder, "config.json", run=RUN.to_json() | {"quantum": True}, version="9.0")
    with pytest.raises(StoreError, match=r"does not know: `run\.quantum`.*written by version 9\.0"):
        store.folder(RUN)


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_a_summary_that_is_no_json_object_is_an_error_and_no_result(store, content):
    folder = finished(store, RUN)
    (folder.path / "summary.json").write_text(content)
    with pytest.raises(StoreError, match=r"summary\.json is no.*Move .* away"):
        list(store.finished_runs())


def test_the_summary_of_another_run_is_refused(store):
    folder = finished(store, RUN)
    shutil.copy(finished(store, OTHER).path / "summary.json", folder.path)
    with pytest.raises(StoreError, match="summary of another run"):
        store.status([RUN])


def test_a_summary_without_its_configuration_is_refused(store):
    folder = finished(store, RUN)
    (folder.path / "config.json").unlink()
    with pytest.raises(StoreError, match=r"has a summary\.json but no config\.json"):
        list(store.finished_runs())


def test_all_folders_that_cannot_be_used_are_named_at_once(store):
    for run in (RUN, OTHER):
        change(finished(store, run), "config.json", format=2)
    with pytest.raises(StoreError) as caught:
        store.status([RUN, OTHER, Run(seed=2)])
    assert RUN.key in str(caught.value)
    assert OTHER.key in str(caught.value)


# ---------------------------------------------------------------------------------------------- one owner


def test_a_folder_has_one_owner_at_a_time_even_within_a_process(store):
    with store.folder(RUN).lock(), pytest.raises(StoreBusyError, match=RUN.key), store.folder(RUN).lock():
        pass
    with store.folder(RUN).lock():
        pass


def test_the_owner_may_lock_again(store):
    folder = store.folder(RUN)
    with folder.lock():
        with folder.lock():
            pass
        assert store.status([RUN]) == {RUN.key: "running"}
    assert store.status([RUN]) == {RUN.key: "new"}


HOLDER = """
import sys, time
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.store import Store
folder = Store(sys.argv[1]).folder(Run())
with folder.lock():
    (folder.path / ".summary.json.123.tmp").write_text("half a summ")
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_owner_leaves_neither_lock_nor_stray_files(store):
    with subprocess.Popen([sys.executable, "-c", HOLDER, store.root], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        folder = store.folder(RUN)
        with pytest.raises(StoreBusyError, match="in use by another process"), folder.lock():
            pass
        assert folder.status == "running"
        holder.kill()
        holder.wait()
    assert not folder.finished
    assert list(store.finished_runs()) == []
    with folder.lock():
        assert [path.name for path in folder.path.iterdir()] == ["lock"]


# ---------------------------------------------------------------------------------------------- no room


def test_a_write_that_does_not_fit_is_an_error_and_leaves_the_old_file(store):
    """With a real limit of the operating system on the size of files."""
    folder = begun(store, RUN, epochs=2, checkpoint=2)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before["checkpoint.pt"]), hard))
    try:
        with pytest.raises(StoreError, match=r"checkpoint\.pt could not be written: File too large.*intact"):
            folder.save_checkpoint({"epoch": 2, "model": torch.zeros(100_000)})
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before["metrics.jsonl"]) + 10, hard))
        with pytest.raises(StoreError, match=r"metrics\.jsonl could not be written"):
            folder.append_metrics({"epoch": 3, "train_loss": 1 / 3})
        with pytest.raises(StoreError, match=r"summary\.json could not be written"):
            folder.finish({"test": {"accuracy": 0.5}, "notes": "x" * 1000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    assert folder.load_checkpoint()["epoch"] == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_a_clear_error(store):
    store.root.mkdir()
    store.root.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"), store.folder(RUN).lock():
        pass


def test_a_file_where_the_store_should_be_is_a_clear_error(tmp_path):
    (tmp_path / "results").write_text("")
    with pytest.raises(StoreError, match=r"results.*cannot be read: Not a directory"):
        Store(tmp_path / "results").folder(RUN)


FULL = """
import sys, torch
from pathlib import Path
from explicit_dropout.errors import StoreError
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.store import Store

folder = Store(sys.argv[1]).folder(Run())
with folder.lock():
    folder.write_config()
    folder.append_metrics({"epoch": 1})
    folder.save_checkpoint({"epoch": 1, "model": torch.zeros(100)})
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    ballast = Path(sys.argv[1]) / "ballast"
    try:
        with ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(512))
    except OSError:
        pass
    for write in (
        lambda: folder.save_checkpoint({"epoch": 1, "model": torch.zeros(5000)}),
        lambda: folder.append_metrics({"epoch": 2, "words": "x" * 5000}),
        lambda: folder.finish({"test": {"accuracy": 0.5}}),
        lambda: folder.write_error("no room"),
    ):
        try:
            write()
        except StoreError as error:
            assert "No space left on device" in str(error), error
            assert "Free some space and start again" in str(error), error
        else:
            raise SystemExit("it fitted")
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before
    ballast.unlink()
    assert folder.load_checkpoint()["epoch"] == 1
    folder.finish({"test": {"accuracy": 0.5}})
assert folder.finished
print("survived")
"""


def test_a_full_disk_is_an_error_and_leaves_every_old_file(tmp_path):
    """On a real file system of 64 KiB."""
    ran = on_small_disk(tmp_path, "64k", [sys.executable, "-c", FULL, str(tmp_path)])
    assert ran.stdout == "survived\n", ran.stderr


def test_a_checkpoint_that_cannot_be_read_just_now_is_not_given_up(tmp_path, monkeypatch):
    folder = Store(tmp_path).folder(Run(training=Training(epochs=9)))

    def stale(*_, **__):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    with folder.lock():
        folder.write_config()
        for epoch in (1, 2):
            folder.append_metrics({"epoch": epoch})
        folder.save_checkpoint({"epoch": 2})
        with monkeypatch.context() as patched:
            patched.setattr(torch, "load", stale)
            with pytest.raises(OSError, match="Stale"):
                folder.load_checkpoint()
        assert folder.load_checkpoint() == {"epoch": 2}
        assert len(folder.metrics()) == 2
