"""A gate in a real run: what is behind a closed one is not right to learn, whatever the answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import trew
from recipe_help import recipe, run_folder
from trew.utils.console import Silent

REWARDS = """
def layout(completions, completion_ids, **columns):
    return [float(ids[0] % 2) for ids in completion_ids]

def right(completions, **columns):
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize("first", ["layout", "right"])
def test_dynamic_sampling_keeps_groups_of_right_answers_of_which_some_are_behind_a_closed_gate(tmp_path: Path, first):
    rewards = [
        {"name": "reward.py:layout", "gate": True, "weight": 0.0}, {"name": "reward.py:right"},
    ]  # fmt: skip
    text = recipe(
        tmp_path / "lm", chat_template="plain", steps=1, eval={"size": 2}, objective={"preset": "dapo"},
        rewards=rewards if first == "layout" else rewards[::-1], rollout={"refills": 0},
    )  # fmt: skip
    run_folder(tmp_path, text, reward=REWARDS)
    trew.train(tmp_path / "r.toml", set=[f"out={tmp_path / 'run'}"], display=Silent())
    (row,) = (r for line in (tmp_path / "run/metrics.jsonl").open() if "reward" in (r := json.loads(line)))
    assert row["accuracy"] == 1.0  # goes by the answer alone
    assert 0 < row["reward"] < 1
    assert row["groups_trained"] > 0
    assert row["grad_norm"] > 0
    notes = json.loads((tmp_path / "run/summary.json").read_text())["notes"]
    assert any("eval.correct_reward: right says which" in note for note in notes) == (first == "layout")
