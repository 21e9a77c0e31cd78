"""Decides which objectives can run inside verl, and why others cannot, from their components rather than a list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...objective import Objective, preset, presets
from ...objective.advantage import Advantage, BaselineAdvantage, ExternalAdvantages
from ...objective.aggregate import Aggregate, Constant, SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from ...objective.baseline import Greedy, NoBaseline
from ...objective.component import SCOPES, Component
from ...objective.divergence import KL, Divergence
from ...objective.filter import MixedGroups, UnevenGroups
from ...objective.gae import GAE
from ...objective.imitation import DEMONSTRATED
from ...objective.scale import NoScaling
from ...objective.token_baseline import TokenBaseline

AGGREGATES: dict[type[Aggregate], str] = {
    TokenMean: "token-mean",
    SequenceMeanTokenMean: "seq-mean-token-mean",
    SequenceMeanTokenSum: "seq-mean-token-sum",
    Constant: "seq-mean-token-sum-norm",
}
"""Our aggregates and verl's names for them (``loss_agg_mode``)."""

KL_TYPES = {"k1": ("kl", "k1"), "k2": ("mse", "k2"), "k3": ("low_var_kl", "k3")}
"""Our KL estimators and verl's names for them (``kl_loss_type``, ``kl_penalty``), the usual one first."""

NOT_GIVEN = {
    "rollout_logprobs": "verl hands a loss no log-probabilities of the sampler besides those of the old policy",
    "ref_logprobs": "verl hands a loss no log-probabilities of the reference",
    "teacher_logprobs": "verl hands a loss no log-probabilities of a teacher: use verl's own distillation",
    "entropies": "verl hands over no entropies at this place",
    "score_norms": "verl hands sums of squared probabilities to its own estimators only",
    "step_rewards": "verl hands over no step rewards",
    "turns": "verl hands over no turns",
    "values": "verl hands over no values of its critic",
    "truncated": "verl does not say which answers were cut off",
    "baselines": "verl samples the greedy answer only for its own estimator: use adv_estimator=remax",
    "correct": "verl does not say which answers are correct",
}


PRUNED = "the answers that it prunes leave the denominators too, and these are verl's"
_MIXED = "verl adds the KL to the token rewards, where a baseline cannot tell it from the reward"

BYPASS = (("algorithm.rollout_correction.bypass_mode", "True"),
          ("+actor_rollout_ref.actor.policy_loss.rollout_correction", "${algorithm.rollout_correction}"))  # fmt: skip
"""Keys that make verl pass the sampler's log-probs as the old policy's. The second copies the setting into the actor's
configuration, the only one that a loss sees: without it, a loss does not know which log-probs it got."""

_OLD = ("trainer.use_v1", "False")
OWN = {
    "use adv_estimator=remax": (_OLD,),
    "use adv_estimator=gdpo": (_OLD,),
    "use adv_estimator=tir_optimal_token_baseline": (
        _OLD,
        ("actor_rollout_ref.actor.calculate_sum_pi_squared", "True"),
    ),
}
"""What verl's own estimators need: its old trainer, as the new one does not pass them what they read; and keys that
make it compute them."""

OF_VERL = ("use adv_estimator=", "use verl's own", "is verl's own")
"""Phrases of reasons that name a verl equivalent: our loss is then useful without our advantages."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Reasons why an objective cannot be a policy loss or an advantage estimator in verl; empty if it can.

    ``settings`` are the verl keys that it needs besides its name.
    """

    loss: str
    advantage: str
    settings: tuple[tuple[str, str], ...] = ()


def offer(objective: Objective) -> Offer:
    """Returns what verl can use of an objective."""
    loss, advantage = _no_loss(objective), _no_advantage(objective)
    # A loss accepts whatever advantages it is given, so that a preset stripped of its estimator would still run, as a
    # different algorithm under the preset's name.
    if advantage and not loss and not any(words in advantage for words in OF_VERL):
        loss = f"without its advantages it is another algorithm, and {advantage}"
    settings = _settings(objective, loss=not loss, advantage=not advantage)
    own = [key for words, keys in OWN.items() if not loss and words in advantage for key in keys]
    if _OLD in own:  # which replaces no groups, and would ignore the keys
        settings = [(key, value) for key, value in settings if not key.startswith("algorithm.filter_groups.")]
    settings += own
    return Offer(loss, advantage, tuple(settings))


def table() -> dict[str, Offer]:
    """:func:`offer` for every preset with its default settings."""
    return {name: offer(preset(name)) for name in presets()}


def verl_s_kl(objective: Objective) -> KL | None:
    """Returns the loss's KL term to the reference, which verl computes separately from the policy loss."""
    kl = objective.reference
    return kl if kl.active and kl.place == "loss" else None


def bypasses(objective: Objective) -> bool:
    """Whether the loss reads the sampler and no old policy, so that verl may pass one as the other."""
    return objective.ratio.anchor == "rollout"


def in_loss(objective: Objective) -> tuple[Divergence, ...]:
    """Returns the divergences that stay in the policy loss: all but the KL to the reference."""
    return tuple(t for t in objective.divergence if t.active and t is not objective.reference)


def _no_loss(objective: Objective) -> str:
    components: list[Component] = [
        objective.ratio,
        objective.weight,
        *objective.correction,
        objective.aggregate,
        *in_loss(objective),
    ]
    # In bypass mode verl passes the sampler's log-probs as the old policy's.
    needed = [
        n for component in components for n in component.needs if not (n == "rollout_logprobs" and bypasses(objective))
    ]
    missing = [NOT_GIVEN[n] for n in needed if n in NOT_GIVEN]
    # Reasons in order of precedence: only the first is reported.
    checks = {
        "corrections of the mismatch are verl's own: algorithm.rollout_correction": bool(objective.correction),
        "the entropy bonus is verl's own: actor.entropy_coeff": objective.entropy_bonus.active,
        "verl does not tell a loss which answers are correct (nll)": objective.nll.active,
        PRUNED: bool(objective.prune),
        "it must see the whole step at once, and verl calls a loss with one micro-batch at a time": any(
            SCOPES.index(p.scope) > SCOPES.index("sequence") for p in components
        ),
    }
    reasons = [reason for reason, holds in checks.items() if holds] + _no_kl(objective)
    # A correction always needs the sampler's log-probs. That reason would hide the useful one, verl's equivalent key.
    return next(iter(reasons if objective.correction else [*missing, *reasons]), "")


def _no_kl(objective: Objective) -> list[str]:
    """Says why verl's own KL term in the loss cannot stand in for the objective's."""
    kl = verl_s_kl(objective)
    if kl is None:
        return []
    reasons = [] if kl.estimator in KL_TYPES else [f"verl's KL term has no estimator {kl.estimator}"]
    if type(objective.aggregate) not in AGGREGATES:
        reasons.append(f"verl's KL term cannot be averaged by {type(objective.aggregate).__name__}")
    return reasons


def _no_advantage(objective: Objective) -> str:
    rule = objective.advantage
    if reason := _kl_of_another_kind(objective):
        return reason
    if isinstance(rule, ExternalAdvantages):
        return "its advantages come from a critic: use verl's own, adv_estimator=gae"
    if isinstance(rule, DEMONSTRATED):
        return "its completions are demonstrations, and verl samples them"
    if isinstance(rule, GAE):
        # Any other field than gamma and lam that is not at its default.
        if rule != GAE(rule.gamma, rule.lam):
            return "verl's critic learns with the lam of the policy, and with one for all lengths"
        return "verl hands an estimator no values of its critic: use adv_estimator=gae"
    if isinstance(rule, TokenBaseline):
        return _no_token_baseline(rule)
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
    return _no_kl_in_reward(objective) if kl.active and kl.place != "loss" else ""


def _kl_of_another_kind(objective: Objective) -> str:
    """Why verl's own estimator would leave out the KL of these advantages, or place it otherwise."""
    kl, rule = objective.reference, objective.advantage
    if not kl.active or kl.place == "loss":
        return ""
    if rule.per_reward:
        return "verl's gdpo reads each reward as it is, without the KL that verl takes off their sum"
    if isinstance(rule, TokenBaseline):
        return _MIXED
    if _is_greedy(rule) and kl.place != "to-go":
        return "verl's remax counts the KL of a token and of those behind it, not the whole answer's: kl_place = to-go"
    return ""


def _no_token_baseline(rule: TokenBaseline) -> str:
    if rule.tail == "reward":
        return f"{NOT_GIVEN['score_norms']}: use adv_estimator=tir_optimal_token_baseline"
    return f"{NOT_GIVEN['score_norms']}, and these give tokens that no other answer reaches their reward: tail = reward"


def _no_kl_in_reward(objective: Objective) -> str:
    kl = objective.reference
    if kl.estimator not in KL_TYPES:
        return f"verl's KL in the reward has no estimator {kl.estimator}"
    # verl subtracts the KL from the token rewards before it calls an estimator, which then sees sums only.
    if kl.place == "to-go" and not _is_plain(objective):
        return _MIXED
    return ""


def _is_plain(objective: Objective) -> bool:
    rule = objective.advantage
    return (
        isinstance(rule, BaselineAdvantage)
        and isinstance(rule.baseline, NoBaseline)
        and isinstance(rule.scale, NoScaling)
    )


def _is_greedy(rule: Advantage) -> bool:
    return isinstance(rule, BaselineAdvantage) and isinstance(rule.baseline, Greedy)


def exact(number: float) -> str:
    """A number for verl's command line: in six digits where that is the number itself, else in all of them.

    >>> exact(0.04), exact(1.0), exact(0.123456789)
    ('0.04', '1', '0.123456789')
    """
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def _settings(objective: Objective, *, loss: bool, advantage: bool) -> list[tuple[str, str]]:
    found = []
    if loss:
        found += _of_loss(objective)
    kl, rule = objective.reference, objective.advantage
    if loss and isinstance(rule, GAE):  # by verl's own estimator
        found += [("algorithm.gamma", exact(rule.gamma)), ("algorithm.lam", exact(rule.lam))]
    # verl's own estimators for these read token rewards, which have the KL in them.
    by_verl = loss and (isinstance(rule, GAE) or _is_greedy(rule))
    if (advantage or by_verl) and kl.active and kl.place != "loss":
        found += [("algorithm.use_kl_in_reward", "True"), ("algorithm.kl_ctrl.kl_coef", exact(kl.beta)),
                  ("algorithm.kl_penalty", KL_TYPES[kl.estimator][0])]  # fmt: skip
    if (loss or advantage) and any(isinstance(k, (MixedGroups, UnevenGroups)) for k in objective.keep):
        found += [("algorithm.filter_groups.enable", "True"), ("algorithm.filter_groups.metric", "reward")]
    return found


def _of_loss(objective: Objective) -> Iterator[tuple[str, str]]:
    """Yields the keys under which verl calls a loss as the objective means it: the average, the old policy, the KL."""
    actor = "actor_rollout_ref.actor."
    if aggregate := AGGREGATES.get(type(objective.aggregate)):
        yield f"{actor}loss_agg_mode", aggregate
    if isinstance(objective.aggregate, Constant):
        # A placeholder: the export fills in the recipe's length, and the documentation shows it as it is.
        yield f"{actor}loss_scale_factor", "<data.max_response_length>"
    if bypasses(objective):
        yield from BYPASS
    if kl := verl_s_kl(objective):
        yield f"{actor}use_kl_loss", "True"
        yield f"{actor}kl_loss_coef", exact(kl.beta)
        yield f"{actor}kl_loss_type", KL_TYPES[kl.estimator][0]
