r"""Notations of ``math`` that are read in one way only: pairs that are the same, and pairs that only look alike."""

from __future__ import annotations

import pytest

from trew.rewards import grade


def score(answer: str, gold: str) -> float | None:
    return grade("math", rf"so \boxed{{{answer}}}", gold).score


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("5!=120", "120", True),
        (r"\frac{10!}{9!}=10", "10", True),
        ("2 * 3!=12", "12", True),
        ("120", "5!=120", True),
        ("5!=121", "121", False),
        ("x!=2", "2", False),
        ("x_1!=2", "2", False),
        ("5 != 120", "120", False),
        ("x!=1", r"(-\infty,1)\cup(1,\infty)", True),
    ],
)
def test_a_number_before_an_equals_sign_may_have_its_factorial(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right
