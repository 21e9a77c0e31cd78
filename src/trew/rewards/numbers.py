"""Exact numbers in free text: finds them, reads them, and distinguishes an answer from a list, range or unfinished sum.

All numbers are ``Fraction``: nothing is rounded, ``0.1`` is one tenth, and equal values in another spelling are equal.
Reading takes time linear in the text: one pass of a pattern without nested quantifiers, bounded looks to either side.
"""

from __future__ import annotations

import itertools
import math
import numbers
import re
import unicodedata
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

MAX_DIGITS = 1000  # longer digit runs are not read: converting them costs more than linear time
MAX_EXPONENT = 999  # in 1e999; larger ones would build gigantic integers
SHORT = 64  # readings of texts up to this length are kept

# Digits with points and commas as they stand; read_digits() decides whether they are a number.
_CHUNK = re.compile(r"\d[\d.,]*(?:[eE][+-]?\d{1,9})?")
_PLAIN = re.compile(r"(?:\d+(?:\.\d+)?|\.\d+)(?:[eE]([+-]?\d+))?")
_GROUPED = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
# A factor behind a number: 5k, 3 million.
_MULTIPLIER = re.compile(r"(?:k|\s?(hundred|thousand|million|billion|trillion))(?![A-Za-z])", re.IGNORECASE)
_TIMES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# What is in front of a number that is only a part of a value: \sqrt{72}, \log 8; and a sign in words.
_APPLIED = re.compile(
    r"(?:\\?\bsqrt(?:\[\d+\])?|\\(?:log|ln|lg|exp|sin|cos|tan|cot|sec|csc)(?:_\{?\d+\}?)?)\s*[{(]?\s*\Z"
    r"|(?:\\pi|π)\s*/\s*\Z"
)
_PI = re.compile(r"\s?(?:\\?pi(?![A-Za-z])|π)")
_PI_ALONE = re.compile(r"\\pi(?![A-Za-z])|π")
_NEGATIVE = re.compile(r"(?<![\w-])negative\s+\Z", re.IGNORECASE)
# An answer that only bounds its value: "< 5", "x > 5", "at least 5", "no more than 5".
_BOUND = re.compile(
    r"^(?:[≤≥≠±]|[<>]=?\s*[\d$.])|\\(?:[lg]eq?|[lg]t|[lg]eqslant)(?![A-Za-z])"
    # x > 5 and 5 < x, but neither <b>5</b> nor 5<br>
    r"|(?<![<\w/=\"'])[A-Za-z]\w*\s*(?:[<>]=?|[≤≥])\s*[-$]*[\d.]|\d\s*(?:[<>]=?|[≤≥])\s*[A-Za-z]\w*(?![\w>])"
    r"|\b(?:at least|at most|or more|or less|or fewer)\b"
    r"|\b(?:more|less|fewer|greater|larger|smaller) than\b(?=[\s*\\$€£¥-]*[\d.])",
    re.IGNORECASE,
)
_DENYING = "not never neither nor cannot except without wrong incorrect false"
# Two words that deny what follows: "instead of 72".
_INSTEAD = {("instead", "of"), ("rather", "than"), ("other", "than")}
_UNEQUAL = re.compile(r"≠|!=|\\neq?\b|\\not\b")
# Words that may stand between a denial and its number.
_WEAK = "be is are was equal equals to the a an any exactly just only really actually number answer"
_DENIALS, _BETWEEN = frozenset(_DENYING.split()), frozenset(_WEAK.split())
_WORD = re.compile(r"[a-z]+(?:['\u2019]t\b)?")
_GROUP_SPACE = re.compile(r"(?<=\d)(?:[\u00a0\u2009\u202f]|\\,|\{,\})(?=\d{3}(?!\d))")

_MINUS = dict.fromkeys(map(ord, "\u2212\u2013\uff0d\ufe63\u2010\u2011"), "-")  # minus, en dash, fullwidth, hyphens
_CURRENCY = "$€£¥₹₩＄"
# A minus with space behind it, up to the number or its currency: "- 5", "-$ 5".
_MINUS_APART = re.compile(r"-[ \t\u00a0\u2009\u202f]{0,4}(?:\\?[$€£¥₹₩＄][ \t\u00a0\u2009\u202f]{0,4})?\Z")
# What a minus with space behind it cannot subtract from, so that it is a sign.
_NO_LEFT_SIDE = "=:([{<>,;≈~/*×÷·^|&≤≥"
_LEADS = """
    be is are was were equal equals get gets got give gives gave giving yield yields make makes become becomes
    obtain have has of at by from than so thus hence therefore then exactly only just about
"""
_LEADING = frozenset(_LEADS.split())
"""Words behind which a number has its sign."""
_LAST_WORD = re.compile(r"[^\W\d_]+$")

_JOINING = """
    + - * ** / // ^ × ÷ · ∗ x times cdot div over plus minus mod ± pm to and or and/or
    , ; ， 、 & | ~ .. ... … < > <= >= ≤ ≥ ≠ !=
"""
JOINERS = frozenset(_JOINING.split()) | {", and", ", or"}
"""What stands between two numbers that are one expression, one list or one range, so that neither is *the* answer."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number at ``text[start:end]`` (sign and currency included). ``value`` is None when it cannot be read."""

    value: Fraction | None
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What a piece of text says: its ``value``, or None and ``why`` not. ``text`` is what was read."""

    value: Fraction | None
    text: str
    why: str = ""


def parse_gold(gold: Any) -> Fraction | None:
    """A gold answer as an exact number; None when it is not exactly one number.

    Numbers of any kind and strings are taken; a float means the decimal it prints as. Of a string with ``####`` (the
    worked solutions of GSM8K) only what follows the last one is read.

    >>> parse_gold("so 70+2 = 72 #### 1,072"), parse_gold(0.5), parse_gold("7 or 8"), parse_gold(True)
    (Fraction(1072, 1), Fraction(1, 2), None, None)
    """
    if isinstance(gold, str):
        return single_number(gold.rpartition("####")[2]).value
    if isinstance(gold, bool) or type(gold).__name__ == "bool":  # numpy's bool as well
        return None
    if isinstance(gold, numbers.Rational):
        return Fraction(int(gold.numerator), int(gold.denominator))
    if isinstance(gold, Decimal):
        return Fraction(gold) if gold.is_finite() and abs(gold.adjusted()) <= MAX_EXPONENT else None
    if isinstance(gold, numbers.Real):
        # str: a float32 prints as 0.1, and as a float of Python it would be 0.10000000149011612
        return single_number(str(gold)).value if math.isfinite(float(gold)) else None
    return None


def single_number(text: str) -> Reading:
    """The one number that ``text``, a whole answer, states; of an equation the side after the last ``=``.

    Words, units, currency and markup around it do not matter. Several different numbers, a list, a range or a sum
    that was not worked out are no single number.

    >>> single_number("$1,200.00 dollars").value, single_number("**-5**").value, single_number("1/2").value
    (Fraction(1200, 1), Fraction(-5, 1), Fraction(1, 2))
    >>> single_number("7 or 8").why, single_number("144/2").why
    ('several numbers', 'not worked out to one number')
    """
    return _short_text(text) if len(text) <= SHORT else _single_number(text)


@lru_cache(4096)  # completions of a group often give the same answer, and every one asks for the same gold
def _short_text(text: str) -> Reading:
    return _single_number(text)


def _single_number(text: str) -> Reading:
    # Spelled in one way first: what follows looks for one minus and one thousands separator.
    plain = _stated(normalise(text).strip())
    found = list(find_numbers(plain))
    if not found:
        return Reading(None, plain, "no number")
    if why := _states_no_value(text, plain):
        return Reading(None, plain, why)
    if len(found) == 2 and (fraction := _fraction(plain, *found)) is not None:
        return Reading(fraction, plain)
    if why := _no_one_number(plain, found):
        return Reading(None, plain, why)
    return Reading(found[0].value, plain)


def last_number(text: str) -> Reading:
    """The last number of ``text``, unless it is only a part of a list, a range or a sum that was not worked out.

    >>> last_number("7 * 8 = 56").value, last_number("It is 56.").value
    (Fraction(56, 1), Fraction(56, 1))
    >>> last_number("7 or 8").why, last_number("7 * 8").why
    ('several numbers', 'several numbers')
    """
    plain = normalise(text)
    # Three: the last two may be one fraction, unless another number is joined to them.
    tail = deque(find_numbers(plain), maxlen=3)
    if not tail:
        return Reading(None, "", "no number")
    last = tail[-1]
    written = plain[last.start : last.end]
    if last.value is None:
        return Reading(None, written, "a number that cannot be read")
    if denied(plain, last):
        return Reading(None, written, "a denial, not a number")
    if len(tail) >= 2 and joined(plain[tail[-2].end : last.start]):
        written = plain[tail[-2].start : last.end]
        alone = len(tail) == 2 or not joined(plain[tail[0].end : tail[1].start])
        if alone and (fraction := _fraction(plain, tail[-2], last)) is not None:
            return Reading(fraction, written)
        return Reading(None, written, "several numbers")
    return Reading(last.value, written)


def find_numbers(text: str) -> Iterator[Number]:
    """Every number of normalised ``text`` in order. Digits inside names (``x1``, ``H2O``) and unit powers (``m^2``)
    are no numbers; ``1,20``, ``1.2.3``, ``7²`` and ``1_000`` are numbers that cannot be read.

    >>> [str(n.value) for n in find_numbers("from -3 to 1,200.5 m^2 in H2O, v1.2 3 million, 1.2.3")]
    ['-3', '2401/2', '3000000', 'None']
    """
    for match in _CHUNK.finditer(text):
        start, end = match.span()
        # A point or comma at its end is the sentence's.
        chunk = match.group().rstrip(".,")
        end = start + len(chunk)
        if _is_part_of_a_name(text, start):
            continue
        if _begins_with_point(text, start):
            start, chunk = start - 1, "." + chunk
        value = read_digits(chunk)
        # √2 and x_2 are not 2.
        before = text[max(0, start - 16) : start]
        if _continues(text, end) or before[-1:] in ("√", "_") or _APPLIED.search(before):
            value = None
        if value is not None:
            value, end = _multiplied(text, value, end)
        negative, start = _sign(text, start)
        negative = negative or _NEGATIVE.search(text, max(0, start - 12), start) is not None
        if start and text[start] in "+-" and text[start - 1] in "+-":  # --5
            value = None
        yield Number(-value if negative and value is not None else value, start, end)


def read_digits(chunk: str) -> Fraction | None:
    """An unsigned number exactly; None for what is not one number. Digits of any script count by their value.

    >>> [read_digits(c) for c in ("072", "1,200.50", "1,20", "1e3", "1e1000")]
    [Fraction(72, 1), Fraction(2401, 2), None, Fraction(1000, 1), None]
    """
    if len(chunk) > MAX_DIGITS:
        return None
    if plain := _PLAIN.fullmatch(chunk):
        exponent = int(plain.group(1) or 0)
        if abs(exponent) > MAX_EXPONENT:
            return None
        whole, _, decimals = re.split("[eE]", chunk)[0].partition(".")
    elif _GROUPED.fullmatch(chunk) and int(chunk[0]):  # 0,125 is one eighth in half of the world
        exponent = 0
        whole, _, decimals = chunk.replace(",", "").partition(".")
    else:
        return None
    digits, power = int((whole or "0") + decimals), exponent - len(decimals)
    return Fraction(digits) * Fraction(10) ** power if power else Fraction(digits)


def normalise(text: str) -> str:
    """One spelling for the minus signs and for the spaces and LaTeX that group digits.

    >>> normalise("\u22125, 1\u202f200, 1{,}200")
    '-5, 1,200, 1,200'
    """
    return _GROUP_SPACE.sub(",", text.translate(_MINUS).replace("\\!", ""))


def joined(between: str) -> bool:
    """Whether the text ``between`` two numbers makes one expression, list or range of them.

    >>> joined(" or "), joined(" * "), joined(" apples or "), joined(" = "), joined(". Then "), joined("\\n")
    (True, True, True, False, False, False)
    >>> joined("}\\u00a0")  # a space of another kind beside what is left out
    False
    """
    if "\n" in between[:64] or len(between) > 64:
        # From one line to another, or over a long way, only an "or" at the end joins.
        return between[-8:].split()[-1:] == ["or"]
    if not between.strip():
        return True
    if between == ":":  # a ratio or a time; "Step 1: 56" has a space
        return True
    core = between.lower().strip(" \t()[]{}%\\" + _CURRENCY)
    if not core:
        # Nothing but brackets: those of a fraction, or of two factors.
        return "}{" in between or ")(" in between
    core = core.strip("*").strip() or core  # bold
    return core in JOINERS or core.split()[-1:] == ["or"]


def _stated(plain: str) -> str:
    """What of a whole answer states its number: the side after the last ``=``, with a minus that stands apart put
    before its number."""
    left, equals, right = plain.rpartition("=")
    if equals and left and any(True for _ in find_numbers(right)):
        plain = right.strip()
    # at the beginning there is nothing that could be subtracted from: it is a sign
    return "-" + plain[1:].lstrip() if plain.startswith("- ") else plain


def _states_no_value(text: str, plain: str) -> str:
    """Says why an answer with numbers in it states none of them as its value: it bounds or denies them."""
    if _BOUND.search(plain) or "<=" in text or ">=" in text:  # whose = would be taken for that of x = 5
        return "a bound, not a number"
    if _PI_ALONE.search(plain):  # \\pi/4 is not 4
        return "not worked out to one number"
    # the whole text is looked at: in "x != 5" the denial is gone with the side before the last =
    if _UNEQUAL.search(text) or any(map(_denies, _WORD.findall(text.lower()))):
        return "a denial, not a number"
    return ""


def _no_one_number(plain: str, found: list[Number]) -> str:
    """Says why the numbers that were found are not one: some cannot be read, are joined, or differ."""
    if any(number.value is None for number in found):
        return "a number that cannot be read"
    between = [plain[a.end : b.start] for a, b in itertools.pairwise(found)]
    if any(map(joined, between)):
        sum_like = len(between) == 1 and between[0].strip() in set("+-*/^×÷·")
        return "not worked out to one number" if sum_like else "several numbers"
    return "several numbers" if any(number.value != found[0].value for number in found[1:]) else ""


def _denies(word: str) -> bool:
    return word in _DENIALS or word.endswith(("n't", "n\u2019t"))


def denied(text: str, number: Number) -> bool:
    """Whether the words right before a number or right behind it deny it: "is not 72", "72 is wrong"."""
    before = re.split(r"[.;:?\n]|!(?!=)", text[max(0, number.start - 48) : number.start].lower())[-1]
    behind = re.split(r"[.,;:!?\n]", text[number.end : number.end + 32].lower(), maxsplit=1)[0]
    words = _WORD.findall(before)
    # Words that say nothing by themselves: "is not equal to the number 72".
    while words and words[-1] in _BETWEEN:
        words.pop()
    if _UNEQUAL.search(before[-8:]) or tuple(words[-2:]) in _INSTEAD or (words and _denies(words[-1])):
        return True
    verb, *rest = [*_WORD.findall(behind), ""]
    return _denies(verb) or (verb in ("is", "was") and bool(rest) and _denies(rest[0]))


def _fraction(text: str, above: Number, below: Number) -> Fraction | None:
    """The value of a/b in lowest terms, which is a number; None for 144/2, which is an unfinished division."""
    if text[above.end : below.start] != "/" or above.value is None or not below.value or below.value <= 1:
        return None
    value = above.value / below.value
    in_lowest_terms = above.value.denominator == below.value.denominator == 1 and value.denominator == below.value
    return value if in_lowest_terms else None


def _is_part_of_a_name(text: str, start: int) -> bool:
    if not start:
        return False
    before = text[start - 1]
    if before.isascii() and before.isalpha():
        return True
    if text[max(0, start - 2) : start] == "^{":
        before, start = "^", start - 1
    base = text[start - 2 : start - 1]
    return before == "^" and base.isascii() and (base.isalpha() or base == "}")


def _begins_with_point(text: str, start: int) -> bool:
    """Whether the point before the digits is theirs (``.5``) and not the end of a word or an ellipsis."""
    before = text[max(0, start - 2) : start]
    return before.endswith(".") and not (before[:-1].isalnum() or before[:-1] in (".", ")"))


def _continues(text: str, end: int) -> bool:
    """Whether what follows belongs to the number, so that the digits alone are not its value: 1_000, 7², 3½, 2π."""
    if end >= len(text):
        return False
    if text[end] == "_" or unicodedata.category(text[end]) == "No":  # superscripts, ½
        return True
    return _PI.match(text, end) is not None


def _multiplied(text: str, value: Fraction, end: int) -> tuple[Fraction, int]:
    for _ in range(3):  # at most as in "five hundred thousand million"
        match = _MULTIPLIER.match(text, end)
        if match is None:
            break
        value *= _TIMES[match.group(1).lower()] if match.group(1) else 1000
        end = match.end()
    return value, end


def _sign(text: str, start: int) -> tuple[bool, int]:
    """Whether the number whose digits begin at ``start`` is negative, and where it begins with sign and currency.

    A minus after a number, a word or a closing bracket subtracts (or makes a range); it is no sign.
    """
    begin, at = _before_digits(text, start)
    if at < 0:
        apart = sign_apart(text, begin)
        return (True, apart) if apart >= 0 else (False, begin)
    before = text[max(0, at - 16) : at]
    previous = before.rstrip()[-1:]
    attached = before[-1:] == previous
    binary = previous.isdigit() or previous in tuple(")]}%") or (attached and previous.isalnum())
    return (False, at + 1) if binary else (text[at] == "-", begin)


def sign_apart(text: str, begin: int) -> int:
    """Where the minus is that stands apart from the number at ``begin`` and is its sign; -1 without one.

    >>> sign_apart("x = - 4", 6), sign_apart("7 - 4", 4), sign_apart("x = \u2212 4", 6)
    (4, -1, 4)
    """
    first = max(0, begin - 40)  # more is not looked at
    near = text[first:begin].translate(_MINUS)
    found = _MINUS_APART.search(near, max(0, len(near) - 12))
    return first + found.start() if found and _is_sign(near, found.start()) else -1


def _is_sign(text: str, at: int) -> bool:
    """Whether a minus at ``at`` with space behind it makes the number behind it negative: after =, a bracket that
    opens, a word that a number follows ("is"), or nothing. It may as well subtract, be a dash, or begin an item of a
    list on a line of its own.
    """
    before = text[max(0, at - 24) : at]
    if not before.strip():
        return at < 24
    line = before.rstrip(" \t")
    if line.endswith("\n"):
        return line.rstrip()[-1] in "=([{"  # a formula that goes on; anything else is followed by a list
    # Of bold type, a quotation or a formula that begins with the minus, what is in front of it.
    left = (line.rstrip("*_`$\"'“") if line == before else line.removesuffix("**")).rstrip()
    if not left or left[-1] in _NO_LEFT_SIDE:
        return True
    found = _LAST_WORD.search(left)
    if found is None:
        return False
    word = found[0].lower()
    # x - 4 is a difference, and so is 10 apples - 4; behind other words, as in "Answer - 4", it may be a dash.
    return word in _LEADING or word.endswith(("是", "为", "等于")) or (word in JOINERS and word != "x")


def _before_digits(text: str, start: int) -> tuple[int, int]:
    """Where the sign and currency before the digits at ``start`` begin, and where the sign is; -1 without one."""
    i = start
    at = -1
    for _ in range(4):  # "-$5", "$-5", "\$5", "-\$5": never more than four characters
        if i and (text[i - 1] in _CURRENCY or (text[i - 1] == "\\" and text[i] in _CURRENCY)):
            i -= 1
        elif i and at < 0 and text[i - 1] in "+-":
            at = i = i - 1
        else:
            break
    return i, at
