"""Computes advantages from step rewards: process supervision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .advantage import Advantage
from .batch import TokenBatch
from .component import Scope
from .scale import GroupStd
from .segments import group_z_score, segment_starts, to_go


def process_advantages(
    values: Float[Tensor, "M"],
    *,
    step_sequences: Int[Tensor, "M"],
    ends: Int[Tensor, "M"],
    sequence_ids: Int[Tensor, "N"],
    group_ids: Int[Tensor, "S"],
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Float[Tensor, "N"]:
    """A_t = sum of the normalised rewards of steps that end at t or later: DeepSeekMath, arXiv 2402.03300 §4.1.3.

    Every step reward is normalised with the mean and deviation over all steps of all completions of its group, so
    completions with more steps weigh more in them. Steps with a NaN value take no part. A group whose step rewards are
    all equal has advantage exactly 0.

    >>> a = process_advantages(torch.tensor([.2, .8, .4], dtype=torch.float64), step_sequences=torch.tensor([0, 0, 1]),
    ...     ends=torch.tensor([2, 5, 3]), sequence_ids=torch.tensor([0] * 5 + [1] * 3), group_ids=torch.tensor([0, 0]))
    >>> [round(x, 4) for x in a.tolist()]
    [0.2182, 0.2182, 1.0911, 1.0911, 1.0911, -0.2182, -0.2182, -0.2182]
    """
    groups = group_ids[step_sequences]
    normalised = group_z_score(values, group_ids=groups, ddof=ddof, std_eps=std_eps)
    # Each step's reward is placed at its last token; the sum to go then credits it to all tokens up to there.
    placed = torch.zeros(len(sequence_ids), dtype=values.dtype, device=values.device)
    inside = ends > 0  # a step that ends before the first loss token pushes nothing, but counts in the statistics
    at = segment_starts(sequence_ids, size=len(group_ids))[step_sequences] + ends - 1
    placed.index_add_(0, at[inside], normalised[inside])
    return to_go(placed, ids=sequence_ids, size=len(group_ids))


@dataclass(frozen=True)
class StepRewards(Advantage):
    """:func:`process_advantages` as a component."""

    ddof: int = 1
    std_eps: float = 0.0
    scope: ClassVar[Scope] = "group"
    per_token: ClassVar[bool] = True
    reads_rewards: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # Made only to check the numbers.
        GroupStd(self.ddof, self.std_eps)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("step_rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        steps = batch.step_rewards
        assert steps is not None
        takes_part = ~rewards.isnan()[steps.sequence_ids]
        return process_advantages(
            torch.where(takes_part, steps.values, torch.nan), step_sequences=steps.sequence_ids, ends=steps.ends,
            sequence_ids=batch.sequence_ids, group_ids=batch.group_ids, ddof=self.ddof, std_eps=self.std_eps,
        )  # fmt: skip

    def equation(self) -> str:
        eps = f" + {self.std_eps:g}" if self.std_eps else ""
        return (
            f"A_t = sum_(steps that end at t or later) (R_j - mean(R)) / (std(R){eps})      over all steps of the "
            f"group, std with ddof = {self.ddof}"
        )
