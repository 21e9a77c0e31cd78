"""Computes advantages from token rewards and a critic's values: generalised advantage estimation (GAE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .advantage import Advantage
from .batch import TokenBatch
from .component import Scope, not_negative, share_of
from .segments import positions, segment_count


def generalised_advantages(
    rewards: Float[Tensor, "N"],
    *,
    values: Float[Tensor, "N"],
    mask: Bool[Tensor, "N"],
    ids: Int[Tensor, "N"],
    size: int,
    gamma: float = 1.0,
    lam: float | Float[Tensor, "size"] = 0.95,
) -> Float[Tensor, "N"]:
    """GAE, arXiv 1506.02438, eq. 16, over the tokens of ``mask`` in each of ``size`` sequences; float64.

        A_t = sum_(k >= 0) (gamma lam)^k delta_(t + k),   delta_t = r_t + gamma V_(t + 1) - V_t,   V behind the end = 0

    ``values`` are of the state in which each token was chosen, so that V_t has not seen token t. Tokens outside the
    mask (observations) are skipped: the state after a sampled token is that before the next sampled one, as verl has
    it. ``lam`` may differ by sequence. A sequence without tokens of the mask has none; 0 outside the mask.

    >>> r, v = torch.tensor([0., 0., 1.]), torch.tensor([.5, .25, .75])
    >>> given = {"values": v, "mask": torch.ones(3, dtype=torch.bool), "ids": torch.zeros(3, dtype=torch.int64)}
    >>> generalised_advantages(r, **given, size=1, gamma=1.0, lam=0.5).tolist()
    [0.0625, 0.625, 0.25]
    """
    # Padded, because a sequence's sum runs backwards: as many steps as the longest has tokens, each over all sequences.
    at = positions(mask, ids=ids, size=size)
    length = int(segment_count(mask, ids=ids, size=size).max()) if size else 0
    padded = torch.zeros(2, size, length, dtype=torch.float64, device=mask.device)
    padded[:, ids[mask], at[mask]] = torch.stack([rewards[mask], values[mask]]).to(torch.float64)
    reward, value = padded
    decay = gamma * torch.as_tensor(lam, dtype=torch.float64, device=mask.device)
    advantages, later = torch.zeros_like(reward), reward.new_zeros(size)
    following = reward.new_zeros(size)
    for t in range(length - 1, -1, -1):
        # ``following`` is V_(t + 1), ``later`` A_(t + 1), for all sequences at once.
        # Behind the end of a sequence everything is 0, so that its last token finds no later value and no later delta.
        later = reward[:, t] + gamma * following - value[:, t] + decay * later
        following = value[:, t]
        advantages[:, t] = later
    out = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    out[mask] = advantages[ids[mask], at[mask]]
    return out


@dataclass(frozen=True)
class GAE(Advantage):
    """:func:`generalised_advantages` of the critic's ``values``.

    The reward of a sequence stands at its last sampled token, and a KL term in the reward at each token. The critic
    learns the returns A_t + V_t, with ``critic_lam`` instead of ``lam`` where that is given. With ``length_alpha``
    above 0 the lam of a sequence of T sampled tokens is 1 - 1 / (length_alpha T), at least 0, instead of ``lam`` (both
    VAPO, arXiv 2504.05118).
    """

    gamma: float = 1.0
    lam: float = 0.95
    critic_lam: float | None = None
    length_alpha: float = 0.0
    scope: ClassVar[Scope] = "sequence"
    per_token: ClassVar[bool] = True
    per_token_rewards: ClassVar[bool] = True

    def __post_init__(self) -> None:
        share_of(gamma=self.gamma, lam=self.lam)
        if self.critic_lam is not None:
            share_of(critic_lam=self.critic_lam)
        not_negative(length_alpha=self.length_alpha)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards", "values")

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return self._estimate(rewards, batch=batch, lam=self._lam(batch))

    def returns(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        assert batch.values is not None
        lam = self._lam(batch) if self.critic_lam is None else self.critic_lam
        # Of the advantages before whitening, which must not change what the critic learns.
        return torch.where(batch.mask, self._estimate(rewards, batch=batch, lam=lam) + batch.values, 0.0)

    def _lam(self, batch: TokenBatch) -> float | Tensor:
        """The policy's lam: one number, or one for each sequence."""
        if not self.length_alpha:
            return self.lam
        span = self.length_alpha * batch.lengths.to(torch.float64)
        return (1 - 1 / span).clamp(min=0.0)  # no tokens: 1 - inf

    def _estimate(self, rewards: Tensor, *, batch: TokenBatch, lam: float | Tensor) -> Tensor:
        assert batch.values is not None
        return generalised_advantages(
            rewards, values=batch.values, mask=batch.mask, ids=batch.sequence_ids, size=batch.size, gamma=self.gamma,
            lam=lam,
        )  # fmt: skip

    def equation(self) -> str:
        gamma = "" if self.gamma == 1 else f"{self.gamma:g} "
        decay = f"{gamma}lam" if self.length_alpha else f"{self.gamma * self.lam:g}"
        lam = f"; lam = 1 - 1 / ({self.length_alpha:g} T_i)" if self.length_alpha else ""
        critic = "" if self.critic_lam is None else f" with lam = {self.critic_lam:g}"
        return (
            f"A_t = sum_(k >= 0) ({decay})^k delta_(t+k), delta_t = R_t + {gamma}V_(t+1) - V_t      R_t: R_i at the "
            f"last token, 0 before{lam}; V: the critic, which learns A_t + V_t{critic}"
        )
