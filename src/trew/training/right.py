"""What counts as correct in a run, and what as right where a policy learns from it."""

from __future__ import annotations

from ..config import Config
from ..eval import correct_by
from ..eval.evaluate import Correct
from ..rewards import RewardSet
from ..types import Score


def correct_of(config: Config, rewards: RewardSet) -> Correct:
    """Whether a score counts as correct: by the reward that the recipe names or, unless it does, by the first one of
    the prompt's data set that says so (:func:`~trew.rewards.names.judge_rank`)."""
    named = config.eval.correct_reward
    names = [named] if named else [reward.name for reward in rewards.judges]
    return correct_by(*names, at=config.eval.correct_at)


def right_of(correct: Correct, rewards: RewardSet) -> Correct:
    """Whether a completion is one to learn: correct, and behind no closed gate, where nothing is rewarded. Dynamic
    sampling, the curriculum and objectives that learn from right completions go by this; accuracy does not."""

    def right(score: Score) -> bool | None:
        found = correct(score)
        return found and rewards.lets_through(score)

    return right


def note(config: Config, rewards: RewardSet) -> list[str]:
    """Which reward decides, where that is not simply the first."""
    first = next((reward for reward in rewards.rewards if reward.model is None), None)
    if config.eval.correct_reward or first is None or rewards.judges[0] is first:
        return []
    return [
        f"eval.correct_reward: {rewards.judges[0].name} says which completions are correct, not {first.name}, which "
        "looks at layout or length, or is a gate of weight 0; name another one to change that"
    ]
