r"""What exact algebra cannot decide, through math-verify. Loaded by a worker (``isolation.tasks``).

It imports nothing of trew, and no text is ever handed to ``sympify``: math-verify's LaTeX grammar alone reads it.

``run({"gold": ..., "answer": ...})`` answers with ``{"equal": bool}`` or ``{"error": why}``.

math-verify compares numbers after rounding (sin 1 is 0.841471 to it). A "yes" therefore has to stand up to a second
look: both sides, decimals taken as the exact numbers they spell, must agree to 50 digits at several places.
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

    if not verify(gold, answer, timeout_seconds=None):
        return {"equal": False}
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
    """Whether the two are provably different formulas; False for anything that is no formula (sets, relations)."""
    import sympy

    if not (isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr)):
        return False
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
