"""Refuses settings of verl's own losses and estimators that ours would ignore, and says what to set instead.

Our components carry these settings in their presets, so that a key set in verl would otherwise have no effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import ConfigError
from ...objective import Objective
from ...objective.advantage import BaselineAdvantage
from ...objective.scale import BatchStd, GroupStd
from .offered import AGGREGATES, BYPASS, bypasses

LOSS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "clip_ratio": (0.2, ("eps_low", "eps_high")),
    "clip_ratio_low": (0.2, ("eps_low",)),
    "clip_ratio_high": (0.2, ("eps_high",)),
    "clip_ratio_c": (3.0, ("cap",)),
    "tau_pos": (1.0, ("tau_pos",)),
    "tau_neg": (1.05, ("tau_neg",)),
    "policy_loss.clip_cov_ratio": (0.0002, ()),
    "policy_loss.clip_cov_lb": (1.0, ()),
    "policy_loss.clip_cov_ub": (5.0, ()),
    "policy_loss.kl_cov_ratio": (0.0002, ()),
    "policy_loss.ppo_kl_coef": (0.1, ()),
    "policy_loss.dro_beta": (None, ()),
}
"""Keys of verl's actor: the default, which counts as not set, and our names for the same setting."""

ESTIMATOR: dict[str, Any] = {"gamma": 1.0, "lam": 1.0, "use_pf_ppo": False, "gdpo_reward_keys": None,
                             "gdpo_reward_weights": None}  # fmt: skip
"""Keys of verl's ``algorithm`` and their defaults."""

DEFAULT_MODE = "token-mean"
MIRROR = "=".join(BYPASS[1])
"""The key that shows a loss what is corrected, and how."""


def refuse_for_loss(name: str, objective: Objective, *, mode: str, config: Any) -> None:
    """Raises ConfigError for actor settings that this loss ignores, unless they are at verl's default or agree with the
    loss."""
    problems = _ignored_bounds(name, objective, config)
    own = AGGREGATES.get(type(objective.aggregate), "none of verl's")
    # verl's default looks the same as a mode that nobody set; PolicyLoss warns about that one instead.
    if mode not in (own, DEFAULT_MODE):
        problems.append(
            f"{name}: got loss_agg_mode={mode}, but averages by {own}: set actor_rollout_ref.actor.loss_agg_mode="
            f"{own}, or give the objective another aggregate under a name of its own"
        )
    if bypasses(objective):
        problems += _bypass(name, setting(config, "policy_loss.rollout_correction"))
    if problems:
        raise ConfigError(problems)


def _ignored_bounds(name: str, objective: Objective, config: Any) -> list[str]:
    problems = []
    for key, (default, ours) in LOSS.items():
        got = setting(config, key)
        same = bool(ours) and all(getattr(objective.weight, attribute, None) == got for attribute in ours)
        if got is not None and got != default and not same:
            has = [f"{a} = {getattr(objective.weight, a):g}" for a in ours if hasattr(objective.weight, a)]
            problems.append(
                f"{name}: got actor_rollout_ref.actor.{key}={got}, which only verl's own losses read; here the preset "
                f"has {', '.join(has) or 'no such bound'}. Leave the key at {default}, and give the objective other "
                "settings under a name of its own: TREW_VERL, or register"
            )
    return problems


def _bypass(name: str, correction: Any) -> Iterator[str]:
    if not setting(correction, "bypass_mode"):
        yield (
            f"{name}: compares the policy with the sampler, which verl's old policy is in bypass mode alone: got "
            f"actor_rollout_ref.actor.policy_loss.rollout_correction.bypass_mode={setting(correction, 'bypass_mode')}; "
            f"set algorithm.rollout_correction.bypass_mode=True and {MIRROR}"
        )
    for key in ("rollout_is", "rollout_rs"):
        if got := setting(correction, key):
            yield (
                f"{name}: got algorithm.rollout_correction.{key}={got}, which in bypass mode acts on verl's own loss "
                "bypass_mode alone; leave it at null"
            )


def refuse_for_estimator(name: str, objective: Objective, *, config: Any) -> None:
    """Raises ConfigError for ``algorithm`` settings that this estimator ignores."""
    problems = [
        f"{name}: got algorithm.{key}={got}, which only verl's own estimators read; leave it at {default}"
        for key, default in ESTIMATOR.items()
        if (got := setting(config, key)) is not None and got != default
    ]
    scale = objective.advantage.scale if isinstance(objective.advantage, BaselineAdvantage) else None
    if setting(config, "norm_adv_by_std_in_grpo") is False and isinstance(scale, GroupStd | BatchStd):
        problems.append(
            f"{name}: got algorithm.norm_adv_by_std_in_grpo=False, but divides by a standard deviation; leave it at "
            "True, and choose a preset that does not, as trew-dr-grpo"
        )
    if problems:
        raise ConfigError(problems)


def setting(config: Any, key: str) -> Any:
    """Returns the value under a dotted key of nested objects or tables, or None."""
    # verl passes dataclasses in some places and OmegaConf or dictionaries in others.
    for part in key.split("."):
        config = config.get(part) if isinstance(config, Mapping) else getattr(config, part, None)
    return config
