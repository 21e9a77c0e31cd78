"""Built-in reward ``reasoning_gym``: grades problems of the reasoning-gym package 1 or 0.

Not all of the package's graders can be used: some execute what the model wrote (``eval``, sympy's parser), some give
anything full score, and most give partial credit to a text that merely contains the answer. Therefore:

* most tasks have one right answer, which is compared with the gold (``same``): numbers exactly, lists item by item,
  text without regard to white space;
* tasks whose package graders execute text have graders here (``OURS``);
* tasks with many right answers (``PACKAGE``) are judged by the package's grader in a killable process, and only a full
  score counts.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from ...utils.installing import install_extra
from ..isolation.tasks import TaskLimits, TaskOutcome, TaskPool
from ..numbers import read_digits
from ..thinking import after_thinking
from ..verdict import Verdict, bad_gold, no_answer, right_or_wrong
from . import countdown

EXTRA = "reasoning-gym"
LONGEST = 20_000  # characters of an answer that is read
DEEPEST = 100  # nesting of lists and objects that are compared item by item
LIMITS = TaskLimits(cpu_s=3.0, memory_mb=1024, wall_s=120.0, calls=500, growth_mb=256)

EXPRESSION = frozenset({"countdown", "puzzle24"})
FORMULA = frozenset({"polynomial_multiplication", "simple_integration", "intermediate_integration"})
ONE_OF = frozenset({"n_queens"})
ROUNDED = frozenset({"coin_flip"})  # the package accepts any value within 1e-4, so 0 for every small probability
COMPLEX = frozenset({"complex_arithmetic"})  # the package gives nan full score
OURS = EXPRESSION | FORMULA | ONE_OF | ROUNDED | COMPLEX | {
    "binary_matrix", "bitwise_arithmetic", "game_of_life_halting", "number_sorting", "spiral_matrix",
    "string_insertion",
}  # fmt: skip
"""Tasks graded here because their package graders execute text (``eval`` or sympy's parser) or give full score to wrong
answers: any answer in game_of_life_halting, nan in complex_arithmetic, numbers off by one in number_sorting. Those in
no other set are compared with the gold like the rest."""

PACKAGE = frozenset({
    "advanced_geometry", "codeio", "cryptarithm", "decimal_arithmetic",
    "fraction_simplification", "graph_color", "group_anagrams", "jugs", "kakurasu", "knight_swap", "knights_knaves",
    "palindrome_generation", "palindrome_partitioning", "polynomial_equations", "pool_matrix", "power_function",
    "prime_factorization", "propositional_logic", "quantum_lock", "rubiks_cube", "shortest_path", "sokoban",
    "time_intervals", "tower_of_hanoi", "word_ladder",
})  # fmt: skip
"""Tasks with many right answers or a tolerance, judged by the package's graders, none of which executes text."""

_MOVE = "[A-Ca-c]"
_SAID = r"\w+ is an? \w+"
_DECIMAL = r"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
SHAPES = {
    name: re.compile(shape)
    for name, shape in {
        "fraction_simplification": r"\$? ?(?:\\d?frac ?\{-?\d+\} ?\{-?\d+\}|-?\d+ ?/ ?-?\d+) ?\$?",
        "kakurasu": r"[01 ]+",
        "knights_knaves": rf"{_SAID}(?:(?:, and|,| and) {_SAID})*\.?",
        "polynomial_equations": rf"{_DECIMAL}(?: ?, ?{_DECIMAL})*",
        "quantum_lock": rf"{_MOVE}(?: ?(?:→|->|,)? ?{_MOVE})*",
        "sokoban": r"[UDLRudlr]+",
        "time_intervals": r"-?\d+(?: days?)?|(?:-?\d+ days?, ?)?\d+:\d+(?::\d+(?:\.\d+)?)?",
    }.items()
}
"""Required form of the answers to some of ``PACKAGE``, with white space collapsed. Their graders search a text for
something readable, and would find it in "A or B"."""

CASELESS = frozenset({
    "calendar_arithmetic", "color_cube_rotation", "dice", "family_relationships", "figlet_font", "letter_jumble",
    "needle_haystack", "sentence_reordering", "spell_backward", "syllogism", "tsumego", "zebra_puzzles",
})  # fmt: skip
"""Tasks whose answers are compared case-insensitively, as the package does."""

# A sign, then a hexadecimal number, or a decimal one with commas and an exponent.
_NUMBER = re.compile(r"([+-]?)(?:0[xX]([0-9a-fA-F]{1,400})|(\d[\d,]*(?:\.\d*)?(?:[eE][+-]?\d{1,4})?))")
# A real part, which no i or j follows, and an imaginary one; either may be missing.
_COMPLEX = re.compile(r"([+-]?\d[\d.]*(?![\d.]*[ij]))?(?:([+-]?(?:\d[\d.]*)?)\*?[ij])?")
_RATIO = re.compile(r"([+-]?\d{1,400})\s*/\s*(\d{1,400})")


@dataclass(frozen=True, slots=True)
class Puzzle:
    """A row's description of its problem."""

    task: str
    config: Mapping[str, Any]
    metadata: Any


@dataclass(frozen=True, slots=True)
class _ForWorker:
    """An answer that a worker process has to judge."""

    answer: str
    payload: dict[str, Any]


def grade(completion: str, gold: Any, *, puzzle: Any = None, thinking: bool = False) -> Verdict:
    """Scores 1 if the last ``<answer>…</answer>`` is right for the problem that ``puzzle`` describes, else 0.

    ``puzzle`` is the JSON that ``trew data prepare reasoning-gym:NAME`` writes. An answer whose grading exceeds its CPU
    time or memory scores 0. Never raises for anything that a model can write.

    >>> grade("<answer> 1,214.0 </answer>", "1214", puzzle='{"task": "chain_sum"}').score
    1.0
    >>> grade("It is 1214.", "1214", puzzle='{"task": "chain_sum"}').status
    'no_answer'
    """
    return grade_many([(completion, gold, {"puzzle": puzzle, "thinking": thinking})])[0]


def grade_many(cases: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
    """Grades (completion, gold, arguments); returns verdicts in order. Cases that need a worker run side by side."""
    found = [_here(completion, gold, **arguments) for completion, gold, arguments in cases]
    # All open cases go to the workers in one batch; the verdicts are then put back into the cases' order.
    decided = iter(_decided([case for case in found if isinstance(case, _ForWorker)]))
    return [next(decided) if isinstance(case, _ForWorker) else case for case in found]


def _decided(cases: list[_ForWorker]) -> list[Verdict]:
    """Decides ``cases`` with the package; each is a ``sandbox_error`` if it is not installed."""
    if not cases:
        return []
    if not package_is_there():
        why = f"this task is judged by the reasoning-gym package: {install_extra(EXTRA)}"
        return [Verdict(None, "sandbox_error", None, why) for _ in cases]
    outcomes = POOL.run_many([case.payload for case in cases])
    return [_judged(case, outcome) for case, outcome in zip(cases, outcomes, strict=True)]


def found_in(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Returns a row's gold and puzzle; None if the row has no puzzle."""
    puzzle = columns.get("puzzle")
    return None if puzzle is None else (columns.get("gold"), {"puzzle": puzzle})


def self_answer(gold: Any) -> str:
    """Writes a completion that answers with the gold."""
    return f"<answer>{gold}</answer>"


def row_problem(gold: Any, row: Mapping[str, Any]) -> str:
    """Says what is wrong with a row before anything is graded; empty if nothing is."""
    puzzle = read_puzzle(row.get("puzzle"))
    if isinstance(puzzle, str):
        return puzzle
    if not isinstance(gold, str):
        return f"the gold answer must be text, got {type(gold).__name__}"
    if puzzle.task in PACKAGE | FORMULA and not package_is_there():
        return f"reasoning-gym's {puzzle.task} is judged by the package: {install_extra(EXTRA)}"
    return ""


def compared(task: str) -> bool:
    """Returns whether a task's answers are compared with the gold alone, so that any other value is wrong.

    >>> compared("chain_sum"), compared("countdown"), compared("shortest_path")
    (True, False, False)
    """
    return task not in EXPRESSION | ONE_OF | ROUNDED | COMPLEX | PACKAGE | FORMULA


# Cached: all completions of a group carry the same text.
@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Puzzle | str:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("task"), str):
        return "puzzle must be a JSON object with the task's name"
    config = facts.get("config")
    return Puzzle(facts["task"], config if isinstance(config, dict) else {}, facts.get("metadata"))


def read_puzzle(value: Any) -> Puzzle | str:
    """Parses a row's ``puzzle`` column; returns a message if it is malformed.

    >>> read_puzzle('{"task": "gcd"}'), read_puzzle(None)
    (Puzzle(task='gcd', config={}, metadata=None), 'puzzle must be JSON text, got NoneType')
    """
    return _parsed(value) if isinstance(value, str) else f"puzzle must be JSON text, got {type(value).__name__}"


def _here(completion: str, gold: Any, *, puzzle: Any = None, thinking: bool = False) -> Verdict | _ForWorker:
    """Returns the verdict if this process can give it, else an ``_ForWorker`` for a worker."""
    about = read_puzzle(puzzle)
    if isinstance(about, str):
        return bad_gold(about)
    if not isinstance(gold, str):
        return bad_gold(f"the gold answer must be text, got {type(gold).__name__}")
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return no_answer("the thought was not finished")
    answer = countdown.extract(text)
    if answer is None:
        return no_answer("no <answer>…</answer>")
    if not answer and gold.strip():
        return no_answer("the answer is empty")
    if len(answer) > LONGEST:
        return right_or_wrong(False, extracted=answer, detail=f"the answer is longer than {LONGEST} characters")
    if not gold.strip():  # the right answer is empty, possibly in quotes: "there is no real solution"
        return right_or_wrong(not answer.strip("\"' "), extracted=answer)
    return _by_task(answer, gold, about)


def _by_task(answer: str, gold: str, about: Puzzle) -> Verdict | _ForWorker:
    """Grades a non-empty answer by the rule of its task."""
    if about.task in ROUNDED:
        return right_or_wrong(_close(answer, gold), extracted=answer)
    if about.task in COMPLEX:
        wanted = complex_number(gold)
        return right_or_wrong(wanted is not None and complex_number(answer) == wanted, extracted=answer)
    if about.task in EXPRESSION:
        return _expression(answer, about)
    if about.task in ONE_OF:
        return right_or_wrong(any(same(answer, valid) for valid in _valid_answers(gold, about)), extracted=answer)
    shape = SHAPES.get(about.task)
    if shape is not None and not shape.fullmatch(" ".join(answer.split())):
        return right_or_wrong(False, extracted=answer, detail="is not in the form that the problem asks for")
    if about.task in PACKAGE | FORMULA:
        return _ForWorker(answer, _payload(answer, gold, about))
    return right_or_wrong(same(answer, gold, caseless=about.task in CASELESS), extracted=answer)


def _valid_answers(gold: str, about: Puzzle) -> list[str]:
    listed = about.metadata.get("valid_answers") if isinstance(about.metadata, dict) else None
    return [str(valid) for valid in listed] if isinstance(listed, list) else [gold]


def _payload(answer: str, gold: str, puzzle: Puzzle) -> dict[str, Any]:
    how = "formula" if puzzle.task in FORMULA else "package"
    return {
        "how": how, "task": puzzle.task, "config": dict(puzzle.config), "metadata": puzzle.metadata,
        "answer": answer.encode("utf-8", "replace").decode(), "gold": gold,
    }  # fmt: skip


def _expression(answer: str, puzzle: Puzzle) -> Verdict:
    """Grades countdown and puzzle24 with the built-in ``countdown`` and the problem's numbers."""
    metadata = puzzle.metadata if isinstance(puzzle.metadata, dict) else {}
    target = metadata.get("target", 24 if puzzle.task == "puzzle24" else None)
    return countdown.grade(f"<answer>{answer}</answer>", None, numbers=metadata.get("numbers"), target=target)


def _judged(case: _ForWorker, outcome: TaskOutcome) -> Verdict:
    # Running past CPU or memory is the answer's doing, and wrong; anything else is ours, and not judged.
    if outcome.status in ("cpu", "memory"):
        return right_or_wrong(False, extracted=case.answer, detail=f"not decided within its limit: {outcome.detail}")
    if outcome.status != "done":
        return Verdict(None, "timeout", None, f"the grading process failed twice: {outcome.detail}")
    value = outcome.value
    return right_or_wrong(bool(value.get("right")), extracted=case.answer, detail=str(value.get("error", "")))


# ---------------------------------------------------------------------------------------------------------- comparing


def same(answer: str, gold: str, *, caseless: bool = False) -> bool:
    """Returns whether two answers are the same: numbers by value, JSON lists and objects item by item, other text
    without regard to white space at line ends, between words and around commas.

    >>> same("+1,214.0", "1214"), same("0x3d", "61"), same("2/4", "1/2"), same("[ 1.50, 'a' ]", "['1.5', 'a']")
    (True, True, True, True)
    >>> same("a ,b\\n", "a, b"), same("A", "a"), same("A", "a", caseless=True), same("12 or 13", "12")
    (True, False, True, False)
    """
    # The gold decides how to compare: the model must not choose a laxer way by writing its answer differently.
    wanted = number(gold)
    if wanted is not None:
        return number(answer) == wanted
    if gold.lstrip()[:1] in ("[", "{"):
        theirs, ours = _json(answer), _json(gold)
        if ours is not None:
            return theirs is not None and _alike(theirs, ours)
    left, right = _plain(answer), _plain(gold)
    return left.casefold() == right.casefold() if caseless else left == right


def number(text: str) -> Fraction | None:
    """Parses ``text`` as exactly one number: decimal, hexadecimal or a ratio; None for anything else.

    >>> number(" -1,000.50 "), number("12 eggs"), number("1/0")
    (Fraction(-2001, 2), None, None)
    """
    text = text.strip()
    if ratio := _RATIO.fullmatch(text):
        return Fraction(int(ratio[1]), int(ratio[2])) if int(ratio[2]) else None
    match = _NUMBER.fullmatch(text)
    if match is None or not text.isascii():  # \d in the pattern also matches digits of other scripts
        return None
    value = Fraction(int(match[2], 16)) if match[2] else read_digits(match[3].rstrip("."))
    return None if value is None else -value if match[1] == "-" else value


def complex_number(text: str) -> tuple[Fraction, Fraction] | None:
    """Parses ``a + bi``, where either part may be missing, into real and imaginary part; None for anything else.

    >>> complex_number("8.0 - i") == (8, -1), complex_number("3i") == (0, 3), complex_number("nan")
    (True, True, None)
    """
    match = _COMPLEX.fullmatch("".join(text.split()))
    # Both parts are optional in the pattern: it also matches nothing at all, and two numbers without a sign between.
    if match is None or not text.strip() or (match[1] and match[2] and match[2][0] not in "+-"):
        return None
    real = number(match[1]) if match[1] else Fraction(0)
    part = match[2]
    # "i" and "-i" leave out their 1.
    imaginary = Fraction(0) if part is None else number(part + "1" if part in ("", "+", "-") else part)
    return None if real is None or imaginary is None else (real, imaginary)


def _close(answer: str, gold: str) -> bool:
    """Returns whether ``answer`` is within 1e-4 of ``gold``, and within a hundredth of its value."""
    value, wanted = number(answer), number(gold)
    if value is None or wanted is None:
        return False
    return abs(value - wanted) <= min(Fraction(1, 10_000), abs(wanted) / 100)


def _json(text: str) -> Any:
    """Parses JSON, or the Python list that the package writes instead; numbers stay text. None for anything else, and
    beyond the nesting that any task of the package writes: comparing it would exceed Python's recursion limit."""
    if _depth(text) > DEEPEST:
        return None
    for attempt in (text, text.replace("'", '"')):
        try:
            # Numbers stay text, so that ``number`` compares them exactly instead of as rounded floats.
            return json.loads(attempt, parse_int=str, parse_float=str)
        except (ValueError, RecursionError):
            continue
    return None


def _depth(text: str) -> int:
    """Returns the most brackets open at once, including those inside quotes."""
    steps = (1 if c in "[{" else -1 if c in "]}" else 0 for c in text)
    return max(itertools.accumulate(steps), default=0)


def _alike(answer: Any, gold: Any) -> bool:
    """Compares item by item; a number may be written as text. Recursion is bounded by the gold's depth."""
    if isinstance(gold, list):
        if not isinstance(answer, list) or len(answer) != len(gold):
            return False
        return all(_alike(a, g) for a, g in zip(answer, gold, strict=True))
    if isinstance(gold, dict):
        if not isinstance(answer, dict) or answer.keys() != gold.keys():
            return False
        return all(_alike(answer[k], gold[k]) for k in gold)
    if isinstance(gold, str):
        return isinstance(answer, str) and _same_text(answer, gold)
    return type(answer) is type(gold) and answer == gold


def _same_text(answer: str, gold: str) -> bool:
    value = number(gold)
    return number(answer) == value if value is not None else answer == gold


def _plain(text: str) -> str:
    lines = (" ".join(line.split()) for line in text.strip().splitlines())
    return "\n".join(re.sub(r" ?, ?", ", ", line).strip() for line in lines if line)


# ------------------------------------------------------------------------------------------------------------ workers


POOL = TaskPool(Path(__file__).with_name("reasoning_worker.py"), limits=LIMITS)
"""The grading processes, started on first use."""


def package_is_there() -> bool:
    """Returns whether reasoning-gym can be imported, without importing it."""
    return importlib.util.find_spec("reasoning_gym") is not None
