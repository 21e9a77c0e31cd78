"""GRPO with credit for each turn of a multi-turn episode."""

from __future__ import annotations

from ..advantage import Advantage
from ..aggregate import TokenMean
from ..credit import EpisodeAndState, TurnAndOutcome, TurnReturns
from ..divergence import KL
from ..objective import Objective
from ..weight import Clip


def gigpo(
    *, eps_low: float = 0.2, eps_high: float = 0.2, omega: float = 1.0, turn_discount: float = 0.95,
    norm: str = "mean-std", ddof: int = 1, std_eps: float = 0.0,
) -> Objective:  # fmt: skip
    """Group-in-Group Policy Optimization, which also compares turns that began in the same state: arXiv 2505.10978.

    A_k = (R_i - mean R) / F(R) + omega (G_k - mean G) / F(G),  G_k = sum_(l >= k) turn_discount^(l - k) r_l

    R is the reward of an episode among those of its group. G is a turn's discounted return among those of all turns of
    the group that began in the same state (anchor state): which action was the better one from there. F is the
    deviation, or 1 with ``norm = "mean"``.

    Use it in environments whose states recur within a group (grids, games, shops). A turn whose state no other turn of
    the group began in has GRPO's advantage; as all episodes of a group begin in one state, episodes of a single turn
    have 1 + omega times GRPO's.

    Deviations: mean and F of R are over episodes, as in the paper's eq. 3; the authors' code counts an episode once for
    each of its turns. F is the sample deviation without their 1e-6. States are equal or different; their search runs
    also join observations that are similar. What shaping adds to a reward belongs to the last turn. Clip, KL (0.01, k3)
    and token mean are those of their scripts; the paper averages over turns.
    """
    rule = EpisodeAndState(omega, turn_discount, norm, ddof, std_eps)
    return _clipped("gigpo", rule, eps_low=eps_low, eps_high=eps_high).replace(divergence=(KL(0.01),))


def mt_grpo(
    *, eps_low: float = 0.2, eps_high: float = 0.2, outcome_weight: float = 1.0, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """Multi-turn GRPO, where a turn has the advantage of its own reward beside the outcome's: arXiv 2505.11821.

    A_k = z(r_k) + outcome_weight z(R) for all turns but the last,  A_last = z(R)

    R is the reward of the last turn; z compares it with the others of the group, and r_k with those of the group's
    other k-th turns.

    Use it where turns have verifiable rewards of their own (a tool call that worked, a search that found the answer)
    that say nothing of the turns before them.

    Deviations: the paper trains episodes of two turns; more are treated likewise, each turn compared with those of the
    same number. The authors' code weighs the turn's term instead of the outcome's, which is the same at 1, and gives
    episodes without a tool result the advantage of both rewards' sum. Clip, average and KL (none) are the host's.
    """
    return _clipped("mt-grpo", TurnAndOutcome(outcome_weight, ddof, std_eps), eps_low=eps_low, eps_high=eps_high)


def turn_returns(
    *, eps_low: float = 0.2, eps_high: float = 0.2, turn_discount: float = 1.0, ddof: int = 1, std_eps: float = 0.0
) -> Objective:
    """GRPO on what is still to come from each turn, MT-GRPO's second estimator: arXiv 2505.11821, the authors' code.

    A_k = z(G_k),  G_k = sum_(l >= k) turn_discount^(l - k) r_l

    z compares a turn's discounted return with those of the group's other k-th turns.

    Use it where rewards are spread over the turns: a turn is not credited with what was earned before it.

    Deviations: the authors' code has it for episodes of two turns (its ``cae``); more are treated likewise. A turn that
    no other episode of the group reached has no advantage. Normalised discounted returns are also the advantages of
    Group Turn Policy Optimization, arXiv 2511.14846, which shapes rewards besides. Clip and average are the host's.
    """
    return _clipped("turn-returns", TurnReturns(turn_discount, ddof, std_eps), eps_low=eps_low, eps_high=eps_high)


def _clipped(name: str, advantage: Advantage, *, eps_low: float, eps_high: float) -> Objective:
    return Objective(name=name, advantage=advantage, weight=Clip(eps_low, eps_high), aggregate=TokenMean())
