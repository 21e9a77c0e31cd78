r"""Units, words, dates and brackets behind and around a value in ``math``: what is the same, and what is not.

A unit that one side leaves out does not matter; two units must be the same; nothing is converted; any other text must
be equal. Every pair is graded in both directions.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from trew.rewards import grade
from trew.rewards.builtin import kinds
from trew.rewards.maths import tokens, units

DATA = Path(__file__).parents[3] / "shared" / "data" / "math" / "math500.jsonl"

# each line: an answer, "==" or "!=", and what it is held against
PAIRS = r"""
# no unit on one side
5 == 5\text{ cm}
5 == 5cm
5 == 5 cm
5 == 5\,\text{cm}
5 == 5~\mathrm{cm}
5 == \text{5 cm}
5 == 5\mbox{ inches}
5 == 5\textrm{ in.}
5 == 5 \text{ ft.}
5 == 5 square units
5 == 5\text{ sq. ft.}
5 == 5\text{ units}^2
5 == 5\text{ km/h}
5 == 5 km/h
5 == 5\text{ miles per hour}
5 == 5 miles per hour
5 == 5\,\mathrm{m/s^2}
5 == 5\ \mathrm{m}\,\mathrm{s}^{-1}
5 == 5\,\frac{\text{m}}{\text{s}}
5 == 5\text{ dollars}
5 == \$5
5 == $5
5 == 5\%
5 == 5 percent
5 == 5^\circ
5 == 5°
5 == 5 degrees
5 == 5\text{ p.m.}
5 == 5 pm
5 == 5\text{ students}
5 == 5 ways
5 == 5\text{ people}
5 == 5\text{th}
5 == 5^{\text{th}}
-5 == -\$5
-5 == \$-5
\frac{5}{2} == \frac{5}{2}\text{ hours}
\frac{5}{2} == 2\frac{1}{2} hours
\frac{5}{2} == \frac{5\text{ hours}}{2}
\sqrt{2} == \sqrt{2}\text{ m}
2\pi == 2\pi\text{ cm}
2\pi == 2\pi\ cm^2
x+1 == (x+1)\text{ m}
5000000 == 5\text{ million dollars}
5000000 == \$5\text{ million}
5 != 5\text{ million}
6 != 5\text{ cm}
-5 != 5\text{ cm}
5 != 5m
5 != 5 m
5 != 5^{2}\text{ cm}
5 != 5\text{ is wrong}
5 != 5\text{ dozen}
5 != 5 dozen
5 != 5\text{ thirds}
5 != 5\text{ halves}
5 != 5\text{ over two}
5 != 5\text{ over } 2
5 != 5\text{ or more}
5 != 5 or more
5 != 5\text{ at most}
5 != \text{at least } 5
5 != \text{not } 5
5 != \text{about } 5
5 != 5\text{ (rounded)}
5 != 5\text{ remainder } 2
5 != 5 \text{ R } 2
5 != 5\text{ squared}
5 != 5\text{ per}
5 != 5\text{ hours } 30\text{ minutes}
5 != 5 hours 30 minutes
5 != 5\text{ hours and } 30\text{ minutes}
5 != 5\text{ cm} + 3\text{ m}
8 != 5\text{ cm} + 3\text{ m}
5 != 5\text{ of them}
5 != 5\text{ of}
5 != 5\text{ of the}
5 != 5 mod 7
5 != 5 \pmod 7
5 != 5\text{ if } x > 0
5 != 5\text{ cm or } 6\text{ cm}
5 != 5x\text{ cm}
# the same unit in other words
5\text{ cm} == 5\text{ centimeters}
5\text{ cm} == 5 centimetres
5\text{ cm} == 5cm
5\text{ in} == 5\text{ inches}
1\text{ in.} == 1\text{ inch}
5\text{ ft} == 5 feet
5\text{ ft} == 5\text{ foot}
5\text{ kg} == 5 kilograms
5\text{ kg} == 5\;\text{Kg}
5\text{ lb} == 5 pounds
5\text{ lbs} == 5\text{ lb}
5\text{ m} == 5 m
5\text{ m} == 5m
5\text{ m} == 5\text{ meters}
5\text{ s} == 5\text{ sec}
5\text{ s} == 5 seconds
5\text{ h} == 5 hrs
5\text{ min} == 5 minutes
5\text{ L} == 5\text{ liters}
5\text{ mL} == 5\text{ ml}
5\text{ inches}^2 == 5\text{ square inches}
5\text{ inches}^2 == 5\text{ sq in}
5\text{ inches}^2 == 5\mbox{ in}^2
5\text{ inches}^2 == 5\text{ inches squared}
5\text{ inches}^2 == 5\text{ in²}
5\text{ inches}^2 == 5 in^2
5\text{ cm}^3 == 5\text{ cubic centimeters}
5\text{ cm}^3 == 5\mathrm{cm^{3}}
5\text{ cm}^3 == 5 cm³
5\text{ cm}^3 == 5\text{ cc}
5\text{ units}^2 == 5\text{ square units}
5\text{ km/h} == 5\text{ kilometers per hour}
5\text{ km/h} == 5 kph
5\text{ mph} == 5\text{ miles per hour}
5\text{ mph} == 5\text{ mi}/\text{h}
5\text{ m/s} == 5\,\mathrm{m}\,\mathrm{s}^{-1}
5\text{ m/s} == 5\frac{\text{m}}{\text{s}}
5\text{ m/s} == 5 m/s
5\text{ m/s}^2 == 5\text{ meters per second squared}
5\text{ m/s}^2 == 5 \mathrm{m/s^2}
\$5 == 5\text{ dollars}
\$5 == 5 dollars
\$5 == \$5.00
\$5 == \text{\$5}
\$5 == $5
\$5 == 5\$
\$5 == \$5\text{ dollars}
\$1{,}500 == 1500\text{ dollars}
\$32,\!348 == 32348 dollars
€5 == 5\text{ euros}
£5 == 5\text{ pounds}
5.4\text{ cents} == 5.4¢
50\% == 50\text{ percent}
50\% == 50%
90^\circ == 90\text{ degrees}
90^\circ == 90°
90^\circ == 90\degree
90^\circ == 90^{\circ}
90^\circ == {90^\circ}
90^\circ == 90º
90^\circ == 90{}^{\circ}
90^\circ == 90\textdegree
20\,{}^\circ\text{C} == 20°C
5\text{ cm} == 5\unit{cm}
5\text{ cm} == \SI{5}{cm}
5\text{ ft }3\text{ in} == 5 feet 3 inches
5\text{ ft }3\text{ in} != 8
5\text{ ft }3\text{ in} != 63\text{ in}
90^\circ == \mathbf{90^\circ}
90^\circ == 90\text{ deg}
90^\circ - x == 90-x
20^\circ\text{C} == 20\text{ degrees Celsius}
20^\circ C == 20°C
20^\circ\text{C} == 20^\circ
11:30\text{ a.m.} == 11:30 a.m.
11:30\text{ a.m.} == 11:30\text{ AM}
11:30\text{ a.m.} == \text{11:30 am}
11:30\text{ a.m.} == 11:30
5\text{ feet} == 5\text{ ft.}
0\text{ cm} == 0
0\text{ cm} == 0.0\text{ centimeters}
3\text{ children} == 3\text{ child}
3\text{ people} == 3\text{ persons}
21\text{st} == 21^{\text{st}}
\frac{270}{7}\text{ degrees} == \frac{270}7^\circ
(1\text{ cm}, 2\text{ cm}) == (1,2)
1\text{ cm}, 2\text{ cm} == 2 cm, 1 cm
x = 5\text{ cm} == 5\text{ cm}
\text{Area} = 5\text{ cm}^2 == 5 cm^2
\text{Area: } 5\text{ cm}^2 == 5
\text{The answer is } 5\text{ cm} == 5cm
\text{The answer is 5 cm} == 5\text{ cm}
2k\text{ miles per hour} == 2k miles per hour
\$5 == US\$5
\$5 == 5\text{ US dollars}
50\% == 50\text{ per cent}
\frac{3}{4}\text{ of a mile} == \frac{3}{4}\text{ miles}
m\angle A = 90^\circ == 90
3:00\text{ p.m.} == 3\text{ p.m.}
12\text{ noon} == 12:00\text{ p.m.}
(1,2)\text{ cm} == (1\text{ cm}, 2\text{ cm})
(1,2)\text{ cm} == (1,2)
[0,1]\text{ m} == [0,1]
\begin{pmatrix}1\\2\end{pmatrix}\text{ cm} == \begin{pmatrix}1\\2\end{pmatrix}
3 hours 20 minutes == 3\text{ h }20\text{ min}
# another unit
(1,2)\text{ cm} != (1,2)\text{ m}
(1,2) != (1,2)\text{ is wrong}
[0,1] != [0,1]\text{ or so}
3:00\text{ p.m.} != 3\text{ a.m.}
3:30\text{ p.m.} != 3\text{ p.m.}
11:30\text{ a.m.} != \frac{11}{30}
3 hours 20 minutes != 3 hours 30 minutes
3 hours 20 minutes != 23
\frac{dy}{dx} != \frac{y}{x}
5\text{ m} != 5\text{ cm}
5\text{ m} != 500\text{ cm}
30\text{ g} != 30\text{ kg}
30 g != 30\text{ kg}
5\text{ cm}^2 != 5\text{ cm}^3
5\text{ cm}^2 != 5\text{ cm}
5\text{ square inches} != 5\text{ cubic inches}
5\text{ square inches} != 5\text{ inches}
864 \mbox{ inches}^2 != 864\text{ m}
864 \mbox{ inches}^2 != 864 cm^2
864 \mbox{ inches}^2 != 864 \mbox{ inches}
15\mbox{ cm}^2 != 15\mbox{ mm}^2
5\text{ ft} != 5\text{ in}
5\text{ hours} != 5\text{ minutes}
5\text{ hours} != 300\text{ minutes}
5\text{ miles per hour} != 5\text{ kilometers per hour}
5\text{ miles per hour} != 5\text{ miles}
5\text{ m/s} != 5\text{ m}/\text{s}^2
5\text{ mg} != 5\text{ Mg}
\$5 != 5\text{ cents}
\$5 != 5\text{ euros}
\$5 != £5
\$5 != 500\text{ cents}
\$5 != 5\%
5.4\text{ cents} != \$5.4
50\% != 0.5
50\% != \frac{1}{2}
50\% != 50^\circ
90^\circ != \frac{\pi}{2}
90^\circ != 90\text{ radians}
20^\circ\text{C} != 20^\circ\text{F}
11:30\text{ a.m.} != 11:30\text{ p.m.}
11:30 am != 11:30 pm
1:15\text{ p.m.} != 2:30\text{ p.m.}
1:15\text{ p.m.} != 2:30
0\text{ cm} != 0\text{ kg}
3\text{ apples} != 3\text{ oranges}
3\text{ boys} != 3\text{ girls}
(1\text{ cm}, 2\text{ cm}) != (1\text{ m}, 2\text{ m})
3\text{ dozen} != 3\text{ gross}
x = 5\text{ cm} != 5\text{ m}
# other text
5\text{ dozen} == 5 \text{ dozen}
5\text{ dozen} == 5 dozen
5\text{ dozen} != 60
12 marigolds == 12\text{ marigolds}
12 marigolds != 12
12 marigolds != 12 tulips
\text{Evelyn} == Evelyn
\text{Evelyn} == \textbf{evelyn}
\text{Evelyn} != \text{Navin}
\text{even} == even
\text{even} != \text{odd}
\text{even} != \text{not even}
\text{(B)} == B
\text{(B)} == (B)
\text{(B)} == \textbf{(B)}
\text{(B)} == \mathrm{B}
\text{(B)} != \text{(D)}
\text{(B)} != \text{B, D}
\text{(B)} != 5\text{ (B)}
\text{square} == square
\text{square} != \text{cube}
\text{cube, square} != \text{cube}
\text{no solution} != \text{solution}
0 != 0\text{ is wrong}
0 != 0 dozen
0\text{ dozen} == 0 dozen
0\text{ dozen} != 1\text{ dozen}
x + y = 0 != x + y = 0\text{ is wrong}
x + y = 5 != x + y = 5\text{ is wrong}
# upright letters
3+4\mathrm{i} == 3+4i
3+4\text{i} == 3+4i
3+4\mathrm{i} == 4\mathrm{ i }+3
3+4\mathrm{i} != 3+4
3+4\mathrm{i} != 3-4\mathrm{i}
\mathrm{i} == i
2\mathrm{e}-1 == 2e - 1
2\mathrm{e}-1 != 1
2\mathrm{e}-1 != 0.2
2\mathrm{e}^2 == 2e^2
2\mathrm{e}^2 != 2
\mathrm{e}^{\mathrm{i}\pi} == -1
2\mathrm{\pi} == 2\pi
2π == 2\pi
2\text{pi} == 2\pi
2\text{π} != 2
(1,2\mathrm{i}) == (1,2i)
(1,2\mathrm{i}) != (1,2)
5\text{b} == 5b
5\text{b} != 5
\int_0^1 x\,\mathrm{d}x == \int_0^1 x dx
\int_0^1 2x\,\mathrm{d}x == 1
\sin 30^\circ == \frac{1}{2}
\sin(30\text{ degrees}) == 0.5
\cos(90^\circ - 60^\circ) == \frac{\sqrt{3}}{2}
3+4\operatorname{i} == 3+4i
3+4{\rm i} == 3+4i
3+4\mathrm{j} != 3+4
\mathrm{d} != 1
# brackets
(1,2,3) != [1,2,3]
[1,2] != (1,2)
[1,2] == \left[1,2\right]
[1,2) != [1,2]
(1,2) != \{1,2\}
\{1,2\} == \{2,1\}
(a,b,c) != [a,b,c]
\begin{pmatrix}1\\2\end{pmatrix} == \begin{bmatrix}1\\2\end{bmatrix}
\begin{pmatrix}1\\2\end{pmatrix} != \begin{pmatrix}1&2\end{pmatrix}
\begin{pmatrix}1\text{ cm}\\2\text{ cm}\end{pmatrix} == \begin{pmatrix}1\\2\end{pmatrix}
[0^\circ, 90^\circ) == [0,90)
[0^\circ, 90^\circ) != [0^\circ, 90^\circ]
# number systems
52_8 == 52_{8}
52_8 == 52_{(8)}
52_8 == 52_{\text{eight}}
52_8 == 52\text{ base eight}
52_8 == 52\text{ (base 8)}
52_8 == 52 \text{ in base } 8
52_8 == 52 base 8
52_8 == (52)_8
52_8 == 52_{\text{base 8}}
52_8 == 52
52_8 != 52\text{ base nine}
52_8 != 52_9
52_8 != 42
52_8 != 52_8!
52_8 != 52_8^2
1101_{(2)} == 1101_2
1101_{(2)} == 1101_{\text{two}}
1101_{(2)} != 1101_{(3)}
1101_{(2)} != 13
A3_{16} == A3_{\text{sixteen}}
x=52_8 == 52_8
# numbers and names
\frac{9}{5} == 1\frac{4}{5}
\frac{9}{5}\text{ cups} == 1\frac{4}{5}\text{ cups}
137 \frac{1}{2} == 137.5
1{,}234 == 1,234
1{,}234\text{ m} == 1234
1,\!234 == 1234\text{ feet}
x=5 == 5
x=5 != y=5
\text{Total} = 7 == n = 7
\text{Total} = 7 != n = 8
x=5\text{ m} != y=5\text{ m}
5^2 == 5²
5x^2 == 5x²
5 or 6 == 6\text{ or }5
5 and 6 == 5, 6
x<2\text{, or }x>3 == (-\infty,2)\cup(3,\infty)
1, 2, \text{ and } 3 == 1,2,3
"""

LINES = [line for line in PAIRS.splitlines() if line and not line.startswith("# ")]
CASES = [(*line.split(sign), sign.strip()) for line in LINES for sign in (" == ", " != ") if sign in line]


def score(answer: str, gold: str) -> float | None:
    return grade("math", f"so $\\boxed{{{answer}}}$.", gold).score


@pytest.mark.parametrize(("left", "right", "sign"), CASES, ids=LINES)
def test_pair(left: str, right: str, sign: str) -> None:
    expected = 1.0 if sign == "==" else 0.0
    for answer, gold in ((left, right), (right, left)):
        if kinds.gold_problem("math", {"answer": gold}, {}) == "":
            assert score(gold, gold) == 1.0
            assert score(answer, gold) == expected, (answer, gold)


def test_the_table_is_large_and_most_of_it_is_graded_in_both_directions() -> None:
    assert len(CASES) == len(LINES) >= 250
    assert len(set(LINES)) == len(LINES)
    unreadable = [case for case in CASES if any(kinds.gold_problem("math", {"answer": side}, {}) for side in case[:2])]
    assert len(unreadable) < 15
    assert min(sum(sign == other for *_, other in CASES) for sign in ("==", "!=")) >= 100


@pytest.mark.skipif(not DATA.exists(), reason="the data are not there")
def test_golds_with_a_unit_refuse_another_and_golds_without_one_take_any() -> None:
    golds = [json.loads(line)["answer"] for line in DATA.read_text("utf-8").splitlines()]
    numbers = [gold for gold in golds if gold.lstrip("-").isdigit()]
    assert len(numbers) > 200
    for gold in numbers:
        assert score(f"{gold}\\text{{ cm}}", gold) == score(gold, f"{gold} \\mbox{{ inches}}^2") == 1
        assert (
            score(f"{gold}\\text{{ cm}}", f"{gold}\\text{{ m}}") == score(f"{gold}\\mathrm{{i}}", f"{gold}+0i") == 0
            or gold == "0"
        )
    for gold in dict.fromkeys(golds):
        for words in (
            r"\text{ is wrong}",
            r"\text{ dozen}",
            r"\text{ over two}",
            " dozen",
            r"\text{ or more}",
            r"\text{ cm} + 3\text{ m}",
            r"\text{ hours }5\text{ minutes}",
        ):
            assert score(gold + words, gold) == 0, gold + words
    assert score("864 m", r"864 \mbox{ inches}^2") == score(r"15\text{ cm}^3", r"15\mbox{ cm}^2") == 0


# ---------------------------------------------------------------------------------------------------- for all units

FORMS = {
    "cm": [r"\text{ cm}", " cm", r"\text{ centimeters}"],
    "cm2": [r"\text{ cm}^2", r"\text{ square centimeters}", " cm^2", " cm²"],
    "cm3": [r"\text{ cm}^3", r"\,\mathrm{cm^3}", r"\text{ cubic cm}"],
    "inch": [r"\text{ inches}", r"\mbox{ in.}", " in"],
    "kg": [r"\text{ kg}", " kilograms"],
    "gram": [r"\text{ g}", r"\text{ grams}"],
    "speed": [r"\text{ km/h}", r"\text{ kilometers per hour}", r"\,\mathrm{km}\,\mathrm{h}^{-1}"],
    "degree": [r"^\circ", "°", r"\text{ degrees}"],
    "percent": [r"\%", r"\text{ percent}"],
    "dollar": [r"\text{ dollars}", " dollars"],
    "cent": [r"\text{ cents}", "¢"],
    "pm": [r"\text{ p.m.}", " pm"],
    "am": [r"\text{ a.m.}", " am"],
    "hour": [r"\text{ hours}", r"\text{ hr}"],
    "student": [r"\text{ students}", r"\text{ student}"],
}  # fmt: skip
forms = st.sampled_from(sorted(FORMS))
values = st.one_of(
    st.integers(-9999, 9999).map(str),
    st.fractions(-50, 50, max_denominator=40).map(lambda f: rf"\frac{{{f.numerator}}}{{{f.denominator}}}"),
    st.sampled_from([r"2\sqrt{3}", r"\frac{\pi}{2}", "0.25", r"3\pi", "0"]),
)


@given(values, forms, forms, st.data())
def test_a_unit_may_be_left_out_and_not_be_another(value: str, unit: str, other: str, data: st.DataObject) -> None:
    assume(unit != other)
    u, v, w = (value + data.draw(st.sampled_from(FORMS[name])) for name in (unit, unit, other))
    assert score(u, v) == score(value, u) == score(u, value) == 1
    assert score(w, u) == 0


@given(st.integers(1, 999), st.text("abcdefghijklmnopqrstuvwxyz ", min_size=3, max_size=20))
def test_text_that_is_no_unit_makes_another_answer(value: int, text: str) -> None:
    words = text.split()
    known = {
        "per",
        "a",
        "an",
        "or",
        "and",
        "hundred",
        "thousand",
        "million",
        "squared",
        "cubed",
        "i",
        "e",
        "d",
        *units.PHRASES,
        *tokens.FUNCTIONS,  # 5 sin is no formula, and no gold
    }
    assume(words and not any(units.is_part(word) or word in known for word in words))
    assert score(f"{value}\\text{{ {text}}}", str(value)) == 0
    assert score(str(value), f"{value}\\text{{ {text}}}") == 0
    assert score(f"{value}\\text{{ {text}}}", f"{value}\\text{{{text} }}") == 1


@given(st.integers(1, 99), forms, forms)
def test_units_hold_in_lists_and_brackets(value: int, unit: str, other: str) -> None:
    assume(unit != other)
    u, w = FORMS[unit][0], FORMS[other][0]
    assert score(f"({value}{u}, 2{u})", f"({value}, 2)") == 1
    assert score(f"({value}{u}, 2{u})", f"({value}{w}, 2{w})") == 0
    assert score(f"x = {value}{u}", f"{value}{u}") == 1
