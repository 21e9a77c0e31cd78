"""Combines the verdicts of several rewards on a completion into one value: weights, gates, missing scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config import FUNCTION_SECONDS, Calls, OnFailure
from ..types import Prompt, Score, ScoreStatus
from .names import judge_rank
from .steps import combined_steps
from .user.functions import UserFunction
from .verdict import Verdict

if TYPE_CHECKING:
    from .model.reward_model import ModelReward

FAILED: tuple[ScoreStatus, ...] = ("bad_gold", "timeout", "sandbox_error", "environment_error")
"""Statuses of a completion that a reward should have judged but could not. Its score is unknown, not neutral, so the
completion gets no value."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One entry of a recipe's ``rewards``: a user's ``function``, a reward ``model``, or a built-in ``kind``."""

    name: str
    kind: str
    weight: float
    args: dict[str, Any] = field(default_factory=dict)
    function: UserFunction | None = None
    model: ModelReward | None = None
    gate: bool = False
    verify_with: str = ""
    calls: Calls = "step"
    timeout_s: float = FUNCTION_SECONDS
    on_failure: OnFailure = "abort"
    sets: tuple[str, ...] = ()  # the data sets whose rows it judges; empty: all

    def serves(self, prompt: Prompt) -> bool:
        """Whether it judges the rows of the prompt's data set."""
        return not self.sets or prompt.data_set in self.sets

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """As :func:`~trew.rewards.names.judge_rank`."""
        return judge_rank(name=self.kind, model=self.model is not None, gate=self.gate, weight=self.weight)

    @property
    def is_builtin(self) -> bool:
        return self.function is None and self.model is None


def combined(
    rewards: Sequence[Reward], verdicts: Sequence[Sequence[Verdict]], *, lengths: Sequence[int]
) -> tuple[Score, ...]:
    """Computes one Score per completion of a group from ``verdicts[reward][completion]``; ``lengths`` are in tokens.

    The value is Σ_gates w·s + [every gate is above 0] · Σ_others w·s. A gate without a number (it does not apply) is
    open. See ``RewardSet`` for the treatment of None.

    >>> gate = Reward("format", "format", 0.0, gate=True); answer = Reward("math", "math", 1.0)
    >>> right, wrong = Verdict(1.0), Verdict(0.0)
    >>> [s.value for s in combined([gate, answer], [[right, right, wrong], [right, wrong, right]], lengths=[1, 1, 1])]
    [1.0, 0.0, 0.0]
    """
    rows = [_Row.of(reward, given) for reward, given in zip(rewards, verdicts, strict=True)]
    columns = ([given[i] for given in verdicts] for i in range(len(lengths)))
    return tuple(_score(rows, column, length=length) for column, length in zip(columns, lengths, strict=True))


@dataclass(frozen=True, slots=True)
class _Row:
    """A reward, and what of its verdicts on a group matters to each completion."""

    reward: Reward
    mean: float | None  # of its numbers
    by_step: bool  # whether it scores steps of some completion

    @staticmethod
    def of(reward: Reward, verdicts: Sequence[Verdict]) -> _Row:
        numbers = [verdict.score for verdict in verdicts if verdict.score is not None]
        # fsum: the same mean to the last bit in whichever order the completions came.
        mean = math.fsum(numbers) / len(numbers) if numbers else None
        return _Row(reward, mean, any(verdict.steps for verdict in verdicts))

    def number(self, verdict: Verdict) -> float | None:
        """The verdict's number. A missing one is replaced by the group's mean, which neither lifts nor lowers the
        completion within its group; a 0 would push it away from the others."""
        return self.mean if verdict.score is None else verdict.score


def _score(rows: Sequence[_Row], column: Sequence[Verdict], *, length: int) -> Score:
    """Scores one completion from its verdicts."""
    pairs = [(row.reward, verdict) for row, verdict in zip(rows, column, strict=True)]
    is_open = all_open([row.reward for row in rows], [verdict.score for verdict in column])
    status, is_known = _status(pairs, is_open=is_open)
    counted = [(row, v) for row, v in zip(rows, column, strict=True) if row.reward.gate or is_open]
    value, steps = None, ()
    if is_known:
        value, steps = _value(counted), _steps(counted, length=length)
        # Behind a closed gate one step with the value, not none: an objective that learns from steps would leave the
        # completion out instead of ranking it behind those that passed the gate.
        by_step = any(row.by_step and row.reward.weight for row in rows)
        if by_step and not is_open and not steps and length:
            steps = ((length, value),)
    return Score(
        value=value,
        status=status,
        parts={r.name: v.score for r, v in pairs},
        extracted=next((v.extracted for v in column if v.extracted is not None), None),
        seconds=sum(v.seconds for v in column),
        steps=steps,
        statuses={r.name: v.status for r, v in pairs},
        part_seconds={r.name: v.seconds for r, v in pairs},
    )


def all_open(rewards: Sequence[Reward], numbers: Sequence[float | None]) -> bool:
    """Whether no gate is closed; one without a number does not apply, and is open."""
    return all(number is None or number > 0 for r, number in zip(rewards, numbers, strict=True) if r.gate)


def _value(counted: Sequence[tuple[_Row, Verdict]]) -> float:
    """The weighted sum of the rewards that count."""
    numbers = [(row.reward.weight, row.number(verdict)) for row, verdict in counted]
    return sum(weight * number for weight, number in numbers if number is not None)


def _steps(counted: Sequence[tuple[_Row, Verdict]], *, length: int) -> tuple[tuple[int, float], ...]:
    """The weighted rewards of the completion's steps; empty if none of the rewards that count scores steps of it."""
    # Missing scores of steps have no stand-in: a mean over the group has no place within this completion.
    given = [(row.reward.weight, v.score if row.by_step else row.number(v), v.steps) for row, v in counted]
    return combined_steps(given, length=length)


def _status(pairs: Sequence[tuple[Reward, Verdict]], *, is_open: bool) -> tuple[ScoreStatus, bool]:
    """Returns a completion's status and whether its value is known."""
    for reward, verdict in pairs:
        if verdict.status in FAILED and _matters(reward, is_open):
            return verdict.status, False
    # A reward of weight 0 is only logged: a completion that nothing else judged has no value.
    for reward, verdict in pairs:
        if verdict.score is not None and (reward.weight != 0 or reward.gate):
            return verdict.status, True
    return "not_applicable", False


def _matters(reward: Reward, is_open: bool) -> bool:
    """Whether a failure of ``reward`` leaves the completion without a value."""
    # Behind a closed gate the other rewards count for nothing, so their failures do not matter. Nor does the failure of
    # a weightless gate while another gate is closed.
    counts = reward.weight != 0
    return (is_open and (counts or reward.gate)) or (counts and reward.gate)


def one_by_one(rewards: Sequence[Reward], score: Score) -> tuple[float | None, ...]:
    """Returns each reward's number for objectives that normalise rewards separately: gates applied, no weights.

    A number is 0 behind a closed gate. It is None if the reward gave none, or if the completion has no value.

    >>> gate = Reward("format", "format", 0.5, gate=True); answer = Reward("math", "math", 1.0)
    >>> one_by_one([gate, answer], Score(0.0, parts={"format": 0.0, "math": 1.0}))
    (0.0, 0.0)
    """
    if score.value is None:
        return (None,) * len(rewards)
    parts = [score.parts.get(r.name) for r in rewards]
    is_open = all_open(rewards, parts)
    return tuple(p if p is None or r.gate or is_open else 0.0 for r, p in zip(rewards, parts, strict=True))
