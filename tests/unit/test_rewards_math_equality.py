"""The reward ``math``: what equals what, where several values, names or functions stand in one answer."""

from __future__ import annotations

import pytest

from trew.rewards import grade


def score(answer: str, gold: str) -> float | None:
    return grade("math", f"so $\\boxed{{{answer}}}$", gold).score


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("(@, 2)", "(@, 2)"),
        ("[@, 2)", "[@, 2)"),
        ("(2, @)", "(2, @)"),
        (r"\{@, 2\}", r"\{2, @\}"),
        ("@, 2", "2, @"),
        ("(1, 2, @)", "(1, 2, @)"),
        (r"\begin{pmatrix} @ \\ 2 \end{pmatrix}", r"\begin{bmatrix} @ \\ 2 \end{bmatrix}"),
        (r"\begin{pmatrix} 2@ \\ 4 \end{pmatrix}", r"2\begin{pmatrix} @ \\ 2 \end{pmatrix}"),
        (r"\{(1, @), (2, 3)\}", r"\{(1, @), (2, 3)\}"),
        ("x = @", "@"),
        ("@", "x = @"),
        ("x < @", "x < @"),
    ],
)
def test_a_rounded_decimal_is_not_the_value_of_a_function_wherever_it_stands(gold: str, answer: str) -> None:
    gold = gold.replace("@", r"\sin 1")
    assert score(answer.replace("@", r"\cos(\frac{\pi}{2}-1)"), gold) == 1
    for rounded in ("0.841471", "0.8414709848078965"):
        assert score(answer.replace("@", rounded), gold) == 0, rounded


def test_intervals_with_their_ends_in_the_wrong_order_are_not_all_the_same() -> None:
    assert score(r"(2, \cos 1]", r"(2, \sin 1]") == 0
