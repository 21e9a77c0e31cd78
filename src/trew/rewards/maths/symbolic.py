r"""What exact algebra cannot decide, through math-verify. Loaded by a worker (``isolation.tasks``).

It imports nothing of trew, and no text is ever handed to ``sympify``: math-verify's LaTeX grammar alone reads it.

``run({"gold": ..., "answer": ...})`` answers with ``{"equal": bool}`` or ``{"error": why}``.

math-verify compares numbers after rounding (sin 1 is 0.841471 to it). A "yes" therefore has to stand up to a second
look: both sides, decimals taken as the exact numbers they spell, must agree to 50 digits at several places; sides with
several formulas in them, part by part.
"""

from __future__ import annotations

import logging
import re
from typing import Any

POINTS = ((3, 7), (11, 5), (13, 17))  # numerator and denominator of the first variable's value; others follow from it
DIGITS = 50

_WARM = [
    (r"\cot x", r"\frac{\cos x}{\sin x}"),
    (r"\sqrt{3+2\sqrt{2}}", r"1+\sqrt{2}"),
    (r"x \in (1, 2]", r"1 < x \le 2"),
    (r"\begin{pmatrix} \sin x \\ 2 \end{pmatrix}", r"\begin{pmatrix} \sin x \\ 3 \end{pmatrix}"),
    (r"\int_0^1 x dx", r"\sum_{k=1}^{3} k"),
]


def prepare() -> None:
    """Imports math-verify and goes once through its grammar and its comparisons, so that all runners start warm."""
    logging.disable(logging.CRITICAL)
    for gold, answer in _WARM:
        run({"gold": gold, "answer": answer})


def run(payload: dict[str, str]) -> dict[str, Any]:
    """The verdict on one pair of normalised texts."""
    gold = _parsed(payload["gold"])
    if gold is None:
        return {"error": "math-verify cannot read the gold"}
    answer = _parsed(payload["answer"])
    if answer is None:
        return {"equal": False, "why": "math-verify cannot read the answer"}
    from math_verify import verify
    from sympy import S

    # Every half-open interval with its ends in the wrong order, (2, sin 1], is the empty set to sympy.
    if gold == answer == S.EmptySet:
        return {"equal": False, "why": "an interval with nothing in it"}

    if not verify(gold, answer, timeout_seconds=None):
        return {"equal": False}
    if _contradicts_itself(answer):
        return {"equal": False, "why": "its sides are not equal"}
    if _differ(gold, answer):
        return {"equal": False, "why": "equal only after rounding"}
    return {"equal": True}


def _parsed(text: str) -> Any:
    """The text as a sympy object; None if the grammar does not fit all of it."""
    from latex2sympy2_extended import NormalizationConfig, latex2sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from sympy import Basic
    from sympy.matrices import MatrixBase

    plain = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    names = ConversionConfig(interpret_as_mixed_fractions=True, interpret_contains_as_eq=True, lowercase_symbols=False)
    # Symbols are real, unless the text has i or the complex numbers in it.
    real = not re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])|\\C(?![A-Za-z])", text)
    try:
        found = latex2sympy(text, is_real=real, normalization_config=plain, conversion_config=names)
    except MemoryError:
        raise
    except Exception:
        return None
    return found if isinstance(found, (Basic, MatrixBase)) else None


def _differ(gold: Any, answer: Any) -> bool:
    """Whether the two are provably different: formulas by their values, sets, intervals … by what is in them."""
    import sympy

    gold, answer = _worked_out(_unnamed(gold, answer)), _worked_out(_unnamed(answer, gold))
    if all(isinstance(side, sympy.Expr) and not side.has(sympy.MatrixExpr) for side in (gold, answer)):
        return _differ_in_value(gold, answer)
    (left, ordered), (right, ordered_too) = _parts(gold), _parts(answer)
    if not left or not right:
        return False
    if ordered and ordered_too:
        return len(left) != len(right) or any(map(_differ, left, right))
    # In any order each part needs one on the other side that it may equal.
    lonely = (all(_differ(g, a) for a in right) for g in left)
    return any(lonely) or any(all(_differ(g, a) for g in left) for a in right)


def _contradicts_itself(answer: Any) -> bool:
    """Whether an answer says of two numbers that they are equal which are not: sin 1 = 2, of which a side is right."""
    import sympy

    if not isinstance(answer, sympy.Eq) or answer.free_symbols:
        return False
    sides = (answer.lhs, answer.rhs)
    return all(isinstance(side, sympy.Expr) for side in sides) and _differ_in_value(*sides)


def _unnamed(thing: Any, other: Any) -> Any:
    """Of x = 5 or x < 5 the 5, where ``other`` is a relation of the same name, or none."""
    from sympy.core.relational import Relational

    if not isinstance(thing, Relational):
        return thing
    shared = _names(thing) & _names(other) if isinstance(other, Relational) else _names(thing)
    if not shared:
        return thing
    name = min(shared, key=str)
    return thing.rhs if thing.lhs == name else thing.lhs


def _worked_out(thing: Any) -> Any:
    """A product or sum of matrices as one matrix, if sympy can tell."""
    from sympy.matrices import MatrixBase, MatrixExpr

    if isinstance(thing, MatrixBase) or not thing.has(MatrixExpr):
        return thing
    try:
        done = thing.doit()
        return done.as_explicit() if done.is_Matrix else done
    except MemoryError:
        raise
    except Exception:  # sympy's own, of many kinds: then math-verify's word stands
        return thing


def _names(relation: Any) -> set[Any]:
    """The sides of a relation that are a name alone."""
    return {side for side in (relation.lhs, relation.rhs) if side.is_Symbol}


def _parts(thing: Any) -> tuple[list[Any], bool]:
    """What is in a tuple, set, interval, matrix or in joined relations, and whether its order counts; else nothing."""
    import sympy
    from sympy.matrices import MatrixBase

    if isinstance(thing, MatrixBase):
        return list(thing.flat()), True
    if isinstance(thing, sympy.Interval):
        return [thing.start, thing.end], True
    if isinstance(thing, sympy.Expr):
        return ([] if thing.has(sympy.MatrixExpr) else [thing]), True
    if isinstance(thing, (sympy.Tuple, sympy.FiniteSet, sympy.Union, sympy.Complement, sympy.And, sympy.Or)):
        return list(thing.args), isinstance(thing, sympy.Tuple)
    return [], False


def _differ_in_value(gold: Any, answer: Any) -> bool:
    """Whether two formulas have provably different values somewhere."""
    import sympy

    try:
        gold, answer = _exact(gold), _exact(answer)
        names = sorted(gold.free_symbols | answer.free_symbols, key=str)
        # Without variables one place is enough: the value is the same everywhere.
        for above, below in POINTS if names else POINTS[:1]:
            # Rational points, another for each variable: nothing is rounded before N() computes 70 digits.
            point = {name: sympy.Rational(above + 2 * i, below + i) for i, name in enumerate(names)}
            if _far_apart(*(sympy.N(side.subs(point), DIGITS + 20) for side in (gold, answer))):
                return True
    except MemoryError:
        raise
    except Exception:
        return False
    return False


def _far_apart(left: Any, right: Any) -> bool:
    """Whether two numbers of 70 digits differ within the first 50; False if one is no finite number."""
    import sympy

    if not (left.is_number and right.is_number and left.is_finite and right.is_finite):
        return False
    return bool(abs(left - right) > sympy.Float(10, DIGITS) ** -DIGITS * (1 + abs(left) + abs(right)))


def _exact(formula: Any) -> Any:
    """Decimals as the numbers that they spell."""
    import sympy

    return formula.xreplace({f: sympy.Rational(str(f)) for f in formula.atoms(sympy.Float)})
