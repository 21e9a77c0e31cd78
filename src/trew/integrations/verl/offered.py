"""Which presets can run inside verl, and why others cannot: read off the objective's components, nothing is listed."""

from __future__ import annotations

from dataclasses import dataclass

from ...objective import Objective, preset, presets
from ...objective.advantage import BaselineAdvantage, ExternalAdvantages
from ...objective.aggregate import Constant, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from ...objective.baseline import NoBaseline
from ...objective.component import SCOPES, Component
from ...objective.divergence import KL, Divergence
from ...objective.filter import MixedGroups, UnevenGroups
from ...objective.scale import NoScaling

AGGREGATES = {
    TokenMean: "token-mean",
    SequenceMeanTokenMean: "seq-mean-token-mean",
    SequenceMeanTokenSum: "seq-mean-token-sum",
    Constant: "seq-mean-token-sum-norm",
}
"""Our aggregates under verl's names of them (``loss_agg_mode``)."""

KL_TYPES = {"k1": ("kl", "k1"), "k2": ("mse", "k2"), "k3": ("low_var_kl", "k3")}
"""Our KL estimators under verl's names of them (``kl_loss_type``, ``kl_penalty``); the first is the usual one."""

NOT_GIVEN = {
    "rollout_logprobs": "verl hands a loss no log-probabilities of the sampler beside those of the old policy",
    "ref_logprobs": "verl hands a loss no log-probabilities of the reference",
    "entropies": "verl hands over no entropies at this place",
    "step_rewards": "verl hands over no step rewards",
    "truncated": "verl does not say which answers were cut off",
    "baselines": "verl samples the greedy answer only for its own estimator: use adv_estimator=remax",
    "correct": "verl does not say which answers are correct",
}


PRUNED = "the answers that it prunes leave the denominators too, and these are verl's"

BYPASS = (("algorithm.rollout_correction.bypass_mode", "True"),
          ("+actor_rollout_ref.actor.policy_loss.rollout_correction", "${algorithm.rollout_correction}"))  # fmt: skip
"""With these verl's old policy is the sampler, in its own numbers; the second lets the loss see that it is so."""

V0 = {"use adv_estimator=remax": ("trainer.use_v1", "False"), "use adv_estimator=gdpo": ("trainer.use_v1", "False")}
"""Estimators of verl's own that its new trainer hands nothing of what they read: they run in its old one."""

OF_VERL = ("use adv_estimator=", "use verl's own", "is verl's own")
"""What a reason says where verl itself has the advantages, so that the loss is of use without ours."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Why an objective can be no policy loss and no advantage estimator of verl; empty where it can. ``settings`` are
    verl's keys that it needs beside its name."""

    loss: str
    advantage: str
    settings: tuple[tuple[str, str], ...] = ()


def offer(objective: Objective) -> Offer:
    """What verl can have of an objective."""
    loss, advantage = _no_loss(objective), _no_advantage(objective)
    if advantage and not loss and not any(words in advantage for words in OF_VERL):
        loss = f"without its advantages it is another algorithm, and {advantage}"
    settings = _settings(objective, loss=not loss, advantage=not advantage)
    settings += [key for words, key in V0.items() if not loss and words in advantage]
    return Offer(loss, advantage, tuple(settings))


def table() -> dict[str, Offer]:
    """:func:`offer` of every preset as it stands."""
    return {name: offer(preset(name)) for name in presets()}


def verl_s_kl(objective: Objective) -> KL | None:
    """The KL term to the reference in the loss, which verl computes beside the policy loss."""
    kl = objective.reference
    return kl if kl.active and kl.place == "loss" else None


def bypasses(objective: Objective) -> bool:
    """Whether the loss knows the sampler alone and no old policy, so that verl may give it the one as the other."""
    return objective.ratio.anchor == "rollout"


def in_loss(objective: Objective) -> tuple[Divergence, ...]:
    """The divergences that stay in the policy loss: all but the KL to the reference."""
    return tuple(t for t in objective.divergence if t.active and t is not objective.reference)


def _no_loss(objective: Objective) -> str:
    terms = in_loss(objective)
    components: list[Component] = [
        objective.ratio,
        objective.weight,
        *objective.correction,
        objective.aggregate,
        *terms,
    ]
    needed = [
        n for component in components for n in component.needs if not (n == "rollout_logprobs" and bypasses(objective))
    ]
    missing = [NOT_GIVEN[n] for n in needed if n in NOT_GIVEN]
    kl = verl_s_kl(objective)
    checks = {
        "corrections of the mismatch are verl's own: algorithm.rollout_correction": bool(objective.correction),
        "the entropy bonus is verl's own: actor.entropy_coeff": objective.entropy_bonus.active,
        PRUNED: bool(objective.prune),
        "it must see the whole step at once, and verl calls a loss with one micro-batch at a time": any(
            SCOPES.index(p.scope) > SCOPES.index("sequence") for p in components
        ),
        f"verl's KL term has no estimator {kl.estimator if kl else ''}": kl is not None
        and kl.estimator not in KL_TYPES,
        f"verl's KL term cannot be averaged by {type(objective.aggregate).__name__}": kl is not None
        and type(objective.aggregate) not in AGGREGATES,
    }
    told = [reason for reason, holds in checks.items() if holds]
    return next(iter(told if objective.correction else [*missing, *told]), "")


def _no_advantage(objective: Objective) -> str:
    rule = objective.advantage
    if isinstance(rule, ExternalAdvantages):
        return "its advantages come from a critic: use verl's own, adv_estimator=gae"
    if objective.shape:
        return "the soft overlong punishment is verl's own: reward.reward_manager.name=dapo"
    if rule.per_reward:
        return "verl hands an estimator the sum of the rewards, not each: use adv_estimator=gdpo"
    if objective.prune:
        return PRUNED
    components: list[Component] = [rule, *objective.keep, *objective.adjust, *objective.select]
    for name in (name for component in components for name in component.needs):
        if name in NOT_GIVEN:
            return NOT_GIVEN[name]
    kl = objective.reference
    if kl.active and kl.place != "loss" and kl.estimator not in KL_TYPES:
        return f"verl's KL in the reward has no estimator {kl.estimator}"
    if kl.active and kl.place == "to-go" and not _is_plain(objective):
        return "verl adds the KL to the token rewards, where a baseline cannot tell it from the reward"
    return ""


def _is_plain(objective: Objective) -> bool:
    rule = objective.advantage
    return (
        isinstance(rule, BaselineAdvantage)
        and isinstance(rule.baseline, NoBaseline)
        and isinstance(rule.scale, NoScaling)
    )


def _settings(objective: Objective, *, loss: bool, advantage: bool) -> list[tuple[str, str]]:
    actor, found = "actor_rollout_ref.actor.", []
    aggregate = AGGREGATES.get(type(objective.aggregate))
    if loss and aggregate:
        found.append((f"{actor}loss_agg_mode", aggregate))
    if loss and isinstance(objective.aggregate, Constant):
        found.append((f"{actor}loss_scale_factor", "<data.max_response_length>"))
    if loss and bypasses(objective):
        found += BYPASS
    kl = objective.reference
    if loss and kl.active and kl.place == "loss":
        found += [(f"{actor}use_kl_loss", "True"), (f"{actor}kl_loss_coef", f"{kl.beta:g}"),
                  (f"{actor}kl_loss_type", KL_TYPES[kl.estimator][0])]  # fmt: skip
    if advantage and kl.active and kl.place != "loss":
        found += [("algorithm.use_kl_in_reward", "True"), ("algorithm.kl_ctrl.kl_coef", f"{kl.beta:g}"),
                  ("algorithm.kl_penalty", KL_TYPES[kl.estimator][0])]  # fmt: skip
    if (loss or advantage) and any(isinstance(k, (MixedGroups, UnevenGroups)) for k in objective.keep):
        found += [("algorithm.filter_groups.enable", "True"), ("algorithm.filter_groups.metric", "reward")]
    return found
