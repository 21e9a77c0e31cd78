"""Prompts through time: how the answers to each changed from its first visit to its last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .answers import BadRequest, NotHere
from .groups import spread
from .index import Index
from .parameters import Parameters
from .rows import Place, number, rows
from .search import LONGEST
from .store import Store
from .viewed import ViewedRun

SORTS = ("gain", "loss", "disagreement", "uid")
MOST = 200
MOST_VISITS = 100


@dataclass(frozen=True, slots=True)
class Visits:
    """One entry per prompt and step, ordered by prompt, then step, training before evaluation."""

    uid: np.ndarray  # numbers into ``names``
    step: np.ndarray
    eval: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    row: np.ndarray  # a row of its table
    names: list[str]

    def __len__(self) -> int:
        return len(self.uid)


@dataclass(frozen=True, slots=True)
class Prompts:
    """One entry per prompt: where its visits are, and how they differ."""

    visits: Visits
    first: np.ndarray  # numbers of visits
    last: np.ndarray
    gain: np.ndarray
    disagreement: np.ndarray

    @staticmethod
    def of(visits: Visits) -> Prompts:
        # Visits are ordered by uid: a prompt begins where the number changes. -1 is no uid.
        starts = np.flatnonzero(np.diff(visits.uid, prepend=-1))
        ends = np.append(starts, len(visits))[1:]
        # (visits,): the number of the prompt of each.
        number = np.repeat(np.arange(len(starts)), ends - starts)
        known = np.isfinite(visits.std)
        # (prompts,): last visit minus first; NaN where there is one visit.
        gain = np.where(ends - starts > 1, visits.mean[ends - 1] - visits.mean[starts], np.nan)
        with np.errstate(invalid="ignore"):
            # (prompts,): mean over visits of the spread within each.
            spreads = np.bincount(number[known], visits.std[known], minlength=len(starts))
            disagreement = spreads / np.bincount(number[known], minlength=len(starts))
        return Prompts(visits, starts, ends - 1, gain, disagreement)


def prompts(run: ViewedRun, store: Store, p: Parameters) -> dict[str, Any]:
    """Every prompt that was answered, sorted, one page of them; a text restricts them to those that contain it."""
    sort, text = p.one_of("sort", SORTS, "gain"), p.text("text")
    offset, limit = p.whole("offset", 0, least=0), p.whole("limit", 50, least=1, most=MOST)
    if len(text) > LONGEST:
        raise BadRequest(f"text: got {len(text)} characters, accepts {LONGEST} at most")
    with run.lock:
        found = _prompts(run, store)
        order = _ordered(found, sort)
        if text:
            order = order[_contain(run, store, found, order, text)]
        page = order[offset : offset + limit]
        # The text of a prompt is read from its last visit.
        places = [_place(found.visits, int(found.last[i])) for i in page]
        texts = {(row["uid"]): row for row in rows(run, store.tables, places)}
        return {"total": len(order), "prompts": [_shown(found, i, texts) for i in page]}


def prompt(run: ViewedRun, store: Store, p: Parameters, uid: str) -> dict[str, Any]:
    """The answers to one prompt, visit by visit; of more than MOST_VISITS the first and the last ones."""
    offset, limit = p.whole("offset", 0, least=0), p.whole("limit", MOST_VISITS, least=1, most=MOST_VISITS)
    with run.lock:
        visits = []
        for eval in (False, True):
            index = store.index(run, eval)
            columns, mask = index.whole.columns, index.whole.columns["uid"] == index.words.find(uid)
            for step in np.unique(columns["step"][mask]).tolist():
                # Rows of the table, from rows of the whole index.
                members = np.flatnonzero(mask & (columns["step"] == step)) - index.starts[step]
                visits.append((step, eval, members))
        if not visits:
            raise NotHere(f"uid: got {uid[:100]!r}, which is none of the prompts of {run.name}")
        visits.sort(key=lambda visit: visit[:2])
        chosen = visits[offset : offset + limit]
        if len(visits) > MOST_VISITS and not (p.text("offset") or p.text("limit")):
            # How it ended is half of what is asked.
            chosen = visits[: MOST_VISITS // 2] + visits[-(MOST_VISITS // 2) :]
        shown = [_visit(run, store, *visit) for visit in chosen]
        first = next((visit["rows"][0] for visit in shown if visit["rows"]), {})
        return {"uid": uid, "prompt": first.get("prompt", ""), "gold": first.get("gold"), "total": len(visits),
                "visits": shown}  # fmt: skip


def _visit(run: ViewedRun, store: Store, step: int, eval: bool, members: np.ndarray) -> dict[str, Any]:
    found = rows(run, store.tables, [Place(eval, step, int(i)) for i in members])
    scores = [row["score"] for row in found if row["score"] is not None]
    return {"step": step, "eval": eval, "mean": sum(scores) / len(scores) if scores else None, "rows": found}


def _prompts(run: ViewedRun, store: Store) -> Prompts:
    training, evals = store.index(run, False), store.index(run, True)
    made = store.kept(run, "visits", training, lambda: _visits(training))
    held = store.kept(run, "eval visits", evals, lambda: _visits(evals))
    return Prompts.of(_together(made, held))


def _visits(index: Index) -> Visits:
    """The visits of an index: a prompt that is in several groups of a step has one visit of all its completions."""
    columns = index.whole.columns
    known = columns["uid"] >= 0
    row = np.arange(len(known))[known]
    # One number for (step, uid), which sorts by step first.
    many = max(len(index.words.all), 1)
    keys = columns["step"][known] * many + columns["uid"][known]
    order = np.argsort(keys, kind="stable")
    visits, means, stds = spread(keys, columns["score"][known])
    sizes = np.bincount(np.searchsorted(visits, keys), minlength=len(visits))
    # (visits,): the first row of each. The order is stable, so it is the earliest.
    firsts = row[order][np.cumsum(sizes) - sizes] if len(visits) else row
    starts = index.starts
    # From rows of the whole index to rows of each table.
    at = firsts - np.array([starts[int(step)] for step in visits // many], np.int64)
    alone = np.where(sizes > 1, stds, np.nan)  # one completion cannot disagree
    evals = np.full(len(visits), index.kind == "evals")
    return Visits(visits % many, visits // many, evals, means, alone, at, index.words.all)


def _together(a: Visits, b: Visits) -> Visits:
    """Both in one, by prompt; the numbers of ``b`` become those of the same names in ``a``."""
    names = list(a.names)
    known = {name: i for i, name in enumerate(names)}
    # Numbers of b's names -> numbers among all names.
    codes = np.zeros(len(b.names), np.int64)
    for i, name in enumerate(b.names):
        if name not in known:
            known[name] = len(names)
            names.append(name)
        codes[i] = known[name]
    uid = np.concatenate([a.uid, codes[b.uid] if len(b) else b.uid])
    step, eval, mean, std, row = (
        np.concatenate([getattr(a, name), getattr(b, name)]) for name in ("step", "eval", "mean", "std", "row")
    )
    # By uid, then step, then training before evaluation.
    order = np.lexsort((eval, step, uid))
    return Visits(uid[order], step[order], eval[order], mean[order], std[order], row[order], names)


def _ordered(found: Prompts, sort: str) -> np.ndarray:
    if sort == "uid":
        names = [found.visits.names[i] for i in found.visits.uid[found.first].tolist()]
        return np.array(sorted(range(len(names)), key=names.__getitem__), np.int64)
    # Negated for "largest first"; NaN is neither, and sorts last both ways.
    key = {"gain": -found.gain, "loss": found.gain, "disagreement": -found.disagreement}[sort]
    return np.lexsort((found.first, key))  # prompts that it does not apply to come last


def _contain(run: ViewedRun, store: Store, found: Prompts, order: np.ndarray, text: str) -> np.ndarray:
    """Which prompts contain the text. A prompt has the same text at every visit: the last one is searched."""
    hits = np.zeros(len(found.first), bool)
    v = found.visits
    for eval in (False, True):
        index = store.index(run, eval)
        asked = np.flatnonzero(v.eval[found.last] == eval)
        at = v.row[found.last][asked] + np.array([index.starts[int(s)] for s in v.step[found.last][asked]], np.int64)
        mask = np.zeros(len(index.whole), bool)
        # Only these rows need to be searched.
        mask[at] = True
        hits[asked] = store.searches.mask(run, index, text, mask, ("prompt", "uid"))[at]
    return hits[order]


def _place(visits: Visits, at: int) -> Place:
    return Place(bool(visits.eval[at]), int(visits.step[at]), int(visits.row[at]))


def _shown(found: Prompts, i: int, texts: dict[str, Any]) -> dict[str, Any]:
    v, first, last = found.visits, found.first[i], found.last[i]
    uid = v.names[int(v.uid[first])]
    # Empty where the table's texts are damaged: the page takes every prompt for a text.
    row = texts.get(uid, {})
    return {
        "uid": uid, "prompt": row.get("prompt", ""), "gold": row.get("gold"), "times": int(last - first + 1),
        "first": {"step": int(v.step[first]), "mean": number(v.mean[first])},
        "last": {"step": int(v.step[last]), "mean": number(v.mean[last])},
        "gain": number(found.gain[i]), "disagreement": number(found.disagreement[i]),
    }  # fmt: skip
