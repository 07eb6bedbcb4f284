"""The command `report`, and the report that follows a sweep in the browser."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

import synthetic_sweep as synthetic
from explicit_dropout import InputError, errors
from explicit_dropout.cli.reporting import report as report_command
from explicit_dropout.lab.report import build
from explicit_dropout.lab.report.page import Live
from explicit_dropout.lab.report.serving import LiveReport, Server, state_of
from explicit_dropout.lab.store import Store


@pytest.fixture
def partial(tmp_path):
    return synthetic.partial_store(tmp_path / "store")


EXPERIMENT_FILE = """
from explicit_dropout.lab.config import Run
from explicit_dropout.lab.experiment import Experiment

def experiment():
    return Experiment("mine", "My own", tuple(Run(seed=seed) for seed in range(3)), baseline="none+none")
"""


def test_the_command_writes_all_files_and_prints_the_table(partial, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    store, made = partial
    assert report_command((), store=store.root, output=tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert all(len(line.rstrip()) <= 80 for line in printed.splitlines())
    assert all(row.split("+")[0] in printed for row in made.rows[:3])
    assert "report.html, report.md, report.tex, report.csv, configurations.csv" in " ".join(printed.split())
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_report_is_written_even_if_it_cannot_be_printed(partial, tmp_path, encoding):
    store, _ = partial
    start = [sys.executable, "-m", "explicit_dropout", "report", "--store", store.root, "--output", tmp_path / "out"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    with subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        printed = b"" if encoding == "utf-8" else process.stdout.read()
        process.stdout.close()  # with utf-8 before the first line, as `| head` may
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert (tmp_path / "out" / "report.html").exists()
    if encoding == "ascii":
        assert re.search(rb"\d\d\.\d\d \? \d\.\d\d", printed)


def test_the_command_reports_what_has_not_been_run(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(EXPERIMENT_FILE)
    (tmp_path / "nothing").mkdir()
    assert report_command((str(file),), store=tmp_path / "nothing", output=tmp_path / "out") == 0
    assert "not run" in capsys.readouterr().out
    assert "0 of 3 runs" in (tmp_path / "out" / "report.md").read_text()


def test_mistakes_are_said_plainly(tmp_path):
    with pytest.raises(InputError, match="--store"):
        report_command((), store=tmp_path / "nothing", output=tmp_path)
    (tmp_path / "empty" / "runs").mkdir(parents=True)
    with pytest.raises(InputError, match="which has none"):
        report_command((), store=tmp_path / "empty", output=tmp_path)
    (tmp_path / "mine.py").write_text(EXPERIMENT_FILE)
    (tmp_path / "file").write_text("")
    for serve in (False, True):
        with pytest.raises(InputError, match=r"`--store` must be a folder .* which is not there"):
            report_command((str(tmp_path / "mine.py"),), store=tmp_path / "nothing", output=tmp_path, serve=serve)
        with pytest.raises(errors.StoreError, match="is a file"):
            report_command((str(tmp_path / "mine.py"),), store=tmp_path / "file", output=tmp_path, serve=serve)
    with pytest.raises(errors.StoreError, match="could not be written"):
        report_command((str(tmp_path / "mine.py"),), store=tmp_path, output=tmp_path / "file")


@pytest.fixture
def served(partial):
    store, made = partial
    server = Server(LiveReport(store.root, lambda live: build(store, [(made, "x.py")]).html(live)), port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server, store, made
    server.shutdown()
    thread.join()
    server.server_close()


def get(server, path="", host=None):
    request = urllib.request.Request(server.address + path, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return answer.read().decode(), answer.headers


def test_the_server_follows_the_store(served, monkeypatch):
    server, store, made = served
    monkeypatch.setattr("explicit_dropout.lab.report.serving.LOOK_AGAIN_SECONDS", 0.0)
    version = get(server, "version")[0]
    page, headers = get(server)
    assert f'data-version="{version}"' in page
    assert "5 of 12 runs" in page
    assert "'nonce-" in headers["Content-Security-Policy"]
    assert get(server)[0] == page
    synthetic.write(store, [run for run in made.runs if not store.folder(run).path.exists()][:1])
    assert get(server, "version")[0] != version
    assert "6 of 12 runs" in get(server)[0]


def test_a_damaged_run_does_not_stop_the_server(served, monkeypatch):
    server, store, made = served
    monkeypatch.setattr("explicit_dropout.lab.report.serving.LOOK_AGAIN_SECONDS", 0.0)
    path = store.folder(made.runs[0]).path / "metrics.jsonl"
    path.write_text("{\n" + path.read_text())
    page = get(server)[0]
    assert "4 of 12 runs" in page
    assert "metrics.jsonl, line 1 is not JSON" in page


def test_the_server_gives_away_nothing_but_the_report(served):
    server, _, made = served
    key = made.runs[0].key
    for path in (f"runs/{key}/summary.json", "../../etc/passwd", "%2e%2e/%2e%2e/etc/passwd", "report.csv"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(server, path)
        assert refused.value.code == 404
        refused.value.close()
    with pytest.raises(urllib.error.HTTPError) as refused:
        get(server, host="evil.example")
    assert refused.value.code == 403
    refused.value.close()
    assert server.server_address[0] == "127.0.0.1"


def test_a_damaged_store_is_told_in_the_browser_and_the_server_goes_on(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "runs").mkdir()
    server = Server(LiveReport(tmp_path, lambda live: build(store).html(live)), port=0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as told:
            get(server)
        assert "which has none" in told.value.read().decode()
        told.value.close()
        synthetic.write(store, synthetic.experiment(seeds=(0,), rates=(1e-3,), strengths=(1e-3,), epochs=3).runs)
        server.live._looked = -10.0
        assert "Results" in get(server)[0]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_port_that_is_taken_is_said_so():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"{port}, which is in use"):
            Server(LiveReport(Path("."), str), port)
    with pytest.raises(InputError, match="65535"):
        Server(LiveReport(Path("."), str), 70000)


def test_the_state_of_a_store_changes_with_its_files_alone(partial):
    store, made = partial
    before = state_of(store.root)
    assert state_of(store.root) == before
    store.folder(made.runs[0]).append_metrics({"epoch": 99})
    assert state_of(store.root) != before
    assert state_of(store.root / "nothing") == state_of(store.root / "nothing either")


def test_only_the_live_page_has_a_script(partial):
    store, made = partial
    report = build(store, [(made, "x.py")])
    assert "<script" not in report.html()
    live = report.html(Live("v", "n0nce", "12:00:00"))
    assert live.count("<script") == 1
    assert '<script nonce="n0nce"' in live
    assert '<noscript><meta http-equiv="refresh"' in live


def test_ctrl_c_ends_the_server_cleanly(partial):
    store, _ = partial
    code = (
        "import sys; from pathlib import Path; from explicit_dropout.cli.reporting import report;"
        "sys.exit(report((), store=Path(sys.argv[1]), serve=True, port=0))"
    )
    command = [sys.executable, "-c", code, str(store.root)]
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as server:
        line = server.stdout.readline().decode()
        address = re.search(r"The report is at (http://127\.0\.0\.1:\d+/)", line)[1]
        with urllib.request.urlopen(address + "version", timeout=20) as answer:
            assert answer.status == 200
        server.send_signal(signal.SIGINT)
        out, err = server.communicate(timeout=30)
    assert (server.returncode, out.decode().strip(), err) == (0, "Stopped.", b"")
