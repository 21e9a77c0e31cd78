"""Completions as the page shows them: one JSON object each."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.tasks.demonstrations import ANSWERS
from ..data.tasks.pairs import PAIR
from ..rewards.columns import GOLD_COLUMNS
from ..runs.report.conversation import conversation
from ..runs.report.read import name_of_given
from . import table
from .index import THREADS, lengths, prompt_hash, was_truncated
from .viewed import ViewedRun

KINDS = {False: "rollouts", True: "evals"}
"""The folder of a completion, by whether it is one of an evaluation."""
CUT, CUT_PROMPT = 2000, 4000
"""Characters of a completion, and of its prompt, in lists."""

SHOWN = ("group", "trained_group", "uid", "sample", "prompt", "completion", "columns", "sampled", "turns", "advantages",
         "score", "status", "parts", "statuses", "extracted", "finish_reason", "rollout_status", "rollout_error",
         "policy_version", "ending")  # fmt: skip
_LEAVES = {"turns": "turns.list.element.context"}  # lists need the number of turns only
_KEPT_BYTES = 192 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a completion is: the row of a table."""

    eval: bool
    step: int
    row: int


class Tables:
    """The columns that lists show, of the tables that were read last, up to a number of bytes."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, Any] = OrderedDict()
        self._sizes: dict[object, int] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, run: ViewedRun, eval: bool, step: int) -> Any:
        """The table of a step, with the number of turns only. Raises Unreadable."""
        return self._kept(run, eval, step, SHOWN, _LEAVES)

    def turns(self, run: ViewedRun, eval: bool, step: int) -> Any:
        """What was said in the episodes of a step. Raises Unreadable."""
        return self._kept(run, eval, step, ("turns", "ending", "rollout_error"), {})

    def _kept(self, run: ViewedRun, eval: bool, step: int, names: Sequence[str], leaves: Mapping[str, str]) -> Any:
        kind = KINDS[eval]
        # The signature makes a table that was replaced another one; its old entry ages out.
        key = (run.id, kind, step, names, run.table_signature(kind, step))
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        # Outside the lock, so that other tables can be read meanwhile.
        found = table.read(run.folder, kind, step, names, leaves=leaves)
        size = found.nbytes
        with self._lock:
            if key not in self._known:  # another thread may have read it meanwhile
                self._known[key], self._sizes[key] = found, size
                self._bytes += size
            # One table stays, however large.
            while self._bytes > _KEPT_BYTES and len(self._known) > 1:
                self._bytes -= self._sizes.pop(self._known.popitem(last=False)[0])
        return found


def rows(run: ViewedRun, tables: Tables, places: Sequence[Place]) -> list[dict[str, Any]]:
    """The completions at ``places``, in that order; those whose table has become unreadable are left out."""
    return [row for row in at_places(run, tables, places) if row is not None]


def at_places(run: ViewedRun, tables: Tables, places: Sequence[Place]) -> list[dict[str, Any] | None]:
    """The completion at each of ``places``; None where its table has become unreadable."""
    wanted: dict[tuple[bool, int], list[int]] = {}
    for place in places:
        wanted.setdefault((place.eval, place.step), []).append(place.row)
    given = run.given  # read here: the threads below would wait for the run's lock, which the caller holds
    with ThreadPoolExecutor(THREADS) as pool:  # a sorted page may have its rows in as many tables
        made = pool.map(lambda asked: _found(run, tables, *asked, given=given), wanted.items())
        found = {place: row for each in made for place, row in each.items()}
    return [found.get(place) for place in places]


def _found(
    run: ViewedRun, tables: Tables, at: tuple[bool, int], numbers: list[int], *, given: str
) -> dict[Place, dict[str, Any]]:
    """Rows of one table; none if it has become unreadable."""
    eval, step = at
    try:
        made = _of_table(tables.get(run, eval, step), numbers, eval=eval, step=step, given=given)
        _add_conversations(made, numbers, lambda: tables.turns(run, eval, step))
    except table.Unreadable:
        return {}
    return {Place(eval, step, number): row for number, row in zip(numbers, made, strict=True)}


def _of_table(found: Any, numbers: Sequence[int], *, eval: bool, step: int, given: str) -> list[dict[str, Any]]:
    # Replaced since the index was made; the next request reads the new one.
    if any(number >= found.num_rows for number in numbers):
        raise table.Unreadable("the table has become shorter")
    some = found.take(list(numbers))
    texts = {name: table.texts(some[name]) for name in _TEXTS if name in some.column_names}
    other = {name: table.values(some[name]) for name in some.column_names if name not in _TEXTS}
    count = lengths(some["sampled"]).tolist()
    cells = [{name: column[i] for name, column in (texts | other).items()} for i in range(len(numbers))]
    return [
        row(own, eval=eval, step=step, length=length, given=given) for own, length in zip(cells, count, strict=True)
    ]


def _add_conversations(made: list[dict[str, Any]], numbers: Sequence[int], read: Callable[[], Any]) -> None:
    """Adds to the rows of episodes what was said in them. The turns are large: they are read only if there are any."""
    if not any(one["turns"] > 1 or one["ending"] for one in made):
        return
    try:
        cells = table.values(read().take(list(numbers)))
    except table.Unreadable:
        return
    for one, found in zip(made, cells, strict=True):
        if said := conversation(found):
            one["said"] = [
                {"who": each.who, "text": each.text, "facts": [list(fact) for fact in each.facts]} for each in said
            ]


_TEXTS = ("uid", "prompt", "completion", "columns", "status", "extracted", "finish_reason", "rollout_status",
          "rollout_error", "ending")  # fmt: skip


def row(
    cells: Mapping[str, Any], *, eval: bool, step: int, length: int, given: str, whole: bool = False
) -> dict[str, Any]:
    """A completion from the cells of its row; ``given``: what the run's data gave in its place; ``whole``: with all of
    its text."""
    found = {
        "step": step, "eval": eval, "group": cells["group"], "trained_group": cells.get("trained_group"),
        "uid": cells["uid"], "sample": cells["sample"],
        **_texts(cells, whole=whole),
        "score": None if given else number(cells.get("score")), "status": cells.get("status"),
        "parts": {name: number(value) for name, value in cells.get("parts") or ()},
        "statuses": dict(cells.get("statuses") or ()), "extracted": cells.get("extracted"),
        "gold": gold(cells.get("columns")), "finish_reason": cells.get("finish_reason"),
        "rollout_status": cells.get("rollout_status"), "rollout_error": cells.get("rollout_error") or "",
        "truncated": was_truncated(cells), "length": length,
        "advantage": _mean(cells.get("advantages"), cells.get("sampled")),
        "policy_version": cells.get("policy_version"), "ending": cells.get("ending"),
        "turns": len(cells.get("turns") or ()) or 1,
    }  # fmt: skip
    if given:
        found["given"] = name_of_given(given, cells["sample"])
    return found


def _texts(cells: Mapping[str, Any], *, whole: bool) -> dict[str, Any]:
    """Prompt and completion, ``whole`` or their first parts; says of a part that it is one."""
    prompt, completion = cells.get("prompt") or "", cells.get("completion") or ""
    # Of the whole text. Empty where there is none: then the uid alone tells which prompt it is.
    sign = "" if cells.get("prompt") is None else prompt_hash(prompt)
    if whole:
        return {"prompt": prompt, "prompt_hash": sign, "completion": completion}
    found: dict[str, Any] = {"prompt": prompt[:CUT_PROMPT], "prompt_hash": sign, "completion": completion[:CUT]}
    if len(completion) > CUT:
        found["cut"] = True
    if len(prompt) > CUT_PROMPT:
        found["prompt_cut"] = True
    return found


def _mean(values: Sequence[float] | None, sampled: Sequence[bool] | None) -> float | None:
    """The mean over sampled tokens; None if a completion was not trained on."""
    if values is None or sampled is None or len(values) != len(sampled):
        return None
    own = np.asarray(values, np.float64)[np.asarray(sampled, bool)]
    return number(own.mean()) if len(own) else None


def number(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def gold(columns: str | None) -> Any:
    """The answer in a data row: its gold column, else what else the row has; None where it has nothing.

    >>> gold('{"answer": "12", "op": "+"}'), gold('{"numbers": [1, 2], "target": 3}'), gold('{"pair": {"chosen": "a"}}')
    ('12', {'numbers': [1, 2], 'target': 3}, None)
    """
    found = parsed(columns)
    # The number of a generated episode is no gold, and what completions repeat themselves is none either.
    if not isinstance(found, dict) or not found.keys() - {"episode", ANSWERS, PAIR}:
        return None
    for name in GOLD_COLUMNS:
        if found.get(name) is not None:
            return found[name]
    nested = found.get("reward_model")
    return nested["ground_truth"] if isinstance(nested, dict) and "ground_truth" in nested else found


def parsed(text: str | None) -> Any:
    """The JSON of a cell; None where it cannot be read, since the file may come from anywhere."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
