"""Answers that look like the gold and say something else: none may score 1."""

from __future__ import annotations

import pytest

from trew.rewards.maths.grade import grade


def score(answer: str, gold: str) -> float | None:
    return grade(f"\\boxed{{{answer}}}", gold).score


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("x.y", "x + y", False),
        ("x.y", "x^y", False),
        ("x.y", "x - y", False),
        ("x--y", "x + y", False),
        ("x--y", "xy", False),
        ("x--y", "x - y", False),
        ("a-", "-a", False),
        ("a-", "a", False),
        ("(A) 5", "-a", False),
        (r"\text{A-B}", "A-B", True),
        (r"\text{Option B}", "B", True),
        (r"\text{x-axis}", "x-axis", True),
        (r"\text{A.M.}", r"\text{AM}", True),
        ("(A) 5", "A", True),
    ],
)
def test_letters_in_a_text_that_is_no_formula_are_not_a_formula(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("P(A) = 1/2", "P(B) = 1/2", False),
        ("E(X) = 2", "E(Y) = 2", False),
        ("P(A) = 1/2, P(C) = 1/3", "P(A) = 1/2, P(B) = 1/3", False),
        ("f(e) = e", "f(x) = x", False),
        ("f(t) = 3", "f(x) = 3", True),
        ("P(A) = 0.5", "P(A) = 1/2", True),
        ("P(A) = 0.5", "1/2", True),
    ],
)
def test_events_and_random_variables_are_no_letters_to_be_renamed(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\alpha > 5", r"\beta > 5", False),
        (r"\theta \in (0, 1)", r"\alpha \in (0, 1)", False),
        (r"\theta \in (0, 1)", r"x \in (0, 1)", False),
        ("x_{1} > 5", "y_{2} > 5", False),
        ("x_1 > 5", "x_{1} > 5", True),
        (r"\angle A = 30^\circ", r"\angle B = 30^\circ", False),
        (r"\angle ABC = 30^\circ", r"\angle BAC = 30^\circ", False),
        (r"m\angle A = 30^\circ", r"\angle BAC = 30^\circ", True),
        (r"\alpha > 5", r"\alpha \ge 5", False),
        (r"\text{area} \in (0, 1)", r"S \in (0, 1)", True),
    ],
)
def test_symbols_and_angles_with_other_names_are_other_things(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\text{girls} = 12, \text{number of boys} = 15", r"\text{boys} = 12, \text{girls} = 15", False),
        (r"\text{girls} = 15, \text{number of boys} = 12", r"\text{boys} = 12, \text{girls} = 15", True),
        (r"\text{Ann: } 5, \text{Tom Hill: } 7", r"\text{Tom: } 5, \text{Ann: } 7", False),
        (r"\text{Ann: } 7, \text{Tom Hill: } 5", r"\text{Tom: } 5, \text{Ann: } 7", True),
    ],
)
def test_a_name_that_both_sides_have_keeps_its_value(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


def test_two_signs_of_plus_minus_in_one_formula_may_be_four_values_and_are_not_read() -> None:
    gold = r"\pm\frac{1}{2} \pm \frac{\sqrt{3}}{2}i"
    half = r"\frac{1}{2} + \frac{\sqrt{3}}{2}i, -\frac{1}{2} - \frac{\sqrt{3}}{2}i"
    assert score(half, gold) is None  # a broken gold, which is told
    assert score(gold, half) == 0
    assert score(gold, gold) == 1
    assert score(r"1 + \sqrt 2, -1 - \sqrt 2", r"\pm(1 + \sqrt 2)") == 1
    assert score(r"1 - \sqrt 2, -1 + \sqrt 2", r"\pm 1 \mp \sqrt 2") == 1


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"2\ln 2", r"\ln(2)^2", False),
        (r"(\ln 2)^2", r"\ln(2)^2", True),
        (r"\ln^2 2", r"\ln(2)^2", True),
        (r"2\ln 2", r"\ln(2^2)", True),
        ("6", r"\log_2(8)^2", False),
        ("9", r"\log_2(8)^2", True),
        (r"\sin(x^2)", r"\sin(x)^2", False),
        (r"\sin^2 x", r"\sin(x)^2", True),
        (r"\frac14", r"\sin(\pi/6)^2", True),
        (r"\frac12", r"\sin(30)^\circ", True),
        ("6", r"\log_2(8)(2)", True),
        ("e", r"\exp(2)^{1/2}", True),
    ],
)
def test_an_exponent_behind_a_bracket_is_that_of_the_function(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("15", "5!!", True),
        ("48", "6!!", True),
        ("720", "3!!", False),
        ("720", "(3!)!", True),
        ("3", "3!!", True),
        ("1", "0!!", True),
        ("5!!", "15", True),
        ("5!!=15", "15", True),
        ("48", "3!!!", False),
        (r"\frac{6!}{6!!}", "5!!", True),
    ],
)
def test_two_exclamation_marks_are_the_double_factorial(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"(1, \infty)", r"\{x \in \mathbb{Z} \mid x > 1\}", False),
        (r"\{n \in \mathbb{Z}^+ : n \le 3\}", r"(-\infty, 3]", False),
        (r"\{x \mid x > 1\}", r"\{x \in \mathbb{Z} : x > 1\}", False),
        (r"\{x \in \mathbb{Z} : x > 1\}", r"\{x \in \mathbb{Z} \mid x > 1\}", True),
        (r"\{x \in \mathbb{N} : x < 5\}", r"\{x \in \mathbb{Z} \mid x < 5\}", False),
        (r"\{x \in \mathbb{R} : x > 1\}", r"(1, \infty)", True),
    ],
)
def test_a_set_of_whole_numbers_is_no_interval(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("2x10^x", r"2 \cdot 10^x", False),
        ("3x10^{n}", r"3 \cdot 10^n", False),
        ("1.5 x 10^{-3}", "0.0015", True),
        ("1.5 x 10⁻³", "0.0015", True),
        ("1.5x10^3", "1500", True),
    ],
)
def test_an_x_before_a_power_of_ten_is_a_variable_where_the_exponent_has_one(
    answer: str, gold: str, right: bool
) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"A \text{ or } C", r"A \text{ and } C", False),
        (r"A \text{ or } C", "A, C", False),
        ("A or C", "A, C", False),
        (r"C \text{ and } A", "A, C", True),
        (r"A \text{ or } C", r"C \text{ or } A", True),
        (r"2 \text{ or } 3", "2, 3", True),
        (r"x \text{ or } y", "x, y", True),
    ],
)
def test_one_option_or_another_is_not_both(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right
