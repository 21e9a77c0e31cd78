"""Packs samples into rows of tokens under a token budget, with each group's prompt stored once.

The log-prob of a token is read one position before it. So the last token of a completion is never fed to the model,
and the last prompt position serves the first token of every completion that shares the prompt. For a prompt ``p0 p1``
with the completions ``a0 a1`` and ``b0 b1 b2``:

    fed          p0  p1  a0  b0  b1        position  0  1  2  2  3
    read at          a0  a1  b1  b2
                     b0

``b0`` attends to the prompt and itself, never to ``a0``: :mod:`.attention` ensures that. Tokens of a completion that
were not sampled, such as observations in an episode, are fed and never read: the output head is not computed for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np

from ..errors import EngineError
from ..types import TrainingSample

T = TypeVar("T")
PROMPT_AGAIN = 0.9
"""For ranks, a group is split only where that makes the largest pack at least this much smaller: it costs its prompt
once more."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` consecutive tokens of a packed row from ``start`` on that attend causally to themselves, and to the
    ``prefix_length`` tokens from ``prefix_start`` on as their past."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True, slots=True)
class Pack:
    """One forward pass: rows of tokens, and where to read the log-probs of the completion tokens.

    ``samples`` are the positions of its samples in the list that was packed; the n completion tokens that they predict
    follow in that order. Only the columns ``read_at`` reach the output head, flattened over the rows to K positions;
    token i is ``targets[i]``, and its distribution is row ``read_rows[i]`` of those K. Padded rows have a ``mask`` of
    real tokens, packed rows have ``segments``.
    """

    samples: tuple[int, ...]
    input_ids: np.ndarray  # (R, T)
    position_ids: np.ndarray  # (R, T)
    read_at: np.ndarray  # (K,) columns, the same for every row
    read_rows: np.ndarray  # (n,)
    targets: np.ndarray  # (n,)
    segments: tuple[Segment, ...] = ()
    mask: np.ndarray | None = None  # (R, T) bool


def check_samples(samples: Sequence[TrainingSample], *, vocab_size: int) -> None:
    """Raises EngineError where a sample has no prompt, or a token id without an embedding. On a GPU that lookup would
    fail in a device-side assertion that names no sample."""
    for index, sample in enumerate(samples):
        if len(sample.prompt_ids) == 0:
            raise EngineError(f"sample {index}: the prompt has no tokens; the first token of a completion needs one")
        for name, ids in (("prompt", sample.prompt_ids), ("completion", sample.token_ids)):
            if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
                wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
                raise EngineError(
                    f"sample {index}: the {name} holds token id {wrong}, but the model knows 0 to {vocab_size - 1}; "
                    "do model and tokenizer belong together?"
                )


def pack_shared(
    samples: Sequence[TrainingSample], *, budget: int, join: int | None = None, among: Sequence[int] | None = None,
    share: bool = True, ranks: int = 1,
) -> list[Pack]:  # fmt: skip
    """Packs of one row [1, T] each, in which samples with the same group and prompt share the prompt's tokens.

    T exceeds ``budget`` only where a single prompt with its completion does: a group may be split over packs (the
    prompt is then repeated), a sequence never. Several groups share a pack up to T = ``join``, by default the budget.
    Samples that predict no tokens are left out. ``among``: positions of the samples to pack; all by default.
    Without ``share``, the prompt is repeated for each completion. ``ranks`` that compute at the same time get as few
    packs each as the budget allows, as equal in tokens as samples allow; by groups, where that is nearly as equal.
    """
    # A unit is one prompt with completions that share it: the smallest part that is packed as a whole.
    units = list(_units(samples, budget=budget, among=range(len(samples)) if among is None else among))
    if not share:
        units = [[i] for unit in units for i in unit]
    costs = [_cost(samples, unit) for unit in units]
    packs = [units[part] for part in _even(costs, budget=join or budget, ranks=ranks)]
    if ranks > 1 and share:
        packs = _smaller(samples, units, packs, count=_multiple(len(packs), ranks))
    return [_pack_row(samples, pack) for pack in packs]


def _smaller(
    samples: Sequence[TrainingSample], units: Sequence[list[int]], whole: list[list[list[int]]], *, count: int
) -> list[list[list[int]]]:
    """Up to ``count`` packs with units split anywhere, where the largest is smaller (PROMPT_AGAIN) than that of the
    packs of ``whole`` units; otherwise these."""
    largest = _largest(samples, whole)
    # The least limit: a sequence is never split.
    single = max((_cost(samples, [i]) for unit in units for i in unit), default=0)
    parted = _smallest(lambda limit: _parted(samples, units, limit), count=count, low=single, high=largest)
    # Each split repeats a prompt, so that even the highest limit may give too many.
    return parted if len(parted) <= count and _largest(samples, parted) <= PROMPT_AGAIN * largest else whole


def _largest(samples: Sequence[TrainingSample], packs: Sequence[Sequence[Sequence[int]]]) -> int:
    """The tokens of the largest pack."""
    return max((sum(_cost(samples, unit) for unit in pack) for pack in packs), default=0)


def _parted(samples: Sequence[TrainingSample], units: Sequence[list[int]], limit: int) -> list[list[list[int]]]:
    """Packs of up to ``limit`` tokens, filled one after the other with samples of all units in order."""
    packs: list[list[list[int]]] = []
    size = limit
    for unit in units:
        # ``part`` has the unit's samples in the open pack; None: its prompt is not in there yet, and costs tokens too.
        prompt, part = len(samples[unit[0]].prompt_ids), None
        for i in unit:
            fed = len(samples[i].token_ids) - 1
            if not packs or size + fed + (prompt if part is None else 0) > limit:
                packs.append([])
                size, part = 0, None
            if part is None:
                part = []
                packs[-1].append(part)
                size += prompt
            part.append(i)
            size += fed
    return packs


def _even(costs: Sequence[int], *, budget: int, ranks: int = 1) -> list[slice]:
    """Splits into as few consecutive runs as ``budget`` allows (a single item may exceed it), rounded up to a multiple
    of ``ranks``, and among those splits takes the one whose largest run is smallest: a step needs the memory of its
    largest pack.

    >>> _even([5, 5, 5, 5, 2], budget=15)
    [slice(0, 2, None), slice(2, 5, None)]
    >>> _even([5, 5, 5, 5, 2], budget=15, ranks=3)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    count = _multiple(len(_runs(costs, budget)), ranks)
    # A smaller limit never gives fewer runs.
    return _smallest(lambda limit: _runs(costs, limit), count=count, low=max(costs, default=0), high=budget)


def _smallest(split: Callable[[int], list[T]], *, count: int, low: int, high: int) -> list[T]:
    """``split(limit)`` for the smallest limit from ``low`` to ``high`` that gives at most ``count`` parts, as ``high``
    does."""
    parts = split(high)
    while low < high:
        middle = (low + high) // 2
        if len(smaller := split(middle)) <= count:
            parts, high = smaller, middle
        else:
            low = middle + 1
    return parts


def _multiple(count: int, of: int) -> int:
    """``count`` rounded up to a multiple."""
    return -(-count // of) * of


def _runs(costs: Sequence[int], budget: int) -> list[slice]:
    # Filled in order, though another order may need fewer packs: packs keep the order of the samples.
    starts: list[int] = []
    size = 0
    for i, cost in enumerate(costs):
        if not starts or size + cost > budget:
            starts.append(i)
            size = 0
        size += cost
    return [slice(start, end) for start, end in pairwise([*starts, len(costs)])]


def _cost(samples: Sequence[TrainingSample], unit: Sequence[int]) -> int:
    """The number of tokens fed for one prompt with these completions."""
    return len(samples[unit[0]].prompt_ids) + sum(len(samples[i].token_ids) - 1 for i in unit)


def _units(samples: Sequence[TrainingSample], *, budget: int, among: Sequence[int]) -> Iterator[list[int]]:
    """Yields positions of samples that share a prompt, split so that prompt and completions fit ``budget``."""
    by_prompt: dict[tuple[int, bytes], list[int]] = {}
    for i in among:
        if len(samples[i].predicted):
            # The prompt is part of the key: samples of one group may have different prompts.
            key = (samples[i].group, np.ascontiguousarray(samples[i].prompt_ids, dtype=np.int64).tobytes())
            by_prompt.setdefault(key, []).append(i)
    for members in by_prompt.values():
        unit: list[int] = []
        size = prompt = len(samples[members[0]].prompt_ids)
        for i in members:
            fed = len(samples[i].token_ids) - 1
            # ``unit and``: a completion beyond the budget is a unit of its own, without an empty one before it.
            if unit and size + fed > budget:
                yield unit
                unit, size = [], prompt
            unit.append(i)
            size += fed
        yield unit


def _pack_row(samples: Sequence[TrainingSample], units: Sequence[Sequence[int]]) -> Pack:
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    read_at: list[np.ndarray] = []
    read_rows: list[np.ndarray] = []
    segments: list[Segment] = []
    end, reads = 0, 0  # tokens, and positions that are read, so far
    for unit in units:
        # ---- the prompt once
        prompt = samples[unit[0]].prompt_ids
        start, length = end, len(prompt)
        tokens.append(prompt)
        positions.append(np.arange(length))
        segments.append(Segment(start, length))
        end += length
        first_read = reads  # the last prompt position, read for the first token of every completion
        read_at.append(np.array([end - 1]))
        reads += 1
        # ---- its completions after it, each without its last token
        for i in unit:
            fed, predicted = len(samples[i].token_ids) - 1, samples[i].predicted
            later = predicted[predicted > 0]  # each is read one token before it
            if fed:
                tokens.append(samples[i].token_ids[:-1])  # nothing is predicted after the last token
                positions.append(length + np.arange(fed))  # as if each followed the prompt directly
                segments.append(Segment(end, fed, start, length))
                read_at.append(end + later - 1)
            read_rows += [np.full(len(predicted) - len(later), first_read), reads + np.arange(len(later))]
            reads += len(later)
            end += fed
    members = [i for unit in units for i in unit]
    return Pack(
        samples=tuple(members),
        input_ids=np.concatenate(tokens)[None].astype(np.int64),
        position_ids=np.concatenate(positions)[None].astype(np.int64),
        read_at=np.concatenate(read_at).astype(np.int64),
        read_rows=np.concatenate(read_rows).astype(np.int64),
        targets=_targets(samples, members),
        segments=tuple(segments),
    )


def _targets(samples: Sequence[TrainingSample], members: Sequence[int]) -> np.ndarray:
    return np.concatenate([samples[i].token_ids[samples[i].predicted] for i in members]).astype(np.int64)


def pack_plain(
    samples: Sequence[TrainingSample], *, budget: int, among: Sequence[int] | None = None, ranks: int = 1
) -> list[Pack]:
    """Packs of one padded row per sample: prompts padded on the left, completions on the right.

    Works for every architecture. Samples are sorted by length to keep padding small; rows x columns stays within
    ``budget`` unless a single sample is longer. Samples that predict no tokens are left out. ``ranks`` that compute
    at the same time get as few packs each as the budget allows, of nearly equal size.
    """
    chosen = [i for i in (range(len(samples)) if among is None else among) if len(samples[i].predicted)]
    # By both lengths: a pack is as wide as its longest prompt plus its longest completion.
    chosen.sort(key=lambda i: (len(samples[i].token_ids), len(samples[i].prompt_ids)))
    packs = _rows(samples, chosen, budget)
    if ranks > 1:
        longest = max((_padded_size(samples, [i]) for i in chosen), default=0)
        count = _multiple(len(packs), ranks)
        packs = _smallest(lambda limit: _rows(samples, chosen, limit), count=count, low=longest, high=budget)
    return [_pack_padded(samples, pack) for pack in packs]


def _rows(samples: Sequence[TrainingSample], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Consecutive samples whose padded rows fit into ``budget`` together."""
    packs: list[list[int]] = []
    for i in chosen:
        if not packs or _padded_size(samples, [*packs[-1], i]) > budget:
            packs.append([])
        packs[-1].append(i)
    return packs


def _padded_size(samples: Sequence[TrainingSample], members: Sequence[int]) -> int:
    prompt = max(len(samples[i].prompt_ids) for i in members)
    return len(members) * (prompt + max(len(samples[i].token_ids) for i in members) - 1)


def _pack_padded(samples: Sequence[TrainingSample], members: Sequence[int]) -> Pack:
    prompt = max(len(samples[i].prompt_ids) for i in members)
    longest = max(len(samples[i].token_ids) for i in members)
    # Prompts end and completions begin in the same column of every row, so that one ``read_at`` serves all rows: the
    # columns where any row predicts a token.
    columns = np.unique(np.concatenate([samples[i].predicted for i in members]))
    shape = (len(members), prompt + longest - 1)
    # Padding is token 0: any token that the model knows would do, since the mask hides it.
    ids, mask = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=bool)
    read_rows = []
    for row, i in enumerate(members):
        fed = np.concatenate([samples[i].prompt_ids, samples[i].token_ids[:-1]])
        start = prompt - len(samples[i].prompt_ids)
        ids[row, start : start + len(fed)] = fed
        mask[row, start : start + len(fed)] = True
        read_rows.append(row * len(columns) + np.searchsorted(columns, samples[i].predicted))
    return Pack(
        samples=tuple(members),
        input_ids=ids,
        # Counted over real tokens, so that left padding does not shift positions; padding itself gets 0.
        position_ids=np.maximum(mask.cumsum(axis=1) - 1, 0),
        read_at=prompt - 1 + columns,
        read_rows=np.concatenate(read_rows).astype(np.int64),
        targets=_targets(samples, members),
        mask=mask,
    )
