"""`explicit-dropout data`, as it prints and as it ends, in a terminal of 80 columns."""

import json
import os

import pytest
import tyro

from explicit_dropout.cli.datasets import data
from explicit_dropout.errors import DataError, InputError, MissingDataError
from explicit_dropout.lab.data import SOURCES
from test_lab_data import write_sequences
from test_lab_data_files import cifar, placed


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("EXPLICIT_DROPOUT_DATA", raising=False)


def run(capsys, *arguments):
    """(exit status, stdout, stderr); no line may be longer than the terminal is wide."""
    try:
        status = tyro.cli(data, args=[str(a) for a in arguments], config=(tyro.conf.FlagCreatePairsOff,), prog="x data")
    except SystemExit as left:
        status = int(left.code or 0)
    out, err = capsys.readouterr()
    if "--json" not in arguments:
        assert not [line for line in (out + err).splitlines() if len(line.rstrip()) > 80 and " " in line.strip()]
    return status, out, err


def test_the_list_has_every_dataset_with_what_it_needs(capsys, tmp_path):
    write_sequences(tmp_path / "gtzan_yamnet.npz")
    status, out, _ = run(capsys, "--root", tmp_path)
    assert status == 0
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line.split()[0] in SOURCES}
    assert list(lines) == list(SOURCES)
    assert lines["digits"][1] == "yes"
    assert lines["gtzan_yamnet"][1] == "yes"
    assert lines["cifar10"][1] == "no"
    assert "cifar-10-binary.tar.gz" in out


def test_the_list_for_programs(capsys, tmp_path):
    status, out, _ = run(capsys, "--json", "--root", tmp_path)
    held = json.loads(out)
    assert status == 0
    assert [entry["name"] for entry in held["datasets"]] == list(SOURCES)
    assert {entry["name"]: entry["present"] for entry in held["datasets"]}["images"] is None


def test_one_dataset_is_described(capsys):
    status, out, _ = run(capsys, "digits")
    assert status == 0
    assert "1,007 train, 431 validate, 359 test" in out
    assert "1 × 8 × 8 (channels, height, width)" in out
    assert "the published content" in out
    _, out, _ = run(capsys, "digits", "--json", "--split", "3")
    held = json.loads(out)
    assert held["examples"] == {"train": 1007, "validation": 431, "test": 359}
    assert len(held["fingerprint"]) == 64
    assert held["official"] is True


def test_features_are_described_where_they_are(capsys, tmp_path):
    write_sequences(tmp_path / "mine.npz")
    status, out, _ = run(capsys, "features", "--root", tmp_path, "--folder", "mine.npz")
    assert status == 0
    assert "5 × 3 (tokens, features)" in out
    assert "no published fingerprint" in out


def test_a_check_fails_on_content_that_is_not_the_published_one(capsys, tmp_path):
    placed(tmp_path, cifar.CIFAR10, 0, "official")
    assert run(capsys, "cifar10", "--root", tmp_path)[0] == 0
    status, out, _ = run(capsys, "cifar10", "--check", "--root", tmp_path)
    assert status == 1
    assert "not the published content" in out
    assert "where the official files have" in " ".join(out.split())


def test_checking_all_goes_on_after_a_damaged_one(capsys, tmp_path):
    (tmp_path / "gtzan_yamnet.npz").write_bytes(os.urandom(50))
    status, out, err = run(capsys, "--check", "--root", tmp_path)
    assert status == 1
    assert "gtzan_yamnet.npz is no readable .npz file" in " ".join(err.split())
    assert "not as published: gtzan_yamnet" in out
    (tmp_path / "gtzan_yamnet.npz").unlink()
    status, out, _ = run(capsys, "--check", "--root", tmp_path)
    assert status == 0
    assert "1 of 10 datasets are here; nothing wrong" in out
    status, out, _ = run(capsys, "--check", "--json", "--root", tmp_path)
    assert [entry["name"] for entry in json.loads(out)] == ["digits"]


def test_what_cannot_be_done_is_an_error_with_the_way_out(capsys, tmp_path):
    with pytest.raises(MissingDataError, match="explicit-dropout data cifar100 --download"):
        run(capsys, "cifar100", "--root", tmp_path)
    with pytest.raises(MissingDataError, match="thumos14_i3d cannot be downloaded from here"):
        run(capsys, "thumos14_i3d", "--download", "--root", tmp_path)
    with pytest.raises(InputError, match="together with the name"):
        run(capsys, "--download")
    with pytest.raises(InputError, match="one of digits, cifar10"):
        run(capsys, "imagenet")
    placed(tmp_path, cifar.CIFAR10, 0, "archive")
    with pytest.raises(DataError, match="the official one is"):
        run(capsys, "cifar10", "--download", "--root", tmp_path)


def test_the_root_comes_from_the_environment(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("EXPLICIT_DROPOUT_DATA", str(tmp_path))
    write_sequences(tmp_path / "gtzan_yamnet.npz")
    assert run(capsys, "gtzan_yamnet")[0] == 0


def test_help_shows_examples(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert "explicit-dropout data cifar10 --download" in out


def test_a_root_that_is_not_there_is_refused_where_it_is_named_and_told_where_it_is_the_usual_one(
    capsys, tmp_path, monkeypatch
):
    for arguments in ([], ["--check"], ["--json"]):
        with pytest.raises(InputError, match=r"`--root` must be a folder that exists\. Got .*nowhere"):
            run(capsys, "--root", tmp_path / "nowhere", *arguments)
    monkeypatch.chdir(tmp_path)
    status, out, _ = run(capsys)
    assert status == 0
    assert "Data root data: there is no such folder, so only what is built in is here" in " ".join(out.split())
    status, out, _ = run(capsys, "--check")
    assert status == 0
    assert "1 of 10 datasets are here (data root data: there is no such folder" in " ".join(out.split())
    (tmp_path / "data").mkdir()
    assert "no such folder" not in run(capsys)[1]


@pytest.mark.parametrize("option", [("--folder", "x"), ("--size", "8"), ("--split", "1")])
def test_what_is_said_of_no_dataset_is_refused(capsys, option):
    with pytest.raises(InputError, match="given together with the name of a dataset"):
        run(capsys, *option)
