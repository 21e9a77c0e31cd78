"""Groups that are graded early and late, and rewards that judge the same completion differently."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rewards_help import group, write
from trew.config import RewardConfig
from trew.errors import RewardError
from trew.rewards import RewardSet
from trew.rewards.user.session import Session

NUMBERS = """
    def half(completions, **kwargs):
        return [0.5] * len(completions)

    def some(completions, **kwargs):
        return [None if c == "none" else float(len(c)) for c in completions]

    def on_math(completions, task, **kwargs):
        return [1.0 if t == "math" else None for t in task]
"""


def test_grading_early_gives_what_grading_late_gives(tmp_path: Path) -> None:
    path = write(tmp_path, NUMBERS)
    configs = [
        RewardConfig(name="gsm8k"), RewardConfig(name="format", gate=True), RewardConfig(name=f"{path}:some"),
        RewardConfig(name=f"{path}:half", calls="group"), RewardConfig(name="cosine", args={"max_len": 9}),
    ]  # fmt: skip
    groups = [group("#### 72", "none", "7", uid=str(i), answer="72") for i in range(6)]
    rewards = RewardSet.from_config(configs, host=Session())
    expected = rewards.score(groups, step=3)
    for order in ([], [0, 1, 2, 3, 4, 5], [5, 2, 0], [3]):
        with rewards.grading(step=3) as grading:
            for number in order:
                grading.add(number, groups[number])
            told: list[int] = []
            scored = grading.finish(groups, progress=told.append)
        assert sum(told) == 18
        assert [s.group.prompt.uid for s in scored] == ["0", "1", "2", "3", "4", "5"]
        for a, b in zip(expected, scored, strict=True):
            assert [(s.value, s.parts, s.statuses) for s in a.scores] == [
                (s.value, s.parts, s.statuses) for s in b.scores
            ]


def test_an_error_while_grading_early_ends_the_step(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(completions):\n    raise ValueError('no')\n")
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f", calls="group")], host=Session())
    one = group("a")
    with rewards.grading() as grading:
        grading.add(0, one)
        with pytest.raises(RewardError, match="ValueError: no"):
            grading.finish([one])
    with pytest.raises(KeyboardInterrupt), rewards.grading() as grading:  # left by another error: not waited for
        raise KeyboardInterrupt


def test_grading_goes_on_while_the_caller_does_something_else(tmp_path: Path) -> None:
    source = "import time\ndef f(completions):\n    time.sleep(0.5)\n    return [1.0] * len(completions)\n"
    rewards = RewardSet.from_config([RewardConfig(name=f"{write(tmp_path, source)}:f", calls="group")])
    groups = [group("a", uid="a"), group("b", uid="b")]
    with rewards.grading() as grading:
        start = time.monotonic()
        for number, one in enumerate(groups):
            grading.add(number, one)
            time.sleep(0.7)  # generation of the next
        generated = time.monotonic() - start
        grading.finish(groups)
        assert time.monotonic() - start < generated + 0.5
    rewards.close()


# ------------------------------------------------------------------------------------------------ the same twice


def test_a_reward_that_is_not_the_same_twice_is_told(tmp_path: Path) -> None:
    source = """
        import itertools
        calls = itertools.count()

        def steady(completions):
            return [float(len(c)) for c in completions]

        def relative(completions):
            return [len(c) / len(completions) for c in completions]

        def unsteady(completions):
            return [float(next(calls)) for _ in completions]
    """
    path = write(tmp_path, source)
    names = ("steady", "relative", "unsteady")
    configs = [RewardConfig(name="gsm8k"), *(RewardConfig(name=f"{path}:{name}") for name in names)]
    rewards = RewardSet.from_config(configs, host=Session())
    scored = rewards.score([group("a", "bb", answer="1"), group("c", uid="other", answer="1")])
    [problem] = rewards.judged_alike(scored[0])
    assert problem.startswith(
        "reward 'unsteady' judges the same completion differently from call to call: 0.0, then 3.0, for prompt 'q1', "
        "completion 'a'."
    )


def test_why_a_built_in_could_not_judge_is_told() -> None:
    """The status alone reached the run, whose last message pointed to warnings that nobody had given."""
    rewards = RewardSet.from_config([RewardConfig(name="gsm8k"), RewardConfig(name="cosine", args={"max_len": 9})])
    rows = [group("#### 7", "7", answer="7"), group("#### 8", "8", answer="7 or 8", uid="bad"), group("#### 9")]
    with rewards.grading() as grading:
        grading.add(0, rows[0])
        grading.finish(rows)
    [told] = rewards.take_warnings()
    assert told == (
        "reward 'gsm8k': bad_gold: the gold answer is not exactly one number; for prompt 'bad', completion '#### 8'. "
        "2 of 4 completions have no value for it"
    )
    rewards.score(rows)
    assert [text.endswith("(this happened 2 times)") for text in rewards.take_warnings()] == [True]
    rewards.score(rows[:1])
    assert rewards.take_warnings() == []
