"""The two callables that verl invokes: an objective's policy loss and its advantage estimator.

Scales come from ``config.global_batch_info``, verl's counts for the whole mini-batch, so that neither the split into
micro-batches nor the number of ranks changes the summed gradient.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError, DataError
from ...objective import Objective, TokenBatch
from ...objective.advantage import Advantage, ExternalAdvantages
from ...objective.aggregate import Constant, TokenMean
from ...objective.batch import Denominators
from ...objective.component import Scope
from ...objective.correction import Correction
from ...objective.divergence import KL
from ...objective.entropy_bonus import EntropyBonus
from ...objective.metrics import QUANTILES
from ...objective.objective import LossOutput
from ...objective.ratio import NoRatio
from ...objective.weight import PolicyGradient
from .offered import AGGREGATES, KL_TYPES, bypasses, exact, in_loss, verl_s_kl
from .settings import MIRROR, refuse_for_estimator, refuse_for_loss, setting

_log = logging.getLogger(__name__)
_said: set[str] = set()
_AT_REST = ("ratio", "weight", "ess", "correction", *QUANTILES)  # metrics that are 1 for a policy that has not moved
PADDING = re.compile("pad[0-9a-f]{32}")
"""Matches the uid of verl's padding rows, which fill a batch up and have no token and no reward."""


@dataclass(frozen=True)
class GivenWeights(Correction):
    """verl's importance weights (N,) from ``algorithm.rollout_correction`` as a correction of ours.

    At level "sequence" every token carries its sequence's one weight.
    """

    weights: Tensor
    level: str = "token"

    def __call__(self, batch: TokenBatch) -> Tensor:
        return self.weights

    def log_of_sequence(self, factor: Tensor, *, batch: TokenBatch) -> Tensor:
        if self.level == "token":
            return super().log_of_sequence(factor, batch=batch)
        # Already the sequence's weight: summing its logarithm over tokens would raise it to the power of the length.
        # The clamp keeps a weight of 0 finite.
        return factor.clamp(min=1e-8).log()

    def equation(self) -> str:
        return "c_t given"


@dataclass(frozen=True)
class GivenReturns(Advantage):
    """A_t = the sum of token rewards (N,) from t on, including a KL to the reference."""

    values: Tensor
    per_token: ClassVar[bool] = True
    scope: ClassVar[Scope] = "sequence"

    def __call__(self, rewards: Tensor, *, batch: TokenBatch) -> Tensor:
        return self.values

    def equation(self) -> str:
        return "A_t = sum of the token rewards from t on"


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss for verl: ``register_policy_loss(name)(PolicyLoss(name, objective))``.

    Averages as the objective does. ``loss_agg_mode`` may stay at verl's default; a warning then says that it has no
    effect. Refuses settings that it ignores, and a KL to the reference (which verl computes) that is not configured as
    in the objective.
    """

    name: str
    objective: Objective

    # A function has a name, which its caller may read; an instance has none.
    @property
    def __name__(self) -> str:
        return self.name

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Computes the loss of a micro-batch, and metrics; tensors are (B, T)."""
        self._check(loss_agg_mode, config)
        mask = response_mask.to(torch.bool)
        info = dict(getattr(config, "global_batch_info", None) or {})
        batch = TokenBatch.from_padded(
            logprobs=log_prob, mask=mask, advantages=advantages, old_logprobs=old_log_prob,
            rollout_logprobs=old_log_prob if bypasses(self.objective) else None,
            # verl passes no prompt ids. One group per row is safe: rules that compare a group are not offered.
            group_ids=torch.arange(len(mask), device=mask.device),
        )  # fmt: skip
        batch = batch.replace(denominators=_denominators(self.name, self.objective, batch, info))
        # Without advantages, filters and the KL to the reference: verl has applied them before it calls a loss.
        output = self._here(self._given(rollout_is_weights, mask, config)).loss(batch)
        # The denominators count all ranks, and verl averages gradients over ranks: multiply once to get their sum.
        scale = info.get("dp_size") or 1
        return output.loss * scale, _metrics(output)

    def _given(self, weights: Tensor | None, mask: Tensor, config: Any) -> tuple[Correction, ...]:
        if weights is None:
            return ()
        if bypasses(self.objective):
            raise ConfigError(f"{self.name}: got importance weights and a ratio to the sampler: a correction twice")
        level = setting(config, "policy_loss.rollout_correction.rollout_is")
        if self.objective.weight.folds_correction and level not in ("token", "sequence"):
            raise ConfigError(
                f"{self.name}: folds importance weights into each sequence's own, and verl does not say whether "
                "these are of tokens or of sequences: got policy_loss.rollout_correction.rollout_is="
                f"{level}; set {MIRROR}"
            )
        return (GivenWeights(weights.detach()[mask], level or "token"),)

    def _here(self, correction: tuple[Correction, ...]) -> Objective:
        """Returns the objective without what verl has done already: filters, advantages, the KL to the reference."""
        # KL() without a coefficient is inactive.
        return self.objective.replace(
            keep=(), shape=(), adjust=(), select=(), prune=(), advantage=ExternalAdvantages(), correction=correction,
            divergence=in_loss(self.objective) or (KL(),),
        )  # fmt: skip

    def _check(self, mode: str, config: Any) -> None:
        refuse_for_loss(self.name, self.objective, mode=mode, config=config)
        own, kl = AGGREGATES.get(type(self.objective.aggregate), ""), verl_s_kl(self.objective)
        if kl is None:
            if mode != own:
                _warn(f"{self.name} averages by {own or type(self.objective.aggregate).__name__}; loss_agg_mode={mode} "
                      "has an effect only on the KL and the entropy that verl adds itself")  # fmt: skip
            return
        # Refused on any difference: verl would silently train with another KL than the objective's.
        want = {"use_kl_loss": True, "kl_loss_coef": kl.beta, "kl_loss_type": KL_TYPES[kl.estimator]}
        got = {key: getattr(config, key, None) for key in want}
        same = got["use_kl_loss"] and abs(float(got["kl_loss_coef"] or 0) - kl.beta) <= 1e-9 * kl.beta
        if not same or got["kl_loss_type"] not in KL_TYPES[kl.estimator] or mode != own:
            shown = ", ".join(f"{key}={value}" for key, value in got.items())
            raise ConfigError(
                f"{self.name}: has a KL to the reference (beta = {kl.beta:g}, {kl.estimator}) in its loss, which verl "
                f"adds itself: got {shown}, loss_agg_mode={mode}; set actor_rollout_ref.actor.use_kl_loss=True, "
                f".kl_loss_coef={exact(kl.beta)}, .kl_loss_type={KL_TYPES[kl.estimator][0]} and .loss_agg_mode={own}; "
                "or register the objective with beta = 0 under another name"
            )


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator for verl: ``register_adv_est(name)(AdvantageEstimator(name, objective))``."""

    name: str
    objective: Objective

    @property
    def __name__(self) -> str:
        return self.name

    def __call__(
        self,
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: np.ndarray | None = None,
        config: Any = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Returns (advantages, returns), both (B, T) without gradient; ``index`` (B,) names each row's prompt."""
        if index is None:
            raise DataError(f"{self.name}: got no index; needs the prompt of every row (verl's uid)")
        self._check(config)
        mask = response_mask.to(torch.bool)
        # In float64, as all advantages: deviations of nearly equal rewards cancel.
        rewards = token_level_rewards.detach().to(torch.float64)
        names, inverse = np.unique(np.asarray(index).astype(str), return_inverse=True)
        groups = torch.from_numpy(inverse.reshape(-1))
        padding = torch.tensor([bool(PADDING.fullmatch(name)) for name in names])[groups].to(mask.device)
        objective, kl = self.objective, self.objective.reference
        # verl has put the KL into the token rewards already. Reward-to-go per token keeps it where it arose.
        if kl.active and kl.place == "to-go":
            objective = objective.replace(divergence=(KL(),), advantage=GivenReturns(_to_go(rewards)[mask]))
        batch = TokenBatch.from_padded(
            logprobs=torch.zeros(mask.shape, dtype=torch.float64, device=mask.device), mask=mask,
            # NaN means not judged: such a row leaves its group's statistics and gets advantage 0.
            rewards=rewards.sum(dim=1).masked_fill(padding & ~mask.any(dim=1), torch.nan),
            group_ids=groups.to(mask.device),
        )  # fmt: skip
        prepared = _advantages_alone(objective).prepare(batch)
        assert prepared.advantages is not None
        advantages = prepared.unpack(prepared.advantages).to(token_level_rewards.dtype)
        # Returns are for a critic, which none of these objectives has.
        return advantages, advantages

    def _check(self, config: Any) -> None:
        refuse_for_estimator(self.name, self.objective, config=config)
        rules = setting(config, "rollout_correction")
        if setting(rules, "bypass_mode") and (setting(rules, "rollout_is") or setting(rules, "rollout_rs")):
            _warn("algorithm.rollout_correction.rollout_is and rollout_rs act in bypass mode on verl's own loss "
                  "bypass_mode alone, and on none of trew's")  # fmt: skip
        kl = self.objective.reference
        filters = getattr(config, "filter_groups", None)
        if self.objective.keep and not (filters and filters.get("enable")):
            _warn(f"{self.name}: groups without signal have advantage 0, but stay in verl's denominators; set "
                  "algorithm.filter_groups.enable=True to have them replaced, as the objective does")  # fmt: skip
        if not kl.active or kl.place == "loss":
            return
        control = getattr(config, "kl_ctrl", None)
        got = (getattr(config, "use_kl_in_reward", False), getattr(config, "kl_penalty", None),
               getattr(control, "kl_coef", None), getattr(control, "type", None))  # fmt: skip
        # Up to rounding: the number has been written and read as text.
        same = got[0] and got[1] in KL_TYPES[kl.estimator] and abs(float(got[2] or 0) - kl.beta) <= 1e-9 * kl.beta
        if not same or got[3] != "fixed":
            raise ConfigError(
                f"{self.name}: has a KL to the reference (beta = {kl.beta:g}, {kl.estimator}) in its reward, which "
                f"verl takes off: got use_kl_in_reward={got[0]}, kl_penalty={got[1]}, kl_ctrl.kl_coef={got[2]}, "
                f"kl_ctrl.type={got[3]}; set algorithm.use_kl_in_reward=True, algorithm.kl_penalty="
                f"{KL_TYPES[kl.estimator][0]}, algorithm.kl_ctrl.kl_coef={exact(kl.beta)}, "
                "algorithm.kl_ctrl.type=fixed; "
                "or register the objective with beta = 0 under another name"
            )


def _denominators(name: str, objective: Objective, batch: TokenBatch, info: dict[str, Any]) -> Denominators:
    """Returns the mini-batch's denominators by verl's counts, or this batch's if verl gives none."""
    own = Denominators.of(batch)
    key = "batch_num_tokens" if isinstance(objective.aggregate, TokenMean) else "global_batch_size"
    # Each rank would divide by its own count, and ranks with few tokens would weigh more.
    if (info.get("dp_size") or 1) > 1 and info.get(key) is None:
        raise DataError(f"{name}: got dp_size = {info['dp_size']} without {key}; verl's global_batch_info must have it")
    tokens, sequences = info.get("batch_num_tokens"), info.get("global_batch_size")
    return Denominators(
        own.sequences if sequences is None else int(sequences),
        own.tokens if tokens is None else int(tokens),
        _longest(name, objective, info.get("loss_scale_factor")),
        own.groups,
    )


def _longest(name: str, objective: Objective, length: float | None) -> int | None:
    """The longest answer allowed, from verl's loss_scale_factor."""
    if isinstance(objective.aggregate, Constant) and length is None:
        raise ConfigError(
            f"{name}: got loss_scale_factor = None; it divides by the longest answer allowed, which no micro-batch "
            "knows: set actor_rollout_ref.actor.loss_scale_factor to data.max_response_length"
        )
    if length is not None and (length < 1 or length != int(length)):
        raise ConfigError(f"{name}: got loss_scale_factor = {length}, accepts a whole number of at least 1")
    return None if length is None else int(length)


def _advantages_alone(objective: Objective) -> Objective:
    """Returns the objective reduced to its advantages; a KL in them is already part of verl's token rewards."""
    return objective.replace(ratio=NoRatio(), weight=PolicyGradient(), correction=(), aggregate=TokenMean(),
                             divergence=(KL(),), entropy_bonus=EntropyBonus())  # fmt: skip


def _metrics(output: LossOutput) -> dict[str, float]:
    """Returns the same names for every micro-batch, since verl averages over ranks only metrics that all ranks have.

    A metric without any token gets the value of a policy that has not moved.
    """
    found = dict.fromkeys(QUANTILES, (0.0, 0.0)) | dict(output.metrics)
    return {f"actor/trew/{name}": total / count if count else float(name in _AT_REST)
            for name, (total, count) in found.items()}  # fmt: skip


def _to_go(rewards: Tensor) -> Tensor:
    # (B, T): sum from each token to the end.
    return rewards.flip(1).cumsum(1).flip(1)


def _warn(text: str) -> None:
    # Once per process: the loss is called for every micro-batch.
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)
