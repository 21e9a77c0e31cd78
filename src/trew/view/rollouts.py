"""Completions by filters, over all steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .answers import BadRequest
from .index import Index, Part
from .parameters import Parameters
from .rows import Place, at_places
from .search import LONGEST
from .store import Store
from .viewed import ViewedRun

SORTS = ("step", "score", "-score", "length", "-length")
MOST = 200


@dataclass(frozen=True, slots=True)
class Filter:
    """What completions must be; None and empty values leave everything in."""

    step: int | None = None
    eval: bool | None = None
    uid: str = ""
    min_score: float | None = None
    max_score: float | None = None
    part: str = ""
    min_part: float | None = None
    status: str = ""
    truncated: bool | None = None
    text: str = ""
    trained: bool | None = None

    @staticmethod
    def of(p: Parameters) -> Filter:
        if len(text := p.text("text")) > LONGEST:
            raise BadRequest(f"text: got {len(text)} characters, accepts {LONGEST} at most")
        part, min_part = p.text("part"), p.number("min_part")
        if min_part is not None and not part:
            raise BadRequest("min_part: has no effect without part, the name of a reward")
        return Filter(
            p.maybe_whole("step", least=0), p.flag("eval"), p.text("uid"), p.number("min_score"), p.number("max_score"),
            part, min_part, p.text("status"), p.flag("truncated"), text, p.flag("trained"),
        )  # fmt: skip


def rollouts(run: ViewedRun, store: Store, p: Parameters) -> dict[str, Any]:
    """The completions that a filter leaves, sorted, one page of them; None for one that cannot be read, so that the
    others keep their places."""
    wanted, sort = Filter.of(p), p.one_of("sort", SORTS, "step")
    offset, limit = p.whole("offset", 0, least=0), p.whole("limit", 50, least=1, most=MOST)
    with run.lock:
        kinds = (False, True) if wanted.eval is None else (wanted.eval,)
        found = [(eval, index, _chosen(run, store, index, wanted)) for eval in kinds
                 if len((index := store.index(run, eval)).whole)]  # fmt: skip
        order = _sorted(found, sort)
        places = [_place(found[which], i) for which, i in order[offset : offset + limit].tolist()]
        return {"total": len(order), "rows": at_places(run, store.tables, places)}


def _chosen(run: ViewedRun, store: Store, index: Index, wanted: Filter) -> np.ndarray:
    """The numbers of the rows that the filter leaves."""
    mask = _mask(index, wanted)
    if wanted.text and mask.any():
        mask = store.searches.mask(run, index, wanted.text, mask, ("prompt", "completion", "uid"))
    return np.flatnonzero(mask)


def _mask(index: Index, wanted: Filter) -> np.ndarray:
    found, columns = index.whole, index.whole.columns
    tests = [
        wanted.step is None or columns["step"] == wanted.step,
        # find() gives -2 for a text that no row has, so that nothing matches.
        not wanted.uid or columns["uid"] == index.words.find(wanted.uid),
        # A completion without a score is neither above nor below.
        wanted.min_score is None or columns["score"] >= wanted.min_score,
        wanted.max_score is None or columns["score"] <= wanted.max_score,
        wanted.truncated is None or columns["truncated"] == wanted.truncated,
        wanted.trained is None or columns["trained"] == wanted.trained,
        not wanted.part or _part(found, wanted),
        not wanted.status or _status(found, index.words.find(wanted.status)),
    ]
    mask = np.ones(len(found), bool)
    for test in tests:
        # A test is an array, or True or False for all.
        mask &= test
    return mask


def _part(found: Part, wanted: Filter) -> np.ndarray | bool:
    if (scores := found.parts.get(wanted.part)) is None:
        return False
    return ~np.isnan(scores) if wanted.min_part is None else scores >= wanted.min_part


def _status(found: Part, number: int) -> np.ndarray | bool:
    """The status of the whole, or of any reward."""
    if number < 0:
        return False
    out = found.columns["status"] == number
    for statuses in found.statuses.values():
        out = out | (statuses == number)
    return out


def _sorted(found: list[tuple[bool, Index, np.ndarray]], sort: str) -> np.ndarray:
    """Pairs of (which of ``found``, row), in order; what has no score comes last."""
    if not found:
        return np.zeros((0, 2), np.int64)

    def column(name: str) -> np.ndarray:
        return np.concatenate([index.whole.columns[name][chosen] for _, index, chosen in found])

    which = np.concatenate([np.full(len(chosen), i) for i, (_, _, chosen) in enumerate(found)])
    number = np.concatenate([chosen for _, _, chosen in found])
    # Of equals the earlier step comes first. An index is in order of steps already.
    key = column(sort.removeprefix("-"))
    if sort.startswith("-"):
        key = -key
    order = np.lexsort((number, which, column("step"), key))  # NaN sorts last
    return np.stack([which, number], axis=1)[order]


def _place(found: tuple[bool, Index, np.ndarray], row: int) -> Place:
    eval, index, _ = found
    step = int(index.whole.columns["step"][row])
    return Place(eval, step, row - index.starts[step])
