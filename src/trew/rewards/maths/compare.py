"""Step three: whether two answers are the same; True, False, or None if exact algebra cannot tell."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence

from . import algebra, intervals, units
from .algebra import Value
from .answers import NOTHING, read
from .coordinates import in_usual_order, named_values
from .not_exact import NotExact
from .shapes import Answer, AnswerList, Based, Choice, Equation, Matrix, Named, Scalar, Shape, Union, Unknown, Words
from .tokens import NO_WORDS, tokenize
from .units import Unit

_RELATION = re.compile(r"\\(?:ne|le|ge)(?![A-Za-z])|[<>]")
_APPLIED = re.compile(r"([A-Za-z]'?)\(([a-df-hj-z])\)")  # not P(A) and E(X), which are of this event or variable
_EVENT = re.compile(r"P\s*\([^()]*\)(?=\s*=)")
_PRIMES = re.compile(r"(?:\s*')+|\\prime(?![A-Za-z])")
_POWER_OF_TEN = re.compile(r"(\d)e(?=[+-]?\d)")
_LETTERS = re.compile(r"[A-Z]{2,3}")
_DOMAIN = re.compile(r"\\\{\s*[A-Za-z]\s*\\in\s*(\\[NZQC](?![A-Za-z])[^|:]{0,9}?)\s*[|:]")  # {x in Z | x > 1}
_OF_SOMETHING = re.compile(r"[(|\[]|^\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DESCRIBED = re.compile(r"\\text(?!\{[A-Za-z]{2,4}\}\()")  # in other words than \text{Var}(X)
_SYMBOL = re.compile(r"(?:[A-Za-z]|\\(?!angle|triangle|text)[A-Za-z]+)(?:_[A-Za-z0-9]+)?")
_ANGLE = re.compile(r"m?\\angle(?:([A-Z0-9])|[A-Z]([A-Z])[A-Z])")  # with the letter of its vertex
_OPERATOR = re.compile(r"[-+*/^=<>|_]")
_ANY_ORDER = frozenset({"{}", ",", "∨", "±"})


def same(answer: Answer, gold: Answer) -> bool | None:
    """Whether ``answer`` says what ``gold`` says.

    >>> same(read("2, 1"), read("1, 2")), same(read("(2, 1)"), read("(1, 2)")), same(read("0.33"), read("1/3"))
    (True, False, False)
    """
    # Equal texts are equal, also if neither can be read.
    if answer.text and answer.text == gold.text:
        return True
    # Of {x in Z | x > 1} the condition alone is read, which is an interval.
    domains = [_DOMAIN.findall(side.text) for side in (answer, gold)]
    if domains[0] != domains[1]:
        return False
    algebra.allowance()
    try:
        verdict = _same(answer, gold)
        for reading in _otherwise(answer, gold) if verdict is False else ():
            if verdict is False:
                verdict = _same(*reading)
    except NotExact:
        return None
    return verdict


def _otherwise(a: Answer, g: Answer) -> Iterator[tuple[Answer, Answer]]:
    """Both sides with one of them read differently, as the other suggests; nothing if nothing suggests it."""
    match a.shape, g.shape:
        # 100,200 is a number, unless the other side is a list. In brackets, which it has not, it is a point or a set.
        case AnswerList(",") | AnswerList("∨"), Scalar() if "," in g.text:
            yield a, read(g.text, groups=False)
        case Scalar(), AnswerList(",") | AnswerList("∨") if "," in a.text:
            yield read(a.text, groups=False), g
        case Scalar() as left, Scalar() as right if _has_e(left) != _has_e(right):  # 2e-1 is a power of ten, or 2e - 1
            yield (Answer(left, a.text), _with_e(g)) if _has_e(left) else (_with_e(a), Answer(right, g.text))
        case Scalar() as left, Scalar() as right if _has_unit(left) != _has_unit(right):
            yield (a, read(g.text, letters=True)) if _has_unit(left) else (read(a.text, letters=True), g)  # 5 m
            # 2mg is a weight beside 2 m g, and no milligrams; beside 2gm, which may be grams, it stays as it is.
            other, free = (right, g.text) if _has_unit(left) else (left, a.text)
            if other.value.variables and not any(map(units.name, re.findall("[A-Za-z]{2,}", free))):
                yield (read(a.text, letters=None), g) if _has_unit(left) else (a, read(g.text, letters=None))


def _has_unit(one: Scalar) -> bool:
    return bool(one.unit or one.value.named("unit"))


def _has_e(one: Scalar) -> bool:
    return any(g == algebra.E for terms in (one.value.above, one.value.below) for mono in terms for g, _ in mono)


def _with_e(one: Answer) -> Answer:
    """The answer with the base of the logarithm for every e."""
    return read(_POWER_OF_TEN.sub(r"\1 e ", one.text))


def _same(a: Answer, g: Answer) -> bool | None:
    left, right = a.shape, g.shape
    if isinstance(left, Scalar) and isinstance(right, Scalar):
        # ABC and CBA may be orders, options or figures; only with something beside them such letters are a product.
        if a.text != g.text and _LETTERS.fullmatch(a.text) and _LETTERS.fullmatch(g.text):
            return False
        return _scalars(left, right)
    # Values that both sides name are compared by name. A point without names has x before y.
    if (values := named_values(left)) and (others := named_values(right)):
        return _in_order([values[n] for n in others], [*others.values()]) if values.keys() == others.keys() else False
    a = in_usual_order(a)
    if not isinstance(right, Named):  # a gold of (y, x) = (5, 6) says itself which of them is asked for first
        g = in_usual_order(g)
    left, right = a.shape, g.shape
    # math-verify may take the bound of x < 5 for the value 5: an inequality never equals a number.
    if _RELATION.search(_EVENT.sub("", a.text)) and _is_no_relation(left, right):
        return False
    # The order of the table decides which judge two answers of different kinds get.
    for kind, judge in _JUDGES:
        if isinstance(left, kind) or isinstance(right, kind):
            return judge(a, g)
    return False


def _scalars(left: Scalar, right: Scalar) -> bool | None:
    """Whether two formulas are equal and their units agree; other words next to them must be the same."""
    if not units.agree(left.unit, right.unit):
        return False
    verdict = algebra.same(left.value, right.value)
    # Values of different things differ, whatever their numbers are: sin(1) apples are no pears.
    if verdict is None and left.value.named("words", "unit") != right.value.named("words", "unit"):
        return False
    return verdict


def _is_no_relation(left: Shape, right: Shape) -> bool:
    """Whether ``right`` is a single thing, while ``left``, an answer with a relation in it, is none."""
    if isinstance(left, Unknown):
        return isinstance(right, (Scalar, Words, Based, Matrix))
    return isinstance(left, (Union, Named)) and isinstance(right, (Scalar, Words))


def _unknown(a: Answer, g: Answer) -> bool | None:
    """Compares answers of which one cannot be computed; None leaves the two to math-verify."""
    left, right = a.shape, g.shape
    # math-verify does not see primes, but f' is not f, and 6'2 not 62.
    if _primes(a) != _primes(g):
        return False
    # An answer that is no mathematics is wrong, and nothing equals such a gold; math-verify decides the rest.
    if isinstance(left, Unknown) and (not left.readable or (left.too_large and not isinstance(right, Unknown))):
        return False
    # None only where math-verify may be able to read the gold.
    return None if not isinstance(right, Unknown) or right.readable else False


def _named(a: Answer, g: Answer) -> bool | None:
    """x = 5 is 5; but x = 5 is not y = 5, and 2x + 3 = y is y = 2x + 3."""
    left, right = a.shape, g.shape
    if isinstance(left, Named) and isinstance(right, Named):
        return _both_named(left, right)
    named, other, swapped = (left, g, False) if isinstance(left, Named) else (right, a, True)
    assert isinstance(named, Named)
    if isinstance(other.shape, Equation):
        return False if named.equation is None else _proportional(named.equation, other.shape.difference)
    # In the order (answer, gold), which judges do not treat alike.
    return _same(other, named.item) if swapped else _same(named.item, other)


def _both_named(left: Named, right: Named) -> bool | None:
    """x_1 = 5 is x_{1} = 5 and f(n) = n + 1 is f(x) = x + 1; but f(1) = 3 is not f(2) = 6."""
    if _bare(left.name) == _bare(right.name):
        return _same(left.item, right.item)
    one, other = map(_APPLIED.fullmatch, (left.name, right.name))
    if one and other and one[1] == other[1]:
        item = _renamed(left.item, one[2], other[2])
        return _same(item, right.item) if item is not None else False
    # Before the equations: of f(1) = 3 and f(2) = 6 the letters and numbers alone are one equation.
    if all(_OF_SOMETHING.search(name) and not _DESCRIBED.search(name) for name in (left.name, right.name)):
        return False
    if left.equation is not None and right.equation is not None:
        return _proportional(left.equation, right.equation)
    if _differ(left.name, right.name):
        return False
    # A description (area = 5) may be worded in many ways; x and y are different things.
    described = left.name.strip("{}").startswith("\\text") or right.name.startswith("\\text") or len(left.name) > 3
    return _same(left.item, right.item) if described else False


def _bare(name: str) -> str:
    return re.sub("[{}]", "", name)


def _differ(one: str, other: str) -> bool:
    r"""Whether two names are of different things: f' and f, \alpha and \beta, angles with vertices of their own."""
    if one.count("'") != other.count("'") and "\\text" not in one + other:
        return True
    one, other = _bare(one), _bare(other)
    left, right = _ANGLE.fullmatch(one), _ANGLE.fullmatch(other)
    if left and right:
        return (left[1] or left[2]) != (right[1] or right[2])
    return bool(_SYMBOL.fullmatch(one) and _SYMBOL.fullmatch(other))


def _renamed(item: Answer, old: str, new: str) -> Answer | None:
    """A formula with another letter for one of its variables; None if it is no formula, or has that letter already."""
    if not isinstance(item.shape, Scalar) or new in item.shape.value.variables:
        return None
    texts = [
        t.text.replace(old, new) if t.kind == "word" and t.text not in NO_WORDS else t.text for t in tokenize(item.text)
    ]
    return read(" ".join(texts))


def _choices(a: Answer, g: Answer) -> bool | None:
    """(A) 5 is the option (A), and it is 5; of two such answers both must be the same."""
    left, right = a.shape, g.shape
    if isinstance(left, Choice) and isinstance(right, Choice):
        return left.letter == right.letter and _same(left.item, right.item)
    chosen, other = (left, g) if isinstance(left, Choice) else (right, a)
    assert isinstance(chosen, Choice)
    letters = _in_words(other)
    if len(letters) == 1 and letters.isalpha():
        return chosen.letter == letters
    return _same(chosen.item, other) if chosen is left else _same(other, chosen.item)


def _words(a: Answer, g: Answer) -> bool:
    left, right = _in_words(a), _in_words(g)
    if len(left) == 1 and _primes(a) != _primes(g):  # x' is a variable, and another than x
        return False
    return (bool(left) and left == right) or _squeezed(a) == _squeezed(g)


def _in_words(one: Answer) -> str:
    """Its letters and digits; an empty set is no solution, and x + y no word x.y."""
    if isinstance(one.shape, AnswerList) and not one.shape.items:
        return NOTHING
    if isinstance(one.shape, Words):
        return one.shape.text
    return "" if _OPERATOR.search(one.text) else one.plain


def _squeezed(one: Answer) -> str:
    r"""The text without type and spaces: A-B and \text{A-B} are one, although A - B alone is a formula."""
    return re.sub(r"\\text|[\s{}]", "", one.text.casefold())


def _primes(answer: Answer) -> int:
    return sum(max(1, found.count("'")) for found in _PRIMES.findall(answer.text))


def _based(a: Answer, g: Answer) -> bool:
    """52_8 is 52_8; written without the base it is taken as meant in the base that was asked for."""
    left, right = a.shape, g.shape
    if isinstance(left, Based) and isinstance(right, Based):
        return (left.digits, left.base) == (right.digits, right.base)
    based, other = (left, g) if isinstance(left, Based) else (right, a)
    assert isinstance(based, Based)
    # A gold of 52_8 is often answered 52: the problem has named the base. 42, its value, would be another answer.
    return other.text.replace(" ", "").lstrip("0") == based.digits


def _equations(a: Answer, g: Answer) -> bool | None:
    left, right = a.shape, g.shape
    if isinstance(left, Equation) and isinstance(right, Equation):
        return _proportional(left.difference, right.difference)
    # A gold of x + y = 5 may be a line, which 5 does not answer; an answer of m + n = 5 tells the 5 that was asked for.
    if isinstance(left, Equation) and left.total is not None and isinstance(right, Scalar):
        return _same(left.total, g)
    return False


def _proportional(a: Value, b: Value) -> bool | None:
    """Whether a = 0 and b = 0 say the same, because one is the other times a number."""
    if a.opaque or b.opaque:
        return None
    # 2x + 4y = 6 and x + 2y = 3 are one equation: each coefficient is the same multiple of the other's.
    if a.above.keys() != b.above.keys():
        return False
    ratios = {a.above[mono] / b.above[mono] for mono in a.above}
    return len(ratios) == 1


def _all(verdicts: Sequence[bool | None]) -> bool | None:
    if False in verdicts:
        return False
    return None if None in verdicts else True


def _in_order(left: Sequence[Answer], right: Sequence[Answer]) -> bool | None:
    if len(left) != len(right):
        return False
    verdicts: list[bool | None] = []
    for a, g in zip(left, right, strict=True):
        verdicts.append(_same(a, g))
        if verdicts[-1] is False:  # one difference decides; an undecided pair before it does not matter
            return False
    return _all(verdicts)


def _any_order(left: Sequence[Answer], right: Sequence[Answer]) -> bool | None:
    """Whether the same answers occur equally often, in any order. Equality is transitive: the first match will do."""
    if len(left) != len(right):
        return False
    rest = list(right)
    undecided: list[Answer] = []
    for a in left:
        verdicts = [_same(a, g) for g in rest]
        if True in verdicts:
            rest.pop(verdicts.index(True))
        elif None in verdicts:
            undecided.append(a)
        else:
            return False
    if not undecided:
        return True
    # Undecided items can only match golds that are left over. A gold that none of them may equal decides.
    return None if all(any(_same(a, g) is None for a in undecided) for g in rest) else False


def _unlike(items: Sequence[Answer]) -> list[Answer]:
    """The items of a set, each once."""
    found: list[Answer] = []
    for item in items:
        if not any(_same(item, other) for other in found):
            found.append(item)
    return found


def _groups(a: Answer, g: Answer) -> bool | None:
    left, right = a.shape, g.shape
    if isinstance(left, AnswerList) and isinstance(right, AnswerList):
        return _two_groups(left, right)
    if isinstance(left, Scalar) and isinstance(right, AnswerList):
        return _alone(a, left, right)
    if isinstance(right, Scalar) and isinstance(left, AnswerList):
        return _alone(g, right, left)
    return False


def _two_groups(left: AnswerList, right: AnswerList) -> bool | None:
    """Compares in any order if neither has brackets; otherwise item by item, if the brackets are the same."""
    ends = {left.ends, right.ends}
    if ends == {":"}:
        return _ratios(left, right)
    if ends <= _ANY_ORDER:
        # x = 1 or y = 2 is either, x = 1 and y = 2 both; so are the options A or B, and A and B.
        if (left.ends == "∨") != (right.ends == "∨") and any(map(_is_exact_choice, (left, right))):
            return False
        described = [_described(group) for group in (left, right)]
        if described[0] and described[0].keys() == described[1].keys():
            return _in_order([described[0][name] for name in described[1]], [*described[1].values()])
        # Of names that are worded in two ways on one side, those that both have still say whose value is whose.
        if any(_same(described[0][name], described[1][name]) is False for name in described[0].keys() & described[1]):
            return False
        if "{}" in ends:  # a set has its elements once, however often they are written
            return _any_order(_unlike(left.items), _unlike(right.items))
        return _any_order(left.items, right.items)
    if left.ends == right.ends or _is_bare_point(left, right):
        return _in_order(left.items, right.items)
    return False


def _is_exact_choice(group: AnswerList) -> bool:
    """Whether "or" says of the items something else than "and": of values of several names, and of options A and B."""
    return len(_names(group)) > 1 or all(re.fullmatch("[A-Z]", item.text) for item in group.items)


def _names(group: AnswerList) -> set[str]:
    """The names that the items have."""
    return {item.shape.name for item in group.items if isinstance(item.shape, Named)}


def _described(group: AnswerList) -> dict[str, Answer]:
    r"""The values by their names, \text{boys} = 12 and \text{boys: } 12 alike; empty if not each has its own name."""
    named = [item.shape for item in group.items if isinstance(item.shape, Named)]
    found = {re.sub(r"\\text|[\s{}:]", "", one.name): one.item for one in named}
    return found if len(found) == len(group.items) else {}


def _is_bare_point(left: AnswerList, right: AnswerList) -> bool:
    """Whether one is a point, and the other a list that may be one written without its brackets.

    An interval needs them: [1, 2] is one, (1, 2) may be a point, three numbers in any brackets are none.
    """
    bare, bracketed = (left, right) if left.ends == "," else (right, left)
    if bare.ends != "," or bracketed.ends not in ("()", "[]"):
        return False
    infinite = any("∞" in i.shape.value.variables for i in bracketed.items if isinstance(i.shape, Scalar))
    # x = 1, x = 2 are two values of one thing, and no coordinates of a point.
    named = [item for item in bare.items if isinstance(item.shape, Named)]
    return len(_names(bare)) == len(named) and not infinite and (bracketed.ends == "()" or len(bracketed.items) > 2)


def _ratios(left: AnswerList, right: AnswerList) -> bool | None:
    """3:4 is 6:8; but what looks like a time, 12:05 or 3:30 p.m., is compared as written."""
    if len(left.items) != len(right.items):
        return False
    # 4:30 pm and 4:05 are times, in which no factor can be cancelled.
    if any(map(_is_of_a_time, (*left.items, *right.items))):
        return _in_order(left.items, right.items)
    values = [[i.shape.value for i in group.items if isinstance(i.shape, Scalar)] for group in (left, right)]
    if len(values[0]) != len(left.items) or len(values[1]) != len(right.items):
        return _in_order(left.items, right.items)
    first, second = values
    if not units.agree(_unit(left), _unit(right)):
        return False
    # Zeros alone are no ratio, and multiplied out they would equal every one.
    if any(all(map(algebra.is_zero, values)) for values in (first, second)):
        return _in_order(left.items, right.items)
    # a : b : c = d : e : f if a / d is the same everywhere, multiplied out, for all pairs: the first may be 0.
    pairs = itertools.combinations(zip(first, second, strict=True), 2)
    return _all([algebra.same(algebra.multiply(a, e), algebra.multiply(b, d)) for (a, d), (b, e) in pairs])


def _is_of_a_time(item: Answer) -> bool:
    clock = isinstance(item.shape, Scalar) and units.on_the_clock(item.shape.unit)
    return clock or (item.text.startswith("0") and len(item.text) > 1)


def _unit(group: AnswerList) -> Unit:
    """The unit of the last of its items that has one."""
    found = [item.shape.unit for item in group.items if isinstance(item.shape, Scalar) and item.shape.unit]
    return found[-1] if found else ()


def _alone(one: Answer, scalar: Scalar, group: AnswerList) -> bool | None:
    """A single value against a set of one, or a ratio of two."""
    if group.ends == ":":
        return _is_quotient(scalar, group)
    if group.ends == "{}" and len(group.items) == 1:
        return _same(one, group.items[0])
    if group.ends == "±" or (group.ends == "∨" and len({item.text for item in group.items}) == len(group.items) == 2):
        # 1 ± 0, or one value in two forms, 3/4 or 0.75; but 7 or 7 is a list
        items = _unlike(group.items)
        return _same(one, items[0]) if len(items) == 1 else False
    return False


def _is_quotient(one: Scalar, ratio: AnswerList) -> bool | None:
    """Whether 3 is 6:2; of a time whether it is the full hour, 3 p.m. and 3:00 p.m."""
    parts = [item.shape.value for item in ratio.items if isinstance(item.shape, Scalar)]
    if len(ratio.items) != 2 or len(parts) != 2:
        return False
    above, below = parts
    unit = _unit(ratio)
    # 5 pm is 5:00 pm, a time and no quotient.
    if units.on_the_clock(one.unit) or units.on_the_clock(unit):
        return units.agree(one.unit, unit) and algebra.is_zero(below) and algebra.same(one.value, above)
    return False if algebra.is_zero(below) else algebra.same(one.value, algebra.divide(above, below))


def _matrices(a: Answer, g: Answer) -> bool | None:
    left, right = a.shape, g.shape
    if not isinstance(left, Matrix):
        return _matrix_and_other(right, left)
    if not isinstance(right, Matrix):
        return _matrix_and_other(left, right)
    if [len(row) for row in left.rows] != [len(row) for row in right.rows]:
        return False
    return _all([_in_order(a, g) for a, g in zip(left.rows, right.rows, strict=True)])


def _matrix_and_other(matrix: Shape, other: Shape) -> bool | None:
    """A single row or column may be written as a tuple, a single entry as itself."""
    assert isinstance(matrix, Matrix)
    entries = [item for row in matrix.rows for item in row]
    # A vector may be written as a row, a column, or a point (1, 2, 3).
    is_vector = len(matrix.rows) == 1 or len(matrix.rows[0]) == 1
    # Also as x = 1, y = 2, which names its coordinates.
    if isinstance(other, AnswerList) and is_vector:
        named = other.ends == "," and len(_names(other)) == len(other.items)
        return _in_order(entries, other.items) if named or other.ends in ("()", "[]") else False
    if isinstance(other, Scalar) and len(entries) == 1:
        return _same(Answer(other), entries[0])
    return False


def _united(one: Answer) -> tuple[Answer, ...]:
    """The parts of a union; also of (1, 2) or (3, 4), which may be one."""
    shape = one.shape
    if isinstance(shape, Union):
        return shape.parts
    if isinstance(shape, AnswerList) and shape.ends == "∨" and len(_names(shape)) < 2:
        return shape.items
    return (one,)


def _unions(a: Answer, g: Answer) -> bool | None:
    if not all(isinstance(x.shape, (AnswerList, Union)) for x in (a, g)):
        return False
    parts = [_united(a), _united(g)]
    left, right = map(intervals.merged, parts)
    if left is None or right is None:
        # Ends with variables cannot be ordered, so that equal parts prove equality, and different ones nothing.
        return _any_order(*parts) or None
    return _any_order(left, right)


_JUDGES: tuple[tuple[type, Callable[[Answer, Answer], bool | None]], ...] = (
    (Unknown, _unknown), (Choice, _choices), (Named, _named), (Words, _words), (Based, _based), (Equation, _equations),
    (Matrix, _matrices), (Union, _unions), (AnswerList, _groups),
)  # fmt: skip
"""Who compares two answers of which one is of a kind; the first that fits."""
