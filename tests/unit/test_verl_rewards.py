"""``compute_score`` for verl, which needs no verl."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trew.data.verl import to_rows
from trew.errors import ConfigError, DataError, RewardError
from trew.integrations.verl.rewards import compute_score
from trew.types import Prompt


def test_known_data_sources_have_a_reward() -> None:
    assert compute_score("openai/gsm8k", "so #### 72", "72") == {"score": 1.0, "judged": 1.0, "gsm8k": 1.0}
    assert compute_score("openai/gsm8k", "so #### 71", "72", {})["score"] == 0.0
    with pytest.raises(ConfigError, match="'mine' is not known"):
        compute_score("mine", "72", "72")


def test_a_reward_with_arguments_and_what_verl_puts_into_extra_info() -> None:
    extra = {"index": 3, "split": "train", "num_turns": 2, "rollout_reward_scores": {}, "trew_row": "{}"}
    assert compute_score("mine", r"\boxed{1/2}", "0.5", extra, reward="math")["math"] == 1.0
    strict = {"reward": "math", "args": {"require_boxed": True}}
    assert compute_score("mine", "1/2", "0.5", extra, **strict)["score"] == 0.0
    truth = '{"target": 6, "numbers": [1, 2, 3]}'
    assert compute_score("countdown", "<answer>1 + 2 + 3</answer>", truth, reward="countdown")["score"] == 1.0


def test_several_rewards_with_weights() -> None:
    rewards = [{"name": "math"}, {"name": "format", "weight": 0.5}]
    found = compute_score("mine", "<think>2 + 2</think>\n<answer>5</answer>", "4", rewards=rewards)
    assert found == {"score": 0.5, "judged": 1.0, "math": 0.0, "format": 1.0}
    with pytest.raises(ConfigError, match="both"):
        compute_score("mine", "4", "4", reward="math", rewards=rewards)


def test_a_function_of_your_own(tmp_path: Path) -> None:
    code = "def longer(completions, level, **_):\n    return [len(c) * n for c, n in zip(completions, level)]\n"
    (tmp_path / "mine.py").write_text(code)
    found = compute_score("mine", "abcd", "x", {"level": 2}, reward=f"{tmp_path}/mine.py:longer")
    assert found["score"] == 8.0


def test_a_function_called_score_does_not_replace_the_weighted_sum(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(completions):\n    return [2.0]\n")
    rewards = [{"name": f"{tmp_path}/mine.py:score", "weight": 0.5}, {"name": "gsm8k"}]
    found = compute_score("mine", "#### 4", "4", rewards=rewards)
    assert found == {"score": 2.0, "judged": 1.0, "score_2": 2.0, "gsm8k": 1.0}
    assert compute_score("mine", "#### 5", "4", rewards=rewards)["score"] == 1.0


def test_rows_that_trew_has_written_have_the_columns_of_the_data(tmp_path: Path) -> None:
    code = "def same(completions, answer, index):\n    return [float(completions[0] == str(answer[0] + index[0]))]"
    (tmp_path / "mine.py").write_text(code)
    columns = {"answer": 7, "index": 5}
    [row] = to_rows([Prompt("0", text="3 + 4", columns=columns)], split="train", data_source="mine")
    given = {"extra_info": row["extra_info"], "reward": f"{tmp_path}/mine.py:same"}
    assert compute_score("mine", "12", row["reward_model"]["ground_truth"], **given)["score"] == 1.0
    assert compute_score("mine", "7", row["reward_model"]["ground_truth"], **given)["score"] == 0.0


def test_a_function_gets_the_answer_to_a_chat_as_messages_as_in_the_recipes_own_run(tmp_path: Path) -> None:
    code = "def same(completions, answer):\n    return [float(completions[0][0]['content'] == answer[0])]\n"
    (tmp_path / "mine.py").write_text(code)
    asked = Prompt("0", messages=({"role": "user", "content": "3 + 4"},), columns={"answer": "7"})
    [row] = to_rows([asked], split="train", data_source="mine")
    given = {"extra_info": row["extra_info"], "reward": f"{tmp_path}/mine.py:same"}
    assert compute_score("mine", "7", row["reward_model"]["ground_truth"], **given)["score"] == 1.0
    assert compute_score("mine", "8", row["reward_model"]["ground_truth"], **given)["score"] == 0.0


def test_a_function_called_reward_adds_nothing_to_verl_s_own_list_of_that_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward(completions):\n    return [2.0]\n")
    found = compute_score("mine", "4", "4", reward=f"{tmp_path}/mine.py:reward")
    assert found == {"score": 2.0, "judged": 1.0, "reward_2": 2.0}


def test_why_a_function_failed_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mine.py").write_text("def broken(completions):\n    raise ValueError('no such thing')\n")
    rewards = [{"name": f"{tmp_path}/mine.py:broken", "on_failure": "skip"}]
    assert compute_score("mine", "4", "4", rewards=rewards, failed_score=0.0)["judged"] == 0.0
    assert "no such thing" in caplog.text


NOTHING = "def nothing(completions):\n    return [None]\ndef needs(completions, level):\n    return [0.5]\n"
FOUR = r"\boxed{4}"


def test_what_a_function_does_not_judge_is_no_fault_of_the_gold(tmp_path: Path) -> None:
    """The gold was said to be unusable."""
    (tmp_path / "mine.py").write_text(NOTHING)
    nothing = f"{tmp_path}/mine.py:nothing"
    said = rf"could not be judged \({nothing} returned None\): not judged, which verl does not know.* failed_score=0"
    with pytest.raises(RewardError, match=said):
        compute_score("mine", "4", "4", reward=nothing)
    assert compute_score("mine", "4", "4", reward=nothing, failed_score=0.25)["score"] == 0.25
    # Beside another reward it is 0: as where a function judges the rows of another task alone.
    both = compute_score("mine", FOUR, "4", rewards=[{"name": "math"}, {"name": nothing, "weight": 0.5}])
    assert (both["score"], both["judged"], both["math"]) == (1.0, 1.0, 1.0)
    with pytest.raises(DataError, match="bad_gold"):  # this is the gold's fault
        compute_score("mine", "4", "no number", rewards=[{"name": nothing}, {"name": "gsm8k"}])


def test_a_function_that_does_not_count_may_return_none(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(NOTHING)
    nothing = f"{tmp_path}/mine.py:nothing"
    logged = [{"name": "math"}, {"name": nothing, "weight": 0.0}]
    assert compute_score("mine", FOUR, "4", rewards=logged)["score"] == 1.0
    behind = [{"name": "format", "gate": True, "weight": 0.0}, {"name": "math"}, {"name": nothing}]
    assert compute_score("mine", FOUR, "4", rewards=behind)["score"] == 0.0
    # One for rows of another kind was not asked.
    other = [{"name": "math"}, {"name": f"{tmp_path}/mine.py:needs", "calls": "group"}]
    assert compute_score("mine", FOUR, "4", rewards=other)["score"] == 1.0
    assert compute_score("mine", FOUR, "4", {"level": 2}, rewards=other)["score"] == 1.5


def test_what_cannot_be_judged_is_an_error_or_a_number_of_your_choice() -> None:
    with pytest.raises(DataError, match="bad_gold"):
        compute_score("mine", "4", "no number", reward="gsm8k")
    with pytest.raises(DataError, match="trew rewards test gsm8k --data FILE"):  # not its first reward
        compute_score("mine", "4", "no number", rewards=[{"name": "format"}, {"name": "gsm8k"}])
    loop = "```python\nwhile True: pass\n```"
    given = {
        "reward": "code_stdin",
        "args": {"timeout_s": 0.3},
        "extra_info": {"tests": [{"input": "", "output": "1"}]},
    }
    found = compute_score("mine", loop, "", **given)
    assert found["score"] == 0.0
    assert found["judged"] == 1.0  # a program that never ends is wrong; only a judge that fails leaves no number


def test_rewards_that_need_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="verl hands over its text alone"):
        compute_score("mine", "4", "4", rewards=[{"name": "math"}, {"name": "cosine", "args": {"max_len": 8}}])
    with pytest.raises(ConfigError, match="unknown reward"):
        compute_score("mine", "4", "4", reward="maths")


def test_functions_that_ask_for_tokens_are_refused(tmp_path: Path) -> None:
    """They were given empty lists, and scored every answer as an empty one."""
    file = tmp_path / "own.py"
    file.write_text("def f(completions, completion_ids, **kw):\n    return [float(len(i)) for i in completion_ids]\n")
    with pytest.raises(ConfigError, match="f: asks for completion_ids, and verl hands over the answer's text alone"):
        compute_score("mine", "4", "4", reward=f"{file}:f")


@pytest.mark.parametrize(
    ("given", "says"),
    [({"sets": ["a"]}, "trew train alone"), ({"verify_with": "format"}, "trew train alone"),
     ({"weight": math.nan}, "accepts a finite number")],
)  # fmt: skip
def test_settings_of_a_recipe_that_would_have_no_effect_are_refused(given: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compute_score("mine", "4", "4", rewards=[{"name": "math", **given}, {"name": "format"}])


def test_a_judge_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from trew.rewards import RewardSet
    from trew.rewards.reward_checks import scored_texts

    monkeypatch.setattr(RewardSet, "score", lambda self, groups: [scored_texts(["4"], [None])])
    with pytest.raises(RewardError, match="failed_score"):
        compute_score("mine", "4", "4", reward="math")
    assert compute_score("mine", "4", "4", reward="math", failed_score=0.0) == {"score": 0.0, "judged": 0.0}
    assert not math.isnan(compute_score("mine", "4", "4", reward="math", failed_score=0.0)["score"])
