"""Reports of stores with invented results: what is written, in which form, and that nothing foreign gets through."""

import csv
import io
import json
import re
import shlex
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest

import synthetic_sweep as synthetic
from explicit_dropout.cli.reporting import show
from explicit_dropout.lab.config import Data, Treatment
from explicit_dropout.lab.experiment import Question
from explicit_dropout.lab.report import build, latex, markdown, tables, write_report
from explicit_dropout.lab.report.curves import course, sites
from explicit_dropout.lab.report.heatmaps import colour_range
from explicit_dropout.lab.report.legend import legend, parts
from explicit_dropout.lab.report.sentences import findings
from explicit_dropout.lab.report.svg import Scale, element, thinned
from explicit_dropout.lab.report.tables import percent
from explicit_dropout.lab.rows import EXACT, paper_treatments
from explicit_dropout.lab.statistics import Result, analyse
from explicit_dropout.lab.store import SPREAD, Store
from explicit_dropout.lab.training.loop import TRAINING_EXAMPLES_SCORED

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&|\\input{x}$_%#"


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """A store in which everything is finished."""
    store = Store(tmp_path_factory.mktemp("complete"))
    made = synthetic.experiment(seeds=range(3), rates=(5e-4, 1e-3), strengths=(5e-4, 1e-3), epochs=12)
    synthetic.write(store, made.runs)
    return store, made


@pytest.fixture
def partial(tmp_path):
    """Rows that are complete, under way, failed and not run."""
    return synthetic.partial_store(tmp_path / "store")


class Page(HTMLParser):
    """Elements with their attributes, and the text outside style and script."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.text, self.stack = [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data):
        if not {"style", "script"} & set(self.stack):
            self.text += data


# ------------------------------------------------------------------------------------------------ tables


def test_the_table_says_what_the_statistics_say(complete):
    store, made = complete
    part = build(store, [(made, None)]).parts[0]
    table = tables(made, [Result(r.run, r.summary) for r in part.records])[0]
    for cells, row in zip(table.rows, part.analysis.rows, strict=True):
        assert cells["test"] == f"{100 * row.test.mean:.2f} ± {100 * row.test.sd:.2f}"
        assert cells["n"] == "3"
        if row.comparison:
            low, high = row.comparison.difference.interval()
            assert cells["difference"].replace("−", "-") == f"{100 * row.comparison.difference.mean:+.2f}"
            assert cells["difference_interval"].replace("−", "-") == f"[{100 * low:+.2f}, {100 * high:+.2f}]"
    assert table.rows[0]["difference"] == "baseline"
    assert table.rows[0]["paper"] == "85.14 ± 0.63"


def test_incomplete_rows_are_shown_as_such_and_nothing_is_made_up(partial):
    store, made = partial
    part = build(store, [(made, None)]).parts[0]
    rows = {
        cells["row"]: cells
        for cells in tables(made, [Result(r.run, r.summary) for r in part.having("finished")])[0].rows
    }
    assert rows["explicit_q+explicit"]["n"] == "2 of 3"
    assert part.analysis["explicit_q+explicit"].state == "2 of 3 seeds"
    assert rows["explicit_av+explicit"]["test"] == "not run"
    ours = {
        key: text for key, text in rows["explicit_av+explicit"].items() if key not in ("row", "paper", "runs", "test")
    }
    assert not any(character.isdigit() for character in "".join(ours.values()).replace("0", ""))
    page = Page(build(store, [(made, "x.py")]).html()).text
    for said in ("Preliminary: 5 of 12 runs", "2 of 3 seeds", "not run", "OutOfMemoryError: no room", "7 of 12"):
        assert said in page


def test_one_repetition_has_neither_sd_nor_interval(tmp_path):
    made = synthetic.experiment(seeds=(0,), rates=(1e-3,), strengths=(1e-3,), epochs=3)
    synthetic.write(Store(tmp_path), made.runs)
    part = build(Store(tmp_path), [(made, None)]).parts[0]
    for cells in tables(made, [Result(r.run, r.summary, r.metrics) for r in part.records])[0].rows:
        assert "±" not in cells["test"]
        assert cells["interval"] == cells["difference_interval"] == cells["holm"] == "–"
    assert findings(part.analysis)[-1] == "There are not enough repetitions to tell any row from it."
    assert 'class="own-band"' not in build(Store(tmp_path), [(made, None)]).html()


def test_diagnostics_are_shown_where_summaries_have_them(complete):
    store, made = complete
    part = build(store, [(made, None)]).parts[0]
    full = tables(made, [Result(r.run, r.summary) for r in part.records])
    assert [column.key for column in full[1].columns] == [
        "row", "train_metric", "gap", "train_loss", "test_loss", "calibration_error", "seconds",
        "examples_per_second", "n",
    ]  # fmt: skip
    most = f"{TRAINING_EXAMPLES_SCORED:,} training examples at most".replace(",", " ")
    assert f"Training numbers are of the first {most}," in full[1].caption
    told = [Result(r.run, {**r.summary, "train_examples": SPREAD}) for r in part.records]
    assert f"Training numbers are of {most}, spread evenly, without" in tables(made, told)[1].caption
    some = [Result(r.run, a.summary if r.run.seed else r.summary) for r, a in zip(part.records, told, strict=True)]
    assert f"{most}, spread evenly or, in older runs, the first, without" in tables(made, some)[1].caption
    bare = [Result(r.run, {k: {"accuracy": 0.5} for k in ("validation", "test")}) for r in part.records]
    assert [table.name for table in tables(made, bare)] == ["synthetic", "synthetic_configurations"]


def test_training_numbers_that_cannot_be_compared_are_dashes_and_the_caption_says_why():
    made = synthetic.experiment(rates=(1e-3,), strengths=(1e-3,), metric="mean_average_precision")
    results = []
    for run in made.runs:
        numbers = {"mean_average_precision": 0.5 + run.seed / 100, "loss": 0.3}
        spread = {"train_examples": SPREAD} if run.row == "none+none" else {}
        results.append((run, {"validation": numbers, "test": numbers, "train": numbers, **spread}))
    table = tables(made, results)[1]
    for cells in table.rows:
        hidden = cells["row"] != "none+none"
        assert [(cells[key] == "–") for key in ("train_metric", "gap", "train_loss")] == 3 * [hidden]
        assert cells["test_loss"] != "–"
    assert "left out (–) where runs have scored the first 10 000 training examples" in table.caption
    before = [(run, {**summary, "train_examples": None}) for run, summary in results]
    assert "train_metric" in [column.key for column in tables(made, before)[1].columns]


def test_the_grid_of_the_paper_stands_beside_ours():
    rows = ("explicit_v+explicit",)
    cells = {rows[0]: {"0.001": {"0.0005": {"mean": 84.06, "std": 0.85}}}}
    made = synthetic.experiment(rows, seeds=(0,), rates=(1e-3,), strengths=(5e-4, 1e-3), paper_cells=cells, paper={})
    table = tables(made, [(run, synthetic.summary(run)) for run in made.runs])[-1]
    assert [row["paper"] for row in table.rows] == ["84.06 ± 0.85", "–"]
    assert "paper" not in {column.key for column in tables(made, [])[0].columns}


@pytest.mark.parametrize(("value", "text"), [(0.97814, "97.81"), (-0.0123, "−1.23"), (-1e-6, "0.00"), (None, "–")])
def test_fractions_are_written_as_percent(value, text):
    assert percent(value) == text
    assert percent(0.01, signed=True) == "+1.00"


# ------------------------------------------------------------------------------------------------ formats


def test_markdown_and_latex_have_all_rows_and_as_many_cells_as_columns(complete):
    store, made = complete
    table = tables(made, [(run, synthetic.summary(run)) for run in made.runs])[0]
    lines = [line for line in markdown(table).splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(made.rows)
    assert {line.count("|") for line in lines} == {len(table.columns) + 1}
    body = latex(table).split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert len(body) == len(made.rows)
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {len(table.columns) - 1}
    assert body[0].startswith(r"none+implicit & ")
    assert r"\usepackage{booktabs}" in latex(table)
    assert build(store, [(made, None)]).latex().count(r"\begin{table}") == 3


def test_csv_has_every_number_in_full(complete):
    store, made = complete
    report = build(store, [(made, None)])
    rows = list(csv.DictReader(io.StringIO(report.csv())))
    for cells, row in zip(rows, report.parts[0].analysis.rows, strict=True):
        assert float(cells["test_mean"]) == 100 * row.test.mean
        assert float(cells["test_sd"]) == 100 * row.test.sd
        if row.comparison:
            assert float(cells["p_holm"]) == row.comparison.holm
            assert float(cells["difference_low"]) == 100 * row.comparison.difference.interval()[0]
        else:
            assert cells["difference_mean"] == ""
    configurations = list(csv.DictReader(io.StringIO(report.configurations_csv())))
    assert len(configurations) == sum(len(row.configurations) for row in report.parts[0].analysis.rows)
    assert sum(line["selected"] == "true" for line in configurations) == len(made.rows)


def test_names_and_notes_cannot_escape_from_any_format(tmp_path):
    store = Store(tmp_path / "store")
    made = synthetic.experiment(("none+implicit", "explicit_v+explicit"), range(2), (1e-3,), (1e-3,), epochs=3)
    runs = tuple(replace(run, data=Data("images", folder=EVIL)) for run in made.runs)
    evil = replace(made, name=EVIL, title=EVIL, notes=(EVIL,), runs=runs, paper={EVIL: {"mean": 1.0, "std": 1.0}})
    synthetic.write(store, evil.runs[:-1])
    synthetic.fail(store, evil.runs[-1], EVIL)
    report = build(store, [(evil, EVIL)], name=EVIL)
    page = Page(report.html())
    assert {tag for tag, _ in page.elements} & {"script", "img", "iframe", "object", "link"} == {"link"}
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.text.count("<script>alert(1)</script>") >= 6  # there, as text
    assert "<script" not in re.sub(r"\\<", "", report.markdown().split("```")[0])
    assert r"\input" not in report.latex().replace(r"\textbackslash{}input", "")
    assert next(csv.DictReader(io.StringIO(report.csv())))["experiment"] == EVIL


# ------------------------------------------------------------------------------------------------ the page


def test_the_page_asks_for_nothing_and_runs_nothing(complete):
    store, made = complete
    page = Page(build(store, [(made, "x.py")]).html())
    for tag, attributes in page.elements:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            value = attributes.get(name) or "#"
            assert value.startswith(("#", "data:,")), (tag, name, value)
    assert "url(" not in page.rawdata
    assert "@import" not in page.rawdata
    policy = next(a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy


def test_ids_are_unique_and_links_lead_somewhere(partial):
    store, made = partial
    twin = replace(made, name="twin")
    page = Page(build(store, [(made, "x.py"), (twin, "y.py")]).html())
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {a["href"] for tag, a in page.elements if tag == "a"} | {
        "#" + a["for"] for t, a in page.elements if "for" in a
    }
    assert {link[1:] for link in links} <= set(ids)


def test_headings_follow_each_other_and_figures_have_names(complete, partial):
    for store, made in (complete, partial):
        for experiments in ([(made, "x.py")], [(made, "x.py"), (replace(made, name="twin"), None)]):
            page = Page(build(store, experiments).html())
            levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
            assert levels[0] == 1
            assert levels.count(1) == 1
            assert all(b <= a + 1 for a, b in pairwise(levels))
            drawings = [a for tag, a in page.elements if tag == "svg" and "x" not in a]
            assert drawings
            assert all(a.get("aria-label") or a.get("aria-hidden") == "true" for a in drawings)
            assert all(a.get("scope") for tag, a in page.elements if tag == "th")
            tags = [tag for tag, _ in page.elements]
            assert tags.count("caption") == tags.count("table")


def test_every_row_has_the_command_that_makes_it(partial):
    store, made = partial
    page = Page(build(store, [(made, "experiments/my table.py")], name="my store").html()).text
    assert "explicit-dropout report 'experiments/my table.py' --store 'my store'" in page
    for row in made.rows:
        command = f"explicit-dropout sweep 'experiments/my table.py' --only {row} --store 'my store'"
        assert command in page
        assert shlex.split(command)[4] == row
    assert "goes on with it · 2 of 3 seeds" in page


def test_the_environment_is_told_and_different_data_are_a_warning(partial):
    store, made = partial
    told = Page(build(store, [(made, None)]).html()).text
    assert "2.13.0" in told
    assert "0123456789abcdef" in told
    assert "Different data." not in told
    path = store.folder(made.runs[0]).path / "environment.json"
    changed = json.loads(path.read_text()) | {"dataset": {"name": "digits", "fingerprint": "other"}, "threads": 4}
    path.write_text(json.dumps(changed))
    told = " ".join(Page(build(store, [(made, None)]).html()).text.split())
    assert "Different data. Runs on digits have seen 2 versions of it" in told
    assert "1 (6)4 (1)" in told


def test_different_data_are_a_warning_in_every_format(partial, capsys):
    store, made = partial
    path = store.folder(made.runs[0]).path / "environment.json"
    for is_mixed in (False, True):
        report = build(store, [(made, None)])
        show(report)
        printed = " ".join(capsys.readouterr().out.split())
        warning = "Different data: the runs on digits have seen 2 versions of it"
        for text in (report.html(), report.markdown(), report.latex(), printed):
            assert (warning in text) == is_mixed
        (line,) = (one for one in csv.DictReader(io.StringIO(report.csv())) if one["row"] == made.runs[0].row)
        assert line["data_fingerprint"] == "0123456789abcdef" + (" other" if is_mixed else "")
        assert "data_fingerprint" in report.configurations_csv().splitlines()[0]
        dataset = {"name": "digits", "fingerprint": "other"}
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dataset": dataset}))


def test_versions_of_data_are_told_apart_across_splits(tmp_path):
    runs = [replace(run, data=replace(run.data, split=run.seed)) for run in synthetic.experiment(seeds=range(2)).runs]
    store = Store(tmp_path)
    synthetic.write(store, runs[:1] + runs[-1:])
    path = store.folder(runs[-1]).path / "environment.json"
    path.write_text(path.read_text().replace("0123456789abcdef", "other"))
    assert "Different data" in build(store).markdown()


@pytest.mark.parametrize("splits", [1, 2])
def test_one_split_divided_in_two_ways_is_a_warning_and_two_splits_are_not(splits, tmp_path, capsys):
    runs = [
        replace(run, data=replace(run.data, split=run.seed % splits))
        for run in synthetic.experiment(("none+implicit",), range(4), (1e-3,)).runs
    ]
    store = Store(tmp_path)
    synthetic.write(store, runs)
    for run in runs[:3]:  # the last is of an early version and does not say
        path = store.folder(run).path / "environment.json"
        path.write_text(path.read_text().replace("abcdef", f'abcdef", "division": "divided {run.seed % 2}'))
    report = build(store)
    show(report)
    printed = " ".join(capsys.readouterr().out.split())
    for text in (report.html(), report.markdown(), report.latex(), printed):
        assert ("Different divisions: the runs on digits have seen 2 divisions of it" in text) == (splits == 1)
        assert "Different data" not in text
    told = " ".join(Page(report.html()).text.split())
    assert ("Different divisions. Runs on digits have seen it divided" in told) == (splits == 1)


def test_rows_keep_their_names_in_thirty_columns(complete, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    store, made = complete
    show(build(store, [(made, None)]))
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.rstrip()) <= 30 for line in lines)
    assert all(any(line.startswith(row[:12]) and "±" in line for line in lines) for row in made.rows)


def test_the_same_store_gives_the_same_bytes(complete, tmp_path):
    store, made = complete
    first = write_report(build(store, [(made, "x.py")]), tmp_path / "a")
    second = write_report(build(store, [(made, "x.py")]), tmp_path / "b")
    assert [p.name for p in first] == ["report.html", "report.md", "report.tex", "report.csv", "configurations.csv"]
    assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == sorted(p.name for p in first)


def test_a_sweep_of_a_thousand_runs_is_a_small_file_made_in_seconds(tmp_path):
    made = synthetic.experiment(seeds=range(11), epochs=100)
    assert len(made.runs) > 1000
    write_quickly(Store(tmp_path), made)
    began = time.process_time()
    page = build(Store(tmp_path), [(made, "x.py")]).html()
    assert time.process_time() - began < 10  # about 3 s of work
    assert len(page.encode()) < 1_500_000


def write_quickly(store, made):
    """Metrics for few seeds only are not enough: curves read all of a chosen configuration."""
    lines = {}
    for run in made.runs:
        key = run.row
        if key not in lines:
            lines[key] = synthetic.metrics(run, 0.85, synthetic.np.random.default_rng(0))
        synthetic.write_files(
            store, run, lines[key] if run.training.learning_rate == 1e-3 else [], synthetic.summary(run)
        )


# ------------------------------------------------------------------------------------------------ stores


def test_a_store_without_an_experiment_is_grouped_by_what_fits_together(complete, tmp_path):
    store, made = complete
    report = build(store)
    (part,) = report.parts
    assert part.experiment.baseline == "none+none"
    assert set(part.experiment.rows) == set(made.rows)
    assert (report.others, part.analysis.complete) == (0, True)
    mixed = Store(tmp_path)
    other = synthetic.experiment(("none+implicit",), range(2), (1e-3,), epochs=5)
    synthetic.write(mixed, [*other.runs, *(replace(run, data=Data("digits", label_noise=0.4)) for run in other.runs)])
    assert [p.experiment.title for p in build(mixed).parts] == [
        "digits, 4 layers of width 48, 5 epochs",
        "digits, label noise 0.4, 4 layers of width 48, 5 epochs",
    ]
    told = Page(build(mixed).html()).text
    assert f"explicit-dropout train --config {mixed.root}/runs/{other.runs[0].key}/config.json" in told
    assert build(mixed, [(other, None)]).others == 2


def test_unfinished_runs_without_an_experiment_can_be_resumed_by_their_command(partial):
    store, made = partial
    begun = next(r for r in build(store, [(made, None)]).parts[0].records if r.state == "begun")
    told = Page(build(store, name="here").html()).text
    assert f"explicit-dropout train --config here/runs/{begun.run.key}/config.json --store here" in told


def test_a_damaged_folder_is_named_and_hides_no_other(partial):
    store, made = partial
    path = store.folder(made.runs[0]).path
    (path / "summary.json").write_text("{")
    part = build(store, [(made, None)]).parts[0]
    assert "summary.json is not JSON" in next(r.error for r in part.having("failed") if r.run == made.runs[0])
    assert part.analysis.finished == 4
    assert part.analysis.failed == 2


@pytest.mark.parametrize("damage", ["no JSON", "no file"])
def test_damaged_metrics_are_named_and_hide_no_other_run(partial, damage):
    store, made = partial
    begun = build(store, [(made, None)]).parts[0].having("begun")[0].run
    for run in (made.runs[0], begun):
        path = store.folder(run).path / "metrics.jsonl"
        if damage == "no JSON":
            path.write_text("{\n" + path.read_text())
        else:
            path.unlink()
            path.mkdir()
    for report in (build(store, [(made, None)]), build(store)):
        part = report.parts[0]
        found = {record.run: record.error for record in part.having("failed")}
        assert "metrics.jsonl" in found[made.runs[0]]
        assert "metrics.jsonl" in found[begun]
        assert part.analysis.finished == 4
        assert "metrics.jsonl" in Page(report.html()).text


def test_a_folder_that_does_not_say_what_it_is_is_named_and_hides_no_other(partial, capsys):
    store, made = partial
    path = store.folder(made.runs[0]).path
    (path / "config.json").write_text("{")
    report = build(store)
    assert report.parts[0].analysis.finished == 4
    show(report)
    for text in (Page(report.html()).text, report.markdown(), capsys.readouterr().out):
        assert "is not JSON" in text


def test_a_failed_run_that_is_tried_again_is_under_way(partial):
    store, made = partial
    failed = build(store, [(made, None)]).parts[0].having("failed")[0].run
    time.sleep(0.02)
    store.folder(failed).append_metrics({"epoch": 1, "validation": {"accuracy": 0.5}})
    assert failed in [record.run for record in build(store, [(made, None)]).parts[0].having("begun")]


def test_reading_takes_no_lock(partial):
    store, made = partial
    folder = store.folder(made.runs[1])
    with folder.lock():
        assert build(store, [(made, None)]).parts[0].analysis.finished == 5


# ------------------------------------------------------------------------------------------------ figures


def test_courses_have_the_mean_and_sd_of_the_repetitions():
    lines = [[{"epoch": e, "train_loss": e + offset} for e in (1, 2)] for offset in (0.0, 1.0)]
    made = synthetic.experiment(seeds=range(2)).runs
    results = [Result(run, {}, found) for run, found in zip(made, lines, strict=False)]
    one = course(results, lambda line: line["train_loss"])
    assert (one.epochs, one.mean) == ((1, 2), (1.5, 2.5))
    assert one.sd == pytest.approx((0.5**0.5, 0.5**0.5))
    assert course(results[:1], lambda line: line["train_loss"]).sd is None
    assert course([], dict.popitem) is None
    gaps = [Result(made[0], {}, [{"epoch": 1, "train_loss": None}, {"epoch": 2, "train_loss": 0.5}])]
    assert course(gaps, lambda line: line["train_loss"]).epochs == (2,)


def test_sites_are_sorted_by_kind_and_layer():
    terms = {"blocks.0.attention:value": 1, "blocks.10.attention:value": 1, "blocks.0.feed_forward.fc1:feed_forward": 1}
    found = sites([Result(synthetic.experiment().runs[0], {}, [{"epoch": 1, "terms": terms}])])
    assert found == {
        "attention: value": {0: "blocks.0.attention:value", 10: "blocks.10.attention:value"},
        "feed forward.fc1": {0: "blocks.0.feed_forward.fc1:feed_forward"},
    }


def test_long_courses_are_thinned_with_both_ends():
    kept = thinned(range(1000), 80)
    assert (len(kept), kept[0], kept[-1]) == (80, 0, 999)
    assert kept == sorted(set(kept))
    assert thinned(range(5), 80) == [0, 1, 2, 3, 4]


def test_one_collapsed_configuration_does_not_take_all_the_colours():
    low, high = colour_range([0.10, 0.84, 0.85, 0.85, 0.86])
    assert 0.8 < low < 0.84
    assert high == 0.86
    assert colour_range([0.5]) == (0.5, 0.5)
    assert colour_range([0.5, 0.9, 0.9]) == (0.5, 0.9)


def test_scales_have_round_ticks_and_elements_escape():
    assert Scale(78.2, 87.1, 0, 100).ticks(4) == [80, 85]
    assert Scale(0.02, 2.5, 100, 0, logarithmic=True).ticks(4) == pytest.approx([0.03, 0.1, 0.3, 1])
    assert element("text", "<&>", class_='"') == '<text class="&#34;">&lt;&amp;&gt;</text>'


def test_findings_are_sentences_about_the_table(complete):
    _, made = complete
    told = " ".join(findings(analyse(made, [(run, synthetic.summary(run)) for run in made.runs])))
    assert "After Holm's correction for 7 comparisons" in told
    assert "arora_q+explicit (−2" in told
    assert findings(analyse(made, []))[-1].endswith("has no result yet, so nothing can be compared with it.")


def test_questions_of_an_experiment_are_answered_in_every_report_for_readers(tmp_path):
    store = Store(tmp_path / "store")
    rows = ("none+implicit", "explicit_v+explicit", "arora_q+explicit")
    made = synthetic.experiment(rows, range(5), (1e-3,), (1e-3,), epochs=3)
    questions = (
        Question("Is `explicit` <better>?", (("explicit_v+explicit", "none+implicit"),)),
        Question("And Arora's?", (("arora_q+explicit", "explicit_v+explicit"),)),
    )
    made = replace(made, questions=questions)
    synthetic.write(store, [run for run in made.runs if run.row != "arora_q+explicit" or run.seed < 4])
    report = build(store, [(made, "x.py")])
    page = Page(report.html())
    for text in (page.text, report.markdown()):
        assert "And Arora's?" in text
        assert "n = 5, p (Holm)" in text
        assert "ot enough runs yet (n = 4)" in text
    assert "Is explicit <better>?" in page.text
    assert ("section", {"id": "e1-answers"}) in page.elements


# ------------------------------------------------------------------------------------------------ rows in words


def words(treatment):
    return ", ".join(name + value for name, value in parts(treatment).items())


def test_rows_that_have_different_names_have_different_words():
    treatments = {treatment.row: treatment for treatment in paper_treatments((1.0,))}
    special = [
        *(Treatment(kind) for kind in ("dropout", "drop_head", "drop_attention_column", "implicit_v")),
        Treatment("none", "implicit_inputs"),
        Treatment("none", "implicit", rate=0.5),
        Treatment("drop_attention", span=3),
        Treatment("drop_key", decreasing=True),
        Treatment(drop_path=0.1),
        Treatment("none", "implicit", twins=True, strength=1),
        *(Treatment(f"loss_{site}", "loss", strength=1) for site in "qkv"),
        Treatment("explicit_qk", strength=1),
        Treatment("explicit_v", "explicit", strength=1, reduction="sample"),
        Treatment("explicit_v", "explicit", strength=1, reading="paper"),
        Treatment("explicit_v", "explicit", strength=1, extra_dropout=0.1),
    ]
    treatments |= {treatment.row: treatment for treatment in special}
    said = {words(treatment) for treatment in treatments.values()}
    assert len(said) == len(treatments) == 15 + 5 * len(EXACT) + len(special)


@pytest.mark.parametrize(
    ("treatment", "said"),
    [
        (Treatment(), "no dropout and no penalty"),
        (Treatment("none", "implicit"), "nn.Dropout in feed-forward layers, p = 0.2"),
        (
            Treatment("explicit_v", "explicit", strength=3, law="inverted"),
            "penalty on values and on feed-forward layers, exact moments of nn.Dropout, p = 0.2",
        ),
        (Treatment("none", "weight_decay", strength=1), "λ as weight decay of the optimiser"),
    ],
)
def test_a_treatment_is_said_in_words(treatment, said):
    assert words(treatment) == said


def test_what_a_pooled_row_chooses_is_said_to_be_chosen():
    made = synthetic.experiment(("none+none", "none+implicit"), range(2), (1e-3,))
    strong = [replace(run, treatment=replace(run.treatment, rate=0.5)) for run in made.runs if run.row != "none+none"]
    rows = ("none+implicit", "none+implicit [p = 0.5]")
    pooled = replace(made, runs=(*made.runs, *strong), baseline="none+none", pooled={"chosen": rows}, paper={})
    assert legend(analyse(pooled, [])) == [
        ("none+none", "no dropout and no penalty"),
        ("chosen", "nn.Dropout in feed-forward layers, p chosen on validation data"),
    ]


def test_the_page_and_the_terminal_have_a_line_in_words_for_every_row(complete, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    store, made = complete
    report = build(store, [(made, None)])
    show(report)
    printed = capsys.readouterr().out
    told = " ".join(Page(report.html()).text.split())
    for row, said in legend(report.parts[0].analysis):
        assert f"{row}: {said}\n" in printed
        assert f"{row}{said}" in told or f"{row} {said}" in told
    assert len(legend(report.parts[0].analysis)) == len(made.rows)


@pytest.mark.parametrize(("width", "shown"), [("80", False), ("120", True)])
def test_where_rows_cannot_be_told_apart_it_says_that_this_is_not_to_be_the_same(
    complete, capsys, monkeypatch, width, shown
):
    monkeypatch.setenv("COLUMNS", width)
    store, made = complete
    show(build(store, [(made, None)]))
    printed = " ".join(capsys.readouterr().out.split())
    assert "with 3 pairs of runs, differences as large as theirs may be real and not show." in printed
    assert ("The intervals are of single comparisons, the p-values are corrected" in printed) == shown
    assert ("95 % interval" in printed) == shown


def test_a_single_comparison_is_not_said_to_be_corrected():
    made = synthetic.experiment(("none+implicit", "drop_key+implicit"), range(3), (1e-3,))
    alike = {"validation": {"accuracy": 0.9}}
    scores = {"none+implicit": (0.80, 0.82, 0.84), "drop_key+implicit": (0.81, 0.80, 0.86)}
    results = [(run, alike | {"test": {"accuracy": scores[run.row][run.seed]}}) for run in made.runs]
    told = findings(analyse(made, results))
    assert "no row can be told apart from it" in told[-2]
    assert told[-1] == (
        "Rows not told apart need not be equal: with 3 pairs of runs, differences as large as theirs may be real and "
        "not show."
    )
