"""Options that every preset takes in addition to its own settings: KL, aggregation, corrections, filters, entropy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .aggregate import (
    Aggregate,
    Constant,
    PromptMeanTokenMean,
    SequenceMeanTokenMean,
    SequenceMeanTokenSum,
    TokenMean,
)
from .component import not_negative, one_of
from .correction import Correction, GeometricMask, MaskedImportance, OffPolicySequenceMask, TruncatedImportance
from .distillation import Distillation
from .divergence import KL, Divergence
from .entropy_bonus import EntropyBonus
from .filter import MixedGroups, UncutCompletions
from .likelihood import CorrectLikelihood
from .objective import Objective
from .shaping import SoftOverlong

AGGREGATES: dict[str, type[Aggregate]] = {
    "seq-mean-token-mean": SequenceMeanTokenMean,
    "token-mean": TokenMean,
    "seq-mean-token-sum": SequenceMeanTokenSum,
    "prompt-mean-token-mean": PromptMeanTokenMean,
    "constant": Constant,
}

CORRECTIONS: dict[str, Correction] = {
    "tis": TruncatedImportance(),
    "tis-sequence": TruncatedImportance(level="sequence"),
    "mis": MaskedImportance(),
    "mis-token": MaskedImportance(level="token"),
    "icepop": MaskedImportance(0.5, 5.0, level="token"),
    "geo-mask": GeometricMask(),
    "opsm": OffPolicySequenceMask(),
}


@dataclass(frozen=True)
class Options:
    """The options of every preset; :meth:`of` reads them off an objective, :func:`apply` changes some of them."""

    beta: float = 0.0  # coefficient of the KL to the reference policy; 0 needs no reference model
    kl: str = "k3"  # its estimator: k1, k2, k3, or k3-corrected
    kl_place: str = "loss"  # where it acts: loss, reward, or to-go
    distill: float = 0.0  # coefficient of on-policy distillation, in the advantages; 0 needs no teacher
    aggregate: str = ""  # how tokens are averaged
    correction: str = "none"  # for train-rollout mismatch; several joined by "+"
    correction_low: float | None = None  # bounds of the correction's ratio, where it has any
    correction_high: float | None = None
    opsm_delta: float | None = None  # threshold of the off-policy sequence mask, in nats per token
    dynamic_sampling: bool = False  # replace groups that are all right or all wrong
    overlong_filtering: bool = False  # completions that were cut off carry no loss
    overlong_cache: int = 0  # tokens over which the soft overlong punishment grows; 0 = none
    entropy_bonus: float = 0.0  # coefficient of the entropy bonus
    entropy_target: float = 0.0  # adaptive bonus: mean entropy in nats to be kept; 0 = fixed
    entropy_step: float = 0.005  # by which an adaptive coefficient moves after each optimizer step
    nll: float = 0.0  # coefficient of the log-likelihood of correct completions

    @staticmethod
    def of(objective: Objective) -> Options:
        """The options that describe an objective."""
        kl, bonus = objective.reference, objective.entropy_bonus
        return Options(
            beta=kl.beta, kl=kl.estimator, kl_place=kl.place,
            distill=objective.distillation,
            aggregate=_aggregate_name(objective.aggregate),
            **_correction_options(objective.correction),
            dynamic_sampling=objective.dynamic_sampling,
            overlong_filtering=any(isinstance(p, UncutCompletions) for p in objective.prune),
            overlong_cache=next((s.cache for s in objective.shape if isinstance(s, SoftOverlong)), 0),
            entropy_bonus=bonus.coefficient, entropy_target=bonus.target, entropy_step=bonus.step,
            nll=objective.nll.coefficient,
        )  # fmt: skip


def apply(objective: Objective, **changes: Any) -> Objective:
    """``objective`` with the given options changed and all others as they are. Raises ValueError, ``name: got ...``."""
    before = Options.of(objective)
    if "correction" in changes:  # bounds belong to one correction: another starts from its own defaults
        before = dataclasses.replace(before, correction_low=None, correction_high=None, opsm_delta=None)
    options = dataclasses.replace(before, **changes)
    # An option that is not named leaves its component alone, which may be one that no option can express.
    for names, change in _CHANGES.items():
        if any(name in changes for name in names):
            objective = change(objective, options)
    return _kl_of_sampler(objective)


def _aggregate_name(aggregate: Aggregate) -> str:
    """The option's name for an aggregate; "own" for one that only some presets use."""
    return next((name for name, kind in AGGREGATES.items() if type(aggregate) is kind), "own")


def _correction_options(corrections: tuple[Correction, ...]) -> dict[str, Any]:
    named = {name: c for name in CORRECTIONS for c in corrections if _is_called(c, name)}
    found: dict[str, Any] = {"correction": "+".join(named) or "none"}
    for correction in named.values():  # at most one with bounds, at most one off-policy mask
        if isinstance(correction, OffPolicySequenceMask):
            found["opsm_delta"] = correction.delta
        else:
            found["correction_low"] = getattr(correction, "low", None)
            found["correction_high"] = getattr(correction, "high", None)
    return found


def _is_called(correction: Correction, name: str) -> bool:
    """Whether the option ``name`` stands for this correction, whatever its bounds are."""
    known = CORRECTIONS[name]
    same = type(correction) is type(known) and getattr(correction, "level", None) == getattr(known, "level", None)
    if same and name in ("mis-token", "icepop"):  # one rule with two names: icepop has a lower bound
        return (getattr(correction, "low", 0.0) > 0) == (name == "icepop")
    return same


def _kl(objective: Objective, options: Options) -> Objective:
    before = objective.reference
    kl = KL(options.beta, options.kl, options.kl_place, behaviour=before.behaviour)
    # A pull towards another policy than the reference stays.
    others: tuple[Divergence, ...] = tuple(t for t in objective.divergence if t != before)
    return objective.replace(divergence=(kl, *others))


def _kl_of_sampler(objective: Objective) -> Objective:
    """Has ``k3-corrected`` divide by the policy that sampled: pi_old, but mu where the ratio is measured against mu, or
    a correction is set, since pi_old then is the policy before the step."""
    kl = objective.reference
    by_mu = objective.ratio.anchor == "rollout" or any(c.mismatch for c in objective.correction)
    behaviour = "rollout" if by_mu and kl.estimator == "k3-corrected" else "old"
    if kl.behaviour == behaviour or kl not in objective.divergence:
        return objective
    own = dataclasses.replace(kl, behaviour=behaviour)
    return objective.replace(divergence=tuple(own if term == kl else term for term in objective.divergence))


def _distill(objective: Objective, options: Options) -> Objective:
    not_negative(distill=options.distill)
    # Behind all others: whitening, for instance, would rescale a coefficient in nats by the deviation of the batch.
    others = tuple(a for a in objective.adjust if not isinstance(a, Distillation))
    return objective.replace(adjust=(*others, Distillation(options.distill)) if options.distill else others)


def _aggregate(objective: Objective, options: Options) -> Objective:
    one_of(tuple(AGGREGATES), aggregate=options.aggregate)
    return objective.replace(aggregate=AGGREGATES[options.aggregate]())


def _correction(objective: Objective, options: Options) -> Objective:
    names = _correction_names(options.correction)
    _refuse_bounds_without_rule(names, options)
    return objective.replace(correction=tuple(_bounded(CORRECTIONS[name], options) for name in names))


def _correction_names(text: str) -> list[str]:
    """Names joined by "+"; ValueError for unknown and repeated ones, and for two that correct for the same."""
    names = [] if text == "none" else text.split("+")
    for name in names:
        one_of(("none", *CORRECTIONS), correction=name)
    if len(set(names)) < len(names):
        raise ValueError(f"correction: got {text!r}, accepts each name once")
    mismatch = [name for name in names if CORRECTIONS[name].mismatch]
    if len(mismatch) > 1:
        raise ValueError(
            f"correction: got {text!r}, accepts one of {', '.join(mismatch)}: each corrects for the whole mismatch; "
            "opsm may be joined to it"
        )
    return names


def _refuse_bounds_without_rule(names: list[str], options: Options) -> None:
    bounded = any(CORRECTIONS[name].mismatch for name in names)
    for name, has_rule in (("correction_low", bounded), ("correction_high", bounded), ("opsm_delta", "opsm" in names)):
        value = getattr(options, name)
        if value is not None and not has_rule:
            raise ValueError(f"{name}: got {value!r}, but correction = {options.correction!r} has no such bound")


def _bounded(correction: Correction, options: Options) -> Correction:
    if isinstance(correction, OffPolicySequenceMask):
        return correction if options.opsm_delta is None else OffPolicySequenceMask(options.opsm_delta)
    bounds = {"low": options.correction_low, "high": options.correction_high}
    return dataclasses.replace(correction, **{k: v for k, v in bounds.items() if v is not None})  # pyrefly: ignore[bad-specialization]


def _sampling(objective: Objective, options: Options) -> Objective:
    others = tuple(k for k in objective.keep if not isinstance(k, MixedGroups))
    return objective.replace(keep=(MixedGroups(), *others) if options.dynamic_sampling else others)


def _filtering(objective: Objective, options: Options) -> Objective:
    others = tuple(p for p in objective.prune if not isinstance(p, UncutCompletions))
    return objective.replace(prune=(*others, UncutCompletions()) if options.overlong_filtering else others)


def _punishment(objective: Objective, options: Options) -> Objective:
    if options.overlong_cache < 0:
        raise ValueError(f"overlong_cache: got {options.overlong_cache!r}, accepts 0 (none) or more")
    others = tuple(s for s in objective.shape if not isinstance(s, SoftOverlong))
    return objective.replace(
        shape=(*others, SoftOverlong(options.overlong_cache)) if options.overlong_cache else others
    )


def _entropy(objective: Objective, options: Options) -> Objective:
    bonus = EntropyBonus(options.entropy_bonus, options.entropy_target, options.entropy_step)
    return objective.replace(entropy_bonus=bonus)


def _nll(objective: Objective, options: Options) -> Objective:
    return objective.replace(nll=CorrectLikelihood(options.nll))


_CHANGES: dict[tuple[str, ...], Callable[[Objective, Options], Objective]] = {
    ("beta", "kl", "kl_place"): _kl,
    ("distill",): _distill,
    ("aggregate",): _aggregate,
    ("correction", "correction_low", "correction_high", "opsm_delta"): _correction,
    ("dynamic_sampling",): _sampling,
    ("overlong_filtering",): _filtering,
    ("overlong_cache",): _punishment,
    ("entropy_bonus", "entropy_target", "entropy_step"): _entropy,
    ("nll",): _nll,
}
