"""``Turns``: where the turns of multi-turn episodes end in the token stream, what each earned, and the state it saw."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..errors import DataError
from .segments import positions, segment_starts


@dataclass(frozen=True, eq=False)
class Turns:
    """M turns of S sequences, at least one each: in the order of their sequences, and in order within each.

    Turn m ends with the ``ends[m]``-th token of its sequence in the stream (0: before the first), and begins where the
    turn before it ended, so that every token belongs to one turn. ``states`` numbers the states in which the turns
    began: two turns have equal numbers if and only if their states are the same. None if no states are known.
    """

    rewards: Float[Tensor, "M"]
    sequence_ids: Int[Tensor, "M"]
    ends: Int[Tensor, "M"]
    states: Int[Tensor, "M"] | None = None

    @staticmethod
    def of(
        turns: Sequence[Sequence[tuple[int, float]]],
        *,
        states: Sequence[Sequence[Hashable]] | None,
        mask: Bool[Tensor, "B T"],
    ) -> Turns:
        """Packs lists of (end, reward), ``end`` in columns, and of states. Raises DataError for ends and rewards out of
        range, for loss tokens behind the last turn, and for states that do not fit the turns."""
        rows, width = mask.shape
        if len(turns) != rows:
            raise DataError(f"turns: got {len(turns)} lists, accepts {rows}, one per sequence")
        # The number of columns up to the last loss token, 0 if there is none.
        needed = torch.where(mask, torch.arange(1, width + 1, device=mask.device), 0).amax(1) if width else mask.sum(1)
        for row, (own, last) in enumerate(zip(turns, needed.tolist(), strict=True)):
            _check(own, row=row, width=width, last=last)
        if states is not None:
            _check_states(states, turns=turns)
        flat = [(row, end, reward) for row, own in enumerate(turns) for end, reward in own]
        device = mask.device
        sequences = torch.tensor([row for row, _, _ in flat], dtype=torch.int64, device=device)
        columns = torch.tensor([end for _, end, _ in flat], dtype=torch.int64, device=device)
        rewards = torch.tensor([reward for _, _, reward in flat], dtype=torch.float64, device=device)
        # Columns outside the mask are not in the stream, so an end is the number of tokens inside up to its column.
        ends = mask.cumsum(dim=1)[sequences, columns - 1]
        numbered = None if states is None else number_states(key for own in states for key in own).to(device)
        return Turns(rewards, sequences, ends, numbered)

    def select(self, position: Int[Tensor, "S"]) -> Turns:
        """Turns of the sequences that stay; ``position`` (S,) has each one's new number, -1 if it is left out."""
        new = position[self.sequence_ids]
        kept = (new >= 0).nonzero().squeeze(1)
        order = kept[torch.argsort(new[kept], stable=True)]  # stable keeps the turns of a sequence in order
        states = None if self.states is None else self.states[order]
        return Turns(self.rewards[order], new[order], self.ends[order], states)

    @property
    def numbers(self) -> Int[Tensor, "M"]:
        """The number of turns before each turn in its own sequence."""
        return _numbers(self.sequence_ids)

    @property
    def is_last(self) -> Bool[Tensor, "M"]:
        """Whether each turn is the last of its sequence."""
        # -1, which is no sequence, follows the last turn of all; the slice keeps an empty stream empty.
        following = torch.cat([self.sequence_ids[1:], self.sequence_ids.new_full((1,), -1)])[: len(self.sequence_ids)]
        return self.sequence_ids != following

    def of_tokens(self, sequence_ids: Int[Tensor, "N"]) -> Int[Tensor, "N"]:
        """The turn of each token of the stream. Raises DataError for a token behind the last turn of its sequence."""
        if not len(sequence_ids):
            return sequence_ids
        # Ids are sorted in both: the last is the largest.
        size = int(torch.maximum(sequence_ids[-1], self.sequence_ids[-1])) + 1 if len(self.ends) else 0
        # Ends as places in the whole stream, which are sorted: a binary search finds each token's turn.
        ends = segment_starts(sequence_ids, size=size)[self.sequence_ids] + self.ends
        # The first turn that ends behind the token; a turn without tokens ends where the one before it does.
        found = torch.searchsorted(ends, torch.arange(len(sequence_ids), device=ends.device), right=True)
        outside = found >= len(ends)
        if not outside.any():
            outside = self.sequence_ids[found] != sequence_ids
        if outside.any():
            first = int(sequence_ids[outside.nonzero()[0, 0]])
            raise DataError(f"turns: sequence {first} has tokens that belong to no turn, accepts turns that cover all")
        return found


def number_states(keys: Iterable[Hashable]) -> Int[Tensor, "M"]:
    """Numbers states in the order of their first appearance; equal keys get equal numbers.

    >>> number_states(["at 1,1", "at 2,1", "at 1,1"]).tolist()
    [0, 1, 0]
    """
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def discounted_returns(
    rewards: Float[Tensor, "M"], *, sequence_ids: Int[Tensor, "M"], discount: float
) -> Float[Tensor, "M"]:
    """G_k = sum_(l >= k) discount^(l - k) r_l over the turns of each sequence: GiGPO, arXiv 2505.10978, eq. 5.

    ``rewards`` are in order within each sequence, NaN if a sequence takes no part: so are its returns.

    >>> r, ids = torch.tensor([0., 0., 1., 5.]), torch.tensor([0, 0, 0, 1])
    >>> discounted_returns(r, sequence_ids=ids, discount=0.5).tolist()
    [0.25, 0.5, 1.0, 5.0]
    """
    returns, numbers = rewards.clone(), _numbers(sequence_ids)
    # Whether the entry behind a turn is the next turn of the same sequence.
    followed = torch.zeros_like(sequence_ids, dtype=torch.bool)
    followed[:-1] = sequence_ids[1:] == sequence_ids[:-1]
    # Backwards, one turn number at a time: a turn's return needs that of the turn after it.
    for number in range(int(numbers.max()) - 1 if len(numbers) else -1, -1, -1):
        at = (followed & (numbers == number)).nonzero().squeeze(1)
        returns[at] = rewards[at] + discount * returns[at + 1]
    return returns


def _numbers(sequence_ids: Int[Tensor, "M"]) -> Int[Tensor, "M"]:
    size = int(sequence_ids[-1]) + 1 if len(sequence_ids) else 0
    return positions(torch.ones_like(sequence_ids, dtype=torch.bool), ids=sequence_ids, size=size)


def _check(turns: Any, *, row: int, width: int, last: int) -> None:
    """Raises DataError for the turns of one sequence whose last loss token is in column ``last`` (0: it has none)."""
    if not len(turns):
        raise DataError(f"turns: sequence {row} has none, accepts at least one: a completion is one turn")
    before = 0
    for end, reward in turns:
        if not before < end <= width:
            raise DataError(
                f"turns: sequence {row} has a turn that ends at {end} after one at {before}, accepts increasing ends, "
                f"{width} at most"
            )
        if not math.isfinite(reward):
            raise DataError(f"turns: sequence {row} has the reward {reward}, accepts finite numbers, 0 for none")
        before = end
    if before < last:
        raise DataError(
            f"turns: sequence {row} has loss tokens up to column {last}, but its last turn ends at {before}; accepts "
            "turns that cover all of them"
        )


def _check_states(states: Any, *, turns: Sequence[Sequence[Any]]) -> None:
    counts, wanted = [len(own) for own in states], [len(own) for own in turns]
    if counts != wanted:
        row = next((i for i, pair in enumerate(zip(counts, wanted, strict=False)) if pair[0] != pair[1]), -1)
        got = f"{len(counts)} lists" if row < 0 else f"{counts[row]} states for sequence {row}"
        accepts = f"{len(wanted)}, one per sequence" if row < 0 else f"{wanted[row]}, one per turn"
        raise DataError(f"states: got {got}, accepts {accepts}")
