"""What the end of a run says where nothing was learned: the cause, from the rows alone."""

from __future__ import annotations

from typing import Any

import pytest

from trew.diagnostics.health import findings
from trew.diagnostics.outcome import outcome

TABLE = {"rollout": {"max_tokens": 8}}
NOTHING = {"grad_norm": 0.0, "reward": 0.0, "zero_signal_share": 1.0, "truncated_share": 1.0}


def rows(count: int, **values: Any) -> list[dict[str, Any]]:
    steps = [{"step": step, **NOTHING, **values} for step in range(1, count + 1)]
    return [{"step": 0, "eval_accuracy": 0.0}, *steps, {"step": count, "eval_accuracy": 0.0}]


@pytest.mark.parametrize("count", [1, 2, 30])
def test_cut_off_completions_and_a_constant_reward_are_named_however_short_the_run(count):
    (text,) = outcome(rows(count), TABLE)
    assert text.startswith("Nothing was learned")
    assert "rollout.max_tokens = 8" in text
    assert "got the same reward (0)" in text


@pytest.mark.parametrize(
    ("values", "says", "silent_on"),
    [
        ({"truncated_share": 0.5}, "got the same reward", "cut off"),
        ({"zero_signal_share": 0.5}, "cut off", "same reward"),
        ({"truncated_share": 0.5, "zero_signal_share": 0.5}, "Rewards differed", "cut off"),
        ({"reward": None}, "No completion got a reward", "same reward"),
    ],
)
def test_only_what_the_rows_show_is_blamed(values, says, silent_on):
    (text,) = outcome(rows(3, **values), TABLE)
    assert says in text
    assert silent_on not in text


def test_groups_that_dynamic_sampling_dropped_for_what_counts_as_right_are_named():
    graded = {"truncated_share": 0.1, "zero_signal_share": 0.5, "reward": 0.3, "groups_trained": 0}
    (text,) = outcome(rows(3, **graded), TABLE)
    assert "Rewards differed, but dynamic sampling kept no group" in text
    assert "eval.correct_at = 1:" in text
    (text,) = outcome(rows(3, **graded), {**TABLE, "eval": {"correct_at": 0.8}})
    assert "eval.correct_at = 0.8:" in text
    for other in ({"zero_signal_share": 1.0}, {"groups_trained": 2}):
        (text,) = outcome(rows(3, **graded | other), TABLE)
        assert "dynamic sampling" not in text


def test_steps_without_any_group_had_no_gradient_either():
    without = [{k: v for k, v in row.items() if k != "grad_norm"} for row in rows(2)]
    assert outcome(without, TABLE)


@pytest.mark.parametrize("norm", [1e-12, 3.0, None])
def test_a_run_with_a_gradient_or_with_a_step_that_broke_is_another_matter(norm):
    mixed = rows(3)
    mixed[2]["grad_norm"] = norm
    assert outcome(mixed, TABLE) == []
    assert outcome([{"step": 0, "eval_accuracy": 0.0}], TABLE) == []


@pytest.mark.parametrize("rule", ["unchanged"])
def test_rounding_is_not_blamed_where_there_was_no_gradient(rule):
    lost = {"changed_share": 0.0, "lr": 1e-3}
    assert rule not in {f.rule for f in findings(rows(12, **lost), {})}
    assert rule in {f.rule for f in findings(rows(12, **(lost | {"grad_norm": 0.5})), {})}


def test_episodes_that_failed_are_told_and_the_environment_is_to_be_tried():
    table = {**TABLE, "environment": {"name": "mine.py:game"}}
    (text,) = outcome(rows(2, truncated_share=0.1, **{"environment/failed": 0.75}), table)
    assert "75% of the episodes failed in their environment and were not judged" in text
    assert "check the reward (trew env mine.py:game --check)" in text
    (text,) = outcome(rows(2, reward=None), table)
    assert "try them alone (trew env mine.py:game --check)" in text
    (text,) = outcome(rows(2), TABLE)
    assert "episodes" not in text
    assert "(trew rewards test NAME)" in text
