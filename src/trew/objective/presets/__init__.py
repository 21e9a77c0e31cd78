"""Algorithms by name: a function each, whose parameters are its settings, and one table that lists them.

A name may also be that of a function or an objective in a file of the user's, as ``path/to/file.py:name``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError, nearest
from ...utils import peer_names
from ...utils.user_files import describe, is_file_spec, short_name, where
from .. import options as common
from .. import own as users
from .. import trial
from ..objective import Objective
from . import clip, distillation, entropy, group, imitation, policy_gradient, sequence, trust, turns

PRESETS: dict[str, Callable[..., Objective]] = {
    "reinforce": policy_gradient.reinforce,
    "remax": policy_gradient.remax,
    "rloo": policy_gradient.rloo,
    "reinforce-pp": policy_gradient.reinforce_pp,
    "reinforce-pp-baseline": policy_gradient.reinforce_pp_baseline,
    "ppo": clip.ppo,
    "vapo": clip.vapo,
    "ppo-clip": clip.ppo_clip,
    "dual-clip": clip.dual_clip,
    "grpo": group.grpo,
    "grpo-process": group.grpo_process,
    "gigpo": turns.gigpo,
    "mt-grpo": turns.mt_grpo,
    "turn-returns": turns.turn_returns,
    "bnpo-paper": group.bnpo_paper,
    "token-mean-local": group.token_mean_local,
    "dapo": group.dapo,
    "dr-grpo": group.dr_grpo,
    "gtpo": entropy.gtpo,
    "grpo-s": entropy.grpo_s,
    "trw-triangular": trust.trw_triangular,
    "trw-logistic": trust.trw_logistic,
    "trw-entropy": trust.trw_entropy,
    "two-sided": clip.two_sided,
    "gspo": sequence.gspo,
    "gspo-token": sequence.gspo_token,
    "luspo": sequence.luspo,
    "gmpo": sequence.gmpo,
    "cispo": clip.cispo,
    "scalerl": clip.scalerl,
    "aipo": clip.aipo,
    "sapo": clip.sapo,
    "vespo": sequence.vespo,
    "dppo-tv": trust.dppo_tv,
    "dppo-kl": trust.dppo_kl,
    "prime-rl": trust.prime_rl,
    "prime-rl-ipo": trust.prime_rl_ipo,
    "rollout-is": trust.rollout_is,
    "m2po": trust.m2po,
    "topr": policy_gradient.topr,
    "aspo": clip.aspo,
    "ce-gppo": clip.ce_gppo,
    "gpg": policy_gradient.gpg,
    "opo": policy_gradient.opo,
    "otb": policy_gradient.otb,
    "lite-ppo": group.lite_ppo,
    "cppo": group.cppo,
    "kl-cov": entropy.kl_cov,
    "clip-cov": entropy.clip_cov,
    "high-entropy-tokens": entropy.high_entropy_tokens,
    "entropy-advantage": entropy.entropy_advantage,
    "maxrl": group.maxrl,
    "pass-at-k": group.pass_at_k,
    "grpo-passk": group.grpo_passk,
    "gdpo": group.gdpo,
    "kimi": policy_gradient.kimi,
    "dro": policy_gradient.dro,
    "deepseek-v3.2": trust.deepseek_v3_2,
    "opd": distillation.opd,
    "sft": imitation.sft,
    "rft": imitation.rft,
    "online-rft": imitation.online_rft,
    "dpo": imitation.dpo,
}


def presets() -> tuple[str, ...]:
    """The names of all algorithms.

    >>> "dapo" in presets(), "trw-logistic" in presets()
    (True, True)
    """
    return tuple(PRESETS)


def builder(name: str) -> Callable[..., Objective]:
    """The function that makes an objective; its parameters are the settings. That of a file is loaded."""
    return users.load(name).make if is_file_spec(name) else PRESETS[name]


def doc(name: str) -> str:
    """What the author of an objective says about it."""
    return users.load(name).doc if is_file_spec(name) else PRESETS[name].__doc__ or ""


def settings(name: str) -> dict[str, Any]:
    """A preset's own settings with their defaults.

    >>> settings("dr-grpo")
    {'eps_low': 0.2, 'eps_high': 0.2}
    """
    return {p.name: p.default for p in inspect.signature(builder(name)).parameters.values()}


def kinds(name: str) -> dict[str, type]:
    """The type of each of a preset's own settings, that of a number where it may also be left out.

    >>> kinds("ppo")["critic_lam"], settings("ppo")["critic_lam"]
    (<class 'float'>, None)
    """
    parameters = inspect.signature(builder(name)).parameters.values()
    return {p.name: kind for p in parameters if (kind := users.kind_of(p.annotation)) is not None}


def meant(name: str) -> str:
    """Which preset a name that is none may mean, for a message.

    >>> meant("dr_grpo"), meant("bnpo")
    (" (did you mean 'dr-grpo'?)", ' (in trew: token-mean-local)')
    """
    return peer_names.in_a_recipe(name, peer_names.PRESETS) or nearest(name.lower().replace("_", "-"), PRESETS)


def preset(name: str, /, **overrides: Any) -> Objective:
    """The algorithm ``name`` with some of its settings changed, or some of the options that all algorithms have.

    ``name`` may be ``path/to/file.py:name``, of a function that returns an Objective or of an Objective; what it makes
    is tried on a small step. Raises ConfigError that lists everything wrong with the overrides, or says what is wrong
    with the file.

    >>> preset("dapo", eps_high=0.3, correction="tis").weight
    Clip(eps_low=0.2, eps_high=0.3)
    """
    if not isinstance(name, str) or not (is_file_spec(name) or name in PRESETS):
        raise ConfigError(
            f"objective.preset: got {name!r}{meant(str(name))}, accepts {', '.join(PRESETS)}, or path/to/file.py:name "
            "for your own"
        )
    own = settings(name)
    if problems := [p for key, value in overrides.items() for p in _problems(name, own, key, value)]:
        raise ConfigError(problems)
    try:
        objective = _made(name, _as_declared(overrides, kinds(name)))
        options = {k: kind for k, kind in _OPTIONS.items() if k not in own}  # a preset's own setting goes first
        objective = common.apply(objective, **_as_declared(overrides, options))
    except ValueError as error:
        # A component's message begins with the setting ("eps_low: got"): with the prefix it names the recipe's key.
        raise ConfigError(f"objective.{error}") from None
    if is_file_spec(name):
        _try(name, objective)
    return objective


def _made(name: str, given: Mapping[str, Any]) -> Objective:
    """The objective with its own settings, before the options that every objective has."""
    if not is_file_spec(name):
        return PRESETS[name](**given)
    file = users.load(name)
    objective = users.make(file, given)
    if problems := trial.problems_of_components(objective, _located(file)):
        raise ConfigError([f"objective.preset: {file.path}: {file.name}: {problem}" for problem in problems])
    return objective


def _try(name: str, objective: Objective) -> None:
    """Raises ConfigError if an objective of a file does not work on a small step."""
    file = users.load(name)
    if problem := trial.problem_on_a_step(objective, _located(file)):
        raise ConfigError(f"objective.preset: {file.path}: {file.name}: {problem}")


def _located(file: users.Own) -> Callable[[BaseException], str]:
    return lambda error: f"{where(error, file.path)}: {describe(error)}"


_SHOWN = {float: "a number", int: "a whole number", str: "a text", bool: "True or False"}


_OPTIONS = {
    f.name: kind for f in dataclasses.fields(common.Options) if (kind := users.kind_of(str(f.type))) is not None
}


def _problems(name: str, own: Mapping[str, Any], key: str, value: Any) -> list[str]:
    """What is wrong with one override of the preset ``name``, whose own settings have the defaults ``own``."""
    if key in own:
        like = "" if own[key] is None else f" like the default {own[key]!r}"
        return _mismatch(key, value, kinds(name)[key], like)
    if key in _OPTIONS:
        return _mismatch(key, value, _OPTIONS[key], "")
    return [
        f"objective.{key}: {short_name(name)} has no such setting{_meant(key, own)}; accepts "
        f"{', '.join(own) or 'none of its own'}; and as every objective {', '.join(_OPTIONS)}"
    ]


def _meant(key: str, own: Mapping[str, Any]) -> str:
    return peer_names.in_a_recipe(key) or nearest(key, [*own, *_OPTIONS])


def _as_declared(overrides: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The overrides of these names; TOML reads 1 as a whole number, so where a float is declared it becomes one."""
    return {k: float(v) if kinds[k] is float else v for k, v in overrides.items() if k in kinds}


def _mismatch(key: str, value: Any, kind: type, like: str) -> list[str]:
    if _fits(value, kind):
        return []
    return [f"objective.{key}: got {value!r} ({type(value).__name__}), accepts {_SHOWN[kind]}{like}"]


def _fits(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or kind is bool:  # bool is a subclass of int: True would pass for 1
        return isinstance(value, bool) and kind is bool
    if kind is float:
        return isinstance(value, (int, float)) and value == value  # NaN is the one number that is not itself
    return isinstance(value, kind)
