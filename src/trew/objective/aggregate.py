"""Averages tokens into one loss: each token's weight, share_t in equations.

The divisors come from ``Denominators``, values of the whole optimizer step, so a token's weight does not depend on how
the step is cut into micro-batches. Every divisor has a floor of 1: in a step without loss tokens the weights stay
finite, and the mask sets them to 0 (0 * inf would be NaN).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import ConfigError, DataError
from .batch import Denominators, TokenBatch
from .component import Component, Scope
from .segments import dense_ids, segment_sum


def sequence_mean_token_mean(
    lengths: Int[Tensor, "S"], *, sequence_ids: Int[Tensor, "N"], sequences: int
) -> Float[Tensor, "N"]:
    """share_t = 1 / (n T_i): the mean over sequences of each one's token mean (GRPO paper).

    >>> sequence_mean_token_mean(torch.tensor([2, 1]), sequence_ids=torch.tensor([0, 0, 1]), sequences=2).tolist()
    [0.25, 0.25, 0.5]
    """
    return 1.0 / (max(sequences, 1) * lengths[sequence_ids].clamp(min=1).to(torch.float64))


@runtime_checkable
class Aggregate(Component, Protocol):
    """One weight per token, (N,) float64, from a whole step or whole groups of it."""

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor: ...


def _everywhere(batch: TokenBatch, token_weight: float) -> Tensor:
    return torch.full(batch.mask.shape, token_weight, dtype=torch.float64, device=batch.mask.device)


def prompts_of(denominators: Denominators) -> int:
    """P, the prompts of the step that have loss tokens, at least 1. Raises DataError where denominators that were given
    do not say it."""
    if not denominators.groups and denominators.tokens:
        raise DataError(
            f"denominators: got groups = 0 and tokens = {denominators.tokens}; this objective divides by the number of "
            "prompts of the whole optimizer step that have loss tokens: give it as groups, or leave denominators out"
        )
    return max(denominators.groups, 1)


@dataclass(frozen=True)
class SequenceMeanTokenMean(Aggregate):
    """:func:`sequence_mean_token_mean` as a component."""

    scope: ClassVar[Scope] = "sequence"

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        return sequence_mean_token_mean(
            batch.lengths, sequence_ids=batch.sequence_ids, sequences=denominators.sequences
        )

    def equation(self) -> str:
        return "share_t = 1 / (n T_i)      n sequences and T_i tokens"


@dataclass(frozen=True)
class SequenceMeanTokenSum(Aggregate):
    """share_t = 1 / n: the mean over sequences of each one's token sum, the exact policy gradient of a sequence."""

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        return _everywhere(batch, 1.0 / max(denominators.sequences, 1))

    def equation(self) -> str:
        return "share_t = 1 / n      n sequences"


@dataclass(frozen=True)
class TokenMean(Aggregate):
    """share_t = 1 / N over the step's N loss tokens: DAPO, arXiv 2503.14476 §3.3."""

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        return _everywhere(batch, 1.0 / max(denominators.tokens, 1))

    def equation(self) -> str:
        return "share_t = 1 / N      N loss tokens in the step"


@dataclass(frozen=True)
class LocalTokenMean(Aggregate):
    """share_t = 1 / (B N_b): the mean over micro-batches of each one's token mean, which TRL calls "bnpo".

    The B micro-batches are a part of the objective here: blocks of ``microbatch`` consecutive sequences (those without
    loss tokens do not count), whatever the micro-batches in which the step is computed. One sequence per block gives
    the sequence mean of token means, all sequences in one block the token mean.
    """

    microbatch: int = 8
    scope: ClassVar[Scope] = "batch"

    def __post_init__(self) -> None:
        if self.microbatch < 1:
            raise ValueError(f"microbatch: got {self.microbatch!r}, accepts a whole number of at least 1")

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        lengths = batch.lengths
        # Counts sequences with loss tokens only. Those before the first of them would have rank -1, a negative index.
        rank = ((lengths > 0).cumsum(0) - 1).clamp(min=0)
        block = torch.div(rank, self.microbatch, rounding_mode="floor")
        tokens = segment_sum(lengths.to(torch.float64), ids=block, size=batch.size)[block]
        blocks = -(-max(denominators.sequences, 1) // self.microbatch)  # rounded up: the last block may be short
        return (1.0 / (blocks * tokens.clamp(min=1)))[batch.sequence_ids]

    def equation(self) -> str:
        return (
            f"share_t = 1 / (B N_b)      B blocks of {self.microbatch} sequence{'s' * (self.microbatch > 1)}, N_b loss "
            "tokens in the token's own"
        )


@dataclass(frozen=True)
class PromptMeanTokenMean(Aggregate):
    """share_t = 1 / (P N_g): the mean over P prompts of the token mean over each one's completions: ScaleRL,
    arXiv 2510.13786; the DAPO paper's formula, read literally, is the same."""

    scope: ClassVar[Scope] = "group"

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        # ``batch`` may be some groups of a step, so that ids need not be 0 .. P-1; P is the whole step's.
        ids, size = dense_ids(batch.group_ids)
        tokens = segment_sum(batch.lengths.to(torch.float64), ids=ids, size=size)[ids]
        return (1.0 / (prompts_of(denominators) * tokens.clamp(min=1)))[batch.sequence_ids]

    def equation(self) -> str:
        return "share_t = 1 / (P N_g)      P prompts, N_g loss tokens of the prompt's completions"


@dataclass(frozen=True)
class Constant(Aggregate):
    """share_t = 1 / (n L), L the longest completion allowed: Dr. GRPO's code, arXiv 2503.20783 Listing 1."""

    def __call__(self, batch: TokenBatch, *, denominators: Denominators) -> Tensor:
        if denominators.max_length is None:
            raise ConfigError(
                "max_length: got None; this objective divides by the longest completion allowed: pass max_length"
            )
        return _everywhere(batch, 1.0 / (max(denominators.sequences, 1) * denominators.max_length))

    def equation(self) -> str:
        return "share_t = 1 / (n L)      n sequences, L = longest completion allowed"
