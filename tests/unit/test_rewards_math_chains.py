"""a = b = c says that three are equal, which a = c does not."""

from __future__ import annotations

import pytest

from trew.rewards.maths.grade import grade


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("a = c", "a = b = c", False),
        ("a = 2b = c", "a = b = c", False),
        ("a = b = c", "a = c", False),
        ("x = y = 3z", "x = 2y = 3z", False),
        ("b = c = a", "a = b = c", True),
        ("c = b = a", "a = b = c", True),
        ("2x = 4y = 6z", "x = 2y = 3z", True),
        ("x_1 = x_2 = x_3", "x_3 = x_1 = x_2", True),
        ("A = lw = 2l^2", "2l^2", True),
        ("x = 2 + 3 = 5", "5", True),
        ("x = y = 5", "x = 5", True),
    ],
)
def test_a_chain_of_equal_quantities(answer: str, gold: str, right: bool) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).score == right
