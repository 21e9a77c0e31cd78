"""Completions with the tokens coloured by what the update did to them: pushed up, pushed down, held."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..rollouts import schema
from . import safe_files
from .read import name_of_given, sample_steps
from .text import number
from .token_texts import loaded, pieces

_COLUMNS = ("group", "sample", "completion", "token_ids", "sampled", "score", "advantages", "weights", "coefficients")
_SHADES = 3
_EFFECTS = ("advantages", "weights", "coefficients")
_MOST_TOKENS = 400
_MOST_STEPS = 8
"""Steps that are searched, from the newest back, for a group that taught something."""
_TOKENIZER_BYTES = 256 * safe_files.MIB


@dataclass(frozen=True, slots=True)
class Coloured:
    """A completion in pieces, each with the class of its colour."""

    facts: tuple[tuple[str, str], ...]
    pieces: tuple[tuple[str, str], ...]  # class, text
    left_out: int  # tokens


def coloured(folder: Path, *, given: str = "") -> list[Coloured]:
    """The best and the worst completion of the newest group whose coefficients differ; nothing for runs without
    coefficients, and for those whose exported model is not there: its tokenizer gives the texts. ``given``: what the
    run's data gave in place of completions."""
    # From the newest back.
    for step in sample_steps(folder, "rollouts")[: -_MOST_STEPS - 1 : -1]:
        rows = _telling(_rows(folder, step))
        if not rows:
            continue
        try:
            tokenizer = loaded(lambda: safe_files.read_text(folder, "final/tokenizer.json", most=_TOKENIZER_BYTES))
        except OSError:
            return []
        return [found for row in rows if (found := _coloured(tokenizer, row, step, given)) is not None]
    return []


def _rows(folder: Path, step: int) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with (
            safe_files.open_file(folder, f"rollouts/{step:06d}.parquet", most=safe_files.TABLE_BYTES) as opened,
            pq.ParquetFile(opened) as file,
        ):
            there = {field.name: field.type for field in file.schema_arrow}
            if any(there.get(name) != schema().field(name).type for name in _COLUMNS):
                return []
            batch = next(file.iter_batches(batch_size=256, columns=list(_COLUMNS)), None)
            return [] if batch is None else batch.to_pylist()
    except (OSError, pa.ArrowException, ValueError):  # damage may show only once the rows are read
        return []


def _telling(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The best and the worst completion of the group with the widest scores, among those that were trained on."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        score = row["score"]
        if score is not None and math.isfinite(score) and any(_known(c) for c in row["coefficients"] or ()):
            groups.setdefault(row["group"], []).append(row)
    ranked = [sorted(group, key=lambda row: row["score"]) for group in groups.values()]
    widest = max(ranked, key=lambda group: group[-1]["score"] - group[0]["score"], default=[])
    return [widest[-1], widest[0]] if len(widest) > 1 else []


def _coloured(tokenizer: Any, row: Mapping[str, Any], step: int, given: str) -> Coloured | None:
    ids = row["token_ids"] or []
    columns = [row["sampled"] or [], *(row[name] or [None] * len(ids) for name in _EFFECTS)]
    if any(len(column) != len(ids) for column in columns):
        return None  # they contradict each other: the table may come from anywhere
    found = pieces(tokenizer, ids, str(row["completion"] or ""))
    if not found.texts:
        return None
    largest = max((abs(c) for c in columns[-1] if _known(c)), default=0.0)
    classes = [push(a, w, c, largest=largest) if own else "given" for own, a, w, c in zip(*columns, strict=True)]
    counts = {"pushed up": "up", "pushed down": "down", "held": "held"}
    tallies = ((name, str(sum(c.startswith(kind) for c in classes))) for name, kind in counts.items())
    what = ("answer", name_of_given(given, row["sample"])) if given else ("score", number(row["score"]))
    facts = (("step", str(step)), what, *tallies)
    shown = tuple(zip(classes, found.texts, strict=True))
    return Coloured(facts, shown[:_MOST_TOKENS], max(len(ids) - _MOST_TOKENS, 0))


def push(advantage: float | None, weight: float | None, coefficient: float | None, *, largest: float) -> str:
    """What an update did to a token, as a class: up or down with a shade by the size of the coefficient; held if it has
    an advantage of which nothing passed; none without a signal.

    >>> push(1.0, 1.0, 0.5, largest=0.5), push(-1.0, 1.0, -0.1, largest=0.5), push(-1.0, 0.0, 0.0, largest=0.5)
    ('up up3', 'down down1', 'held')
    >>> push(0.0, 1.0, 0.0, largest=0.5), push(None, None, None, largest=0.5)
    ('none', 'none')
    """
    if not _known(coefficient):
        return "none"
    if _known(advantage) and advantage != 0 and (weight == 0 or coefficient == 0):
        return "held"
    if coefficient == 0:
        return "none"
    way = "up" if coefficient > 0 else "down"
    # The largest coefficient of the completion has the darkest of three shades.
    return f"{way} {way}{max(1, math.ceil(_SHADES * abs(coefficient) / largest))}"


def _known(value: Any) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
