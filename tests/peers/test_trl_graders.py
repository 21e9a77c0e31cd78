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
        ("cosine", {"max_len": 9}, "correct: got None, accepts the grader"),
        ("cosine", {"max_len": 9, "correct": True}, "correct: got True, accepts the grader"),
        ("gsm8k", {"correct": rewards.of("math")}, "does not ask which answers are right"),
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


def test_cosine_asks_another_grader():
    grade = rewards.cosine(correct=rewards.gsm8k(), max_len=8)
    given = {"completions": ["#### 72", "#### 7", "#### 72"], "completion_ids": [[1] * 8, [1] * 8, [1] * 4]}
    found = grade(prompts=["?"] * 3, answer=["72", "72", None], **given)
    assert found == [0.5, -0.5, None]
    assert grade(prompts=["?"] * 3, answer=["72"] * 3, **given)[2] == pytest.approx(0.75)
    assert grade.__name__ == "cosine"


OWN = """
def short(completions, answer, limit, **_):
    return [None if "7200" in text else float(len(text) <= limit) for text in completions]
"""


class TestTogether:
    def made(self, tmp_path, **more):
        (tmp_path / "mine.py").write_text(OWN)
        tables = [
            {"name": "gsm8k"},
            {"name": "cosine", "weight": 0.5, "args": {"max_len": 4}},
            {"name": f"{tmp_path / 'mine.py'}:short", "weight": 2.0, "args": {"limit": 14}},
            {"name": "format", "gate": True, "weight": 0.0, "args": {"template": "<a>…</a>"}},
        ]
        return rewards.together(tables, **more)

    def test_values_are_those_of_the_recipe(self, tmp_path):
        grade, logged = self.made(tmp_path, columns={"gold": "final"}, name="mine"), {}
        said = ["<a>#### 72</a>", "<a>#### 7200</a>", "#### 72", "<a>none at all</a>"]
        try:
            found = grade(
                prompts=["?"] * 4, completions=said, completion_ids=[[1] * 4] * 4, final=["72"] * 4, answer=["72"] * 4,
                trainer_state=object(), log_metric=logged.__setitem__,
            )  # fmt: skip
        finally:
            grade.rewards.close()
        # Where the function gave None, the mean of what it gave to the others stands in.
        right, wrong = 1 + 0.5 * 0.5, 0.5 * -0.5
        assert found == pytest.approx([right + 2, wrong + 2 * 2 / 3, 0.0, wrong])
        assert logged["rewards/mine/gsm8k"] == 0.5
        assert logged["rewards/mine/short"] == pytest.approx(2 / 3)
        assert grade.__name__ == "mine"

    def test_prompts_are_groups(self):
        grade = rewards.together([{"name": "gsm8k"}])
        prompts = [[{"role": "user", "content": text}] for text in "aabb"]
        groups = grade._groups(prompts, ["#### 72"] * 4, None, [{"answer": str(i // 3)} for i in range(4)])
        assert [len(group.rollouts) for group in groups] == [2, 1, 1]
        assert groups[0].prompt.messages == ({"role": "user", "content": "a"},)
        answers = [{"answer": value} for value in ("72", None)]
        assert [grade(prompts=["?"], completions=["#### 72"], answer=[a["answer"]]) for a in answers] == [[1.0], [None]]

    @pytest.mark.parametrize(
        ("tables", "says"),
        [
            ([], "empty list"),
            ([{"name": "gsm9k"}], "did you mean 'gsm8k'"),
            ([{"name": "gsm8k", "wait": 1}], "unknown key"),
            ([{"weight": 1.0}], "name: is required"),
            ([{"model": "some/model"}], "among TRL's reward_funcs"),
            ([{"name": "gsm8k", "verify_with": "math"}, {"name": "math"}], "verify_with"),
            ([{"name": "cosine", "args": {"max_len": 4}}], "must come first"),
        ],
    )
    def test_what_is_refused(self, tables, says):
        with pytest.raises(ConfigError, match=says):
            rewards.together(tables)

    def test_without_tokens(self):
        grade = rewards.together([{"name": "gsm8k"}, {"name": "cosine", "args": {"max_len": 4}}])
        with pytest.raises(DataError, match="completion_ids"):
            grade(prompts=["?"], completions=["a"], answer=["72"])
