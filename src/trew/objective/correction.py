"""Train-rollout mismatch: a factor c for tokens whose sampler disagrees with the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..errors import DataError
from .advantage import Coupling
from .batch import TokenBatch
from .ratio import token_ratio


def truncated_importance(
    old_logprobs: Float[Tensor, "N"], *, rollout_logprobs: Float[Tensor, "N"], cap: float = 2.0
) -> Float[Tensor, "N"]:
    """c_t = min(pi_old(y_t) / mu(y_t), cap), mu the sampler: token-level TIS (Yao et al. 2025).

    >>> import torch
    >>> truncated_importance(torch.tensor([0., -1.]), rollout_logprobs=torch.tensor([-1., -1.])).tolist()
    [2.0, 1.0]
    """
    return token_ratio(old_logprobs, anchor_logprobs=rollout_logprobs).clamp(max=cap)


@runtime_checkable
class Correction(Protocol):
    """One detached factor per token."""

    couples: ClassVar[Coupling]

    def __call__(self, batch: TokenBatch) -> Tensor: ...

    def equation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TruncatedImportance:
    """:func:`truncated_importance` as a value."""

    cap: float = 2.0
    couples: ClassVar[Coupling] = "token"

    def __call__(self, batch: TokenBatch) -> Tensor:
        if batch.rollout_logprobs is None:
            raise DataError("rollout_logprobs: got None; a mismatch correction needs the sampler's log-probabilities")
        old = batch.logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        return truncated_importance(old, rollout_logprobs=batch.rollout_logprobs, cap=self.cap)

    def equation(self) -> str:
        return f"c_t = min(pi_old(y_t) / mu(y_t), {self.cap:g})"
