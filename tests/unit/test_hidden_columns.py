"""Columns of the data that a reward function cannot see."""

from __future__ import annotations

import json
from pathlib import Path

from trew.config import DataConfig, RewardConfig
from trew.data.load import load_prompts
from trew.rewards.reward_set import RewardSet


def test_a_column_by_a_name_that_means_something_else_is_told(tmp_path: Path):
    """``completions`` of the data looked like an argument of the function, which is the run's own."""
    rows = [{"prompt": "1?", "gold": "1", "completions": ["1"], "level": 2}]
    data, code = tmp_path / "train.jsonl", tmp_path / "reward.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code.write_text(
        "def f(completions, level, **_): return [1.0] * len(completions)\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
    )
    prompts = load_prompts(DataConfig(task="prompts", train=str(data)))

    def told(*names: str) -> list[str]:
        return RewardSet.from_config([RewardConfig(name=name) for name in names]).column_notes(prompts)

    (note,) = told("gsm8k", f"{code}:f")
    assert note.startswith("rewards: data have a column completions, by which name ")
    assert told("gsm8k") == told("gsm8k", f"{code}:compute_score") == []
