"""Divergences from another policy, estimated from the sampled token: KL to the reference, pulls towards the sampler.

With d = log pi - log pi_ref at the sampled token. In the loss only the derivative by log pi matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .batch import TokenBatch
from .component import Component, Scope, not_negative, one_of
from .ratio import LOG_RATIO_LIMIT, bounded_exp, log_ratio
from .segments import segment_sum

ESTIMATORS = ("k1", "k2", "k3", "k3-corrected")
PLACES = ("loss", "reward", "to-go")
ANCHORS = {"ref": "pi_ref", "rollout": "mu", "old": "pi_old"}


def _difference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    # exp(-d) of k3 would overflow otherwise.
    return (logprobs.detach() - ref_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_value(
    logprobs: Float[Tensor, "N"], *, ref_logprobs: Float[Tensor, "N"], estimator: str = "k3"
) -> Float[Tensor, "N"]:
    """k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d (Schulman 2020, joschu.net/blog/kl-approx.html). No gradient.

    Over samples of pi, k1 and k3 are unbiased for KL(pi || pi_ref); k2 is not, but close where d is small.

    >>> half, quarter = torch.tensor([0.5]).log(), torch.tensor([0.25]).log()
    >>> [round(kl_value(half, ref_logprobs=quarter, estimator=k).item(), 6) for k in ("k1", "k2", "k3")]
    [0.693147, 0.240227, 0.193147]
    """
    d = _difference(logprobs, ref_logprobs)
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d**2 / 2
    return torch.expm1(-d) + d  # exp(-d) - 1 would lose all digits near d = 0, and k3 could come out below 0


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
    # The derivative of the value as written, not of the KL that it estimates: the two differ for k1 and k3 (above).
    d = _difference(logprobs, ref_logprobs)
    if estimator == "k1":
        return torch.ones_like(d)
    if estimator == "k2":
        return d
    return -torch.expm1(-d)


@runtime_checkable
class Divergence(Component, Protocol):
    """A term added to the surrogate in the loss, share_t value_t, and its derivative by log pi_t; both (N,)."""

    @property
    def active(self) -> bool:
        return True

    def value(self, batch: TokenBatch) -> Tensor: ...

    def derivative(self, batch: TokenBatch) -> Tensor: ...


@dataclass(frozen=True)
class KL(Divergence):
    """beta times a KL estimate, against the reference policy (``anchor`` "ref"), the sampler ("rollout") or the old
    policy ("old", in the loss alone: elsewhere it would always be 0).

    ``place`` says where it acts:
      "loss"    + beta share_t kl_t, differentiated;
      "reward"  R_i - beta sum_t kl_t before the baseline, under the policy that sampled, not differentiated;
      "to-go"   A_t - beta sum_(s >= t) kl_s after baseline and scale: a token accounts for itself and all later ones.
    ``k3-corrected`` is r k3 with r = pi / pi_behaviour differentiated: derivative r d, the gradient of KL(pi || pi_ref)
    also off-policy (DeepSeek-V3.2, arXiv 2512.02556). ``behaviour`` is the policy that sampled, "old" or "rollout"; it
    must be "rollout" beside a correction for the sampler: ``old_logprobs`` then are of the weights before the step.
    """

    beta: float = 0.0
    estimator: str = "k3"
    place: str = "loss"
    anchor: str = "ref"
    behaviour: str = "old"

    def __post_init__(self) -> None:
        if not 0 <= self.beta < float("inf"):
            raise ValueError(f"beta: got {self.beta!r}, accepts 0 (no reference model) or more")
        one_of(ESTIMATORS, kl=self.estimator)
        one_of(PLACES, kl_place=self.place)
        one_of(tuple(ANCHORS), anchor=self.anchor)
        one_of(("old", "rollout"), behaviour=self.behaviour)
        if self.estimator == "k3-corrected" and self.place != "loss":
            raise ValueError(
                f"kl: got 'k3-corrected' with kl_place = {self.place!r}, accepts k1, k2 or k3 there: it differs from "
                "k3 by its gradient alone, and there it has none"
            )
        if self.anchor == "old" and self.place != "loss":
            raise ValueError(
                f"anchor: got 'old' with kl_place = {self.place!r}, accepts ref or rollout there: the old policy is "
                "the one that sampled, so that the term would always be 0"
            )

    @property
    def active(self) -> bool:
        return self.beta > 0

    @property
    def needs(self) -> tuple[str, ...]:
        anchor = () if self.anchor == "old" else (f"{self.anchor}_logprobs",)
        corrected = self.estimator == "k3-corrected" and self.behaviour == "rollout"
        return (*anchor, *(("rollout_logprobs",) if corrected else ()))

    def _anchor(self, batch: TokenBatch) -> Tensor:
        # ``old`` and not ``old_logprobs``: where the batch has none, the policy has not moved.
        anchor = {"ref": batch.ref_logprobs, "rollout": batch.rollout_logprobs, "old": batch.old}[self.anchor]
        assert anchor is not None
        return anchor

    def _correction(self, batch: TokenBatch) -> Tensor | float:
        if self.estimator != "k3-corrected":
            return 1.0
        # Without gradient, like every ratio: derivative() has what differentiating r adds.
        return bounded_exp(log_ratio(batch, anchor=self.behaviour))

    def value(self, batch: TokenBatch) -> Tensor:
        k = kl_value(batch.logprobs, ref_logprobs=self._anchor(batch), estimator=self.estimator)
        return self.beta * self._correction(batch) * k

    def derivative(self, batch: TokenBatch) -> Tensor:
        # d(r k3) = r (k3 + k3') = r ((exp(-d) - 1 + d) + (1 - exp(-d))) = r d, r times the derivative of k2.
        estimator = "k2" if self.estimator == "k3-corrected" else self.estimator
        d = kl_derivative(batch.logprobs, ref_logprobs=self._anchor(batch), estimator=estimator)
        return self.beta * self._correction(batch) * d

    def of_rollout(self, batch: TokenBatch) -> Tensor:
        """beta kl_t of the policy that sampled, before any update: what "reward" and "to-go" subtract. The current
        policy's would change with every optimizer step, and the advantages with it."""
        k = kl_value(batch.old, ref_logprobs=self._anchor(batch), estimator=self.estimator)
        return self.beta * torch.where(batch.mask, k, 0.0)

    def equation(self) -> str:
        ref = ANCHORS[self.anchor]
        kl = {"k1": f"log(pi / {ref})", "k2": f"log(pi / {ref})^2 / 2", "k3": f"{ref} / pi - 1 - log({ref} / pi)"}
        shown = f"kl_t = {kl[self.estimator[:2]]}  ({self.estimator})"
        if self.estimator == "k3-corrected":
            behaviour = "pi_old" if self.behaviour == "old" else "mu"
            shown = f"kl_t = (pi / {behaviour}) ({kl['k3']})  (k3, importance-corrected)"
        where = {
            "loss": f"+ {self.beta:g} share_t kl_t in the loss",
            "reward": f"R_i <- R_i - {self.beta:g} sum_t kl_t",
            "to-go": f"A_t <- A_t - {self.beta:g} sum_(s >= t) kl_s",
        }
        return f"{where[self.place]}      {shown}"


@dataclass(frozen=True)
class SequenceSquare(Divergence):
    """+ tau/2 share (log pi(y_i) / pi_old(y_i))^2, once per sequence: the mirror descent of Kimi k1.5, arXiv 2501.12599
    eq. 3. Its derivative by each log pi_t is tau Z_i, Z_i = sum_t log(pi / pi_old)."""

    tau: float = 0.1
    scope: ClassVar[Scope] = "sequence"

    def __post_init__(self) -> None:
        not_negative(tau=self.tau)

    @property
    def active(self) -> bool:
        return self.tau > 0

    def _total(self, batch: TokenBatch) -> Tensor:
        log_r = torch.where(batch.mask, log_ratio(batch), 0.0)
        return segment_sum(log_r, ids=batch.sequence_ids, size=batch.size)[batch.sequence_ids]

    def value(self, batch: TokenBatch) -> Tensor:
        # The term is the sequence's, but stands at each of its T_i tokens, so each counts 1 / T_i; the derivative by
        # every single log pi_t is that of the whole term, and is not divided.
        return self.tau / 2 * self._total(batch) ** 2 / batch.lengths[batch.sequence_ids].clamp(min=1)

    def derivative(self, batch: TokenBatch) -> Tensor:
        return self.tau * self._total(batch)

    def equation(self) -> str:
        return f"+ {self.tau / 2:g} share Z_i^2 in the loss, once per sequence      Z_i = sum_t log(pi / pi_old)"
