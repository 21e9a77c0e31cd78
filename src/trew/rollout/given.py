"""Rows of data instead of rollouts: nothing is generated, and every step is trained on the next rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..config import Config
from ..data import PromptOrder
from ..data.tasks.pairs import PAIR
from ..errors import DataError
from ..types import Group, Prompt, Rollout, Score, ScoredGroup
from .chat import Renderer
from .demonstrations import Encoder, length, shortened
from .source import StepRollouts


@dataclass(frozen=True)
class Demonstrations:
    """The rows of a training as tokens; ``train`` in the order of the prompts."""

    train: Sequence[ScoredGroup]
    held: Sequence[ScoredGroup]

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        return max((length(r) for row in (*self.train, *self.held) for r in row.group.rollouts), default=0)


def scored(prompt: Prompt, rollouts: Sequence[Rollout]) -> ScoredGroup:
    """A row as a group whose completions are right, since they are to be learned; of a pair, the first of them."""
    value = float(prompt.columns.get("score", 1.0))
    # A pair is its chosen and its rejected answer, in this order (Encoder.pair).
    values = (1.0, 0.0) if PAIR in prompt.columns else [value] * len(rollouts)
    return ScoredGroup(Group(prompt, tuple(rollouts)), tuple(Score(value) for value in values))


def encode(
    prompts: Sequence[Prompt], renderer: Renderer, config: Config, *, limit: int | None, what: str
) -> tuple[list[ScoredGroup], list[str]]:
    """The rows as tokens, and notes. ``limit``: the model's positions. Raises DataError for rows whose tokens are not
    certain, for rows that are too long where ``sft.overlong`` says error, and where no row of a data set is left."""
    settings = config.sft
    encoder = Encoder(renderer, loss_on=settings.loss_on)
    most = min(n for n in (settings.max_tokens, limit or settings.max_tokens))
    rows, long = [], []
    for prompt in prompts:
        rollouts = encoder.pair(prompt) if PAIR in prompt.columns else encoder.encode(prompt)
        if over := [length(r) for r in rollouts if length(r) > most]:
            long.append(max(over))
            # Never cut are pairs, whose answers could become equal: the configuration refuses truncate for them.
            rollouts = _fitted(rollouts, most, cut=settings.overlong == "truncate")
        if rollouts:
            rows.append(scored(prompt, rollouts))
    notes = []
    if encoder.split:
        notes.append(
            f"{encoder.split} of {len(prompts)} {what} rows are learned one answer at a time: the chat template writes "
            "earlier turns differently in a longer conversation, or without the token that ends them"
        )
    if long:
        notes.append(_too_long(config, long, len(prompts), most, what))
    _refuse_empty(rows, config, most, what)
    return rows, notes


def _refuse_empty(rows: Sequence[ScoredGroup], config: Config, most: int, what: str) -> None:
    """Raises DataError where no row, or none of one of several data sets, is left."""
    left = {row.group.prompt.data_set for row in rows}
    lost = [name for name in config.set_names if name not in left]
    if lost or not rows:
        of = f" of data set {', '.join(lost)}" if lost else ""
        advice = ", or remove the set" if lost else ""
        raise DataError(
            f"data: no {what} rows{of} are left: all are longer than {most} tokens; raise sft.max_tokens{advice}"
        )


def _fitted(rollouts: Sequence[Rollout], most: int, *, cut: bool) -> list[Rollout]:
    """What is left of a row of which something is longer than ``most`` tokens: nothing unless it may be cut."""
    found = [shortened(r, most) if length(r) > most else r for r in rollouts] if cut else []
    return [r for r in found if r is not None]


def _too_long(config: Config, long: Sequence[int], rows: int, most: int, what: str) -> str:
    settings = config.sft
    are = f"{len(long)} of {rows} {what} rows are longer than {most} tokens (the longest has {max(long)})"
    if settings.overlong == "error":
        ways = "'drop'" if config.prefers else "'drop' or 'truncate'"
        raise DataError(f"data: {are}; raise sft.max_tokens up to the model's positions, or set sft.overlong = {ways}")
    if settings.overlong == "drop":
        return f"{are}; they were left out"
    return f"{are}; they were cut, and those whose answers begin beyond were left out"


class GivenRollouts:
    """Gives each step the next rows. ``position`` counts the rows so far and is the only state."""

    def __init__(self, rows: Demonstrations, *, order: PromptOrder, config: Config) -> None:
        self.rows, self.order, self.config = rows, order, config
        self.position = 0
        self.interruptible: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
        self.note: Callable[[str], None] = lambda text: None

    def next(self, step: int) -> StepRollouts:
        size = self.config.sft.batch
        # The same prompts in any resumed run: the order is a pure function of the position.
        found = tuple(self.rows.train[i] for i in self.order.take(self.position, size))
        self.position += size
        return StepRollouts(found, found, facts={"epoch": self.position / len(self.rows.train)})

    def trained(self, step: int, version: int) -> None:
        """Nothing depends on the weights."""

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])
