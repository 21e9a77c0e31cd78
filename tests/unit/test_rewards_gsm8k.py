"""gsm8k: what counts as the same number, what counts as no answer. One line per rule of docs/rewards.md."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trew.rewards import grade
from trew.rewards.builtin.gsm8k import extract_strict
from trew.rewards.numbers import find_numbers, joined, last_number, normalise, parse_gold, read_digits, single_number

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"

# what follows "####", and the number that it states
SAME = [
    ("72", 72), (" 72 ", 72), ("72.", 72), ("72,", 72), ("72.0", 72), ("72.00", 72), ("072", 72), ("+72", 72),
    ("-72", -72), ("\u221272", -72), ("\u201372", -72), ("\uff0d72", -72), ("- 72", -72), ("$72", 72), ("$ 72", 72),
    ("\\$72", 72), ("-$72", -72), ("$-72", -72), ("US$72", 72), ("72$", 72), ("€72", 72), ("£72.50", Fraction(145, 2)),
    ("Rs.72", 72), ("72%", 72), ("72 %", 72), ("72\\%", 72), ("72°", 72), ("1,200", 1200), ("1,200.00", 1200),
    ("$1,200,300.50", Fraction(2400601, 2)), ("1{,}200", 1200), ("1\\,200", 1200), ("1\u202f200", 1200),
    ("1\u00a0200\u00a0000", 1200000), ("**72**", 72), ("**-5**", -5), ("*72*", 72), ("__ 72 __", 72), ("`72`", 72),
    ("\\boxed{72}", 72), ("\\boxed{-72}", -72), ("$\\boxed{72}$", 72), ("$72$", 72), ("\\(72\\)", 72), ("(72)", 72),
    ("[72]", 72), ("\\text{72}", 72), ("\\textbf{72 apples}", 72), ("72 apples", 72), ("72apples", 72), ("72 km/h", 72),
    ("72 m^2", 72), ("72 m^{2}", 72), ("72 m2", 72), ("72m²", 72), ("72 miles per hour", 72), ("72!", 72), ("72?", 72),
    ("The answer is 72.", 72), ("x = 72", 72), ("x=-72", -72), ("8 * 9 = 72", 72), ("80-8=72 apples", 72),
    ("72 = 72", 72), ("Total: 72", 72), ("答案是72", 72), ("0.5", Fraction(1, 2)), (".5", Fraction(1, 2)),
    ("-.5", Fraction(-1, 2)), ("0.10", Fraction(1, 10)), ("1/2", Fraction(1, 2)), ("-3/4", Fraction(-3, 4)),
    ("1e3", 1000), ("1.5E2", 150), ("2e-1", Fraction(1, 5)), ("5 million", 5_000_000), ("1.45 million", 1_450_000),
    ("5 hundred thousand", 500_000), ("5k", 5000), ("5 km", 5), ("5 kids", 5), ("5 hundredths", 5), ("72 (72)", 72),
    ("\uff17\uff12", 72), ("\u0667\u0662", 72), ("\u096d\u0968", 72), ("0", 0), ("-0", 0), ("0.00", 0),
    ("<answer>72</answer>", 72), ("~72", 72), ("≈ 72", 72), ("H2O: 72", 72), ("9" * 30, int("9" * 30)),
    ("72 more than Ann", 72),
]  # fmt: skip

NO_NUMBER = [
    "", "   ", "seventy-two", "7 or 72", "72 or 7", "72 or 72", "7, 72", "7,72", "72, 73", "[71, 72]", "(71, 72)",
    "{72, 73}",
    "71-72", "71\u201372", "71 - 72", "71 to 72", "from 71 to 72", "71 and 72", "72 and 73", "71; 72", "71...72",
    "> 72", ">72", "no more than 72", "less than $72",
    "<72", "≥ 72", "≤72", "±72", "at least 72", "at most 72", "72 or more", "72 or fewer", "72 apples or 73 apples",
    "8 * 9", "36 + 36", "144/2", "144 / 2", "72/1", "144 ÷ 2", "8 × 9", "72^1", "72**1", "2^3", "72²", "72½", "72:00",
    "72_000", "7.2.1", "1,20", "12,00", "0,072", "72 73", "7 2", "10 -5", "5 dollars and 20 cents",
    "3 hours 20 minutes",
    "\\frac{144}{2}", "\\frac12", "x72", "9" * 1001, "1e1000", "1e999999999", "72 / 73 / 74", "72 x 1", "72 \\times 1",
    "72 = 72 or 73", "\x00", "\ud800", "√5184", "--72", "+-72",
    "not 72", "72 (not 73)", "It isn't 72", "It isn’t 72.", "72 is wrong", "72 is not the answer", "never 72", "x ≠ 72",
    "x != 72", "neither 7 nor 72", r"\ne 72", "72, not 73", "anything except 72",
]  # fmt: skip


@pytest.mark.parametrize(("text", "number"), SAME)
def test_same_number(text: str, number: int | Fraction) -> None:
    verdict = grade("gsm8k", f"Some work: 3 + 4 = 7\n#### {text}", number)
    assert (verdict.score, verdict.status) == (1.0, "scored")
    assert grade("gsm8k", f"#### {text}", number + 1).score == 0.0
    if number:
        assert grade("gsm8k", f"#### {text}", -number).score == 0.0


@pytest.mark.parametrize("text", NO_NUMBER)
def test_no_single_number(text: str) -> None:
    for gold in ("72", "7", "73", "8", "2", "144", "1", "0", "5"):
        verdict = grade("gsm8k", f"#### {text}", gold)
        assert (verdict.score, verdict.status) == (0.0, "no_answer"), gold
        assert verdict.detail


def test_wrong_numbers() -> None:
    for text in ("71", "72.1", "-72", "720", "7.2", "72 million", "0.72"):
        assert grade("gsm8k", f"#### {text}", "72").score == 0.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 3? No.\n#### 72\nBecause 8 * 9.", "72"),
        ("####72", "72"),
        ("####\n\n 72 \n", "72"),
        ("#### 72\r\nQuestion: 5", "72"),
        ("##### 72", "72"),  # the last four signs count
        ("72", None),
        ("### 72", None),
        ("so ####", None),
        ("####   \n ", None),
    ],
)
def test_strict_extraction(text: str, answer: str | None) -> None:
    assert extract_strict(text) == answer


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("72", "72", 1.0),
        ("She sold 48 + 24 = 72 clips.", "72", 1.0),
        ("The answer is $1,200.00.", "1200", 1.0),
        ("\\boxed{72}", "72", 1.0),
        ("The answer is 72.\n\nThank you!", "72", 1.0),
        ("10 - 5 = 5", "5", 1.0),
        ("The result is -5", "-5", 1.0),
        ("72 of 100", "72", 0.0),
        ("48 + 24", "24", 0.0),  # a sum that was not worked out has no result
        ("7 or 8", "8", 0.0),
        ("7 or 8", "7", 0.0),
        ("between 7 and 8", "8", 0.0),
        ("7 - 8", "8", 0.0),
        ("half, i.e. 1/2", "0.5", 1.0),
        ("144/2", "2", 0.0),
        ("1/2/3", "3", 0.0),
        ("no digits", "72", 0.0),
        ("(3)-5", "-5", 0.0),
        ("It is 7\nor 8", "8", 0.0),
        ("It is 7" + " " * 100 + "or 8", "8", 0.0),
        ("It is not 72.", "72", 0.0),  # a denied number is no answer
        ("So 72, not 73.", "73", 0.0),
        ("So 72 instead of 73", "73", 0.0),
        ("72 is wrong", "72", 0.0),
        ("x ≠ 72", "72", 0.0),
        ("That is not right. So it is 72.", "72", 1.0),
        ("I did not count 3 of them, so 72", "72", 1.0),
        ("Then 7\n8", "8", 1.0),  # a new line is a new statement
    ],
)
def test_flexible(text: str, gold: str, score: float) -> None:
    assert grade("gsm8k", text, gold, mode="flexible").score == score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("7 - 11 = - 4", -4),
        ("x = \u2212 4", -4),
        ("The answer is - 4.", -4),
        ("The answer: - 4", -4),
        ("- 4", -4),
        ("(- 4)", -4),
        ("\\boxed{- 4}", -4),
        ("so **- 4**", -4),
        ("it is $- 4$", -4),
        ("= \\(- 4\\)", -4),
        ("=\n- 4", -4),
        ("= -$ 4", -4),
        ("= - $4", -4),
        ("= - 1,200.50", Fraction(-2401, 2)),
        ("The sum of 3 and - 7 equals - 4", -4),
        ("we get - 4", -4),
        ("答案是 - 4", -4),
        ("Final answer - 4", 4),  # a dash
        ("Answer \u2013 4", 4),
        ("**Total** - $4", 4),
        ("Left:\n- 4", 4),  # an item of a list
        ("Left:\n- 3 apples\n- 4 pears", 4),
        ("7 - 4", None),  # a difference that was not worked out
        ("(7) - 4", None),
        ("7% - 4", None),
        ("$7 - $4", None),
        ("3, - 4", None),
        ("3 or - 4", None),
        ("3 \\times - 4", None),
    ],
)
def test_a_minus_that_stands_apart_is_a_sign_where_nothing_is_subtracted_from(text: str, number: Any) -> None:
    assert last_number(text).value == number
    for kind, args in (("arithmetic", {}), ("gsm8k", {"mode": "flexible"})):
        assert grade(kind, text, 4, **args).score == (number == 4)
        assert grade(kind, text, -4, **args).score == (number == -4)


def test_flexible_is_not_strict() -> None:
    assert grade("gsm8k", "The answer is 72", "72").status == "no_answer"
    assert grade("gsm8k", "#### 72\nI used 3 steps", "72").score == 1.0
    assert grade("gsm8k", "#### 72\nI used 3 steps", "72", mode="flexible").score == 0.0


@pytest.mark.parametrize(
    ("text", "thinking", "score"),
    [
        ("<think>#### 5</think>#### 72", False, 1.0),
        ("<think>#### 72</think> I forgot", False, 0.0),  # an answer inside the thought is none
        ("<think>#### 72", False, 0.0),
        ("#### 72", True, 0.0),  # the prompt opened a thought that was never closed
        ("hm</think>#### 72", True, 1.0),
        ("hm</think>#### 72", False, 1.0),
        ("a</think>#### 5</think>#### 72", True, 1.0),
        ("a</think>#### 72<think>or", True, 0.0),
    ],
)
def test_thinking(text: str, thinking: bool, score: float) -> None:
    assert grade("gsm8k", text, "72", thinking=thinking).score == score


@pytest.mark.parametrize(
    "gold",
    [72, 72.0, "72", " 72 ", "$72.00", "48+24 = <<48+24=72>>72 clips\n#### 72", Fraction(72), Decimal("72.0"),
     np.int64(72), np.float32(72)],
)  # fmt: skip
def test_golds(gold: object) -> None:
    assert grade("gsm8k", "#### 72", gold).score == 1.0
    assert grade("gsm8k", "#### 73", gold).score == 0.0


@pytest.mark.parametrize(
    "gold",
    [None, "", "seventy", "7 or 8", [72], {"a": 72}, True, False, np.bool_(True), float("nan"), float("inf"), "#### ",
     "72 ####", object(), b"72", Decimal("NaN"), Decimal("1e999999"), 1j],
)  # fmt: skip
def test_bad_golds_are_not_judged(gold: object) -> None:
    for mode in ("strict", "flexible"):
        verdict = grade("gsm8k", "#### 72", gold, mode=mode)
        assert (verdict.score, verdict.status) == (None, "bad_gold")


def test_a_float_gold_means_the_decimal_it_prints() -> None:
    assert grade("gsm8k", "#### 0.1", 0.1).score == 1.0
    assert grade("gsm8k", "#### 1e22", 1e22).score == 1.0
    assert parse_gold(0.1) == Fraction(1, 10)


def test_extracted_is_what_was_compared() -> None:
    assert grade("gsm8k", "work 5\n#### $72.00 dollars", "72").extracted == "$72.00 dollars"
    assert grade("gsm8k", "so 5, finally -$72.", "72", mode="flexible").extracted == "-$72"
    long = grade("gsm8k", "#### " + "a" * 10_000 + "\ud800 72", "72")
    assert long.score == 1.0
    assert long.extracted is not None
    assert len(long.extracted) == 200


def test_reading_functions() -> None:
    assert single_number("7 or 8").value is None
    assert last_number("a 1 b -2 c").value == -2
    assert [n.value for n in find_numbers("1 and -2.5, x3")] == [1, Fraction(-5, 2)]
    assert read_digits("1,000,00") is None
    assert normalise("\u22121") == "-1"
    assert joined("}{")
    assert not joined(") ")


@pytest.mark.skipif(not DATA.is_dir(), reason="GSM8K is not there")
@pytest.mark.parametrize("split", ["train", "test"])
def test_every_published_solution_scores_1_against_itself(split: str) -> None:
    rows = [json.loads(line) for line in (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == {"train": 7473, "test": 1319}[split]
    for row in rows:
        gold = row["answer"]
        assert grade("gsm8k", gold, gold).score == 1.0, gold
        assert grade("gsm8k", gold, gold, mode="flexible").score == 1.0, gold
        final = gold.rpartition("####")[2].strip()
        assert grade("gsm8k", gold + "1", final).score == 0.0, gold
        assert grade("gsm8k", gold.replace("#### ", "#### -"), final).score == (1.0 if final == "0" else 0.0)


def test_a_float_of_any_size_is_the_decimal_that_it_prints_as() -> None:
    golds = [np.float16(0.1), np.float32(0.1), np.float64(0.1), 0.1]
    assert [parse_gold(gold) for gold in golds] == [Fraction(1, 10)] * 4
    assert [parse_gold(np.float32(x)) for x in ("nan", "1e10")] == [None, 10**10]
    assert grade("gsm8k", "#### 0.1", np.float32(0.1)).score == 1.0
