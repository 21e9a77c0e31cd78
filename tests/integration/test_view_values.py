"""What the page shows of a token is what its name says, in a run whose temperature is not 1."""

from __future__ import annotations

import pytest

import trew
from recipe_help import ODD, recipe, run_folder
from trew.utils.console import Silent
from view_help import client, get


@pytest.mark.parametrize(
    ("rollout", "shown"),
    [({"temperature": 1.0}, True), ({"temperature": 0.5}, True), ({"temperature": 0.5, "top_k": 5}, False)],
)
def test_policy_and_reference_are_compared_at_one_temperature(tmp_path, rollout, shown):
    """Both are the same weights in the first step."""
    text = recipe(
        tmp_path / "lm", chat_template="plain", steps=1, rewards=[{"name": "reward.py:odd"}], eval={"size": 2},
        rollout=rollout, objective={"preset": "grpo", "beta": 0.1},
    )  # fmt: skip
    run_folder(tmp_path, text, reward=ODD)
    trew.train(tmp_path / "r.toml", set=[f"out={tmp_path / 'runs/x'}"], display=Silent())
    found = get(client(tmp_path / "runs"), "runs/x/completion", step=1, group=0, sample=0)
    assert ("ref_gap" in found["values"]) == shown
    assert "ref_logprob" in found["values"]
    assert found["values"].get("ref_gap", []) == pytest.approx([0.0] * len(found["tokens"]) * shown, abs=1e-4)
