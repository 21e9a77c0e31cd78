"""Where a data row keeps what the code kinds need, and whether its reference solution passes its own tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import code


def _nested(columns: Mapping[str, Any]) -> Any:
    """verl's reward_model.ground_truth."""
    model = columns.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _first(columns: Mapping[str, Any], *names: str) -> Any:
    for name in names:
        value = columns.get(name)
        # By length: arrays have no truth value.
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            return value
    return None


def stdin_gold(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """A row's reference program (None without one) and its tests; None if the row has none.

    >>> stdin_gold({"tests": [{"input": "1", "output": "2"}], "solution": "print(2)"})
    ('print(2)', {'tests': [{'input': '1', 'output': '2'}]})
    """
    tests = _first(columns, "tests", "input_output", "test_cases", "ground_truth")
    tests = tests if tests is not None else _nested(columns)
    # Rows with asserts are for code_func, whatever else they have.
    if tests is None or _first(columns, "asserts") is not None:
        return None
    if _first(columns, "entry_point") is not None and isinstance(code.stdin_cases(tests), str):
        return None
    return _reference(columns), {"tests": tests}


def func_gold(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """A row's reference program (None without one) and entry_point, asserts and setup; None if it has no asserts.

    Columns are named as here, as in MBPP (test_list, test_setup_code, test_imports, code) or as in HumanEval (prompt,
    test, entry_point, canonical_solution, whose prompt is the beginning of the program).
    """
    asserts = _first(columns, "asserts", "test_list")
    entry = columns.get("entry_point")
    if asserts is None and entry is not None:  # without entry_point, a column named test may hold anything
        asserts = _first(columns, "test")
    if asserts is None:
        return _nested_func_gold(columns)
    setup, reference = _setup(columns), _reference(columns)
    prompt = columns.get("prompt")
    if isinstance(prompt, str) and isinstance(entry, str) and f"def {entry}(" in prompt:
        # HumanEval: the prompt has imports and helpers that its asserts use, and the head of the function
        setup = "\n".join(part for part in (setup, prompt) if part)
        if isinstance(solution := columns.get("canonical_solution"), str):
            reference = prompt + solution
    return reference, {"entry_point": entry, "asserts": asserts, "setup": setup}


def _nested_func_gold(columns: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """The same from a table, or its JSON, in one column, as verl has it; None if it has no asserts."""
    nested = code._parsed(_first(columns, "ground_truth") or _nested(columns))
    if not isinstance(nested, Mapping) or nested.get("asserts") is None:
        return None
    row = {name: nested.get(name) for name in ("entry_point", "asserts")}
    return _reference(columns), {**row, "setup": nested.get("setup") or ""}


def _setup(columns: Mapping[str, Any]) -> str:
    """What runs before the asserts: the row's setup, behind its imports where MBPP lists them apart."""
    setup = _first(columns, "setup", "test_setup_code") or ""
    imports = columns.get("test_imports")
    if not isinstance(imports, str) and (lines := code._listed(imports)):
        return "\n".join([*map(str, lines), setup])
    return setup


def _reference(columns: Mapping[str, Any]) -> str | None:
    """The row's own solution where it is a whole program; HumanEval's begins in the middle of its prompt."""
    found = _first(columns, "reference", "solution", "code", "canonical_solution")
    # A solution with a box is a worked solution of mathematics.
    if not isinstance(found, str) or "\\boxed" in found:
        return None
    return None if found[:1] in (" ", "\t") else found


def stdin_problem(gold: Any, row: Mapping[str, Any]) -> str:
    """What is wrong with a row's tests, or with its reference, which must pass them."""
    cases = code.stdin_cases(row.get("tests"))
    return cases if isinstance(cases, str) else _reference_problem(code.grade_stdin, gold, row)


def func_problem(gold: Any, row: Mapping[str, Any]) -> str:
    """What is wrong with a row's asserts, or with its reference, which must pass them."""
    tests = code.func_tests(row)
    return tests if isinstance(tests, str) else _reference_problem(code.grade_func, gold, row)


def answer_with(program: str) -> str:
    """A completion that answers with ``program``, fenced so that nothing in it ends the block.

    >>> answer_with("print(1)")
    '```python\\nprint(1)\\n```'
    """
    fence = "```"
    while fence in program:
        fence += "`"
    return f"{fence}python\n{program.rstrip()}\n{fence}"


def _reference_problem(grade: Any, gold: Any, row: Mapping[str, Any]) -> str:
    code.boundary()  # without a sandbox nothing can be graded: say so before a model is loaded
    if not isinstance(gold, str):
        return ""
    thought = "</think>" if row.get("thinking") else ""
    verdict = grade(thought + answer_with(gold), None, **row)
    return "" if verdict.score == 1 else f"its own reference does not pass: {verdict.detail or verdict.status}"


def known_answers(kind: str, gold: Any, row: Mapping[str, Any]) -> list[tuple[str, str, float]]:
    """Completions for one row with their description and the score they must get; a right one if there is a reference.

    >>> row = {"entry_point": "f", "asserts": ["assert f(1) == 2"]}
    >>> [score for _, _, score in known_answers("code_func", None, row)]
    [0.0, 0.0, 0.0, 0.0, 0.0]
    """
    made = [
        ("nothing", "", 0.0),
        ("words", "I do not know.", 0.0),
        ("a program in an unfinished thought", "<think>" + answer_with(str(gold)), 0.0),
        ("a program that leaves with status 0 at once", answer_with("import os\nos._exit(0)"), 0.0),
    ]
    if isinstance(gold, str):
        made.append(("the reference", answer_with(gold), 1.0))
    if kind == "code_stdin":
        cases = code.stdin_cases(row.get("tests"))
        if isinstance(cases, str) or all(not case.output.strip() for case in cases):
            return []  # a program that does nothing would be right
        return made
    asserts = code.func_tests(row)
    if isinstance(asserts, str):
        return []
    if not any(" == " in check.source for check in asserts.checks or ()):  # nothing is compared with it
        return made
    name = asserts.entry
    same = "class Same:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
    equal = f"{same}def {name}(*a, **k): return Same()"
    made.append(("an object that equals everything", answer_with(equal), 0.0))
    return made
