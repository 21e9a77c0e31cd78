"""Answers without a box, which are read with require_boxed = False: a part of what is stated is no answer."""

from __future__ import annotations

import pytest

from trew.rewards.maths.grade import grade


@pytest.mark.parametrize(
    "text",
    [
        "The answer is $5$ (or $6$).",
        "The answer is $5$; $6$.",
        "The answer is $5$/$6$.",
        "The answer is $5$ to $6$.",
        "The answer is $5$ $6$.",
        r"The answer is $5$ \times $6$.",
        "The answer is $5$ times 6.",
        "The answer is $5$ million.",
        "The answer is $5$ is wrong.",
        "It is less than $5$",
        "It is less than 5",
        "It is 4 x 5",
        "It is sqrt 5",
        "It is √5",
        "It is x^5",
        "It is A5",
        "It is 5π",
        "It is 5^n",
    ],
)
def test_a_part_of_what_is_stated_is_no_answer(text: str) -> None:
    assert grade(text, "5", require_boxed=False).score == 0


@pytest.mark.parametrize(
    "text",
    [
        "The answer is $5$.",
        "The answer is $5$ apples.",
        "The answer is $5$\n\n$6$ would be too many.",
        "The answer is $5$ as 2 + 3 is.",
        "It is _5_",
        "It is **5**",
        "It is $5",
        "More than one way leads to 5",
        "2 x 3 - 1 = 5",
    ],
)
def test_what_stands_beside_an_answer_is_left_out(text: str) -> None:
    assert grade(text, "5", require_boxed=False).score == 1


def test_a_multiple_in_words_belongs_to_the_formula_before_it() -> None:
    assert grade("The answer is $5$ million.", "5000000", require_boxed=False).score == 1
