"""A run with a critic, on a tiny model: the critic's loss falls, and the policy learns from what it says."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
import trew
from trew.config import parse
from trew.utils.console import Silent

REWARD = """
def odd(completion_ids, **_):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
"""


def test_the_critic_s_loss_falls_and_the_reward_rises(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    table = {
        "model": str(tiny.save(tmp_path / "model")), "steps": 24, "out": str(tmp_path / "run"),
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
        "rewards": [{"name": f"{tmp_path}/reward.py:odd"}],
        "rollout": {"prompts": 8, "completions": 2, "max_tokens": 6},
        "objective": {"preset": "ppo"}, "learner": {"lr": 3e-3}, "critic": {"lr": 3e-3, "warmup_steps": 4},
        "eval": {"size": 2}, "checkpoint": {"every": 0},
    }  # fmt: skip
    trew.train(parse(table), display=Silent())
    rows = [json.loads(line) for line in (Path(table["out"]) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "value_loss" in row]
    assert [row["policy_version"] for row in rows[:5]] == [0, 0, 0, 0, 1]  # the critic learns alone at first

    def mean(name: str, part: slice) -> float:
        values = [row[name] for row in rows[part]]
        return sum(values) / len(values)

    first, last = slice(0, 4), slice(-4, None)
    assert rows[0]["value"] == 0.0
    assert mean("value_loss", last) < 0.5 * rows[0]["value_loss"]
    assert abs(mean("value", last) - mean("return", last)) < 0.2
    assert mean("reward", last) > mean("reward", first) + 0.1
    assert not (Path(table["out"]) / "final" / "critic.safetensors").exists()
