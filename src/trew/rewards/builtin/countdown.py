"""Built-in reward ``countdown``: reach a target from given numbers with + - * / and brackets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from ..columns import first
from ..numbers import parse_gold
from ..thinking import after_thinking
from ..verdict import Verdict, bad_gold, no_answer, right_or_wrong
from . import expression

OPEN, CLOSE = "<answer>", "</answer>"


def extract(text: str) -> str | None:
    """Returns the content of the last complete ``<answer>…</answer>``; None without one.

    >>> extract("<answer>1+2</answer> or <answer>3</answer> <answer>4")
    '3'
    """
    # From the end, so that an unclosed <answer> after the last complete one does not count.
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, max(end, 0))
    return text[start + len(OPEN) : end].strip() if start >= 0 else None


def parse_puzzle(gold: Any, numbers: Any = None, target: Any = None) -> tuple[Counter[int], Fraction] | str:
    """Reads the given numbers and the target; returns a message if they are malformed.

    ``gold`` may be the target alone, or a mapping (or its JSON text) with ``numbers``/``nums`` and ``target``; the
    other two arguments take precedence. Numbers are whole and at least 0, the target is any exact number; both may be
    strings.

    >>> parse_puzzle({"numbers": [8, "2", 1], "target": "15"})
    (Counter({8: 1, 2: 1, 1: 1}), Fraction(15, 1))
    >>> parse_puzzle(15)
    'no numbers are given'
    """
    if isinstance(gold, str) and gold.lstrip().startswith("{"):
        try:
            gold = json.loads(gold)
        except (ValueError, RecursionError):
            return "the gold is not valid JSON"
    if isinstance(gold, Mapping):
        numbers = first(numbers, gold.get("numbers"), gold.get("nums"))
        target = first(target, gold.get("target"))
    else:
        target = first(target, gold)
    if numbers is None:
        return "no numbers are given"
    if target is None:
        return "no target is given"
    given = _given_numbers(numbers)
    if isinstance(given, str):
        return given
    goal = parse_gold(target)
    return (given, goal) if goal is not None else f"the target {target!r:.80} is not a number"


def _given_numbers(numbers: Any) -> Counter[int] | str:
    # Any iterable, because a Parquet row holds arrays; but the characters of "123" are not its numbers.
    if isinstance(numbers, (str, bytes, Mapping)) or not hasattr(numbers, "__iter__"):
        return f"numbers must be a list of whole numbers, got {numbers!r:.80}"
    given: Counter[int] = Counter()
    for number in numbers:
        value = parse_gold(number)
        if value is None or value.denominator != 1 or value < 0:
            return f"{number!r:.80} among the numbers is not a whole number of at least 0"
        given[int(value)] += 1
    if not 1 <= given.total() <= expression.MAX_OPERANDS:
        return f"{given.total()} numbers are given, must be 1 to {expression.MAX_OPERANDS}"
    return given


def grade(
    completion: str,
    gold: Any = None,
    *,
    numbers: Any = None,
    target: Any = None,
    require_all: bool = True,
    thinking: bool = False,
) -> Verdict:
    """Scores 1 if the last ``<answer>`` is an expression of the given numbers that equals the target exactly, else 0.

    Only + - * / ( ) and whole numbers in ASCII digits are accepted; ``**``, ``//``, decimals and ``=`` are refused. A
    number may be used at most as often as it is given; with ``require_all`` every one must be used. Division is exact.

    >>> grade("<answer>(8*2) - 1</answer>", numbers=[8, 2, 1], target="15").score
    1.0
    >>> grade("<answer>8+8-1</answer>", numbers=[8, 2, 1], target=15).detail
    'uses 8 more often than given'
    """
    puzzle = parse_puzzle(gold, numbers, target)
    if isinstance(puzzle, str):
        return bad_gold(puzzle)
    given, goal = puzzle
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return no_answer("the thought was not finished")
    answer = extract(text)
    if answer is None:
        return no_answer("no <answer>…</answer>")
    try:
        tokens = expression.tokenize(answer)
        # Before anything is computed: with the given numbers alone, no value can grow beyond reason.
        wrong = _wrong_numbers(Counter(expression.operands(tokens)), given, require_all=require_all)
        value = expression.evaluate(tokens) if not wrong else None
    except expression.ExpressionError as error:
        return right_or_wrong(False, extracted=answer, detail=str(error))
    right = value == goal
    return right_or_wrong(right, extracted=answer, detail=wrong or ("" if right else f"is {value}"))


def _wrong_numbers(used: Counter[int], given: Counter[int], *, require_all: bool) -> str:
    """Names a number that is used too often, or is missing; empty if the numbers are right."""
    for number, count in used.items():
        if count > given[number]:
            return f"uses {number} more often than given" if given[number] else f"{number} was not given"
    return f"does not use {next(iter(given - used))}" if require_all and used != given else ""
