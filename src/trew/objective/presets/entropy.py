"""Objectives that use the policy's entropy: in the reward, to select tokens, or as a bonus on the advantage."""

from __future__ import annotations

from ..adjust import EntropyAdvantage
from ..advantage import z_score
from ..aggregate import SequenceMeanTokenMean, TokenMean
from ..component import not_negative
from ..covariance import ClipCov, CovariancePenalty
from ..divergence import KL
from ..entropy_shares import EntropySequenceShares, EntropyTokenShares
from ..filter import HighEntropyTokens, MixedGroups
from ..objective import Objective
from ..weight import Clip, MeanRatioClip, Unclipped
from .group import dapo


def gtpo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    a1: float = 1.0,
    a2: float = 0.1,
    normalize: str = "joint",
    ddof: int = 1,
) -> Objective:
    """Group Token Policy Optimization, token rewards shared out by entropy: GTPO, arXiv 2508.04349, eq. 3 to 7.

    R_it = a1 + a2 d_t H_it / sum_k H_kt if right, -a1 - a2 h_t H_it^-1 / sum_k H_kt^-1 if wrong, then a z-score

    Use it for credit at the tokens where the policy was undecided; it needs ``entropies``, of the rollout.

    Deviations: the equations are from reproductions. ``normalize`` "separate" is the paper's: right and wrong tokens
    each by themselves, which takes the contrast between right and wrong out; "joint" (default) is over the whole group.
    Groups that are all right or all wrong have advantage 0. Another paper, arXiv 2508.03772, has the same acronym.
    """
    not_negative(a1=a1, a2=a2)
    return Objective(
        name="gtpo",
        keep=(MixedGroups(),),
        advantage=EntropyTokenShares(a1, a2, normalize, ddof),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def grpo_s(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    b1: float = 1.0,
    b2: float = 0.1,
    normalize: str = "joint",
    ddof: int = 1,
) -> Objective:
    """GTPO's sequence-level sibling: GRPO-S, arXiv 2508.04349, eq. 8 to 11.

    R_i = b1 + b2 n H_i / sum H if right, -b1 - b2 m H_i^-1 / sum H^-1 if wrong, H_i = mean_t H_t,
    J = mean_i min(m_i A_i, clip(m_i) A_i),  m_i = mean_t r_t

    Use it where GTPO's token credit is too noisy; it needs ``entropies``, of the rollout.

    Deviations: the equations are from reproductions. The z-score is over the whole group, as in the paper;
    ``normalize`` "separate" is GTPO's. Groups that are all right or all wrong have advantage 0 and are sampled again.
    The mean entropy is over loss tokens, with a floor of 1e-8 in place of a small number in the denominator; eps_high =
    0.28 is DAPO's. The gate is on the arithmetic mean of the ratios (GSPO's is the geometric one); behind it each token
    keeps its own ratio.
    """
    not_negative(b1=b1, b2=b2)
    return Objective(
        name="grpo-s",
        keep=(MixedGroups(),),
        advantage=EntropySequenceShares(b1, b2, normalize, ddof),
        weight=MeanRatioClip(eps_low, eps_high),
        aggregate=SequenceMeanTokenMean(),
    )


def kl_cov(*, share: float = 2e-3, penalty: float = 1.0, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """A KL penalty on the few tokens that drive entropy down: KL-Cov, arXiv 2505.22617, eq. 12.

    J = (1/N) sum_t { r_t A - penalty |log r_t| on the ``share`` of tokens with the highest cov_t },
    cov = (A - mean A)(log pi - mean log pi)

    Use it against entropy collapse with several updates per rollout (at r = 1 the pull is 0). It must see the whole
    step.

    Deviations: no clip at all, as in the authors' code. share 2e-3 and penalty 1 are its 7B recipe (its k_percent = 0.2
    counts in percent), verl's defaults 2e-4 and 0.1. At least one token is taken. Tokens are ranked over the whole step
    by the current policy's log-probs; the code ranks each micro-batch. |log r| is the code's; the equation has a KL.
    Log-ratios within 1e-5 of 0 are not pulled. A correction for train-rollout mismatch acts on r_t A alone, in verl on
    the pull as well.
    """
    return Objective(
        name="kl-cov",
        advantage=z_score(ddof, std_eps),
        weight=Unclipped(),
        aggregate=TokenMean(),
        divergence=(KL(), CovariancePenalty(penalty, share)),
    )


def clip_cov(
    *,
    eps_low: float = 1.0,
    eps_high: float = 1.0,
    share: float = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
    seed: int = 0,
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Silences a few random tokens among those that drive entropy down: Clip-Cov, arXiv 2505.22617, eq. 11.

    w = 0 for max(1, share N) tokens drawn from those with cov_low < (A - mean A)(log pi - mean log pi) < cov_high

    Use it against entropy collapse. It must see the whole step at once.

    Deviations: the draw is fixed by ``seed`` and by what was sampled, in any order of sequences. At least one token is
    drawn where there are candidates, as in the authors' code; the paper's floor(share N) is 0 for small steps.
    """
    return Objective(
        name="clip-cov",
        advantage=z_score(ddof, std_eps),
        weight=ClipCov(eps_low, eps_high, share, cov_low, cov_high, seed),
        aggregate=TokenMean(),
    )


def high_entropy_tokens(
    *, eps_low: float = 0.2, eps_high: float = 0.28, share: float = 0.2, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """DAPO on the tokens with the highest entropy only, the 80/20 rule: arXiv 2506.01939.

    A_t = 0 unless H_t >= the (1 - share)-quantile of H over the step

    Use it for long reasoning, where few tokens are decisions; it needs ``entropies``.

    Deviations: entropies are the rollout policy's, as in the paper (TRL takes the current one's). All tokens stay in
    the denominator, under the KL term, and under an entropy bonus (TRL: on those tokens only).
    """
    return dapo(eps_low=eps_low, eps_high=eps_high, ddof=ddof, std_eps=std_eps).replace(
        name="high-entropy-tokens", select=(HighEntropyTokens(share),)
    )


def entropy_advantage(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    alpha: float = 0.4,
    kappa: float = 2.0,
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """A bonus on the advantage where the policy was undecided: arXiv 2506.14758.

    A_t = A_i + min(alpha H_t, |A_i| / kappa)

    Use it to reward exploratory tokens without a term in the loss; it needs ``entropies``.

    Deviations: alpha = 0.4 (for GRPO; 0.1 for PPO) and kappa = 2 are as several reproductions have them.
    """
    return Objective(
        name="entropy-advantage",
        advantage=z_score(ddof, std_eps),
        adjust=(EntropyAdvantage(alpha, kappa),),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )
