"""Reads and writes .jsonl, .json and .parquet files; reports every fault with its file and line.

Also reads gzipped JSON (.jsonl.gz, .json.gz), which some public data sets use.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import limits
from ..errors import DataError, output_file
from .rows import Row, RowProblems, show

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

WRITTEN = (".jsonl", ".parquet")
SUFFIXES = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
_BATCH_ROWS = 4096  # of a parquet file, decoded at a time
_MESSAGE = frozenset({"role", "content"})
_WITH_ABSENT_KEYS = "extra_info"  # verl's column: a null key of it means that it is absent, as in messages
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # a cheap first check; pairs are fine, lone surrogates are refused


def suffix_of(path: Path) -> str:
    """The suffix that decides how a file is read, including what precedes ``.gz``; "" for none.

    >>> suffix_of(Path("a.b/HumanEval.jsonl.gz")), suffix_of(Path("train-00000.parquet")), suffix_of(Path("train"))
    ('.jsonl.gz', '.parquet', '')
    """
    return Path(path.stem).suffix + path.suffix if path.suffix == ".gz" else path.suffix


def read_rows(path: Path) -> list[Row]:
    """Reads all rows of a file. Raises DataError with the file, and with the lines that are at fault."""
    if not path.exists():
        raise DataError(f"{path}: no such file")
    if not path.is_file() and not path.is_dir():  # opening a FIFO would wait for a writer, a device may be endless
        raise DataError(f"{path}: is not a regular file; write the rows to a file and give that")
    if suffix_of(path) not in SUFFIXES:
        raise DataError(f"{path}: got the suffix {suffix_of(path)!r}, accepts {', '.join(SUFFIXES)}")
    try:
        rows = _read_parquet(path) if path.suffix == ".parquet" else _read_text(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


# --------------------------------------------------------------------------------------------------------------------
# JSON and JSON Lines


def _read_text(path: Path) -> list[Row]:
    # Some editors begin a file with a byte order mark, which JSON does not know.
    raw = _unpacked(path).removeprefix(b"\xef\xbb\xbf")
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path}: is UTF-16 text; save it as UTF-8")
    if suffix_of(path) in (".json", ".json.gz") and raw.lstrip()[:1] == b"[":
        return _read_array(path, raw)
    return _read_lines(path, raw)  # many public .json files are JSON Lines


def _unpacked(path: Path) -> bytes:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rb") as file:
            # One byte more than allowed distinguishes a file at the limit from a larger one, without unpacking a gzip
            # file that is small on the disk.
            raw = file.read(limits.FILE_BYTES + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{path}: is a damaged or incomplete gzip file; download it again") from None
    if len(raw) > limits.FILE_BYTES:
        raise DataError(f"{path}: has more than {limits.FILE_BYTES:,} bytes of text; split it, or use .parquet")
    return raw


def _read_lines(path: Path, raw: bytes) -> list[Row]:
    rows: list[Row] = []
    problems = RowProblems(str(path))
    # Split only at \n: str.splitlines would also split at U+2028 and the like, which JSON strings may contain.
    for number, line in enumerate(raw.split(b"\n"), start=1):
        line = line.strip(b" \t\r")
        if not line:
            continue
        place = f"line {number}"
        # Faults are collected, so that a file with several is repaired in one go.
        if len(line) > limits.LINE_BYTES:
            problems.add(place, f"has {len(line):,} bytes, accepts at most {limits.LINE_BYTES:,}")
            continue
        try:
            rows.append(Row(f"{path.name} {place}", _object(_parse(line))))
        except ValueError as error:
            problems.add(place, str(error))
    problems.raise_if_any()
    return rows


def _read_array(path: Path, raw: bytes) -> list[Row]:
    try:
        values = _parse(raw)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from None
    rows: list[Row] = []
    problems = RowProblems(str(path))
    for number, value in enumerate(values, start=1):
        try:
            rows.append(Row(f"{path.name} row {number}", _object(value)))
        except ValueError as error:
            problems.add(f"row {number}", str(error))
    problems.raise_if_any(len(values))
    return rows


def _parse(raw: bytes) -> Any:
    """Parses strict JSON: no NaN, no repeated keys, no lone surrogates. Raises ValueError with what is wrong."""
    if b"\x00" in raw:
        raise ValueError("contains a NUL byte; the file is damaged or not text")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (its byte {error.start} is 0x{raw[error.start]:02x})") from None
    try:
        value = json.loads(text, parse_float=_number, parse_constant=_no_constant, object_pairs_hook=_no_repeats)
    except json.JSONDecodeError as error:
        # Of a single line the caller knows the number.
        where = f"line {error.lineno} column" if "\n" in text else "column"
        raise ValueError(f"is not valid JSON: {error.msg} ({where} {error.colno})") from None
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    # Only where an escape could be one, since walking every string of every row is slow.
    if _SURROGATE.search(raw):
        _no_surrogates(value)
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        hint = "; a JSON array of rows belongs in a .json file" if isinstance(value, list) else ""
        raise ValueError(f"expected an object with the columns as keys, got {show(value)}{hint}")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON value; use null")


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):  # as Python reads 1e999
        raise ValueError(f"{text[:40]} is too large a number; write it as a string")
    return value


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json.loads would keep the last of them, and the row would silently have another answer than the reader sees first.
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the key {twice[0]!r} occurs twice in one object")
    return table


def _no_surrogates(value: Any) -> None:
    """Refuses half of a surrogate pair: it is not a character, so it can be neither tokenized nor written to a file."""
    # A stack instead of recursion: nesting as deep as the parser accepts must not exhaust Python's own.
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list):
            stack += item
        elif isinstance(item, str):
            for position, character in enumerate(item):
                if "\ud800" <= character <= "\udfff":
                    raise ValueError(
                        f"contains a lone surrogate \\u{ord(character):04x} (character {position} of a string)"
                    )


# --------------------------------------------------------------------------------------------------------------------
# Parquet


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.is_dir():
        raise DataError(f"{path}: is a folder, not a parquet file")
    if not path.stat().st_size:
        return []
    try:
        with path.open("rb") as file:
            head = file.read(4)
        if head != b"PAR1":
            raise DataError(f"{path}: is not a parquet file (it does not begin with PAR1)")
        with pq.ParquetFile(path) as parquet:
            table = _unpacked_rows(path, parquet)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise DataError(
            f"{path}: is a damaged or incomplete parquet file; download or write it again ({reason})"
        ) from None
    return [Row(f"{path.name} row {number}", values) for number, values in enumerate(table, start=1)]


def _unpacked_rows(path: Path, parquet: pq.ParquetFile) -> list[dict[str, Any]]:
    """All rows; refuses a file that is small on the disk and would fill the memory.

    The file says what its pages unpack to, but a page may hold a long text once and a million references to it, so what
    is decoded is counted too. A batch has so few rows that it cannot be too large itself, each value being no longer
    than all pages of its row group.
    """
    about = parquet.metadata
    _refuse_repeated(path, parquet.schema_arrow.names)
    groups = [about.row_group(number).total_byte_size for number in range(about.num_row_groups)]
    if sum(groups) > limits.FILE_BYTES:
        raise _too_large(path, f"{sum(groups):,} bytes")
    if about.num_rows > limits.FILE_ROWS:
        raise DataError(
            f"{path}: has {about.num_rows:,} rows, accepts at most {limits.FILE_ROWS:,}; split it into several files"
        )
    rows: list[dict[str, Any]] = []
    decoded, most = 0, limits.FILE_BYTES // max([1, *groups])  # a file may have no row groups
    for batch in parquet.iter_batches(batch_size=max(1, min(most, _BATCH_ROWS))):
        decoded += batch.nbytes
        if decoded > limits.FILE_BYTES:
            raise _too_large(path, f"more than {limits.FILE_BYTES:,} bytes")
        rows += _plain_rows(path, batch)
    return rows


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Refuses columns of one name: the last of them would hide the others, as a repeated key of JSON would."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise DataError(f"{path}: has several columns {twice[0]!r}; rename or remove all but one")


def _plain_rows(path: Path, batch: pa.RecordBatch) -> list[dict[str, Any]]:
    columns: dict[str, list[Any]] = {}
    for field, column in zip(batch.schema, batch.columns, strict=True):
        try:
            columns[field.name] = column.to_pylist()
        except UnicodeDecodeError:  # a damaged file
            raise
        except (ValueError, OverflowError, LookupError) as error:  # times beyond Python's, and unknown time zones
            raise DataError(
                f"{path}: column {field.name!r} has a value of type {field.type} that Python cannot hold "
                f"({str(error)[:200]}); write it as text, times in microseconds, or remove the column"
            ) from None
    return [{name: values[i] for name, values in columns.items()} for i in range(batch.num_rows)]


def _too_large(path: Path, size: str) -> DataError:
    accepts = f"accepts at most {limits.FILE_BYTES:,}"
    return DataError(f"{path}: unpacks to {size}, {accepts}; split it into several files")


# --------------------------------------------------------------------------------------------------------------------
# Writing


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows in the format of the suffix, to a temporary file that is renamed when complete: a reader never sees
    half a file.

    Parquet needs one type per column and has no empty structs: empty objects are written as null, and a column of mixed
    types, or of objects with different keys, raises DataError. Only keys that messages and ``extra_info`` lack in some
    rows become null, which their readers take for absent. Raises ConfigError for a path that is not writable,
    StorageError for a full disk.
    """
    with output_file(path):
        _write_aside(path, rows)


def _write_aside(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename across file systems is a copy, and not atomic.
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            if path.suffix == ".parquet":
                _write_parquet(file, rows)
            else:
                file.writelines(_json_line(row) for row in rows)
            file.flush()
            # Before the rename: after a crash of the machine, the name must not belong to an empty file.
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp creates files that only their owner can read
        os.replace(name, path)
    # An interrupt too must leave no file aside.
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _json_line(row: Mapping[str, Any]) -> bytes:
    """One line of strict JSON. Refuses what JSON cannot hold (dates, bytes, NaN) rather than converting it."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise DataError(f"a row cannot be written as JSON: {error}; write .parquet instead") from None


def _write_parquet(file: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Of all rows: a column may first appear in a later one.
    names = list(dict.fromkeys(name for row in rows for name in row))
    arrays: dict[str, pa.Array] = {}
    for name in names:
        try:
            arrays[name] = pa.array([_no_empty_structs(row.get(name)) for row in rows])
        except (pa.ArrowException, OverflowError) as error:
            reason = str(error).split("\n", 1)[0]
            raise DataError(f"column {name!r} cannot be written to parquet: {reason}; write .jsonl instead") from None
        _refuse_changed(name, [row.get(name) for row in rows], arrays[name].to_pylist())
    pq.write_table(pa.table(arrays), file)


def _no_empty_structs(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {k: _no_empty_structs(v) for k, v in value.items()}
        # What has become empty is dropped, and what was null before stays.
        kept = {k: v for k, v in kept.items() if v is not None or value[k] is None}
        return kept or None
    if isinstance(value, (list, tuple)):
        return [_no_empty_structs(v) for v in value]
    return value


def _refuse_changed(name: str, values: Sequence[Any], stored: Sequence[Any]) -> None:
    """Raises DataError if what parquet stores of a column is not what was given: it finds one type for all rows."""
    absent = name == _WITH_ABSENT_KEYS
    for number, (value, back) in enumerate(zip(values, stored, strict=True), start=1):
        if not _same(value, back, absent=absent):
            raise DataError(
                f"column {name!r} cannot be written to parquet: mixed types: row {number} has {show(value)}, which "
                f"would become {show(back)}; write .jsonl instead, or give all its values one type and the same keys"
            )


def _same(value: Any, back: Any, *, absent: bool) -> bool:
    """Whether ``back`` is ``value`` in value and type, but for lists in place of tuples and null in place of empty
    objects; with ``absent`` also null in place of keys that are missing."""
    if callable(plain := getattr(value, "tolist", None)):  # numpy's arrays and numbers
        value = plain()
    if isinstance(value, Mapping):
        return _same_object(value, back, absent=absent)
    if isinstance(value, (list, tuple)):
        return isinstance(back, list) and _all_same(zip(value, back, strict=True), absent)
    # NaN is not equal to itself. A bool is an int to Python, but arrow refuses one among ints.
    return isinstance(value, type(back)) and (value == back or (value != value and back != back))


def _same_object(value: Mapping[str, Any], back: Any, *, absent: bool) -> bool:
    if not isinstance(back, Mapping):
        return back is None and _no_empty_structs(value) is None
    added = back.keys() - value.keys()
    if added and not (absent or value.keys() >= _MESSAGE):
        return False
    return all(back[key] is None for key in added) and _all_same(((v, back.get(k)) for k, v in value.items()), absent)


def _all_same(pairs: Iterable[tuple[Any, Any]], absent: bool) -> bool:
    return all(_same(value, back, absent=absent) for value, back in pairs)
