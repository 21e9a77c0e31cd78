"""Trust regions of other shapes: triangular, logistic, for rare tokens; in probabilities; bands around the sampler; a
bound on the step's second moment; DeepSeek-V3.2's."""

from __future__ import annotations

from ..advantage import BaselineAdvantage, z_score
from ..aggregate import SequenceMeanTokenMean, TokenMean
from ..band import BandMask, LinearBandMask, ProbabilityBand, RatioBand
from ..baseline import GroupMean
from ..component import not_negative
from ..correction import OffPolicySequenceMask
from ..divergence import KL
from ..filter import UnevenGroups
from ..moments import SecondMomentMask
from ..objective import Objective
from ..probability import BinaryKL, BinaryTV, ProbabilityMask
from ..ratio import TokenRatio
from ..scale import group_scale
from ..trw import Logistic, RareTokenBoost, Triangular
from ..weight import Clip, Weight


def _trw(name: str, weight: Weight, ddof: int, std_eps: float) -> Objective:
    return Objective(name=name, advantage=z_score(ddof, std_eps), weight=weight, aggregate=SequenceMeanTokenMean())


def trw_triangular(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    w0: float = 0.5,
    w2: float = 0.5,
    w_out: float = 0.0,
    symmetric: bool = False,
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Trust-region-weighted GRPO with a triangular weight, a slope instead of the clip's cliff (TRW-GRPO, no arXiv).

    J = mean_i mean_t sg(w(r_t, A_i)) r_t A_i,  w falls from 1 at r = 1 to w2 at 1 + eps_high (A > 0), to w0 at
    1 - eps_low (A < 0), and is w_out beyond

    w0 = w2 = 1 and w_out = 0 is GRPO's clip to the last bit; w_out > 0 lets a share of the push through outside;
    ``symmetric`` applies both slopes whatever the sign of A.

    Use it where many tokens sit at the edge of the clip range: they are slowed down before they are stopped.

    Deviations: the source names the shape only; defaults, dependence on the sign and the detached weight are defined
    here.
    """
    return _trw("trw-triangular", Triangular(eps_low, eps_high, w0, w2, w_out, symmetric), ddof, std_eps)


def trw_logistic(
    *,
    alpha: float = 2.0,
    gamma: float = 1.0,
    eta: float = 0.05,
    normalized: bool = False,
    directional: bool = False,
    cap: float = float("inf"),
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Trust-region-weighted GRPO with a logistic weight, smooth in log r (TRW-GRPO, no arXiv).

    w = sigma(-alpha |log r|) sigma(gamma A) + eta

    ``normalized`` makes w = 1 at r = 1 and A = 0; ``directional`` does not damp moves back towards r = 1; ``gamma = 0``
    does not weigh by A; ``cap`` bounds w r where eta would let it grow.

    With gamma above 0 it is another objective than GRPO on-policy too, also where it is normalized and directional:
    negative advantages count less (the gradient's cosine to GRPO's is 0.92 with gamma = 1 where half of the answers are
    right). With normalized = true and gamma = 0 it equals GRPO there, to the bit.

    Use it with normalized = true and directional = true, unless the form as written is to be studied; with gamma = 0
    where the trust region alone is wanted (what it gained over the clip in docs/study.md came from gamma).

    Deviations: as written w(1, A) is not 1 (0.18 at A = -1, 0.42 at A = 1). The source gives no numbers; alpha, gamma
    and eta are defined here.
    """
    return _trw("trw-logistic", Logistic(alpha, gamma, eta, normalized, directional, cap), ddof, std_eps)


def trw_entropy(
    *,
    eps_low: float = 0.2,
    eps_high: float = 0.28,
    w0: float = 0.5,
    w2: float = 0.5,
    w_out: float = 0.0,
    lam: float = 0.5,
    a_max: float = 1.0,
    rarity: str = "probability",
    h_max: float = 1.0,
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Trust-region-weighted GRPO that pushes rare tokens of good answers harder (TRW-GRPO, no arXiv).

    w = w_triangular (1 + lam [A > 0] rare min(A / a_max, 1)),  rare = 1 - pi_old(y_t)

    ``rarity`` "entropy" takes min(H_t / h_max, 1) for rare; it needs ``entropies``.

    Use it against entropy collapse: what the policy seldom says, and was right to say, is learned faster.

    Deviations: the source describes the idea and has no formula; this one is ours.
    """
    base = Triangular(eps_low, eps_high, w0, w2, w_out)
    return _trw("trw-entropy", RareTokenBoost(base, lam, a_max, rarity, h_max), ddof, std_eps)


def dppo_tv(
    *,
    delta: float = 0.15,
    cap: float = float("inf"),
    scale: str = "none",
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Divergence PPO, stops a token whose probability has moved too far: DPPO with total variation, arXiv 2602.04879.

    J = (1/N) sum_t M_t r_t A,  M = 0 iff |pi - mu| > delta and r has moved on in the direction of A,  r = pi / mu

    A_i = R_i - mean R, which ``scale`` "std" divides by the group's deviation: then nothing but the weight, its ratio
    to the sampler and the aggregation differ from GRPO.

    Use it off-policy and for large vocabularies: ratios of rare tokens are large without meaning much. It needs
    ``rollout_logprobs``.

    Deviations: the binary form, a lower bound of the full divergence. The authors' code also bounds r (``cap``; 10 or
    more, verl 3).
    """
    return Objective(
        name="dppo-tv",
        advantage=BaselineAdvantage(GroupMean(), group_scale(scale, ddof, std_eps)),
        ratio=TokenRatio("rollout"),
        weight=ProbabilityMask(BinaryTV(), delta, cap),
        aggregate=TokenMean(),
    )


def dppo_kl(
    *,
    delta: float = 0.05,
    cap: float = float("inf"),
    scale: str = "none",
    ddof: int = 1,
    std_eps: float = 0.0,
) -> Objective:
    """Divergence PPO with a binary KL divergence: DPPO, arXiv 2602.04879.

    J = (1/N) sum_t M_t r_t A,  M = 0 iff KL(mu || pi) of "this token or not" > delta and r has moved on

    Use it as dppo-tv, where moves of likely tokens should weigh more; its other options are the same.

    Deviations: as for dppo-tv.
    """
    weight = ProbabilityMask(BinaryKL(), delta, cap)
    return dppo_tv(scale=scale, ddof=ddof, std_eps=std_eps).replace(name="dppo-kl", weight=weight)


def prime_rl(*, delta: float = 0.2, penalty: float = 1e-3) -> Objective:
    """The default loss of prime-rl: a mask in total variation and a pull towards the sampler (software, no arXiv).

    J = (1/N) sum_t { M_t r_t A - penalty (log r_t)^2 },  r = pi / mu, M as in dppo-tv

    Use it for asynchronous training with many small updates. It needs ``rollout_logprobs``.

    Deviations: follows the code; its documentation describes a cap on the ratio that the code does not have.
    """
    not_negative(penalty=penalty)
    return Objective(
        name="prime-rl",
        keep=(UnevenGroups(),),
        advantage=BaselineAdvantage(GroupMean()),
        ratio=TokenRatio("rollout"),
        weight=ProbabilityMask(BinaryTV(), delta),
        aggregate=TokenMean(),
        # k2 is d^2 / 2, hence the 2. KL() is what the option beta changes.
        divergence=(KL(), KL(2 * penalty, "k2", anchor="rollout")),
    )


def prime_rl_ipo(*, delta: float = 0.1, penalty: float = 1e-3) -> Objective:
    """The "ipo" loss of prime-rl: a band in probabilities and a pull towards the sampler (software, no arXiv).

    J = (1/N) sum_t { M_t r_t A - penalty (log r_t)^2 },  M_t = 1 iff |pi - mu| <= delta,  r = pi / mu

    Unlike prime-rl's default it also stops tokens that move back towards the sampler.

    Use it for asynchronous training where log-probs of sampler and trainer may disagree: a token on which they do is
    left alone, whichever way it would be pushed. It needs ``rollout_logprobs``.

    Deviations: not Identity Preference Optimization, which is called IPO too. Later versions of prime-rl have delta =
    0.3, no penalty (``penalty = 0``) and a cap on the ratio.
    """
    not_negative(penalty=penalty)
    return prime_rl().replace(
        name="prime-rl-ipo",
        weight=BandMask(ProbabilityBand(delta)),
        divergence=(KL(), KL(2 * penalty, "k2", anchor="rollout")),
    )


def rollout_is(*, eps_low: float = 0.2, eps_high: float = 0.2, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Importance sampling from the rollout's own log-probs, within a band of ratios: GLM-5, arXiv 2602.15763, eq. 3.

    J = (1/N) sum_t sg(f(r_t)) A_i log pi,  f(r) = r if 1 - eps_low < r < 1 + eps_high, else 0,  r = pi / mu

    SkyRL calls it "rollout_is".

    Use it for asynchronous agents: it needs no old policy, and drops every token that sampler and policy do not agree
    on, also one that moves back. It needs ``rollout_logprobs``.

    Deviations: the report gives no bounds; these are SkyRL's defaults. It leaves the average open (token mean), and
    also drops whole rollouts that are too old, which is cluster.staleness here.
    """
    return Objective(
        name="rollout-is",
        advantage=z_score(ddof, std_eps),
        ratio=TokenRatio("rollout"),
        weight=LinearBandMask(RatioBand(eps_low, eps_high)),
        aggregate=TokenMean(),
    )


def m2po(
    *, tau: float = 0.04, tokens: str = "growing", anchor: str = "old", ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """Second-Moment Trust Policy Optimization, drops as few tokens as bound the step's drift: M2PO, arXiv 2510.01161.

    J = (1/N) sum_t M_t r_t A_i,  M drops the largest (log r_t)^2 among the tokens with A > 0 and r > 1 or A < 0 and
    r < 1 until their mean is at most tau

    ``tokens`` "all" bounds all tokens of the step, as AReaL does, instead of those that grow; ``anchor`` "rollout"
    measures r against the sampler.

    Use it with stale rollouts: a clip of 0.2 stops the tokens with much entropy, a bound on the mean only the outliers.
    It must see the whole optimizer step at once, so its log-probs are computed twice.

    Deviations: tokens with equal (log r)^2 are dropped together. The authors' code clips instead, at the ratio where
    capping would keep the mean within tau, for each micro-batch by itself. AReaL measures the old policy against the
    sampler, clips besides, drops until the mean is below tau, and averages over the tokens that are left.
    """
    return Objective(
        name="m2po",
        advantage=z_score(ddof, std_eps),
        ratio=TokenRatio(anchor),
        weight=SecondMomentMask(tau, tokens),
        aggregate=TokenMean(),
    )


def deepseek_v3_2(
    *, eps_low: float = 0.2, eps_high: float = 0.2, delta: float = 0.5, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """GRPO as scaled up in DeepSeek-V3.2, arXiv 2512.02556, §3.1: unbiased KL and off-policy sequence mask.

    J = mean_i M_i mean_t min(r_t A_i, clip(r_t) A_i) - beta mean_i mean_t r_t k3_t,  r = pi / mu,
    M_i = 0 iff A_i < 0 and mean_t log(mu / pi) > delta

    Use it off-policy with a KL anchor: r k3, differentiated through r, has the gradient of KL(pi || pi_ref), which k3
    alone does not have. It needs ``rollout_logprobs``.

    Deviations: the report leaves beta and delta to the domain (0.001 and 0.5, which TRL suggests). Keeping the
    sampler's routing and truncation masks is the engine's matter.
    """
    return Objective(
        name="deepseek-v3.2",
        advantage=z_score(ddof, std_eps),
        ratio=TokenRatio("rollout"),
        weight=Clip(eps_low, eps_high),
        correction=(OffPolicySequenceMask(delta),),
        aggregate=SequenceMeanTokenMean(),
        divergence=(KL(0.001, "k3-corrected", behaviour="rollout"),),
    )
