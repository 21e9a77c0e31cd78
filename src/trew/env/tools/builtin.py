"""The built-in tools: a calculator, and Python in a sandbox."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from ...errors import SandboxError
from ...rewards.builtin import expression
from ...rewards.sandbox import Boundary, Job, JobLimits, JobOutcome, boundary

SECONDS = 5.0  # of CPU and idle time that a program may use
MOST = 4096  # bytes that come back of what a program prints
_SIGNS = str.maketrans("×·÷−", "**/-")
_DECIMAL = re.compile(r"([0-9]{0,15})\.([0-9]{1,15})")


class ToolError(Exception):
    """A call that a tool refuses, or that came to nothing; the message is for the policy, which reads it behind
    ``error:`` and the tool's name, unless ``whole`` is all that it reads."""

    def __init__(self, message: str, *, whole: str | None = None) -> None:
        self.whole = whole
        super().__init__(message)


def calculator(formula: str) -> str:
    """Computes the exact value of a formula of numbers, + - * / and brackets.

    Args:
        formula: For example (12 + 3.5) * 4
    """
    text = formula.translate(_SIGNS)
    try:
        # A text that is too long is passed on as it is: tokenize refuses it, and no pattern runs over it.
        tokens = expression.tokenize(_DECIMAL.sub(_as_fraction, text) if len(text) <= expression.MAX_LENGTH else text)
        return _number(expression.evaluate(tokens))
    except expression.ExpressionError as error:
        raise ToolError(str(error)) from None


def _as_fraction(match: re.Match[str]) -> str:
    """A decimal number as a fraction of whole numbers in brackets, which is what expressions may contain."""
    whole, decimals = match[1] or "0", match[2]
    return f"({int(whole + decimals)}/{10 ** len(decimals)})"


def _number(value: Fraction) -> str:
    """A decimal number where that is exact, else a fraction.

    >>> _number(Fraction(7, 2)), _number(Fraction(1, 3)), _number(Fraction(-6))
    ('3.5', '1/3', '-6')
    """
    # A fraction has n decimals exactly if its denominator divides 10^n.
    places = next((n for n in range(16) if (10**n) % value.denominator == 0), None)
    if not places:
        return str(value)  # a whole number, or no short decimal one
    digits = f"{abs(value.numerator) * 10**places // value.denominator:0{places + 1}}"
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


@functools.cache
def sandbox() -> Boundary:
    """This machine's sandbox. It is tested where tools are loaded, once for all episodes that are forked from there.
    Raises SandboxError if there is none."""
    return boundary()


def python(code: str) -> str:
    """Runs a Python program in a sandbox and returns what it prints. Every call starts afresh: nothing is kept.

    Args:
        code: The program. Print what you want to know.
    """
    limits = JobLimits(seconds=SECONDS)
    # A policy may write lone surrogates, which UTF-8 alone refuses to encode.
    outcome = sandbox().run(Job("script", (code.encode("utf-8", "surrogatepass"), b""), limits))
    # The sandbox's fault or the machine's (the wall clock), not the policy's: no observation may come of it.
    if outcome.ended == "failed" or outcome.clock:
        raise SandboxError(f"the sandbox did not run a program: {outcome.why}")
    printed = _printed(outcome)
    if outcome.ended == "limit":
        raise ToolError(f"the program {outcome.why}{printed and '; it printed:'}\n{printed}".strip())
    if outcome.status != 0:
        raise ToolError(f"{_last_line(outcome)}{printed and '; before that it printed:'}\n{printed}".strip())
    return printed or "(nothing was printed)"


def _printed(outcome: JobOutcome) -> str:
    said = outcome.parts[0] if outcome.parts else b""
    text = said[:MOST].decode("utf-8", "replace").rstrip("\n")
    return text if len(said) <= MOST else f"{text}\n... [{len(said) - MOST} more bytes]"


def _last_line(outcome: JobOutcome) -> str:
    """The exception that ended a program, from its traceback, with the line that raised it."""
    said = outcome.parts[1].decode("utf-8", "replace").strip() if len(outcome.parts) > 1 else ""
    lines = re.findall(r'^  File "main\.py", line (\d+)', said, re.MULTILINE)
    error = said.rpartition("\n")[2][:500] or f"the program ended with status {outcome.status}"
    return f"line {lines[-1]}: {error}" if lines else error


BUILTIN: Mapping[str, Callable[..., Any]] = {"calculator": calculator, "python": python}
"""The tools that a recipe may name without a file."""
