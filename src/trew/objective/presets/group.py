"""GRPO and what differs from it in how a reward becomes an advantage or in how tokens are averaged."""

from __future__ import annotations

from ..advantage import BaselineAdvantage, PassAtK, PerReward, z_score
from ..aggregate import Constant, LocalTokenMean, SequenceMeanTokenMean, TokenMean
from ..baseline import BestOfOthers, GroupMean
from ..divergence import KL
from ..filter import LargestAdvantages, MixedGroups
from ..objective import Objective
from ..process import StepRewards
from ..scale import BatchStd, BetaDensity, MeanReward, group_scale
from ..weight import Clip


def grpo(*, eps_low: float = 0.2, eps_high: float = 0.2, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Group Relative Policy Optimization with outcome rewards: DeepSeekMath, arXiv 2402.03300, eq. 3 and §4.1.2.

    J = mean_i mean_t { min(r_t A_i, clip(r_t, 1 - eps_low, 1 + eps_high) A_i) - beta k3_t },
    A_i = (R_i - mean R) / std R

    Use it as the point of reference, or where a KL anchor and the paper's own form are wanted.

    Deviations: the paper reports no clip range (0.2 is PPO's) and does not say which standard deviation (ddof = 1). The
    k3 term in the loss has the gradient of KL(pi_ref || pi). Most frameworks call something else "grpo": a token mean
    and no KL. DeepSeek-R1 is said to have run it with beta = 0.001 and a clip of 10.
    """
    return Objective(
        name="grpo",
        advantage=z_score(ddof, std_eps),
        weight=Clip(eps_low, eps_high),
        aggregate=SequenceMeanTokenMean(),
        divergence=(KL(0.04),),
    )


def grpo_process(*, eps_low: float = 0.2, eps_high: float = 0.2, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """GRPO with process supervision, a reward for every step: DeepSeekMath, arXiv 2402.03300, §4.1.3.

    A_it = sum over the steps j of y_i that end at t or later of (R_j - mean) / std, over all steps of the group

    Use it with a process reward model, or with rules that judge steps; it needs ``step_rewards``.

    Deviations: none known; completions with more steps weigh more in the statistics, as in the paper.
    """
    return grpo(eps_low=eps_low, eps_high=eps_high).replace(name="grpo-process", advantage=StepRewards(ddof, std_eps))


def bnpo_paper(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """Beta Normalization Policy Optimization, the paper's: arXiv 2506.02864.

    A_i = (R_i - p) / Beta(p; alpha, beta),  p = mean R of the group, alpha and beta from the batch's p

    Use it with 0/1 rewards to let the normaliser follow the difficulty of the batch: it lies between Dr. GRPO and GRPO.

    Deviations: not what TRL calls bnpo (that is token-mean-local). Without any variance of p, alpha = beta = 1. Clip
    and aggregation are the host's: the authors' script has eps_high = 0.28, a dual clip of 10 and a sum over tokens
    (aggregate = "seq-mean-token-sum"), the defaults of their configuration are those here with a dual clip of 3.
    """
    return Objective(
        name="bnpo-paper",
        advantage=BaselineAdvantage(GroupMean(), BetaDensity()),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def token_mean_local(
    *, eps_low: float = 0.2, eps_high: float = 0.2, ddof: int = 1, std_eps: float = 0.0, microbatch: int = 8
) -> Objective:
    """GRPO's loss averaged over the tokens of each micro-batch, then over micro-batches: the "bnpo" of TRL, no paper.

    J = mean over blocks b of (1 / N_b) sum_(t in b) min(r_t A, clip(r_t) A)

    Use it to reproduce runs of trainers whose loss depends on the micro-batch; ``microbatch`` is theirs.

    Deviations: the blocks are a declared part of the objective, ``microbatch`` sequences each, whatever the split that
    the step is computed in. With microbatch = 1 it is the sequence mean of token means.
    """
    return Objective(
        name="token-mean-local",
        advantage=z_score(ddof, std_eps),
        weight=Clip(eps_low, eps_high),
        aggregate=LocalTokenMean(microbatch),
    )


def dapo(*, eps_low: float = 0.2, eps_high: float = 0.28, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Decoupled Clip and Dynamic sAmpling Policy Optimization: DAPO, arXiv 2503.14476.

    J = (1/N) sum_t min(r_t A, clip(r_t, 1 - eps_low, 1 + eps_high) A),  groups with 0 < #correct < G only

    Clip-higher, dynamic sampling, token mean over the step, no KL. ``overlong_cache`` > 0 adds the soft overlong
    punishment (the paper: 4096 of 20480 tokens); ``overlong_filtering`` takes the loss off completions that were cut
    off.

    Use it for long answers with verifiable rewards, where sampling is cheap next to learning: groups without a signal
    are replaced, so that a step samples more (a third more in docs/study.md).

    Deviations: the paper's formula divides by the tokens of a group, its code and this one by those of the step; the
    punishment is off unless asked for, since its size belongs to the completion limit.
    """
    return Objective(
        name="dapo",
        keep=(MixedGroups(),),
        advantage=z_score(ddof, std_eps),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def dr_grpo(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """GRPO done right: no division by std(R), none by the completion's length, no KL: Dr. GRPO, arXiv 2503.20783.

    J = mean_i (1/L) sum_t min(r_t A_i, clip(r_t) A_i),  A_i = R_i - mean R

    Use it where the length bias of the sequence mean, or the weight that std gives to easy and hard prompts, is in the
    way; its gradient is that of the mean reward.

    Deviations: none from the authors' code, which divides by the longest completion allowed (the paper has no divisor).
    It is not "GRPO with a KL term", as some lists have it.
    """
    return Objective(
        name="dr-grpo",
        advantage=BaselineAdvantage(GroupMean()),
        weight=Clip(eps_low, eps_high),
        aggregate=Constant(),
    )


def lite_ppo(*, eps_low: float = 0.2, eps_high: float = 0.2, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Group mean, batch deviation, token mean, and nothing else: Lite-PPO, arXiv 2508.08221.

    A_i = (R_i - mean R of the group) / std(R of the batch)

    Use it instead of GRPO where groups of nearly equal rewards get too much weight: one scale for all prompts.

    Deviations: the batch's deviation is of the raw rewards, as in TRL; reinforce-pp-baseline takes the centred ones.
    """
    return Objective(
        name="lite-ppo",
        advantage=BaselineAdvantage(GroupMean(), BatchStd(ddof, std_eps)),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def cppo(
    *, eps_low: float = 0.2, eps_high: float = 0.2, pruning: float = 0.5, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """Completion Pruning Policy Optimization, GRPO on the completions that matter: CPPO, arXiv 2503.22342.

    J = GRPO's over the G (1 - pruning) completions of each group with the largest |A_i|

    Use it to save the learner's time with large groups; rollouts cost the same.

    Deviations: ranks are within each group, as in the paper (the authors' port to verl ranks the whole batch). Mean and
    deviation are those of the whole group, before pruning. ceil(G (1 - pruning)) completions stay; of equal |A| the
    first come, so that with 0/1 rewards and half of them right the order decides. The pruned leave the denominators.
    The paper fills the freed slots with more prompts; take more prompts per step. The estimate is biased by design.
    """
    return grpo(eps_low=eps_low, eps_high=eps_high, ddof=ddof, std_eps=std_eps).replace(
        name="cppo", prune=(LargestAdvantages(pruning),)
    )


def maxrl(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """Maximum-likelihood reinforcement learning, towards log p instead of p: MaxRL, arXiv 2602.02710.

    A_i = (R_i - mean R) / mean R, and 0 where mean R <= 0

    With groups of N it raises sum_(k < N) (1 - (1 - p)^k) / k of the success rate p; the slope is (1 - (1 - p)^(N-1)) /
    p.

    Use it where hard prompts should count: their weight is about 1/p. Rewards must not be negative.

    Deviations: the paper counts the order as N, for a mean that does not hold the answer itself; the paper leaves clip
    and aggregation to the host; PPO's clip and a token mean here.
    """
    return Objective(
        name="maxrl",
        advantage=BaselineAdvantage(GroupMean(), MeanReward()),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def pass_at_k(*, eps_low: float = 0.2, eps_high: float = 0.2, k: int = 4) -> Objective:
    """Train the chance that one of k answers is right: Pass@k Training, arXiv 2508.10751.

    A+ = (1 - p) / s,  A- = (1 - p - q) / s,  s^2 = p (1 - p),
    p = 1 - C(N-, k) / C(N, k),  q = C(N- - 1, k - 1) / C(N - 1, k - 1)

    Use it to keep exploring: prompts that are solved often enough no longer push. k = 1 is GRPO with ddof = 0.

    Deviations: where s = 0 all advantages are 0 (the authors' code overwrites some).
    """
    return Objective(
        name="pass-at-k",
        advantage=PassAtK(k),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )


def grpo_passk(*, eps_high: float = 0.2, scale: str = "std", ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Train the best of a group by its lead: the "grpo_passk" of verl, after arXiv 2503.19595.

    A_i = (R_i - max_(j != i) R_j) / std R for the best completion, 0 for all others

    ``scale`` "std" divides by the group's deviation, "none" does not. k is the group's size: the expected gradient
    without the scale is that of the best reward among the group's completions.

    Use it where only the best answer of a group counts, with rewards that differ: two that are equally good lead by 0,
    so that 0/1 rewards teach only in groups with one right answer. pass-at-k takes smaller k from the same group.

    Deviations: verl refuses a group of one (no advantage here) and adds 1e-6 to the deviation (``std_eps``). The paper
    does not divide. Clip and aggregation are the host's: PPO's clip and a token mean here. No advantage is below 0, so
    that the clip has an upper bound alone to set.
    """
    return Objective(
        name="grpo-passk",
        advantage=BaselineAdvantage(BestOfOthers(), group_scale(scale, ddof, std_eps)),
        weight=Clip(eps_high=eps_high),
        aggregate=TokenMean(),
    )


def gdpo(*, eps_low: float = 0.2, eps_high: float = 0.2, ddof: int = 1, std_eps: float = 0.0) -> Objective:
    """Group reward-Decoupled normalisation, each reward by itself, for several rewards: GDPO, arXiv 2601.05242.

    A_i = z_batch( sum_k weight_k (R_ik - mean_k) / std_k )

    Use it with several rewards, (B, K): summed first, different combinations of them can look the same.

    Deviations: NaN rewards are left out of their column's statistics (the authors' code reads them as 0). Weights act
    after the normalisation, so a reward's scale does not matter. Host settings: PPO's clip, token mean.
    """
    return Objective(
        name="gdpo",
        advantage=PerReward(ddof, std_eps),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )
