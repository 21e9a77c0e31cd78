"""The table of built-in kinds: each one's grader, its settings, and the data columns that hold its gold."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError, RewardError, nearest
from ..columns import GOLD_COLUMNS, first, first_column
from ..maths import extract as math_extract
from ..maths import grade as maths
from ..verdict import Verdict
from . import arithmetic, code, code_rows, countdown, episode, gsm8k, layout, length, reasoning


@dataclass(frozen=True, slots=True)
class Kind:
    """A built-in reward.

    ``settings`` are arguments from the recipe, each with a check that returns what it accepts (empty: the value is
    fine). ``from_row`` are arguments from the data row or the completion. ``gold`` finds the gold and the row's
    arguments in a prompt's columns; None if the row has nothing for this kind. ``self_answer`` writes a completion that
    answers with the gold, to test the gold; None if there is no gold that can be tested. ``grade_many`` grades
    (completion, gold, arguments) side by side, with the same verdicts as ``grade``.
    """

    grade: Callable[..., Verdict]
    settings: Mapping[str, Callable[[Any], str]]
    gold: Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]] | None]
    looks_for: str = ""
    from_row: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    together: Callable[[Mapping[str, Any]], str] = lambda settings: ""
    self_answer: Callable[[Any], str] | None = None
    row_problem: Callable[[Any, Mapping[str, Any]], str] = lambda gold, row: ""
    grade_many: Callable[[Sequence[tuple[str, Any, Mapping[str, Any]]]], list[Verdict]] | None = None


def grade(kind: str, completion: str, gold: Any = None, **args: Any) -> Verdict:
    """Grades one completion with the built-in reward ``kind``.

    Never raises for anything that a model can write. Raises ConfigError for an unknown kind or argument, and for a
    value that an argument does not accept.

    >>> v = grade("gsm8k", "She has 6 * 12 = 72 eggs. #### 72", "72")
    >>> v.score, v.status, v.extracted
    (1.0, 'scored', '72')
    >>> grade("gsm9k", "", "72")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    trew.errors.ConfigError: unknown reward 'gsm9k' (did you mean 'gsm8k'?); built in are gsm8k, ...
    """
    if kind not in KINDS:
        raise ConfigError(unknown_kind(kind))
    problems = argument_problems(kind, args, row=True)
    if problems:
        raise ConfigError([f"reward {kind!r}: {problem}" for problem in problems])
    if not isinstance(completion, str):
        raise RewardError(f"reward {kind!r}: a completion must be text, got {type(completion).__name__}")
    return graded(KINDS[kind], completion, gold, args)


def graded(kind: Kind, completion: str, gold: Any, args: Mapping[str, Any]) -> Verdict:
    """Grades with arguments that have been checked, and records the time taken."""
    start = time.perf_counter()
    verdict = kind.grade(completion, gold, **args)
    return replace(verdict, seconds=time.perf_counter() - start)


def graded_together(kind: Kind, items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
    """Applies :func:`graded` to each of ``items`` (completion, gold, arguments), side by side if the kind can."""
    if kind.grade_many is None or len(items) < 2:
        return [graded(kind, *item) for item in items]
    start = time.perf_counter()
    verdicts = kind.grade_many(items)
    each = (time.perf_counter() - start) / len(items)  # side by side: each item's share of the wall time
    return [v if v.seconds else replace(v, seconds=each) for v in verdicts]


def unknown_kind(name: str) -> str:
    return f"unknown reward {name!r}{nearest(name, KINDS)}; built in are {', '.join(KINDS)}"


def argument_problems(kind: str, args: Mapping[str, Any], *, row: bool = False) -> list[str]:
    """Lists everything wrong with ``args`` of ``kind``; with ``row``, a data row's arguments are allowed and needed."""
    spec = KINDS[kind]
    problems = [*_given_problems(spec, args, row=row), *_needed_problems(spec, args, row=row)]
    # Settings that must agree with each other are compared only when each is fine by itself.
    if not problems and (wrong := spec.together(args)):
        problems.append(wrong)
    return problems


def _given_problems(spec: Kind, args: Mapping[str, Any], *, row: bool) -> Iterator[str]:
    """Yields the problems of the given arguments: unknown, in the wrong place, or of a value that is not accepted."""
    known = (*spec.settings, *(spec.from_row if row else ()))
    for name, value in args.items():
        if name in spec.from_row and not row:
            yield f"args.{name}: comes from the data, one per row; leave it out"
        elif name not in known:
            accepts = f"accepts {', '.join(known)}" if known else "takes no arguments"
            yield f"args.{name}: unknown argument{nearest(name, known)}; {accepts}"
        elif name in spec.settings and (accepts := spec.settings[name](value)):
            yield f"args.{name}: got {value!r}, accepts {accepts}"


def _needed_problems(spec: Kind, args: Mapping[str, Any], *, row: bool) -> Iterator[str]:
    """Yields the arguments that are missing."""
    for name in (*spec.required, *(n for n in spec.from_row if row and n in _COMPLETION_CHECKS)):
        if name not in args:
            yield f"args.{name}: is required"
        elif name in _COMPLETION_CHECKS and (accepts := _COMPLETION_CHECKS[name](args[name])):
            yield f"args.{name}: got {args[name]!r:.80}, accepts {accepts}"


# ---- checks of settings: each returns what it accepts, or an empty text for a value that is fine. A bool is an int in
# Python, so the numeric ones exclude it: ``true`` in a recipe is a mistake there.


def _one_of(*values: str) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        return "" if value in values else ", ".join(map(repr, values)) + nearest(str(value), values)

    return check


def _truth(value: Any) -> str:
    return "" if isinstance(value, bool) else "true or false"


def _text(value: Any) -> str:
    return "" if isinstance(value, str) else "text"


def _whole(least: int) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        fine = isinstance(value, int) and not isinstance(value, bool) and value >= least
        return "" if fine else f"a whole number of at least {least}"

    return check


def _number(value: Any) -> str:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return "" if fine else "a finite number"


def _seconds(value: Any) -> str:
    return "a number of seconds above 0, at most 3600" if _number(value) or not 0 < value <= 3600 else ""


def _token_ids(value: Any) -> str:
    fine = hasattr(value, "__len__") and hasattr(value, "__iter__") and not isinstance(value, (str, bytes, Mapping))
    # numpy's integers are no int of Python.
    return "" if fine and all(not _whole(0)(int(t) if hasattr(t, "item") else t) for t in value) else "token ids"


_COMPLETION_CHECKS: dict[str, Callable[[Any], str]] = {"length": _whole(0), "correct": _truth, "token_ids": _token_ids}
"""Arguments that describe the completion and cannot be left out."""


def _turns_have_tokens(args: Mapping[str, Any]) -> str:
    lengths = args.get("turn_lengths")
    count = len(args.get("token_ids", ()))
    if lengths is None or (not _token_ids(lengths) and sum(lengths) == count):
        return ""
    return f"args.turn_lengths: got {lengths!r:.80}, accepts how many of the {count} token ids are of each turn"


def _template(value: Any) -> str:
    if not isinstance(value, str):
        return f"text such as {layout.THINK_ANSWER!r}"
    try:
        layout.parse_template(value)
    except ValueError as error:
        return f"tags, … and white space, such as {layout.THINK_ANSWER!r}; {error}"
    return ""


def _cache_fits(args: Mapping[str, Any]) -> str:
    if args["soft_punish_cache"] > args["max_completion_len"]:
        return (
            f"args.soft_punish_cache: got {args['soft_punish_cache']}, "
            f"accepts at most max_completion_len = {args['max_completion_len']}"
        )
    return ""


def _begins_a_layout(args: Mapping[str, Any]) -> str:
    template, prefilled = args.get("template", layout.THINK_ANSWER), args.get("prefilled", "")
    if layout.can_begin(prefilled, layout.parse_template(template)):
        return ""
    return (
        f"args.prefilled: got {prefilled!r:.80}, accepts the beginning of a reply with the layout of the template, "
        f"{template!r:.120}: behind anything else every reply would score 0"
    )


def _values_in_order(args: Mapping[str, Any]) -> str:
    for low, high, defaults in (
        ("min_value_wrong", "max_value_wrong", (-1.0, -0.5)),
        ("min_value_correct", "max_value_correct", (0.5, 1.0)),
    ):
        a, b = args.get(low, defaults[0]), args.get(high, defaults[1])
        if a > b:
            return f"args.{low}: got {a}, accepts at most {high} = {b}"
    return ""


def _number_gold(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    gold = first_column(columns)
    return None if gold is None else (gold, {})


def _math_gold(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    gold = first_column(columns)
    # The MATH data set has no answer column: its gold is the box in the worked solution.
    solution = columns.get("solution")
    if gold is None and isinstance(solution, str) and math_extract.last_box(solution) is not None:
        gold = solution
    return None if gold is None else (gold, {})


def _puzzle_gold(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    numbers = first(columns.get("nums"), columns.get("numbers"))
    target = columns.get("target")
    gold = first_column(columns, ("ground_truth",))
    if numbers is None and not isinstance(gold, Mapping) and not str(gold).lstrip().startswith("{"):
        return None
    return (gold if isinstance(gold, (Mapping, str)) else None), {"numbers": numbers, "target": target}


def _puzzle_problem(gold: Any, row: Mapping[str, Any]) -> str:
    puzzle = countdown.parse_puzzle(gold, row.get("numbers"), row.get("target"))
    return puzzle if isinstance(puzzle, str) else ""


_NUMBER_COLUMNS = ", ".join(GOLD_COLUMNS) + " or reward_model.ground_truth"
KINDS: dict[str, Kind] = {
    "gsm8k": Kind(
        grade=gsm8k.grade,
        settings={"mode": _one_of("strict", "flexible"), "thinking": _truth},
        gold=_number_gold,
        looks_for=_NUMBER_COLUMNS,
        self_answer=gsm8k.self_answer,
    ),
    "arithmetic": Kind(
        grade=arithmetic.grade,
        settings={"thinking": _truth},
        gold=_number_gold,
        looks_for=_NUMBER_COLUMNS,
        self_answer=arithmetic.self_answer,
    ),
    "math": Kind(
        grade=maths.grade,
        settings={"require_boxed": _truth, "thinking": _truth},
        gold=_math_gold,
        looks_for=f"{_NUMBER_COLUMNS}, or a solution with a \\boxed{{…}}",
        self_answer=maths.self_answer,
        row_problem=lambda gold, row: maths.gold_problem(gold),
        grade_many=maths.grade_many,
    ),
    "countdown": Kind(
        grade=countdown.grade,
        settings={"require_all": _truth, "thinking": _truth},
        gold=_puzzle_gold,
        looks_for="nums or numbers, and target (or both in ground_truth)",
        from_row=("numbers", "target"),
        row_problem=_puzzle_problem,
    ),
    "format": Kind(
        grade=layout.grade,
        settings={"template": _template, "prefilled": _text},
        gold=lambda columns: (None, {}),
        together=_begins_a_layout,
    ),
    "code_stdin": Kind(
        grade=code.grade_stdin,
        settings={"timeout_s": _seconds, "memory_mb": _whole(16), "thinking": _truth},
        gold=code_rows.stdin_gold,
        looks_for=code.STDIN_COLUMNS,
        from_row=("tests",),
        row_problem=code_rows.stdin_problem,
        grade_many=code.grade_many_stdin,
    ),
    "code_func": Kind(
        grade=code.grade_func,
        settings={"timeout_s": _seconds, "memory_mb": _whole(16), "thinking": _truth},
        gold=code_rows.func_gold,
        looks_for=code.FUNC_COLUMNS,
        from_row=("entry_point", "asserts", "setup"),
        row_problem=code_rows.func_problem,
        grade_many=code.grade_many_func,
    ),
    "reasoning_gym": Kind(
        grade=reasoning.grade,
        settings={"thinking": _truth},
        gold=reasoning.found_in,
        looks_for="gold and puzzle, as trew data prepare reasoning-gym:NAME writes them",
        from_row=("puzzle",),
        self_answer=reasoning.self_answer,
        row_problem=reasoning.row_problem,
        grade_many=reasoning.grade_many,
    ),
    "soft_overlong": Kind(
        grade=length.grade_soft_overlong,
        settings={"max_completion_len": _whole(1), "soft_punish_cache": _whole(1)},
        gold=lambda columns: (None, {}),
        from_row=("length",),
        required=("max_completion_len", "soft_punish_cache"),
        together=_cache_fits,
    ),
    "cosine": Kind(
        grade=length.grade_cosine,
        settings={
            "max_len": _whole(1),
            "min_value_wrong": _number,
            "max_value_wrong": _number,
            "min_value_correct": _number,
            "max_value_correct": _number,
        },
        gold=lambda columns: (None, {}),
        from_row=("length", "correct"),
        required=("max_len",),
        together=_values_in_order,
    ),
    "repetition": Kind(
        grade=length.grade_repetition,
        settings={"ngram_size": _whole(1), "max_penalty": _number},
        gold=lambda columns: (None, {}),
        from_row=("token_ids", "turn_lengths"),
        together=_turns_have_tokens,
    ),
    "environment": Kind(
        grade=episode.grade,
        settings={},
        gold=lambda columns: (None, {}),
        looks_for="an episode (a recipe with environment.name)",
        from_row=("episode",),
    ),
}
"""Every built-in reward by name."""


def gold_problem(name: str, columns: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Says what is wrong with a row's gold for the built-in ``name``; empty if nothing is, or if it does not apply.

    The gold must be readable, and a completion that answers with it, where one can be written, must score 1.
    """
    return gold_problems(name, [columns], settings)[0]


def gold_problems(name: str, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """Applies :func:`gold_problem` to each of ``rows``, side by side if the kind can."""
    kind = KINDS[name]
    found = {number: pair for number, columns in enumerate(rows) if (pair := kind.gold(columns)) is not None}
    # Under the run's settings: what fits other limits says nothing about these.
    checked = [(gold, {**settings, **row}) for gold, row in found.values()]
    # Threads, because checking a row may run programs in the sandbox.
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        wrong = dict(zip(found, threads.map(lambda pair: kind.row_problem(*pair), checked), strict=True))
    # A gold that cannot be read would fail its own answer too, for the same reason.
    readable = {number: pair for number, pair in found.items() if not wrong[number]}
    if kind.self_answer is not None:
        wrong |= _scored_wrong(kind, kind.self_answer, readable, settings)
    return [wrong.get(number, "") for number in range(len(rows))]


def _scored_wrong(
    kind: Kind,
    self_answer: Callable[[Any], str],
    golds: Mapping[int, tuple[Any, Mapping[str, Any]]],
    settings: Mapping[str, Any],
) -> dict[int, str]:
    """By row: what is wrong with a gold against which its own answer does not score 1."""
    # The answer must look like a completion of such a prompt, whose thought is finished first.
    prefix = "</think>" if settings.get("thinking") else ""
    items = [(f"{prefix}{self_answer(gold)}", gold, {**settings, **row}) for gold, row in golds.values()]
    wrong = {}
    for number, item, verdict in zip(golds, items, graded_together(kind, items), strict=True):
        if verdict.score != 1:
            wrong[number] = f"gold {item[1]!r:.120}: {verdict.detail or 'does not score 1 against itself'}"
    return wrong
