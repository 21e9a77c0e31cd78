"""Monitors on made runs: each fires on what it is for, and is silent on a run like any other."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable

import pytest

from rewards_help import completion
from rollouts_help import rollout
from trew.diagnostics import monitors
from trew.diagnostics.monitors import (
    ADVICE,
    QUIET,
    WINDOW,
    Monitors,
    answers_in,
    exits,
    identical,
    lengths,
    order,
    rows,
)
from trew.rewards.combine import Reward
from trew.rewards.reward_checks import scored_texts
from trew.types import Group, Prompt, Rollout, Score, ScoredGroup

CHECKED = (Reward("a", "gsm8k", 1.0, verify_with="b"), Reward("b", "gsm8k", 0.0))
Draw = Callable[[random.Random, int, int], tuple[str, int, dict[str, float | None]]]
"""(generator, step, sample) -> text, tokens, parts"""


def step_of(draw: Draw, *, seed: int, step: int, groups: int = 8, samples: int = 8) -> list[ScoredGroup]:
    generator = random.Random(f"{seed}:{step}")
    made = []
    for g in range(groups):
        drawn = [draw(generator, step, sample) for sample in range(samples)]
        completions = tuple(completion(text, tokens=tokens) for text, tokens, _ in drawn)
        scores = tuple(Score(parts.get("a"), parts=parts) for _, _, parts in drawn)
        made.append(ScoredGroup(Group(Prompt(f"{g}", text="?"), completions), scores))
    return made


def warned(draw: Draw, *, steps: int = 60, seed: int = 0, **settings: bool) -> dict[int, list[str]]:
    watching = Monitors(CHECKED, **settings)
    told = {step: watching.observe(step_of(draw, seed=seed, step=step), step=step)[1] for step in range(1, steps + 1)}
    return {step: texts for step, texts in told.items() if texts}


def ordinary(generator: random.Random, step: int, sample: int) -> tuple[str, int, dict[str, float | None]]:
    """Learns slowly; length has nothing to do with the reward; two verifiers that nearly agree."""
    right = float(generator.random() < 0.3 + step / 200)
    other = 1 - right if generator.random() < 0.02 else right
    tokens = int(generator.gauss(60, 10))
    boxes = "\\boxed{7}" * (2 if generator.random() < 0.1 else 1)
    code = "```python\nprint(1)\n```\n" if generator.random() < 0.5 else ""
    return f"{generator.random()} {code} {boxes}", max(tokens, 1), {"a": right, "b": other}


@pytest.mark.parametrize("seed", range(6))
def test_an_ordinary_run_is_silent(seed: int) -> None:
    assert warned(ordinary, seed=seed) == {}


def first_in_group(generator, step, sample):
    text, tokens, _ = ordinary(generator, step, sample)
    value = float(generator.random() < (0.6 if sample < 4 else 0.4))
    return text, tokens, {"a": value, "b": value}


def lists_answers(generator, step, sample):
    text, tokens, parts = ordinary(generator, step, sample)
    return text + "\\boxed{1}\\boxed{2}" * (generator.random() < step / 60), tokens, parts


def one_text(generator, step, sample):
    _, _, parts = ordinary(generator, step, sample)
    return f"the same {generator.randrange(3)}", 50, parts


def leaves_early(generator, step, sample):
    _, tokens, parts = ordinary(generator, step, sample)
    body = "import sys\nsys.exit(0)" if generator.random() < 0.2 else f"print({generator.random()})"
    return f"```python\n{body}\n```", tokens, parts


def is_fooled(generator, step, sample):
    text, tokens, parts = ordinary(generator, step, sample)
    return text, tokens, {"a": 1.0, "b": 0.0} if generator.random() < 0.2 else parts


def longer_and_longer(generator, step, sample):
    text, _, _ = ordinary(generator, step, sample)
    tokens = int(generator.gauss(60 + 3 * step, 20 + step))
    right = float(tokens > 60 + 3 * step)
    return text, max(tokens, 1), {"a": right, "b": right}


def shorter_and_shorter(generator, step, sample):
    text, _, _ = ordinary(generator, step, sample)
    tokens = max(int(generator.gauss(400 / (1 + step / 10), 160 / (1 + step / 10))), 1)
    right = float(tokens < 400 / (1 + step / 10))
    return text, tokens, {"a": right, "b": right}


HACKED = [
    (first_in_group, "order", "the first half of each group scores +0."),
    (lists_answers, "several_answers", "of completions give several answers"),
    (one_text, "identical", "have a twin in their group"),
    (leaves_early, "exits", "of programs end themselves"),
    (longer_and_longer, "length_gap", "longer than others of their group, and completions have become"),
    (shorter_and_shorter, "length_gap", "shorter than others of their group, and completions have become 0."),
]


@pytest.mark.parametrize(("draw", "name", "says"), HACKED, ids=lambda value: getattr(value, "__name__", None))
def test_what_looks_like_hacking_is_told_with_advice(draw: Draw, name: str, says: str) -> None:
    told = warned(draw)
    texts = [text for texts in told.values() for text in texts]
    assert texts
    for text in texts:
        assert says in text
        assert text.endswith(ADVICE[name])
    assert len(texts) == 1 + (60 - min(told)) // QUIET  # not every step


def test_two_verifiers_that_disagree() -> None:
    [text] = warned(is_fooled, steps=20)[2]  # 128 completions
    assert "rewards 'a' and 'b' disagree on 2" in text
    assert "'a' gives credit that 'b' does not" in text
    assert "One of the two is being fooled" in text


def test_a_rate_limit_shows_in_the_order_of_the_step() -> None:
    """What is asked late gets nothing."""

    def limited(step: int) -> list[ScoredGroup]:
        made = step_of(ordinary, seed=1, step=step)
        none = [tuple(Score(0.0, parts={"a": 0.0, "b": 0.0}) for _ in g.scores) for g in made[6:]]
        return made[:6] + [ScoredGroup(g.group, scores) for g, scores in zip(made[6:], none, strict=True)]

    for shuffled in (True, False):
        watching = Monitors(CHECKED, shuffled=shuffled)
        texts = [t for step in range(1, 41) for t in watching.observe(limited(step), step=step)[1]]
        assert [t for t in texts if t.endswith(ADVICE["rows"])] == texts
        assert bool(texts) == shuffled  # in a fixed order rows may differ for good reasons


def test_figures_are_of_the_step_alone() -> None:
    """So that a resumed run writes the same rows."""
    fresh, old = Monitors(CHECKED), Monitors(CHECKED)
    for step in range(1, WINDOW + 5):
        old.observe(step_of(lists_answers, seed=2, step=step), step=step)
    made = step_of(lists_answers, seed=2, step=99)
    row = fresh.observe(made, step=99)[0]
    assert row == old.observe(made, step=99)[0]
    assert set(row) == {
        "monitor/order", "monitor/rows", "monitor/several_answers", "monitor/identical", "monitor/exits",
        "monitor/length_gap", "monitor/disagree/a", "monitor/disagree/a/credit",
    }  # fmt: skip
    assert Monitors().observe([], step=1) == ({}, [])


def test_warnings_go_on_from_a_state_that_went_through_json() -> None:
    """Half of the steps by one object, the other half by another that was given its state: the same warnings."""
    whole, first, second = Monitors(CHECKED), Monitors(CHECKED), Monitors(CHECKED)
    told = []
    for step in range(1, 90):
        made = step_of(lists_answers, seed=2, step=step)
        expected = whole.observe(made, step=step)[1]
        half = first if step < 40 else second
        if step == 40:
            second.load_state(json.loads(json.dumps(first.state())))
        assert half.observe(made, step=step)[1] == expected, step
        told += [step] * bool(expected)
    assert min(told) < 40 < max(told)


# ------------------------------------------------------------------------------------------------ figures by hand


def test_order_by_hand() -> None:
    figures = order([scored_texts("abcd", [1.0, 0.0, 0.0, 0.0]), scored_texts("abc", [2.0, None, 1.0])])
    # 1/2 - 0 and 2 - 1; S^2 = 1/4 and 1/2; variances S^2 (1/2 + 1/2) and S^2 (1 + 1)
    assert figures["order"] == (1.5, 2.0)
    assert figures["order_variance"] == pytest.approx((0.25 + 1.0, 2.0))
    assert order([scored_texts("a", [1.0])])["order"] == (0.0, 0.0)
    assert rows([scored_texts("ab", [1.0, 0.0]), scored_texts("ab", [None, None]), scored_texts("a", [1.0])])[
        "rows"
    ] == (-0.5, 1.0)


def test_identical_by_hand() -> None:
    long, other = "a" * 40, "b" * 40
    assert identical([scored_texts([long, long, other, "c", "c"], [1.0] * 5)])["identical"] == (2.0, 3.0)
    assert identical([scored_texts([long], [1.0]), scored_texts([long], [1.0])])["identical"] == (0.0, 2.0)


def test_episodes_that_end_with_the_same_words_are_no_twins() -> None:
    def played(first: str) -> Rollout:
        return Rollout((*rollout(40, text=first).turns, *rollout(40, text="Done.").turns), ending="done")

    def group_of(*firsts: str) -> ScoredGroup:
        return ScoredGroup(Group(Prompt("q", text="?"), tuple(map(played, firsts))), (Score(1.0),) * len(firsts))

    assert identical([group_of("left", "right", "up")])["identical"] == (0.0, 3.0)
    assert identical([group_of("left", "left", "up")])["identical"] == (2.0, 3.0)


def test_lengths_by_hand() -> None:
    figures = lengths([scored_texts(["aaaa", "bb"], [1.0, 0.0]), scored_texts(["aaaa", "bb"], [1.0, 1.0])])
    assert figures == {"length": (12.0, 4.0), "length_gap": (2 / 3, 1.0)}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("\\boxed{1} \\boxed{2} \\boxed{3}", 3),
        ("#### 1\n#### 2", 2),
        ("<answer>1</answer><answer>2</answer>", 2),
        ("<think>\\boxed{1} \\boxed{2}</think>\\boxed{2}", 1),
        ("<think>\\boxed{1} \\boxed{2}", 0),
        ("7 or 8", 0),
    ],
)
def test_answers_in(text: str, count: int) -> None:
    assert answers_in(text) == count


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("import sys\nsys.exit(0)", True), ("import os; os._exit(0)", True), ("exit()", True), ("quit ()", True),
        ("raise SystemExit", True), ("os.kill(os.getpid(), 9)", True), ("print('existing')", False),
        ("def exits(): pass", False), ("x = my.exit_code", False),
    ],
)  # fmt: skip
def test_exits(program: str, found: bool) -> None:
    text = f"exit() in words\n```python\nprint(1)\n```\nthen\n```python\n{program}\n```\ndone"
    assert exits([scored_texts([text], [1.0])])["exits"] == (float(found), 1.0)
    assert exits([scored_texts(["no code, exit()"], [1.0])])["exits"] == (0.0, 0.0)


def test_every_monitor_has_advice() -> None:
    assert set(ADVICE) == {"order", "rows", "several_answers", "identical", "exits", "length_gap"}
    assert monitors.LEAST <= 8 * 8 * WINDOW


# --------------------------------------------------------------------------------------------------------------------
# Rewards of any size


HUGE = [1e300, -1e300, 1.7e308, float("inf"), float("-inf"), 10**400, -(10**400)]


@pytest.mark.parametrize("huge", HUGE, ids=lambda value: str(value)[:6])
def test_a_huge_reward_is_no_error_and_leaves_figures_that_are_numbers(huge):
    def draw(generator: random.Random, step: int, sample: int) -> tuple[str, int, dict[str, float | None]]:
        text, tokens, parts = ordinary(generator, step, sample)
        return text, tokens, parts | ({"a": huge} if sample == step % 8 else {})

    watching = Monitors(CHECKED, shuffled=True)
    for step in range(1, 2 * WINDOW):
        shown, told = watching.observe(step_of(draw, seed=0, step=step), step=step)
        assert all(math.isfinite(value) for value in shown.values()), shown
        assert not any("nan" in text or "inf" in text for text in told), told
    assert json.loads(json.dumps(watching.state())) == json.loads(json.dumps(watching.state(), allow_nan=False))


def test_groups_whose_rewards_are_all_huge_still_show_that_order_matters():
    def draw(generator: random.Random, step: int, sample: int) -> tuple[str, int, dict[str, float | None]]:
        return "text", 5, {"a": 1e300 if sample < 4 else 0.0, "b": None}

    told = warned(draw, shuffled=False)
    assert any("the first half of each group scores" in text for texts in told.values() for text in texts), told


@pytest.mark.parametrize("opening", ["```python3", "```PYTHON", "```python title=x.py", "```py\r"])
def test_programs_are_found_as_the_graders_find_them(opening: str) -> None:
    text = f"{opening}\nimport os\nprint('```')\nos._exit(0)\n```"
    assert exits([scored_texts([text, "```python\nprint(1)\n```"], [1.0, 1.0])]) == {"exits": (1.0, 2.0)}
