"""The loss of a critic, which learns to predict returns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..types import Metrics
from .batch import TokenBatch
from .component import positive


def value_losses(
    predictions: Float[Tensor, "N"], *, returns: Float[Tensor, "N"], values: Float[Tensor, "N"], clip: float = math.inf
) -> tuple[Float[Tensor, "N"], Float[Tensor, "N"]]:
    """PPO's clipped value loss of each token and its derivative by the prediction v; ``values`` are the v of before the
    first update on these rollouts.

        loss_t = max( (v_t - R_t)^2, (v'_t - R_t)^2 ) / 2,    v' = v bounded to values +- clip

    As TRL's and verl's trainers define it: a prediction that has moved by more than ``clip`` is not pushed further away
    from where it was, and one on its way back to the return still is. ``clip`` = inf: the squared error.

    >>> v, R, old = torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    >>> value_losses(v, returns=R, values=old, clip=0.25)
    (tensor([0.2812, 0.1250]), tensor([0.0000, 0.5000]))
    """
    bounded = torch.maximum(torch.minimum(predictions, values + clip), values - clip)
    error, of_bounded = predictions - returns, bounded - returns
    # Where the bounded prediction is farther from the return, its loss counts, which no longer depends on v.
    stopped = of_bounded**2 > error**2
    return torch.where(stopped, of_bounded**2, error**2) / 2, torch.where(stopped, 0.0, error)


@dataclass(frozen=True)
class ValueLoss:
    """:func:`value_losses`, averaged over the loss tokens of the optimizer step."""

    clip: float = math.inf

    def __post_init__(self) -> None:
        positive(clip=self.clip)

    def __call__(
        self, predictions: Float[Tensor, "N"], *, batch: TokenBatch
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "N"]]:
        """The loss of a prepared batch, or of a part of a prepared step, and its derivative by the predictions."""
        assert batch.values is not None
        assert batch.returns is not None
        assert batch.denominators is not None
        losses, slopes = value_losses(predictions, returns=batch.returns, values=batch.values, clip=self.clip)
        share = batch.mask / max(batch.denominators.tokens, 1)
        # torch.where and no product with the mask: where the mask is off, 0 * nan would be nan.
        return (torch.where(batch.mask, losses, 0.0) * share).sum(), torch.where(batch.mask, slopes, 0.0) * share

    def metrics(self, predictions: Float[Tensor, "N"], *, batch: TokenBatch) -> Metrics:
        """(sum, count) of a whole optimizer step by name, from the predictions before the update."""
        assert batch.values is not None
        assert batch.returns is not None
        mask = batch.mask
        count = float(mask.sum())
        if not count:
            return {}
        old, returns = batch.values[mask], batch.returns[mask]
        moved = (predictions[mask] - old).abs() > self.clip
        return {
            "value": (float(old.double().sum()), count),
            "return": (float(returns.double().sum()), count),
            "value_clipped": (float(moved.sum()), count),
        }


def explained_variance(
    values: Float[Tensor, "N"], *, returns: Float[Tensor, "N"], mask: Bool[Tensor, "N"]
) -> float | None:
    """1 - Var(R - V) / Var(R) over the tokens of ``mask``: 1 for a perfect critic, 0 for one that knows nothing, below
    for one that misleads. None where all returns are equal.

    >>> R, m = torch.tensor([0., 1., 2.]), torch.tensor([True, True, True])
    >>> explained_variance(R, returns=R, mask=m), explained_variance(torch.ones(3), returns=R, mask=m)
    (1.0, 0.0)
    """
    known = returns[mask].double()
    spread = float(known.var(correction=0)) if len(known) else 0.0
    if spread <= 1e-12:
        return None
    return 1 - float((known - values[mask].double()).var(correction=0)) / spread
