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
