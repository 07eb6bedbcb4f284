"""Packed runs: one file instead of many folders, read as they were, and never lost on the way."""

import hashlib
import shutil
import zipfile

import pytest

from explicit_dropout.cli import main
from explicit_dropout.cli.training import read_config
from explicit_dropout.errors import InputError, StoreError
from explicit_dropout.lab import disk
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.engines import execute
from explicit_dropout.lab.report import build
from explicit_dropout.lab.report.serving import state_of
from explicit_dropout.lab.store import PackedRun, Store
from test_lab_store import begun, finished

RUNS = tuple(Run(seed=seed) for seed in range(4))


@pytest.fixture
def store(tmp_path):
    made = Store(tmp_path / "results")
    for run in RUNS[:3]:
        finished(made, run, 0.25 * run.seed)
    begun(made, RUNS[3], epochs=2, checkpoint=2)
    return made


def read(store):
    return {
        folder.run: (folder.finished, folder.metrics(), folder.environment(), folder.finished and folder.summary())
        for folder in store.folders()
    }


def test_a_packed_run_reads_as_its_folder_did(store):
    before, keys = read(store), store.keys()
    assert store.pack("mine", RUNS) == 3
    assert [entry.name for entry in (store.root / "runs").iterdir()] == [RUNS[3].key]
    assert read(Store(store.root)) == before
    assert store.keys() == keys
    assert [run.seed for run, _ in sorted(store.finished_runs(), key=lambda found: found[0].seed)] == [0, 1, 2]
    assert store.status(RUNS) == {run.key: "finished" for run in RUNS[:3]} | {RUNS[3].key: "resumable"}


def test_packing_twice_adds_what_is_new_and_keeps_what_is_there(store):
    store.pack("mine", RUNS[:2])
    assert store.pack("mine", RUNS[:2]) == 0
    assert store.pack("mine", RUNS) == 1
    assert {run.seed for run, _ in store.finished_runs()} == {0, 1, 2}


def test_the_same_runs_make_the_same_bytes_in_whatever_order_they_come(store, tmp_path):
    other = Store(tmp_path / "other")
    shutil.copytree(store.root, other.root)
    store.pack("mine", RUNS)
    for run in (RUNS[2], RUNS[0], RUNS[1]):
        other.pack("mine", [run])
    one, two = (hashlib.sha256((s.root / "mine.zip").read_bytes()).hexdigest() for s in (store, other))
    assert one == two


def test_an_unpacked_archive_is_folders_again(store):
    before = read(store)
    store.pack("mine", RUNS)
    with zipfile.ZipFile(store.root / "mine.zip") as archive:
        archive.extractall(store.root / "runs")
    (store.root / "mine.zip").unlink()
    assert read(store) == before
    assert not any(isinstance(folder, PackedRun) for folder in store.folders())


def test_a_sweep_skips_what_is_packed(store):
    store.pack("mine", RUNS)
    outcome = execute(RUNS[0].to_json(), str(store.root), {})
    assert outcome["kind"] == "skipped"
    assert not (store.root / "runs" / RUNS[0].key).exists()


def test_a_report_counts_packed_runs_and_a_served_one_notices_them(store):
    before = state_of(store.root)
    store.pack("mine", RUNS)
    assert state_of(store.root) != before
    part, *others = build(store).parts
    assert others == []
    assert [record.state for record in part.records].count("finished") == 3


def test_the_command_of_a_packed_run_finds_its_settings_in_the_archive(store):
    store.pack("mine", RUNS)
    (part,) = build(store).parts
    packed = next(record for record in part.records if record.run == RUNS[1])
    assert packed.place == f"mine.zip/{RUNS[1].key}"
    assert read_config(store.root / packed.place / "config.json") == RUNS[1]
    with pytest.raises(InputError, match=r"mine\.zip/nobody/config\.json: it is not there"):
        read_config(store.root / "mine.zip" / "nobody" / "config.json")


def test_a_packed_run_cannot_be_written_to(store):
    store.pack("mine", RUNS)
    folder = store.folder(RUNS[0])
    for write in (
        lambda: folder.append_metrics({"epoch": 2}),
        lambda: folder.write_environment({}),
        lambda: folder.finish({}),
        lambda: folder.load_checkpoint(),
    ):
        with pytest.raises(StoreError, match=rf"mine\.zip/{RUNS[0].key}.*is packed and finished\. Unpack it"):
            write()


def test_a_finished_folder_goes_before_a_packed_one_and_that_before_an_unfinished_one(store):
    shutil.copytree(store.root / "runs", store.root / "copy")
    store.pack("mine", RUNS)
    shutil.copytree(store.root / "copy" / RUNS[0].key, store.root / "runs" / RUNS[0].key)
    begun(Store(store.root / "elsewhere"), RUNS[1], epochs=1, checkpoint=1)
    shutil.copytree(store.root / "elsewhere" / "runs" / RUNS[1].key, store.root / "runs" / RUNS[1].key)
    packed = {folder.run: isinstance(folder, PackedRun) for folder in store.folders()}
    assert packed == {RUNS[0]: False, RUNS[1]: True, RUNS[2]: True, RUNS[3]: False}
    assert {run: isinstance(store.folder(run), PackedRun) for run in RUNS} == packed


def test_a_folder_with_a_checkpoint_stays_a_folder(store):
    folder = begun(store, Run(seed=9), epochs=1, checkpoint=1)
    folder.finish({}, keep_checkpoint=True)
    assert store.pack("mine", [folder.run]) == 0
    assert folder.load_checkpoint()["epoch"] == 1
    assert not (store.root / "mine.zip").exists()


def test_a_damaged_run_is_not_packed_nor_any_other_with_it(store):
    (store.root / "runs" / RUNS[1].key / "metrics.jsonl").write_text("no JSON\n")
    with pytest.raises(StoreError, match=r"metrics\.jsonl, line 1 is not JSON"):
        store.pack("mine", RUNS)
    assert all((store.root / "runs" / run.key / "summary.json").exists() for run in RUNS[:3])


def test_a_full_disk_loses_neither_folders_nor_the_archive_that_was_there(store, monkeypatch):
    store.pack("mine", RUNS[:1])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_write_all", full)
    with pytest.raises(StoreError, match=r"mine\.zip could not be written: No space left on device.*is intact"):
        store.pack("mine", RUNS)
    assert {run.seed for run, _ in store.finished_runs()} == {0, 1, 2}


def test_removing_folders_can_be_cut_short_and_nothing_is_missing(store, monkeypatch):
    before = read(store)
    unlink = type(store.root).unlink

    def dies(path, missing_ok=False):
        if path.name == "config.json":
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(type(store.root), "unlink", dies)
    with pytest.raises(KeyboardInterrupt):
        store.pack("mine", RUNS)
    monkeypatch.undo()
    assert read(store) == before
    assert store.pack("mine", RUNS) == 2  # of the third there is a half that does not count


@pytest.mark.parametrize("damage", ["cut short", "another file", "one byte"])
def test_a_damaged_archive_is_named(store, damage):
    store.pack("mine", RUNS)
    path = store.root / "mine.zip"
    whole = path.read_bytes()
    flipped = whole[:80] + bytes([whole[80] ^ 1]) + whole[81:]
    path.write_bytes({"cut short": whole[: len(whole) // 2], "another file": b"none", "one byte": flipped}[damage])
    with pytest.raises(StoreError, match=r"mine\.zip.*damaged"):
        read(store)


def test_files_of_others_in_the_store_are_no_archives(store):
    with zipfile.ZipFile(store.root / "photos.zip", "w") as archive:
        archive.writestr("holiday/beach.png", b"sand")
    assert {folder.run for folder in store.folders()} == set(RUNS)


def test_a_sweep_can_pack_what_is_finished_and_says_what_it_did(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "from explicit_dropout.lab.config import Run\n"
        "from explicit_dropout.lab.experiment import Experiment\n"
        "def experiment():\n"
        "    return Experiment('mine', 'Mine', tuple(Run(seed=s) for s in range(2)), baseline='none+none')\n"
    )
    store = Store(tmp_path / "results")
    for run in RUNS[:3]:
        finished(store, run)
    command = ["sweep", str(file), "--store", str(store.root), "--pack"]
    for told in ("2 runs packed into mine.zip.", "0 runs packed into mine.zip."):
        assert main(command) == 0
        assert capsys.readouterr().out.strip() == told
    assert [entry.name for entry in (store.root / "runs").iterdir()] == [RUNS[2].key]
    assert {run.seed for run, _ in store.finished_runs()} == {0, 1, 2}
