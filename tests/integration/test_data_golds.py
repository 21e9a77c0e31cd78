"""Every gold answer of the published sets scores 1 with its task's own reward: run with ``make test-slow``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from trew.config import DataConfig, RewardConfig
from trew.data import load_prompts, load_task, make_task
from trew.data.files import read_rows
from trew.data.tasks.mbpp import UNTESTABLE
from trew.rewards import RewardSet
from trew.rewards.builtin.kinds import gold_problem

FILES = Path(__file__).parents[2].parent / "shared" / "data"
SETS = {
    "gsm8k": ("gsm8k/train.jsonl", 7473),
    "math": ("math/math500.jsonl", 500),
    "mbpp": ("mbpp/mbpp.jsonl", 971),
    "humaneval": ("humaneval/HumanEval.jsonl.gz", 164),
}
pytestmark = [pytest.mark.slow]


@pytest.mark.parametrize("task", SETS)
def test_every_gold_of_a_published_set_scores_1(task: str) -> None:
    name, count = SETS[task]
    if not (FILES / name).exists():
        pytest.skip(f"{name} is not here")
    config = DataConfig(task=task, train=str(FILES / name))
    prompts = load_prompts(config)
    assert len(prompts) == count
    assert RewardSet.from_config(make_task(config).rewards(prompts)).check_golds(prompts) == []


def test_rows_that_are_left_out_of_mbpp_could_not_be_graded() -> None:
    path = FILES / "mbpp" / "mbpp.jsonl"
    if not path.exists():
        pytest.skip("mbpp.jsonl is not here")
    rows = {row.values["task_id"]: row.values for row in read_rows(path)}
    for number in UNTESTABLE:
        assert gold_problem("code_func", rows[number], {}), number


def names() -> list[str]:
    if importlib.util.find_spec("reasoning_gym") is None:
        return []
    from reasoning_gym.factory import DATASETS

    from trew.data.tasks.puzzles import UNGRADED

    return sorted(set(DATASETS) - set(UNGRADED))


@pytest.mark.parametrize("name", names())
def test_every_gold_of_a_reasoning_gym_task_scores_1_and_noise_does_not(name: str) -> None:
    data = load_task(DataConfig(task=f"reasoning-gym:{name}", args={"size": 20}), eval_size=5, seed=1)
    prompts = [*data.train, *data.eval]
    assert data.default_rewards == (RewardConfig(name="reasoning_gym"),)
    assert RewardSet.from_config(data.default_rewards).check_golds(prompts) == []
    from trew.rewards import grade

    for prompt in prompts[:5]:
        gold, puzzle = prompt.columns["gold"], prompt.columns["puzzle"]
        for text in ("zzz", f"{gold} {gold} or not", "[", "The answer is " + gold):
            verdict = grade("reasoning_gym", f"<answer>{text}</answer>", gold, puzzle=puzzle)
            assert (verdict.score, verdict.status) == (0, "scored"), text[:80]
