"""Checks everything about a reward model's training that can be checked before its weights are loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError, Problems
from ..models import files, loading
from ..rewards.model.scorer import Encoder
from .data import Encoded, encode, fingerprint, gather
from .settings import RewardTraining
from .settings import problems as value_problems


@dataclass(frozen=True)
class RewardPlan:
    """A training that is ready to start: checked settings and tokenised pairs; no weights yet."""

    settings: RewardTraining
    encoder: Encoder
    train: list[Encoded]
    held: list[Encoded]
    device: str
    fingerprint: str
    notes: tuple[str, ...]
    example: str  # the first chosen text as the model reads it

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole training."""
        s = self.settings
        return s.steps or -(-len(self.train) * s.epochs // s.learner.batch)


def plan(settings: RewardTraining, *, found: Sequence[str] = ()) -> RewardPlan:
    """Checks and loads everything but the weights. Raises ConfigError with every problem, including ``found``."""
    s = settings
    problems = Problems([*found, *value_problems(s)])
    device = problems.attempt(lambda: loading.resolve_device(s.device))
    notes: list[str] = []
    encoder = _encoder(s, problems, notes)
    # Reading pairs would repeat problems that the values have reported already.
    reported = any(p.startswith(("data.pairs: none", "data.held_out")) for p in problems)
    pairs = None if reported else problems.attempt(lambda: gather(s.data, seed=s.seed))
    train: list[Encoded] = []
    held: list[Encoded] = []
    if pairs is not None and encoder is not None:
        notes += pairs.notes
        limit = problems.attempt(lambda: loading.positions(s.model))
        # Both sets before anything is raised: their problems are told together.
        for name, these, into in (("training", pairs.train, train), ("held-out", pairs.held, held)):
            done = problems.attempt(
                lambda these=these, name=name: encode(these, encoder, limit=limit, config=s.data, what=name)
            )
            if done is not None:
                into += done[0]
                notes += done[1]
    if problems or encoder is None or pairs is None or device is None:
        raise ConfigError(problems)
    result = RewardPlan(
        s, encoder, train, held, device, fingerprint(pairs.train, pairs.held), tuple(notes),
        encoder.tokenizer.decode(train[0].chosen),
    )  # fmt: skip
    if s.learner.batch > len(train):
        many = f"{result.steps * s.learner.batch / len(train):.3g} passes"
        said = f"a step has pairs several times, since learner.batch is more than they are: {many}"
        result = dataclasses.replace(result, notes=(*result.notes, said))
    # Only now: how many steps there are follows from the pairs that are left.
    if s.learner.warmup_steps > result.steps:
        raise ConfigError(
            f"learner.warmup_steps: got {s.learner.warmup_steps}, but the whole training has {result.steps} steps; "
            "the learning rate would never be reached"
        )
    return result


def _encoder(s: RewardTraining, problems: Problems, notes: list[str]) -> Encoder | None:
    """The encoder from texts to the model's tokens; None if the model's files have problems."""
    if not s.model:
        return None  # one of the problems already
    own = {"tokenizer": s.tokenizer, "chat_template": s.chat_template}
    bad = loading.check(s.model, **own, kind=files.base_problems, notes=notes)
    problems += bad
    return None if bad else problems.attempt(lambda: Encoder.load(s.model, **own))
