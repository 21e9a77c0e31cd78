"""Answers whose score is known beforehand, to try a reward on data before anything is trained with it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

from .builtin import arithmetic, code_rows, countdown, gsm8k, layout, length, reasoning
from .builtin.kinds import KINDS
from .maths.grade import self_answer as boxed
from .numbers import parse_gold

SOLVABLE = 5  # numbers of a Countdown row for which a solution is searched
HOSTILE = 100_000  # characters of a hostile text

Family = Literal["right", "mutation", "wrapper", "hostile"]
"""``right``: the gold, a solution. ``mutation``: a right answer with one thing changed, and other wrong ones.
``wrapper``: a right answer in a form that must not matter. ``hostile``: texts made to hang or to crash a grader."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """A completion and the score it must get; ``what`` describes it. ``tokens`` is its length."""

    what: str
    text: str
    score: float
    tokens: int = 0
    family: Family = "mutation"


def known_answers(kind: str, columns: Mapping[str, Any], args: Mapping[str, Any]) -> list[KnownAnswer]:
    """Right and wrong completions for one row; empty if the kind does not apply to it or its gold is bad."""
    found = KINDS[kind].gold(columns)
    if found is None:
        return []
    gold, row = found
    maker = _MAKERS.get(kind)
    made = maker(gold, row, args) if maker else _own_answer(kind, gold)
    # whatever scores 1 is a right answer, unless it is in a form that is looked at for itself
    made = [replace(p, family="right") if p.score == 1 and p.family == "mutation" else p for p in made]
    return [_thought(p) for p in made] if args.get("thinking") else made


def hostile(kind: str, columns: Mapping[str, Any], args: Mapping[str, Any]) -> list[KnownAnswer]:
    """Texts that must score 0 in bounded time, whatever the row's gold; none for kinds that do not read text."""
    if KINDS[kind].gold(columns) is None or kind in ("soft_overlong", "repetition", "cosine"):
        return []
    n = HOSTILE
    texts = {
        "NULs": "\0" * n,
        "lone surrogates": "\ud800" * n,
        "digits without end": "#### " + "9" * n + " <answer>" + "9" * n + "</answer> \\boxed{" + "9" * n + "}",
        "opening brackets": "(" * n + "\\boxed{" + "(" * n,
        "boxes inside boxes": "\\boxed{" * (n // 7),
        "fractions inside fractions": "\\boxed{" + "\\frac{1}{" * (n // 20) + "2" + "}" * (n // 20) + "}",
        "towers of powers": "#### 9**9**9**9 <answer>9**9**9**9</answer> \\boxed{9^{9^{9^{9}}}}",
        "factorials of factorials": "#### 9!!!! <answer>9!!!!</answer> \\boxed{((((9!)!)!)!)!}",
        "tags without end": "<answer>" * (n // 8) + "<think>" * (n // 7),
        "fences without end": "```python\n" * (n // 10),
        "commas": "#### " + "1," * (n // 2) + " \\boxed{" + "1," * (n // 2) + "}",
        "white space": " \n\t" * (n // 3),
        "not a number": "#### nan <answer>inf</answer> \\boxed{nan}",
        "marks that turn the text around": "#### \u202e27 <answer>\u202e27</answer> \\boxed{\u202e27}\u202e",
    }
    made = [KnownAnswer(what, text, 0.0, family="hostile") for what, text in texts.items()]
    return [_thought(p) for p in made] if args.get("thinking") else made


def _thought(probe: KnownAnswer) -> KnownAnswer:
    return replace(probe, text="so</think>" + probe.text)


def _own_answer(kind: str, gold: Any) -> Iterator[KnownAnswer]:
    """Known answers for any kind that can write an answer from its gold."""
    answer = KINDS[kind].self_answer
    if answer is None or KINDS[kind].row_problem(gold, {}):
        return
    yield KnownAnswer("the gold itself", answer(gold), 1.0)
    yield KnownAnswer("nothing", "", 0.0)
    yield KnownAnswer("the gold inside an unfinished thought", f"<think>{answer(gold)}", 0.0)


def _puzzle_answers(gold: Any, row: Mapping[str, Any]) -> Iterator[KnownAnswer]:
    """Answers around the gold of ``reasoning_gym``; another number is known to be wrong where answers are compared."""
    puzzle = reasoning.read_puzzle(row.get("puzzle"))
    if isinstance(puzzle, str) or reasoning.row_problem(gold, row):
        return
    right = reasoning.self_answer(gold)
    yield KnownAnswer("the gold itself", right, 1.0)
    yield KnownAnswer("the gold itself after a finished thought", f"<think><answer>x</answer></think>{right}", 1.0)
    yield KnownAnswer("with white space", f"<answer>\n {gold} </answer>\n", 1.0, family="wrapper")
    yield KnownAnswer("the gold without its tags", str(gold), 0.0)
    yield KnownAnswer("the gold inside an unfinished thought", f"<think>{right}", 0.0)
    yield KnownAnswer("another answer after the gold", f"{right} or rather <answer>no idea</answer>", 0.0)
    yield KnownAnswer("nothing", "", 0.0)
    value = reasoning.number(gold)
    if value is None or not reasoning.compared(puzzle.task):
        return
    yield KnownAnswer("the gold + 1", f"<answer>{_decimal(value + 1)}</answer>", 0.0)
    yield KnownAnswer("the gold or another number", f"<answer>{gold} or {_decimal(value + 1)}</answer>", 0.0)
    if value:
        yield KnownAnswer("the gold with the other sign", f"<answer>{_decimal(-value)}</answer>", 0.0)
        yield KnownAnswer("the gold with one digit changed", f"<answer>{_other_digit(value)}</answer>", 0.0)
    if re.fullmatch(r"[-+]?[0-9]+", gold):
        yield KnownAnswer("with trailing zeros", f"<answer>{gold}.00</answer>", 1.0, family="wrapper")


def _number_answers(kind: str, gold: Any) -> Iterator[KnownAnswer]:
    value = parse_gold(gold)
    if value is None:
        return
    mark = "#### " if kind == "gsm8k" else ""
    right = (gsm8k if kind == "gsm8k" else arithmetic).self_answer(gold)
    yield KnownAnswer("the gold itself", right, 1.0)
    yield KnownAnswer("the gold itself after a finished thought", f"<think>{mark}{value + 1}</think>{right}", 1.0)
    yield KnownAnswer("the gold + 1", f"{mark}{_decimal(value + 1)}", 0.0)
    if value:
        yield KnownAnswer("the gold with the other sign", f"{mark}{_decimal(-value)}", 0.0)
        yield KnownAnswer("ten times the gold", f"{mark}{_decimal(value * 10)}", 0.0)
        yield KnownAnswer("the gold with one digit changed", f"{mark}{_other_digit(value)}", 0.0)
    yield KnownAnswer("the gold or another number", f"{mark}{_decimal(value)} or {_decimal(value + 1)}", 0.0)
    yield KnownAnswer("another number or the gold", f"{mark}{_decimal(value + 1)} or {_decimal(value)}", 0.0)
    yield KnownAnswer("the gold inside an unfinished thought", f"<think>{right}", 0.0)
    yield KnownAnswer("nothing", "", 0.0)
    text = right.rpartition("#### ")[2]
    for what, form in _wrapped(text):
        yield KnownAnswer(what, f"{mark}{form}", 1.0, family="wrapper")


def _wrapped(text: str) -> Iterator[tuple[str, str]]:
    """A number in forms that must not matter."""
    yield "with white space", f"  {text} \n"
    yield "between dollars", f"${text}$"
    yield "in a box", f"\\boxed{{{text}}}"
    yield "in bold", f"**{text}**"
    yield "with a full stop", f"{text}."
    if re.fullmatch(r"[-+]?[0-9]+", text):
        yield "with trailing zeros", f"{text}.00"
    elif re.fullmatch(r"[-+]?[0-9]*\.[0-9]+", text):
        yield "with trailing zeros", f"{text}00"


def _other_digit(value: Fraction) -> str:
    """
    >>> _other_digit(Fraction(72)), _other_digit(Fraction(-5, 2))
    ('82', '-3.5')
    """
    text = _decimal(value)
    # 9 becomes 8: a carry would change two digits.
    at = next(i for i, ch in enumerate(text) if ch.isdigit() and ch != "0")
    return f"{text[:at]}{(int(text[at]) + 1) if text[at] != '9' else 8}{text[at + 1 :]}"


FORMS = ("{}", "#### {}", "\\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.")
"""How an answer may be written for a function of unknown taste."""


def changed(value: Fraction, *, form: str) -> list[str]:
    """A number in a form, and then the same with one thing changed.

    >>> changed(Fraction(72), form="#### {}")
    ['#### 72', '#### 73', '#### -72', '#### 720', '#### 82', '#### 72 or 73']
    """
    made = [_decimal(value), _decimal(value + 1)]
    if value:
        made += [_decimal(-value), _decimal(value * 10), _other_digit(value)]
    return [form.format(text) for text in dict.fromkeys([*made, f"{made[0]} or {made[1]}"])]


def _math_answers(gold: Any, *, boxes: bool) -> Iterator[KnownAnswer]:
    r"""Answers around the gold of ``math``.

    >>> [p.text for p in _math_answers("[1,2)", boxes=True) if p.what in ("the ends exchanged", "another kind of end")]
    ['\\boxed{[2,1)}', '\\boxed{(1,2]}']
    """
    right = boxed(gold)
    inner = right[len("\\boxed{") : -1]
    yield KnownAnswer("the gold itself", right, 1.0)
    yield KnownAnswer("the gold itself after another answer", f"\\boxed{{0}} no: {right}", 1.0)
    yield KnownAnswer("the gold itself after a finished thought", f"<think>\\boxed{{0}}</think>{right}", 1.0)
    yield KnownAnswer("with white space", f"\\boxed{{  {inner} }}\n", 1.0, family="wrapper")
    yield KnownAnswer("between dollars", f"${right}$", 1.0, family="wrapper")
    yield KnownAnswer("dollars in the box", f"\\boxed{{${inner.strip('$')}$}}", 1.0, family="wrapper")
    yield KnownAnswer("the gold inside an unfinished thought", f"<think>{right}", 0.0)
    yield KnownAnswer("another answer after the gold", f"{right} or rather \\boxed{{123456789}}", 0.0)
    yield KnownAnswer("the gold or another number", f"\\boxed{{{inner} \\text{{ or }} 123456789}}", 0.0)
    yield KnownAnswer("nothing", "", 0.0)
    yield KnownAnswer("an empty box", "\\boxed{}", 0.0)
    if boxes:
        yield KnownAnswer("the gold without a box", inner, 0.0)
    # A comma may separate thousands or items: what a changed value would be is not clear then.
    value = parse_gold(inner) if re.fullmatch(r"[-+0-9.,/ ]+", inner) else None
    if value is not None and "," not in inner:
        yield KnownAnswer("the gold + 1", f"\\boxed{{{_decimal(value + 1)}}}", 0.0)
        if value:
            yield KnownAnswer("the gold with the other sign", f"\\boxed{{{_decimal(-value)}}}", 0.0)
            yield KnownAnswer("ten times the gold", f"\\boxed{{{_decimal(value * 10)}}}", 0.0)
            yield KnownAnswer("the gold with one digit changed", f"\\boxed{{{_other_digit(value)}}}", 0.0)
        if re.fullmatch(r"[-+]?[0-9]+", inner):
            yield KnownAnswer("with trailing zeros", f"\\boxed{{{inner}.00}}", 1.0, family="wrapper")
    pair = re.fullmatch(r"([(\[])\s*([-+]?[0-9]+)\s*,\s*([-+]?[0-9]+)\s*([)\]])", inner)
    if pair and pair[2] != pair[3]:
        left, a, b, end = pair.groups()
        yield KnownAnswer("the ends exchanged", f"\\boxed{{{left}{b},{a}{end}}}", 0.0)
        ends = ("[", ")"), ("(", "]")
        if (left, end) in ends:
            other = ends[1 - ends.index((left, end))]
            yield KnownAnswer("another kind of end", f"\\boxed{{{other[0]}{a},{b}{other[1]}}}", 0.0)


def _length_answers(limits: Mapping[str, Any]) -> Iterator[KnownAnswer]:
    """Completions at the corners of ``soft_overlong``'s penalty: before it, where it begins, half way, full, beyond."""
    most, cache = limits["max_completion_len"], limits["soft_punish_cache"]
    for n in (0, most - cache, most - cache // 2, most, most + 1):
        yield KnownAnswer(f"{n} tokens", "x", length.soft_overlong(n, **limits), n)


def _code_answers(kind: str, gold: Any, row: Mapping[str, Any]) -> Iterator[KnownAnswer]:
    for what, text, score in code_rows.known_answers(kind, gold, row):
        yield KnownAnswer(what, text, score)


def _repetition_answers(size: int, most: float) -> Iterator[KnownAnswer]:
    """Made completions consist of one token again and again: of n - size + 1 n-grams one is new."""
    for n in (0, 1, size, size + 1, size + 9):
        grams = n - size + 1
        share = 1 - 1 / grams if grams > 1 else 0.0
        yield KnownAnswer(f"{n} times the same token", "x", -most * share if share else 0.0, n)


def _decimal(value: Fraction) -> str:
    """A terminating decimal if there is one, else a fraction.

    >>> _decimal(Fraction(5, 2)), _decimal(Fraction(1, 3)), _decimal(Fraction(-7))
    ('2.5', '1/3', '-7')
    """
    for digits in range(13):
        scaled = value * 10**digits
        if scaled.denominator == 1:
            text = f"{abs(int(scaled)):0{digits + 1}d}"
            sign = "-" if value < 0 else ""
            return sign + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)
    return str(value)


def _countdown_answers(puzzle: Any, *, require_all: bool) -> Iterator[KnownAnswer]:
    if isinstance(puzzle, str):
        return
    given, target = puzzle
    numbers = list(given.elements())
    # The search grows fast with the numbers.
    solution = solve(numbers, target) if len(numbers) <= SOLVABLE and target.denominator == 1 else None
    if solution is not None:
        yield KnownAnswer("a solution", f"<answer>{solution}</answer>", 1.0)
        yield KnownAnswer("a solution with white space", f"<answer> {solution} </answer>\n", 1.0, family="wrapper")
        yield KnownAnswer("a solution without its tags", solution, 0.0)
        yield KnownAnswer("a solution inside an unfinished thought", f"<think><answer>{solution}</answer>", 0.0)
        yield KnownAnswer("a solution with an equals sign", f"<answer>{solution} = {target}</answer>", 0.0)
        yield KnownAnswer(
            "a solution plus a number twice", f"<answer>{solution}+{numbers[0]}-{numbers[0]}</answer>", 0.0
        )
    if target not in numbers:
        yield KnownAnswer("the target alone", f"<answer>{target}</answer>", 0.0)
    yield KnownAnswer("a power that never ends", "<answer>9**9**9**9</answer>", 0.0)
    yield KnownAnswer("nothing", "", 0.0)
    if require_all and len(numbers) > 1:
        yield KnownAnswer("one number alone", f"<answer>{numbers[0]}</answer>", 0.0)


def solve(numbers: list[int], target: Fraction) -> str | None:
    """An expression that uses every number once and makes the target; None when there is none.

    >>> solve([8, 2, 1], Fraction(15))
    '((8*2)-1)'
    >>> solve([1, 1], Fraction(5)) is None
    True
    """
    return _search([(Fraction(n), str(n)) for n in numbers], Fraction(target))


def _search(pool: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    """An expression of all numbers of ``pool`` that equals ``target``: combines any two, then searches the rest."""
    if len(pool) == 1:
        return pool[0][1] if pool[0][0] == target else None
    for i, j in itertools.permutations(range(len(pool)), 2):
        rest = [entry for k, entry in enumerate(pool) if k not in (i, j)]
        for result in _results(pool[i], pool[j], both_ways=i < j):
            if (found := _search([result, *rest], target)) is not None:
                return found
    return None


def _results(
    left: tuple[Fraction, str], right: tuple[Fraction, str], *, both_ways: bool
) -> Iterator[tuple[Fraction, str]]:
    """What two numbers make. A sum or product is the same both ways, so the caller asks for it in one order only."""
    (a, one), (b, other) = left, right
    yield a - b, f"({one}-{other})"
    if both_ways:
        yield a + b, f"({one}+{other})"
        yield a * b, f"({one}*{other})"
    if b:
        yield a / b, f"({one}/{other})"


def _format_answers(template: str, prefilled: str) -> Iterator[KnownAnswer]:
    parsed = layout.parse_template(template)
    parts = [piece for tag, filled in zip(parsed.tags, parsed.filled, strict=False) for piece in ("x" * filled, tag)]
    full = "".join(parts) + "x" * parsed.filled[-1]
    # The prompt's part of the reply, without white space, as ``full`` has none.
    opened = "".join(prefilled.split())
    if not full.startswith(opened):
        return
    full = full[len(opened) :]
    yield KnownAnswer("the layout asked for", full, 1.0)
    yield KnownAnswer("the layout twice", full + full, 0.0)
    for tag in parsed.tags:
        if tag in full:
            yield KnownAnswer(f"without {tag}", full.replace(tag, ""), 0.0)
    if not parsed.filled[-1]:
        yield KnownAnswer("text after the last tag", full + " so", 0.0)
    if (upper := full.upper()) != full:
        yield KnownAnswer("the tags in capitals", upper, 0.0)
    yield KnownAnswer("plain text", "x", 0.0)
    if "\n" in full or "><" in full:
        spaced = full.replace("><", ">\n\n<")
        yield KnownAnswer("with white space between the blocks", f"\n{spaced}\n", 1.0, family="wrapper")


_MAKERS: Mapping[str, Callable[[Any, Mapping[str, Any], Mapping[str, Any]], Iterable[KnownAnswer]]] = {
    "gsm8k": lambda gold, row, args: _number_answers("gsm8k", gold),
    "arithmetic": lambda gold, row, args: _number_answers("arithmetic", gold),
    "countdown": lambda gold, row, args: _countdown_answers(
        countdown.parse_puzzle(gold, **row), require_all=args.get("require_all", True)
    ),
    "format": lambda gold, row, args: _format_answers(
        args.get("template", layout.THINK_ANSWER), args.get("prefilled", "")
    ),
    "math": lambda gold, row, args: _math_answers(gold, boxes=args.get("require_boxed", True)),
    "code_stdin": lambda gold, row, args: _code_answers("code_stdin", gold, row),
    "code_func": lambda gold, row, args: _code_answers("code_func", gold, row),
    "reasoning_gym": lambda gold, row, args: _puzzle_answers(gold, row),
    "soft_overlong": lambda gold, row, args: _length_answers(
        {name: args[name] for name in ("max_completion_len", "soft_punish_cache")}
    ),
    "repetition": lambda gold, row, args: _repetition_answers(
        args.get("ngram_size", 3), abs(args.get("max_penalty", -1.0))
    ),
}
"""What is made of a gold, its row and the reward's arguments; the other kinds are tried with their own gold alone."""
