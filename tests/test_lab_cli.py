"""`train` and `demo` on the command line; `data`, `sweep` and `report` have files of their own."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tiny_sweep
from explicit_dropout.cli import BAD_INPUT, main
from explicit_dropout.cli.demo import carry_out
from explicit_dropout.lab.demonstration import experiment
from explicit_dropout.lab.store import Store

SMALL = [
    "--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.hidden", "16", "--model.patch", "4",
    "--training.epochs", "2", "--training.batch", "64", "--data.examples", "128", "--device", "cpu", "--threads", "1",
]  # fmt: skip
EXPLICIT = ["--treatment.attention", "explicit_v", "--treatment.feed-forward", "explicit"]


def folder_of(store: Path):
    (folder,) = Store(store).folders()
    return folder


def test_train_writes_a_run_and_says_how_it_went(tmp_path: Path, capsys) -> None:
    assert main(["train", *SMALL, *EXPLICIT, "--treatment.strength", "1e-2", "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    folder = folder_of(tmp_path)
    assert folder.run.row == "explicit_v+explicit"
    assert "explicit_v+explicit on digits, seed 0" in out
    score = re.search(r"test ([\d.]+) %", out)
    assert score is not None
    assert float(score[1]) == pytest.approx(100 * folder.summary()["test"]["accuracy"], abs=0.01)
    for word in ("loss", "penalty (value", "feed forward", "accuracy", "examples/s", "validation"):
        assert word in out


def test_train_again_only_shows_the_result(tmp_path: Path, capsys) -> None:
    for _ in range(2):
        assert main(["train", *SMALL, "--store", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    first, second = re.findall(r"test [\d.]+ %", out)
    assert first == second
    assert out.count("Finished already: shown from the store") == 1
    assert len(folder_of(tmp_path).metrics()) == 2


def test_the_same_command_twice_gives_the_same_bits(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        assert main(["train", *SMALL, "--deterministic", "--quiet", "--store", str(tmp_path / name)]) == 0
        lines = folder_of(tmp_path / name).metrics()
        found.append([{key: value for key, value in line.items() if key != "timing"} for line in lines])
    assert found[0] == found[1]


def test_a_run_can_be_taken_from_the_folder_of_another(tmp_path: Path) -> None:
    assert main(["train", *SMALL, "--seed", "5", "--quiet", "--store", str(tmp_path / "one")]) == 0
    config = folder_of(tmp_path / "one").path / "config.json"
    assert main(["train", "--config", str(config), "--device", "cpu", "--quiet", "--store", str(tmp_path / "two")]) == 0
    assert folder_of(tmp_path / "two").run == folder_of(tmp_path / "one").run


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data.name", "cifar11"], "`--data.name` must be one of digits"),
        (["--data.name", "cifar10"], "cifar-10-binary.tar.gz"),
        (["--training.batch", "4096"], "at most"),
        (["--model.patch", "3"], "a divisor of height and width"),
        (["--config", "nothing.json"], "the config.json of a run folder. Got nothing.json: No such file or directory."),
        (["--config", "."], "the config.json of a run folder. Got .: Is a directory."),
        (["--config", "empty.json"], "the config.json of a run folder. Got empty.json: it has no 'run'."),
        (["--config", "nothing.json", "--seed", "3"], "the only setting"),
        (["--device", "toaster"], "auto, cpu, cuda"),
        (["--data.augmentation", "autoaugment", "--data.name", "features", "--data.folder", "no.npz"], "no.npz"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_cannot_be_carried_out_says_why_and_ends_with_2(
    arguments, words, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.json").write_text("{}")
    given = [
        *([] if arguments[0] == "--config" else SMALL[:-4]),
        *arguments,
        "--data-root",
        str(tmp_path / "data"),
        "--store",
        str(tmp_path / "store"),
    ]
    assert main(["train", *given]) == BAD_INPUT
    assert words in " ".join(capsys.readouterr().err.split())


def test_ctrl_c_ends_without_a_traceback_and_the_same_command_goes_on(tmp_path: Path) -> None:
    settings = [*SMALL, "--training.epochs", "4000", "--store", str(tmp_path), "--checkpoint-seconds", "0"]
    command = [sys.executable, "-m", "explicit_dropout", "train", *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while not list(tmp_path.rglob("checkpoint.pt")):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on from here" in told
    assert "Traceback" not in told
    assert folder_of(tmp_path).status == "resumable"


@pytest.mark.parametrize(("option", "value"), [("treatment.strength", "1e-3"), ("training.learning-rate", "-1")])
def test_a_setting_that_is_none_is_refused_by_its_name_alone(option, value, capsys) -> None:
    assert main(["train", f"--{option}", value]) == BAD_INPUT
    assert capsys.readouterr().err.startswith(f"error: `--{option}` must be above 0")


def test_names_in_brackets_are_printed_as_they_are(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    treatment = [*EXPLICIT, "--treatment.law", "inverted", "--treatment.strength", "1e-2"]
    assert main(["train", *SMALL, *treatment, "--store", "m[/b]2"]) == 0
    out = capsys.readouterr().out
    assert "explicit_v+explicit [inverted] on digits" in out
    assert "→ m[/b]2/runs/" in out


def test_a_training_goes_on_when_nobody_reads_along_any_more(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "explicit_dropout", "train", *SMALL, "--store", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # as `| head` does, and before the first line
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert folder_of(tmp_path).finished


@pytest.mark.parametrize("command", ["train", "demo"])
def test_help_explains_every_option(command: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "five seeds" in out if command == "demo" else "explicit-dropout train" in out


def test_the_demonstration_has_all_treatments_and_five_seeds() -> None:
    made = experiment()
    assert made.rows == (
        "none+none", "none+implicit", "drop_key+implicit", "explicit_v+explicit", "explicit_v+explicit [inverted]"
    )  # fmt: skip
    assert {run.seed for run in made.runs} == set(range(5))


def test_a_demonstration_ends_with_a_table_and_a_report_and_again_trains_nothing(tmp_path: Path, capsys) -> None:
    made = tiny_sweep.experiment()
    assert carry_out(made, tmp_path, "local", "cpu") == 0
    out = capsys.readouterr().out
    assert all(row in out for row in made.rows)
    assert "report.html" in out
    page = (tmp_path / "report" / "report.html").read_text()
    assert "Three treatments of digits" in page
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("summary.json")}
    assert len(before) == len(made.runs)
    assert carry_out(made, tmp_path, "local", "cpu") == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    summary = json.loads(next(iter(before)).read_text())
    assert summary["format"] == 1


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("data images", "`--folder` is missing. It must be a path inside the data root"),
        ("data digits --folder=x", "`--folder` must be left out: digits has its own place"),
        ("data digits --split -1", "`--split` must be at least 0"),
        ("data imagenet", "`NAME` must be one of digits"),
        ("data features --folder x", "`--folder` names an .npz file"),
        ("data images --download", "relative to the data root, as --folder, and --size if sizes differ"),
        ("train --data.name images", "`--data.folder` is missing. It must be a path inside the data root"),
        ("train --data.name digits --data.size 8", "`--data.size` must be left out: digits has one size"),
        ("train --model.patch None", "`--model.patch` must be a patch size"),
        ("train --seed -1", "`--seed` must be at least 0"),
        ("train --threads 0", "`--threads` must be at least 1"),
        ("train --device toaster", "`device` must be auto, cpu"),
        ("train --treatment.twins", "`--treatment.twins` must be left out, or given beside a treatment that draws"),
        ("train --config x --seed 3", "`config` must be the only setting of the run"),
        ("sweep TINY --seeds x", "`seeds` must be whole numbers"),
        ("sweep TINY --seeds ²", "`seeds` must be whole numbers"),
        ("sweep TINY --only nope", "`only` must be one of none+none"),
        ("sweep TINY --threads 0", "`--threads` must be at least 1"),
        ("report TINY --serve --port 99999", "`port` must be from 0"),
        ("demo --device toaster", "`device` must be auto, cpu"),
    ],
)
def test_errors_name_options_as_the_command_line_has_them(command, told, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    assert main(command.replace("TINY", tiny_sweep.__file__).split()) == BAD_INPUT
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_setting_of_a_config_file_keeps_the_name_that_it_has_there(tmp_path: Path, capsys) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"run": {"data": {"name": "images"}}}))
    arguments = ["train", "--config", str(config), "--store", str(tmp_path / "store"), "--quiet"]
    assert main([*arguments, "--data-root", str(tmp_path)]) == BAD_INPUT
    assert "`data.folder` must be a path inside" in " ".join(capsys.readouterr().err.split())


def test_the_demonstration_says_in_words_what_its_rows_are(tmp_path: Path, capsys) -> None:
    assert carry_out(tiny_sweep.experiment(), tmp_path, "local", "cpu") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "none+none: no dropout and no penalty" in out
    assert "explicit_v+explicit: penalty on values and on feed-forward layers, the paper's moments, p = 0.2" in out
