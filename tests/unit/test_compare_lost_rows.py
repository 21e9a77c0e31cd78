"""trew compare on runs whose metrics.jsonl lacks rows or values: nothing that is there stands for what is not."""

import json

import pytest

from compare_help import write
from trew.errors import DataError
from trew.runs.compare import Choices, compare_runs, to_json


def edited(folder, change):
    """The run with the rows that ``change`` makes of its metrics.jsonl."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
    return folder


def without(step, column):
    return lambda rows: [row for row in rows if not (row["step"] == step and column in row)]


def compared(tmp_path, change, metric, **settings):
    folders = [write(tmp_path / str(seed), seed, 10 + seed, **settings) for seed in range(3)]
    edited(folders[1], change)
    return to_json(compare_runs(folders, Choices(metric=metric, unfinished="count")))


def scores(found):
    (group,) = found["groups"]
    return [run["score"] for run in group["runs"]]


@pytest.mark.parametrize("metric", ["final", "last:2", "area", "reach:0.4", "reward:2"])
def test_a_finished_run_without_its_last_evaluation_is_refused(tmp_path, metric):
    """The evaluation after step 5 was its accuracy at the end."""
    with pytest.raises(DataError, match=r"1: metrics\.jsonl lacks the evaluation after step 10.*after step 5.*backup"):
        compared(tmp_path, without(10, "eval_accuracy"), metric)


def test_an_unfinished_run_counts_with_its_last_evaluation(tmp_path):
    found = compared(tmp_path, without(5, "eval_accuracy"), "final", finished=False)
    assert scores(found) == [0.25, 0.1, 0.3], "the second has that of step 0 left"


@pytest.mark.parametrize("steps", [None, "10", True, float("inf")])
def test_a_summary_that_does_not_tell_the_last_step_refuses_nothing(tmp_path, steps):
    folders = [write(tmp_path / str(seed), seed, 10) for seed in range(2)]
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps({**summary, "steps": steps}))
    edited(folders[0], without(10, "eval_accuracy"))
    assert scores(to_json(compare_runs(folders, Choices()))) == [0.25, 0.5], "of the first, that after step 5"


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (without(9, "reward"), "lacks the row of step 9"),
        (
            lambda rows: [r for r in rows if "eval_accuracy" in r or r["step"] not in (6, 8, 9)],
            "rows of steps 6, 8 to 9",
        ),
        (lambda rows: [row for row in rows for _ in range(1 + ("reward" in row and row["step"] == 9))], "repeats"),
    ],
)
def test_lost_and_repeated_rows_of_steps_are_told_and_refused_where_they_are_counted(tmp_path, change, lost):
    """The mean of the last two steps was that of steps 8 and 10, or of step 9 twice."""
    assert any(lost in note for note in compared(tmp_path / "final", change, "final")["notes"])
    for metric in ("reward:4", "reach:0.4"):
        with pytest.raises(DataError, match=rf"--metric: .*1: metrics\.jsonl .*{lost}.*use final"):
            compared(tmp_path / metric[:5], change, metric)


def test_a_row_lost_before_the_steps_that_are_averaged_does_not_matter(tmp_path):
    found = compared(tmp_path, without(2, "reward"), "reward:2")
    assert found["groups"][0]["runs"][1]["score"] == pytest.approx(9.5 * 11 / 200)


def test_an_evaluation_that_was_repeated_and_a_column_of_evaluations_are_no_loss(tmp_path):
    twice = compared(tmp_path / "a", lambda rows: [*rows, rows[-1]], "final")
    assert not any("metrics.jsonl" in note for note in twice["notes"])
    compared(tmp_path / "b", without(2, "reward"), "eval_n:2")


def set_to(value, *steps, column="reward"):
    """Sets a column in the rows of these steps that have it."""
    return lambda rows: [{**row, column: value} if row["step"] in steps and column in row else row for row in rows]


def test_a_step_without_a_value_is_no_older_step(tmp_path):
    """The mean of the last three steps was that of steps 6, 7 and 8 where the last two had none."""
    found = compared(tmp_path, set_to(None, 9, 10), "reward:3")
    assert scores(found) == pytest.approx([9 * 10 / 200, 8 * 11 / 200, 9 * 12 / 200])
    [note] = [note for note in found["notes"] if "no reward" in note]
    assert note.startswith("1 of 3 runs have no reward in some of their last 3 steps")
    assert note.endswith("1 (1 of 3)")
    whole = compared(tmp_path / "whole", lambda rows: rows, "reward:3")
    assert not any("no reward" in note for note in whole["notes"])


def test_steps_without_the_column_are_steps_all_the_same(tmp_path):
    """As those without an update, whose rows lack what it measures."""

    def changed(rows):
        return [{k: v for k, v in row.items() if (row["step"], k) != (10, "entropy")} for row in rows]

    assert scores(compared(tmp_path, changed, "entropy:2"))[1] == pytest.approx(1 / 9)


@pytest.mark.parametrize(
    ("change", "metric", "said"),
    [
        (set_to(None, 9, 10), "reward:2", r"no reward in its last 2 steps, from step 9 on; give a larger"),
        (set_to(1e999, 9), "reward:2", r"a value of reward that is not finite in step 9"),
        (set_to(None, 10, column="eval_n"), "eval_n:2", r"no eval_n in its evaluation after step 10"),
        (lambda rows: rows, "eval_n:4", r"has fewer than 4 evaluations in metrics\.jsonl"),
    ],
)
def test_last_steps_and_evaluations_that_give_no_mean_are_refused(tmp_path, change, metric, said):
    with pytest.raises(DataError, match=rf"--metric: .*{said}"):
        compared(tmp_path, change, metric)


def test_a_column_of_evaluations_is_called_so(tmp_path):
    found = compared(tmp_path, lambda rows: rows, "eval_accuracy:2")
    assert found["metric"]["title"] == "eval_accuracy, mean of the last 2 evaluations"
    assert scores(found) == pytest.approx([0.375, 0.75 * 11 / 20, 0.45])
    assert compared(tmp_path / "one", lambda rows: rows, "reward:1")["metric"]["title"] == "reward, of the last step"
