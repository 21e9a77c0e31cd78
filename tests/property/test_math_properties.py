"""What must hold of ``math`` for all answers: wrappers do not matter, changes do, nothing raises or hangs."""

from __future__ import annotations

import time
from fractions import Fraction

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trew.rewards import grade
from trew.rewards.maths import algebra, compare
from trew.rewards.maths.answers import read
from trew.rewards.maths.normalise import MAX_ANSWER, normalise
from trew.rewards.maths.shapes import Answer, Scalar

whole = st.integers(-10_000, 10_000)
nonzero = whole.filter(bool)
fractions = st.builds(Fraction, whole, st.integers(1, 500))


def score(answer: str, gold: str) -> float | None:
    return grade("math", f"so $\\boxed{{{answer}}}$", gold).score


def latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    above, below = abs(value.numerator), value.denominator
    return f"{sign}{above}" if below == 1 else f"{sign}\\frac{{{above}}}{{{below}}}"


wrappers = st.sampled_from(
    [
        "@", " @ ", "$@$", "\\( @ \\)", "\\left(@\\right)", "x = @", "@.", "@\\text{ cm}", "@ \\text{ units}",
        "@^\\circ", "\\displaystyle @", "{@}", "\\text{The answer is } @", "@\\,", "\\boxed{@}", "0+@", "1\\cdot(@)",
        "\\frac{@}{1}", "@\\%", "\\$ @", "\n@\n", "@=(@)\\cdot 1",
    ]
)  # fmt: skip


@given(fractions, wrappers)
def test_wrappers_do_not_matter(value: Fraction, wrapper: str) -> None:
    assert score(wrapper.replace("@", latex(value)), latex(value)) == 1


@given(fractions, st.integers(2, 9))
def test_another_form_of_the_number_is_the_number(value: Fraction, k: int) -> None:
    gold = latex(value)
    forms = [f"{value.numerator}/{value.denominator}", f"\\dfrac{{{value.numerator * k}}}{{{value.denominator * k}}}"]
    decimal = value.denominator
    while decimal % 2 == 0:
        decimal //= 2
    while decimal % 5 == 0:
        decimal //= 5
    if decimal == 1:
        digits = f"{abs(value.numerator) * 10**12 // value.denominator:013d}"
        forms.append(f"{'-' if value < 0 else ''}{digits[:-12]}.{digits[-12:]}")
    if value > 1 and value.denominator > 1:
        rest = value - int(value)
        forms.append(f"{int(value)}\\frac{{{rest.numerator}}}{{{rest.denominator}}}")
    for form in forms:
        assert score(form, gold) == score(gold, form) == 1


@given(fractions.filter(bool), st.integers(0, 20), st.integers(1, 9))
def test_changes_matter(value: Fraction, where: int, digit: int) -> None:
    gold = latex(value)
    assert score(latex(-value), gold) == 0
    assert score(latex(value + 1), gold) == 0
    if abs(value) != 1:
        assert score(latex(1 / value), gold) == 0
    places = [i for i, char in enumerate(gold) if char.isdigit()]
    at = places[where % len(places)]
    changed = gold[:at] + str((int(gold[at]) + digit) % 10) + gold[at + 1 :]
    if "{0}" not in changed and "{00" not in changed:
        known = read(normalise(changed)).shape
        assume(not isinstance(known, Scalar) or algebra.rational(known.value) != value)
        assert score(changed, gold) == 0
    assert score(f"{value.numerator / value.denominator:.3f}", gold) == (
        1 if Fraction(f"{value.numerator / value.denominator:.3f}") == value else 0
    )


@given(fractions, fractions)
def test_tuples_sets_and_intervals(a: Fraction, b: Fraction) -> None:
    assume(a < b)
    x, y = latex(a), latex(b)
    for gold, right, wrong in [
        (
            f"({x}, {y})",
            [f"\\left( {x},{y} \\right)"],
            [f"({y}, {x})", f"[{x}, {y}]", f"({x}, {y}]", f"\\{{{x},{y}\\}}", x],
        ),
        (f"[{x}, {y})", [f"{x} \\le x < {y}"], [f"[{x}, {y}]", f"({x}, {y})", f"[{y}, {x})", f"{x}, {y}"]),
        (f"\\{{{x}, {y}\\}}", [f"\\{{{y}, {x}\\}}", f"{y}, {x}", f"{x} \\text{{ or }} {y}"], [f"({x}, {y})", x, y]),
        (x, [], [f"{x} \\text{{ or }} {y}", f"{x}, {y}", f"({x}, {y})", f"[{x}, {y}]", f"{y}"]),
    ]:
        assert [score(answer, gold) for answer in right] == [1.0] * len(right)
        assert [score(answer, gold) for answer in wrong] == [0.0] * len(wrong)


@given(st.lists(st.tuples(nonzero, st.integers(0, 4)), min_size=1, max_size=4), st.randoms())
def test_polynomials_in_any_order(terms: list[tuple[int, int]], draw) -> None:
    def written(parts: list[tuple[int, int]]) -> str:
        return "+".join(f"({c})x^{{{n}}}" for c, n in parts)

    shuffled = terms[:]
    draw.shuffle(shuffled)
    assert score(written(shuffled), written(terms)) == 1
    assert score(written([*shuffled, (1, 5)]), written(terms)) == 0
    assert score(f"2({written(terms)})", written([*terms, *shuffled])) == 1


@given(st.integers(2, 200), st.integers(2, 200), nonzero)
def test_roots(a: int, b: int, c: int) -> None:
    assert score(f"\\sqrt{{{a}}}\\cdot\\sqrt{{{b}}}", f"\\sqrt{{{a * b}}}") == 1
    assert score(f"\\frac{{{c}}}{{\\sqrt{{{a}}}}}", f"\\frac{{{c}\\sqrt{{{a}}}}}{{{a}}}") == 1
    assert score(
        f"\\frac{{1}}{{{c}+\\sqrt{{{a * a + 1}}}}}", f"\\frac{{\\sqrt{{{a * a + 1}}}-({c})}}{{{a * a + 1 - c * c}}}"
    ) == (1 if a * a + 1 != c * c else 0)
    assert score(f"{c}+\\sqrt{{{a * a + 1}}}", f"{c}-\\sqrt{{{a * a + 1}}}") == 0


PIECES = [
    "\\frac", "{", "}", "(", ")", "[", "]", "\\{", "\\}", "^", "_", "!", "1", "27", "0.5", "x", "y", "i", "e",
    "\\pi", "\\sqrt", "+", "-", "*", "/", "=", "<", "\\le", ",", ";", "\\text{", "or", "and", " ", "\\pm", "\\sin",
    "\\log", "|", "\\cup", "\\in", "\\infty", "\\begin{pmatrix}", "\\end{pmatrix}", "&", "\\\\", "\\left",
    "\\right", "999999", "^{", "\\binom", "sqrt", "cm", "%", "$", "\\boxed{", "°", "√", "½", "²", "\x00", "\ud800",
    ":", "\\ne", "\\setminus", "\\R", "\\approx", "ln", "\\lfloor", "even", "\\overline{3}", ".", "answer is",
    "<think>", "</think>", "٣", "million", "\\text{ cm}", "\\text{ miles per hour}", "\\mathrm{i}", "\\text{ is wrong}",
    "per", "square", "a.m.", "base", "\\$", "\\%", "dollars", "\\text{",
]  # fmt: skip
junk = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=3)), max_size=60).map("".join)
GOLDS = [
    read(normalise(gold))
    for gold in (
        "7",
        "(1,2)",
        "\\{1,2\\}",
        "x=5",
        "\\text{even}",
        "\\sin x",
        "52_8",
        "(0,1)\\cup(2,3)",
        "1\\pm\\sqrt2",
        "3:4",
    )
]


@settings(deadline=None, max_examples=400)
@given(junk)
def test_any_text_is_read_quickly_and_the_same_each_time(text: str) -> None:
    start = time.thread_time()
    plain = normalise(text[:MAX_ANSWER])
    answer = read(plain)
    verdicts = [compare.same(answer, gold) for gold in GOLDS]
    assert time.thread_time() - start < 1
    assert verdicts == [compare.same(read(plain), gold) for gold in GOLDS]
    if answer.text:
        assert compare.same(answer, answer) is True
    if isinstance(answer.shape, Scalar):
        assert compare.same(Answer(answer.shape), answer) is True


@settings(deadline=None, max_examples=200)
@given(junk, st.booleans(), st.booleans())
def test_any_completion_without_a_box_around_a_formula_is_judged(text: str, boxed: bool, thinking: bool) -> None:
    verdict = grade("math", text.replace("\\boxed", ""), "7", require_boxed=boxed, thinking=thinking)
    if boxed:
        assert (verdict.score, verdict.status) == (0.0, "no_answer")
    else:
        assert verdict.score in (0.0, 1.0)
