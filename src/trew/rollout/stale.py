"""Rollouts of older weights in a single process: the exactly reproducible form of what asynchronous runs do."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError
from ..types import Prompt, ScoredGroup
from . import codec
from .source import StepRollouts
from .sync import SyncRollouts


class StaleRollouts(SyncRollouts):
    """Samples ``rollout.stale_steps`` = k steps ahead: step t is trained on rollouts of the weights before step t - k.

    The first k + 1 steps are all sampled before step 1, from the weights that the run starts with. Prompts, seeds and
    their order are those of a run with k = 0. Nothing is sampled beyond the last step.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._ahead: dict[int, StepRollouts] = {}  # by step
        self._sampled = 0  # the newest step that has been sampled

    def next(self, step: int) -> StepRollouts:
        last = min(step + self.config.rollout.stale_steps, self.config.steps)
        self._sampled = max(self._sampled, step - 1)  # a run that goes on beyond its former end has nothing ahead
        while self._sampled < last:
            # Counted only once it is there: what raised is sampled again, with the same draws, in the next step.
            self._ahead[self._sampled + 1] = super().next(self._sampled + 1)
            self._sampled += 1
        # A step that is trained again (after a failure) finds its rollouts; earlier ones are of no use any more.
        self._ahead = {number: found for number, found in self._ahead.items() if number >= step}
        self._now = self._ahead.pop(step)
        return self._now

    def state(self) -> dict[str, Any]:
        """As JSON. Prompts are left out but for their uids: they are in the data."""
        ahead = {str(number): _table(found) for number, found in self._ahead.items()}
        text = base64.b64encode(codec.encode(ahead)).decode() if ahead else ""
        return {**super().state(), "sampled": self._sampled, "ahead": text}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned; the state of a run without ``stale_steps`` has nothing ahead. Raises
        CheckpointError where it cannot be read, or where a prompt is not in the data."""
        super().load_state(state)
        self._sampled = int(state.get("sampled", 0))
        try:
            found = codec.decode(base64.b64decode(state["ahead"], validate=True)) if state.get("ahead") else {}
            self._ahead = {int(number): self._rollouts(table) for number, table in found.items()}
        except (binascii.Error, ValueError, KeyError, TypeError, IndexError) as error:
            raise CheckpointError(f"rollouts: what was sampled ahead cannot be read: {error}") from None

    def _rollouts(self, table: Mapping[str, Any]) -> StepRollouts:
        known = {prompt.uid: prompt for prompt in self.prompts}
        sampled = tuple(_with_prompt(group, _in_data(group.group.prompt, known)) for group in table["sampled"])
        # Checkpoints of earlier versions have no facts.
        return StepRollouts(
            tuple(sampled[i] for i in table["trained_on"]), sampled, table["baselines"], table.get("facts", {})
        )


def _table(rollouts: StepRollouts) -> dict[str, Any]:
    """A step's rollouts without the columns of their prompts; those that are trained on by their place among all."""
    bare = [_with_prompt(g, dataclasses.replace(g.group.prompt, columns={})) for g in rollouts.sampled]
    # By identity: trained_on holds the same objects as sampled.
    at = {id(group): i for i, group in enumerate(rollouts.sampled)}
    return {
        "sampled": bare, "trained_on": [at[id(group)] for group in rollouts.trained_on],
        "baselines": rollouts.baselines, "facts": dict(rollouts.facts),
    }  # fmt: skip


def _with_prompt(scored: ScoredGroup, prompt: Prompt) -> ScoredGroup:
    return ScoredGroup(dataclasses.replace(scored.group, prompt=prompt), scored.scores)


def _in_data(prompt: Prompt, known: Mapping[str, Prompt]) -> Prompt:
    """The prompt with its columns. A prompt that one step drew twice has a number behind its uid."""
    found = known.get(prompt.uid) or known.get(prompt.uid.rpartition("~")[0])
    if found is None:
        raise CheckpointError(f"rollouts: prompt {prompt.uid!r} was sampled ahead, and is not in the data any more")
    return dataclasses.replace(found, uid=prompt.uid)
