"""GTPO and GRPO-S: the outcome's reward plus a part that is shared out by entropy among right and among wrong answers.

A correct answer earns more where the policy was uncertain, a wrong one is punished more where it was certain. Entropies
are the rollout policy's, without gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .advantage import Advantage
from .batch import TokenBatch
from .component import Scope, not_negative, one_of
from .scale import GroupStd
from .segments import dense_ids, group_z_score, positions, segment_count, segment_mean, segment_sum

ENTROPY_FLOOR = 1e-8
"""The smallest entropy that is used, in nats: wrong answers share by 1 / H."""


def shares_of_peers(
    entropies: Float[Tensor, "M"], *, correct: Bool[Tensor, "M"], peers: Int[Tensor, "M"], size: int
) -> Float[Tensor, "M"]:
    """An entry's share among its peers times their number: n H_i / sum H if correct, m H_i^-1 / sum H^-1 if wrong.

    Entries are peers if they have the same number in ``peers`` and are both correct or both wrong. The mean is 1.

    >>> h, ok = torch.tensor([.6, .2, .5, .25]), torch.tensor([True, True, False, False])
    >>> [round(x, 4) for x in shares_of_peers(h, correct=ok, peers=torch.tensor([0, 0, 0, 0]), size=1).tolist()]
    [1.5, 0.5, 0.6667, 1.3333]
    """
    floored = entropies.clamp(min=ENTROPY_FLOOR)
    part = torch.where(correct, floored, 1 / floored)
    # One segment for each pair of (peers, right or wrong): even keys are wrong, odd ones right.
    keys = 2 * peers + correct.to(torch.int64)
    total = segment_sum(part, ids=keys, size=2 * size)
    count = segment_count(torch.ones_like(correct), ids=keys, size=2 * size)
    return count[keys] * part / total[keys]


def _normalised(
    rewards: Tensor, *, correct: Tensor, group_ids: Tensor, known: Tensor, normalize: str, ddof: int
) -> Tensor:
    """z-scores of shaped rewards: of a whole group (joint), or of its right and wrong entries apart (separate)."""
    ids, _ = dense_ids(group_ids)
    # A set is a group, or a pair (group, right or wrong).
    sets = ids if normalize == "joint" else 2 * ids + correct.to(torch.int64)
    return group_z_score(torch.where(known, rewards, torch.nan), group_ids=sets, ddof=ddof)


def _contrast(correct: Tensor, *, group_ids: Tensor, known: Tensor) -> Tensor:
    """True (S,) for sequences that take part and whose group has both right and wrong answers."""
    ids, size = dense_ids(group_ids)
    right = segment_count(known & correct, ids=ids, size=size)
    wrong = segment_count(known & ~correct, ids=ids, size=size)
    return known & ((right > 0) & (wrong > 0))[ids]


@dataclass(frozen=True)
class _Shares(Advantage):
    outcome: float = 1.0
    shared: float = 0.1
    normalize: str = "joint"
    ddof: int = 1
    scope: ClassVar[Scope] = "group"
    reads_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        not_negative(outcome=self.outcome, shared=self.shared)
        one_of(("joint", "separate"), normalize=self.normalize)
        GroupStd(self.ddof)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards", "entropies")

    def _known(self, rewards: Tensor, batch: TokenBatch) -> Tensor:
        # A completion without loss tokens has no entropy to share by.
        return _contrast(batch.is_correct, group_ids=batch.group_ids, known=~rewards.isnan() & (batch.lengths > 0))

    def _shown(self, shaped: str, unit: str) -> str:
        apart = "" if self.normalize == "joint" else ", right and wrong apart"
        return f"{shaped}, z over the group's {unit}{apart} (ddof = {self.ddof}); 0 in groups all right or all wrong"


@dataclass(frozen=True)
class EntropyTokenShares(_Shares):
    """GTPO, arXiv 2508.04349 eq. 3, 5 and 6: one reward per token.

        right:  outcome + shared d_t H_it / sum_k H_kt,   wrong:  -outcome - shared h_t H_it^-1 / sum_k H_kt^-1

    over the d_t right (h_t wrong) completions of the group that have a token at position t; then a z-score over the
    group's tokens. ``separate`` normalises right and wrong tokens apart, as the paper's equation 6 does: each set
    then sums to 0 and the contrast between right and wrong is gone. Groups without contrast have advantage 0.
    """

    per_token: ClassVar[bool] = True

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.entropies is not None
        sequences, mask = batch.sequence_ids, batch.mask
        known = self._known(rewards, batch)[sequences] & mask
        correct = batch.is_correct[sequences]
        groups, size = dense_ids(batch.group_ids)
        depth = int(batch.lengths.max()) if batch.size else 0
        place = positions(mask, ids=sequences, size=batch.size)
        chosen = known.nonzero().squeeze(1)
        # Peers are tokens at the same position of completions of one group, numbered group * depth + position.
        share = shares_of_peers(
            batch.entropies.detach().to(torch.float64)[chosen],
            correct=correct[chosen], peers=(groups[sequences] * depth + place)[chosen], size=size * depth,
        )  # fmt: skip
        # (N,), 0 for tokens that take no part: _normalised() takes those out by ``known``.
        shaped = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
        shaped[chosen] = torch.where(correct[chosen], 1.0, -1.0) * (self.outcome + self.shared * share)
        return _normalised(
            shaped, correct=correct, group_ids=groups[sequences], known=known, normalize=self.normalize, ddof=self.ddof
        )

    def equation(self) -> str:
        r = f"R_it = ±({self.outcome:g} + {self.shared:g} * entropy share at position t)"
        return self._shown(f"A_it = z(R_it), {r}", "tokens")


@dataclass(frozen=True)
class EntropySequenceShares(_Shares):
    """GRPO-S, arXiv 2508.04349 eq. 8 and 9: one reward per sequence, from its mean entropy.

    right:  outcome + shared n H_i / sum_k H_k,   wrong:  -outcome - shared m H_i^-1 / sum_k H_k^-1

    over the n right (m wrong) completions of the group; then a z-score over the group.
    """

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.entropies is not None
        known, correct = self._known(rewards, batch), batch.is_correct
        groups, size = dense_ids(batch.group_ids)
        entropies = batch.entropies.detach().to(torch.float64)
        mean = segment_mean(entropies, mask=batch.mask, ids=batch.sequence_ids, size=batch.size)
        chosen = known.nonzero().squeeze(1)
        share = shares_of_peers(mean[chosen], correct=correct[chosen], peers=groups[chosen], size=size)
        shaped = torch.zeros(batch.size, dtype=torch.float64, device=mean.device)
        shaped[chosen] = torch.where(correct[chosen], 1.0, -1.0) * (self.outcome + self.shared * share)
        return _normalised(
            shaped, correct=correct, group_ids=groups, known=known, normalize=self.normalize, ddof=self.ddof
        )

    def equation(self) -> str:
        r = f"R_i = ±({self.outcome:g} + {self.shared:g} * share of the mean entropy)"
        return self._shown(f"A_i = z(R_i), {r}", "completions")
