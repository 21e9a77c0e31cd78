"""results.json holds one run on a line and reads back as it was; the page is made from that file alone."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import numpy as np
import pytest

from study_help import row, simulated, study
from trew.eval.seeds import pairs_needed
from trew.eval.statistics import Interval
from trew.runs.report.shades import ShadedRow, shades
from trew.study.analysis import FIGURES, equal_budget, jointly, regimes, spreads
from trew.study.choice import choose
from trew.study.design import Cell
from trew.study.history import History
from trew.study.pictures import _profiles, _series, draw
from trew.study.report import describe, page, write_report
from trew.study.results import assemble, text
from trew.study.rows import final_of
from trew.study.tables import interval_text

NS = "{http://www.w3.org/2000/svg}"


def test_results_read_back_and_the_page_is_the_same(tmp_path):
    rng = np.random.default_rng(0)
    found = simulated(tmp_path, {name: 0.5 + 0.05 * rng.normal(size=4) for name in ("clip", "other", "same")})
    written = text(found)
    assert json.loads(written) == found
    assert sum(line.startswith('{"task"') for line in written.splitlines()) == len(found["runs"] + found["tuning"])
    assert list(page(json.loads(written))) == list(page(found))
    write_report(found, tmp_path)
    for name in draw(found):
        assert (tmp_path / name).read_text().startswith("<svg")
        assert name in (tmp_path / "report.md").read_text()


def test_algorithms_that_sample_more_in_a_step_are_compared_at_equal_completions(tmp_path):
    """``greedy`` learns from each completion what ``clip`` does, and takes twice as many in a step: at its last step it
    looks better."""
    rng = np.random.default_rng(0)
    rows, steps = [], (0, 4, 6, 8, 10)
    for seed in range(1, 11):
        pace = 0.003 + 0.0002 * rng.normal()
        for name, times in (("clip", 1), ("greedy", 2), ("same", 1)):
            counts = tuple(10 * times * step for step in steps)
            curve = tuple(0.2 + pace * count for count in counts)
            more = {"completions": counts, "tokens": tuple(2 * count for count in counts), "accuracy": curve}
            of = row(name, seed, 0, **more, area=float(np.trapezoid(curve, steps)) / 10)
            rows.append(replace(of, final=final_of(curve)))
    design = study(tmp_path, algorithms={"greedy": {"objective.preset": "dapo"}, "other": None})
    found = assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path))
    (regime,) = regimes(found)
    assert list(regime.whole) == ["greedy"]
    ends = {name: np.mean([r.final for r in of]) for name, of in regime.rows.items()}
    assert ends["greedy"] == pytest.approx(ends["clip"])
    assert {r.completions for of in regime.rows.values() for r in of} == {(0, 40, 60, 80, 100)}
    assert {r.tokens[-1] for r in regime.rows["greedy"]} == {200}
    assert {r.optimizer_steps for r in regime.rows["greedy"]} == {10}
    assert [r.area for r in regime.rows["greedy"]] == pytest.approx([r.area for r in regime.rows["clip"]])
    for comparison in (regime.final, regime.area):
        assert comparison is not None
        verdicts = {v.name: v for v in comparison.versus}
        assert abs(verdicts["greedy"].difference[0]) < 1e-9
        assert verdicts["greedy"].verdict not in ("better", "worse")
    told = next(line for line in page(found) if line.startswith("**Compared at equal completions**, 100 of each run"))
    assert f"`greedy` 200 (ends at {np.mean([r.final for r in regime.whole['greedy']]):.3f})" in told
    assert np.mean([r.final for r in regime.whole["greedy"]]) > ends["clip"] + 0.2
    assert "`same`" not in told
    assert all(r is r.within(100) for r in regime.rows["clip"])


def test_a_run_that_ended_early_does_not_shorten_the_others(tmp_path):
    rows = [row("clip", 1, 0.5), row("other", 1, 0.6, steps=(0, 4), accuracy=(0.2, 0.1), completions=(0, 40),
                                     tokens=(0, 80), error="NaN", failed="numbers not finite")]  # fmt: skip
    assert equal_budget(rows) == rows


def test_tasks_and_algorithms_with_their_own_number_of_steps_are_compared_at_equal_completions_too():
    """The task ``short`` has half of the steps, and ``brief`` samples half as much as the others in each task."""
    rows = []
    for task, share in (("sums", 1.0), ("short", 0.5)):
        for name, times, part in (("clip", 1, 1.0), ("greedy", 2, 1.0), ("brief", 1, 0.5)):
            steps = tuple(int(step * share * part) for step in (0, 4, 6, 8, 10))
            counts = tuple(10 * times * step for step in steps)
            rows.append(row(name, 1, 0.5, task=task, steps=steps, completions=counts))
    cut = equal_budget(rows)
    assert {(r.task, r.completions[-1]) for r in cut} == {("sums", 50), ("short", 20)}
    without = equal_budget([r for r in rows if r.algorithm != "brief"])
    assert {(r.task, r.completions[-1]) for r in without} == {("sums", 100), ("short", 50)}


def test_an_unfinished_tuning_compares_values_by_the_same_seeds_and_chooses_nothing(tmp_path):
    """By all runs of ``other`` 0.01 looks better; by the only seed that has run at both values, 0.001 does."""
    design = study(tmp_path)
    areas = {("clip", 0.001): (0.3, 0.3), ("clip", 0.01): (0.5, 0.5), ("same", 0.001): (0.4,),
             ("other", 0.001): (0.6, 0.1), ("other", 0.01): (0.4,)}  # fmt: skip
    rows = [
        row(name, seed, 0.5, value=value, area=area)
        for (name, value), of in areas.items()
        for seed, area in zip(design.tuning, of, strict=False)
    ]
    found = assemble(design, {}, choose(design, rows), rows, History.read(tmp_path))
    assert found["chosen"] == {"sums/off/clip": 0.01}
    lines = list(page(found))
    assert any(line.startswith("**Tuning is not complete**: 1 of these cells") for line in lines)
    table = {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| sums/")}
    assert table.keys() == {"sums/off/clip", "sums/off/other"}
    assert "| 0.300 | 0.500 | 0.01* |" in table["sums/off/clip"]
    assert "| 0.600 | 0.400 | open (0.001* by 1 of 2 seeds) |" in table["sums/off/other"]
    # In the picture too: the frame is in the row of clip, and other has none.
    frames = [r for r in ET.fromstring(draw(found)["study-planted-off-tuning.svg"]).iter(f"{NS}rect")
              if r.get("class") == "tc-whisker tc-s1"]  # fmt: skip
    assert len(frames) == 1
    assert lines[-1] == "Versions of trew: 1.0."
    assert not any("exploratory" in line for line in lines), "no run is reported"


def test_an_algorithm_that_fails_more_often_is_called_worse_by_that(tmp_path):
    """All runs end at the same accuracy; of one algorithm every run has failed."""
    rows = [row(name, seed, 0.5, failed="numbers not finite" if name == "other" else "")
            for name in ("clip", "other", "same") for seed in range(1, 11)]  # fmt: skip
    design = study(tmp_path)
    found = assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path))
    lines = list(page(found))
    held = lines[lines.index("Share of runs that did not fail:") :]
    verdicts = {name: next(line for line in held if line.startswith(f"| {name} ")) for name in ("other", "same")}
    # Wilson's of 0 and 10 of 10; Newcombe's at 97.5 % for two comparisons, √2 of their sides of z²/(n + z²) = 0.334;
    # 2 comparisons x McNemar's 2 / 2^10.
    assert "| 0.000 [0.000, 0.278] | -1.000 [-1.000, -0.527] | 0.004 |" in verdicts["other"]
    assert verdicts["other"].endswith("| worse |")
    assert verdicts["same"].endswith("| equal |")
    # Nothing is said of failures where there are none.
    whole = assemble(
        design, {}, {Cell("sums", "off", "clip"): 0.01}, [r for r in rows if not r.failed], History(tmp_path)
    )
    assert "Share of runs that did not fail:" not in list(page(whole))


def test_few_failures_more_are_not_told_apart_from_the_baseline(tmp_path):
    fails = {("clip", 1), ("other", 1), ("other", 2), ("other", 3)}
    rows = [row(name, seed, 0.5, failed="ended below its start" if (name, seed) in fails else "")
            for name in ("clip", "other", "same") for seed in range(1, 11)]  # fmt: skip
    design = study(tmp_path)
    (regime,) = regimes(assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path)))
    found = regime.held["other"]
    assert (found.share.mean, found.difference.mean, found.verdict) == (0.7, pytest.approx(-0.2), "not told apart")
    assert found.difference.low < -0.2 < 0 < found.difference.high
    assert found.p_value == 1.0  # two pairs changed: 2 comparisons x 2 / 2^2
    assert regime.held["clip"].difference is None


def test_completions_until_a_share_of_the_gain_start_at_the_start(tmp_path):
    """From 0.2 the best ends at 0.6: half of its gain is 0.4, and 80 % is 0.52. Curves rise evenly until step 6."""
    found = simulated(tmp_path, {"clip": [0.6] * 4, "other": [0.41] * 4, "same": [0.3] * 4})
    (regime,) = regimes(found)
    assert {name: regime.reached(name) for name in regime.rows} == {
        "clip": [40.0, 60.0], "other": [60.0, 100.0], "same": [100.0, 100.0],
    }  # fmt: skip


def test_a_run_that_failed_early_has_not_reached_anything_early(tmp_path):
    design = study(tmp_path)
    cut = {"steps": (0, 4), "accuracy": (0.2, 0.21), "completions": (0, 40), "tokens": (0, 80)}
    broken = {**cut, "error": "NaN", "failed": "numbers not finite"}
    rows = [row("clip", seed, 0.6) for seed in (1, 2)] + [row("other", seed, 0.21, **broken) for seed in (1, 2)]
    (regime,) = regimes(assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path)))
    assert regime.reached("other") == [100.0, 100.0]


def test_the_completions_that_are_compared_are_not_those_of_a_run_that_failed_early(tmp_path):
    design = study(tmp_path)
    more = {"completions": (0, 80, 120, 160, 200)}
    cut = {"steps": (0, 4), "accuracy": (0.2, 0.21), "completions": (0, 80), "tokens": (0, 80), "error": "NaN"}
    rows = [row("clip", seed, 0.6) for seed in (1, 2, 3)]
    rows += [row("other", seed, 0.6, **more) for seed in (1, 2)] + [row("other", 3, 0.21, **cut)]
    found = assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path))
    assert any(line.startswith("**Compared at equal completions**, 100 of each run. ") for line in page(found))


def test_gains_are_from_the_start_of_each_run(tmp_path):
    """Seed 2 begins where seed 1 is after its second evaluation: neither has gained anything there."""
    curves = {1: (0.25, 0.375, 0.5, 0.5, 0.5), 2: (0.375, 0.5, 0.625, 0.625, 0.625)}
    runs = [(name, seed) for name in ("clip", "other") for seed in curves]
    rows = [replace(row(name, seed, curves[seed][-1]), accuracy=curves[seed]) for name, seed in runs]
    design = study(tmp_path)
    (regime,) = regimes(assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path)))
    # Half of the gain of 0.25, at the second evaluation.
    assert regime.reached("clip") == [40.0, 60.0]
    assert regime.start() == 0.3125


def test_algorithms_with_equal_curves_are_named(tmp_path):
    finals = {"clip": [0.5, 0.6], "other": [0.4, 0.5], "same": [0.4, 0.5]}
    assert "The same curves, to the last bit, for every seed: `other`, `same`." in list(
        page(simulated(tmp_path, finals))
    )
    lines = list(page(simulated(tmp_path, finals | {"same": [0.4, 0.51]})))
    assert not any(line.startswith("The same curves") for line in lines)


def test_what_was_fixed_first_is_the_first_design_and_not_the_last(tmp_path):
    first = study(tmp_path)
    History.read(tmp_path).note(first, runs=0)
    now = study(tmp_path, tune={"learner.lr": [0.0001, 0.001, 0.01]})
    History.read(tmp_path).note(now, runs=7)
    found = simulated(tmp_path, {"clip": [0.5, 0.6], "other": [0.4, 0.5]}, now)
    text_of = "\n".join(page(found))
    assert f"(digest `{first.digest}`)" in text_of
    assert "learner.lr from 0.001, 0.01 by" in text_of
    assert f"* The digest is now `{now.digest}`." in text_of


def test_the_tuning_shows_how_far_the_choice_is_ahead(tmp_path):
    """0.01 leads by 0.1 and 0.3: 0.2, with a standard error of 0.1414 / √2."""
    design = study(tmp_path)
    areas = {0.001: (0.4, 0.4), 0.01: (0.5, 0.7)}
    rows = [row("clip", seed, 0.5, value=value, area=area) for value, of in areas.items()
            for seed, area in zip(design.tuning, of, strict=True)]  # fmt: skip
    found = assemble(design, {}, choose(design, rows), rows, History.read(tmp_path))
    assert any("| 0.01* | 0.2000 ± 0.1000 on 0.001 |" in line for line in page(found))


@pytest.mark.parametrize(("interval", "told"), [
    ((-0.0001, -0.0104, 0.0002), "+0.000 [-0.010, +0.000]"),
    ((0.0104, 0.0, 0.02), "+0.010 [+0.000, +0.020]"),
    ((0.5, float("nan"), float("nan")), "+0.500 [no interval]"),
])  # fmt: skip
def test_what_rounds_to_0_has_no_sign_of_its_own(interval, told):
    assert interval_text(Interval(*interval), sign="+") == told


def test_the_spread_of_the_tuning_seeds_says_how_many_pairs_a_difference_takes(tmp_path):
    """Paired differences of other are 0.1 and 0.3 (sd 0.1414), those of same 0 and 0: pooled 0.1."""
    design = study(tmp_path)
    finals = {"clip": (0.4, 0.5), "other": (0.5, 0.8), "same": (0.4, 0.5)}
    rows = [row(name, seed, final if value == 0.01 else 0.1, value=value)
            for name, of in finals.items() for seed, final in zip(design.tuning, of, strict=True)
            for value in design.values]  # fmt: skip
    found = assemble(design, {}, choose(design, rows), rows, History.read(tmp_path))
    (spread,) = spreads(found)
    assert spread.sd == pytest.approx(0.1)
    assert spread.needed == {d: pairs_needed(0.1, d, comparisons=2) for d in (0.05, 0.02, 0.01)}
    line = next(line for line in page(found) if line.startswith("* In `off` the differences to `clip`"))
    assert "a standard deviation of 0.100" in line
    assert f"{spread.needed[0.02]} pairs find a true difference of 0.02" in line
    assert spreads({**found, "chosen": {}}) == []


def test_the_picture_of_the_tuning_frames_what_is_chosen(tmp_path):
    svg = draw(simulated(tmp_path, {"clip": [0.5, 0.6], "other": [0.4, 0.5]}))["study-planted-off-tuning.svg"]
    drawn = ET.fromstring(svg)
    cells = [(r.get("x"), r.get("class"), float(r.get("fill-opacity", "nan"))) for r in drawn.iter(f"{NS}rect")]
    filled = [opacity for _, kind, opacity in cells if kind == "tc-f0"]
    assert len(filled) == 4  # two algorithms, two values
    assert max(filled) == 0.55
    frames = [float(x) for x, kind, _ in cells if kind == "tc-whisker tc-s1"]
    # In the column of 0.01, which is larger for both.
    assert len(frames) == 2
    assert frames[0] == frames[1] == max(float(x) for x, kind, _ in cells if kind == "tc-f0") + 1


def test_numbers_that_do_not_fill_the_columns_are_refused():
    with pytest.raises(ValueError, match="each with 2 values"):
        shades([ShadedRow("a", [0.1])], ["1", "2"], title="t", x_label="x")


@pytest.mark.parametrize(("finals", "ends"), [
    ({"clip": [0.43, 0.43], "other": [0.38, 0.38]}, (0.2, 0.45)),
    ({"clip": [0.2, 0.2], "other": [0.2, 0.2]}, (0.2, 0.25)),
])  # fmt: skip
def test_curves_of_a_regime_have_one_axis_that_shows_their_differences(tmp_path, finals, ends):
    """They begin at 0.2. Equal curves still have an axis with a length."""
    svg = draw(simulated(tmp_path, finals))["study-planted-off-curves-1.svg"]
    left = next(ET.fromstring(svg).iter(f"{NS}g"))
    told = [float(t.text) for t in left.iter(f"{NS}text") if t.get("text-anchor") == "end" and t.text[0].isdigit()]
    assert (min(told), max(told)) == pytest.approx(ends, abs=0.011)


def test_the_terminal_has_the_table_without_what_only_the_page_has_room_for(tmp_path):
    found = simulated(tmp_path, {name: np.linspace(0.4, 0.5, 10) for name in ("clip", "other")})
    told = describe(found)
    assert max(map(len, told.splitlines())) <= 120
    assert "minus the baseline [95 %]" in told
    assert "IQM" not in told
    assert any("IQM [95 %]" in line for line in page(found))


def test_the_terminal_says_that_the_study_is_not_complete(tmp_path):
    """Only the page did: verdicts of 7 of 10 seeds read as those of the study."""
    found = simulated(tmp_path, {name: np.linspace(0.4, 0.5, 7) for name in ("clip", "other", "same")})
    told = "This is a part of the study: 7 of 10 seeds have runs, 21 of 30 runs in all."
    assert told in " ".join(describe(found).split())
    assert "**" not in describe(found)
    whole = simulated(tmp_path, {name: np.linspace(0.4, 0.5, 10) for name in ("clip", "other", "same")})
    assert "part of the study" not in describe(whole)


def two_regimes(folder):
    """``other`` is better in one regime and as good in another, where it lacks a seed; ``same`` ran in the first."""
    design = study(folder, regimes={"off": {"learner.inner_updates": 2}, "on": {"learner.inner_updates": 1}})
    noise = 0.01 * np.random.default_rng(0).normal(size=10)
    finals = {("off", "clip"): 0.5 + noise, ("off", "other"): 0.6 + noise[::-1] / 2, ("off", "same"): 0.5 + noise}
    finals |= {("on", "clip"): 0.5 + noise, ("on", "other"): (0.5 + noise[::-1])[:9]}
    rows = [row(name, seed, float(final), regime=regime)
            for (regime, name), of in finals.items() for seed, final in enumerate(of, 1)]  # fmt: skip
    return assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(folder))


def test_regimes_stand_next_to_each_other_with_the_differences_of_their_own_tables(tmp_path):
    found = two_regimes(tmp_path)
    lines = list(page(found))
    glance = lines[
        lines.index("### All regimes of planted") : lines.index("### Regime `off`: `learner.inner_updates = 2`")
    ]
    assert "| algorithm | off, 10 pairs | on, 9 pairs |" in glance
    off, on = regimes(found)
    for comparison_of in ("final", "area"):
        assert "| same | equal | not compared |" in glance
        better = next(v.difference for v in getattr(off, comparison_of).versus if v.name == "other")
        level = next(v.difference for v in getattr(on, comparison_of).versus if v.name == "other")
        cells = [f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}]" for d in (better, level)]
        assert f"| other | **{cells[0]}** | {cells[1]} |" in glance
    assert sum(line.startswith("| ") for line in glance) == 2 * (2 + 3)
    # Of off alone, which has a pair more, and without what is equal.
    assert any(line.startswith("Corrected for all 2 comparisons of both figures in `off` at once") for line in glance)


def test_a_ring_in_the_picture_of_all_regimes_is_not_told_apart(tmp_path):
    """Points of one row lie on one height, below the name of their regime; a missing cell has none."""
    root = ET.fromstring(draw(two_regimes(tmp_path))["study-planted-glance.svg"])
    points = [(float(c.get("cx")), float(c.get("cy")), c.get("class")) for c in root.iter(f"{NS}circle")]
    at = {t.text: (float(t.get("x")), float(t.get("y"))) for t in root.iter(f"{NS}text")}
    off = sorted(p for p in points if p[0] < (at["off, 10 pairs"][0] + at["on, 9 pairs"][0]) / 2)
    on = [p for p in points if p not in off]
    assert {(y, kind) for _, y, kind in off} == {(at["other"][1] - 4, "tc-f0"), (at["same"][1] - 4, "tc-ground tc-s0")}
    assert [(y, kind) for _, y, kind in on] == [(at["other"][1] - 4, "tc-ground tc-s0")]
    zeros = sorted({float(line.get("x1")) for line in root.iter(f"{NS}line") if line.get("class") == "tc-axis"})
    assert [x for x, y, _ in off if y == at["same"][1] - 4] == [zeros[0]]
    assert zeros[0] < next(x for x, y, _ in off if y == at["other"][1] - 4) < zeros[1]


def test_all_comparisons_together_have_wider_intervals_and_say_which_verdicts_are_lost(tmp_path):
    """``other`` is better by much and ``near`` by little in the first of two regimes; nothing is in the second."""
    rng = np.random.default_rng(5)
    names = ("clip", "other", "near")
    algorithms = {name: {"objective.preset": "grpo"} for name in names}
    two = {"off": {"learner.inner_updates": 2}, "on": {"learner.inner_updates": 1}}
    design = study(tmp_path, algorithms=algorithms | {"same": None}, regimes=two)
    noise = {(regime, name): 0.01 * rng.normal(size=10) for regime in two for name in names}
    finals = {
        (regime, name): 0.4 + noise["off", "clip"] + of * (name != "clip") for (regime, name), of in noise.items()
    }
    finals["off", "other"] += 0.1
    finals["off", "near"] += 0.01
    rows = [row(name, seed, float(final), regime=regime)
            for (regime, name), of in finals.items() for seed, final in enumerate(of, 1)]  # fmt: skip
    found = assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path))
    compared = regimes(found)
    together = {(regime, figure, v.name): v for regime, figure, v in jointly(compared)}
    assert len(together) == 2 * 2 * 2
    for regime in compared:
        for figure, comparison in zip(FIGURES, (regime.final, regime.area), strict=True):
            for alone in comparison.versus:
                joint = together[regime.name, figure, alone.name]
                assert joint.difference.mean == pytest.approx(alone.difference.mean, abs=1e-15)
                assert joint.difference.low < alone.difference.low
                assert joint.difference.high > alone.difference.high
                assert joint.p_value >= alone.p_value
    line = next(line for line in page(found) if line.startswith("Corrected for all 8 comparisons"))
    alone = [key for key, v in together.items() if v.told_apart]
    assert alone == [("off", figure, "other") for figure in FIGURES]
    assert "of both figures in `off`, `on` at once (those equal to the last bit aside), over the 10 pairs" in line
    # In its own table, near is better too.
    assert [v.verdict for v in compared[0].final.versus] == ["better", "better"]
    assert "2 of 4 verdicts remain; not those of `near` in off (final accuracy), `near` in off (height" in line


def test_one_regime_has_no_table_of_all(tmp_path):
    found = simulated(tmp_path, {name: np.linspace(0.4, 0.5, 10) for name in ("clip", "other")})
    assert not any(line.startswith("### All regimes") for line in page(found))
    assert not any("glance" in name for name in draw(found))


def test_profiles_are_of_the_final_accuracy_over_the_range_of_all_algorithms(tmp_path):
    (regime,) = regimes(simulated(tmp_path, {"clip": [0.5, 0.7], "other": [0.3, 0.9]}))
    clip, other = _profiles(regime, ["clip", "other"])
    assert (clip.x[0], clip.x[-1]) == (other.x[0], other.x[-1]) == pytest.approx((0.3, 0.9))
    for series, finals in ((clip, (0.5, 0.7)), (other, (0.3, 0.9))):
        assert list(series.y) == [np.mean([final > at + 1e-9 for final in finals]) for at in series.x]


def test_a_mean_curve_is_of_one_step_where_tasks_are_evaluated_at_other_steps():
    """The curve of ``rare`` rises evenly to its last evaluation; ``brief`` has ended before the others."""
    rows = [
        row("clip", 1, 0.6, steps=(0, 4, 6, 8, 10), accuracy=(0.0, 0.4, 0.6, 0.8, 1.0)),
        row("clip", 1, 0.6, task="rare", steps=(0, 6, 10), accuracy=(0.0, 0.6, 1.0)),
        row("clip", 1, 0.6, task="brief", steps=(0, 5), accuracy=(0.0, 0.5)),
    ]
    curve = _series("clip", rows)
    assert list(curve.x) == [0, 6, 10]
    assert curve.y == pytest.approx([0.0, (0.6 + 0.6 + 0.5) / 3, (1.0 + 1.0 + 0.5) / 3])


def test_means_of_a_study_that_is_not_whole_are_of_the_same_tasks(tmp_path):
    """``clip`` and ``other`` are equal in both tasks, of which one is easy; ``clip`` has more runs of that one."""
    design = study(tmp_path, tasks={"sums": {}, "easy": {}})
    noise = {1: -0.01, 2: 0.0, 3: 0.01}
    runs = {
        ("clip", "sums"): (1, 2, 3),
        ("clip", "easy"): (1, 2, 3),
        ("other", "sums"): (1, 2, 3),
        ("other", "easy"): (),
    }
    for whole in (False, True):
        runs |= {("other", "easy"): (1, 2, 3) if whole else ()}
        rows = [row(name, seed, (0.9 if task == "easy" else 0.4) + noise[seed], task=task)
                for (name, task), seeds in runs.items() for seed in seeds]  # fmt: skip
        found = assemble(design, {}, dict.fromkeys(design.cells, 0.01), rows, History.read(tmp_path))
        (regime,) = regimes(found)
        curves = {name: _series(name, of) for name, of in regime.shared().items()}
        assert curves["clip"].y == curves["other"].y
        assert curves["clip"].y[-1] == pytest.approx(0.65 if whole else 0.4)
        # Of runs that are 0.01 apart: how far apart tasks are has no part in it.
        low, high = curves["clip"].low, curves["clip"].high
        assert low is not None
        assert high is not None
        assert 0.01 < high[-1] - low[-1] < 0.06
        reached = {name: regime.reached(name) for name in ("clip", "other")}
        assert reached["clip"] == reached["other"]
        part = " of the tasks and seeds that all algorithms have"
        assert any(line == f"How the runs went, means over runs{'' if whole else part}:" for line in page(found))


def test_runs_that_were_not_computed_alike_are_counted_by_how(tmp_path):
    """A machine without a compiler, in the middle of a study: the same cell and seed would give other numbers."""
    design = study(tmp_path)
    fast, slow = "cpu, 1 thread, trew's kernels", "cpu, 1 thread, PyTorch's kernels"

    def told(*kinds: str) -> list[str]:
        seed = design.tuning[0]
        rows = [row(name, seed, 0.5, arithmetic=kind) for name, kind in zip(design.algorithms, kinds, strict=True)]
        lines = page(assemble(design, {}, {}, rows, History.read(tmp_path)))
        return [line for line in lines if "not computed alike" in line]

    assert told(fast, fast, "") == [], "an earlier version did not record it"
    assert told(fast, slow, fast)[0].startswith(f"Runs were not computed alike ({fast}: 2; {slow}: 1), so that")
