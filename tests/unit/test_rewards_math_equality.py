"""The reward ``math``: what equals what, where several values, names or functions stand in one answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("(5,6)", "x=5, y=6", "y=5, x=6"),
        ("(5,6)", "y=6, x=5", "x=6, y=5"),
        ("(5,6)", "(x,y)=(5,6)", "(y,x)=(5,6)"),
        ("(x,y)=(5,6)", "(y,x)=(6,5)", "(y,x)=(5,6)"),
        ("(x,y)=(5,6)", "y=6, x=5", "y=5, x=6"),
        ("x=5, y=6", "(x,y)=(5,6)", "(a,b)=(5,6)"),
        ("y=6, x=5", "(5,6)", "(6,5)"),
        ("(y,x)=(5,6)", "(5,6)", "(6,5)"),  # such a gold says what is asked for first
        ("(1,2,3)", "z=3, x=1, y=2", "z=1, y=2, x=3"),
        ("(5,6)", "x_2=6, x_{1}=5", "x_2=5, x_1=6"),
        ("x_{10}=6, x_2=5", "(5,6)", "(6,5)"),
        ("(2,3)", "m=2, b=3", "m=3, b=2"),  # m and b are no neighbours: they stand as they are written
        (r"(\sin 1, 2)", r"y=2, x=\cos(\frac{\pi}{2}-1)", r"y=\cos(\frac{\pi}{2}-1), x=2"),
        (r"(x,y)=(\sin 1, 2)", r"y=2, x=\cos(\frac{\pi}{2}-1)", r"y=\cos(\frac{\pi}{2}-1), x=2"),
        ("5, 6", "y=5, x=6", "y=5, x=7"),  # a list without brackets has no order
    ],
)
def test_named_values_are_compared_by_name(gold: str, right: str, wrong: str) -> None:
    assert score(right, gold) == 1
    assert score(wrong, gold) == 0


@given(
    st.permutations("xyz"), st.lists(st.integers(-99, 99), min_size=3, max_size=3, unique=True), st.permutations("xyz")
)
def test_the_order_of_named_values_does_not_matter(order: list[str], values: list[int], others: list[str]) -> None:
    value = dict(zip("xyz", values, strict=True))
    gold = f"({','.join('xyz')})=({','.join(map(str, values))})"
    for place in ("xyz", order):
        answer = ", ".join(f"{name}={value[name]}" for name in place)
        point = f"({','.join(place)})=({','.join(str(value[name]) for name in place)})"
        for known in (gold, gold.partition("=")[2], answer, point):
            if known is not point or place == "xyz":
                assert score(answer, known) == score(point, known) == 1, known
    swapped = ", ".join(f"{name}={value[other]}" for name, other in zip("xyz", others, strict=True))
    assert score(swapped, gold) == score(gold, swapped) == (others == list("xyz"))


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (r"\infty - \infty", "0"),
        (r"0 \cdot \infty", "0"),
        (r"\frac{\infty}{\infty}", "1"),
        (r"\infty^0", "1"),
        (r"x - \infty + \infty", "x"),
        (r"(0 \cdot \infty, 1)", "(0, 1)"),
    ],
)
def test_infinity_does_not_cancel(answer: str, gold: str) -> None:
    assert score(answer, gold) == 0
    assert grade("math", r"\boxed{0}", answer).status == "bad_gold"


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("x'", "x"), ("x", "x'"), ("f''", "f'"), ("f'(x) = 2x", "f(x) = 2x"), (r"\{x', 2\}", r"\{x, 2\}"), ("2f'", "2f")],
)
def test_a_prime_makes_another_variable(answer: str, gold: str) -> None:
    assert score(answer, gold) == 0
    assert score(gold, gold) == score(answer, answer) == 1


@pytest.mark.parametrize(
    ("answer", "gold", "wanted"),
    [
        (r"\sin 1 = 2", "2", 0),
        (r"\sin 1 = \cos 1", r"\cos 1", 0),
        (r"\int_0^1 x dx = 1", "1", 0),
        (r"\int_0^1 x dx = \frac{1}{2}", r"\frac{1}{2}", 1),
        (r"f(x) = \sin 1", r"\sin 1", 1),
    ],
)
def test_an_equation_of_numbers_that_differ_is_neither_of_them(answer: str, gold: str, wanted: float) -> None:
    assert score(answer, gold) == wanted


@pytest.mark.parametrize(
    ("text", "gold"), [("The value is - 4.", "-4"), ("so x = \u2212 4", "-4"), ("Items:\n- 4", "4"), ("it is -4", "-4")]
)
def test_without_a_box_the_sign_that_stands_apart_is_read_too(text: str, gold: str) -> None:
    assert grade("math", text, gold, require_boxed=False).score == 1
    assert grade("math", text, gold.strip("-") if "-" in gold else "-4", require_boxed=False).score == 0
