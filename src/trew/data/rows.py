"""Rows read from a file, and the collecting and reporting of problems in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import limits
from ..errors import DataError, nearest
from ..types import Prompt

SHOWN = 10  # problems that a message spells out; it counts the others


@dataclass(frozen=True, slots=True)
class Row:
    """One data row. ``place`` says where it comes from, for messages: ``train.jsonl line 3``."""

    place: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of one file, of a folder's split, or of a hub set's split."""

    source: str  # as the user wrote it, for messages
    stem: str  # short, for uids: the file's name without suffix, or the split's name
    rows: Sequence[Row]


class BadRow(ValueError):
    """What is wrong with one row; the collector adds its place."""


class RowProblems:
    """Collects the problems of rows and raises them as one DataError."""

    def __init__(self, source: str):
        self._source = source
        self._lines: list[str] = []

    def add(self, place: str, text: str) -> None:
        self._lines.append(f"  {place}: {text}")

    def raise_if_any(self, rows: int | None = None) -> None:
        """Raises DataError with the first ``SHOWN`` problems and the number of the others."""
        if not self._lines:
            return
        of = "" if rows is None else f" of {rows}"
        rows_are = "1 row is" if len(self._lines) == 1 and not of else f"{len(self._lines)}{of} rows are"
        lines = [f"{self._source}: {rows_are} unusable; correct or remove them:", *self._lines[:SHOWN]]
        if len(self._lines) > SHOWN:
            lines.append(f"  ... and {len(self._lines) - SHOWN} more")
        raise DataError("\n".join(lines))


def columns_of(rows: Iterable[Row]) -> list[str]:
    """Every column name in order of first appearance."""
    return list(dict.fromkeys(name for row in rows for name in row.values))


def require_columns(split: Split, names: Sequence[str], *, hint: str) -> None:
    """Raises DataError for a column that no row has: one problem, not one per row."""
    have = columns_of(split.rows)
    for name in names:
        if name not in have:
            raise DataError(
                f"{split.source}: no row has a column {name!r}{nearest(name, have)}; "
                f"the columns are {', '.join(map(repr, have)) or 'none'}; {hint}"
            )


def column(row: Row, name: str) -> Any:
    """The row's value in a column; raises BadRow with the columns that the row has."""
    if name not in row.values:
        have = ", ".join(map(repr, row.values))
        raise BadRow(f"has no column {name!r}{nearest(name, row.values)}, only {have or 'nothing'}")
    return row.values[name]


def text_column(row: Row, name: str) -> str:
    """The row's value as a non-empty string; raises BadRow for anything else."""
    value = column(row, name)
    if not isinstance(value, str):
        raise BadRow(f"column {name!r} must be a string, got {show(value)}")
    if not value.strip():
        raise BadRow(f"column {name!r} is empty")
    return value


def show(value: Any) -> str:
    """Formats a value for a message: shortened, with its type in JSON's terms."""
    names = {
        "NoneType": "null",
        "bool": "true/false",
        "int": "number",
        "float": "number",
        "str": "string",
        "dict": "object",
    }
    text = repr(value)
    kind = names.get(type(value).__name__, type(value).__name__)
    return kind if value is None else f"{text if len(text) <= 60 else text[:57] + '...'} ({kind})"


def to_prompts(
    split: Split, make: Callable[[Row, str], Prompt | None], *, ids: Sequence[str] = ("uid", "id")
) -> list[Prompt]:
    """Calls ``make(row, uid)`` for every row; raises its BadRow errors and repeated uids together as one DataError.

    The uid is the row's value in the first of the columns ``ids`` that it has, or ``<stem>:<row number from 0>``.
    Leaves out a row for which ``make`` returns None; raises DataError if none is left.
    """
    if not split.rows:
        raise DataError(f"{split.source}: has no rows")
    problems = RowProblems(split.source)
    prompts: list[Prompt] = []
    seen: dict[str, str] = {}
    for number, row in enumerate(split.rows):
        try:
            uid = _uid(row, ids, f"{split.stem}:{number}")
            prompt = make(row, uid)
            _check_length(prompt)
        except BadRow as error:
            problems.add(row.place, str(error))
            continue
        if prompt is None:
            continue
        if uid in seen:
            problems.add(row.place, f"id {uid!r} is taken by {seen[uid]}; ids must be unique")
        seen.setdefault(uid, row.place)
        prompts.append(replace(prompt, place=row.place))
    problems.raise_if_any(len(split.rows))
    if not prompts:
        raise DataError(
            f"{split.source}: none of its {len(split.rows)} rows is left; the task's arguments exclude all of them"
        )
    return prompts


def _check_length(prompt: Prompt | None) -> None:
    """Raises BadRow for a prompt so long that even counting its tokens would take minutes."""
    if prompt is None:
        return
    count = len(prompt.text or "") + sum(len(m["content"]) for m in prompt.messages or ())
    if count > limits.PROMPT_CHARACTERS:
        raise BadRow(f"is a prompt of {count:,} characters, accepts at most {limits.PROMPT_CHARACTERS:,}")


def _uid(row: Row, ids: Sequence[str], default: str) -> str:
    for name in ids:
        if name in row.values:
            value = row.values[name]
            if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
                raise BadRow(f"column {name!r} must be a non-empty string or a whole number, got {show(value)}")
            return str(value)
    return default
