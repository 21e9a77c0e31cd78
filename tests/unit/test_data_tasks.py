"""The tasks: what their prompts and columns are, and that what they claim about held-out problems is true."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from trew.config import DataConfig, RewardConfig
from trew.data import Dataset, load_task, make_task
from trew.data.files import write_rows
from trew.data.tasks import forms
from trew.data.tasks.gsm8k import final_answer
from trew.data.tasks.prompts import Prompts
from trew.errors import ConfigError, DataError

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"


def made(task: str, *, n: int = 20, seed: int = 0, **args: Any) -> Dataset:
    return load_task(DataConfig(task=task, args=args), eval_size=n, seed=seed)


def content(prompt: Any) -> str:
    return prompt.messages[-1]["content"]


# --------------------------------------------------------------------------------------------------------------------
# GSM8K


@pytest.mark.skipif(not GSM8K.is_dir(), reason="the GSM8K files are not here")
def test_the_whole_of_gsm8k_loads() -> None:
    data = load_task(DataConfig(task="gsm8k", train=str(GSM8K)), eval_size=1319, seed=0)
    assert (len(data.train), len(data.eval)) == (7473, 1319)
    assert all(re.fullmatch(r"-?\d+(\.\d+)?", p.columns["gold"]) for p in [*data.train, *data.eval])
    assert [p.columns["gold"] for p in data.train[:3]] == ["72", "10", "5"]
    assert [p.columns["gold"] for p in data.eval[:4]] == ["18", "3", "70000", "540"]
    assert len({p.uid for p in [*data.train, *data.eval]}) == 7473 + 1319
    assert not any("in the training data" in note for note in data.notes)
    assert data.default_rewards == (RewardConfig(name="gsm8k", args={"mode": "strict"}),)


def gsm8k_rows(n: int) -> list[dict[str, Any]]:
    return [{"question": f"How many are {i} thousand?", "answer": f"Easy.\n#### {i},000"} for i in range(1, n + 1)]


def test_gsm8k_prompt_is_one_user_turn_with_the_instruction(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", gsm8k_rows(6))
    args = {"instruction": "End with ####.", "mode": "flexible", "system": "Be brief."}
    data = load_task(DataConfig(task="gsm8k", train=str(tmp_path), args=args), eval_size=2, seed=0)
    prompt = min([*data.train, *data.eval], key=lambda p: p.uid)
    assert prompt.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many are 1 thousand?\n\nEnd with ####."},
    )
    assert prompt.columns["gold"] == "1000"
    assert prompt.columns["answer"] == "Easy.\n#### 1,000"
    assert data.default_rewards[0].args == {"mode": "flexible"}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "q", "answer": "no mark 5"}, "has no '####'"),
        ({"question": "q", "answer": "#### five"}, "must be a number, got 'five'"),
        ({"question": "q", "answer": "####"}, "must be a number"),
        ({"question": "q", "answer": "#### 3,14"}, "must be a number, got '3,14'"),  # it became 314
        ({"question": "q", "answer": "#### 1,0,0"}, "must be a number, got '1,0,0'"),
        ({"question": None, "answer": "#### 5"}, "'question' must be a string, got null"),
        ({"question": "q", "answer": 5}, "'answer' must be a string, got 5 (number)"),
        ({"question": "q"}, "no column 'answer'"),
    ],
)
def test_gsm8k_rows_that_cannot_be_graded_are_refused(row: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl", [*gsm8k_rows(3), row])
    with pytest.raises(DataError, match=r"train\.jsonl line 4") as caught:
        load_task(DataConfig(task="gsm8k", train=str(tmp_path)), eval_size=1, seed=0)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("solution", "gold"),
    [
        ("#### 72", "72"),
        ("a\n#### 1,234.50 ", "1234.50"),
        ("#### -3", "-3"),
        ("#### 1\n#### 2", "2"),
        ("#### $5", "5"),
        ("#### $1,234,567", "1234567"),
    ],
)
def test_final_answer(solution: str, gold: str) -> None:
    assert final_answer(solution) == gold


# --------------------------------------------------------------------------------------------------------------------
# Arithmetic: values checked with Python's own integers, form by form

VALUES: dict[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: Fraction(a, b),
    "a + b * c": lambda a, b, c: a + b * c,
    "a + b - c": lambda a, b, c: a + b - c,
    "(a - b) * c": lambda a, b, c: (a - b) * c,
    "a / b - c": lambda a, b, c: Fraction(a, b) - c,
    "a * b + c * d": lambda a, b, c, d: a * b + c * d,
}


@pytest.mark.parametrize("op", VALUES)
def test_arithmetic_golds_are_right(op: str) -> None:
    data = made("arithmetic", ops=[op], smallest=-12, largest=40)
    assert len(data.eval) == 20
    for prompt in [*data.train[:500], *data.eval]:
        numbers = [int(n) for n in re.findall(r"(?<![\d)] )-?\d+", prompt.columns["expression"].replace("(-", "( -"))]
        assert VALUES[op](*numbers) == int(prompt.columns["gold"]), prompt.columns
        assert content(prompt) == f"What is {prompt.columns['expression']}? Answer with the number only."


def test_arithmetic_small_universe_is_used_up_exactly() -> None:
    data = made("arithmetic", n=200)
    every = {f"{a} {op} {b}" for op in "+-*" for a in range(10) for b in range(10)}
    train = {p.columns["expression"] for p in data.train}
    held = {p.columns["expression"] for p in data.eval}
    assert len(held) == len(data.eval) == 200
    assert train | held <= every
    assert len(every - train - held) <= 2  # the swapped twin of the last one held out of + and of *
    swapped = {f"{b} {op} {a}" for a, op, b in map(str.split, held) if op in "+*"}
    assert not train & (held | swapped)


def test_problems_are_the_same_in_any_order_of_summands_or_factors() -> None:
    def same(first: str, second: str, *numbers: int) -> bool:
        """Whether ``first`` of 2, 3, 5, 7 and ``second`` of ``numbers`` are one problem."""
        one, other = (
            forms.parse(form).canonical(dict(zip("abcd", of, strict=False)))
            for form, of in ((first, (2, 3, 5, 7)), (second, numbers))
        )
        return one == other

    for numbers in itertools.permutations((2, 3, 5)):
        for brackets in ("a + b + c", "a + (b + c)"):
            assert same("a + b + c", brackets, *numbers)
            assert same("a * b * c", brackets.replace("+", "*"), *numbers)
    assert all(same("a + b + (c + d)", "a + b + c + d", *numbers) for numbers in itertools.permutations((2, 3, 5, 7)))
    assert same("a + b * c + d", "a + b + c * d", 7, 2, 5, 3)
    assert not same("a + b * c + d", "a + b + c * d", 7, 3, 5, 2)
    assert not same("a - b - c", "a - (b - c)", 2, 3, 5)
    assert not same("a - b - c", "a - b - c", 3, 2, 5)
    assert not same("a + b + c", "a + b * c", 2, 3, 5)
    assert not same("a + b + c", "a + b + c", 2, 3, 4)


@pytest.mark.parametrize("op", ["a + b + c", "a * (b * c)"])
def test_no_order_of_three_operands_is_trained_on_and_held_out(op: str) -> None:
    data = made("arithmetic", ops=[op], smallest=1, largest=9, size=400, n=60)
    train, held = ({tuple(sorted(re.findall(r"\d", p.columns["expression"]))) for p in part}
                   for part in (data.train, data.eval))  # fmt: skip
    assert not train & held
    assert len(held) == len(data.eval) == 60


def test_arithmetic_ops_are_mixed_evenly_and_follow_their_ranges() -> None:
    ranges = {"+": [10, 99], "a + b * c": {"a": [50, 60], "c": [2, 2]}}
    data = made("arithmetic", ops=["+", "a + b * c"], ranges=ranges, n=30)
    assert [p.columns["op"] for p in data.eval] == ["+", "a + b * c"] * 15
    for prompt in data.train:
        numbers = list(map(int, re.findall(r"\d+", prompt.columns["expression"])))
        if prompt.columns["op"] == "+":
            assert all(10 <= n <= 99 for n in numbers)
        else:
            assert 50 <= numbers[0] <= 60
            assert 0 <= numbers[1] <= 9
            assert numbers[2] == 2


def test_arithmetic_negative_results_can_be_ruled_out() -> None:
    assert any(int(p.columns["gold"]) < 0 for p in made("arithmetic", ops=["-"]).train)
    assert all(int(p.columns["gold"]) >= 0 for p in made("arithmetic", ops=["-"], negative=False).train)


def test_arithmetic_size_and_seed() -> None:
    args = {"ops": ["*", "+"], "largest": 10**6, "size": 50}
    one, again, other = (made("arithmetic", seed=seed, **args) for seed in (3, 3, 4))
    assert len(one.train) == 50
    assert (one.train, one.eval) == (again.train, again.eval)
    assert not {p.uid for p in one.train} & {p.uid for p in other.train}


def test_arithmetic_too_small_a_universe_says_so() -> None:
    with pytest.raises(DataError, match=r"\(16 of '\+'\).*eval\.size = 20"):
        made("arithmetic", ops=["+"], largest=3)
    with pytest.raises(DataError, match="0 of '/'"):
        made("arithmetic", ops=["+", "/"], ranges={"/": {"b": [0, 0]}})


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"op": ["+"]}, "data.args.op: unknown key (did you mean 'ops'?)"),
        ({"ops": "+"}, "data.args.ops: expected a list"),
        ({"ops": []}, "data.args.ops: is empty"),
        ({"ops": ["+", "a+b"]}, "same form as '+'"),
        ({"ops": ["a + x"]}, "letters a, b, c, d"),
        ({"ops": ["b + a"]}, "in this order"),
        ({"ops": ["a + c"]}, "without gaps"),
        ({"ops": ["a"]}, "has no operator"),
        ({"ops": ["a +"]}, "not an expression"),
        ({"ops": ["a ** b"]}, "operators + - * /"),
        ({"ops": ["__import__('os')"]}, "letters a, b, c, d"),
        ({"ops": ["(" * 30 + "a" + ")" * 30 + "+" + " " * 60 + "b"]}, "longer than 80"),
        ({"largest": 1.5}, "data.args.largest: expected a whole number"),
        ({"largest": -1}, "smallest <= largest"),
        ({"largest": 10**12}, "1000000000"),
        ({"size": 0}, "data.args.size"),
        ({"template": "What?"}, "{expression}"),
        ({"ranges": {"/": [1, 2]}}, "'/' is not among data.args.ops"),
        ({"ranges": {"+": [2, 1]}}, "low <= high"),
        ({"ranges": {"+": [1, 2, 3]}}, "[low, high]"),
        ({"ranges": {"+": {"c": [1, 2]}}}, "'c' is not in 'a + b'"),
        ({"ranges": {"+": [True, 2]}}, "two whole numbers"),
    ],
)
def test_arithmetic_arguments_are_checked(args: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_task(DataConfig(task="arithmetic", args=args))
    assert says in str(caught.value)


def test_all_problems_of_the_table_are_reported_at_once() -> None:
    config = DataConfig(task="arithmetic", train="x", eval="y", prompt_column="q", args={"op": [], "sise": 3})
    with pytest.raises(ConfigError) as caught:
        make_task(config)
    assert [p.partition(":")[0] for p in caught.value.problems] == [
        "data.prompt_column", "data.train", "data.eval", "data.args.op", "data.args.sise",
    ]  # fmt: skip


def test_unknown_task_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'countdown'"):
        make_task(DataConfig(task="count-down"))


# --------------------------------------------------------------------------------------------------------------------
# Countdown


def reachable(numbers: list[Fraction], target: int) -> bool:
    """Brute force: combines every pair with every operator until one number is left."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, x in enumerate(numbers):
        for j, y in enumerate(numbers):
            if i != j:
                rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
                results = [x + y, x - y, x * y] + ([x / y] if y else [])
                if any(reachable([*rest, result], target) for result in results):
                    return True
    return False


def test_countdown_targets_can_be_reached() -> None:
    data = made("countdown", n=40, size=1)
    for prompt in data.eval:
        nums, target = prompt.columns["nums"], prompt.columns["target"]
        assert len(nums) in (3, 4)
        assert all(1 <= n <= 99 for n in nums)
        assert 10 <= target <= 99
        assert reachable([Fraction(n) for n in nums], target), prompt.columns
        assert f"numbers {', '.join(map(str, nums))}, " in content(prompt)
        assert f"equals {target}." in content(prompt)


def test_countdown_splits_share_no_problem_and_depend_on_the_seed_alone() -> None:
    one, again, other = (made("countdown", seed=seed, n=300, size=2000) for seed in (5, 5, 6))
    keys = [(tuple(sorted(p.columns["nums"])), p.columns["target"]) for p in [*one.eval, *one.train]]
    assert len(one.train) == 2000
    assert len(set(keys)) == len(keys)
    assert (one.eval, one.fingerprint) == (again.eval, again.fingerprint)
    assert one.eval != other.eval


def test_countdown_arguments() -> None:
    data = made("countdown", numbers=[2], smallest=1, largest=5, target=[1, 10], ops=["+"], n=4, format_weight=0)
    assert all(sum(p.columns["nums"]) == p.columns["target"] for p in [*data.train, *data.eval])
    assert [reward.name for reward in data.default_rewards] == ["countdown"]
    assert [(r.name, r.weight) for r in made("countdown", size=1).default_rewards] == [
        ("countdown", 1.0),
        ("format", 0.1),
    ]


def test_countdown_too_small_a_universe_says_so() -> None:
    assert "only 11 different" in made("countdown", numbers=[2], largest=5, target=[1, 10], ops=["+"], n=4).notes[0]
    with pytest.raises(DataError, match="15 different problems"):
        made("countdown", numbers=[2], largest=5, target=[1, 10], ops=["+"], n=15)


def test_countdown_argument_problems_come_together() -> None:
    args = {"numbers": [1], "smallest": 0, "target": [5], "ops": ["^"], "template": "x", "format_weight": -1.0}
    with pytest.raises(ConfigError) as caught:
        make_task(DataConfig(task="countdown", args=args))
    assert len(caught.value.problems) == 6


def test_countdown_reads_published_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.parquet", [{"nums": [1, i, 3], "target": i + 4} for i in range(2, 8)])
    data = load_task(DataConfig(task="countdown", train=str(tmp_path)), eval_size=2, seed=0)
    assert {p.columns["target"] for p in [*data.train, *data.eval]} == set(range(6, 12))
    write_rows(tmp_path / "train.parquet", [{"nums": [1.5, 2.0], "target": 3}])
    with pytest.raises(DataError, match=r"'nums'.* whole numbers"):
        load_task(DataConfig(task="countdown", train=str(tmp_path)), eval_size=2, seed=0)


# --------------------------------------------------------------------------------------------------------------------
# Rows with their own prompt, verl's schema among them


def verl_row(i: int, **changes: Any) -> dict[str, Any]:
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"question {i}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i, "answer": f"so\n#### {i}", "question": f"q {i}"},
    }
    return row | changes


def load_rows(folder: Path, rows: list[dict[str, Any]], suffix: str = "parquet", **config: Any) -> Dataset:
    write_rows(folder / f"train.{suffix}", rows)
    return load_task(DataConfig(train=str(folder), **config), eval_size=1, seed=0)


def test_verl_parquet_is_recognised(tmp_path: Path) -> None:
    data = load_rows(tmp_path, [verl_row(i) for i in range(4)])
    prompt = data.train[0]
    assert prompt.messages is not None
    index = prompt.columns["extra_info"]["index"]
    assert content(prompt) == f"question {index}"
    assert prompt.columns["ground_truth"] == str(index)
    assert prompt.columns["data_source"] == "openai/gsm8k"
    assert "reward_model" not in prompt.columns
    assert data.default_rewards == (RewardConfig(name="gsm8k"),)


def test_verl_rows_of_other_sources_have_no_default_reward(tmp_path: Path) -> None:
    assert load_rows(tmp_path, [verl_row(i, data_source="mine") for i in range(4)]).default_rewards == ()


def test_gsm8k_reads_verl_rows_and_keeps_their_prompt(tmp_path: Path) -> None:
    prompt = load_rows(tmp_path, [verl_row(i) for i in range(4)], task="gsm8k").train[0]
    assert content(prompt).startswith("question ")
    assert prompt.columns["question"].startswith("q ")
    assert prompt.columns["gold"] == prompt.columns["ground_truth"]
    said = load_rows(tmp_path, [verl_row(i) for i in range(4)], task="gsm8k", args={"system": "Be brief."}).train[0]
    assert next((m["role"], m["content"]) for m in said.messages or ()) == ("system", "Be brief.")


def test_nested_values_as_json_strings_are_read(tmp_path: Path) -> None:
    rows = [
        verl_row(i, prompt=f'[{{"role": "user", "content": "hi {i}"}}]', reward_model=f'{{"ground_truth": "{i}"}}')
        for i in range(3)
    ]
    for prompt in load_rows(tmp_path, rows).train:
        assert prompt.messages == ({"role": "user", "content": f"hi {prompt.columns['ground_truth']}"},)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"reward_model": {"style": "rule", "ground_truth": None}}, "no ground_truth"),
        ({"reward_model": "no json"}, "'reward_model'.* string"),
        ({"reward_model": 5}, "'reward_model'.* object"),
        ({"images": ["picture"]}, "only text prompts"),
        ({"extra_info": [1]}, "'extra_info'.* object"),
    ],
)
def test_verl_rows_that_cannot_be_used(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        load_rows(tmp_path, [verl_row(0), verl_row(1, **changes)], suffix="jsonl")


def test_bracketed_text_stays_text(tmp_path: Path) -> None:
    texts = ["[1, 2] + [3]?", "[1, 2, 3]", "[broken", '[{"no": "role"}]', '["a"]']
    data = load_rows(tmp_path, [{"prompt": text} for text in texts])
    assert sorted(p.text or "" for p in [*data.train, *data.eval]) == sorted(texts)


def test_another_prompt_column_and_ragged_columns(tmp_path: Path) -> None:
    rows = [{"problem": f"p{i}", **({"gold": i} if i else {})} for i in range(4)]
    data = load_rows(tmp_path, rows, suffix="jsonl", prompt_column="problem")
    golds = {p.text: p.columns["gold"] for p in [*data.train, *data.eval]}
    assert golds == {"p0": None, "p1": 1, "p2": 2, "p3": 3}


def test_prompts_arguments(tmp_path: Path) -> None:
    args = {"chat": True, "system": "Be brief.", "instruction": "Go."}
    prompt = load_rows(tmp_path, [{"prompt": "same"}, {"prompt": "other"}], args=args).train[0]
    assert prompt.messages is not None
    assert [m["role"] for m in prompt.messages] == ["system", "user"]
    assert content(prompt).endswith("\n\nGo.")
    with pytest.raises(DataError, match=r"data\.args\.chat = true"):
        load_rows(tmp_path, [{"prompt": "x"}, {"prompt": "y"}], args={"system": "Be brief."})
    assert Prompts().rewards([]) == ()


def test_ids_become_uids(tmp_path: Path) -> None:
    data = load_rows(tmp_path, [{"id": i * 10, "prompt": f"p{i}"} for i in range(3)])
    assert {p.uid for p in [*data.train, *data.eval]} == {"0", "10", "20"}
