"""Rollouts generated when the loop asks for them, by the weights of that moment."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..config import Config
from ..data import PromptStream
from ..eval.evaluate import Correct
from ..objective import Objective
from ..rewards import RewardSet
from ..types import Prompt, Sampling, ScoredGroup
from .engine import Engine
from .generate import generate
from .source import StepRollouts


class SyncRollouts:
    """Draws prompts, generates, scores; the next step's rollouts do not begin before this step is trained.

    Under dynamic sampling, groups without signal are replaced by fresh prompts, at most ``rollout.refills`` times;
    what is still missing then leaves the step smaller, never padded. ``position`` counts the prompts drawn so far.
    ``interruptible`` is entered around everything that may be given up and done again; ``note`` is told what is going
    on.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        config: Config,
        objective: Objective,
        prompts: Sequence[Prompt],
        rewards: RewardSet,
        correct: Correct,
        position: int = 0,
        interruptible: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.engine, self.config, self.objective = engine, config, objective
        self.prompts, self.rewards, self.correct = prompts, rewards, correct
        self.position, self.interruptible, self.note = position, interruptible, note
        self._order = PromptStream(len(prompts), seed=config.seed, shuffle=config.data.shuffle)

    def next(self, step: int) -> StepRollouts:
        """Generates and scores the groups of ``step``; see :class:`.RolloutSource`."""
        with self.interruptible():
            kept, sampled = self._collect(step)
            baselines = None
            if kept and "baselines" in self.objective.needs:
                baselines = self._baselines(kept, step)
        return StepRollouts(tuple(kept), tuple(sampled), baselines)

    def trained(self, step: int, version: int) -> None:
        """Nothing to do: no rollouts are under way."""

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])

    def _collect(self, step: int) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Groups to train on, and all that were sampled."""
        settings, dynamic = self.config.rollout, self.objective.dynamic_sampling
        kept: list[ScoredGroup] = []
        sampled: list[ScoredGroup] = []
        uids: set[str] = set()
        for attempt in range(1 + (settings.refills if dynamic else 0)):
            missing = settings.prompts - len(kept)
            if not missing:
                break
            scored = self._generate(self._draw(missing, uids), step=step, attempt=attempt)
            sampled += scored
            kept += [g for g in scored if not dynamic or self._has_both_outcomes(g)]
        return kept, sampled

    def _generate(self, prompts: Sequence[Prompt], *, step: int, attempt: int) -> list[ScoredGroup]:
        """One scored group per prompt; finished groups are scored while others are still generated."""
        settings = self.config.rollout
        self.note("generating")
        with self.rewards.grading(step=step) as grading:
            on_group = grading.add if settings.overlap else None
            how = sampling(self.config, step, attempt)
            groups = generate(self.engine, prompts, n=settings.completions, sampling=how, on_group=on_group)
            self.note("scoring")
            return grading.finish(groups)

    def _draw(self, count: int, taken: set[str]) -> list[Prompt]:
        """The next prompts of the endless, per-epoch shuffled stream. A prompt that this step has drawn before (its uid
        is in ``taken``) gets a uid of its own: groups are told apart by it, and equal uids would draw equal tokens."""
        drawn = []
        for index in self._order.take(self.position, count):
            prompt = self.prompts[index]
            if prompt.uid in taken:
                prompt = dataclasses.replace(prompt, uid=f"{prompt.uid}~{len(taken)}")
            taken.add(prompt.uid)
            drawn.append(prompt)
        self.position += count
        return drawn

    def _has_both_outcomes(self, scored: ScoredGroup) -> bool:
        """Whether a group holds both correct and wrong rollouts."""
        return len({c for s in scored.scores if (c := self.correct(s)) is not None}) == 2

    def _baselines(self, groups: Sequence[ScoredGroup], step: int) -> dict[str, float]:
        """The reward of the greedy answer to each group's prompt, by the prompt's uid.

        NaN where it could not be judged, or not by all rewards that judged the group: then there is nothing to compare
        with, and the prompt takes no part in the step. An advantage of 0 would say that its rollouts are just as good.
        """
        self.note("generating")
        greedy = dataclasses.replace(sampling(self.config, step, 0), temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        answers = generate(self.engine, [g.group.prompt for g in groups], n=1, sampling=greedy)
        self.note("scoring")
        counted = [r.name for r in self.rewards.rewards if r.weight != 0]
        found = {}
        for group, answer in zip(groups, self.rewards.score(answers, step=step), strict=True):
            score = answer.scores[0]
            lacking = any(
                score.parts.get(name) is None and any(s.parts.get(name) is not None for s in group.scores)
                for name in counted
            )
            found[group.group.prompt.uid] = float("nan") if score.value is None or lacking else score.value
        return found


def sampling(config: Config, step: int, attempt: int) -> Sampling:
    """How the rollouts of a step are drawn; every step and refill round has a seed of its own."""
    return keyed_sampling(config, f"{step}:{attempt}")


def keyed_sampling(config: Config, key: str) -> Sampling:
    """The sampling of a recipe; the seed is a function of the run's seed and ``key``."""
    digest = hashlib.blake2b(f"{config.seed}:{key}".encode(), digest_size=8).digest()
    r = config.rollout
    return Sampling(
        max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, stop=r.stop,
        seed=int.from_bytes(digest, "big") >> 1,
    )  # fmt: skip
