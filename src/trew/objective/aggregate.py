"""How tokens are averaged into one loss: each token's share.

The divisors come from ``Denominators``: values of the whole optimizer step, so that a share does not depend on how the
step is cut into micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError
from .advantage import Coupling
from .batch import Denominators, TokenBatch


def sequence_mean_token_mean(
    lengths: Int[Tensor, "S"], *, sequence_ids: Int[Tensor, "N"], sequences: int
) -> Float[Tensor, "N"]:
    """share_t = 1 / (n T_i): the mean over sequences of each one's token mean (GRPO paper).

    >>> sequence_mean_token_mean(torch.tensor([2, 1]), sequence_ids=torch.tensor([0, 0, 1]), sequences=2).tolist()
    [0.25, 0.25, 0.5]
    """
    return 1.0 / (sequences * lengths[sequence_ids].clamp(min=1).to(torch.float64))


@runtime_checkable
class Aggregate(Protocol):
    """One share per token."""

    couples: ClassVar[Coupling]

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor: ...

    def equation(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SequenceMeanTokenMean:
    """:func:`sequence_mean_token_mean` as a value."""

    couples: ClassVar[Coupling] = "sequence"

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        share = sequence_mean_token_mean(
            batch.lengths, sequence_ids=batch.sequence_ids, sequences=max(denominators.sequences, 1)
        )
        return share.to(batch.logprobs.dtype)

    def equation(self) -> str:
        return "share_t = 1 / (n T_i)      n sequences and T_i tokens"


@dataclass(frozen=True, slots=True)
class TokenMean:
    """share_t = 1 / N over the step's N loss tokens: DAPO, arXiv 2503.14476 §3.3."""

    couples: ClassVar[Coupling] = "token"

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        return torch.full_like(batch.logprobs.detach(), 1.0 / max(denominators.tokens, 1))

    def equation(self) -> str:
        return "share_t = 1 / N      N loss tokens in the step"


@dataclass(frozen=True, slots=True)
class Constant:
    """share_t = 1 / (n L), L the longest completion allowed: Dr. GRPO's code, arXiv 2503.20783 Listing 1."""

    couples: ClassVar[Coupling] = "token"

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        if denominators.max_length is None:
            raise ConfigError(
                "max_length: got None; this objective divides by the longest completion allowed: pass max_length"
            )
        share = 1.0 / (max(denominators.sequences, 1) * denominators.max_length)
        return torch.full_like(batch.logprobs.detach(), share)

    def equation(self) -> str:
        return "share_t = 1 / (n L)      n sequences, L = longest completion allowed"
