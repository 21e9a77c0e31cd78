r"""Forms in which answers to ``math`` are written: pairs that are the same, and pairs that only look alike."""

from __future__ import annotations

import pytest

from trew.rewards import grade


def score(answer: str, gold: str) -> float | None:
    return grade("math", rf"so \boxed{{{answer}}}", gold).score


def matrix(text: str) -> str:
    return rf"\begin{{pmatrix}}{text}\end{{pmatrix}}"


SHEAR = matrix(r"1&1\\0&1")


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (rf"{SHEAR}^2", matrix(r"1&2\\0&1"), True),
        (matrix(r"1&2\\0&1"), rf"{SHEAR}^2", True),
        (rf"{SHEAR}^{{2023}}", matrix(r"1&2023\\0&1"), True),
        (rf"{SHEAR}^{{-1}}", matrix(r"1&-1\\0&1"), True),
        (rf"{SHEAR}^0", matrix(r"1&0\\0&1"), True),
        (rf"{SHEAR}^T", matrix(r"1&0\\1&1"), True),
        (rf"2 \cdot {SHEAR}^3", matrix(r"2&6\\0&2"), True),
        (rf"{SHEAR}^2 {SHEAR}", matrix(r"1&3\\0&1"), True),
        (rf"-{SHEAR}^2 + {SHEAR}", matrix(r"0&-1\\0&0"), True),
        (rf"{SHEAR}/2", matrix(r"0.5&0.5\\0&0.5"), True),
        (rf"\left({SHEAR}\right)^2", matrix(r"1&2\\0&1"), True),
        (matrix(r"x&1\\0&1") + "^2", matrix(r"x^2&x+1\\0&1"), True),
        (matrix(r"1\\2") + matrix("3&4"), matrix(r"3&4\\6&8"), True),
        (matrix("3&4") + matrix(r"1\\2"), "11", True),
        (r"\sin x" + matrix(r"1\\2"), matrix(r"\sin x\\2\sin x"), True),
        (rf"{SHEAR}^2", matrix(r"1&1\\0&1"), False),
        (rf"{SHEAR}^2", matrix(r"1&2\\0&2"), False),
        (rf"{SHEAR}^3", rf"{SHEAR}^2", False),
        (rf"{SHEAR}^2 + 1", matrix(r"2&2\\0&2"), False),
        (matrix(r"1&2\\2&4") + "^{-1}", matrix(r"1&2\\2&4"), False),
        (rf"{SHEAR}^2 +", matrix(r"1&2\\0&1"), False),
        (rf"{SHEAR}^{{}}", SHEAR, False),
        (rf"{SHEAR}^", SHEAR, False),
        (matrix(r"1&2\\3&4") + matrix(r"1&2\\3"), matrix(r"7&10\\15&22"), False),
    ],
)
def test_powers_products_and_sums_of_matrices(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("x=1 or y=2", "(1,2)", False),
        (r"x=1 \text{ or } y=2", "(y,x)=(2,1)", False),
        ("x=1 or y=2", "x=1, y=2", False),
        ("x=1, y=2", "x=1 or y=2", False),
        ("x=1 or y=2", "1, 2", False),
        ("1 or 2", "(1,2)", False),
        ("(1,2)", "1 or 2", False),
        (r"1, 2 \text{ or } 3", "(1,2,3)", False),
        (r"\sin 1 or 2", r"(\sin 1, 2)", False),
        ("x<1 or y>3", r"(-\infty,1)\cup(3,\infty)", False),
        ("(0,5) or (1,2)", "(0,5)", False),
        ("x=1, x=2", "(1,2)", False),
        ("x=1 and x=2", "(1,2)", False),
        ("x=1 or y=2", "y=2 or x=1", True),
        ("x=1 and y=2", "(1,2)", True),
        ("x=1 or x=2", "1, 2", True),
        ("x=1 or 2", r"\{1,2\}", True),
        (r"2 \text{ or } 1", r"1 \text{ and } 2", True),
        ("x<1 or x>3", r"(-\infty,1)\cup(3,\infty)", True),
        ("1<x<2 or 3<x<4", r"(1,2)\cup(3,4)", True),
        ("(1,2) or (3,4)", r"(3,4)\cup(1,2)", True),
        ("(3,4) or (1,2)", "(1,2), (3,4)", True),
        ("(x,y)=(1,2) or (x,y)=(3,4)", "(1,2), (3,4)", True),
    ],
)
def test_or_joins_alternatives_and_makes_no_tuple(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("(1,000)", "(1,0)", False),
        ("(1,0)", "(1,000)", False),
        ("1,000", "1, 0", False),
        ("(1,000,2)", "(1,0,2)", False),
        ("(1,000,2,000)", "(1,0,2,0)", False),
        ("[0,1,000]", "[0,1,0]", False),
        ("(1,050)", "(1,50)", False),
        ("1,234", "(1,234)", False),
        ("(1,234)", "1,234", False),
        ("(1,234)", "1234", False),
        ("1,234", r"\{1,234\}", False),
        ("1,234", "[1,234]", False),
        ("100,200,300", "(100,200,300)", False),
        ("1,234", "1234", True),
        ("1234", "1,234", True),
        ("(1,000)", "1000", True),
        ("(1,234)", "(1, 234)", True),
        ("1, 234", "(1,234)", True),
        ("(1,000, 2,000)", "(1000, 2000)", True),
        ("[0, 1,000]", "[0,1000]", True),
        ("200,100", "100, 200", True),  # a list may be written without spaces
        ("x=100 or x=200", "100,200", True),
    ],
)
def test_digit_groups_are_no_tuples(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"(\pm1,2)", r"\{(1,2),(-1,2)\}", True),
        (r"(\mp1,2)", "(1,2), (-1,2)", True),
        ("(1,2), (-1,2)", r"(\pm1,2)", True),
        (r"(x,y)=(\pm1,2)", "(1,2), (-1,2)", True),
        (r"(\pm1,2), (0,0)", "(1,2), (-1,2), (0,0)", True),
        (r"(0,\pm 5), (\pm 5, 0)", "(0,5), (0,-5), (5,0), (-5,0)", True),
        (r"(1\pm\sqrt2, 3)", r"(1+\sqrt2, 3) \text{ and } (1-\sqrt2, 3)", True),
        (r"(\pm1,\mp2)", "(1,-2), (-1,2)", True),
        (r"(\pm1,\mp2)", "(1,2), (-1,-2)", False),
        (r"(\pm1,\mp2)", r"(\pm1,\pm2)", False),
        (r"(\pm1,\pm2)", "(1,2), (-1,-2)", False),  # or four points
        (r"(\pm1,2)", "(1,2)", False),
        ("(1,2)", r"(\pm1,2)", False),
        (r"(\pm1,2)", r"(2,\pm1)", False),
    ],
)
def test_plus_minus_in_a_tuple_makes_two_of_them(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\cos 37^\circ", r"\sin 53^\circ", True),
        (r"\tan 20^\circ", r"\cot 70^\circ", True),
        (r"2\sin 20^\circ\cos 20^\circ", r"\sin 40^\circ", True),
        (r"(\cos 37^\circ, 2)", r"(\sin 53^\circ, 2)", True),
        (r"\cos 36^\circ", r"\sin 53^\circ", False),
        (r"\cos 37", r"\sin 53^\circ", False),
    ],
)
def test_degrees_in_functions_are_degrees_to_math_verify(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\text{infinity}", r"\infty", True),
        (r"\infty", r"\text{Infinity}", True),
        (r"\text{infinity}", r"-\infty", False),
        (r"\text{negative infinity}", r"\infty", False),
    ],
)
def test_infinity_may_be_a_word(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\text{all real numbers}", r"(-\infty,\infty)", True),
        (r"\mathbb{R}", r"\text{All real numbers}", True),
        (r"\text{all reals}", r"\text{all real numbers}", True),
        (r"\text{all positive real numbers}", r"\mathbb{R}", False),
        (r"\text{all real numbers except } 2", r"\mathbb{R}", False),
        (r"\text{No solutions}", r"\text{no solution}", True),
        (r"\text{no real solutions}", r"\text{no solution}", False),
        (r"\text{DNE}", r"\text{does not exist}", True),
        (r"\emptyset", r"\text{no solution}", True),
        (r"\text{No solutions}", r"\varnothing", True),
        (r"\text{The empty set}", r"\{\}", True),
        (r"\{0\}", r"\text{no solution}", False),
        (r"\text{no real solutions}", r"\emptyset", False),
        (r"\text{none}", r"\emptyset", False),
    ],
)
def test_phrases_with_one_meaning_are_the_same(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("5^{th}", "5", True),
        ("22^{nd}", "22", True),
        ("12^{th}", r"12\text{th}", True),
        ("12^{th}", "11", False),
        ("11^{st}", "11", False),
        ("5^{nd}", "5", False),
        ("x^{th}", "x", False),
    ],
)
def test_an_ordinal_number_needs_no_upright_ending(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("f(2)=5", "5", True),
        ("f(-1)=5", "5", True),
        ("f'(2.5)=2+3=5", "5", True),
        ("5", "f(2)=5", True),
        ("f^{-1}(x)=x-1", "x-1", True),
        ("f^{-1}(2)=3", "3", True),
        ("f(2)=5", "f(3)=5", False),
        ("f(2)=5", "f'(2)=5", False),
        ("f^{-1}(x)=x-1", "f(x)=x-1", False),
        (r"\sin(2)=5", "5", False),
        ("e(2)=5", "5", False),
        ("2(3)=5", "5", False),
    ],
)
def test_a_value_of_a_function_or_its_inverse_is_a_name(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("2e - 1", "2e-1", True),
        ("2e-1", "-1+2e", True),
        ("2e-1", "0.2", True),
        ("3e2", "300", True),
        ("2e-1", "2e + 1", False),
        ("2e - 1", "0.2", False),
    ],
)
def test_e_between_digits_may_be_the_base_of_the_logarithm(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("CBA", "ABC", False),
        ("BA, CD", "AB, CD", False),
        ("A B C", "ABC", True),
        ("CD, AB", "AB, CD", True),
        ("2BA", "2AB", True),
        ("yx", "xy", True),
    ],
)
def test_capital_letters_alone_have_an_order(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"x=2 \text{ or maybe } x=5", "5", False),
        (r"x=2 \text{ to } y=5", "5", False),
        ("x=2 to y=5", "5", False),
        (r"x=2 \quad x=5", "5", False),
        ("x=2 x=5", "5", False),
        (r"x=2 \quad y=5", "5", False),
        (r"x=2 \quad y=5", "(2,5)", True),
        (r"x=\frac{-b}{2a}=5", "5", True),
        (r"\text{Area} = \frac12 b h = 5", "5", True),
        (r"A = 2\text{ cm}\cdot 3\text{ cm} = 6\text{ cm}^2", "6", True),
    ],
)
def test_two_equations_side_by_side_are_not_the_last_of_them(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("It is $5$ or $6$.", "6", False),
        ("So $x = 5$ and $y = 6$.", "6", False),
        ("From $x=2$ to $y=5$.", "5", False),
        ("It is not $5$.", "5", False),
        ("$5$ is wrong.", "5", False),
        ("The answer isn't 5", "5", False),
        ("It costs $5 and $6.", "5", False),
        ("The roots are $5$ and $6$.", "5, 6", True),
        ("So $x = 5$ and $y = 6$.", "(5,6)", True),
        ("If $x = 2$, then $y = 5$.", "5", True),
        ("It is $5$. Then $z = 6$.", "6", True),
        ("The solutions are 5 and 6.", "5, 6", True),
        ("It costs $5.", "5", True),
    ],
)
def test_without_a_box_a_list_is_no_item_and_a_denial_no_answer(text: str, gold: str, right: bool) -> None:
    assert (grade("math", text, gold, require_boxed=False).score == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("6'2", "62", False),
        ("21'07", "2107", False),
        ("5'", "5", False),
        ("3'R^2", "3R^2", False),
        ("y = 2x + 3'", "y = 2x + 3", False),
        ("(3,4']", "(3,4]", False),
        (r"30^\circ 15'", r"30^\circ15'", True),
        ("1'234", "1234", True),
        ("f'(x) = 2x", "2x", True),
    ],
)
def test_a_prime_is_not_left_out(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\textbf{(A)}\ 5", "A", True),
        (r"\textbf{(A)}\ 5", r"\text{(A)}", True),
        (r"\textbf{(A)}\ 5", "5", True),
        (r"\mathrm{(A)}\ \frac12", "0.5", True),
        ("(A) 5", "A", True),
        (r"\text{(A) } \text{Monday}", r"\text{Monday}", False),  # words may say anything of (A)
        (r"\text{(C)}\text{ is wrong}", r"\text{(C)}", False),
        (r"\text{(C)} 5\text{ is wrong}", r"\text{(C)}", False),
        (r"(C) 5 \text{ or more}", "C", False),
        ("(C) 5 dozen", "C", False),
        (r"\text{(C)}\text{ cm} + 3\text{ m}", r"\text{(C)}", False),
        (r"\text{(A) } \cot x", r"\frac{\cos x}{\sin x}", True),
        ("A", r"\textbf{(A)}\ 5", True),
        ("5", r"\textbf{(A)}\ 5", True),
        (r"\textbf{(A)}\ 5", "B", False),
        (r"\textbf{(A)}\ 5", "6", False),
        (r"\textbf{(A)}\ 5", r"\textbf{(B)}\ 5", False),
        (r"\textbf{(A)}\ 5", r"\textbf{(A)}\ 6", False),
        (r"\text{(A)}\text{(B)}", "A", False),
        (r"\text{(A)} B", "A", False),
        (r"\text{(A)} \text{(B)} 5", "A", False),
        (r"\text{(A)} 5, \text{(B)} 6", "A", False),
        ("(A) x", "A", False),
        ("P(A) 5", "A", False),
    ],
)
def test_an_option_with_its_value_is_the_option_and_the_value(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


def test_a_repeating_decimal_reaches_math_verify_as_the_number_that_it_is() -> None:
    assert score(r"\sum_{k=1}^{\infty} 3 \cdot 10^{-k}", r"0.\overline{3}") == 1
    assert score(r"\sum_{k=1}^{\infty} 3 \cdot 10^{-k}", r"0.\overline{4}") == 0
