"""The log-likelihood of correct completions, as a term beside any objective."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import DataError
from .batch import TokenBatch
from .component import Component, not_negative


def in_correct(batch: TokenBatch) -> Bool[Tensor, "N"]:
    """(N,): True for the loss tokens of completions that are correct by ``TokenBatch.is_correct``."""
    return batch.mask & batch.is_correct[batch.sequence_ids]


@dataclass(frozen=True)
class CorrectLikelihood(Component):
    """- coefficient / N sum_(t in correct completions) log pi_t in the loss: VAPO, arXiv 2504.05118, its loss of
    positive examples; 0: none.

    N are the loss tokens of the correct completions of the whole optimizer step (``Denominators.correct_tokens``), so
    that the term does not depend on how the step is cut, nor on how many completions are wrong. A completion is correct
    if ``TokenBatch.correct`` says so, and where that is not given, if its total reward is above 0. Neither ratio, trust
    region nor correction act on the term. Completions that a filter drops are not in it: under dynamic sampling, those
    of groups that are all correct.

    >>> batch = TokenBatch.from_padded(logprobs=torch.tensor([[-1., -2.], [-3., 0.]]), rewards=torch.tensor([1., 0.]),
    ...     mask=torch.tensor([[True, True], [True, False]]), group_ids=torch.tensor([0, 0]))
    >>> CorrectLikelihood(0.1).coefficients(batch, tokens=2).tolist()
    [0.05, 0.05, 0.0]
    """

    coefficient: float = 0.0

    def __post_init__(self) -> None:
        not_negative(nll=self.coefficient)

    @property
    def active(self) -> bool:
        return self.coefficient > 0

    @property
    def needs(self) -> tuple[str, ...]:
        return ("rewards",)

    def coefficients(self, batch: TokenBatch, *, tokens: int | None) -> Float[Tensor, "N"]:
        """What it adds to each token's coefficient, float64. Raises DataError if N (``tokens``) is None."""
        if tokens is None:
            raise DataError(
                "denominators: correct_tokens is None, and the log-likelihood of correct completions (nll) is divided "
                "by the number of their tokens in the whole step; give it, or leave denominators out"
            )
        each = self.coefficient / max(tokens, 1)  # without a correct completion, no token is counted
        return in_correct(batch).to(torch.float64) * each

    def equation(self) -> str:
        return f"n_t = {self.coefficient:g} / N if correct, else 0      N: tokens of all correct completions"
