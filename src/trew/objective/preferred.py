"""DPO as choices of an ``Objective``: which completions of a group are better, and how much the policy still has to
learn of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from .advantage import Advantage
from .aggregate import Aggregate, prompts_of
from .batch import Denominators, TokenBatch
from .component import Scope, positive
from .segments import dense_ids, segment_count, segment_sum
from .weight import Weight


def preferred_advantages(rewards: Float[Tensor, "S"], *, batch: TokenBatch) -> Float[Tensor, "S"]:
    """A_i = 1 / n_c for the n_c best completions of a group, -1 / n_r for the n_r worst, else 0.

    In a pair they are 1 and -1: DPO, arXiv 2402.03300 App. A.1. Completions without loss tokens or with a NaN reward
    take no part. All are 0 in a group of equal rewards, and so in a group of one.

    >>> rewards = torch.tensor([1., 0., 0.])
    >>> batch = TokenBatch.from_padded(logprobs=torch.zeros(3, 1), mask=torch.ones(3, 1), rewards=rewards,
    ...     group_ids=torch.zeros(3, dtype=torch.int64))
    >>> preferred_advantages(rewards, batch=batch).tolist()
    [1.0, -0.5, -0.5]
    """
    alive = ~rewards.isnan() & (batch.lengths > 0)
    ids, size = dense_ids(batch.group_ids)
    # The best and the worst reward of each group, repeated for each completion: (groups,) -> (S,).
    most = rewards.new_full((size,), -torch.inf)
    best = most.scatter_reduce(0, ids, torch.where(alive, rewards, -torch.inf), "amax")[ids]
    worst = (-most).scatter_reduce(0, ids, torch.where(alive, rewards, torch.inf), "amin")[ids]
    # Equal rewards have no better one. In a group where nobody takes part, best = -inf and worst = inf.
    mixed = alive & (best > worst)
    chosen, rejected = mixed & (rewards == best), mixed & (rewards == worst)
    found = torch.zeros_like(rewards)
    for which, sign in ((chosen, 1.0), (rejected, -1.0)):
        count = segment_count(which, ids=ids, size=size)[ids].clamp(min=1)
        found = torch.where(which, sign / count.to(rewards.dtype), found)
    return found


@dataclass(frozen=True)
class Preferred(Advantage):
    """:func:`preferred_advantages` as a component. The completions are given, and nothing is added to their rewards."""

    scope: ClassVar[Scope] = "group"
    reads_rewards: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return preferred_advantages(rewards, batch=batch)

    def equation(self) -> str:
        return "A_i = 1 / n_c for the n_c best of a group, -1 / n_r for the n_r worst, else 0      in a pair 1 and -1"


@dataclass(frozen=True)
class PreferenceWeight(Weight):
    """w_i = beta mean_j sigma(-m_ij) over the group's completions j on the other side: DPO, arXiv 2305.18290, eq. 7.

        m_ij = s_i (z_i - z_j),   z_i = beta sum_t log(pi / pi_ref),   s_i the sign of completion i's advantages

    In a pair w is what the gradient of -log sigma(z_chosen - z_rejected) has at each token. The surrogate is that loss:
    half of log sigma(m) at the tokens of either completion, in equal parts. 0 where a group has one side alone.
    """

    beta: float = 0.1
    scope: ClassVar[Scope] = "group"

    def __post_init__(self) -> None:
        positive(dpo_beta=self.beta)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("ref_logprobs",)

    def __call__(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        margins, others = self._pairs(advantages, batch)
        w = self.beta * _mean(torch.sigmoid(-margins), others)
        return w.to(ratio.dtype)[batch.sequence_ids]

    def surrogate(self, ratio: Tensor, *, advantages: Tensor, batch: TokenBatch) -> Tensor:
        margins, others = self._pairs(advantages, batch)
        each = _mean(logsigmoid(margins), others) / (2 * batch.lengths.clamp(min=1))
        # |A| is 1 / n_c or 1 / n_r: each side's sum is a mean over all pairs, and has half of the loss.
        return each.to(ratio.dtype)[batch.sequence_ids] * advantages.abs()

    def margins(self, *, advantages: Tensor, batch: TokenBatch) -> Float[Tensor, "N"]:
        """Each token's completion's mean m_ij; NaN where it is compared with none."""
        margins, others = self._pairs(advantages, batch)
        mean = torch.where(others.any(1), _mean(margins, others), torch.nan)
        return mean.to(batch.logprobs.dtype)[batch.sequence_ids]

    def equation(self) -> str:
        return (
            f"w = {self.beta:g} mean_j sigma(-m_ij), m_ij = s_i (z_i - z_j), z_i = {self.beta:g} sum_t log(pi / "
            "pi_ref)      s_i = sign(A_i), j in the group with the other sign"
        )

    def _pairs(self, advantages: Tensor, batch: TokenBatch) -> tuple[Float[Tensor, "S S"], Tensor]:
        """m_ij in float64, and which completions j completion i is compared with."""
        assert batch.ref_logprobs is not None
        ids, size = batch.sequence_ids, batch.size
        log_ratio = torch.where(batch.mask, batch.policy - batch.ref_logprobs, 0.0).to(torch.float64)
        z = self.beta * segment_sum(log_ratio, ids=ids, size=size)
        # A completion's side is the sign of the sum over its tokens; with 0 it is compared with none.
        total = segment_sum(torch.where(batch.mask, advantages, 0.0).to(torch.float64), ids=ids, size=size)
        side = total.sign()
        # All pairs as (S, S): there are far fewer completions than tokens.
        others = (batch.group_ids[:, None] == batch.group_ids) & (side[:, None] * side < 0)
        return side[:, None] * (z[:, None] - z), others


def _mean(values: Float[Tensor, "S S"], where: Tensor) -> Float[Tensor, "S"]:
    """The mean of each row's values that count; 0 if there are none."""
    return torch.where(where, values, 0.0).sum(1) / where.sum(1).clamp(min=1)


@dataclass(frozen=True)
class PromptMeanTokenSum(Aggregate):
    """share_t = 1 / P: the mean over the step's P prompts of token sums. For pairs, P is their number."""

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        share = 1.0 / prompts_of(denominators)
        return torch.full(batch.mask.shape, share, dtype=torch.float64, device=batch.mask.device)

    def equation(self) -> str:
        return "share_t = 1 / P      P prompts"
