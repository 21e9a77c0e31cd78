"""Answers whose score is known beforehand, to try a reward on data before anything is trained with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from . import arithmetic, countdown, gsm8k, layout, length
from .builtin import KINDS
from .numbers import parse_gold

SOLVABLE = 5  # numbers of a Countdown row for which a solution is searched


@dataclass(frozen=True, slots=True)
class Probe:
    """A completion and the score it must get; ``what`` says in words what it is. ``tokens`` is its length."""

    what: str
    text: str
    score: float
    tokens: int = 0


def probes(kind: str, columns: Mapping[str, Any], args: Mapping[str, Any]) -> list[Probe]:
    """Right and wrong completions for one row; empty where the kind does not apply to it or its gold is bad."""
    found = KINDS[kind].gold(columns)
    if found is None:
        return []
    gold, row = found
    if kind in ("gsm8k", "arithmetic"):
        made = list(_number_probes(kind, gold))
        return [_thought(p) for p in made] if args.get("thinking") else made
    if kind == "countdown":
        made = list(_countdown_probes(countdown.parse_puzzle(gold, **row), require_all=args.get("require_all", True)))
        return [_thought(p) for p in made] if args.get("thinking") else made
    if kind == "format":
        return list(_format_probes(args.get("template", layout.THINK_ANSWER), args.get("prefilled", "")))
    limits = {name: args[name] for name in ("max_completion_len", "soft_punish_cache")}
    most, cache = limits["max_completion_len"], limits["soft_punish_cache"]
    lengths = (0, most - cache, most - cache // 2, most, most + 1)
    return [Probe(f"{n} tokens", "x", length.soft_overlong(n, **limits), n) for n in lengths]


def _thought(probe: Probe) -> Probe:
    return Probe(probe.what, "so</think>" + probe.text, probe.score)


def _number_probes(kind: str, gold: Any) -> Iterator[Probe]:
    value = parse_gold(gold)
    if value is None:
        return
    mark = "#### " if kind == "gsm8k" else ""
    right = (gsm8k if kind == "gsm8k" else arithmetic).self_answer(gold)
    yield Probe("the gold itself", right, 1.0)
    yield Probe("the gold itself after a finished thought", f"<think>{mark}{value + 1}</think>{right}", 1.0)
    yield Probe("the gold + 1", f"{mark}{_decimal(value + 1)}", 0.0)
    if value:
        yield Probe("the gold with the other sign", f"{mark}{_decimal(-value)}", 0.0)
        yield Probe("ten times the gold", f"{mark}{_decimal(value * 10)}", 0.0)
    yield Probe("the gold or another number", f"{mark}{_decimal(value)} or {_decimal(value + 1)}", 0.0)
    yield Probe("another number or the gold", f"{mark}{_decimal(value + 1)} or {_decimal(value)}", 0.0)
    yield Probe("the gold inside an unfinished thought", f"<think>{right}", 0.0)
    yield Probe("nothing", "", 0.0)


def _decimal(value: Fraction) -> str:
    """A terminating decimal where there is one, else a fraction.

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


def _countdown_probes(puzzle: Any, *, require_all: bool) -> Iterator[Probe]:
    if isinstance(puzzle, str):
        return
    given, target = puzzle
    numbers = list(given.elements())
    solution = solve(numbers, target) if len(numbers) <= SOLVABLE and target.denominator == 1 else None
    if solution is not None:
        yield Probe("a solution", f"<answer>{solution}</answer>", 1.0)
        yield Probe("a solution without its tags", solution, 0.0)
        yield Probe("a solution inside an unfinished thought", f"<think><answer>{solution}</answer>", 0.0)
        yield Probe("a solution with an equals sign", f"<answer>{solution} = {target}</answer>", 0.0)
        yield Probe("a solution plus a number twice", f"<answer>{solution}+{numbers[0]}-{numbers[0]}</answer>", 0.0)
    if target not in numbers:
        yield Probe("the target alone", f"<answer>{target}</answer>", 0.0)
    yield Probe("a power that never ends", "<answer>9**9**9**9</answer>", 0.0)
    yield Probe("nothing", "", 0.0)
    if require_all and len(numbers) > 1:
        yield Probe("one number alone", f"<answer>{numbers[0]}</answer>", 0.0)


def solve(numbers: list[int], target: Fraction) -> str | None:
    """An expression that uses every number once and makes the target; None when there is none.

    >>> solve([8, 2, 1], Fraction(15))
    '((8*2)-1)'
    >>> solve([1, 1], Fraction(5)) is None
    True
    """
    return _search([(Fraction(n), str(n)) for n in numbers], Fraction(target))


def _search(pool: list[tuple[Fraction, str]], target: Fraction) -> str | None:
    if len(pool) == 1:
        return pool[0][1] if pool[0][0] == target else None
    for i, (a, left) in enumerate(pool):
        for j, (b, right) in enumerate(pool):
            if i == j:
                continue
            rest = [entry for k, entry in enumerate(pool) if k not in (i, j)]
            results = [(a - b, f"({left}-{right})")]
            results += [(a + b, f"({left}+{right})"), (a * b, f"({left}*{right})")] if i < j else []
            results += [(a / b, f"({left}/{right})")] if b else []
            for result in results:
                if (found := _search([result, *rest], target)) is not None:
                    return found
    return None


def _format_probes(template: str, prefilled: str) -> Iterator[Probe]:
    parsed = layout.parse_template(template)
    parts = [piece for tag, filled in zip(parsed.tags, parsed.filled, strict=False) for piece in ("x" * filled, tag)]
    full = "".join(parts) + "x" * parsed.filled[-1]
    opened = "".join(prefilled.split())
    if not full.startswith(opened):
        return
    full = full[len(opened) :]
    yield Probe("the layout asked for", full, 1.0)
    yield Probe("the layout twice", full + full, 0.0)
    for tag in parsed.tags:
        if tag in full:
            yield Probe(f"without {tag}", full.replace(tag, ""), 0.0)
    if not parsed.filled[-1]:
        yield Probe("text after the last tag", full + " so", 0.0)
    if (upper := full.upper()) != full:
        yield Probe("the tags in capitals", upper, 0.0)
    yield Probe("plain text", "x", 0.0)
