"""Prompts through time: how the answers to each changed from its first visit to its last."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from .answers import BadRequest, NotHere
from .groups import spread
from .index import Index
from .parameters import Parameters
from .rows import Place, at_places, number, rows
from .search import LONGEST
from .store import Store
from .viewed import ViewedRun

SORTS = ("gain", "loss", "disagreement", "uid")
MOST = 200
MOST_VISITS = 100
Name = tuple[str, str]
"""uid and hash of the text: two data sets may have the same uids. The hash is empty where the text cannot be read."""
Visit = tuple[int, bool, np.ndarray]
"""Step, whether of an evaluation, and rows of its table."""


@dataclass(frozen=True, slots=True)
class Visits:
    """One entry per prompt and step, ordered by prompt, then step, training before evaluation."""

    prompt: np.ndarray  # numbers into ``names``
    step: np.ndarray
    eval: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    row: np.ndarray  # a row of its table
    names: list[Name]

    def __len__(self) -> int:
        return len(self.prompt)


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
        # Visits are ordered by prompt: the next begins where the number changes. -1 is no prompt.
        starts = np.flatnonzero(np.diff(visits.prompt, prepend=-1))
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
        texts = at_places(run, store.tables, places)
        shown = [_shown(found, i, row or {}) for i, row in zip(page, texts, strict=True)]
        return {"total": len(order), "prompts": shown}


def prompt(run: ViewedRun, store: Store, p: Parameters, uid: str) -> dict[str, Any]:
    """The answers to one prompt, visit by visit; of more than MOST_VISITS the first and the last ones."""
    offset, limit = p.whole("offset", 0, least=0), p.whole("limit", MOST_VISITS, least=1, most=MOST_VISITS)
    with run.lock:
        visits, sign = _visits_of(run, store, uid, p.text("prompt_hash"))
        chosen = visits[offset : offset + limit]
        if len(visits) > MOST_VISITS and not (p.text("offset") or p.text("limit")):
            # How it ended is half of what is asked.
            chosen = visits[: MOST_VISITS // 2] + visits[-(MOST_VISITS // 2) :]
        shown = [_visit(run, store, *visit) for visit in chosen]
        first = next((visit["rows"][0] for visit in shown if visit["rows"]), {})
        return {"uid": uid, "prompt_hash": sign, "prompt": first.get("prompt", ""), "gold": first.get("gold"),
                "total": len(visits), "visits": shown}  # fmt: skip


def _visits_of(run: ViewedRun, store: Store, uid: str, sign: str) -> tuple[list[Visit], str]:
    """The visits of the prompt with this uid and this hash of its text, which may be empty if no other prompt has the
    uid; and the hash."""
    found: dict[str, list[Visit]] = {}
    for eval in (False, True):
        index = store.index(run, eval)
        columns, hashes = index.whole.columns, index.whole.columns["prompt"]
        members = np.flatnonzero(columns["uid"] == index.words.find(uid))
        for step, word in sorted({*zip(columns["step"][members].tolist(), hashes[members].tolist(), strict=True)}):
            own = members[(columns["step"][members] == step) & (hashes[members] == word)]
            # Rows of the table, from rows of the whole index.
            visit = (step, eval, own - index.starts[step])
            found.setdefault(index.words.all[word] if word >= 0 else "", []).append(visit)
    texts = sorted(found.keys() - {""})
    if not found or (sign and sign not in texts):
        with_text = f" with a text of the hash {sign[:100]!r}" if found else ""
        raise NotHere(f"uid: got {uid[:100]!r}, which is none of the prompts of {run.name}{with_text}")
    if not sign and len(texts) > 1:
        raise NotHere(
            f"uid: got {uid[:100]!r}, which {len(texts)} prompts of {run.name} have, with different texts: choose one "
            f"in the list of prompts, or add prompt_hash, one of {', '.join(texts[:4])}{', …' * (len(texts) > 4)}"
        )
    sign = sign or "".join(texts)
    # Whose text cannot be read belongs to the only prompt that it can be.
    visits = [*found.get(sign, ()), *(found.get("", ()) if [sign] == texts else ())]
    return sorted(visits, key=lambda visit: visit[:2]), sign


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
    hashes, words = columns["prompt"][known], index.words.all
    # One number for (uid, hash), where -1 stands for no hash.
    both = columns["uid"][known].astype(np.int64) * (len(words) + 1) + hashes + 1
    pairs, prompt = np.unique(both, return_inverse=True)
    codes = [divmod(pair, len(words) + 1) for pair in pairs.tolist()]
    names = [(words[uid], words[code - 1] if code else "") for uid, code in codes]
    # One number for (step, prompt), which sorts by step first.
    many = max(len(names), 1)
    keys = columns["step"][known] * many + prompt
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
    return Visits(visits % many, visits // many, evals, means, alone, at, names)


def _together(a: Visits, b: Visits) -> Visits:
    """Both in one, by prompt. A visit whose text cannot be read is the only prompt's with its uid, if it is one."""
    texts: dict[str, set[str]] = {}
    for uid, sign in (*a.names, *b.names):
        texts.setdefault(uid, set()).update({sign} - {""})
    # Names -> numbers, by first occurrence.
    numbers: dict[Name, int] = {}
    codes = [
        np.array([numbers.setdefault(_resolved(name, texts), len(numbers)) for name in names], np.int64)
        for names in (a.names, b.names)
    ]
    prompt = np.concatenate([codes[0][a.prompt], codes[1][b.prompt]])
    step, eval, mean, std, row = (
        np.concatenate([getattr(a, name), getattr(b, name)]) for name in ("step", "eval", "mean", "std", "row")
    )
    # By prompt, then step, then training before evaluation.
    order = np.lexsort((eval, step, prompt))
    return Visits(prompt[order], step[order], eval[order], mean[order], std[order], row[order], [*numbers])


def _resolved(name: Name, texts: Mapping[str, Set[str]]) -> Name:
    uid, sign = name
    return (uid, sign or (next(iter(texts[uid])) if len(texts[uid]) == 1 else ""))


def _ordered(found: Prompts, sort: str) -> np.ndarray:
    if sort == "uid":
        names = [found.visits.names[i] for i in found.visits.prompt[found.first].tolist()]
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


def _shown(found: Prompts, i: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt; ``row`` is of its last visit, empty where that table is damaged: the page takes every prompt for a
    text."""
    v, first, last = found.visits, found.first[i], found.last[i]
    uid, sign = v.names[int(v.prompt[first])]
    return {
        "uid": uid, "prompt_hash": sign, "prompt": row.get("prompt", ""), "gold": row.get("gold"),
        "times": int(last - first + 1),
        "first": {"step": int(v.step[first]), "mean": number(v.mean[first])},
        "last": {"step": int(v.step[last]), "mean": number(v.mean[last])},
        "gain": number(found.gain[i]), "disagreement": number(found.disagreement[i]),
    }  # fmt: skip
