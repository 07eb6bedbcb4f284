"""Selection, intervals and paired differences against values computed by hand and by scipy."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from explicit_dropout import InputError
from explicit_dropout.lab.config import Data, Run, Training, Treatment
from explicit_dropout.lab.experiment import Experiment
from explicit_dropout.lab.report import stopping
from explicit_dropout.lab.report.stopping import stopping_table
from explicit_dropout.lab.report.tables import records, tables
from explicit_dropout.lab.rows import named, treatments
from explicit_dropout.lab.statistics import Estimate, analyse, differences, edges, grids, holm, repetition
from explicit_dropout.lab.store import SPREAD
from explicit_dropout.lab.sweep import select
from synthetic_sweep import experiment

fractions = st.floats(0.01, 0.99)
samples = st.lists(fractions, min_size=2, max_size=12).filter(lambda values: np.std(values) > 1e-6)


def scored(run, validation, test=None, **more):
    """A finished run with these numbers."""
    test = validation if test is None else test
    return run, {"validation": {"accuracy": validation}, "test": {"accuracy": test}, **more}


def small(
    rows=("none+implicit", "explicit_v+explicit"), seeds=range(3), rates=(1e-3, 1e-2), strengths=(1e-3,), **fields
):
    return experiment(rows, seeds, rates, strengths, **fields)


def of(made, row, rate=None, seed=None):
    """The runs of an experiment in a row, at a learning rate, with a seed."""
    return [
        run
        for run in made.runs
        if run.row == row and rate in (None, run.training.learning_rate) and seed in (None, run.seed)
    ]


# ------------------------------------------------------------------------------------------------ one sample


def test_mean_sd_and_interval_are_those_computed_by_hand():
    estimate = Estimate((0.90, 0.92, 0.94))
    assert estimate.mean == pytest.approx(0.92)
    assert estimate.sd == pytest.approx(0.02)  # √((0.02² + 0 + 0.02²) / 2)
    half = 4.302652729911275 * 0.02 / math.sqrt(3)  # the 97.5 % point of t with 2 degrees of freedom, from a table
    assert estimate.interval() == pytest.approx((0.92 - half, 0.92 + half))


@given(samples)
@settings(max_examples=60, deadline=None)
def test_intervals_and_p_values_are_scipys(values):
    estimate = Estimate(tuple(values))
    theirs = stats.ttest_1samp(values, 0.0)
    assert estimate.p == pytest.approx(theirs.pvalue, rel=1e-6, abs=1e-14)
    bounds = theirs.confidence_interval(0.95)
    assert estimate.interval() == pytest.approx((bounds.low, bounds.high), rel=1e-9)


def test_one_value_has_no_sd_and_none_has_no_mean():
    assert Estimate((0.5,)).mean == 0.5
    assert Estimate((0.5,)).sd is Estimate((0.5,)).interval() is Estimate((0.5,)).p is None
    assert Estimate().mean is Estimate().sd is Estimate().interval() is None


def test_values_that_differ_by_rounding_alone_prove_nothing():
    """0.84 − 0.80 and 0.85 − 0.81 are the same difference; their sd of 1e-17 must not become p = 0."""
    estimate = Estimate((0.84 - 0.80, 0.85 - 0.81, 0.86 - 0.82))
    assert estimate.sd == 0
    assert estimate.interval() is None
    assert estimate.p is None


@given(samples)
@settings(max_examples=40, deadline=None)
def test_an_interval_holds_its_mean_and_shrinks_with_its_level(values):
    estimate = Estimate(tuple(values))
    wide, narrow = estimate.interval(0.99), estimate.interval(0.8)
    assert wide[0] < narrow[0] < estimate.mean < narrow[1] < wide[1]


def test_an_interval_holds_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(0)
    drawn = generator.normal(0.8, 0.01, size=(2000, 5))
    hit = [low <= 0.8 <= high for low, high in (Estimate(tuple(row)).interval() for row in drawn)]
    assert np.mean(hit) == pytest.approx(0.95, abs=0.015)


# ------------------------------------------------------------------------------------------------ Holm


def test_holm_is_the_example_computed_by_hand():
    """Sorted 0.005, 0.01, 0.03, 0.04, times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04, of which the last may not fall."""
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})


def test_comparisons_that_are_still_to_come_count():
    assert holm({"a": 0.01}, family=5) == {"a": pytest.approx(0.05)}
    with pytest.raises(InputError, match="family"):
        holm({"a": 0.1, "b": 0.2}, family=1)


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=10), st.integers(0, 5))
def test_holm_only_raises_keeps_the_order_and_lies_between_none_and_bonferroni(values, extra):
    named = {str(i): p for i, p in enumerate(values)}
    family = len(values) + extra
    adjusted = holm(named, family)
    for name, p in named.items():
        assert p <= adjusted[name] <= min(1, family * p)
    ranked = sorted(named, key=named.__getitem__)
    assert all(adjusted[a] <= adjusted[b] for a, b in pairwise(ranked))


@given(st.lists(st.floats(1e-9, 1), min_size=1, max_size=6), st.floats(1e-9, 1))
def test_what_is_significant_stays_so_when_a_planned_comparison_arrives(values, late):
    named = {str(i): p for i, p in enumerate(values)}
    before = holm(named, family=len(values) + 1)
    after = holm({**named, "late": late})
    assert all(after[name] <= before[name] + 1e-12 for name in named)


# ------------------------------------------------------------------------------------------------ selection


def test_the_configuration_with_the_best_mean_on_validation_is_chosen_whatever_its_test_score():
    made = small()
    row = "explicit_v+explicit"
    results = [scored(run, 0.80, 0.99) for run in of(made, row, 1e-3)]
    results += [scored(run, 0.82, 0.70) for run in of(made, row, 1e-2)]
    found = analyse(made, results)[row]
    assert found.chosen.run.training.learning_rate == 1e-2
    assert found.test.values == (0.70, 0.70, 0.70)


def test_a_configuration_with_one_lucky_seed_is_not_preferred():
    made = small()
    row = "explicit_v+explicit"
    results = [scored(run, 0.80) for run in of(made, row, 1e-3)]
    results += [scored(of(made, row, 1e-2, seed=0)[0], 0.99)]
    found = analyse(made, results)[row]
    assert found.chosen.run.training.learning_rate == 1e-3
    assert found.state == "4 of 6 runs"
    assert not found.complete


def test_equal_means_go_to_the_configuration_named_first():
    made = small(rates=(1e-2, 1e-3))
    found = analyse(made, [scored(run, 0.8) for run in made.runs])
    assert all(row.chosen.run.training.learning_rate == 1e-2 for row in found.rows)


def test_means_that_differ_by_rounding_alone_are_equal():
    made = small(rates=(1e-2, 1e-3))
    scores = {1e-2: (0.3, 0.2, 0.1), 1e-3: (0.1, 0.2, 0.3)}
    means = [float(np.mean(values)) for values in scores.values()]
    assert means[0] < means[1]  # by rounding
    found = analyse(made, [scored(run, scores[run.training.learning_rate][run.seed]) for run in made.runs])
    assert all(row.chosen.run.training.learning_rate == 1e-2 for row in found.rows)


def test_a_run_without_a_finite_score_leaves_its_configuration_behind_and_is_counted():
    made = small()
    row = "explicit_v+explicit"
    results = [scored(run, 0.80) for run in of(made, row, 1e-3)]
    results += [scored(run, math.nan if run.seed == 1 else 0.99) for run in of(made, row, 1e-2)]
    found = analyse(made, results)[row]
    assert found.chosen.run.training.learning_rate == 1e-3
    assert found.diverged == 1
    for broken in (None, math.inf, "0.9", True):
        lost = analyse(made, [scored(run, broken) for run in of(made, row)])[row]
        assert lost.chosen is None
        assert lost.state == "no run has a finite score"


def test_a_diverged_run_counts_with_the_score_that_it_has():
    made = small(rates=(1e-3,))
    results = [scored(run, 0.1 if run.seed == 0 else 0.9, diverged=run.seed == 0) for run in made.runs]
    found = analyse(made, results)["none+implicit"]
    assert found.test.values == (0.1, 0.9, 0.9)
    assert found.diverged == 1
    shown, *_, grid = tables(made, results)
    assert {line["row"]: line["runs"] for line in shown.rows}["none+implicit"] == "3 of 3, 1 diverged"
    assert grid.rows[0]["n"] == "3 of 3, 1 diverged"


def test_rows_say_how_far_they_are():
    made = small(rates=(1e-3,))
    done = [scored(run, 0.8) for run in of(made, "none+implicit") if run.seed < 2]
    failed = [of(made, "explicit_v+explicit", seed=0)[0].key, done[0][0].key, "of another experiment"]
    found = analyse(made, done, failed)
    assert found["none+implicit"].state == "2 of 3 seeds"
    assert found["none+implicit"].failed == 0  # a run that has finished since has not failed
    missing = found["explicit_v+explicit"]
    assert (missing.state, missing.test.mean, missing.failed) == ("1 of 3 runs failed", None, 1)
    assert analyse(made, done)["explicit_v+explicit"].state == "not run"
    begun = [run.key for run in made.runs if run.seed == 1]
    assert analyse(made, done, failed, begun)["explicit_v+explicit"].state == "begun"
    assert (found.finished, found.planned, found.failed, found.complete) == (2, 6, 1, False)
    complete = analyse(made, [scored(run, 0.8) for run in made.runs])
    assert complete.complete
    assert all(row.state == "" for row in complete.rows)


def test_the_numbers_of_the_paper_never_stand_in():
    made = small(rates=(1e-3,))
    assert made.paper
    assert all(row.test.n == 0 for row in analyse(made, []).rows)


def test_runs_of_others_are_left_alone_and_no_run_counts_twice():
    made = small(rates=(1e-3,))
    results = [scored(run, 0.8) for run in made.runs]
    stranger = scored(replace(made.runs[0], seed=77), 0.1)
    assert analyse(made, [*results, *results, stranger]) == analyse(made, results)


def test_pooled_rows_are_one_whose_rate_validation_chooses():
    rates = (0.1, 0.2, 0.5)
    names = [named("none+implicit", rate=rate) for rate in rates]
    made = small(("none+none",), rates=(1e-3,), baseline="none+none")
    some = [t for rate in rates for t in treatments("none+implicit", [0.0], rate=rate)]
    runs = [replace(run, treatment=treatment) for run in made.runs for treatment in some]
    made = replace(made, runs=(*made.runs, *runs), pooled={"none+implicit [p chosen]": tuple(names)})
    assert made.rows == ("none+none", "none+implicit [p chosen]")
    scores = {0.1: (0.7, 0.9), 0.2: (0.8, 0.6), 0.5: (0.75, 0.95)}  # validation, test
    found = analyse(made, [scored(run, *scores[run.treatment.rate]) for run in made.runs])
    pooled = found["none+implicit [p chosen]"]
    assert pooled.chosen.run.treatment.rate == 0.2
    assert pooled.test.mean == pytest.approx(0.6)
    assert (found.planned, found.finished, pooled.planned) == (12, 12, 9)
    assert {run.treatment.rate for run in select([made], ["none+implicit [p chosen]"])} == set(rates)
    assert {run.row for run in select([made], [names[0]])} == {names[0]}
    shown = tables(made, [scored(run, 0.8) for run in made.runs])[0]
    assert {line["row"]: line["runs"] for line in shown.rows}["none+implicit [p chosen]"] == "9 of 9"
    for wrong in ((names[0], names[0]), ("none+other",)):
        with pytest.raises(InputError, match="pooled"):
            replace(made, pooled={"both": wrong})


# ------------------------------------------------------------------------------------------------ paired differences


def pairs_of(ours, theirs):
    made = small(rates=(1e-3,), seeds=range(len(ours)))
    results = [scored(run, theirs[run.seed]) for run in of(made, "none+implicit")]
    results += [scored(run, ours[run.seed]) for run in of(made, "explicit_v+explicit")]
    return analyse(made, results)["explicit_v+explicit"].comparison


@given(st.lists(st.tuples(fractions, fractions), min_size=2, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_paired_test_is_scipys(couples):
    ours, theirs = zip(*couples, strict=True)
    comparison = pairs_of(ours, theirs)
    apart = np.subtract(ours, theirs)
    if np.std(apart) < 1e-9:
        return
    expected = stats.ttest_rel(ours, theirs)
    assert comparison.difference.p == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-14)
    assert comparison.holm == pytest.approx(expected.pvalue, rel=1e-5, abs=1e-14)  # the only comparison
    bounds = expected.confidence_interval(0.95)
    assert comparison.difference.interval() == pytest.approx((bounds.low, bounds.high), rel=1e-6, abs=1e-12)


def test_what_all_rows_share_does_not_widen_the_interval():
    """The point of pairing: seeds that are hard for both rows cancel out."""
    hard = np.array([0.0, 0.05, -0.05, 0.08, -0.02])
    comparison = pairs_of(0.82 + hard + np.array([1, -1, 1, -1, 0]) * 1e-3, 0.80 + hard)
    low, high = comparison.difference.interval()
    assert 0.018 < low < 0.02 < high < 0.022
    assert comparison.pairs == ((0, 0), (1, 0), (2, 0), (3, 0), (4, 0))


def test_only_pairs_with_the_same_seed_and_split_are_compared():
    data = Data("digits")
    made = small(rates=(1e-3,), seeds=range(2))
    runs = tuple(replace(run, data=replace(data, split=split)) for split in (0, 1) for run in made.runs)
    made = replace(made, runs=runs)
    base = [scored(run, 0.5) for run in of(made, "none+implicit") if (run.seed, run.data.split) != (1, 1)]
    ours = [scored(run, 0.6 + 0.1 * run.seed) for run in of(made, "explicit_v+explicit") if run.data.split == 1]
    found = analyse(made, base + ours)["explicit_v+explicit"]
    assert found.comparison.pairs == ((0, 1),)
    assert found.comparison.difference.mean == pytest.approx(0.1)
    assert found.comparison.difference.sd is found.comparison.holm is None
    assert found.state == "2 of 4 repetitions"


def test_holm_counts_every_row_of_the_table():
    rows = ("none+implicit", "none+none", "drop_key+implicit", "explicit_v+explicit")
    made = small(rows, rates=(1e-3,), seeds=range(4))
    chance = random.Random(0)
    results = [scored(run, 0.8 + 0.01 * chance.random()) for run in made.runs if run.row != "none+none"]
    found = analyse(made, results)
    assert found["none+none"].comparison is found.baseline.comparison is None
    tested = {row.name: row.comparison.difference.p for row in found.rows if row.comparison}
    assert {n: found[n].comparison.holm for n in tested} == holm(tested, family=3)


@given(st.permutations(range(6)), st.floats(-0.2, 0.2))
@settings(max_examples=30, deadline=None)
def test_neither_the_order_of_results_nor_a_common_shift_changes_a_difference(order, shift):
    made = small(rates=(1e-3,))
    values = [0.71, 0.74, 0.69, 0.72, 0.78, 0.75]
    results = [scored(run, value) for run, value in zip(made.runs, values, strict=True)]
    moved = [scored(run, value + shift) for run, value in zip(made.runs, values, strict=True)]
    plain = analyse(made, results)["explicit_v+explicit"].comparison
    mixed = analyse(made, [moved[i] for i in order])["explicit_v+explicit"].comparison
    assert mixed.difference.mean == pytest.approx(plain.difference.mean)
    assert mixed.holm == pytest.approx(plain.holm, rel=1e-6)


# ------------------------------------------------------------------------------------------------ grids and gaps


def test_a_grid_has_a_cell_for_every_strength_and_learning_rate():
    made = small(rates=(1e-3, 1e-2), strengths=(1e-4, 1e-3, 1e-2))
    found = analyse(made, [scored(run, 0.8) for run in made.runs if run.seed < 2])
    (grid,) = grids(found["explicit_v+explicit"])
    assert (grid.strengths, grid.learning_rates) == ((1e-4, 1e-3, 1e-2), (1e-3, 1e-2))
    assert {place: (c.validation.n, c.planned) for place, c in grid.cells.items()} == {
        (strength, rate): (2, 3) for strength in grid.strengths for rate in grid.learning_rates
    }
    (strip,) = grids(found["none+implicit"])
    assert strip.strengths == (0.0,)


def test_a_choice_at_the_end_of_the_grid_is_told():
    made = small(rates=(1e-3,), strengths=(1e-4, 1e-3, 1e-2))
    for best, told in ((1e-4, ["λ 0.0001"]), (1e-3, []), (1e-2, ["λ 0.01"])):
        found = analyse(made, [scored(run, 0.9 if run.treatment.strength == best else 0.8) for run in made.runs])
        assert edges(found["explicit_v+explicit"]) == told
    assert edges(found["none+implicit"]) == edges(analyse(made, []).baseline) == []


def test_a_rate_that_is_chosen_at_an_end_is_told_and_stands_among_the_results():
    rates, pool = (0.1, 0.2, 0.3), "none+implicit [p chosen]"
    made = Experiment(
        "rates",
        "Rates",
        tuple(Run(treatment=Treatment(feed_forward="implicit", rate=p), seed=s) for p in rates for s in range(3)),
        baseline=pool,
        pooled={pool: tuple(Treatment(feed_forward="implicit", rate=p).row for p in rates)},
    )
    for best, told in ((0.1, ["p 0.1"]), (0.2, []), (0.3, ["p 0.3"])):
        found = analyse(made, [scored(run, 0.9 if run.treatment.rate == best else 0.8) for run in made.runs])
        assert edges(found[pool]) == told
        assert [record["others"] for record in records(found)] == [f"rate {best:g}"]


# ------------------------------------------------------------------------------------------------ stopping early


def curve(run, scores):
    """A finished run that was validated after every second epoch."""
    lines = []
    for epoch, score in enumerate(scores, start=1):
        lines += [{"epoch": 2 * epoch - 1}, {"epoch": 2 * epoch, "validation": {"accuracy": score}}]
    return (*scored(run, scores[-1]), lines)


def test_a_row_is_stopped_at_its_best_mean_over_strengths_and_epochs():
    made = experiment(("none+none", "explicit_v+explicit"), range(3), (1e-3,), (1e-3, 1e-1), baseline="none+none")
    curves = {0.0: (0.5, 0.7, 0.6), 1e-3: (0.5, 0.8, 0.6), 1e-1: (0.5, 0.6, 0.7)}
    found = analyse(
        made, [curve(run, [s + 0.01 * run.seed for s in curves[run.treatment.strength]]) for run in made.runs]
    )
    row = found["explicit_v+explicit"]
    assert row.chosen.run.treatment.strength == 1e-1  # by what it has at the end
    stop = stopping.best(row)
    assert (stop.configuration.run.treatment.strength, stop.epoch) == (1e-3, 4)
    assert stop.estimate.mean == pytest.approx(0.81)
    none, explicit = stopping_table(found, 3).rows
    assert (none["end"], none["early"], none["epoch"]) == ("61.00 ± 1.00", "71.00 ± 1.00", "4")
    assert (explicit["strength"], explicit["early_strength"], explicit["early"]) == ("0.1", "0.001", "81.00 ± 1.00")
    assert (explicit["gain"], explicit["beside"], none["beside"]) == ("+10.00", "+10.00", "–")
    assert stopping_table(found, 4).rows == ()


def test_an_epoch_that_only_some_runs_were_validated_after_is_no_place_to_stop():
    made = experiment(("none+none",), range(2), (1e-3,), (1e-3,), baseline="none+none")
    first, second = made.runs
    found = analyse(made, [curve(first, [0.9, 0.5, 0.6]), curve(second, [0.9, 0.5])])
    assert stopping.best(found["none+none"]).epoch == 2
    assert (
        stopping.best(analyse(made, [scored(run, 0.5) for run in made.runs])["none+none"]) is None
    )  # no curves at all


# ------------------------------------------------------------------------------------------------ grids


def test_settings_beyond_the_grid_make_grids_of_their_own():
    made = small(("none+implicit",), rates=(1e-3,))
    heavy = tuple(replace(run, training=replace(run.training, weight_decay=0.1)) for run in made.runs)
    found = analyse(replace(made, runs=made.runs + heavy), [])
    assert [grid.label for grid in grids(found.baseline)] == ["weight decay 0", "weight decay 0.1"]


def test_runs_are_told_apart_by_what_differs():
    runs = [Run(training=Training(epochs=e), data=Data(label_noise=n)) for e, n in ((1, 0.0), (2, 0.5))]
    assert differences(runs) == ["label noise 0, epochs 1", "label noise 0.5, epochs 2"]
    assert differences(runs, without=("data.label_noise", "training.epochs")) == ["", ""]
    assert differences([]) == []


def test_repetitions_have_the_name_of_what_they_differ_in():
    run = Run()
    splits = [replace(run, data=Data(split=i)) for i in range(2)]
    assert repetition([run, replace(run, seed=1)]) == "seeds"
    assert repetition(splits) == "splits"
    assert repetition([splits[0], replace(splits[1], seed=1)]) == "repetitions"


def test_the_gap_is_taken_run_by_run():
    made = small(rates=(1e-3,))
    results = [
        scored(run, 0.8, 0.8 + 0.01 * run.seed, train={"accuracy": 0.9 + 0.01 * run.seed, "loss": 0.1})
        for run in of(made, "none+implicit")
    ]
    chosen = analyse(made, results).baseline.chosen
    assert chosen.gap("accuracy").values == pytest.approx((0.1, 0.1, 0.1))
    assert chosen.gap("loss").n == 0  # the test loss is not there
    assert chosen.estimate("train", "loss").n == 3


@pytest.mark.parametrize("metric", ["accuracy", "mean_average_precision"])
def test_training_scores_of_the_first_examples_are_left_out_of_a_mean_over_classes(metric):
    made = small(rates=(1e-3,), metric=metric)
    runs = of(made, "none+implicit")

    def chosen(examples):
        told = [{"train_examples": SPREAD} if run.seed < examples else {} for run in runs]
        parts = [{part: {metric: 0.5, "loss": 1.0} for part in ("validation", "test", "train")} for _ in runs]
        results = [(run, a | b) for run, a, b in zip(runs, parts, told, strict=True)]
        return analyse(made, results).baseline.chosen

    for spread in range(4):
        shown = 3 if spread == 3 or metric == "accuracy" else 0
        found = chosen(spread)
        assert found.spread == (spread == 3)
        assert found.estimate("train", metric).n == found.estimate("train", "loss").n == found.gap(metric).n == shown
        assert found.estimate("test", "loss").n == 3
