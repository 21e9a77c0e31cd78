"""Columns of the tables in ``rollouts`` and ``evals``, from files that may come from anywhere and may be damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..runs.report import safe_files
from ..runs.rollouts import schema

_IDENTITY = ("step", "group", "uid", "sample", "completion", "token_ids", "sampled")
"""Columns without which a table is none of a run's. The others may be missing: older versions wrote fewer."""


_ALWAYS = ("step", "uid", "sample", "completion")
"""Those of them that every version has written."""


class Unreadable(Exception):
    """A table that is missing, damaged, unfinished, or not one that a run writes."""


def read(folder: Path, kind: str, step: int, names: Sequence[str], *, leaves: Mapping[str, str] | None = None) -> Any:
    """The columns ``names`` of a step's table, as far as it has them. Raises Unreadable.

    ``leaves`` narrows a column to one leaf of its type. A column whose type is not the one that a run writes is left
    out: nothing is converted.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with (
            safe_files.open_file(folder, f"{kind}/{step:06d}.parquet", most=safe_files.TABLE_BYTES) as opened,
            pq.ParquetFile(opened, memory_map=False) as file,
        ):
            there, wanted = {field.name: field.type for field in file.schema_arrow}, _types()
            if any(there.get(name) != wanted[name] for name in _IDENTITY):
                raise Unreadable(f"{kind}/{step:06d}.parquet: {_what(there)}")
            fit = [name for name in names if name in wanted and there.get(name) == wanted[name]]
            # One thread: several tables are read side by side, and most are small.
            return file.read([(leaves or {}).get(name, name) for name in fit], use_threads=False)
    except (OSError, pa.ArrowException, ValueError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise Unreadable(f"{kind}/{step:06d}.parquet: cannot be read ({why})") from None


def _what(there: Mapping[str, Any]) -> str:
    """What a table is that lacks some of ``_IDENTITY``, by the types of its columns."""
    if all(there.get(name) == _types()[name] for name in _ALWAYS):
        return "was written by an older version of trew, which kept less than is shown here; trew report reads it"
    return "is not a table of rollouts"


@cache
def _types() -> dict[str, Any]:
    return {field.name: field.type for field in schema()}


def texts(column: Any) -> list[str | None]:
    """A column of text; bytes that are not UTF-8, which no run writes, become U+FFFD."""
    import pyarrow as pa

    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        # Only now: pyarrow refuses the whole column for one such text.
        found = column.cast(pa.binary()).to_pylist()
        return [None if text is None else text.decode("utf-8", "replace") for text in found]


def values(column: Any) -> list[Any]:
    """A column as plain values. Raises Unreadable where a text inside is not UTF-8."""
    try:
        return column.to_pylist()
    except (UnicodeDecodeError, ValueError) as error:
        raise Unreadable(f"a column is damaged ({error})") from None
