"""Our graders as TRL reward functions: what TRL hands over, and what it gets back."""

from __future__ import annotations

import pytest

from trew.errors import ConfigError, DataError
from trew.integrations.trl import rewards

CHAT = [[{"role": "assistant", "content": "#### 72"}], [{"role": "assistant", "content": None}]]
TOOLS = [{"role": "assistant", "content": "#### 1"}, {"role": "tool", "content": "#### 2"},
         {"role": "assistant", "content": "#### 72"}]  # fmt: skip


def test_text_and_conversations():
    grade = rewards.gsm8k()
    assert grade(prompts=["?"] * 2, completions=["#### 72", "#### 73"], answer=["72", "72"]) == [1.0, 0.0]
    assert grade(prompts=["?"] * 2, completions=CHAT, answer=["72", "72"]) == [1.0, 0.0]
    assert grade(prompts=["?"], completions=[TOOLS], answer=["72"]) == [1.0]


def test_what_trl_adds_is_not_taken_for_a_column():
    more = {"trainer_state": object(), "log_extra": print, "log_metric": print, "environments": None}
    assert rewards.gsm8k()(prompts=["?"], completions=["#### 72"], completion_ids=[[1]], answer=["72"], **more) == [1.0]


def test_rows_that_are_not_judged_are_none():
    found = rewards.gsm8k()(prompts=["?"] * 3, completions=["#### 72"] * 3, answer=["72", None, "no number"])
    assert found == [1.0, None, None]


def test_columns_are_mapped():
    grade = rewards.of("gsm8k", columns={"gold": "final"})
    assert grade(prompts=["?"], completions=["#### 72"], final=["72"], answer=["3"]) == [1.0]
    with pytest.raises(DataError, match="no column 'final'"):
        grade(prompts=["?"], completions=["#### 72"], answer=["72"])


def test_arguments_are_those_of_the_grader():
    text = ["It is 72."]
    assert rewards.gsm8k(mode="flexible")(prompts=["?"], completions=text, answer=["72"]) == [1.0]
    assert rewards.gsm8k(mode="strict")(prompts=["?"], completions=text, answer=["72"]) == [0.0]


def test_what_reads_tokens_gets_them():
    grade = rewards.soft_overlong(max_completion_len=10, soft_punish_cache=4)
    assert grade(prompts=["?"] * 2, completions=["a", "b"], completion_ids=[[1] * 6, [1] * 8]) == [0.0, -0.5]
    with pytest.raises(DataError, match="completion_ids"):
        grade(prompts=["?"], completions=["a"])


def test_names_in_the_log():
    assert rewards.math().__name__ == "math"


@pytest.mark.parametrize(
    ("kind", "args", "says"),
    [
        ("maths", {}, "did you mean 'math'"),
        ("gsm8k", {"mood": "strict"}, "did you mean 'mode'"),
        ("gsm8k", {"mode": "loose"}, "accepts 'strict', 'flexible'"),
        ("cosine", {"max_len": 9}, "cannot see"),
    ],
)
def test_what_is_refused(kind, args, says):
    with pytest.raises(ConfigError, match=says):
        rewards.of(kind, **args)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="did you mean 'math'"):
        _ = rewards.maths


def test_steps_of_a_coroutine_function_are_refused():
    async def later(completions, **_):
        return [[] for _ in completions]

    with pytest.raises(ConfigError, match="accepts an ordinary one"):
        rewards.steps(later)
