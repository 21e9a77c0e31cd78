"""Checks shared by tasks whose answers are programs."""

from __future__ import annotations

import ast


def syntax_problem(text: str) -> str:
    """Says why ``text`` is not valid Python; empty if it is. Runs nothing."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return str(error)
    return ""


def timeout_problem(seconds: float) -> list[str]:
    if 0 <= seconds <= 600:
        return []
    return [f"data.args.timeout_s: got {seconds}, accepts a number of seconds from 0 (the reward's default) to 600"]
