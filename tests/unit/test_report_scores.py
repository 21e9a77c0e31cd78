"""The report's distribution of scores by step, and the prompts that changed most."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from report_help import HOSTILE, Elements, make
from rollouts_help import answers
from trew.runs import RunFolder
from trew.runs.report import load_run, render_report
from trew.runs.report.heat import heat_strip
from trew.runs.report.visits import load_visits
from trew.types import Prompt, Score, ScoredGroup

CELL = re.compile(r'fill-opacity="([0-9.]+)"><title>steps? ([^:]+): (\d+) of (\d+) completions, ([^<]+)<')


def cells(svg: str) -> list[tuple[str, ...]]:
    return CELL.findall(svg)


def group(uid: str, *scores: float | None, text: str = "") -> ScoredGroup:
    made = answers(Prompt(uid, text=f"question {uid}"), *([text or f"answer {uid}"] * len(scores)))
    return ScoredGroup(made, tuple(Score(s, "scored" if s is not None else "timeout", {"a": s}) for s in scores))


def run(folder: Path, *steps: list[ScoredGroup]) -> Path:
    with RunFolder.open(folder) as made:
        made.write_config("steps = 9\n")
        for step, groups in enumerate(steps, 1):
            made.write_rollouts(step, groups)
            made.log({"step": step, "reward": 0.5})
    return folder


def test_every_completion_is_in_one_cell():
    scores = {1: np.array([0.0, 0.0, 1.0, np.nan]), 2: np.array([0.0, 1.0, 1.0, 1.0])}
    found = {(step, what): int(count) for _, step, count, _, what in cells(heat_strip(scores, title="t"))}
    assert found == {
        ("1", "score 0"): 2, ("1", "score 1"): 1, ("1", "no verdict"): 1, ("2", "score 0"): 1, ("2", "score 1"): 3,
    }  # fmt: skip
    opacity = {(step, what): float(o) for o, step, _, _, what in cells(heat_strip(scores, title="t"))}
    assert opacity["2", "score 1"] == 1, "the largest share is the darkest"
    assert opacity["1", "score 0"] == pytest.approx(2 / 3, abs=0.01)


def test_long_runs_and_many_values_are_put_together_and_nothing_is_lost():
    rng = np.random.default_rng(0)
    scores = {step: rng.random(7) for step in range(1, 1001)}
    found = cells(heat_strip(scores, title="t"))
    assert sum(int(count) for _, _, count, _, _ in found) == 7000
    assert len({steps for _, steps, *_ in found}) == 100
    assert len({what for *_, what in found}) == 10


@pytest.mark.parametrize("values", [[0.5], [-1.7e308, 1.7e308], [i * 1e307 for i in range(-17, 18)], [5e-324, 0.0]])
def test_scores_of_any_size(values):
    svg = heat_strip({3: np.array(values)}, title="t")
    assert sum(int(count) for _, _, count, _, _ in cells(svg)) == len(values)
    assert "nan" not in svg
    assert "inf" not in svg


def test_rows_of_other_scores_have_other_names():
    svg = heat_strip({1: np.array([0.9991, 0.9994, 1.0, 0.5])}, title="t")
    assert sorted(what for *_, what in cells(svg)) == ["score 0.5", "score 0.9991", "score 0.9994", "score 1"]
    rounded = cells(heat_strip({1: np.array([0.1 + 0.2, 0.3, 1.0])}, title="t"))
    assert [(count, what) for _, _, count, _, what in rounded] == [("2", "score 0.3"), ("1", "score 1")]


def test_a_row_begins_where_its_name_says():
    """Twelve scores from 0 to 1.5: rows of 0.15."""
    scores = [*np.linspace(0, 1.5, 11), 0.12]
    found = {what: int(count) for _, _, count, _, what in cells(heat_strip({1: np.array(scores)}, title="t"))}
    assert {what: found[what] for what in ("score ≥ 0.00", "score ≥ 0.15")} == {"score ≥ 0.00": 2, "score ≥ 0.15": 1}


def test_without_a_score_there_is_no_strip():
    assert heat_strip({}, title="t") == heat_strip({1: np.array([np.nan])}, title="t") == ""


def test_changes_between_first_and_last_visit(tmp_path):
    folder = run(
        tmp_path / "r",
        [group("up", 0.0, 0.5), group("down", 1.0, 1.0), group("once", 0.5)],
        [group("up", 0.0, 0.0), group("late", 0.25)],
        [group("up", 1.0, 1.0), group("down", 0.0, None), group("late", 0.25)],
    )
    changes = load_visits(folder).changes()
    assert [(c.uid, c.first, c.last, c.before, c.after, c.times) for c in changes] == [
        ("down", 1, 3, 1.0, 0.0, 2), ("late", 2, 3, 0.25, 0.25, 2), ("up", 1, 3, 0.25, 1.0, 3),
    ]  # fmt: skip
    text = " ".join(" ".join(Elements(render_report([load_run(folder)])).text).split())
    gained, _, lost = text.partition("Prompts that lost most")
    assert "mean score 0.25 → 1 steps 1 → 3 visits 3 question up step 1, the first of 2" in gained
    assert "question down" in lost
    assert "1 of 3 that were sampled again" in lost
    assert "question late" not in text.partition(" Samples ")[0], "it did not change"


def test_a_run_without_repeated_prompts_says_so(tmp_path):
    text = "".join(Elements(render_report([load_run(make(tmp_path / "a"))])).text)
    assert "No prompt was sampled twice" in text


def test_tables_that_cannot_be_read_are_counted(tmp_path):
    folder = run(tmp_path / "r", [group("a", 1.0)], [group("a", 0.0)], [group("a", 0.5)])
    (folder / "rollouts/000002.parquet").write_bytes(b"PAR1 nonsense")
    pq.write_table(pq.read_table(folder / "rollouts/000003.parquet").drop_columns(["score"]),
                   folder / "rollouts/000003.parquet")  # fmt: skip
    text = "".join(Elements(render_report([load_run(folder)])).text)
    assert "1 of 3 steps were read for this section" in text


def test_of_a_very_long_run_steps_at_equal_distances_are_read(tmp_path):
    folder = run(tmp_path / "r", *[[group("a", step / 9)] for step in range(9)])
    found = load_visits(folder, most=3)
    assert list(found.scores) == [1, 5, 9]
    assert found.total == 9


def test_hostile_prompts_stay_text(tmp_path):
    steps = [[group(f"{i}{text}", float(i == step), text=text) for i, text in enumerate(HOSTILE)] for step in (0, 1)]
    page = Elements(render_report([load_run(run(tmp_path / "r", *steps))]))
    assert "script" not in page.seen
    assert not [a for a in page.attributes if a[1].startswith("on") or a[1] in ("src", "href", "style")]
