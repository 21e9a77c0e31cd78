"""Step one: where in a completion the answer stands."""

from __future__ import annotations

import re
from collections import deque

from ...utils.boxes import last_box
from ..numbers import Number, denied, sign_apart

MAX_READ = 200_000  # characters at the end of a completion that are searched: an answer stands at the end
MAX_UNBOXED = 20_000  # the same, if there is no box

# "The final answer is", "result:", "solution =", in bold type too.
_STATED = re.compile(
    r"\b(?:final\s+answer|answer|result|solution)s?\b\**\s*(?:\bis\b|\bare\b|[:=])\s*:?\**\s*", re.IGNORECASE
)
# Formulas between $$, $, \( \) and \[ \]: of bounded length, so that a search stays linear. In
# "$5 and $6" none ends.
_MATH = re.compile(
    r"\$\$([^$]{1,500})\$\$|(?<!\\)\$([^$\n]{1,500}?)(?<!\\)\$(?!\d)|\\\(([^$]{1,500}?)\\\)|\\\[([^$]{1,500}?)\\\]"
)
# With sign, currency, commas, a denominator and a percent sign.
_NUMBER = re.compile(r"[-+\u2212]?[$€£]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:\s?/\s?\d+)?%?")
# What makes a list of the formulas around it.
_AND = re.compile(r"\s*(?:[,;]|[,;]?\s*\b(?:or|and|to)\b)\s*|\s+")
# What makes more of the formula in front: another one or a number beside it, $5$ (or $6$), $5$ to 6; $5$ million.
_GOES_ON = re.compile(
    r"\s*(?:,|or\b|and\b|\(?\s*(?:[;/+*×·–-]|or\b|and\b|to\b|times\b|\\[a-z]+)?\s*(?:\$|\\\(|\d)"
    r"|(?:hundred|[mbtr]+illion|thousand|dozen)\b)"
)
# In front of and behind digits that are a part of a value: √5, sqrt 5, x^5, A5, 4 x 5; 5π, 5².
_PART_OF = re.compile(r"(?:[√^A-Za-z]|\w_|\bsqrt\s*\(?\s*|\d\s+(?:x|times)\s+)\Z", re.IGNORECASE)
_BEHIND = re.compile(r"\s?(?:π|\\?pi\b)|[\^²³]|_(?=\w)")
_BOUNDED = re.compile(r"\b(?:(?:less|more|greater) than|at (?:least|most))\s+\$?\Z", re.IGNORECASE)
# What ties the number behind it to the one in front: a list, a range, a sum.
_LIST = re.compile(r"(?:,|;|\bor\b|\band\b|\bto\b|[-–~/*+^=<>])\s*$")


def answer(text: str, *, require_boxed: bool = True) -> tuple[str | None, str]:
    """The answer in a completion whose thought is already gone, and why there is none.

    With ``require_boxed`` only the last complete box counts. Without, if there is no box: what follows the last
    "answer is" or "####", else the last ``$…$`` or list of them, else the last number that is not part of a list.

    >>> answer("so it is 5", require_boxed=False), answer("so it is 5")
    (('5', ''), (None, 'no complete \\\\boxed{…}'))
    >>> answer("The answer is $x = 3$.", require_boxed=False)
    ('x = 3', '')
    >>> answer("7 or 8", require_boxed=False)
    (None, 'several numbers')
    """
    text = text[-MAX_READ:]
    boxed = last_box(text)
    if boxed is not None:
        return (boxed, "") if boxed.strip() else (None, "the box is empty")
    if require_boxed:
        return None, "no complete \\boxed{…}"
    return _unboxed(text)


def _unboxed(text: str) -> tuple[str | None, str]:
    # From the most explicit form to the least: a mark, a stated answer, the last formula, the last number.
    text = text[-MAX_UNBOXED:]
    _, mark, tail = text.rpartition("####")
    if mark and tail.strip():
        return tail.strip().splitlines()[0].strip(), ""
    stated = _last_of(_STATED, text)
    if stated is not None:
        rest = text[stated.end() :].lstrip("* \t\n")
        if rest:
            return _sentence(rest), ""
    if (found := _last_formulas(text)) is not None:
        return found
    return _last_number(text)


def _last_formulas(text: str) -> tuple[str | None, str] | None:
    """The last formula of a text, with all that a list joins to it, $5$ and $6$; None if there is none."""
    written, start, end = "", 0, 0
    for found in _MATH.finditer(text):
        between = text[end : found.start()]
        inside = next(group for group in found.groups() if group is not None)
        joined = bool(written) and len(between) <= 16 and _AND.fullmatch(between) is not None
        written, start = (
            (f"{written}{between if between.strip() else ', '}{inside}", start) if joined else (inside, found.start())
        )
        end = found.end()
    if not written:
        return None
    if _BOUNDED.search(text, max(0, start - 16), start):
        return None, "a bound, no answer"
    return (None, "a denial, no answer") if denied(text, Number(None, start, end)) else (written, "")


def _last_number(text: str) -> tuple[str | None, str]:
    """The last number of a text, unless it is part of a list, a range or a sum that was not worked out."""
    numbers = deque(_NUMBER.finditer(text), maxlen=2)
    if not numbers:
        return None, "no answer is stated"
    last = numbers[-1]
    # "3 and 5" or "3, 5" gives two numbers, of which the last must not count as the answer.
    if len(numbers) == 2 and _joins(text[numbers[0].end() : last.start()]):
        return None, "several numbers"
    if denied(text, Number(None, last.start(), last.end())):
        return None, "a denial, no answer"
    before = text[max(0, last.start() - 16) : last.start()]
    if _PART_OF.search(before) or _BOUNDED.search(before) or _BEHIND.match(text, last.end()):
        return None, "a number that is not the whole answer"
    sign = sign_apart(text, last.start())
    return text[last.start() if sign < 0 else sign : last.end()], ""


def _joins(between: str) -> bool:
    """Whether the text between two numbers makes one thing of them; behind ``=`` stands what a sum comes to."""
    apart = between.strip()
    return len(between) <= 16 and apart != "=" and (not apart or _LIST.search(between) is not None)


def _last_of(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    return next(iter(deque(pattern.finditer(text), maxlen=1)), None)


def _sentence(rest: str) -> str:
    """The rest of a line up to the end of the sentence; one formula where it begins with one."""
    # A formula at the beginning is the answer, unless another one is joined to it: "$3$ and $5$".
    math = _MATH.match(rest)
    goes_on = math is not None and (_GOES_ON.match(rest, math.end()) or denied(rest, Number(None, 0, math.end())))
    if math is not None and not goes_on:
        return next(group for group in math.groups() if group is not None)
    line = rest.splitlines()[0]
    stop = re.search(r"\.(?=\s|\**$)", line)
    return (line[: stop.start()] if stop else line).strip().strip("*").strip()
