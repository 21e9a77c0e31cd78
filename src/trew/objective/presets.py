"""The algorithms by name: each a function of its overrides, and one plain table for the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, nearest
from .advantage import GroupCentred, GroupNormalized
from .aggregate import Constant, SequenceMeanTokenMean, TokenMean
from .divergence import KLInLoss
from .filter import Finished, Keep, MixedGroups
from .objective import Objective
from .shaping import Shape, SoftOverlong
from .weight import Clip, Triangular


def grpo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta: float = 0.04,
    kl: str = "k3",
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """GRPO with outcome supervision: DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2.

    Group z-score, token ratio, PPO clip, mean over sequences of token means, k3 KL to the reference in the loss.
    Deviations: the paper reports no clip range (0.2 is PPO's) and does not say which standard deviation (ddof = 1).
    """
    return Objective(
        name="grpo",
        advantage=GroupNormalized(ddof, std_eps),
        weight=Clip(eps_low, eps_high),
        aggregate=SequenceMeanTokenMean(),
        divergence=KLInLoss(beta, kl),
    )


def dapo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    beta: float = 0.0,
    kl: str = "k3",
    ddof: int = 1,
    std_eps: float = 0.0,
    dynamic_sampling: bool = True,
    overlong_filtering: bool = False,
    overlong_cache: int = 0,
) -> Objective:
    """DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization, arXiv 2503.14476.

    Clip-higher, dynamic sampling, token mean over the step, no KL. ``overlong_cache`` > 0 adds the soft overlong
    punishment (the paper: 4096 of 20480 tokens); ``overlong_filtering`` drops completions that were cut off.
    Deviations: the paper's formula divides by the tokens of a group, its code and this one by those of the step; the
    punishment is off unless asked for, since its size belongs to the completion limit.
    """
    keep: tuple[Keep, ...] = ((MixedGroups(),) if dynamic_sampling else ()) + (
        (Finished(),) if overlong_filtering else ()
    )
    shape: tuple[Shape, ...] = (SoftOverlong(overlong_cache),) if overlong_cache else ()
    return Objective(
        name="dapo",
        keep=keep,
        shape=shape,
        advantage=GroupNormalized(ddof, std_eps),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
        divergence=KLInLoss(beta, kl),
    )


def dr_grpo(*, eps_low: float = 0.2, eps_high: float = 0.2, beta: float = 0.0, kl: str = "k3") -> Objective:
    """Dr. GRPO: arXiv 2503.20783. GRPO without the division by std(R) and by the completion's length, and without KL.

    Deviations: none from the authors' code, which divides by the longest completion allowed (the paper has no divisor).
    """
    return Objective(
        name="dr-grpo",
        advantage=GroupCentred(),
        weight=Clip(eps_low, eps_high),
        aggregate=Constant(),
        divergence=KLInLoss(beta, kl),
    )


def trw_triangular(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    w0: float = 0.5,
    w2: float = 0.5,
    w_out: float = 0.0,
    symmetric: bool = False,
    beta: float = 0.0,
    kl: str = "k3",
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Trust-region-weighted GRPO with a triangular weight: GRPO whose clip is replaced by a tent over the ratio.

    w0 = w2 = 1 and w_out = 0 is GRPO's clip exactly; w_out > 0 keeps a bounded gradient outside the region.
    Deviations: the source names the shape only; defaults, sign dependence and the detached weight are defined here.
    """
    return Objective(
        name="trw-triangular",
        advantage=GroupNormalized(ddof, std_eps),
        weight=Triangular(eps_low, eps_high, w0, w2, w_out, symmetric),
        aggregate=SequenceMeanTokenMean(),
        divergence=KLInLoss(beta, kl),
    )


PRESETS: dict[str, Callable[..., Objective]] = {
    "grpo": grpo,
    "dapo": dapo,
    "dr-grpo": dr_grpo,
    "trw-triangular": trw_triangular,
}


def presets() -> tuple[str, ...]:
    """Names of all algorithms.

    >>> presets()
    ('grpo', 'dapo', 'dr-grpo', 'trw-triangular')
    """
    return tuple(PRESETS)


def preset(name: str, **overrides: Any) -> Objective:
    """The algorithm ``name`` with some of its defaults changed; ConfigError lists everything that is wrong.

    >>> preset("dapo", eps_high=0.3).weight
    Clip(eps_low=0.2, eps_high=0.3)
    """
    if name not in PRESETS:
        raise ConfigError(f"objective.preset: got {name!r}, accepts {', '.join(PRESETS)}{nearest(name, PRESETS)}")
    build = PRESETS[name]
    defaults = {p.name: p.default for p in inspect.signature(build).parameters.values()}
    problems = []
    for key, value in overrides.items():
        if key not in defaults:
            problems.append(
                f"objective.{key}: {name} has no such setting{nearest(key, defaults)}; accepts {', '.join(defaults)}"
            )
        elif not _same_kind(value, defaults[key]):
            problems.append(
                f"objective.{key}: got {value!r} ({type(value).__name__}), accepts a "
                f"{type(defaults[key]).__name__} like the default {defaults[key]!r}"
            )
    if problems:
        raise ConfigError(problems)
    # 0 and 1 are numbers too: TOML reads them as whole ones.
    settings = {key: float(v) if isinstance(defaults[key], float) else v for key, v in overrides.items()}
    try:
        return build(**settings)
    except ValueError as error:
        raise ConfigError(f"objective.{error}") from None


def _same_kind(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, (int, float)) and value == value
    return isinstance(value, type(default))
