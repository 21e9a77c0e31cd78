"""KL to the reference policy, from the sampled token alone.

With d = log pi - log pi_ref at the sampled token. As a term of the loss, what counts is its derivative by log pi.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from .advantage import Coupling
from .ratio import LOG_RATIO_LIMIT


def kl_value(
    logprobs: Float[Tensor, "N"], *, ref_logprobs: Float[Tensor, "N"], estimator: str = "k3"
) -> Float[Tensor, "N"]:
    """k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. No gradient.

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> [round(kl_value(half, ref_logprobs=quarter, estimator=k).item(), 6) for k in ("k1", "k2", "k3")]
    [0.693147, 0.240227, 0.193147]
    """
    d = (logprobs.detach() - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return torch.expm1(-d) + d


def kl_derivative(
    logprobs: Float[Tensor, "N"], *, ref_logprobs: Float[Tensor, "N"], estimator: str = "k3"
) -> Float[Tensor, "N"]:
    """d(kl_value)/d(log pi): k1: 1; k2: d; k3: 1 - exp(-d).

    In expectation over the policy's own samples k2 gives the gradient of KL(pi || pi_ref), k3 that of
    KL(pi_ref || pi), and k1 gives nothing but variance.

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> kl_derivative(half, ref_logprobs=quarter).item()
    0.5
    """
    d = (logprobs.detach() - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return torch.ones_like(d)
    if estimator == "k2":
        return d
    return -torch.expm1(-d)


@dataclass(frozen=True, slots=True)
class KLInLoss:
    """+ beta sum_t share_t kl_t in the loss."""

    beta: float = 0.0
    estimator: str = "k3"
    couples: ClassVar[Coupling] = "token"

    def __post_init__(self) -> None:
        if not (self.beta >= 0 and self.beta != float("inf")):
            raise ValueError(f"beta: got {self.beta!r}, accepts 0 (no reference model) or more")
        if self.estimator not in ("k1", "k2", "k3"):
            raise ValueError(f"kl: got {self.estimator!r}, accepts 'k1', 'k2' or 'k3'")

    def value(self, logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
        return kl_value(logprobs, ref_logprobs=ref_logprobs, estimator=self.estimator)

    def derivative(self, logprobs: Tensor, *, ref_logprobs: Tensor) -> Tensor:
        return kl_derivative(logprobs, ref_logprobs=ref_logprobs, estimator=self.estimator)

    def equation(self) -> str:
        kl = {"k1": "log(pi / pi_ref)", "k2": "log(pi / pi_ref)^2 / 2", "k3": "pi_ref / pi - 1 - log(pi_ref / pi)"}
        return f"+ {self.beta:g} share_t kl_t in the loss      kl_t = {kl[self.estimator]}  ({self.estimator})"
