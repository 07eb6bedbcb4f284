"""The experiment files as they are shipped, and the pages of results that are made of them."""

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from explicit_dropout.errors import InputError
from explicit_dropout.lab import penalties
from explicit_dropout.lab.config import Model, Treatment
from explicit_dropout.lab.experiment import Experiment, Question, load_experiments, module_of
from explicit_dropout.lab.models import Transformer
from explicit_dropout.lab.report.answers import answers
from explicit_dropout.lab.rows import PAPER_ROWS, named, paper_numbers, paper_treatments, treatments
from explicit_dropout.lab.statistics import analyse
from explicit_dropout.lab.store import Store

ROOT = Path(__file__).parent.parent
NO_EXPERIMENTS = ("references", "results")
FILES = sorted(path for path in (ROOT / "experiments").glob("*.py") if path.stem not in NO_EXPERIMENTS)


@pytest.fixture(scope="module")
def page_maker():
    return module_of(ROOT / "experiments" / "results.py")


def runs_of(name):
    return {run.key: run for made in load_experiments(ROOT / "experiments" / f"{name}.py") for run in made.runs}


# ---------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_experiment_has_runs_that_differ_and_names_its_commands(path):
    for made in load_experiments(path):
        assert made.name == path.stem or made.name.startswith(f"{path.stem}_")
        assert len({run.key for run in made.runs}) == len(made.runs)
        assert set(made.paper) <= set(made.rows)
    commands = [
        shlex.split(line) for line in (module_of(path).__doc__ or "").splitlines() if "explicit-dropout" in line
    ]
    assert [words[:3] for words in commands] == [
        ["explicit-dropout", verb, f"experiments/{path.stem}.py"] for verb in ("sweep", "report")
    ]


@pytest.mark.parametrize(("name", "whole", "shared"), [("rates", "table1", 20), ("noise", "table1", 15)])
def test_ablations_share_the_runs_that_table_1_has_anyway(name, whole, shared):
    assert len(runs_of(name).keys() & runs_of(whole).keys()) == shared


def test_the_study_on_gtzan_takes_what_table_4_has_finished():
    shared = runs_of("strength_gtzan").keys() & runs_of("table4").keys()
    finished = shared & {run.key for run, _ in Store(ROOT / "results").finished_runs()}
    assert len(shared) >= 70
    assert len(finished) >= 65


def test_the_study_on_cifar_is_small_and_begins_with_its_references():
    runs = list(runs_of("strength").values())
    assert len(runs) <= 26
    assert [run.row for run in runs[:2]] == ["none+none", "none+implicit"]
    assert [run.training.epochs for run in runs] == [15] * 14 + [50] * 9
    assert len(runs_of("strength").keys() & runs_of("table1").keys()) == 3


@pytest.mark.parametrize("reductions", [("token",), ("sample", "token")])
def test_finished_runs_of_table_4_stay_its_evidence_whatever_the_reduction(reductions, monkeypatch):
    table4 = module_of(ROOT / "experiments" / "table4.py")
    monkeypatch.setattr(table4, "REDUCTIONS", reductions)
    made = table4.experiment()
    keys = {run.key for run in made.runs}
    finished = [folder.run for folder in Store(ROOT / "results").folders() if folder.finished]
    old = [run for run in finished if run.data.name == "gtzan_yamnet" and run.treatment.reduction == "token"]
    within = [run for run in old if run.treatment.strength <= 5e-3]
    assert len(within) >= 176
    assert {run.key for run in within} <= keys
    assert len(keys) == len(made.runs)
    assert set(made.paper) <= set(made.rows)


@pytest.mark.parametrize("name", ["table1", "table3"])
def test_another_reduction_renames_the_rows_with_penalties_and_no_others(name, monkeypatch):
    table = module_of(ROOT / "experiments" / f"{name}.py")
    monkeypatch.setattr(table, "REDUCTION", "token")
    before = table.experiment()
    monkeypatch.setattr(table, "REDUCTION", "sample")
    after = table.experiment()
    renamed = {row for row in after.rows if row not in before.rows}
    assert renamed == {row for row in after.rows if "token sums" in row}
    assert len(renamed) == len(before.rows) - 5  # three stochastic rows, none+none and weight decay
    assert len(after.paper) == len(before.paper)


def test_rows_without_a_penalty_take_no_reduction():
    made = {t.row for t in paper_treatments([1e-3], reduction="sample")}
    assert {"none+implicit", "none+none", "none+weight_decay", "explicit_v+explicit [token sums]"} <= made
    assert named("explicit_v+explicit", law="inverted", reduction="sample") == (
        "explicit_v+explicit [inverted, token sums]"
    )
    numbers = paper_numbers("table1", reduction="sample")
    assert set(numbers) == {named(row, reduction="sample") for row in PAPER_ROWS}


@pytest.mark.parametrize("law", ["paper", "bernoulli", "inverted"])
@pytest.mark.parametrize("row", ["explicit_v+explicit", "explicit_q+explicit", "none+explicit", "arora_q+explicit"])
def test_a_sum_over_tokens_is_a_mean_over_tokens_at_as_many_times_the_strength(row, law):
    """What both studies of λ rest on: with equally long examples the reductions are one axis."""
    model = Model(layers=1, width=8, heads=2, hidden=8, patch=2)
    x, tokens = torch.rand(3, 1, 4, 4), 5
    values = []
    for strength, reduction in ((0.01, "sample"), (0.01 * tokens, "token")):
        (treatment,) = treatments(row, [strength], law=law, reduction=reduction)
        torch.manual_seed(0)
        network = Transformer((1, 4, 4), 2, model, treatment)
        penalty = penalties.attach(network, treatment)
        network(x)
        values.append(penalty().item())
    assert values[0] == pytest.approx(values[1], rel=1e-6)


# ---------------------------------------------------------------------------------------------- the page


def test_the_pages_of_results_are_current(page_maker):
    made = page_maker.pages(ROOT)
    assert {ROOT / "README.md", ROOT / "docs" / "findings.md", ROOT / "docs" / "results.md"} <= made.keys()
    assert {path for path in made if path.parent.name == "results"} == set((ROOT / "docs" / "results").iterdir())
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, "run python experiments/results.py"


def test_every_experiment_is_on_one_page(page_maker):
    shown = [*page_maker.CHOICES, *(file for _, files in page_maker.STUDIES.values() for file in files)]
    assert sorted(shown) == sorted({path.stem for path in FILES} - {"digits"})  # which the demonstration is made of


def test_with_nothing_run_no_cell_of_ours_has_a_number_and_nothing_is_concluded(page_maker, tmp_path):
    for name in ("README.md", "docs/findings.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    pages = {path.stem: text for path, text in page_maker.pages(tmp_path).items()}
    assert "not enough runs yet (n = 0)" in pages["cifar"]
    for name in ("results", "comparisons"):
        assert "not enough runs yet" in pages[name]
        assert not re.search(r"(?m)^- .*(better|worse|no difference)", pages[name])
    heads = [
        (page, line) for page in pages.values() for line in page.splitlines() if re.match(r"\| row .* paper: ", line)
    ]
    assert len(heads) == 3  # tables 1, 2 and 4, which have numbers of the paper
    for page, head in heads:
        names = [name.strip() for name in head.strip("|").split("|")]
        rows = page.split(head, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
        assert rows
        for row in rows:
            cells = dict(zip(names, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
            ours = {value for name, value in cells.items() if not name.startswith(("row", "paper"))}
            assert ours <= {"not run", "–", "0", "baseline"}


def results_of(made, difference):
    """Every run finished; rows differ by `difference` for each seed."""
    for run in made.runs:
        ours = difference[run.seed] if run.row != made.baseline else 0.0
        yield run, {"validation": {"accuracy": 0.8}, "test": {"accuracy": 0.8 + 0.01 * run.seed + ours}}


def test_what_is_not_significant_among_all_comparisons_of_a_question_is_no_verdict():
    base = next(iter(runs_of("table4").values()))
    rows = [Treatment(), *(Treatment(feed_forward="weight_decay", strength=0.1, rate=p) for p in (0.1, 0.2, 0.3, 0.4))]
    runs = tuple(replace(base, treatment=row, seed=seed) for row in rows for seed in range(5))
    made = Experiment("x", "x", runs, baseline="none+none")
    analysis = analyse(made, results_of(made, [0.01, 0.02, 0.03, 0.001, 0.012]))  # alone: p = 0.037
    contrasts = tuple((row.row, "none+none") for row in rows[1:])
    for asked, said in ((contrasts[:1], "is better"), (contrasts, "no difference is shown")):
        found = list(answers(analysis, Question("?", asked)))
        assert len(found) == len(asked)
        assert all(said in answer for answer in found)


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ([0.01, 0.012, 0.011, 0.009, 0.01], "`none+weight_decay` is better than `none+none` (+1.04 points"),
        ([-0.01, -0.012, -0.011, -0.009, -0.01], "is worse than"),
        ([0.01, -0.012, 0.011, -0.009, 0.01], "no difference is shown between"),
        ([0.0, 0.0, 0.0, 0.0, 0.0], "all 5 differences of `none+weight_decay` to `none+none` are 0.00 points"),
        ([0.01, 0.012, 0.011, 0.009], "not enough runs yet (n = 4)"),
    ],
)
def test_five_pairs_make_a_verdict_and_four_do_not(difference, said):
    base = next(iter(runs_of("table4").values()))
    rows = (Treatment(), Treatment(feed_forward="weight_decay", strength=0.1))
    runs = tuple(replace(base, treatment=row, seed=seed) for row in rows for seed in range(len(difference)))
    question = Question("?", (("none+weight_decay", "none+none"),))
    made = Experiment("x", "x", runs, baseline="none+none", questions=(question,))
    (answer,) = answers(analyse(made, results_of(made, difference)), question)
    assert said in answer


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ([0.0] * 5, "all 5 runs of `explicit_q+explicit` have the score of `explicit_k+explicit` (n = 5 seeds)."),
        ([0.0, 0.0, 0.01, -0.02, 0.0], "3 of 5 runs of `explicit_q+explicit`"),
        ([0.0, 0.0, 0.01, -0.02, 0.0], "the others are at most 2.00 points apart, −0.20 in the mean over all"),
    ],
)
def test_rows_that_should_be_one_are_compared_run_by_run(difference, said):
    base = next(iter(runs_of("table4").values()))
    rows = [next(treatments(f"explicit_{site}+explicit", [0.1])) for site in "kq"]
    runs = tuple(replace(base, treatment=row, seed=seed) for row in rows for seed in range(5))
    question = Question("?", (("explicit_q+explicit", "explicit_k+explicit"),), same_settings=True)
    made = Experiment("x", "x", runs, baseline="explicit_k+explicit", questions=(question,))
    (answer,) = answers(analyse(made, results_of(made, difference)), question)
    assert said in answer


def test_a_question_about_a_row_that_is_not_there_is_an_error():
    (run, *_) = runs_of("table4").values()
    with pytest.raises(InputError, match=r"questions.*about the rows.*nothing\+none"):
        Experiment("x", "x", (run,), baseline=run.row, questions=(Question("?", ((run.row, "nothing+none"),)),))


def test_the_page_can_be_checked_from_the_command_line(page_maker, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(page_maker, "EXPERIMENTS", tmp_path / "experiments")
    made = {tmp_path / "docs" / "results.md": "made", tmp_path / "README.md": "made, too"}
    monkeypatch.setattr(page_maker, "pages", lambda _: made)
    (tmp_path / "README.md").write_text("old")  # the other is not there yet
    assert page_maker.main(["--check"]) == 1
    assert page_maker.main([]) == 0
    assert page_maker.main(["--check"]) == 0
    assert "is current" in capsys.readouterr().out
