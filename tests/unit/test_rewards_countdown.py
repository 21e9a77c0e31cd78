"""countdown: the policy of docs/rewards.md, the published reward's known cases and hostile expressions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from trew.rewards import grade
from trew.rewards.builtin.countdown import extract, parse_puzzle
from trew.rewards.builtin.expression import ExpressionError, evaluate, operands, tokenize


def score(expression: str, numbers: object = (4, 8, 2, 1), target: object = 15, **args: object) -> float | None:
    return grade("countdown", f"<answer>{expression}</answer>", numbers=numbers, target=target, **args).score


@pytest.mark.parametrize(
    "expression",
    ["8 + 4 + 2 + 1", "(8*2) - 1", "8*2-1", "8*2 - 1", "4*(8/2) - 1", "8+4+2+1", "\n( 8*2 )\n-1\n",
     "((8))*((2)) - 1", "-1 + 2*8",
     "8*2+-1", "+8*2-1", "2*8-1"],
)  # fmt: skip
def test_right(expression: str) -> None:
    assert score(expression, require_all=False) == 1.0


def test_all_numbers_are_required_by_default() -> None:
    assert score("8*2-1") == 0.0
    assert score("8 + 4 + 2 + 1") == 1.0
    assert grade("countdown", "<answer>8*2-1</answer>", numbers=[4, 8, 2, 1], target=15).detail == "does not use 4"


@pytest.mark.parametrize(
    "expression",
    [
        "8+8-1",  # a number used twice
        "4*4-1",
        "2**4-1",  # power
        "2* *4-1",
        "8//1*2-1",  # floor division
        "8 * 2 - 1.0",  # decimals
        "8 * 2 - 1 = 15",
        "15",  # not given
        "",
        " ",
        "8*2-1;",
        "8 2 1",
        "82 - 1",
        "8*2-",
        "*8*2-1",
        "(8*2-1",
        "8*2-1)",
        "()",
        "8()2",
        "(8)(2)-1",
        "8×2−1",  # other signs are not the expression's
        "８*2-1",  # nor other digits
        "8^2",
        "8%2",
        "8<<1",
        "0x8*2-1",
        "8e0*2-1",
        "8_*2-1",
        "08*2-1 if 1 else 0",
        "__import__('os').getpid()",
        "lambda: 15",
        "[8*2-1][0]",
        "8*2-1 # comment",
        "8/(2-2)",
        "8\x002",
        "\ud800",
    ],
)
def test_wrong(expression: str) -> None:
    assert score(expression, require_all=False) == 0.0


def test_division_is_exact() -> None:
    assert score("8/3*3", (8, 3, 3), 8) == 1.0
    assert score("1/3+1/3+1/3", (1, 1, 1, 3, 3, 3), 1) == 1.0
    assert score("10/3", (10, 3), 3) == 0.0
    assert score("1/(8-8)", (1, 8, 8), 1) == 0.0
    assert grade("countdown", "<answer>1/(8-8)</answer>", numbers=(1, 8, 8), target=1).detail == "divides by zero"


@pytest.mark.parametrize(
    "hostile",
    ["9**9**9**9", "(" * 500_000, "(" * 500 + "8" + ")" * 500, "9" * 1_000_000, "-" * 100_000 + "8",
     "8*" * 100_000 + "8",
     "1/0", "8" + "*8" * 99],
)  # fmt: skip
def test_hostile_expressions_are_simply_graded(hostile: str) -> None:
    assert score(hostile, require_all=False) == 0.0


def test_depth_has_no_limit_of_its_own() -> None:
    assert score("(" * 900 + "8*2-1" + ")" * 900, require_all=False) == 1.0


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("8*2-1", "no_answer"),
        ("<answer>8*2-1", "no_answer"),
        ("8*2-1</answer>", "no_answer"),
        ("</answer>8*2-1<answer>", "no_answer"),
        ("<think><answer>8*2-1</answer>", "no_answer"),
        ("<think><answer>8*2-1</answer></think>", "no_answer"),
        ("", "no_answer"),
        ("<Answer>8*2-1</Answer>", "no_answer"),
        ("<think>hm</think>\n<answer>8*2-1</answer>", "scored"),
        ("<answer>3</answer><answer>8*2-1</answer>", "scored"),
        ("<answer>8*2-1</answer> and <answer>", "scored"),
    ],
)
def test_where_the_answer_stands(text: str, status: str) -> None:
    verdict = grade("countdown", text, numbers=[8, 2, 1], target=15)
    assert (verdict.status, verdict.score) == (status, 1.0 if status == "scored" else 0.0)


def test_the_last_answer_counts() -> None:
    assert grade("countdown", "<answer>8*2-1</answer><answer>3</answer>", numbers=[8, 2, 1], target=15).score == 0.0
    assert extract("a<answer> 1 </answer>b") == "1"
    assert extract("<answer><answer>1</answer></answer>") == "1</answer>"


@pytest.mark.parametrize(
    "gold",
    [
        {"numbers": [8, 2, 1], "target": 15},
        {"nums": ["8", "2", "1"], "target": "15"},
        '{"numbers": [8, 2, 1], "target": "15"}',
        {"nums": np.array([8, 2, 1]), "target": np.int64(15)},
    ],
)
def test_forms_of_gold(gold: object) -> None:
    assert grade("countdown", "<answer>8*2-1</answer>", gold).score == 1.0
    assert grade("countdown", "<answer>8*2+1</answer>", gold).score == 0.0


def test_target_as_gold_or_argument() -> None:
    assert grade("countdown", "<answer>8*2-1</answer>", 15, numbers=[8, 2, 1]).score == 1.0
    assert grade("countdown", "<answer>8*2-1</answer>", "15", numbers=(8.0, 2, 1)).score == 1.0
    assert grade("countdown", "<answer>8/3</answer>", "8/3", numbers=[8, 3]).score == 1.0


@pytest.mark.parametrize(
    ("gold", "args", "says"),
    [
        (None, {}, "no numbers"),
        (15, {}, "no numbers"),
        (None, {"numbers": [1, 2]}, "no target"),
        ({"numbers": [1]}, {}, "no target"),
        ({"target": 3}, {}, "no numbers"),
        ("{not json", {}, "not valid JSON"),
        ("{" * 100_000, {}, "not valid JSON"),
        (15, {"numbers": "8 2 1"}, "must be a list"),
        (15, {"numbers": 8}, "must be a list"),
        (15, {"numbers": []}, "0 numbers are given"),
        (15, {"numbers": range(101)}, "101 numbers are given"),
        (15, {"numbers": [8, "x"]}, "not a whole number"),
        (15, {"numbers": [8, 1.5]}, "not a whole number"),
        (15, {"numbers": [8, -1]}, "not a whole number"),
        (15, {"numbers": [8, None]}, "not a whole number"),
        (15, {"numbers": [8, True]}, "not a whole number"),
        ("fifteen", {"numbers": [8]}, "is not a number"),
        ("7 or 8", {"numbers": [8]}, "is not a number"),
        (True, {"numbers": [8]}, "is not a number"),
    ],
)
def test_bad_golds(gold: object, args: dict, says: str) -> None:
    verdict = grade("countdown", "<answer>8*2-1</answer>", gold, **args)
    assert (verdict.score, verdict.status) == (None, "bad_gold")
    assert says in verdict.detail
    problem = parse_puzzle(gold, **args)
    assert isinstance(problem, str)
    assert says in problem


@pytest.mark.parametrize(
    ("text", "value"),
    [("1+2*3", 7), ("(1+2)*3", 9), ("8/2/2", 2), ("8-2-2", 4), ("2-3*-4", 14), ("-(2+3)", -5), ("--2", 2), ("1/3",
     Fraction(1, 3)),
     ("-2*-3", 6), ("2*(3+4)*5", 70), ("1-(2-(3-4))", -2)],
)  # fmt: skip
def test_evaluate(text: str, value: Fraction) -> None:
    assert evaluate(tokenize(text)) == value


def test_expression_errors_say_what_is_wrong() -> None:
    for text, says in [
        ("1+", "ends in the middle"),
        ("1)", r"without '\('"),
        ("(1", r"without '\)'"),
        ("1 2", "two numbers"),
        ("2**3", "is not an operator"),
        ("2(3)", "operator is missing"),
        ("2 $", r"'\$' is not one of"),
        ("+".join("1" * 101), "more than 100 numbers"),
        ("1+" * 2000 + "1", "longer than"),
        ("", "empty"),
    ]:
        with pytest.raises(ExpressionError, match=says):
            evaluate(tokenize(text))
    assert operands(tokenize("10+2")) == [10, 2]
