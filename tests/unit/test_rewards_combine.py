"""RewardSet: loading, golds from columns, weighted sums with missing values, checks at start-up, metrics."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from rewards_help import completion, group, write
from trew.config import RewardConfig
from trew.errors import ConfigError, RewardError
from trew.rewards import KINDS, RewardSet, Verdict, grade
from trew.rewards.combine import Reward, combined, one_by_one
from trew.types import Group, Prompt


def of(*rewards: RewardConfig | str) -> RewardSet:
    return RewardSet.from_config([RewardConfig(name=r) if isinstance(r, str) else r for r in rewards])


def values(rewards: RewardSet, *groups: Group) -> list[list[float | None]]:
    return [[score.value for score in scored.scores] for scored in rewards.score(groups)]


NUMBERS = """
    def half(completions, **kwargs):
        return [0.5] * len(completions)

    def some(completions, **kwargs):
        return [None if c == "none" else float(len(c)) for c in completions]

    def on_math(completions, task, **kwargs):
        return [1.0 if t == "math" else None for t in task]
"""


# --------------------------------------------------------------------------------------------------- built-ins


@pytest.mark.parametrize(
    "columns",
    [
        {"answer": "72"},
        {"answer": "48 + 24 = 72\n#### 72"},
        {"gold": 72},
        {"ground_truth": "72"},
        {"reward_model": {"style": "rule", "ground_truth": "72"}},
        {"answer": None, "gold": "72"},
        {"answer": "a worked solution with 3 numbers 4 5", "gold": "72"},  # the plain gold is preferred
    ],
)
def test_where_number_golds_stand(columns: dict) -> None:
    rows = group("#### 72", "#### 73", "72", **columns)
    assert values(of("gsm8k"), rows) == [[1.0, 0.0, 0.0]]
    assert values(of("arithmetic"), rows) == [[1.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    "columns",
    [
        {"nums": [8, 2, 1], "target": 15},
        {"numbers": [8, 2, 1], "target": "15"},
        {"ground_truth": {"numbers": [8, 2, 1], "target": 15}},
        {"ground_truth": '{"numbers": [8, 2, 1], "target": 15}'},
        {"reward_model": {"ground_truth": {"numbers": [8, 2, 1], "target": 15}}},
    ],
)
def test_where_countdown_golds_stand(columns: dict) -> None:
    rows = group("<answer>8*2-1</answer>", "<answer>8+2</answer>", **columns)
    assert values(of("countdown"), rows) == [[1.0, 0.0]]


def test_a_row_without_gold_is_not_applicable() -> None:
    [scored] = of("gsm8k").score([group("#### 72", question="?")])
    assert (scored.scores[0].value, scored.scores[0].status) == (None, "not_applicable")
    assert scored.scores[0].parts == {"gsm8k": None}
    [scored] = of("countdown").score([group("<answer>1</answer>", answer="1")])
    assert scored.scores[0].status == "not_applicable"


def test_arguments_reach_the_kind() -> None:
    flexible = RewardConfig(name="gsm8k", args={"mode": "flexible"})
    assert values(of(flexible), group("so 72", answer="72")) == [[1.0]]
    prefilled = RewardConfig(name="format", args={"prefilled": "<think>"})
    assert values(of(prefilled), group("a</think><answer>b</answer>")) == [[1.0]]
    half = RewardConfig(name="countdown", args={"require_all": False})
    assert values(of(half), group("<answer>8*2</answer>", nums=[8, 2, 1], target=16)) == [[1.0]]


def test_soft_overlong_counts_tokens() -> None:
    rewards = of(RewardConfig(name="soft_overlong", args={"max_completion_len": 100, "soft_punish_cache": 20}))
    rows = Group(Prompt("q", text="?"), tuple(completion("x", tokens=n) for n in (80, 90, 101)))
    assert values(rewards, rows) == [[0.0, -0.5, -1.0]]


# ------------------------------------------------------------------------------------------------- combination


def test_weighted_sum_and_parts() -> None:
    rewards = of("gsm8k", RewardConfig(name="format", weight=0.25))
    text = "<think>a</think><answer>#### 72</answer>"
    [scored] = rewards.score([group(text, "#### 72", "nothing", answer="72")])
    assert [s.value for s in scored.scores] == [1.25, 1.0, 0.0]
    assert scored.scores[0].parts == {"gsm8k": 1.0, "format": 1.0}
    assert scored.scores[0].extracted == "72</answer>"
    assert [s.status for s in scored.scores] == ["scored", "scored", "no_answer"]
    assert scored.scores[0].seconds > 0


def test_a_reward_of_another_task_is_left_out_of_the_sum(tmp_path: Path) -> None:
    path = write(tmp_path, NUMBERS)
    rewards = of("gsm8k", RewardConfig(name=f"{path}:on_math", weight=2.0))
    groups = [group("#### 72", answer="72", task="math"), group("#### 72", answer="72", task="other")]
    assert values(rewards, *groups) == [[3.0], [1.0]]


def test_missing_in_part_of_a_group_counts_with_the_groups_mean(tmp_path: Path) -> None:
    """Counted as 0, the completion that was not judged would come out worst; its own reward decides nothing."""
    path = write(tmp_path, NUMBERS)
    rewards = of(f"{path}:half", RewardConfig(name=f"{path}:some", weight=2.0))
    [scored] = rewards.score([group("ab", "none", "abcd")])
    assert [s.value for s in scored.scores] == [0.5 + 2 * 2, 0.5 + 2 * 3, 0.5 + 2 * 4]
    assert [s.parts["some"] for s in scored.scores] == [2.0, None, 4.0]


def test_none_of_all_rewards_is_no_value(tmp_path: Path) -> None:
    path = write(tmp_path, NUMBERS)
    [scored] = of(f"{path}:some").score([group("ab", "none")])
    assert [s.value for s in scored.scores] == [2.0, None]
    assert scored.scores[1].status == "not_applicable"


def test_a_bad_gold_makes_the_whole_value_unknown() -> None:
    rewards = of(RewardConfig(name="format", weight=0.1), "gsm8k")
    [scored] = rewards.score([group("<think>a</think><answer>#### 72</answer>", answer="seven")])
    assert (scored.scores[0].value, scored.scores[0].status) == (None, "bad_gold")
    assert scored.scores[0].parts == {"format": 1.0, "gsm8k": None}
    watched = of("format", RewardConfig(name="gsm8k", weight=0.0))  # watched only: the value does not need it
    [scored] = watched.score([group("<think>a</think><answer>b</answer>", answer="seven")])
    assert scored.scores[0].value == 1.0


def test_names_are_unique(tmp_path: Path) -> None:
    path = write(tmp_path, NUMBERS)
    other = write(tmp_path, NUMBERS, name="other.py")
    strict, flexible = RewardConfig(name="gsm8k"), RewardConfig(name="gsm8k", args={"mode": "flexible"})
    rewards = of(strict, flexible, f"{path}:half", f"{other}:half")
    assert rewards.names == ("gsm8k", "gsm8k_2", "half", "half_2")
    [scored] = rewards.score([group("so 72", answer="72")])
    assert scored.scores[0].parts == {"gsm8k": 0.0, "gsm8k_2": 1.0, "half": 0.5, "half_2": 0.5}


def test_progress_and_order() -> None:
    told: list[int] = []
    groups = [
        group("#### 1", "#### 2", uid="a", answer="1"),
        group("#### 1", uid="b", answer="1"),
        group(uid="c", answer="1"),
    ]
    scored = of("gsm8k").score(groups, progress=told.append)
    assert told == [2, 1, 0]
    assert [s.group.prompt.uid for s in scored] == ["a", "b", "c"]
    assert of("gsm8k").score([]) == []


# ----------------------------------------------------------------------------------------------------- loading


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, NUMBERS)
    broken = write(tmp_path, "x = 1\nimport nowhere_to_be_found\n", name="broken.py")
    with pytest.raises(ConfigError) as error:
        of(
            "gsm9k",
            RewardConfig(name="gsm8k", args={"mode": "loose", "thinkin": True}),
            f"{tmp_path}/absent.py:f",
            f"{path}:halve",
            f"{broken}:f",
            RewardConfig(name="countdown", args={"numbers": [1]}),
            "soft_overlong",
        )
    text = str(error.value)
    assert len(error.value.problems) == 9
    for part in (
        "rewards[0] 'gsm9k': unknown reward 'gsm9k' (did you mean 'gsm8k'?); built in are",
        "rewards[1] 'gsm8k': args.mode: got 'loose', accepts 'strict', 'flexible'",
        "args.thinkin: unknown argument (did you mean 'thinking'?)",
        "absent.py: no such file",
        "has no function 'halve' (did you mean 'half'?); it defines half, some, on_math",
        "broken.py:2: cannot be imported: ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        "args.numbers: comes from the data",
        "args.max_completion_len: is required",
        "args.soft_punish_cache: is required",
    ):
        assert part in text


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rewards: .*built in are gsm8k"):
        RewardSet.from_config([])
    with pytest.raises(ConfigError, match="every weight is 0"):
        of(RewardConfig(name="gsm8k", weight=0.0))


# -------------------------------------------------------------------------------------------------- check_golds


def prompt(uid: str, **columns: object) -> Prompt:
    return Prompt(uid, text="?", columns=columns)


def test_check_golds_reports_bad_rows() -> None:
    prompts = [prompt("a", answer="72"), prompt("b", answer="seven"), prompt("c", answer="7 or 8"), prompt("d")]
    assert of("gsm8k").check_golds(prompts) == [
        "row 2 (b): reward 'gsm8k': gold 'seven': the gold answer is not exactly one number",
        "row 3 (c): reward 'gsm8k': gold '7 or 8': the gold answer is not exactly one number",
    ]


@pytest.mark.parametrize("args", [{}, {"mode": "flexible"}, {"thinking": True}, {"mode": "flexible", "thinking": True}])
def test_check_golds_accepts_good_rows(args: dict) -> None:
    prompts = [
        prompt(f"{i}", answer=gold) for i, gold in enumerate(["72", 72, -3, "1,200", "0.5", "1/2", "1+1\n#### -2"])
    ]
    assert of(RewardConfig(name="gsm8k", args=args)).check_golds(prompts) == []


def test_check_golds_answers_with_the_gold_itself() -> None:
    """1/2 can be read as a gold, but arithmetic takes no fraction for an answer: such a row could never be right."""
    assert of("arithmetic").check_golds([prompt("a", answer="1/2")]) == [
        "row 1 (a): reward 'arithmetic': gold '1/2': a division that was not worked out"
    ]
    assert of("arithmetic").check_golds([prompt("a", answer="#### -5"), prompt("b", answer=0.5)]) == []


def test_check_golds_of_countdown() -> None:
    prompts = [
        prompt("a", nums=[8, 2], target=16),
        prompt("b", nums=[8, "x"], target=16),
        prompt("c", nums=[8, 2]),
        prompt("d", nums=[8, 2], target=10**6),  # whether it can be reached is not asked
    ]
    assert of("countdown").check_golds(prompts) == [
        "row 2 (b): reward 'countdown': 'x' among the numbers is not a whole number of at least 0",
        "row 3 (c): reward 'countdown': no target is given",
    ]


def test_check_golds_reports_a_reward_that_applies_nowhere(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(completions, solution):\n    return [0.0 for _ in completions]\n")
    rewards = of("gsm8k", "format", f"{path}:f")
    problems = rewards.check_golds([prompt("a", question="?", solutions="1"), prompt("b", question="?")])
    assert problems == [
        "reward 'gsm8k' applies to none of the 2 rows: it looks for gold, ground_truth, answer or "
        "reward_model.ground_truth; columns: question, solutions",
        f"reward 'f' ({path}) needs column 'solution' (did you mean 'solutions'?), which no row has; "
        "columns: question, solutions",
    ]


def test_no_two_rewards_have_one_name_though_a_function_is_called_like_a_second_one(tmp_path: Path) -> None:
    path = write(tmp_path, "def gsm8k_2(completions):\n    return [0.25 for _ in completions]\n")
    rewards = of("gsm8k", f"{path}:gsm8k_2", "gsm8k")
    assert rewards.names == ("gsm8k", "gsm8k_2", "gsm8k_3")
    [score] = rewards.score([group("#### 1", gold="1")])[0].scores
    assert score.parts == {"gsm8k": 1.0, "gsm8k_2": 0.25, "gsm8k_3": 1.0}
    assert score.value == 2.25


def test_columns_that_no_row_has_together_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(completions, hint, solution):\n    return [0.0 for _ in completions]\n")
    assert of(f"{path}:f").check_golds([prompt("a", hint="1"), prompt("b", solution="1")]) == [
        f"reward 'f' ({path}) needs columns 'hint', 'solution' in one row, which no row has; columns: hint, solution"
    ]


def test_a_batch_without_a_column_that_other_rows_have(tmp_path: Path) -> None:
    path = write(tmp_path, "def f(completions, solution):\n    return [1.0 for _ in completions]\n")
    rewards = of(f"{path}:f")
    without = group("x", other="?")
    with pytest.raises(RewardError, match=r"column 'solution'.* columns: other"):
        rewards.score([without])
    assert rewards.check_golds([prompt("a", solution=1), prompt("b")]) == []
    [scored] = rewards.score([without])
    assert scored.scores[0].status == "not_applicable"
    assert values(rewards, without, group("x", solution=1)) == [[None], [1.0]]
    assert len(rewards.check_golds([without.prompt])) == 1  # of data that have it nowhere: refused again
    with pytest.raises(RewardError, match="column 'solution'"):
        rewards.score([without])


# ------------------------------------------------------------------------------------------------------ summary


def test_summary(tmp_path: Path) -> None:
    rewards = of("gsm8k", RewardConfig(name="format", weight=0.5))
    scored = rewards.score([group("#### 72", "72", answer="72"), group("#### 72", answer="?"), group("x")])
    summary = dict(rewards.summary(scored))
    assert summary.pop("reward/gsm8k/seconds")[1] == 3.0  # asked for: a row without a gold is not
    assert summary.pop("reward/format/seconds")[1] == 4.0
    assert summary == {
        "reward/gsm8k/bad_gold": (1.0, 4.0),
        "reward/gsm8k/no_answer": (1.0, 4.0),
        "reward": (1.0, 3.0),
        "reward/gsm8k": (1.0, 2.0),
        "reward/gsm8k/none": (2.0, 4.0),
        "reward/format": (0.0, 4.0),
        "reward/no_answer": (1.0, 4.0),
        "reward/none": (1.0, 4.0),
        "reward/none/bad_gold": (1.0, 4.0),
    }
    assert rewards.summary([])["reward"] == (0, 0.0)


# -------------------------------------------------------------------------------------------------------- gates

FORMAT_GATE = [(1.0, 1.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0)]
"""layout right, answer right -> the value of a gate of weight 0 and an answer of weight 1"""


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_a_gate_lets_the_others_count_where_it_is_above_0(weight: float) -> None:
    rewards = of(RewardConfig(name="format", gate=True, weight=weight), "gsm8k")
    texts = [
        "<think>a</think><answer>#### 72</answer>", "<think>a</think><answer>#### 7</answer>", "#### 72", "#### 7",
    ]  # fmt: skip
    [scored] = rewards.score([group(*texts, answer="72")])
    expected = [weight * layout + value for layout, _, value in FORMAT_GATE]
    assert [s.value for s in scored.scores] == expected
    assert [s.parts for s in scored.scores] == [{"format": a, "gsm8k": b} for a, b, _ in FORMAT_GATE]
    assert [rewards.each(s) for s in scored.scores] == [(a, value) for a, _, value in FORMAT_GATE]


def verdicts(*rows: list) -> list[list[Verdict]]:
    """Numbers, None (does not apply) and statuses as verdicts: one list per reward."""

    def verdict(entry: float | str | None) -> Verdict:
        if isinstance(entry, str):
            return Verdict(None, entry)  # type: ignore[arg-type]
        return Verdict(entry, "not_applicable" if entry is None else "scored")

    return [[verdict(entry) for entry in row] for row in rows]


GATE, ANSWER, STYLE = Reward("g", "g", 0.0, gate=True), Reward("a", "a", 1.0), Reward("s", "s", 0.5)


@pytest.mark.parametrize(
    ("gate", "answer", "style", "value"),
    [
        (1.0, 1.0, 1.0, 1.5),
        (0.0, 1.0, 1.0, 0.0),
        (-1.0, 1.0, 1.0, 0.0),  # above 0 it must be
        (0.5, 1.0, 1.0, 1.5),
        (None, 1.0, 1.0, 1.5),  # does not apply: open
        ("timeout", 1.0, 1.0, None),  # unknown whether it is open
        (1.0, "timeout", 1.0, None),
        (0.0, "timeout", 1.0, 0.0),  # behind a closed gate nothing is missing
        (1.0, None, 1.0, 0.5),
        (1.0, None, None, 0.0),  # only the gate spoke
        (None, None, None, None),
        ("bad_gold", None, None, None),
    ],
)
def test_what_value_comes_of_a_gate_and_two_others(gate, answer, style, value) -> None:
    [score] = combined([GATE, ANSWER, STYLE], verdicts([gate], [answer], [style]), lengths=[1])
    assert score.value == value
    none = (None, None, None)
    closed = isinstance(gate, float) and gate <= 0
    each = [None if isinstance(x, str) else x for x in (gate, answer, style)]
    if closed:
        each = [gate, *(None if x is None else 0.0 for x in each[1:])]
    assert one_by_one([GATE, ANSWER, STYLE], score) == (none if value is None else tuple(each))


def test_two_gates_and_both_hold() -> None:
    two = Reward("h", "h", 2.0, gate=True)
    for g, h, value in (
        (1.0, 1.0, 3.0),
        (1.0, 0.0, 0.0),
        (0.0, 1.0, 2.0),
        ("timeout", 0.0, 0.0),
        (1.0, "timeout", None),
    ):
        [score] = combined([GATE, two, ANSWER], verdicts([g], [h], [1.0]), lengths=[1])
        assert score.value == value, (g, h)


def test_what_is_only_watched_gives_no_value() -> None:
    watched = Reward("w", "w", 0.0)
    [score] = combined([watched, ANSWER], verdicts([1.0], [None]), lengths=[1])
    assert (score.value, score.status, score.parts) == (None, "not_applicable", {"w": 1.0, "a": None})


def test_settings_that_would_do_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, NUMBERS)
    with pytest.raises(ConfigError) as error:
        of(
            RewardConfig(name="gsm8k", timeout_s=3.0, on_failure="skip", calls="group", verify_with="maths"),
            RewardConfig(name=f"{path}:half", timeout_s=3.0, on_failure="skip", calls="group", verify_with="gsm8k"),
        )
    assert len(error.value.problems) == 4
    for part in (
        "rewards[0] 'gsm8k': timeout_s: got 3.0, but it is for functions in files; this is a built-in kind",
        "on_failure: got 'skip'",
        "calls: got 'group'",
        "rewards[0].verify_with: got 'maths', accepts another reward of this recipe: half",
    ):
        assert part in str(error.value)
    with pytest.raises(ConfigError, match="every reward is a gate"):
        of(RewardConfig(name="format", gate=True), RewardConfig(name="gsm8k", gate=True))
    with pytest.raises(ConfigError, match="weight = 0"):
        of(RewardConfig(name="gsm8k", verify_with="gsm8k"))


def test_cosine_asks_the_first_reward() -> None:
    rewards = of("gsm8k", RewardConfig(name="cosine", args={"max_len": 100}))
    [scored, other] = rewards.score([group("#### 72", "#### 7", "72", answer="72"), group("x")])
    n = len("#### 72")
    assert [s.parts["cosine"] for s in scored.scores] == [
        grade("cosine", "", length=k, correct=right, max_len=100).score
        for k, right in ((n, True), (n - 1, False), (2, False))
    ]
    assert other.scores[0].statuses == {"gsm8k": "not_applicable", "cosine": "not_applicable"}


def test_kinds_that_grade_side_by_side_get_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def grade_many(items):
        calls.append(len(items))
        return [KINDS["gsm8k"].grade(text, gold, **args) for text, gold, args in items]

    groups = [group("#### 1", "#### 2", uid=str(i), answer="1") for i in range(3)] + [group("x", uid="other")]
    plain = of("gsm8k").score(groups)
    monkeypatch.setitem(KINDS, "gsm8k", replace(KINDS["gsm8k"], grade_many=grade_many))
    together = of("gsm8k").score(groups)
    assert calls == [6]
    assert [[s.value for s in g.scores] for g in plain] == [[s.value for s in g.scores] for g in together]
    assert together[0].scores[0].seconds > 0


def test_rows_that_no_reward_applies_to_are_named_with_their_place(tmp_path):
    from trew.config import DataConfig
    from trew.data.load import load_prompts

    rows = [{"prompt": f"{i}?", "gold": str(i)} for i in range(8)]
    for at in (2, 5):
        del rows[at]["gold"]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = load_prompts(DataConfig(task="prompts", train=str(path)))
    alone = RewardSet.from_config([RewardConfig(name="gsm8k")])
    (note,) = alone.column_notes(prompts)
    assert note.startswith("2 of 8 prompts have nothing that a reward looks for")
    assert "train.jsonl line 3, train.jsonl line 6;" in note
    assert alone.column_notes(prompts[:2]) == []
    form = RewardConfig(name="format")
    assert RewardSet.from_config([RewardConfig(name="gsm8k"), form]).column_notes(prompts) == [note]
    assert RewardSet.from_config([form]).column_notes(prompts) == []


def test_the_mean_for_a_missing_number_does_not_depend_on_the_order_of_the_completions() -> None:
    rewards = [Reward("a", "math", 1.0), Reward("b", "math", 1.0)]
    numbers = [Verdict(0.1), Verdict(0.2), Verdict(0.3), Verdict(0.7), Verdict(None, "not_applicable")]
    found = set()
    for order in itertools.permutations(numbers):
        scores = combined(rewards, [order, [Verdict(0.0)] * 5], lengths=[1] * 5)
        found.add(scores[order.index(numbers[-1])].value)
    assert len(found) == 1


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_behind_a_closed_gate_a_completion_has_a_step_of_its_value(weight: float) -> None:
    # Without a step an objective that learns from steps would leave it out, and a broken layout would cost nothing.
    rewards = [Reward("format", "format", weight, gate=True), Reward("prm", "", 1.0)]
    judged = Verdict(0.5, steps=((2, 0.25), (4, 0.75)))
    kept, closed, failed = combined(
        rewards,
        [[Verdict(1.0), Verdict(0.0), Verdict(0.0)], [judged, judged, Verdict(None, "timeout")]],
        lengths=[4, 4, 4],
    )
    assert kept.steps[0] == (2, 0.25)
    assert closed.value == failed.value == 0.0
    assert closed.steps == failed.steps == ((4, 0.0),)


def test_without_steps_in_the_group_a_closed_gate_makes_none() -> None:
    rewards = [Reward("format", "format", 0.0, gate=True), Reward("answer", "", 1.0)]
    scores = combined(rewards, [[Verdict(1.0), Verdict(0.0)], [Verdict(1.0), Verdict(1.0)]], lengths=[4, 4])
    assert [score.steps for score in scores] == [(), ()]
