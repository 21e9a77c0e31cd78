"""Built-in reward ``environment``: what the environment of an episode gave."""

from __future__ import annotations

import math
from typing import Any

from ...types import Rollout
from ..verdict import NOT_PLAYED, Verdict


def grade(completion: str, gold: Any = None, *, episode: Rollout | None = None) -> Verdict:
    """Adds up the rewards of an episode's turns; each is a step that ends with its reply.

    An episode that was cut off counts with what it had earned by then, which may be nothing. One that came to its end
    without any reward is not judged, nor is a completion that is no episode.
    """
    if episode is None or not episode.ending:
        return Verdict(None, "not_applicable")
    if episode.status == "failed":
        return NOT_PLAYED
    ends = zip(episode.turn_ends, episode.turns, strict=True)
    steps = tuple((end, turn.reward) for end, turn in ends if turn.reward is not None)
    if not steps:
        if episode.status == "finished":
            return Verdict(None, "not_applicable")
        # A step of 0, not none: an objective that learns from steps would leave the episode out instead of ranking it
        # behind those that earned something.
        steps = ((episode.turn_ends[-1], 0.0),)
    # Exactly rounded: ten turns of 0.1 are 1, which counts as correct.
    return Verdict(math.fsum(value for _, value in steps), detail=episode.ending, steps=steps)
