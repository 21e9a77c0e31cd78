"""Rollouts of an earlier run: nothing is generated, and every replay trains on the same bits."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ..config import Config
from ..errors import ReplayError
from ..eval.evaluate import Correct
from ..objective import Objective
from ..types import Rollout, ScoredGroup
from .endings import ModelFacts
from .source import StepRollouts
from .sync import has_both_outcomes


class RecordedRun(Protocol):
    """The rollouts that a run left behind."""

    def read(self, step: int) -> StepRollouts:
        """Those of ``step``. Raises ReplayError if they are missing or damaged."""
        ...

    def fingerprint(self, step: int) -> str:
        """Identifies those of ``step``, without reading them."""
        ...


class ReplayRollouts:
    """Gives each step the rollouts that an earlier run had in it.

    ``follows``: this run has the settings of that one, so that policy version v has the weights that sampled the tokens
    of version v. Otherwise only version 0, the model before training, is the same in both: tokens of version v > 0 then
    get version -v. It never equals a version of this run, and the difference counts the updates on both sides.

    Groups that the earlier run dropped stay dropped; those without signal are also dropped where only this run's
    objective asks for that. No group is drawn anew.
    """

    def __init__(
        self, recorded: RecordedRun, *, follows: bool, config: Config, objective: Objective, correct: Correct,
        facts: ModelFacts,
    ) -> None:  # fmt: skip
        self.recorded, self.follows, self.config = recorded, follows, config
        self.objective, self.correct, self.facts = objective, correct, facts
        self.position = 0  # prompts drawn: none
        self.interruptible: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.note: Callable[[str], None] = lambda text: None
        self._done, self._digest = 0, ""  # steps that were trained on, and what identifies their rollouts

    def next(self, step: int) -> StepRollouts:
        self.note("reading")
        with self.interruptible():
            found = self.recorded.read(step)
        self._check(found, step)
        if not self.follows:
            found = _of_other_weights(found)
        if self.objective.dynamic_sampling:
            # Of what that run trained on: what it dropped stays dropped.
            kept = tuple(group for group in found.trained_on if has_both_outcomes(group, self.correct))
            found = dataclasses.replace(found, trained_on=kept)
        return found

    def trained(self, step: int, version: int) -> None:
        self._done, self._digest = step, self._extended(self._digest, step)

    def state(self) -> dict[str, Any]:
        """As JSON; ``replayed`` identifies all rollouts so far, since a resumed run must go on with the same ones."""
        return {"position": self.position, "sampled": self._done, "replayed": self._digest}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned. Raises ReplayError if the rollouts have changed since."""
        done, digest = int(state.get("sampled", 0)), ""
        for step in range(1, done + 1):
            digest = self._extended(digest, step)
        if digest != state.get("replayed", ""):
            raise ReplayError(
                f"rollout.replay: the rollouts of steps 1 to {done} in {self.config.rollout.replay} are not those that "
                "this run has trained on; put a backup of them there, or start a new run with another out"
            )
        self._done, self._digest = done, digest

    def _extended(self, digest: str, step: int) -> str:
        return hashlib.blake2b(f"{digest}:{self.recorded.fingerprint(step)}".encode(), digest_size=16).hexdigest()

    def _check(self, found: StepRollouts, step: int) -> None:
        """Raises ReplayError if the model cannot read the tokens."""
        every = [np.concatenate([r.prompt_ids, r.token_ids]) for g in found.sampled for r in g.group.rollouts]
        largest, longest = max((int(ids.max()) for ids in every), default=0), max(map(len, every), default=0)
        # The reasons are those of ModelFacts.check: an id out of range would end a process on a GPU.
        if largest >= self.facts.vocabulary:
            raise ReplayError(
                f"rollout.replay: step {step} has token {largest}, but the model's vocabulary has "
                f"{self.facts.vocabulary}; give the model that the recorded run began with"
            )
        if self.facts.positions and longest > self.facts.positions:
            raise ReplayError(
                f"rollout.replay: step {step} has a prompt and completion of {longest} tokens, but the model has "
                f"{self.facts.positions} positions; give the model that the recorded run began with"
            )


def _of_other_weights(found: StepRollouts) -> StepRollouts:
    """The rollouts with versions that are none of this run's, but for version 0."""
    at = {id(group): i for i, group in enumerate(found.sampled)}
    sampled = tuple(
        # trained_on holds the same objects as sampled: places carry over to the changed ones.
        ScoredGroup(
            dataclasses.replace(scored.group, rollouts=tuple(map(_foreign, scored.group.rollouts))), scored.scores
        )
        for scored in found.sampled
    )
    return StepRollouts(tuple(sampled[at[id(g)]] for g in found.trained_on), sampled, found.baselines)


def _foreign(rollout: Rollout) -> Rollout:
    turns = tuple(
        dataclasses.replace(
            turn, versions=tuple(dataclasses.replace(span, version=-abs(span.version)) for span in turn.versions)
        )
        for turn in rollout.turns
    )
    return dataclasses.replace(rollout, turns=turns)
