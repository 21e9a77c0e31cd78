"""Values with a name in front: the name does not matter where it fits, and another one is another thing."""

from __future__ import annotations

import pytest

from trew.rewards.maths.grade import grade


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("|z| = 5", "5", True),
        ("|S| = 24", "24", True),
        (r"|\vec{a}| = 5", "5", True),
        (r"\left|\overrightarrow{AB}\right| = 5", "6", False),
        (r"\tan\theta = 2", "2", True),
        (r"\sin(\alpha) = \frac12", "1/2", True),
        (r"\mathrm{Var}(X) = 5", "5", True),
        (r"\text{lcm}(4, 6) = 12", "12", True),
        (r"\mathbb{P}(A) = \frac12", "0.5", True),
        (r"\mathbb{E}[X] = 5", "5", True),
        ("|z| = 5", "|z| = 5", True),
        ("|z| = 5", "|S| = 5", False),
        ("|z| = 5", "-5", False),
        ("|x| = 5", "5", False),  # an equation: x may be -5
        (r"\tan\theta = 2", r"\tan\alpha = 2", False),
        (r"\tan\theta = 2", r"\cot\theta = 2", False),
        (r"\sin\frac{\pi}{6} = \frac12", r"\frac12", True),
        (r"\sin\pi = 2", "2", False),
        (r"\text{Var}(X) = 5", r"\text{Var}(Y) = 5", False),
        (r"\text{Var}(X) = 5", r"\text{Cov}(X) = 5", False),
        (r"\text{area}(ABC) = 5", "5", True),
    ],
)
def test_a_named_value(answer: str, gold: str, right: bool) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).score == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("|3+4i|", "5", True),
        ("5", "|3 - 4i|", True),
        (r"|1+\sqrt{3}i|", "2", True),
        ("|i|", "1", True),
        ("|-2i|", "2", True),
        ("|3+4i|", "-5", False),
        ("|3+4i|", "7", False),
        ("|x+4i|", "5", False),
        ("|2+i|", r"\sqrt5", True),
        (r"|(1+i)(2-i)|", r"\sqrt{10}", True),
    ],
)
def test_the_modulus_of_a_complex_number_is_worked_out(answer: str, gold: str, right: bool) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).score == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"x \in ]-3, 1]", "(-3, 1]", True),
        ("(-3, 1]", r"x \in ]-3; 1]", True),
        (r"x \in ]-3, 1]", "[-3, 1]", False),
        (r"]-\frac{3}{2}, 1[ \text{ or } x \in [2, 3[", r"(-\frac32, 1) \cup [2, 3)", True),
        (r"[1, 2] \cup [3, 4]", r"[1, 2] \cup [3, 4]", True),
        ("[1, 2], [3, 4]", "(1, 2], [3, 4]", False),
        (r"\sqrt[3]{2}, \sqrt[3]{4}", r"\sqrt[3]{4}, \sqrt[3]{2}", True),
    ],
)
def test_an_interval_of_the_french_notation_may_have_something_beside_it(answer: str, gold: str, right: bool) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).score == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("x = 5, y = 6", r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", True),
        ("y = 6, x = 5", r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", True),
        (r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", r"\begin{cases} x = 5 \\ y = 6 \end{cases}", True),
        ("x = 6, y = 5", r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", False),
        ("x = 5, x = 6", r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", False),
        ("5, 6", r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", False),
        ("x = 5, y = 6", r"\begin{pmatrix} 5 & 6 \\ 5 & 6 \end{pmatrix}", False),
        (r"\{5, 6\}", r"\begin{pmatrix} 5 \\ 6 \end{pmatrix}", False),
    ],
)
def test_a_column_is_the_values_of_its_coordinates(answer: str, gold: str, right: bool) -> None:
    assert grade(f"\\boxed{{{answer}}}", gold).score == right
