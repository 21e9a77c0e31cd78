"""PPO's clip and its relatives: other bounds on the token's ratio, group z-scores as advantages."""

from __future__ import annotations

from ..adjust import WhitenTokens
from ..advantage import BaselineAdvantage, ExternalAdvantages, z_score
from ..aggregate import PromptMeanTokenMean, SequenceMeanTokenMean, TokenMean
from ..baseline import GroupMean
from ..capped import Capped, Flipped, GradientPreservingClip
from ..component import positive
from ..divergence import KL
from ..filter import MixedGroups, UnevenGroups
from ..gae import GAE
from ..likelihood import CorrectLikelihood
from ..objective import Objective
from ..ratio import TokenRatio
from ..scale import AdvantageStd
from ..smooth import Sech2
from ..weight import Clip, DualClip


def ppo_clip(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """Proximal Policy Optimization's clipped surrogate, advantages given: PPO, arXiv 1707.06347, eq. 7.

    J = (1/N) sum_t min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t)

    Use it with advantages that you have computed yourself, also those of a critic; ``ppo`` computes them (GAE).

    Deviations: critic, GAE and value loss are not part of it.
    """
    return Objective(
        name="ppo-clip", advantage=ExternalAdvantages(), weight=Clip(eps_low, eps_high), aggregate=TokenMean()
    )


def ppo(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    critic_lam: float | None = None,
    length_alpha: float = 0.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Objective:
    """Proximal Policy Optimization with a critic and generalised advantages: PPO, arXiv 1707.06347, eq. 7 and 11.

    A_t = whiten( sum_(k >= 0) (gamma lam)^k delta_(t+k) ),  delta_t = R_t + gamma V_(t+1) - V_t

    R_t is the reward at the last token and 0 before, less beta k1_t at each token. The critic (V) is a separate model,
    which learns A_t + V_t as they are before the whitening. It needs ``values``. ``critic_lam`` is another lam for what
    the critic learns, and ``length_alpha`` above 0 gives each sequence a lam by its length instead of ``lam``; ``vapo``
    says what both are for.

    Use it where credit should differ along a completion, one prompt has few completions, or episodes are long; it costs
    a second model of the same size.

    Deviations: whitened over all tokens of the step, exactly 0 where all are equal (verl and TRL add 1e-8 to the
    variance); TRL rewards one position behind the last token, with a value of its own there. beta is 0 unless set (TRL
    0.05, verl 0.001).
    """
    if length_alpha and lam != 0.95:
        raise ValueError(
            f"lam: got {lam:g} with length_alpha = {length_alpha:g}, which takes its place; remove one of them"
        )
    return Objective(
        name="ppo",
        advantage=GAE(gamma, lam, critic_lam, length_alpha),
        adjust=(WhitenTokens(),),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
        # Off; the option beta turns it on, in this place and with this estimator.
        divergence=(KL(0.0, "k1", "reward"),),
    )


def vapo(
    *,
    gamma: float = 1.0,
    critic_lam: float = 1.0,
    length_alpha: float = 0.05,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
) -> Objective:
    """PPO whose policy and critic have each their own lam, for long answers: VAPO, arXiv 2504.05118.

    C_t = share_t clip(r_t, A_t) r_t A_t + mu 1[correct] / N,  A_t = whiten(GAE with lam_i = 1 - 1 / (length_alpha T_i))

    The critic learns the returns with ``critic_lam``: with 1 and gamma = 1, the reward itself. The policy's lam grows
    with the answer's length T_i, so that a reward at its end reaches about the same share of it. N counts the tokens of
    correct answers, and mu is the option ``nll`` (0.1 here), the log-likelihood of what was right. It needs ``values``.

    Use it where answers are long and differ much in length, with several to one prompt: PPO's lam of 0.95 forgets a
    reward 100 tokens away.

    Deviations: lam is at least 0 (the paper's is negative where T_i < 1 / length_alpha = 20); whitened over all tokens
    of the step, as ``ppo`` is, which the paper does not mention. Its pretrained values are critic.warmup_steps here, in
    which the critic learns from the policy's completions; its 16 answers to each prompt are rollout.completions.
    """
    if length_alpha == 0:
        raise ValueError("length_alpha: got 0, accepts a number above 0; ppo has one lam for all lengths")
    positive(length_alpha=length_alpha)
    return Objective(
        name="vapo",
        advantage=GAE(gamma, critic_lam=critic_lam, length_alpha=length_alpha),
        adjust=(WhitenTokens(),),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
        # Off, as in ppo.
        divergence=(KL(0.0, "k1", "reward"),),
        nll=CorrectLikelihood(0.1),
    )


def dual_clip(
    *, eps_low: float = 0.2, eps_high: float = 0.2, cap: float = 3.0, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """PPO's clip with a second bound where A < 0 and the ratio is large: dual-clip PPO, arXiv 1912.09729, eq. 5.

    J = max(min(r A, clip(r) A), cap A) if A < 0, else min(r A, clip(r) A)

    Use it where rollouts are stale: without it a bad token whose ratio explodes has an unbounded push.

    Deviations: on GRPO's advantages with a token mean, as verl runs it (its recipes use cap 3 or 10).
    """
    return Objective(
        name="dual-clip",
        advantage=z_score(ddof, std_eps),
        weight=DualClip(eps_low, eps_high, cap),
        aggregate=TokenMean(),
    )


def two_sided(
    *, eps_low: float = 0.2, eps_high: float = 0.2, delta: float = 4.0, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """The two-sided clip of asynchronous training: INTELLECT-2, arXiv 2505.07291, §3.4.

    J = min( min(r, delta) A, clip(r, 1 - eps_low, 1 + eps_high) A ) - beta k3

    Use it as dual-clip; the gradient is the same with cap = delta.

    Deviations: token mean and dynamic sampling are from memory of the paper.
    """
    if not delta > 1 + eps_high:
        raise ValueError(f"delta: got {delta!r}, accepts a number above 1 + eps_high = {1 + eps_high:g}")
    return Objective(
        name="two-sided",
        keep=(MixedGroups(),),
        advantage=z_score(ddof, std_eps),
        weight=DualClip(eps_low, eps_high, delta),
        aggregate=TokenMean(),
        divergence=(KL(0.001),),
    )


def ce_gppo(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    beta1: float = 0.75,
    beta2: float = 1.0,
    cap: float = 3.0,
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Dual clip that still pushes clipped tokens, by a bounded amount: CE-GPPO, arXiv 2509.20712.

    C = share g A,  g = beta2 (1 + eps_high) if A > 0 and r > 1 + eps_high, beta1 (1 - eps_low) if A < 0 and
    r < 1 - eps_low, 0 if A < 0 and r > cap, else r

    Use it against entropy collapse or explosion: beta2 sets how much rare tokens of good answers go on rising, which
    keeps entropy up, beta1 how much rare tokens of bad answers go on falling, which brings it down.

    Deviations: follows the authors' code, whose README has beta1 = 0.75, beta2 = 1 and a dual clip of 3. Their scripts
    for 7B set eps_high = 0.2 and a dual clip of 10, drop groups without contrast (dynamic_sampling = true does that)
    and add 0.1 times a negative log-likelihood on right answers, which is not part of this.
    """
    return Objective(
        name="ce-gppo",
        advantage=z_score(ddof, std_eps),
        weight=GradientPreservingClip(eps_low, eps_high, beta1, beta2, cap),
        aggregate=TokenMean(),
    )


def cispo(*, cap: float = 5.0, floor: float = 0.0, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Clipped IS-weight Policy Optimization, bounds the ratio and keeps every gradient: CISPO, arXiv 2506.13585, eq. 4.

    J = (1/N) sum_t sg(clip(r_t, floor, cap)) A log pi_t

    Use it where PPO's clip silences rare but decisive tokens.

    Deviations: the paper does not report its upper bound (cap 5 is ScaleRL's and TRL's). Here cap and floor are values
    of the ratio, so a cap below 1 is refused; verl, slime and NeMo-RL count from 1: their 0.2 is a cap of 1.2.
    """
    return Objective(
        name="cispo",
        advantage=z_score(ddof, std_eps),
        weight=Capped(cap, floor),
        aggregate=TokenMean(),
    )


def scalerl(*, cap: float = 5.0, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """CISPO with the batch's deviation and a mean over prompts: the recipe of ScaleRL, arXiv 2510.13786.

    J = mean over prompts of the token mean of sg(min(r_t, cap)) A log pi_t,
    A = (R - mean of the group) / std of all R - mean of the group in the batch

    Use it for long runs at scale.

    Deviations: the deviation is of the centred rewards (the paper's A / A_std), of the prompts that are left once those
    without signal are dropped: the paper's objective holds no others, though it does not say over which its deviation
    is taken. TRL's recipe (scale_rewards "batch") takes that of all raw rewards instead: lite-ppo's scale. Dropping
    prompts that are nearly always solved, and the float32 output head, are not part of the objective.
    """
    return Objective(
        name="scalerl",
        keep=(UnevenGroups(),),
        advantage=BaselineAdvantage(GroupMean(), AdvantageStd(ddof, std_eps)),
        weight=Capped(cap),
        aggregate=PromptMeanTokenMean(),
    )


def aipo(*, cap: float = 5.0, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Asynchronous Importance-weighted Policy Optimization, a one-sided cap on pi / mu: AIPO, LlamaRL arXiv 2505.24034.

    J = (1/N) sum_t sg(min(pi / mu, cap)) A log pi_t

    Use it for asynchronous rollouts: one ratio covers staleness and mismatch. It needs ``rollout_logprobs``.

    Deviations: the formula is from memory of the paper, which names caps from 2 to 10. Advantages and aggregation are
    the host's (group z-score, token mean).
    """
    return Objective(
        name="aipo",
        advantage=z_score(ddof, std_eps),
        ratio=TokenRatio("rollout"),
        weight=Capped(cap),
        aggregate=TokenMean(),
    )


def aspo(
    *, eps_low: float = 0.2, eps_high: float = 0.2, cap: float = 3.0, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """Asymmetric importance Sampling Policy Optimization, turns the ratio over where A > 0: ASPO, arXiv 2510.06062.

    C = share g A,  g = min(1/r, cap) if A > 0, min(r, cap) if A < 0, 0 where PPO clips

    Use it where tokens of right answers that have become unlikely should be lifted most.

    Deviations: the authors' code makes the range depend on entropy (0.2 or 0.4); it is fixed here.
    """
    return Objective(
        name="aspo",
        keep=(MixedGroups(),),
        advantage=z_score(ddof, std_eps),
        weight=Flipped(eps_low, eps_high, cap),
        aggregate=TokenMean(),
    )


def sapo(*, tau_pos: float = 1.0, tau_neg: float = 1.05, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Soft Adaptive Policy Optimization, a smooth gate instead of a clip: SAPO, arXiv 2511.20347.

    J = mean_i mean_t (4 / tau) sigma(tau (r_t - 1)) A,  so that w = sech^2(tau (r - 1) / 2)

    Use it for a trust region without an edge.

    Deviations: none known. The value at r = 1 is 2 A / tau, not A; the gate damps moves back towards r = 1 as well.
    """
    return Objective(
        name="sapo",
        advantage=z_score(ddof, std_eps),
        weight=Sech2(tau_pos, tau_neg),
        aggregate=SequenceMeanTokenMean(),
    )
