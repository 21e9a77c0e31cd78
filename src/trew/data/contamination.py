"""Finds training problems that overlap with evaluation problems: word n-grams that both contain."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import DataError
from .messages import nested_messages
from .rows import Split, columns_of

NGRAM = 13  # words; as in the GPT-3 report
TEXT_COLUMNS = ("question", "problem", "prompt", "text", "nums")
"""Columns that may hold a row's problem; the first one present counts. Countdown problems are compared by numbers and
target."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """One training row that shares n-grams with evaluation rows.

    ``share`` is the share of its n-grams that evaluation rows contain, 1 for a copy. ``other`` is the evaluation row
    (from 0) that contains most of them, ``words`` the first shared n-gram.
    """

    row: int
    share: float
    other: int
    words: str


def overlaps(train: Sequence[str], evaluation: Sequence[str], *, n: int = NGRAM) -> list[Overlap]:
    """Finds the training texts that share a run of ``n`` words with an evaluation text, largest overlap first.

    Ignores case, punctuation and white space. A text of fewer than ``n`` words counts as one run. Time and memory are
    linear in the length of the texts.

    >>> found = overlaps(["Add two and three, please.", "Something else"], ["add TWO and three"], n=3)
    >>> [(o.row, round(o.share, 2), o.other, o.words) for o in found]
    [(0, 0.67, 0, 'add two and')]
    """
    where: dict[tuple[str, ...], list[int]] = {}
    for number, text in enumerate(evaluation):
        # Sets on both sides: a text that repeats itself must not weigh more.
        for run in set(_runs(text, n)):
            where.setdefault(run, []).append(number)
    found = []
    for row, text in enumerate(train):
        runs = list(dict.fromkeys(_runs(text, n)))
        shared = [run for run in runs if run in where]
        if not shared:
            continue
        counts: dict[int, int] = {}
        for run in shared:
            for number in where[run]:
                counts[number] = counts.get(number, 0) + 1
        # Of equals the first row, so that the report does not depend on the order of a dict.
        other = max(counts, key=lambda number: (counts[number], -number))
        found.append(Overlap(row, len(shared) / len(runs), other, " ".join(shared[0])))
    return sorted(found, key=lambda o: (-o.share, o.row))


def _runs(text: str, n: int) -> Iterator[tuple[str, ...]]:
    # NFKC and casefold: full-width digits, ligatures and capitals of a copied problem must not hide it.
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    if not words:
        return
    # At least one run: a slice beyond the end makes a short text a single run of all its words.
    for start in range(max(1, len(words) - n + 1)):
        yield tuple(words[start : start + n])


def problem_text(row: Mapping[str, Any]) -> str | None:
    """The problem of a row, without the instruction that a task adds; None if no column has one.

    >>> problem_text({"prompt": [{"role": "user", "content": "2 + 2?"}], "gold": "4"})
    '2 + 2?'
    >>> problem_text({"nums": [3, 1], "target": 4})
    'nums 1 3 target 4'
    """
    # Present and not empty: a data set may have a column that most rows leave blank.
    name = next((name for name in TEXT_COLUMNS if row.get(name)), None)
    value = None if name is None else row[name]
    if name == "nums" and isinstance(value, list):
        return f"nums {' '.join(map(str, sorted(value, key=str)))} target {row.get('target')}"
    if isinstance(value, str):
        # Messages as a JSON string are a prompt too, and their keys and braces no words of it.
        chat = nested_messages(value)
        return value if chat is None else _chat_text(chat)
    return _chat_text(value) if isinstance(value, list) else None


def _chat_text(turns: Sequence[Any]) -> str | None:
    """The messages' contents, without the system message: a task may add one to problems that are the same."""
    spoken = [turn for turn in turns if isinstance(turn, Mapping) and turn.get("role") != "system"]
    return "\n".join(str(turn.get("content") or "") for turn in spoken) or None


def problem_texts(split: Split) -> list[str]:
    """The problem of every row; raises DataError for a row without one."""
    texts = [problem_text(row.values) for row in split.rows]
    for row, text in zip(split.rows, texts, strict=True):
        if text is None:
            raise DataError(
                f"{split.source}: {row.place} has no problem to compare; looked for {', '.join(TEXT_COLUMNS)}, "
                f"the columns are {', '.join(columns_of(split.rows)) or 'none'}"
            )
    return [text for text in texts if text is not None]
