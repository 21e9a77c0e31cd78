r"""Normalised text read as an answer (``shapes``).

``read`` takes normalised text and never raises. What it cannot make sense of is ``Unknown``: either no mathematics at
all (``readable`` False), which equals only its own text, or something that exact algebra does not cover.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from . import algebra, chains, formula, intervals, matrices, units
from .algebra import Value
from .bases import based
from .brackets import encloses, split
from .names import name_of
from .not_exact import Malformed, NotExact, TooLarge, Undefined
from .shapes import Answer, AnswerList, Choice, Equation, Matrix, Named, Scalar, Shape, Union, Unknown, Words
from .tokens import SHORT_WORDS, SPELLED, Token, tokenize
from .units import Unit

MAX_NESTING = 20


def read(text: str, *, groups: bool = True, letters: bool | None = False) -> Answer:
    r"""Reads normalised text; ``groups`` and ``letters`` as in ``tokenize``.

    >>> read("1/2").shape == read("0.5").shape, read("(1, 2]").shape.ends, read("\\text{East}").shape
    (True, '(]', Words(text='east'))
    >>> read("f(x) dx 7 8").shape
    Unknown(why='two numbers side by side', readable=False, too_large=False)
    """
    algebra.allowance()
    try:
        tokens = tokenize(text, groups=groups, letters=letters)
        shape = _shape(tokens, 0)
    except NotExact as error:
        shape = _words(text) or _unknown(error, text)
    return Answer(shape, text)


def _unknown(error: NotExact, text: str) -> Unknown:
    # math-verify would read letters of prose as factors ("area" as a r e a), so prose is not worth asking it about.
    prose = "\\text" in text or bool(
        re.search(r"(?<![\\A-Za-z{])(?!sin|cos|tan|cot|sec|csc|arc|log|sqrt|matrix|begin|end)[A-Za-z]{4,}", text)
    )
    garbled = isinstance(error, (Malformed, Undefined))
    return Unknown(str(error), readable=not prose and not garbled, too_large=isinstance(error, TooLarge))


def _words(text: str) -> Words | None:
    """The text as words, where it is nothing else: letters, spaces, hyphens, apostrophes, one pair of brackets."""
    inner = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text).strip()
    # (B), B., option B and \text{B} choose an option; a bare B stays a variable.
    lone = re.fullmatch(r"((?:[Oo]ption|[Cc]hoice)\s+)?\(?\s*([A-Za-z])\s*[).]?", inner)
    if lone and (lone[1] or "\\text" in text or "(" in text or ")" in text):
        return Words(lone[2].casefold())
    if not re.fullmatch(r"[^\W\d_](?:[^\W\d_]|[\s'.!\"]|-(?=\s*[^\W\d_]))*", inner) or len(inner) > 200:
        return None
    letters = re.sub(r"[^\w]|_", "", inner.casefold())
    return Words(_SAME_WORDS.get(letters, letters))


NOTHING = "nosolution"
_SAME_WORDS = {"nosolutions": NOTHING, "emptyset": NOTHING, "theemptyset": NOTHING, "dne": "doesnotexist"}
_EVERYTHING = re.compile("(?:theset(?:of)?)?(?:all|any)real(?:numbers?|s)")


# ---------------------------------------------------------------------------------------------------------- inside


def _shape(tokens: list[Token], level: int) -> Shape:
    """Reads tokens as the first kind of answer that fits, as a word, or as a formula. Raises NotExact."""
    if not tokens:
        raise Malformed("empty")
    if level > MAX_NESTING:
        raise TooLarge("nested too deeply")
    if _opens_backwards(tokens):  # unbalanced to the readers below, which count brackets
        return _bracketed(tokens, level) or _formula(tokens)
    for reader in _READERS:
        if (found := reader(tokens, level)) is not None:
            return found
    return _spelled(tokens) or _formula(tokens)


def _opens_backwards(tokens: list[Token]) -> bool:
    """Whether it may be ]a, b[: the comma of such an interval would count as one outside of brackets."""
    first, last = tokens[0].text, tokens[-1].text
    return first == "]" or (last == "[" and first in ("[", "("))


def _listed(tokens: list[Token], level: int) -> Shape | None:
    parts, marks = split(tokens, (",", ";", "\\or", "\\and"))
    return _list(parts, marks, level) if len(parts) > 1 else None


def _united(tokens: list[Token], level: int) -> Shape | None:
    parts, _ = split(tokens, ("\\cup",))
    return Union(tuple(_item(part, level) for part in parts)) if len(parts) > 1 else None


def _spelled(tokens: list[Token]) -> Words | AnswerList | None:
    """The words that tokens spell: all in upright type, or bare letters that are no product of variables."""
    if not all(t.kind in ("text", "unit", "word") or t.text in ("(", ")") for t in tokens):
        return None
    if all(t.kind == "word" for t in tokens) and not _is_word(tokens):  # xy is a product of letters
        return None
    found = _words(" ".join(t.text for t in tokens))
    return intervals.everything() if found and _EVERYTHING.fullmatch(found.text) else found


def _labelled(tokens: list[Token], level: int) -> Shape | None:
    r"""\text{Area: } 5 is the area's value; \text{not: } 5 is none."""
    first = tokens[0]
    if first.kind != "text" or not first.text[:-1].rstrip().endswith(":") or len(tokens) == 1:
        return None
    if _DENIALS.intersection(re.findall("[a-z]+", first.text.lower())):
        raise Malformed("a denial is no value")
    return Named(first.text, _item(tokens[1:], level))


_OTHER = "not no never neither except least most more less than about wrong incorrect approximately"
_DENIALS = frozenset(_OTHER.split())


_OPTION = re.compile(r"\\text\s*\{\s*(?:\(\s*([A-Z])\s*\)|([A-Z])\s*[).:])\s*\}")


def _chosen(tokens: list[Token], level: int) -> Choice | None:
    r"""\text{(A)} 5, or (A) 5: an option with its value. Without \text only before a number, as (A) x is a product."""
    option, behind = _OPTION.fullmatch(tokens[0].text), tokens[1:]
    letter = (option[1] or option[2]) if option else ""
    if [t.text for t in tokens[:3:2]] == ["(", ")"] and [t.kind for t in tokens[3:4]] == ["number"]:
        letter, behind = (tokens[1].text, tokens[3:]) if re.fullmatch("[A-Z]", tokens[1].text) else ("", [])
    if not letter or not behind:
        return None
    item = _item(behind, level)
    triples = zip(behind, behind[1:], behind[2:], strict=False)
    # (A)(B) and (A) B are two options; words behind one may say anything of it, that it is wrong, too.
    if any(a.text == "(" and c.text == ")" and re.fullmatch("[A-J]", b.text) for a, b, c in triples):
        raise Malformed("two options")
    words = (behind[0].kind == "unit" and behind[0].text != "\\$") or any(t.kind == "text" for t in behind)
    if words or isinstance(item.shape, Choice | Words) or re.fullmatch(r"\W*[A-Z]\W*", item.text):
        raise Malformed("an option with something that is no value")
    return Choice(letter.casefold(), item)


def _is_word(tokens: list[Token]) -> bool:
    """Whether bare letters are a word and no product of variables: long, or well known."""
    first = tokens[0].text
    if len(tokens) > 1:
        return max(len(t.text) for t in tokens) > 3
    return (len(first) > 3 and first not in SPELLED) or first.lower() in SHORT_WORDS


def _item(tokens: list[Token], level: int) -> Answer:
    text = " ".join(t.text for t in tokens)
    try:
        return Answer(_shape(tokens, level + 1), text)
    except NotExact as error:
        # An item may be a word (red, blue); one that is too large must not become a word by its digits.
        if isinstance(error, TooLarge):
            raise
        words = _words(text)
        if words is None:
            raise
        return Answer(words, text)


def _list(parts: list[list[Token]], marks: list[str], level: int) -> Shape:
    marks = [mark for mark, part in zip(marks, parts[1:], strict=True) if part]  # "1, or 2" has one
    items = tuple(item for part in parts if part for item in _plus_minus(part, level))
    if not items:
        raise Malformed("nothing next to a joiner")
    if len(items) == 1:
        return items[0].shape
    return _joined_bounds(set(marks), items) or AnswerList("∨" if "\\or" in marks else ",", items)


def _joined_bounds(marks: set[str], items: tuple[Answer, ...]) -> Union | Named | None:
    """x < 1 or x > 3 as a union, x > 2 and x < 5 as one interval; None if anything but bounds of one name is joined."""
    if marks == {"\\or"} and all(intervals.is_interval(item) for item in items):
        names = {item.shape.name for item in items if isinstance(item.shape, Named)}
        # (1, 2) or (3, 4) may be points; x < 1 or y > 3 is no set of numbers.
        return None if len(names) > 1 or all(map(intervals.may_be_point, items)) else Union(items)
    if marks <= {"\\and", ","} and (found := intervals.bounded_without(items)):
        return found
    return intervals.meeting(items) if marks == {"\\and"} else None


def _plus_minus(tokens: list[Token], level: int) -> list[Answer]:
    # 1 ± 2 in a list adds both values to it, as if they were written out.
    found = _item(tokens, level)
    return list(found.shape.items) if isinstance(found.shape, AnswerList) and found.shape.ends == "±" else [found]


def _excluded(tokens: list[Token], level: int) -> Shape | None:
    """All real numbers but some, ℝ \\ {1, 2}, and an interval without some, (2, 5) \\ {3}."""
    parts, marks = split(tokens, ("\\setminus", "-"))
    if len(parts) != 2 or (marks != ["\\setminus"] and [t.text for t in parts[0]] != ["\\R"]):
        return None
    span, points = _item(parts[0], level), _item(parts[1], level).shape
    elements = points.items if isinstance(points, AnswerList) and points.ends == "{}" else ()
    if not elements or (found := intervals.without_points(span, elements)) is None:
        raise NotExact("a difference of sets")
    return found


def _unequal(tokens: list[Token], level: int) -> Named | None:
    """x ≠ ±2, x ≠ 1, 2 and x ≠ 1 and x ≠ 2: all real numbers but these; None for anything else next to a ≠."""
    sides = [split(part, ("\\ne",))[0] for part in split(tokens, (",", "\\and"))[0] if part]
    names = {name_of(side[0]) for side in sides if len(side) == 2}
    if len(names) != 1 or "" in names or len(sides[0]) != 2 or any(len(side) > 2 for side in sides):
        return None
    if any(t.text in ("=", "\\in", *_ORDER) for t in tokens):  # x ≠ 2, y = 3
        return None
    points = tuple(point for side in sides for point in _plus_minus(side[-1], level))
    return Named(names.pop(), Answer(intervals.all_but(points)))


def _approximate(tokens: list[Token], level: int) -> Shape | None:
    """≈: the exact side; the other one where the left side is only a name, or nothing."""
    parts, _ = split(tokens, ("\\approx",))
    if len(parts) == 1:
        return None
    filled = [part for part in parts if part]
    if not filled:
        raise Malformed("nothing next to a sign")
    left, rest = filled[0], filled[1:]
    if not rest:
        return _shape(left, level + 1)
    # x ≈ 3: the left side is a name, so that the value is on the right. Otherwise the exact side comes first.
    if "=" not in [t.text for t in left] and (name := name_of(left)):
        return Named(name, _item(rest[0], level))
    return _shape(left, level + 1)


def _member(tokens: list[Token], level: int) -> Shape | None:
    parts, _ = split(tokens, ("\\in",))
    if len(parts) != 2:
        return None
    name = name_of(parts[0])
    if not name:
        raise NotExact("an element that is no name")
    return Named(name, _item(parts[1], level))


def _equality(tokens: list[Token], level: int) -> Shape | None:
    parts, _ = split(tokens, ("=",))
    if len(parts) == 1:
        return None
    if not parts[0]:  # "= 5", an answer that continues a sentence
        parts = parts[1:]
    if len(parts) == 1:
        return _shape(parts[0], level + 1)
    if len(parts) == 2 and not name_of(parts[0]) and name_of(parts[1]):
        parts = parts[::-1]  # 5 = x
    if (equal := chains.equal_quantities(parts)) is not None:
        return equal
    name = name_of(parts[0])
    if not name:
        return _chain(parts, level).shape
    item = _last(name, parts[1:], level)
    return Named(name, item, _difference(parts[0], item))


def _difference(left: list[Token], item: Answer) -> Value | None:
    if not isinstance(item.shape, Scalar):
        return None
    try:
        side = formula.value(left)
        return None if side.named("words", "unit") else algebra.subtract(side, item.shape.value)
    except NotExact:
        return None


def _last(name: str, parts: list[list[Token]], level: int) -> Answer:
    """Of S = a = b the last side; sides that are numbers must be the same, and none may be two things side by side."""
    # Sides with unknowns are steps of a derivation (y = 2x + 1 = 5); sides with values must agree with the last.
    items = [_item(part, level) for part in parts]
    last = items[-1].shape
    values = [item.shape.value for item in items if isinstance(item.shape, Scalar)]
    if isinstance(last, Scalar) and any(algebra.same(v, last.value) is False for v in values if not v.variables):
        raise Malformed("its sides are not equal")
    # Of x = 2 \text{ or maybe } x = 5 the side in the middle has words or the name in it.
    between = [item.shape.value for item in items[:-1] if isinstance(item.shape, Scalar)]
    if any(value.named("words") or name in value.variables for value in between):
        raise Malformed("two equations side by side")
    return items[-1]


def _chain(parts: list[list[Token]], level: int) -> Answer:
    """a = b = c: the last side, where all are the same; with unknowns and two sides an equation."""
    items = [_item(part, level) for part in parts]
    if len(items) == 1:
        return items[0]
    values = [item.shape.value for item in items if isinstance(item.shape, Scalar)]
    if len(values) < len(items):
        raise NotExact("an equation of something that is no formula")
    if values[0].variables and len(values) > 2 and _are_numbers(values[1:]) and _all_same(values[1:]):
        items, values = [items[0], items[-1]], [values[0], values[-1]]  # m + n = 2 + 3 = 5
    if _all_same(values):
        return items[-1]
    left, right = values
    # 2x = 10 says 5 and x + y = 0 is the line: with two unknowns and a number the number is what was asked for.
    total = len(left.variables) > 1 and not left.opaque and _are_numbers([right]) and not algebra.is_zero(right)
    return Answer(Equation(algebra.subtract(left, right), items[-1] if total else None))


def _are_numbers(values: list[Value]) -> bool:
    return not any(value.variables or value.opaque for value in values)


def _all_same(values: list[Value]) -> bool:
    """Whether all sides of a chain are equal; False for an equation of two sides in unknowns. Else raises."""
    verdicts = [algebra.same(value, values[-1]) for value in values[:-1]]
    if all(verdicts):
        return True
    if len(values) == 2 and (values[0].variables or values[1].variables):
        return False
    if None in verdicts and False not in verdicts:
        raise NotExact("sides that exact algebra cannot compare")
    raise Malformed("its two sides are not equal")


# of each sign: whether the bound belongs to it, and whether what is on its left is the smaller side
_ORDER = {"<": (False, True), ">": (False, False), "\\le": (True, True), "\\ge": (True, False)}


def _inequality(tokens: list[Token], level: int) -> Shape | None:
    """x > 5, 1 < x ≤ 3 as an interval; anything else with an order sign is not read."""
    parts, marks = split(tokens, tuple(_ORDER))
    if len(parts) == 1:
        return None
    names = [name_of(part) for part in parts]
    if len(parts) == 2 and bool(names[0]) != bool(names[1]):
        return _bounded(parts, marks[0], names, level)
    if len(parts) == 3 and names[1] and _ORDER[marks[0]][1] == _ORDER[marks[1]][1]:
        return Named(names[1], _enclosed(parts, marks, level))
    raise NotExact("an inequality that is not solved")


def _bounded(parts: list[list[Token]], mark: str, names: list[str], level: int) -> Named:
    """x > 5, or 5 < x: the side with a name, bounded by the other one."""
    named = 0 if names[0] else 1
    bound = _item(parts[1 - named], level)
    closed, less = _ORDER[mark]
    is_below = less == (named == 0)
    interval = intervals.up_to(bound, closed=closed) if is_below else intervals.down_to(bound, closed=closed)
    return Named(names[named], Answer(interval))


def _enclosed(parts: list[list[Token]], marks: list[str], level: int) -> Answer:
    """1 < x ≤ 3, or 3 ≥ x > 1: the interval between the outer parts."""
    low, high = _item(parts[0], level), _item(parts[2], level)
    low_in, high_in = (_ORDER[mark][0] for mark in marks)
    if not _ORDER[marks[0]][1]:
        low, high, low_in, high_in = high, low, high_in, low_in
    return Answer(intervals.between(low, high, low_in=low_in, high_in=high_in))


def _bracketed(tokens: list[Token], level: int) -> Shape | None:
    """(a, b), [a, b), {a, b}, ]a, b[: one pair of brackets around everything, with commas in it."""
    if len(tokens) < 2:
        return None
    first, inside = tokens[0].text, tokens[1:-1]
    ends = _ends(tokens)
    if not ends or not inside:
        return AnswerList("{}", ()) if ends and first == "\\{" else None
    if first == "{":  # TeX's own braces group nothing
        return _shape(inside, level + 1)
    if first == "\\{" and (condition := _condition(inside)):
        return _shape(condition, level + 1)  # {x | x > 2}
    return _elements(tokens, ends, level)


def _elements(tokens: list[Token], ends: str, level: int) -> Shape | None:
    """What stands between one pair of brackets: a list, or a single item, which only braces make a set."""
    parts, _ = split(tokens[1:-1], (",", ";"))
    if len(parts) == 1 and ends != "{}":
        return _single(tokens, ends, level)
    if ends == "{}":
        return AnswerList(ends, tuple(item for part in parts for item in _plus_minus(part, level)))
    items = tuple(_item(part, level) for part in parts)
    return _two_points(parts, items) or AnswerList(ends, items) if ends == "()" else AnswerList(ends, items)


def _two_points(parts: list[list[Token]], items: tuple[Answer, ...]) -> AnswerList | None:
    r"""(\pm 1, 2) as (1, 2) and (-1, 2), (\pm 1, \mp 2) as (1, -2) and (-1, 2).

    None without such a sign, and for (\pm 1, \pm 2), which may be two points or four.
    """
    double = [i for i, item in enumerate(items) if isinstance(item.shape, AnswerList) and item.shape.ends == "±"]
    signs = [{t.text for t in parts[i]} & {"\\pm", "\\mp"} for i in double]
    if not double or (len(double) > 1 and sorted(map(sorted, signs)) != [["\\mp"], ["\\pm"]]):
        return None
    points = []
    for side in (0, 1):
        point = [item.shape.items[side] if i in double and isinstance(item.shape, AnswerList) else item
                 for i, item in enumerate(items)]  # fmt: skip
        points.append(Answer(AnswerList("()", tuple(point))))
    return AnswerList("±", tuple(points))


def _ends(tokens: list[Token]) -> str:
    """The two brackets around all of the tokens, (], {}, …, with ]a, b[ as (a, b); empty if there are none."""
    first, last = tokens[0].text, tokens[-1].text
    # The French notation ]a, b[ excludes its ends, as (a, b) does.
    ends = {"\\{": "{", "]": "("}.get(first, first) + {"\\}": "}", "[": ")"}.get(last, last)
    known = ends in ("()", "[]", "(]", "[)", "{}")
    if first in ("]", "[", "(") and last in ("[", ")", "]") and (first == "]" or last == "["):
        if not known or len(split(tokens[1:-1], (",", ";"))[0]) != 2:
            raise Malformed("brackets that do not belong together")
        return ends
    return ends if known and encloses(tokens) else ""


def _condition(inside: list[Token]) -> list[Token]:
    """What holds for the elements of {x | x > 2}; empty for a set of another kind."""
    parts, _ = split(inside, ("|", ":"))
    return parts[1] if len(parts) == 2 and name_of(split(parts[0], ("\\in",))[0][0]) else []


def _single(tokens: list[Token], ends: str, level: int) -> Shape | None:
    """Brackets around one thing: a choice, (C), or nothing but grouping."""
    inside = tokens[1:-1]
    # Brackets around one item only group it, except around words, where they may be part of the answer: (B).
    if ends not in ("()", "[]"):
        return None
    if any(t.kind == "text" for t in inside) or (len(inside) == 1 and inside[0].kind == "word"):
        return _words(" ".join(t.text for t in tokens))
    return _shape(inside, level + 1)


def _matrix(tokens: list[Token], level: int) -> Matrix | None:
    return matrices.matrix(tokens, lambda cell: _item(cell, level))


def _ratio(tokens: list[Token], level: int) -> Shape | None:
    parts, _ = split(tokens, (":",))
    if len(parts) == 1:
        return None
    return AnswerList(":", tuple(_item(part, level) for part in parts))


def _measured(tokens: list[Token], level: int) -> Shape | None:
    """(1, 2) cm: a unit behind the brackets holds for everything in them."""
    closed = [i for i, t in enumerate(tokens) if t.text in (")", "]", "\\}", "\\end{matrix}")]
    if not closed or closed[-1] == len(tokens) - 1 or tokens[closed[-1] + 1].kind != "unit":
        return None
    inside, behind = tokens[: closed[-1] + 1], tokens[closed[-1] + 1 :]
    found = _bracketed(inside, level) or _matrix(inside, level)
    if not isinstance(found, (AnswerList, Matrix)):
        return None
    each = _scalar(behind)
    if algebra.rational(each.value) != 1:
        raise Malformed("more than a unit behind brackets")
    return _all_in_unit(found, each.unit)


def _all_in_unit(shape: AnswerList | Matrix, unit: Unit) -> AnswerList | Matrix:
    if isinstance(shape, AnswerList):
        return AnswerList(shape.ends, tuple(_in_unit(item, unit) for item in shape.items))
    return Matrix(tuple(tuple(_in_unit(item, unit) for item in row) for row in shape.rows))


def _in_unit(item: Answer, unit: Unit) -> Answer:
    shape = item.shape
    return Answer(Scalar(shape.value, unit), item.text) if isinstance(shape, Scalar) and not shape.unit else item


def _formula(tokens: list[Token]) -> Shape:
    if (digits := based(tokens)) is not None:
        return digits
    texts = [t.text for t in tokens]
    if texts == ["\\emptyset"]:
        return AnswerList("{}", ())
    if texts == ["\\R"]:
        return intervals.everything()
    if "\\pm" in texts or "\\mp" in texts:
        return AnswerList("±", (Answer(_scalar(tokens)), Answer(_scalar(tokens, sign=-1))))
    return _scalar(tokens)


def _scalar(tokens: list[Token], *, sign: int = 1) -> Scalar:
    value, unit = units.measured(formula.value(tokens, sign=sign))
    if algebra.is_zero(value) and any(t.kind in ("unit", "text") for t in tokens):  # 0 cm is in cm, 0 dozen is not 0
        ones = [Token("number", "1") if t.kind == "number" and not t.text.strip("0.") else t for t in tokens]
        one, unit = units.measured(formula.value(ones, sign=sign))
        if words := one.named("words"):
            value = algebra.thing(("words", f"0 {' '.join(sorted(words))}"))
    return Scalar(value, unit)


# The order decides: a list is taken apart before its items are read, and a relation before the brackets in its sides.
_READERS: tuple[Callable[[list[Token], int], Shape | None], ...] = (
    _unequal, _listed, _united, _chosen, _labelled, _excluded, _approximate, _member, _equality, _inequality,
    _bracketed, _matrix, _ratio, _measured,
)  # fmt: skip
"""Each gives None if the tokens are not of its kind."""
