r"""The built-in reward ``math``: the answer in the last box, compared with the gold exactly where that decides it."""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...utils.installing import install_extra
from ..isolation.tasks import TaskLimits, TaskOutcome, TaskPool
from ..numbers import MAX_DIGITS, parse_gold
from ..thinking import after_thinking
from ..verdict import Verdict, bad_gold, no_answer, right_or_wrong
from . import algebra, compare, extract, units
from .answers import read
from .coordinates import as_points, named_values
from .normalise import MAX_ANSWER, normalise
from .shapes import Answer, AnswerList, Choice, Equation, Matrix, Named, Scalar, Union, Unknown
from .tokens import NAMES, tokenize

EXTRA = "math"
LIMITS = TaskLimits(cpu_s=2.0, memory_mb=512, wall_s=60.0, calls=500, growth_mb=128)
_DEGREE = re.compile(r"\\degree(?![A-Za-z])")
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_LONE = rf"(?:\\(?:{'|'.join(sorted(NAMES | {'pi'}))})(?![A-Za-z])|[A-Za-z0-9])"
_BARE_ARGUMENT = re.compile(rf"(\\frac\s*(?:{_GROUP})?|\\sqrt\s*\[[^\[\]{{}}]*\])\s*({_LONE})")
MAX_BARE = 8  # fractions in each other whose arguments get their braces
POOL = TaskPool(Path(__file__).with_name("symbolic.py"), limits=LIMITS)
"""The processes that math-verify runs in, started when they are first needed."""


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer as read, or the ``problem`` with it."""

    answer: Answer
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Undecided:
    """A verdict that exact algebra leaves to math-verify."""

    extracted: str
    answer: Answer
    gold: Answer


def grade(completion: str, gold: Any, *, require_boxed: bool = True, thinking: bool = False) -> Verdict:
    r"""1 when the completion's answer has the gold's value, else 0.

    The answer is what the last complete ``\boxed{…}`` holds; with ``require_boxed=False`` a completion without a box is
    read as well (``extract.answer``). Numbers, formulas in variables, roots and π, tuples, intervals, sets, matrices,
    equations and words are compared exactly; what is left (identities between functions, sums, integrals) goes to
    math-verify in a separate process. An answer that exceeds its CPU time or memory there scores 0.

    >>> grade(r"so \boxed{\frac{2}{4}}", "0.5").score, grade(r"\boxed{0.33}", r"\frac{1}{3}").score
    (1.0, 0.0)
    >>> grade(r"\boxed{\{2, 1\}}", r"\{1,2\}").score, grade(r"\boxed{7 \text{ or } 8}", "7").score
    (1.0, 0.0)
    >>> grade("7", "7").status
    'no_answer'
    """
    return grade_many([(completion, gold, {"require_boxed": require_boxed, "thinking": thinking})])[0]


def grade_many(cases: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[Verdict]:
    """Grades (completion, gold, arguments), in their order; math-verify decides the hard cases side by side."""
    found = [_guarded(completion, gold, arguments) for completion, gold, arguments in cases]
    decided = iter(_decided([case for case in found if isinstance(case, _Undecided)]))
    return [next(decided) if isinstance(case, _Undecided) else case for case in found]


def _decided(cases: list[_Undecided]) -> list[Verdict]:
    """Decides ``cases`` with math-verify; each is a ``sandbox_error`` if it is not installed."""
    if not cases:
        return []
    if not math_verify_is_there():
        why = f"exact algebra cannot decide this; math-verify can: {install_extra(EXTRA)}"
        return [Verdict(None, "sandbox_error", None, why) for _ in cases]
    payloads = [_texts(case.answer, case.gold) for case in cases]
    return [_judged(case, out) for case, out in zip(cases, POOL.run_many(payloads), strict=True)]


def _guarded(completion: str, gold: Any, arguments: Mapping[str, Any]) -> Verdict | _Undecided:
    """A mistake of ours in reading a text must not end a run: the completion is not judged, and the metrics say so."""
    try:
        return _exactly(completion, gold, **arguments)
    except Exception as error:
        return Verdict(None, "sandbox_error", None, f"the grader failed: {type(error).__name__}: {error!s:.100}")


def _exactly(completion: str, gold: Any, *, require_boxed: bool = True, thinking: bool = False) -> Verdict | _Undecided:
    # The gold first: a broken row is told as such, whatever the model wrote.
    target = read_gold(gold)
    if target.problem:
        return bad_gold(target.problem)
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return no_answer("the thought was not finished")
    written, why = extract.answer(text, require_boxed=require_boxed)
    if written is None:
        return no_answer(why)
    if len(written) > MAX_ANSWER:
        return right_or_wrong(False, extracted=written, detail=f"the answer is longer than {MAX_ANSWER} characters")
    answer = read(normalise(written))
    verdict = compare.same(answer, target.answer)
    if verdict is None:
        return _Undecided(written, answer, target.answer)
    detail = answer.shape.why if isinstance(answer.shape, Unknown) and not verdict else ""
    return right_or_wrong(verdict, extracted=written, detail=detail)


def _texts(answer: Answer, gold: Answer) -> dict[str, str]:
    """What math-verify is asked about. It does not know whose value is whose, so that these are put in order before."""
    return {side: _for_math_verify(text) for side, text in _ordered_texts(answer, gold).items()}


def _for_math_verify(text: str) -> str:
    r"""A formula in the forms that math-verify reads: to it sin 30° is sin 30 radians, and \frac\pi4 is nothing.

    >>> _for_math_verify(r"\frac\pi4 + \sqrt[3]2"), _for_math_verify(r"\frac{\frac12}x")
    ('\\frac{\\pi}{4} + \\sqrt[3]{2}', '\\frac{\\frac{1}{2}}{x}')
    """
    text = _DEGREE.sub(r" {\\frac{\\pi}{180}} ", text)
    for _ in range(MAX_BARE):
        text, count = _BARE_ARGUMENT.subn(r"\1{\2}", text)
        if not count:
            break
    return text


def _ordered_texts(answer: Answer, gold: Answer) -> dict[str, str]:
    if isinstance(gold.shape, (AnswerList, Named, Matrix)) and (named_values(answer.shape) or named_values(gold.shape)):
        return dict(zip(("answer", "gold"), as_points(answer, gold), strict=True))
    return {"gold": _formula(gold), "answer": _formula(answer)}


def _formula(answer: Answer) -> str:
    r"""The text of an answer without the unit behind it, which is compared already.

    >>> _formula(read("\\cot x \\text{ cm}^2")), _formula(read("\\sin 20\\degree"))
    ('\\cot x', '\\sin 20\\degree')
    """
    if isinstance(answer.shape, Choice):
        return _formula(answer.shape.item)
    shape = answer.shape.item.shape if isinstance(answer.shape, Named) else answer.shape
    if isinstance(shape, Scalar) and (number := algebra.rational(shape.value)) is not None:
        return f"\\frac{{{number.numerator}}}{{{number.denominator}}}"  # it knows no repeating decimals
    if not isinstance(shape, Scalar) or not shape.unit:
        return answer.text
    tokens = tokenize(answer.text)
    names = dict(shape.unit)
    # math-verify has no units: it gets the value alone, if the unit stands behind it as a whole.
    cut = next((i for i, t in enumerate(tokens) if t.kind == "unit" and units.name(t.text) in names), len(tokens))
    behind = all(t.kind in ("unit", "number", "mark") for t in tokens[cut:])
    return " ".join(t.text for t in tokens[:cut]) if behind else answer.text


def _judged(case: _Undecided, outcome: TaskOutcome) -> Verdict:
    if outcome.status in ("cpu", "memory"):
        return right_or_wrong(False, extracted=case.extracted, detail=f"not decided within its limit: {outcome.detail}")
    if outcome.status != "done":
        return Verdict(None, "timeout", None, f"the grading process failed twice: {outcome.detail}")
    if "equal" in outcome.value:
        why = outcome.value.get("why", "")
        return right_or_wrong(
            outcome.value["equal"], extracted=case.extracted, detail=f"math-verify{why and ': ' + why}"
        )
    # Only a gold that exact algebra could not read either can be the one that math-verify fails on.
    if isinstance(case.gold.shape, Unknown):
        return bad_gold(outcome.value["error"])
    return right_or_wrong(False, extracted=case.extracted, detail=outcome.value["error"])


def read_gold(gold: Any) -> Gold:
    r"""A gold answer: text (also in a box, between ``$``, or after ``####``), or a number.

    >>> read_gold("(-\\infty, 2)").problem, read_gold(None).problem
    ('', 'the gold answer must be text or a number, got NoneType')
    """
    if isinstance(gold, str):
        return _read_gold(gold)
    exact = parse_gold(gold)
    if exact is not None:
        return _read_gold(str(exact)) if abs(exact) < 10**MAX_DIGITS else _no_gold("the gold answer is too long")
    return _no_gold(f"the gold answer must be text or a number, got {type(gold).__name__}")


def _no_gold(problem: str) -> Gold:
    return Gold(Answer(Unknown(problem)), problem)


@functools.lru_cache(maxsize=4096)
def _read_gold(gold: str) -> Gold:
    # Golds of public data sets are worked solutions, with a box (MATH) or after #### (GSM8K), or the bare answer.
    boxed = extract.last_box(gold[-extract.MAX_READ :])
    text = boxed if boxed is not None else gold.rpartition("####")[2].strip()
    if not text.strip():
        return _no_gold("the gold answer is empty")
    if len(text) > MAX_ANSWER:
        return _no_gold(f"the gold answer is longer than {MAX_ANSWER} characters")
    answer = read(normalise(text))
    if isinstance(answer.shape, Unknown) and not answer.shape.readable and not answer.shape.too_large:
        return Gold(answer, f"the gold answer is no mathematics that can be compared: {answer.shape.why}")
    return Gold(answer)


def self_answer(gold: Any) -> str:
    """A completion that answers with ``gold`` itself."""
    text = str(gold)
    boxed = extract.last_box(text)
    return f"\\boxed{{{text.rpartition('####')[2].strip() if boxed is None else boxed}}}"


def gold_problem(gold: Any) -> str:
    """What is wrong with a gold: unreadable, also to math-verify where exact algebra does not do.

    Raises ConfigError if math-verify is needed and not installed.
    """
    found = read_gold(gold)
    if found.problem or not needs_math_verify(found.answer):
        return found.problem
    if not math_verify_is_there():
        raise ConfigError(
            f"reward 'math': gold {str(gold)!r:.120} cannot be compared by exact algebra alone, and math-verify is not "
            f"installed; {install_extra(EXTRA)}"
        )
    if not isinstance(found.answer.shape, Unknown):
        return ""
    # Against itself: it can then fail only by being unreadable.
    outcome = POOL.run(dict.fromkeys(("gold", "answer"), _for_math_verify(_formula(found.answer))))
    if outcome.status != "done":
        return f"math-verify cannot read it: {outcome.detail}"
    return outcome.value.get("error", "")


def needs_math_verify(answer: Answer) -> bool:
    r"""Whether comparing with this answer may need math-verify: it holds functions, or was not read at all.

    >>> needs_math_verify(read("2\\sqrt{3} x")), needs_math_verify(read("\\sin x"))
    (False, True)
    """
    shape = answer.shape
    if isinstance(shape, Scalar):
        return shape.value.opaque
    if isinstance(shape, Equation):
        return shape.difference.opaque
    if isinstance(shape, (Named, Choice)):
        return needs_math_verify(shape.item)
    if isinstance(shape, Matrix):
        return any(needs_math_verify(item) for row in shape.rows for item in row)
    if isinstance(shape, (AnswerList, Union)):
        return any(map(needs_math_verify, shape.items if isinstance(shape, AnswerList) else shape.parts))
    return isinstance(shape, Unknown)


@functools.lru_cache(maxsize=1)
def math_verify_is_there() -> bool:
    """Whether math-verify is installed (looked up, not imported)."""
    return all(importlib.util.find_spec(name) is not None for name in ("math_verify", "latex2sympy2_extended"))
