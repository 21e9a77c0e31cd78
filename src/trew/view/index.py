"""The completions of a run without their texts and tokens: what filters, sorts and groups need, as numpy columns.

One part per table, read once; a part is read again only if its file changed. Takes about 120 bytes per
completion, joined parts included.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from . import table
from .signature import Signature, signature

THREADS = min(4, os.cpu_count() or 1)
_TRUNCATED = "truncated"


class Words:
    """Numbers for texts that repeat: uids, statuses. For several threads."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        with self._lock:
            if text not in self._numbers:
                self._numbers[text] = len(self.all)
                self.all.append(text)
            return self._numbers[text]

    def find(self, text: str) -> int:
        """The number of a text; -2 if it does not occur: -1 stands for a null."""
        # Reading a dictionary needs no lock.
        return self._numbers.get(text, -2)

    def numbers(self, column: Any, convert: Callable[[str], str] = str) -> np.ndarray:
        """The numbers of a column of texts, or of what ``convert`` makes of each; -1 for a null."""
        # Converts each distinct text once, however many rows have it.
        encoded = (column.combine_chunks() if hasattr(column, "combine_chunks") else column).dictionary_encode()
        own = [-1 if text is None else self.number(convert(text)) for text in table.texts(encoded.dictionary)]
        # Null rows get the code behind the last text, which stands for -1.
        codes = encoded.indices.fill_null(len(own)).to_numpy(zero_copy_only=False)
        return np.array([*own, -1], np.int32)[codes]


@dataclass(frozen=True, slots=True)
class Part:
    """The columns of one table."""

    columns: dict[str, np.ndarray]
    parts: dict[str, np.ndarray]  # the score of each reward by name, NaN where it has none
    statuses: dict[str, np.ndarray]  # its status, as the number of a word

    def __len__(self) -> int:
        return len(self.columns["group"])


@dataclass(slots=True)
class Index:
    """All readable tables of a kind (``rollouts`` or ``evals``), by step."""

    folder: Path
    kind: str
    scored: bool = True  # False: what the tables call scores are no rewards
    words: Words = field(default_factory=Words)
    parts: dict[int, Part] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    _read: dict[int, Signature | None] = field(default_factory=dict)
    _whole: Part | None = None
    _starts: dict[int, int] | None = None
    version: int = 0  # changes with the contents

    def update(self, steps: Iterable[int]) -> bool:
        """Reads what is new of the tables of ``steps``, and forgets those of other steps. Says whether that changed
        anything."""
        wanted, changed = set(steps), False
        # ---- forget what is gone or has changed
        for step in self._read.keys() - wanted:
            self._forget(step)
            changed = True
        # Of before a table is read: one that is replaced meanwhile is read again the next time.
        found = {step: signature(self.folder / self.kind / f"{step:06d}.parquet") for step in sorted(wanted)}
        new = [step for step in found if step not in self._read or self._read[step] != found[step]]
        for step in new:
            self._forget(step)
        # ---- read what is new
        with ThreadPoolExecutor(THREADS) as pool:  # pyarrow reads without Python's lock
            for step, part in zip(new, pool.map(self._part, new), strict=True):
                self._read[step] = found[step]
                if isinstance(part, Part):
                    self.parts[step] = part
                else:
                    self.damaged[step] = part
        # ---- drop what was made of all parts
        if changed or new:
            self._whole, self._starts, self.version = None, None, self.version + 1
        return changed or bool(new)

    def _part(self, step: int) -> Part | str:
        """The part of a step, or why it cannot be read."""
        try:
            part = read_part(self.folder, self.kind, step, self.words)
        except table.Unreadable as error:
            return str(error)
        if not self.scored:
            part.columns["score"][:] = math.nan
        return part

    def _forget(self, step: int) -> None:
        for known in (self.parts, self.damaged, self._read):
            known.pop(step, None)

    @property
    def whole(self) -> Part:
        """All parts in one, in order of steps."""
        if self._whole is None:
            self._whole = _joined([self.parts[step] for step in sorted(self.parts)])
        return self._whole

    @property
    def starts(self) -> dict[int, int]:
        """Where each table begins in :attr:`whole`."""
        if self._starts is None:
            ends = np.cumsum([0, *(len(self.parts[step]) for step in sorted(self.parts))]).tolist()
            self._starts = dict(zip(sorted(self.parts), ends, strict=False))
        return self._starts

    @property
    def bytes(self) -> int:
        # Twice: :attr:`whole` holds a joined copy.
        return 2 * sum(
            a.nbytes for p in self.parts.values() for d in (p.columns, p.parts, p.statuses) for a in d.values()
        )


def prompt_hash(text: str) -> str:
    """What tells prompts apart that share a uid: data sets may each number their own rows."""
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=6).hexdigest()


COLUMNS = ("step", "group", "trained_group", "uid", "sample", "score", "status", "parts", "statuses", "finish_reason",
           "rollout_status", "ending", "sampled")  # fmt: skip


def read_part(folder: Path, kind: str, step: int, words: Words) -> Part:
    """The columns of a table. Raises Unreadable."""
    try:
        found = table.read(folder, kind, step, (*COLUMNS, "prompt"))
    except table.Unreadable:
        # Without the texts, which may be all that is damaged, everything else can be shown.
        found = table.read(folder, kind, step, COLUMNS)
    count = found.num_rows
    columns = {
        "step": np.full(count, step, np.int64),
        "group": _whole(found, "group", np.int32),
        # -1 and null: dropped before training, or of an evaluation.
        "trained": _whole(found, "trained_group", np.int32) >= 0,
        "sample": _whole(found, "sample", np.int32),
        "uid": words.numbers(found["uid"]),
        "prompt": _words(found, "prompt", words, prompt_hash),
        "score": _floats(found, "score"),
        "status": _words(found, "status", words),
        "truncated": _truncated(found, words),
        "length": lengths(found["sampled"]),
    }
    scores = _by_name(found, "parts", math.nan, lambda items: items.fill_null(math.nan).to_numpy(zero_copy_only=False))
    return Part(columns, scores, _by_name(found, "statuses", -1, words.numbers))


def _truncated(found: Any, words: Words) -> np.ndarray:
    """Whether a completion reached the limit of tokens, as ``was_truncated`` says of one."""
    at_limit = _words(found, "rollout_status", words) == words.number(_TRUNCATED)
    alone = np.isin(_words(found, "ending", words), (-1, words.number("")))
    return at_limit & (alone | (_words(found, "finish_reason", words) == words.number("length")))


def was_truncated(cells: Mapping[str, Any]) -> bool:
    """Whether a completion reached the limit of tokens. An episode has the status ``truncated`` after its last turn,
    too, however short its replies were: of those, only the ones whose last reply was cut off."""
    cut = not cells.get("ending") or cells.get("finish_reason") == "length"
    return cells.get("rollout_status") == _TRUNCATED and cut


def lengths(sampled: Any) -> np.ndarray:
    """The number of sampled tokens of each completion."""
    lists = sampled.combine_chunks()
    flat = lists.values.fill_null(False).to_numpy(zero_copy_only=False)
    # (tokens + 1,): sampled tokens before each; a list's count is the difference at its ends.
    before = np.concatenate(([0], np.cumsum(flat, dtype=np.int64)))
    offsets = lists.offsets.to_numpy()
    return (before[offsets[1:]] - before[offsets[:-1]]).astype(np.int32)


def _whole(found: Any, name: str, kind: Any) -> np.ndarray:
    """A column of whole numbers; -1 where it is missing or null."""
    if name not in found.column_names:
        return np.full(found.num_rows, -1, kind)
    return found[name].combine_chunks().fill_null(-1).to_numpy(zero_copy_only=False).astype(kind)


def _floats(found: Any, name: str) -> np.ndarray:
    if name not in found.column_names:
        return np.full(found.num_rows, math.nan)
    return found[name].combine_chunks().fill_null(math.nan).to_numpy(zero_copy_only=False).astype(np.float64)


def _words(found: Any, name: str, words: Words, convert: Callable[[str], str] = str) -> np.ndarray:
    if name not in found.column_names:
        return np.full(found.num_rows, -1, np.int32)
    return words.numbers(found[name], convert)


def _by_name(found: Any, name: str, missing: float, convert: Callable[[Any], np.ndarray]) -> dict[str, np.ndarray]:
    """A column of maps as one array per key; ``missing`` where a row lacks the key."""
    if name not in found.column_names:
        return {}
    maps = found[name].combine_chunks()
    offsets = maps.offsets.to_numpy()
    # (entries,): the row of each entry of a map. Entries of all rows lie one after another.
    rows = np.repeat(np.arange(len(maps)), np.diff(offsets))
    encoded = maps.keys.dictionary_encode()
    # (entries,) each: the key of an entry, by number, and its value.
    codes, given = encoded.indices.to_numpy(zero_copy_only=False), convert(maps.items)
    out = {}
    for code, key in enumerate(table.texts(encoded.dictionary)):
        out[str(key)] = column = np.full(len(maps), missing, given.dtype)
        column[rows[codes == code]] = given[codes == code]
    return out


def _joined(parts: Sequence[Part]) -> Part:
    if not parts:
        # Columns of no rows, of the types that others have.
        return Part({name: np.zeros(0, kind) for name, kind in _EMPTY.items()}, {}, {})
    columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in parts[0].columns}
    return Part(columns, _padded(parts, "parts", math.nan), _padded(parts, "statuses", -1))


def _padded(parts: Sequence[Part], which: str, missing: float) -> dict[str, np.ndarray]:
    """Columns that only some of the parts have."""
    names = dict.fromkeys(name for p in parts for name in getattr(p, which))
    kind = np.int32 if missing == -1 else np.float64
    return {
        name: np.concatenate([getattr(p, which).get(name, np.full(len(p), missing, kind)) for p in parts])
        for name in names
    }


_EMPTY = {"step": np.int64, "group": np.int32, "trained": bool, "sample": np.int32, "uid": np.int32, "prompt": np.int32,
          "score": np.float64, "status": np.int32, "truncated": bool, "length": np.int32}  # fmt: skip
