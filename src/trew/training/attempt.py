"""``Attempt``: the record of one step while it runs, from its rollouts to its updates or its error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from ..errors import NumericsError
from ..objective import TokenBatch
from ..rollout import StepRollouts
from ..types import StepOutput
from .effects import TokenEffects
from .frozen import SamplerGap


@dataclass(slots=True)
class Attempt:
    """One try at a step, filled in by the loop as it goes. What was there before an error stays, and is recorded with
    it: None and empty lists mean that the step did not get so far."""

    step: int
    version: int  # of the policy before the first update
    start: float = field(default_factory=time.monotonic)
    learning: float | None = None  # when the rollouts were there and the update began
    end: float = 0.0  # when the update ended, or the step failed
    rollouts: StepRollouts | None = None
    batch: TokenBatch | None = None  # of the whole step; prepared, once the advantages are known
    canary: SamplerGap | None = None
    updates: list[StepOutput] = field(default_factory=list)  # those that were applied
    critic_updates: list[StepOutput] = field(default_factory=list)  # those of the critic that were applied
    effects: TokenEffects | None = None  # of those updates on each token
    error: NumericsError | None = None
    message: str = ""  # the warning about the error

    def seconds(self, now: float) -> dict[str, float]:
        """The seconds of the step until ``now``, when its weights have been published, by what took them."""
        learning = self.end if self.learning is None else self.learning
        return {
            "rollouts/seconds": learning - self.start, "update/seconds": self.end - learning,
            "publish/seconds": now - self.end,
        }  # fmt: skip
