"""gsm8k: a number that is only a part of what is written is no answer, and no gold."""

from __future__ import annotations

import pytest

from trew.rewards.builtin.gsm8k import grade
from trew.rewards.numbers import parse_gold


@pytest.mark.parametrize(
    "text", [r"\sqrt{2}", "sqrt(2)", r"\sqrt[3]{2}", "2π", r"2\pi", r"\pi/4", r"\log_2 8", r"\sin 30"]
)
def test_a_root_a_function_or_a_multiple_of_pi_is_no_number(text: str) -> None:
    assert parse_gold(text) is None  # they were 2, 4, 8 and 30
    for digit in ("2", "4", "8", "30"):
        assert grade(f"#### {text}", digit).score == 0
        assert grade(f"so {text}", digit, mode="flexible").score == 0


@pytest.mark.parametrize("text", ["2 pieces", "2 pies", "$2", "the square root is 2", r"\sqrt{4} = 2"])
def test_words_near_a_number_are_not_taken_for_a_root_or_pi(text: str) -> None:
    assert grade(f"#### {text}", 2).score == 1
    assert grade(text, 2, mode="flexible").score == 1


def test_negative_before_a_number_is_its_sign() -> None:
    assert grade("#### negative 5", 5).score == 0
    assert grade("#### negative $5", -5).score == 1
    assert grade("So it is Negative 5.", -5, mode="flexible").score == 1
    assert grade("#### a non-negative 5", 5).score == 1


@pytest.mark.parametrize("text", ["x > 5", "x < 5", "x ≥ 5", "x >= $5", "5 < x", "5 ≤ n", r"x \le 5", r"5 \gt x"])
def test_an_inequality_bounds_a_value_and_states_none(text: str) -> None:
    assert parse_gold(text) is None
    assert grade(f"#### {text}", 5).score == 0


@pytest.mark.parametrize("text", ["<b>5</b>", "5<br>", '<span class="x">5</span>', "x -> 5", "x = 5"])
def test_tags_and_arrows_are_no_inequalities(text: str) -> None:
    assert grade(f"#### {text}", 5).score == 1
