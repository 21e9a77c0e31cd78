"""Planted truth through a study's own path, from rows of runs to verdicts on the page."""

from __future__ import annotations

import numpy as np
import pytest

from study_help import simulated, study
from trew.study.analysis import regimes, tuning
from trew.study.report import describe, page


def finals(rng, *, sd, shifts):
    """Final accuracies of ten seeds, whose effects all algorithms share."""
    seeds = 0.6 + 0.05 * rng.normal(size=10)
    return {name: seeds + shift + sd * rng.normal(size=10) for name, shift in shifts.items()}


def test_planted_differences_are_found_and_equal_algorithms_are_not_told_apart(tmp_path):
    plan, rng = study(tmp_path), np.random.default_rng(0)
    false = found = held = 0
    for _ in range(60):
        given = finals(rng, sd=0.01, shifts={"clip": 0.0, "other": 0.04, "same": 0.0})
        (regime,) = regimes(simulated(tmp_path, given, plan))
        versus = {v.name: v for v in regime.final.versus}
        found += versus["other"].verdict == "better"
        false += versus["same"].verdict != "not told apart"
        held += all(
            versus[n].difference.low <= d <= versus[n].difference.high for n, d in (("other", 0.04), ("same", 0))
        )
    assert found >= 57
    assert false <= 7  # of 60 at 5 % family-wise: 3 ± 1.7
    assert held >= 52


def test_one_algorithm_under_two_names_is_equal(tmp_path):
    given = finals(np.random.default_rng(1), sd=0.02, shifts={"clip": 0.0, "other": 0.0})
    (regime,) = regimes(simulated(tmp_path, {**given, "same": given["clip"]}))
    assert {v.name: v.verdict for v in regime.final.versus}["same"] == "equal"


def test_a_failed_run_stays_in_with_its_final_value(tmp_path):
    given = finals(np.random.default_rng(2), sd=0.005, shifts={"clip": 0.0, "other": 0.0, "same": 0.0})
    results = simulated(tmp_path, given)
    one = next(run for run in results["runs"] if run["algorithm"] == "other")
    one |= {"failed": "numbers not finite", "final": 0.0}
    (regime,) = regimes(results)
    means = {group.name: group.mean.mean for group in regime.final.groups}
    assert means["other"] == pytest.approx(np.sum(given["other"][1:]) / 10, abs=1e-5)
    assert regime.failures("other") == {"numbers not finite": 1}
    assert "1 numbers not finite" in describe(results)


def test_few_seeds_are_said_to_show_nothing(tmp_path):
    given = finals(np.random.default_rng(3), sd=0.001, shifts={"clip": 0.0, "other": 0.3, "same": 0.0})
    results = simulated(tmp_path, {name: of[:3] for name, of in given.items()})
    (regime,) = regimes(results)
    assert {v.verdict for v in regime.final.versus} == {"not told apart"}
    text = "\n".join(page(results))
    assert "**This is a part of the study**: 3 of 10 seeds have runs, 9 of 30 runs in all." in text
    assert "verdicts before the last run are looks on the way" in text
    assert "3 pairs cannot show any difference" in text


def test_regimes_without_runs_are_named(tmp_path):
    plan = study(tmp_path, regimes={"on": {}, "stale": {"rollout.stale_steps": 2}})
    given = finals(np.random.default_rng(4), sd=0.01, shifts={"clip": 0.0, "other": 0.0, "same": 0.0})
    text = "\n".join(page(simulated(tmp_path, given, plan)))
    assert "10 of 10 seeds have runs, 30 of 90 runs in all; nothing of the regimes on, stale is reported yet." in text
    assert "This is a part" not in "\n".join(page(simulated(tmp_path, given, study(tmp_path))))


def test_regimes_with_fewer_seeds_are_named(tmp_path):
    """Also where another regime has all of them."""
    given = finals(np.random.default_rng(4), sd=0.01, shifts={"clip": 0.0, "other": 0.0, "same": 0.0})
    results = simulated(tmp_path, given, study(tmp_path, regimes={"off": {}, "stale": {"rollout.stale_steps": 2}}))
    few = [{**row, "regime": "stale"} for row in results["runs"] if row["seed"] <= 2]
    text = "\n".join(page({**results, "runs": [{**row, "regime": "off"} for row in results["runs"]] + few}))
    assert "**This is a part of the study**: 10 of 10 seeds have runs (of stale 2), 36 of 60 runs in all." in text


def test_tasks_algorithms_and_cells_without_runs_are_said_to_be_missing(tmp_path):
    """Where every regime has all of its seeds, as after ``--only sums``, too."""
    given = finals(np.random.default_rng(4), sd=0.01, shifts={"clip": 0.0, "other": 0.0, "same": 0.0})
    results = simulated(tmp_path, given, study(tmp_path, tasks={"sums": {}, "guess": {}}))
    told = "**This is a part of the study**: 10 of 10 seeds have runs, {} of 60 runs in all{}."
    assert told.format(30, "; nothing of the task guess is reported yet") in "\n".join(page(results))
    both = results["runs"] + [{**row, "task": "guess"} for row in results["runs"] if row["algorithm"] == "clip"]
    assert told.format(40, "") in "\n".join(page({**results, "runs": both}))
    del given["same"]
    results = simulated(tmp_path, given, study(tmp_path))
    assert "20 of 30 runs in all; nothing of the algorithm same is reported yet." in "\n".join(page(results))


def test_without_a_pair_nothing_is_compared_and_the_page_says_why(tmp_path):
    results = simulated(tmp_path, {"clip": [0.5], "other": [0.6], "same": [0.6]})
    (regime,) = regimes(results)
    assert regime.final is None
    assert "no algorithm has two seeds in common with the baseline" in "\n".join(page(results))
    results = simulated(tmp_path, {"other": [0.6, 0.6]})
    assert "no run of the baseline clip has ended" in "\n".join(page(results))


def test_completions_until_a_share_of_the_best_count_a_run_that_never_gets_there_with_all_of_them(tmp_path):
    results = simulated(tmp_path, {"clip": [0.8] * 3, "other": [0.3] * 3, "same": [0.5] * 3})
    (regime,) = regimes(results)
    assert regime.reached("clip") == [40.0, 60.0]  # of 0.8: 0.4 and 0.64
    assert regime.reached("other") == [100.0, 100.0]
    assert regime.reached("same") == [60.0, 100.0]


def test_where_no_algorithm_gains_there_is_no_share_of_the_best_gain(tmp_path):
    """Every run ends below its start, where it has half of a loss, too."""
    results = simulated(tmp_path, {name: [0.1] * 3 for name in ("clip", "other", "same")})
    assert any(line.startswith("| clip | – | – | 0.5 |") for line in page(results))
    higher = simulated(tmp_path, {name: [0.8] * 3 for name in ("clip", "other", "same")})
    gained = [{**row, "task": "guess"} for row in higher["runs"]]
    (regime,) = regimes({**results, "runs": results["runs"] + gained})
    assert regime.reached("clip") == [40.0, 60.0]  # of the task guess alone


def test_the_page_shows_what_was_fixed_chosen_and_changed(tmp_path):
    given = finals(np.random.default_rng(4), sd=0.01, shifts={"clip": 0.0, "other": 0.0, "same": 0.0})
    results = simulated(tmp_path, given) | {"changed": ['after 4 runs: claims was ["b"] and is ["c"]']}
    text = "\n".join(page(results, images="images/"))
    for wanted in ("**Question.** Which is better?", "Expected: none is better than clip", results["digest"],
                   "**Changed** after 4 runs", "learner.lr from 0.001, 0.01 by 2 tuning seeds", "| sums/off/clip |",
                   "0.01*", "images/study-planted-off-forest.svg"):  # fmt: skip
        assert wanted in text
    assert all(t.values[t.best] == 0.01 for t in tuning(results).values())
