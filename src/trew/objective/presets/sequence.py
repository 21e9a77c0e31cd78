"""Objectives whose ratio, or whose trust region, is the whole sequence's."""

from __future__ import annotations

from ..advantage import z_score
from ..aggregate import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from ..objective import Objective
from ..ratio import ClippedGeometricRatio, GeometricRatio, ProductRatio
from ..smooth import GammaKernel
from ..weight import Clip, LogClip


def gspo(*, eps_low: float = 3e-4, eps_high: float = 4e-4, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Group Sequence Policy Optimization, ratio and clip of the sequence: GSPO, arXiv 2507.18071, eq. 5 and 7.

    J = mean_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i),  s_i = exp(mean_t log r_t)

    Use it for mixtures of experts, whose token ratios jump. Its range is a thousandth of PPO's: 0.2 would never clip.

    Deviations: none known. s_i is not an importance weight of the sequence (that would be the product). What differs
    from token to token (given advantages; the corrections tis, mis-token, icepop, geo-mask) stays with its own token,
    as in gspo-token and in verl; TRL differentiates s_i under it, which spreads its mean over the sequence.
    """
    return Objective(
        name="gspo",
        advantage=z_score(ddof, std_eps),
        ratio=GeometricRatio(),
        weight=Clip(eps_low, eps_high),
        aggregate=SequenceMeanTokenMean(),
    )


def gspo_token(*, eps_low: float = 3e-4, eps_high: float = 4e-4, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """GSPO that takes a different advantage for each token: GSPO-token, arXiv 2507.18071, eq. 13.

    J = mean_i mean_t min(s_it A_it, clip(s_it) A_it),  s_it = sg(s_i) pi / sg(pi)

    Use it with advantages per token; where they are constant over the sequence its gradient is GSPO's.

    Deviations: none known.
    """
    return gspo(eps_low=eps_low, eps_high=eps_high, ddof=ddof, std_eps=std_eps).replace(name="gspo-token")


def luspo(*, eps_low: float = 2e-3, eps_high: float = 2.5e-3, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Length-Unbiased Sequence Policy Optimization, GSPO times the length: LUSPO, arXiv 2602.05261.

    J = mean_i T_i min(s_i A_i, clip(s_i) A_i)

    Use it where GSPO's preference for short right answers is in the way.

    Deviations: as for gspo.
    """
    return Objective(
        name="luspo",
        advantage=z_score(ddof, std_eps),
        ratio=GeometricRatio(),
        weight=Clip(eps_low, eps_high),
        aggregate=SequenceMeanTokenSum(),
    )


def gmpo(*, eps_low: float = 0.4, eps_high: float = 0.4, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Geometric-Mean Policy Optimization, clips tokens, then takes their geometric mean: GMPO, arXiv 2507.20673, eq. 4.

    J = mean_i exp(mean_t l_t) A_i,  l_t = min(log r_t, eps_high) if A > 0, max(log r_t, -eps_low) if A < 0

    Use it for fewer extreme ratios than GRPO with a wider range: eps are in log space, 0.4 is [0.67, 1.49].

    Deviations: none known. A correction per token stays with its own token; verl takes its geometric mean over the
    sequence, and TRL's GMPO trainer corrects nothing.
    """
    return Objective(
        name="gmpo",
        advantage=z_score(ddof, std_eps),
        ratio=ClippedGeometricRatio(eps_low, eps_high),
        weight=LogClip(eps_low, eps_high),
        aggregate=SequenceMeanTokenMean(),
    )


def vespo(
    *,
    k_pos: float = 2.0,
    lam_pos: float = 3.0,
    k_neg: float = 3.0,
    lam_neg: float = 2.0,
    anchor: str = "old",
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Variational Sequence-level Soft Policy Optimization, a smooth kernel of the exact ratio: VESPO, arXiv 2602.10693.

    J = (1/N) sum_t sg(phi(S_i)) A log pi_t,  phi(S) = S^k e^(lam (1 - S)), (k, lam) by the sign of A

    Use it for stale rollouts, without cutting any token off.

    ``anchor`` "rollout" measures S against the sampler; a mismatch correction is multiplied into S.

    Deviations: none known.
    """
    return Objective(
        name="vespo",
        advantage=z_score(ddof, std_eps),
        ratio=ProductRatio(anchor),
        weight=GammaKernel(k_pos, lam_pos, k_neg, lam_neg),
        aggregate=TokenMean(),
    )
