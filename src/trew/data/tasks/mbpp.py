"""MBPP (Austin et al. 2021): short Python functions described in one sentence and tested by asserts.

Reads the published rows (``text`` or ``prompt``, ``code``, ``test_list``, ``test_setup_code`` or ``test_imports``), on
the hub, in a file of one split, or in one file of all 974, which is then split by ``task_id`` as published.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...config import RewardConfig
from ...types import Prompt
from ..messages import user_turn
from ..rows import BadRow, Row, Split, column, columns_of, require_columns, show, text_column, to_prompts
from .base import Task
from .humaneval import HumanEval
from .programs import syntax_problem, timeout_problem

HUB_SOURCE = "google-research-datasets/mbpp"
INSTRUCTION = "Write the whole program in one ```python block."
PARTS = {"train": range(601, 975), "test": range(11, 511), "validation": range(511, 601)}
"""The published splits by ``task_id``; 1 to 10 are for few-shot prompts and belong to no split."""

UNTESTABLE = (367, 601, 927)
"""The ``task_id`` of rows whose tests pass objects of a class that only the reference defines, which no answer can
know. They are left out, with a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mbpp(Task):
    """Arguments of the task."""

    instruction: str = INSTRUCTION  # appended to every prompt; empty = nothing
    system: str = ""  # a system message; empty = none
    shown: int = 1  # how many tests the prompt shows; all tests, shown or hidden, are graded
    challenge: bool = False  # also grade the harder tests of rows that have them
    timeout_s: float = 0.0  # seconds for the default reward's tests; 0 = the reward's default

    def problems(self) -> list[str]:
        found = []
        if self.shown < 0:
            found.append(f"data.args.shown: got {self.shown}, accepts a whole number of at least 0")
        return found + timeout_problem(self.timeout_s)

    def source(self, train: str) -> str:
        return f"{HUB_SOURCE}:full" if train in ("", HUB_SOURCE) else train

    def prompts(self, split: Split) -> list[Prompt]:
        """One user message per row: the sentence, the function's name, and the shown tests. Columns ``entry_point``,
        ``asserts`` (all tests), ``setup`` and ``reference`` (the set's own program).

        Reads HumanEval's rows as that task does, so that a model trained on MBPP can be evaluated on HumanEval.
        """
        if {"canonical_solution", "test"} <= set(columns_of(split.rows[:1])):
            return HumanEval(system=self.system, timeout_s=self.timeout_s).prompts(split)
        hint = "MBPP rows have text (or prompt), code and test_list"
        require_columns(split, ("reference", "asserts") if _is_prepared(split) else ("code", "test_list"), hint=hint)
        return to_prompts(split, self._prompt, ids=("uid", "id", "task_id"))

    def parts(self, split: Split) -> Mapping[str, Split]:
        numbers = [row.values.get("task_id") for row in split.rows]
        found = {}
        for name, members in PARTS.items():
            rows = [row for row, number in zip(split.rows, numbers, strict=True) if number in members]
            if rows:
                found[name] = dataclasses.replace(split, source=f"{split.source} ({name} rows)", rows=rows)
        # A file of one split is used as it is.
        return found if len(found) > 1 else {}

    def skipped(self, count: int, split: Split) -> list[str]:
        if not count:
            return []
        return [
            f"{split.source}: {count} of {len(split.rows)} rows left out: their tests need a class that no answer can "
            "know"
        ]

    def rewards(self, prompts: Sequence[Prompt]) -> tuple[RewardConfig, ...]:
        return (RewardConfig(name="code_func", args={"timeout_s": self.timeout_s} if self.timeout_s else {}),)

    def prepared(self, prompt: Prompt) -> dict[str, Any]:
        names = ("task_id", "text", "reference", "entry_point", "asserts", "setup")
        kept = {name: prompt.columns[name] for name in names if name in prompt.columns}
        # For runs that ask for the harder tests. Rows without any lack the column: an empty list has no type there.
        harder = prompt.columns.get("challenge_test_list")
        return kept | {"challenge_test_list": harder} if harder else kept

    def _prompt(self, row: Row, uid: str) -> Prompt | None:
        values = row.values
        if values.get("task_id") in UNTESTABLE:
            return None
        # The rows that trew writes have names of their own for the data set's columns.
        text = text_column(row, "text" if "text" in values else "prompt").strip()
        reference = text_column(row, "reference" if "reference" in values else "code").replace("\r\n", "\n")
        asserts = self._all_asserts(row)
        entry = values.get("entry_point") or entry_point(reference, asserts)
        if not isinstance(entry, str) or not entry.isidentifier():
            raise BadRow(f"the tests call no function that the reference defines: {show(asserts[0])}")
        mine = {"text": text, "reference": reference, "entry_point": entry, "asserts": asserts, "setup": _setup(row)}
        rest = {name: value for name, value in values.items() if name != "prompt"}
        question = self._question(text, entry, asserts)
        return Prompt(uid, messages=user_turn(question, system=self.system), columns={**rest, **mine})

    def _all_asserts(self, row: Row) -> list[str]:
        asserts = _asserts(row, "asserts" if "asserts" in row.values else "test_list")
        if self.challenge and row.values.get("challenge_test_list"):
            # Rows that were prepared with them have them among the others already.
            asserts += [harder for harder in _asserts(row, "challenge_test_list") if harder not in asserts]
        return asserts

    def _question(self, text: str, entry: str, asserts: Sequence[str]) -> str:
        question = f"{text}\n\nThe function must be called `{entry}`."
        if shown := asserts[: self.shown]:
            question += " It must pass tests such as:\n\n" + "\n".join(shown)
        return f"{question}\n\n{self.instruction}" if self.instruction else question


def _is_prepared(split: Split) -> bool:
    return any("asserts" in row.values for row in split.rows[:1])


def _asserts(row: Row, name: str) -> list[str]:
    """The tests in a column, without Windows line ends; raises BadRow for anything but lines of Python."""
    value = column(row, name)
    if not isinstance(value, list) or not value or not all(isinstance(v, str) and v.strip() for v in value):
        raise BadRow(f"column {name!r} must be a list of asserts as strings, got {show(value)}")
    found = [line.replace("\r\n", "\n").strip() for line in value]
    for line in found:
        if syntax_problem(line):
            raise BadRow(f"column {name!r}: {show(line)} is not Python: {syntax_problem(line)}")
    return found


def _setup(row: Row) -> str:
    """The code that precedes the tests: text, or a list of imports (the sanitized set)."""
    values = row.values
    parts = [values.get(name) for name in ("setup", "test_setup_code", "test_imports")]
    lines = [line for part in parts if part for line in ([part] if isinstance(part, str) else part)]
    if not all(isinstance(line, str) for line in lines):
        raise BadRow(f"columns 'test_setup_code' and 'test_imports' must be text, got {show(lines)}")
    return "\n".join(dict.fromkeys(line.replace("\r\n", "\n").strip() for line in lines if line.strip()))


def entry_point(reference: str, asserts: Sequence[str]) -> str | None:
    """The function under test: the first one that the asserts call and the reference defines.

    >>> entry_point("def helper(): ...\\ndef f(x): ...", ["assert sorted(f([2, 1])) == [1, 2]"])
    'f'
    """
    try:
        defined = {n.name for n in ast.walk(ast.parse(reference)) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
        calls = [n.func for line in asserts for n in ast.walk(ast.parse(line)) if isinstance(n, ast.Call)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BadRow(f"the reference program is not Python: {error}") from None
    return next((f.id for f in calls if isinstance(f, ast.Name) and f.id in defined), None)
