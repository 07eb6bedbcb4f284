"""Runs: JSON both ways, names made of the content, and errors that name the field."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from explicit_dropout import InputError
from explicit_dropout.lab.config import Data, Execution, Model, Run, Training, Treatment
from explicit_dropout.lab.experiment import Experiment, load_experiments
from explicit_dropout.lab.rows import CONTROLS, EXPLICIT, PAPER_ROWS, paper_numbers, paper_treatments, treatments

EXPERIMENTS = ("digits", "recipe", "table1", "table2", "table3", "table4", "table5")


@st.composite
def runs(draw: st.DrawFn) -> Run:
    row = draw(st.sampled_from((*PAPER_ROWS, *CONTROLS)))
    strength = draw(st.floats(1e-9, 1e3))
    return Run(
        Data(draw(st.text(min_size=1)), split=draw(st.integers(0, 99)), label_noise=draw(st.floats(0, 1))),
        Model(heads=draw(st.sampled_from([1, 2, 3])), width=12, patch=draw(st.none() | st.integers(1, 8))),
        next(treatments(row, [strength], rate=draw(st.floats(0, 0.9)))),
        Training(learning_rate=draw(st.floats(1e-9, 10)), epochs=draw(st.integers(1, 1000))),
        draw(st.integers(0, 2**40)),
    )


@given(runs())
def test_a_run_written_as_json_and_read_back_is_the_same_run(run: Run) -> None:
    back = Run.from_json(json.loads(json.dumps(run.to_json())))
    assert back == run
    assert back.key == run.key
    assert Run.from_json(run.to_json(omit_defaults=True)) == run


@given(runs(), runs())
def test_runs_have_the_same_key_only_if_they_are_the_same(one: Run, other: Run) -> None:
    assert (one.key == other.key) == (one == other)


def test_keys_are_what_they_were_when_results_were_stored() -> None:
    """A change here makes every stored result an orphan."""
    assert Run().key == "44136fa355b3678a"
    treatment = Treatment("explicit_v", "explicit", strength=1e-3, law="inverted")
    run = Run(Data("cifar10", augmentation="crop_flip"), treatment=treatment, training=Training(epochs=100), seed=3)
    assert run.key == "427bf7f56d5a1c72"


def test_a_whole_number_where_a_float_belongs_is_the_same_setting() -> None:
    assert Run(training=Training(learning_rate=1)).key == Run(training=Training(learning_rate=1.0)).key


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Run.from_json({"dta": {}}), "`run.dta`"),
        (lambda: Run.from_json({"data": {"name": 3}}), "`data.name` must be text"),
        (lambda: Run.from_json({"data": []}), "a JSON object"),
        (lambda: Run(seed=-1), "`run.seed` must be at least 0"),
        (lambda: Run(seed=True), "whole number"),
        (lambda: Treatment("explicit_v", strength=float("nan")), "`treatment.strength`"),
        (lambda: Treatment("explicit_v", strength=float("inf")), "finite"),
        (lambda: Training(weight_decay=float("inf")), "finite"),
        (lambda: Training(warm_up_epochs=31), "at most the 30 epochs"),
        (lambda: Treatment("none", "arora", strength=1, law="inverted"), "`treatment.law` must be 'paper', since"),
        (lambda: Treatment("drop_key", span=3), "`treatment.span` must be 1, since it changes nothing here"),
        (lambda: Treatment("none", "implicit", extra_dropout=0.5), "`treatment.extra_dropout`"),
        (lambda: Treatment(decreasing=True), "`treatment.decreasing`"),
        (lambda: Execution(threads=0), "at least 1"),
        (lambda: Execution(checkpoint_seconds=-1), "at least 0"),
        (lambda: Treatment("explicit_v"), "above 0 with a penalty"),
        (lambda: Treatment(strength=1e-3), "0 without one. Got 0.001 for none+none"),
        (lambda: Treatment(rate=1.0), "below 1"),
        (lambda: Treatment("drop_kee"), "'drop_key'"),
        (lambda: Model(width=10, heads=3), "a divisor of the width 10"),
        (lambda: Training(batch=0), "`training.batch` must be at least 1"),
        (lambda: Training(learning_rate=0), "above 0"),
        (lambda: Data(label_noise=1.5), "from 0 to 1"),
        (lambda: Execution(threads="2"), "`execution.threads`"),
        (lambda: next(treatments("explict_v+explicit", [1])), "did you mean explicit_v?"),
        (lambda: paper_numbers("table9"), "one of table1"),
    ],
)
def test_a_setting_that_makes_no_sense_is_an_error_that_names_it(make, words: str) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert words in str(error.value)


def test_rows_are_named_as_in_the_paper_with_what_differs_in_brackets() -> None:
    assert Treatment("drop_key", "implicit").row == "drop_key+implicit"
    special = Treatment("explicit_av", "explicit", strength=1, law="bernoulli", rate=0.3, reduction="sample")
    assert special.row == "explicit_av+explicit [bernoulli, p = 0.3, token sums]"


def test_a_configuration_is_a_run_without_its_seed_and_split() -> None:
    run = Run(Data(split=4), seed=7)
    assert run.configuration == replace(run, seed=0, data=Data())


def test_a_table_has_the_papers_rows_the_exact_laws_and_the_controls() -> None:
    rows = {treatment.row for treatment in paper_treatments([1e-3])}
    exact = {f"{row} [{law}]" for row in EXPLICIT for law in ("bernoulli", "inverted")}
    assert rows == {*PAPER_ROWS, *CONTROLS} | exact
    assert set(paper_numbers("table1")) == set(PAPER_ROWS)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_file_makes_runs_that_differ(name: str) -> None:
    (experiment,) = load_experiments(f"experiments/{name}.py")
    assert experiment.name == name
    assert len({run.key for run in experiment.runs}) == len(experiment.runs)
    assert set(experiment.paper) <= set(experiment.rows)
    assert set(experiment.paper_cells) <= set(experiment.rows)


def test_table_5_is_the_papers_grid_of_rates_and_strengths_under_the_recipe_of_table_1() -> None:
    (one,), (five,) = (load_experiments(f"experiments/table{number}.py") for number in (1, 5))
    grid = {1e-3, 5e-3, 1e-4, 5e-4}
    for row in five.rows:
        own = [run for run in five.runs if run.row == row]
        pairs = {(run.treatment.strength, run.training.learning_rate) for run in own}
        assert pairs == {(strength, rate) for strength in grid for rate in grid}
        (likewise,) = {run.configuration for run in one.runs if run.row == row}
        for run in own:
            treatment = replace(run.treatment, strength=likewise.treatment.strength)
            training = replace(run.training, learning_rate=likewise.training.learning_rate)
            assert replace(run, treatment=treatment, training=training).configuration == likewise


def test_an_experiment_file_that_is_none_says_so(tmp_path) -> None:
    with pytest.raises(InputError, match="not there"):
        load_experiments(tmp_path / "nothing.py")
    with pytest.raises(InputError, match="which is a folder"):
        load_experiments(tmp_path)
    for content, words in (
        ("x = 1", "without one"),
        ("def experiment(): return 3", "returns an Experiment"),
        ("x = 1\nx = 1 / 0", "line 2: ZeroDivisionError"),
        ("x = 1\n\ndef experiment(): return x.y", "line 3: AttributeError"),
        ("def experiment(:", "line 1"),
    ):
        file = tmp_path / f"wrong{len(content)}.py"
        file.write_text(content)
        with pytest.raises(InputError, match=words):
            load_experiments(file)
    with pytest.raises(InputError, match="at least one run"):
        Experiment("empty", "", (), "none+none")
    with pytest.raises(InputError, match="baseline"):
        Experiment("one", "", (Run(),), "none+implicit")
