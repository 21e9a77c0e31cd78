r"""Notations of ``math`` that are read in one way only: pairs that are the same, and pairs that only look alike."""

from __future__ import annotations

import pytest

from trew.rewards import grade
from trew.rewards.maths.grade import gold_problem


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


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("n2^{n-1}", r"n \cdot 2^{n-1}", True),
        (r"n \cdot 2^{n-1}", "n 2^{n-1}", True),
        ("(n-1)2^{n-2}", r"(n-1) \cdot 2^{n-2}", True),
        ("2^{4}3^{2}", "144", True),
        (r"\frac{1}{2}3^2", "4.5", True),
        (r"\pi 2^3", r"8\pi", True),
        (r"\frac{8!}{2!2!}", "10080", True),
        ("8!/(2!3!)", "3360", True),
        ("5!2", "240", True),
        ("n2^{n-1}", "(n2)^{n-1}", False),
        ("2 3^2", "18", False),
        ("2^3 4", "32", False),
        ("x2", "2x", False),
        ("x_1 2^3", "8x_1", False),
        ("(x+1)2", "2x+2", False),
        (r"\text{not } 3^2", "9", False),
        (r"3\text{ or so, } 2^2", "12", False),
    ],
)
def test_a_power_or_a_factorial_behind_a_factor_multiplies_it(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("1.5 x 10^3", "1500", True),
        ("1.5x10^{3}", "1500", True),
        (r"1.5 \text{ x } 10^{-3}\text{ m}", "0.0015", True),
        (r"6.02 \times 10^{23}", "6.02 x 10^23", True),
        ("1.5 x 10^4", "1500", False),
        ("2x + 10^3", "20 + 10^3", False),
        ("2 x 3", "6", False),
        ("2x", r"2 \times", False),
    ],
)
def test_an_x_before_a_power_of_ten_is_the_sign_of_multiplication(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\operatorname{tg} 15^\circ", r"2-\sqrt{3}", True),
        (r"\arctan 2", r"\operatorname{arctg} 2", True),
        (r"\mathrm{ctg}\,\alpha", r"\cot \alpha", True),
        (r"\tan^2 \alpha", r"\operatorname{tg}^{2} \alpha", True),
        (r"\operatorname{arcctg} x", r"\cot^{-1} x", True),
        (r"\operatorname{cosec} 30^\circ", "2", True),
        (r"\operatorname{ctg} 15^\circ", r"2-\sqrt{3}", False),
        (r"\operatorname{tg} \alpha", r"\cot \alpha", False),
    ],
)
def test_tg_and_ctg_are_tangent_and_cotangent(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"v_{\text{avg}} = 5", "5", True),
        ("5", r"v_{\mathrm{avg}} = 5", True),
        (r"S_{\triangle ABC} = 6", "6", True),
        (r"x_{\max} = 5", "5", True),
        (r"y_\min = 5", "5", True),
        ("V_{P-ABC} = 5", "5", True),
        (r"v_{\text{avg}} = 6", "5", False),
        ("a_{n+1} = 2n", "2n", False),
        ("2_{3} = 5", "5", False),
        (r"S_{\triangle ABC} = 6", r"S_{\triangle ABD} = 6", False),
        (r"v_{\text{first}} = 6", r"v_{\text{last}} = 6", False),
        (r"x_{\text{first}} = 6, x_{\text{last}} = 7", r"x_{\text{first}} = 7, x_{\text{last}} = 6", False),
    ],
)
def test_a_name_may_have_an_index_in_words_or_of_a_figure(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\text{boys} = 12, \text{girls} = 15", r"\text{girls} = 12, \text{boys} = 15", False),
        (r"\text{Tom: } 5, \text{Ann: } 7", r"\text{Tom: } 7, \text{Ann: } 5", False),
        (r"\text{Ann: } 5, \text{Tom: } 7", r"\text{Tom: } 7, \text{Ann: } 5", True),
        (r"\text{Tom} = 7, \text{Ann} = 5", r"\text{Tom: } 7, \text{Ann: } 5", True),
        ("7, 5", r"\text{Tom: } 7, \text{Ann: } 5", True),
        (r"\text{Thomas: } 7, \text{Ann: } 5", r"\text{Tom: } 7, \text{Ann: } 5", True),
        ("x = 1, x = 2", "x = 2, x = 1", True),
    ],
)
def test_values_that_words_name_are_compared_by_these(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"(D) \frac{1}{2}", "D", True),
        (r"(D)\ -5\sqrt2", r"\text{(D)}", True),
        ("D. 12", "D", True),
        ("D) 12", "12", True),
        ("(D): 12", "D", True),
        (r"\mathbf{(D)}\ 12", "D", True),
        (r"\textbf{(D)}\ \$12", "D", True),
        ("D", r"\textbf{(D)}\ \$12", True),
        ("D. $12", r"\$12", True),
        (r"\text{Option D}", "D", True),
        (r"\text{choice (D)}", r"\textbf{(D)}", True),
        ("D", "Option D", True),
        (r"\text{Option D}", "C", False),
        ("D. 12", "C", False),
        ("D. 12", "13", False),
        ("D. 12, C. 13", "D", False),
        ("(D) 12 (C)", "D", False),
        ("(D) 12 (x)", "D", True),
        ("D) 12 or C) 13", "D", False),
        (r"(D) \frac{1}{2} \text{ is wrong}", "D", False),
        ("(x) 5", "x", False),
        ("(D) x", "D", False),
        ("D - 5", "D", False),
        ("5D", "D", False),
    ],
)
def test_an_option_may_have_its_value_in_many_forms(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"x \ne \pm 2", r"(-\infty,-2)\cup(-2,2)\cup(2,\infty)", True),
        (r"x \ne 2, x \ne -2", r"x \neq \pm 2", True),
        (r"x \ne 2 \text{ and } x \ne -2", r"\mathbb{R} \setminus \{2, -2\}", True),
        (r"\mathbb{R} \setminus \{2, -2\}", r"x \ne -2, 2", True),
        (r"x \ne 2", r"x \ne \pm 2", False),
        (r"x \ne 2, y \ne -2", r"x \ne \pm 2", False),
        (r"x \ne 2 \text{ or } x \ne -2", r"x \ne \pm 2", False),
        (r"x \ne 2, x = 3", "3", False),
        (r"x \ne \pm 2", "2, -2", False),
        (r"x = 3, x \ne 2", r"x \ne 2", False),
        (r"y = 3, x \ne 2", r"x \ne 2, y = 3", True),
    ],
)
def test_what_a_number_does_not_equal_may_be_several_numbers(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("2 m g", "2mg", True),
        ("2mg", "2 m g", True),
        (r"\frac{2 m g}{k}", r"\frac{2mg}{k}", True),
        (r"\frac{3 g m}{4}", r"\frac{3mg}{4}", True),
        ("3am", "3ma", True),
        (r"2\text{ mg}", "2mg", True),
        (r"2\text{ mg}", "2 g m", False),
        ("3 m g", "2mg", False),
        ("2 m h", "2mg", False),
        ("5 m", r"5\text{ m}", True),
        ("5mg", "5gm", False),  # grams
    ],
)
def test_letters_that_spell_a_unit_are_a_product_beside_one(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("m+n = 113", "113", True),
        ("m+n = 100+13 = 113", "113", True),
        ("113", "m+n=113", False),
        ("12", "2x + 3y = 12", False),
        ("100a + 10b + c = 123", "123", True),
        (r"\frac{a}{b} = \frac{2}{3}", r"\frac23", True),
        ("AB + CD = 12", "12", True),
        ("a^2+b^2 = 25", "25", True),
        ("m+n = 113", "114", False),
        ("m+n = 100+14 = 113", "113", False),
        ("m+n = 113 = 114", "114", False),
        ("m+n = k = 113", "113", False),
        ("2x = 10", "10", False),
        ("x^2 = 4", "4", False),
        ("x + y = 0", "0", False),
        ("m+n = 5, 6", "5", False),
        ("m+n = 113", "p+q = 113", False),
        ("x + 2y = 3", "2x + 4y = 6", True),
    ],
)
def test_an_expression_of_unknowns_with_its_value_is_the_value(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\begin{cases} x=1 \\ y=2 \end{cases}", "(1,2)", True),
        (r"\begin{cases} y=2, \\ x=1. \end{cases}", "x=1, y=2", True),
        ("(1,2)", r"\left\{\begin{array}{l} x=1 \\ y=2 \end{array}\right.", True),
        (r"\left\{\begin{aligned} x&=1 \\ y&=2 \end{aligned}\right.", r"\begin{cases}x=1\\y=2\end{cases}", True),
        (r"\begin{cases} x=2 \\ y=1 \end{cases}", "(1,2)", False),
        (r"\begin{cases} x=1 \\ y=2 \\ z=3 \end{cases}", "(1,2)", False),
        (r"\begin{cases} 1 & x=1 \\ 2 & x=2 \end{cases}", "1, 2", False),
        (
            r"\begin{cases} x=1 \\ y=1 \end{cases} \text{ or } \begin{cases} x=2 \\ y=2 \end{cases}",
            r"\begin{cases} x=1 \\ y=2 \end{cases} \text{ or } \begin{cases} x=2 \\ y=1 \end{cases}",
            False,
        ),
    ],
)
def test_a_system_of_values_is_the_values(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\arctan 1", r"\frac\pi4", True),
        (r"\arccos\frac12", r"\frac\pi3", True),
        (r"\frac{\sin 1}\pi", r"\frac{\cos(\frac\pi2-1)}{\pi}", True),
        (r"\sqrt[3]{7+5\sqrt2}", r"1+\sqrt2", True),
        (r"2\cos(\frac\pi5)", r"\frac{1+\sqrt5}2", True),
        (r"\arctan 2", r"\frac\pi4", False),
        (r"\sum_{k=1}^{2} \sin(k \cdot 20^\circ)", r"\sum_{k=1}^{2} \cos(90^\circ - k \cdot 20^\circ)", True),
    ],
)
def test_fractions_with_bare_arguments_reach_math_verify(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


def test_a_gold_is_checked_in_the_form_in_which_it_is_compared() -> None:
    assert gold_problem(r"\sum_{k=1}^{2} \sin(\frac\pi5 + k \cdot 20^\circ)") == ""


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"1.2 \text{ eV}", "1.2", True),
        (r"3\times10^{-4} \mathrm{~T}", "0.0003", True),
        (r"2 \cdot 10^5 \text{ N/C}", "200000", True),
        (r"5 \mathrm{~erg}/\mathrm{s}", "5", True),
        (r"5\text{ µF}", "5", True),
        ("5 T", r"5\text{ T}", True),
        (r"25^\circ\text{C}", "25", True),
        (r"1\text{C}_{16}", "1C_{16}", True),
        (r"5\text{ MeV}", r"5\text{ keV}", False),
        (r"5^\circ\text{C}", r"5\text{ C}", False),
        (r"\frac32 kT", r"\frac32", False),
        ("2 pc", "2", False),
        (r"\frac{2 eV}{m}", r"\frac{2eV}{m}", True),
        (r"\text{A}\text{C}", "A", False),
        (r"\text{A C}", r"\text{(A)}", False),
    ],
)
def test_units_of_electricity_and_of_small_and_large_things(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("f(1) = 3", "f(2) = 6", False),
        ("f(1) = 3, f(2) = 6", "f(2) = 6, f(1) = 3", True),
        ("f(1) = 6, f(2) = 3", "f(1) = 3, f(2) = 6", False),
        ("f(2) = 6", "f(2) = 6", True),
        ("2f(x) = 2x", "f(x) = x", True),
        ("g(x) = 2x", "f(x) = 2x", False),
    ],
)
def test_values_of_a_function_at_two_places_are_two_values(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\frac{3}{4} \text{ or } 0.75", "0.75", True),
        ("0.75", r"\frac{3}{4} \text{ or } 0.75", True),
        (r"\frac{3}{4} \text{ or } 0.7", "0.75", False),
        ("7 or 8", "7", False),
        ("0.75, 0.75", "0.75", False),
        (r"x = \frac{3}{4} \text{ or } 0.75", "0.75", True),
    ],
)
def test_one_value_in_two_forms_is_the_value(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("2ⁿ⁻¹", "2^{n-1}", True),
        ("2ⁿ⁺¹", r"2 \cdot 2^n", True),
        ("2ⁿ", "2^n", True),
        ("x² + y²", "x^2+y^2", True),
        ("x⁻¹", r"\frac1x", True),
        ("eⁱ", "e^i", True),
        ("aₙ = 2n", "2n", True),
        ("aₙ₊₁", "a_{n+1}", True),
        ("log₂8", "3", True),
        ("\u200b7\ufeff", "7", True),
        ("2∙3", "6", True),
        ("2ⁿ⁻¹", "2^{1/n}", False),
        ("aₙ", "an", False),
        ("\u202e7", "7", False),
    ],
)
def test_raised_and_lowered_letters_are_exponents_and_indexes(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"P(X=1) = \frac12", "0.5", True),
        (r"P(X \ge 1) = \frac12", "0.5", True),
        (r"P(A|B) = \frac12", "0.5", True),
        (r"P(\text{sum is } 7) = \frac16", r"\frac16", True),
        ("E[X] = 2", "2", True),
        ("|AB| = 6", "6", True),
        ("[ABC] = 6", "6", True),
        ("6", "|AB| = 6", True),
        ("P(X=1) = 0.4", "0.5", False),
        ("P(X=1) = 0.5", "P(X=2) = 0.5", False),
        ("|x| = 6", "6", False),
        ("|AB| = 6", "|CD| = 6", False),
        ("P(0.5) = 1", "0.5", False),
    ],
)
def test_a_probability_a_length_or_an_area_has_its_value_behind_it(answer: str, gold: str, right: bool) -> None:
    assert (score(answer, gold) == 1) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        (r"\log_2 8 = 3", "3", True),
        (r"\log_3 8 = 3", "3", False),
        (r"\log_{2}{9} = 3", "3", False),
        (r"\cos A = \frac12", r"\frac12", True),
        (r"\log_2 x = 3", "3", True),
    ],
)
def test_a_logarithm_of_a_number_is_a_side_and_no_name(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("f(n) = n + 1", "f(x) = x + 1", True),
        ("f(t) = 2kt^2 - k", "f(x) = 2kx^2 - k", True),
        (r"f(t) = \sin t + \tan t", r"f(x) = \sin x + \tan x", True),
        ("f(n) = n + 2", "f(x) = x + 1", False),
        ("f(n) = x + 1", "f(x) = x + 1", False),
        ("f(n) = n + x", "f(x) = x + x", False),
        ("g(n) = n + 1", "f(x) = x + 1", False),
        ("f'(n) = 2n", "f(x) = 2x", False),
        ("f(n) = n + 1, g(n) = 2n", "f(x) = x + 1, g(x) = 2x", True),
    ],
)
def test_a_function_may_have_another_letter_for_its_argument(answer: str, gold: str, right: bool) -> None:
    assert score(answer, gold) == right
