"""The algorithms by name: each a function of its own settings, and one plain table for the command line."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError, nearest
from .. import options as common
from ..objective import Objective
from . import clip, entropy, group, policy_gradient, sequence, trust

PRESETS: dict[str, Callable[..., Objective]] = {
    "reinforce": policy_gradient.reinforce,
    "remax": policy_gradient.remax,
    "rloo": policy_gradient.rloo,
    "reinforce-pp": policy_gradient.reinforce_pp,
    "reinforce-pp-baseline": policy_gradient.reinforce_pp_baseline,
    "ppo-clip": clip.ppo_clip,
    "dual-clip": clip.dual_clip,
    "grpo": group.grpo,
    "grpo-process": group.grpo_process,
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
    "topr": policy_gradient.topr,
    "aspo": clip.aspo,
    "ce-gppo": clip.ce_gppo,
    "gpg": policy_gradient.gpg,
    "opo": policy_gradient.opo,
    "lite-ppo": group.lite_ppo,
    "cppo": group.cppo,
    "kl-cov": entropy.kl_cov,
    "clip-cov": entropy.clip_cov,
    "high-entropy-tokens": entropy.high_entropy_tokens,
    "entropy-advantage": entropy.entropy_advantage,
    "maxrl": group.maxrl,
    "pass-at-k": group.pass_at_k,
    "gdpo": group.gdpo,
    "kimi": policy_gradient.kimi,
    "deepseek-v3.2": trust.deepseek_v3_2,
}


def presets() -> tuple[str, ...]:
    """Names of all algorithms.

    >>> "dapo" in presets(), "trw-logistic" in presets()
    (True, True)
    """
    return tuple(PRESETS)


def settings(name: str) -> dict[str, Any]:
    """A preset's own settings with their defaults.

    >>> settings("dr-grpo")
    {'eps_low': 0.2, 'eps_high': 0.2}
    """
    return {p.name: p.default for p in inspect.signature(PRESETS[name]).parameters.values()}


def preset(name: str, **overrides: Any) -> Objective:
    """The algorithm ``name`` with some of its settings changed, or some of the options that all of them have.

    Raises ConfigError with everything that is wrong.

    >>> preset("dapo", eps_high=0.3, correction="tis").weight
    Clip(eps_low=0.2, eps_high=0.3)
    """
    if name not in PRESETS:
        meant = nearest(str(name).lower().replace("_", "-"), PRESETS)
        raise ConfigError(f"objective.preset: got {name!r}{meant}, accepts {', '.join(PRESETS)}")
    own = settings(name)
    for_all = {f.name: f for f in dataclasses.fields(common.Options)}
    problems = []
    for key, value in overrides.items():
        if key in own:
            problems += _mismatch(key, value, type(own[key]), f" like the default {own[key]!r}")
        elif key in for_all:
            problems += _mismatch(key, value, _KINDS[str(for_all[key].type)], "")
        else:
            problems.append(
                f"objective.{key}: {name} has no such setting{nearest(key, [*own, *for_all])}; accepts "
                f"{', '.join(own) or 'none of its own'}; and as every objective {', '.join(for_all)}"
            )
    if problems:
        raise ConfigError(problems)
    try:
        objective = PRESETS[name](**_as_declared(overrides, {k: type(v) for k, v in own.items()}))
        kinds = {k: _KINDS[str(f.type)] for k, f in for_all.items() if k not in own}
        return common.apply(objective, **_as_declared(overrides, kinds))
    except ValueError as error:
        raise ConfigError(f"objective.{error}") from None


_KINDS: Mapping[str, type] = {"float": float, "float | None": float, "int": int, "str": str, "bool": bool}
_SHOWN = {float: "a number", int: "a whole number", str: "a text", bool: "True or False"}


def _as_declared(overrides: Mapping[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """The overrides of these names; 0 and 1 are numbers too, which TOML reads as whole ones."""
    return {k: float(v) if kinds[k] is float else v for k, v in overrides.items() if k in kinds}


def _mismatch(key: str, value: Any, kind: type, like: str) -> list[str]:
    if kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    else:
        fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if fits:
        return []
    return [f"objective.{key}: got {value!r} ({type(value).__name__}), accepts {_SHOWN[kind]}{like}"]
