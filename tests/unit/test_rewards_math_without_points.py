"""An interval without some of its points, in words, by a difference of sets and as a union."""

from __future__ import annotations

import pytest

from trew.rewards.maths.grade import grade


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"x \ge 2 \text{ and } x \ne 3", r"[2, 3) \cup (3, \infty)", True),
        (r"x \ge 2, x \ne 3", r"[2, 3) \cup (3, \infty)", True),
        (r"x \ne 3, x \ge 2", r"x \ge 2 \text{ and } x \ne 3", True),
        (r"x > 2, x \ne 3", r"[2, 3) \cup (3, \infty)", False),
        (r"x \ge 2, x \ne -3", r"[2, 3) \cup (3, \infty)", False),
        (r"x \ge 2", r"[2, 3) \cup (3, \infty)", False),
        (r"x \ge 2, x \ne 3", r"[2, \infty)", False),
        (r"x \ge 2, x \ne 2", "x > 2", True),
        (r"x \ge 2, x \ne 1", r"x \ge 2", True),
        (r"-2 \le x \le 2, x \ne \pm 1", r"[-2, -1) \cup (-1, 1) \cup (1, 2]", True),
        (r"x \ge 2, y \ne 3", r"[2, 3) \cup (3, \infty)", False),
        (r"x \ge 2 \text{ or } x \ne 3", r"[2, 3) \cup (3, \infty)", False),
        (r"(2, \infty) \setminus \{3\}", r"(2, 3) \cup (3, \infty)", True),
        (r"[0, 2] \setminus \{0, 1\}", r"(0, 1) \cup (1, 2]", True),
        (r"[0, 2] \setminus \{1\}", "[0, 2]", False),
        (r"\mathbb{R} \setminus \{1, 2\}", r"x \ne 1, 2", True),
        (r"\mathbb{R} \setminus \{1\}", r"x \ne 2", False),
    ],
)
def test_an_interval_without_points(answer: str, gold: str, right: bool) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).score == right
