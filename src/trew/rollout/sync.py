"""Synchronous (on-policy) rollouts: generated when the loop asks for them, with the current weights."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ..config import Config
from ..eval.evaluate import Correct
from ..objective import Objective
from ..rewards import RewardSet
from ..types import Prompt, Sampling, ScoredGroup
from .drawing import Drawn, drawing
from .engine import Engine
from .episodes import Episodes
from .generate import generate
from .source import StepRollouts


class SyncRollouts:
    """Draws prompts, generates, scores; generation for the next step starts only after this step is trained.

    Under dynamic sampling, groups without signal are replaced by fresh prompts, at most ``rollout.refills`` times; if
    groups are still missing then, the step is smaller, never padded. ``position`` counts the prompts drawn so far.
    ``interruptible`` wraps all work that may be abandoned and redone; ``note`` receives the current activity.
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
        self._waited_before = 0.0
        self.drawing = drawing(config, prompts, correct)
        self._now: StepRollouts | None = None  # of the step that is being trained

    def next(self, step: int) -> StepRollouts:
        """Generates and scores the groups of ``step``; see :class:`.RolloutSource`."""
        # None until the rollouts are complete: trained() learns nothing of a step that failed.
        self._now = None
        self.waited()  # what evaluations waited since the step before is not of this one
        with self.interruptible():
            kept, sampled = self._collect(step)
            baselines = None
            if kept and "baselines" in self.objective.needs:
                baselines = self._baselines(kept, [g.group.prompt for g in kept], step)
        self._now = StepRollouts(tuple(kept), tuple(sampled), baselines, self.waited() | self.drawing.facts())
        return self._now

    def waited(self, engine: Engine | None = None) -> dict[str, float]:
        """The seconds since the last call in which all episodes waited for their environments, those of ``engine`` if
        it is another one; a metric of the step."""
        player = self.engine if engine is None else engine
        if not isinstance(player, Episodes):
            return {}
        before, self._waited_before = self._waited_before, player.waited_s
        return {"seconds_waited": player.waited_s - before}

    def trained(self, step: int, version: int) -> None:
        """Takes notice of the pass rates of the step. No rollouts are in flight between steps."""
        self._learn()

    def _learn(self) -> None:
        if self._now is not None:  # else next() has failed
            self.drawing.learned(self._now.sampled)
            self._now = None

    def state(self) -> dict[str, Any]:
        return {"position": self.position, **self.drawing.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])
        self.drawing.load_state(state)

    def _collect(self, step: int) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        """Returns the groups to train on, and all sampled groups."""
        settings, dynamic = self.config.rollout, self.objective.dynamic_sampling
        kept: list[ScoredGroup] = []
        sampled: list[ScoredGroup] = []
        uids: set[str] = set()
        for attempt in range(1 + (settings.refills if dynamic else 0)):
            missing = settings.prompts - len(kept)
            if not missing:
                break
            # Only what is missing is drawn again. The stream's position advances for dropped groups too: a refill that
            # drew the same prompts would most likely get groups without signal once more.
            prompts = [drawn.prompt for drawn in self._draw(missing, uids, step)]
            scored = self._generate(prompts, step=step, attempt=attempt)
            sampled += scored
            kept += [g for g in scored if not dynamic or has_both_outcomes(g, self.correct)]
        return kept, sampled

    def _generate(self, prompts: Sequence[Prompt], *, step: int, attempt: int) -> list[ScoredGroup]:
        """One scored group per prompt; finished groups are scored while others are still generated."""
        settings = self.config.rollout
        self.note("generating")
        with self.rewards.grading(step=step) as grading:
            # With overlap, slow rewards (code, judges) run while the model generates. The scores are the same.
            on_group = grading.add if settings.overlap else None
            how = sampling(self.config, step, attempt)
            groups = generate(self.engine, prompts, n=settings.completions, sampling=how, on_group=on_group)
            self.note("scoring")
            return grading.finish(groups)

    def _draw(self, count: int, taken: set[str], step: int) -> list[Drawn]:
        """Returns the next prompts of the endless stream. A prompt that this step has already drawn (its uid is in
        ``taken``) gets a new, unique uid: uids identify groups, and equal uids would draw equal tokens."""
        found = []
        for _ in range(count):
            drawn = self.drawing.draw(self.position, taken=self._busy(taken))
            prompt = self.seeded(drawn.prompt, step)
            if prompt.uid in taken:
                # taken only grows, so that no number is given twice.
                prompt = dataclasses.replace(prompt, uid=f"{prompt.uid}~{len(taken)}")
            taken.add(prompt.uid)
            found.append(dataclasses.replace(drawn, prompt=prompt))
            self.position += 1
        return found

    def _busy(self, taken: Iterable[str]) -> Iterable[str]:
        """The uids of prompts that are being answered, for a step that has drawn those ``taken``."""
        return taken

    def seeded(self, prompt: Prompt, step: int) -> Prompt:
        """The prompt with the seed of its environment in this step; the greedy baseline plays the same episode."""
        return dataclasses.replace(prompt, seed=seed_of(self.config, str(step))) if self.config.plays else prompt

    def _baselines(self, groups: Sequence[ScoredGroup], asked: Sequence[Prompt], step: int) -> dict[str, float]:
        """Returns the reward of the greedy answer to each group's prompt, by the prompt's uid.

        ``asked`` are the prompts that the groups were asked for with: an environment plays another episode for another
        uid. NaN if the answer could not be judged, or not by all rewards that judged the group: the two are not
        comparable then, and the prompt is left out of the step. An advantage of 0 instead would claim that its rollouts
        are just as good as the greedy answer.
        """
        self.note("generating")
        # Cuts do nothing at temperature 0, and are left out.
        greedy = dataclasses.replace(sampling(self.config, step, 0), temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        answers = generate(self.engine, asked, n=1, sampling=greedy)
        self.note("scoring")
        # A reward of weight 0 is only logged: whether it judged the answer does not change the value.
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


def has_both_outcomes(scored: ScoredGroup, correct: Correct) -> bool:
    """Whether a group holds both correct and wrong rollouts."""
    # None: not judged (a reward failed or abstained), which is neither outcome.
    return len({c for s in scored.scores if (c := correct(s)) is not None}) == 2


def sampling(config: Config, step: int, attempt: int) -> Sampling:
    """The sampling settings of a step's rollouts; every step and every refill round has its own seed."""
    return keyed_sampling(config, f"{step}:{attempt}")


def keyed_sampling(config: Config, key: str) -> Sampling:
    """The sampling settings of a recipe; the seed is a function of the run's seed and ``key``."""
    r = config.rollout
    return Sampling(
        max_tokens=r.max_tokens, temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, stop=r.stop,
        seed=seed_of(config, key),
    )  # fmt: skip


def seed_of(config: Config, key: str) -> int:
    """A seed that is a function of the run's seed and ``key``: 63 bits, a non-negative int64."""
    # Hashed, not added: seed + step would give seed 1 at step 2 the draws of seed 2 at step 1.
    digest = hashlib.blake2b(f"{config.seed}:{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
