"""Learning from a teacher instead of rewards, on the policy's own completions."""

from __future__ import annotations

from ..advantage import NoAdvantage
from ..aggregate import TokenMean
from ..distillation import Distillation
from ..objective import Objective
from ..weight import Clip


def opd(*, eps_low: float = 0.2, eps_high: float = 0.2) -> Objective:
    """On-policy distillation, a teacher's log-probs in the place of rewards: arXiv 2601.02780, eq. 8.

    A_t = sg[ log pi_teacher(y_t) - log pi_old(y_t) ]

    The policy samples, and each of its tokens is pushed up if the teacher finds it more probable than the policy does,
    and down if less: on-policy, the gradient of KL(pi || pi_teacher) token by token, without an end of the completion
    to wait for. Rewards are not read: they may be None, and are there to be watched. ``distill`` (1.0 here) is the
    coefficient; above 0 in another preset, the same term is added to that one's advantages.

    Use it where a better model of the same vocabulary exists: a larger one, or one trained for a task; for one that has
    forgotten something, its own earlier weights. A token gets a signal of its own, whether any answer is right or not.

    Deviations: log pi_old is fixed while a step's rollouts are trained on, as in slime, NeMo-RL and Tinker; verl 0.9.1
    and prime-rl take the current policy's, which is the same in the first update. The trust region is PPO's clip, as in
    verl; Tinker has none, NeMo-RL drops tokens by IcePop (``correction = "icepop"``). Tinker and slime sum a
    sequence's tokens or average per sequence, which ``aggregate`` sets. The gap is not discounted into earlier tokens
    (Tinker's default), and not clipped.
    """
    return Objective(
        name="opd",
        advantage=NoAdvantage(),
        adjust=(Distillation(1.0),),
        weight=Clip(eps_low, eps_high),
        aggregate=TokenMean(),
    )
