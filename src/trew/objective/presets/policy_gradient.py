"""Policy gradients with a baseline: the REINFORCE family, and methods that use no ratio or only its logarithm."""

from __future__ import annotations

from ..adjust import WhitenTokens
from ..advantage import BaselineAdvantage
from ..aggregate import SequenceMeanTokenMean, SequenceMeanTokenSum, TokenMean
from ..baseline import Baseline, BatchMean, Greedy, GroupMean, LeaveOneOut, LengthWeighted, NoBaseline
from ..capped import Tapered
from ..component import not_negative, one_of
from ..divergence import KL, SequenceSquare
from ..filter import UnevenGroups
from ..objective import Objective
from ..ratio import NoRatio, ProductRatio, TokenRatio
from ..token_baseline import TokenBaseline
from ..weight import Clip, PolicyGradient

BASELINES: dict[str, Baseline] = {
    "none": NoBaseline(),
    "group": GroupMean(),
    "batch": BatchMean(),
    "leave-one-out": LeaveOneOut(),
}


def reinforce(*, baseline: str = "none") -> Objective:
    """The plain policy gradient of whole sequences: REINFORCE, Williams 1992 (no arXiv).

    J = mean_i (R_i - b) sum_t log pi(y_it)

    ``baseline`` is "none", "group", "batch" or "leave-one-out".

    Use it as the textbook's starting point, for one update per rollout.

    Deviations: none.
    """
    one_of(tuple(BASELINES), baseline=baseline)
    return Objective(
        name="reinforce",
        advantage=BaselineAdvantage(BASELINES[baseline]),
        ratio=NoRatio(),
        weight=PolicyGradient(),
        aggregate=SequenceMeanTokenSum(),
        # Off; the option beta turns it on, in this place and with this estimator.
        divergence=(KL(0.0, "k1", "reward"),),
    )


def remax() -> Objective:
    """REINFORCE with the greedy answer's reward as the baseline: ReMax, arXiv 2310.10505.

    A_it = R_i - beta sum_(s >= t) k1_s - R(greedy answer)

    Use it with one completion per prompt: the extra greedy answer takes the group's place. It needs ``baselines``.

    Deviations: token mean, as in verl; the paper's beta is not fixed (0 here).
    """
    return Objective(
        name="remax",
        advantage=BaselineAdvantage(Greedy()),
        ratio=NoRatio(),
        weight=PolicyGradient(),
        aggregate=TokenMean(),
        # Off, as in reinforce.
        divergence=(KL(0.0, "k1", "to-go"),),
    )


def rloo(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """REINFORCE Leave-One-Out, the whole completion as one action: RLOO, arXiv 2402.14740.

    J = mean_i min(S_i A_i, clip(S_i) A_i),  A_i = R'_i - mean of the others' R',  R' = R - beta sum_t k1_t

    Use it for an unbiased baseline and an exact sequence ratio, near to on-policy: products of ratios of long
    completions leave the clip range quickly.

    Deviations: the clip is that of TRL's trainer (on-policy it does nothing); beta = 0.03 is one of the paper's
    settings, TRL's default is 0.05.
    """
    return Objective(
        name="rloo",
        advantage=BaselineAdvantage(LeaveOneOut()),
        ratio=ProductRatio(),
        weight=Clip(eps_low, eps_high),
        aggregate=SequenceMeanTokenSum(),
        divergence=(KL(0.03, "k1", "reward"),),
    )


def reinforce_pp(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """REINFORCE with PPO's clip and advantages whitened over the batch, no groups: REINFORCE++, arXiv 2501.03262.

    A_it = whiten( R_i - beta sum_(s >= t) k1_s )  over all tokens of the step

    Use it with one completion per prompt, or many prompts per step.

    Deviations: whitening is over tokens, as in verl and NeMo-RL, so long completions weigh more; beta is ours.
    """
    return Objective(
        name="reinforce-pp",
        advantage=BaselineAdvantage(NoBaseline()),
        adjust=(WhitenTokens(),),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
        divergence=(KL(0.01, "k1", "to-go"),),
    )


def reinforce_pp_baseline(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """REINFORCE++ with the group's mean as baseline before the batch is whitened: arXiv 2501.03262.

    A_it = whiten( R_i - mean R )  over all tokens of the step,  - beta k2_t in the loss

    Use it where a group deviation gives too much weight to nearly solved prompts.

    Deviations: whitening re-centres, so a group's advantages no longer sum to 0 and a group without signal gets minus
    the batch's mean; other implementations whiten over sequences, or put the KL into the reward. beta is ours.
    """
    return Objective(
        name="reinforce-pp-baseline",
        advantage=BaselineAdvantage(GroupMean()),
        adjust=(WhitenTokens(),),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
        divergence=(KL(0.001, "k2"),),
    )


def gpg() -> Objective:
    """Group Policy Gradient, without ratio, clip, std or KL: GPG, arXiv 2504.02546.

    J = alpha mean_i mean_t A_i log pi(y_it),  A_i = R_i - mean R,  alpha = B / (B - completions without signal)

    Use it for the simplest on-policy update that does not shrink when groups carry no signal.

    Deviations: alpha is written as leaving groups without signal out of the denominators, which is the same. The paper
    also samples again when too few groups are left; dynamic_sampling = true does that.
    """
    return Objective(
        name="gpg",
        keep=(UnevenGroups(),),
        advantage=BaselineAdvantage(GroupMean()),
        ratio=NoRatio(),
        weight=PolicyGradient(),
        aggregate=SequenceMeanTokenMean(),
    )


def opo() -> Objective:
    """On-Policy RL with the baseline of least variance, weighted by length: OPO, arXiv 2505.23585.

    A_i = R_i - sum_j T_j R_j / sum_j T_j

    Use it strictly on-policy, with completions of very different lengths.

    Deviations: the aggregation is left open by the paper (token mean, as in verl).
    """
    return Objective(
        name="opo",
        advantage=BaselineAdvantage(LengthWeighted()),
        ratio=NoRatio(),
        weight=PolicyGradient(),
        aggregate=TokenMean(),
    )


def otb(*, eps_low: float = 0.2, eps_high: float = 0.2, tail: str = "silent") -> Objective:
    """A baseline for each token, weighted by how much each completion has moved the policy: OTB, arXiv 2602.07078.

    A_it = R_i - sum_j R_j W_jt / sum_j W_jt,  W_jt = sum_(s <= t) |e_js - pi_js|^2 = sum_(s <= t) (1 - 2 pi + sum_v
    pi_v^2)

    The baseline of least variance for the gradient up to token t, if the gradient by the logits stands for that by the
    weights. ``tail`` says what tokens get that no other completion of the group is long enough for: "silent" 0, as the
    equation does, "reward" their reward, as verl does.

    Use it for long completions of uneven length and small groups. It needs ``score_norms``, which the learner computes
    in a pass of its own before the first update.

    Deviations: positions count loss tokens, as in verl's estimator for several turns (its other one counts columns).
    verl adds 1e-8 to the divisor, and can scale W by the squared mismatch correction. The paper updates on-policy
    without a clip; PPO's clip and a token mean here.
    """
    return Objective(
        name="otb",
        advantage=TokenBaseline(tail),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def topr(*, level: str = "token") -> Objective:
    """Tapered Off-Policy REINFORCE, no ratio on right answers, a capped one on wrong ones: TOPR, arXiv 2503.14286.

    J = A_i sg(g) log pi,  g = 1 if the answer is correct, clip(r, 0, 1) if not

    ``level`` "token" takes each token's own ratio, "sequence" the whole trajectory's (then with a sum over tokens).

    Use it far off-policy: nothing can blow up, and right answers are always learned from.

    Deviations: the paper's ratio is the trajectory's, the public code's (ROLL) the token's, which is the default here.
    The baseline is open in the paper (group mean). Biased by design.
    """
    one_of(("token", "sequence"), level=level)
    return Objective(
        name="topr",
        advantage=BaselineAdvantage(GroupMean()),
        ratio=TokenRatio() if level == "token" else ProductRatio(),
        weight=Tapered(),
        aggregate=TokenMean() if level == "token" else SequenceMeanTokenSum(),
    )


def kimi(*, tau: float = 0.1) -> Objective:
    """Online mirror descent with a squared log-ratio instead of a clip: Kimi k1.5, arXiv 2501.12599, eq. 3.

    J = mean_i { (R_i - mean R) log pi(y_i) - tau/2 (log pi(y_i) / pi_old(y_i))^2 },  C_t = share (A_i - tau Z_i)

    Use it for several updates per rollout without importance weights: the residual pulls back.

    Deviations: ROLL applies the residual per token. The paper's length reward is a reward function, not part of this.
    """
    return Objective(
        name="kimi",
        advantage=BaselineAdvantage(GroupMean()),
        ratio=NoRatio(),
        weight=PolicyGradient(),
        aggregate=SequenceMeanTokenSum(),
        divergence=(KL(), SequenceSquare(tau)),
    )


def dro(*, tau: float = 0.05) -> Objective:
    """Direct Reward Optimization, a policy gradient held back by the squared log-ratio of each token: arXiv 2405.19107.

    J = (1/N) sum_t { A_i log pi - tau/2 (log pi / pi_old)^2 },  C_t = share (A_i - tau log r_t)

    The online form of Tinker and verl ("dro"), whose beta is ``tau`` here.

    Use it for several updates per rollout without importance weights and without a clip: the pull back is gradual. kimi
    squares the log-ratio of the whole completion.

    Deviations: the paper is offline and learns a value beside the policy; Tinker leaves the advantage to the caller,
    verl to its estimator (group mean here). verl has no default for beta, 0.05 is Tinker's example. A mismatch
    correction multiplies the push alone, in verl the pull back too.
    """
    not_negative(tau=tau)
    return Objective(
        name="dro",
        advantage=BaselineAdvantage(GroupMean()),
        ratio=NoRatio(),
        weight=PolicyGradient(),
        aggregate=TokenMean(),
        # k2 is d^2 / 2: tau/2 (log r)^2.
        divergence=(KL(), KL(tau, "k2", anchor="old")),
    )
