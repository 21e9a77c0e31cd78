"""Given completions: supervised fine-tuning, rejection sampling, and preference pairs."""

from __future__ import annotations

from ..aggregate import SequenceMeanTokenMean, TokenMean
from ..imitation import CorrectDemonstrations, CorrectOnly, Demonstrated
from ..objective import Objective
from ..preferred import PreferenceWeight, Preferred, PromptMeanTokenSum
from ..ratio import NoRatio
from ..weight import PolicyGradient


def sft() -> Objective:
    """The log-likelihood of demonstrations, cross entropy: supervised fine-tuning, arXiv 2402.03300.

    J = mean_t log pi(y_t),  C_t = share_t,  y given

    Use it to begin, on demonstrations, so that rewards find something to reward.

    Deviations: token mean over the step, as transformers and TRL compute it; DeepSeekMath averages over sequences.
    """
    return Objective(
        name="sft", advantage=Demonstrated(), ratio=NoRatio(), weight=PolicyGradient(), aggregate=TokenMean()
    )


def rft() -> Objective:
    """SFT on the correct ones of completions that the initial policy sampled: rejection sampling, arXiv 2402.03300.

    J = mean_i 1[correct] mean_t log pi(y_it),  C_t = share_t 1[correct],  y ~ pi_initial

    Use it on completions that were sampled once and scored.

    Deviations: none. Where wrong completions are thrown away before training, the mean is over the correct ones alone.
    """
    return Objective(
        name="rft", advantage=CorrectDemonstrations(), ratio=NoRatio(), weight=PolicyGradient(),
        aggregate=SequenceMeanTokenMean(),
    )  # fmt: skip


def online_rft() -> Objective:
    """Rejection sampling from the current policy, correct completions count 1, others 0: arXiv 2402.03300.

    J = mean_i 1[correct] mean_t log pi(y_it),  C_t = share_t 1[correct],  y ~ pi

    Use it as the baseline that any use of wrong answers must beat: GRPO without its negative advantages.

    Deviations: none.
    """
    return Objective(
        name="online-rft", advantage=CorrectOnly(), ratio=NoRatio(), weight=PolicyGradient(),
        aggregate=SequenceMeanTokenMean(),
    )  # fmt: skip


def dpo(dpo_beta: float = 0.1) -> Objective:
    """The better completion of a pair against the worse, as the policy's log-ratios tell them apart: arXiv 2305.18290.

    L = - mean_pairs log sigma(z_c - z_r),  z = dpo_beta sum_t log(pi / pi_ref)

    Use it on preference pairs: two answers to each prompt, of which one is known to be better.

    Deviations: in a group of more than two, the best completions are compared with the worst, all pairs of them alike.
    """
    return Objective(
        name="dpo", advantage=Preferred(), ratio=NoRatio(), weight=PreferenceWeight(dpo_beta),
        # A sum over tokens: DPO's log-ratios are those of whole completions.
        aggregate=PromptMeanTokenSum(),
    )  # fmt: skip
