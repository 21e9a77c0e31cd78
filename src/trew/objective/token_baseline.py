"""The optimal token baseline: each token is compared with the group's tokens at the same position, those weighing more
whose completion has moved the policy more up to there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .advantage import Advantage
from .batch import TokenBatch
from .component import Scope, one_of
from .segments import has_signal, positions, segment_count, segment_sum, so_far, subgroups

TAILS = ("silent", "reward")


def token_baseline_advantages(
    rewards: Float[Tensor, "S"],
    *,
    score_norms: Float[Tensor, "N"],
    mask: Bool[Tensor, "N"],
    sequence_ids: Int[Tensor, "N"],
    group_ids: Int[Tensor, "S"],
    tail: str = "silent",
) -> Float[Tensor, "N"]:
    """A_it = R_i - B_t,   B_t = sum_j R_j W_jt / sum_j W_jt,   W_jt = sum_(s <= t) (1 - 2 pi_js + sum_v pi_jsv^2)

    over the completions j of i's group that have a t-th loss token: arXiv 2602.07078. ``score_norms`` are the terms of
    W. A token that no other completion reaches is its own baseline: its advantage is 0 ("silent") or R_i ("reward").

    Groups without signal have advantage 0, except for a tail that has the reward. 0 where all W are 0, which is where
    the tokens were certain; 0 outside the mask and for NaN rewards.

    >>> a = token_baseline_advantages(torch.tensor([1., 0.]), score_norms=torch.tensor([.1, .3, .3]), mask=torch.ones(3,
    ...     dtype=torch.bool), sequence_ids=torch.tensor([0, 0, 1]), group_ids=torch.tensor([0, 0]))
    >>> [round(x, 4) for x in a.tolist()]
    [0.75, 0.0, -0.25]
    """
    if not len(mask):
        return torch.zeros(0, dtype=torch.float64, device=mask.device)
    size = len(group_ids)
    # A completion without a verdict must not move the baseline of the others, so it counts as one that is not there.
    known = mask & ~rewards.isnan()[sequence_ids]
    weight = so_far(torch.where(known, score_norms, 0.0), ids=sequence_ids, size=size) * known
    returns = torch.where(known, rewards.to(torch.float64)[sequence_ids], 0.0)
    # Tokens of a group at the same position are compared; positions count loss tokens, so tool output shifts nothing.
    alike = subgroups(positions(known, ids=sequence_ids, size=size), group_ids=group_ids[sequence_ids])
    places = int(alike.max()) + 1
    total = segment_sum(weight, ids=alike, size=places)
    # (places,): B_t of each group and position; NaN where all W are 0.
    baseline = segment_sum(weight * returns, ids=alike, size=places) / total
    advantage = (returns - baseline[alike]).nan_to_num(0.0)
    # Equal rewards are no signal, exactly: a weighted mean of equal numbers differs from them by rounding.
    advantage = torch.where(has_signal(rewards, group_ids=group_ids)[sequence_ids], advantage, 0.0)
    alone = segment_count(known, ids=alike, size=places)[alike] == 1
    # Written out, not left to R - R W / W, which is 0 but for rounding.
    advantage = torch.where(alone, returns if tail == "reward" else 0.0, advantage)
    return torch.where(known, advantage, 0.0)


@dataclass(frozen=True)
class TokenBaseline(Advantage):
    """:func:`token_baseline_advantages` as a component."""

    tail: str = "silent"
    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = True

    def __post_init__(self) -> None:
        one_of(TAILS, tail=self.tail)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards", "score_norms")

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.score_norms is not None
        return token_baseline_advantages(
            rewards, score_norms=batch.score_norms, mask=batch.mask, sequence_ids=batch.sequence_ids,
            group_ids=batch.group_ids, tail=self.tail,
        )  # fmt: skip

    def equation(self) -> str:
        alone = "0" if self.tail == "silent" else "R_i"
        return (
            "A_t = R_i - sum_j(R_j W_jt) / sum_j(W_jt)      W_jt = sum_(s <= t) (1 - 2 pi_s + sum_v pi_v^2), j: the "
            f"group's completions of t tokens or more; {alone} where there is one"
        )
