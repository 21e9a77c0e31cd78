"""What flows through a training step: one frozen type per stage, standard library and numpy only.

    Prompt -> Group of Completions -> ScoredGroup -> (objective.TokenBatch) -> StepOutput

Nothing is filled in later and no field changes its meaning. Everywhere, position t of an array describes token t of
``token_ids``. Log-probabilities and entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = Mapping[str, str]
"""One chat turn, ``{"role": ..., "content": ...}``."""

FinishReason = Literal["stop", "length"]
"""``stop``: the policy ended the completion itself (end token or stop string). ``length``: it was cut off."""

ScoreStatus = Literal["scored", "no_answer", "bad_gold", "timeout", "sandbox_error", "not_applicable"]
"""Why a score is what it is; ``None`` scores come with the last four (see ``rewards``)."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. Exactly one of ``text`` (used as it stands) and ``messages`` (goes through a chat template) is set.

    ``columns`` holds everything else of the data row (gold answers and the like); rewards receive it.
    """

    uid: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.uid!r}: set exactly one of text and messages")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. The sampling distribution is the policy at ``temperature``, then cut by ``top_k``,
    ``min_p`` and ``top_p`` in this order and renormalised. ``temperature = 0`` is greedy decoding.

    ``seed`` together with prompt uid, sample number and position determines every draw: it does not matter which
    other rows share the batch.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    @property
    def truncates(self) -> bool:
        """Whether tokens are cut from the policy's distribution, so that it is not the policy at ``temperature``."""
        return self.temperature == 0 or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer to a prompt, T tokens long (the end token included where the policy chose one).

    ``sampled[t]`` is False for tokens that the policy did not choose (tool or environment output); only sampled
    tokens carry loss. ``logprobs`` are log pi(token) at temperature 1, untruncated; ``sampling_logprobs`` are under
    the distribution that the token was really drawn from (0 for greedy decoding); ``entropies`` are of the policy at
    temperature 1.
    """

    token_ids: np.ndarray  # (T,) int64
    sampled: np.ndarray  # (T,) bool
    logprobs: np.ndarray  # (T,) float32
    sampling_logprobs: np.ndarray  # (T,) float32
    entropies: np.ndarray  # (T,) float32
    text: str  # what rewards read: special tokens and the stop string removed
    finish_reason: FinishReason
    policy_version: int

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt, its tokens, and its G completions."""

    prompt: Prompt
    prompt_ids: np.ndarray  # (P,) int64
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """What the rewards together said about one completion.

    ``value`` is None when no reward applied or none could judge; None is left out of statistics, never read as 0.
    ``parts`` has each reward's own value by name, before weights. ``steps`` are rewards of the completion's steps, with
    their weights, as (end, value): ``end`` counts the tokens up to and with the step's last one. Empty where no reward
    scores steps. ``statuses`` says why each part is what it is, ``part_seconds`` what it took.
    """

    value: float | None
    status: ScoreStatus = "scored"
    parts: Mapping[str, float | None] = field(default_factory=dict)
    extracted: str | None = None
    seconds: float = 0.0
    steps: tuple[tuple[int, float], ...] = ()
    statuses: Mapping[str, ScoreStatus] = field(default_factory=dict)
    part_seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with one score per completion, in the same order."""

    group: Group
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.group.completions):
            raise ValueError(f"{len(self.scores)} scores for {len(self.group.completions)} completions")


Metrics = Mapping[str, tuple[float, float]]
"""Name -> (sum, count): reduced exactly once, over micro-batches and ranks alike. The value is sum / count."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one optimizer step did."""

    loss: float
    metrics: Metrics
    grad_norm: float  # before clipping
    policy_version: int  # of the weights after the step


def reduce_metrics(parts: list[Metrics]) -> dict[str, tuple[float, float]]:
    """Adds (sum, count) pairs by name.

    >>> reduce_metrics([{"a": (1.0, 2.0)}, {"a": (3.0, 2.0)}])
    {'a': (4.0, 4.0)}
    """
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            old = total.get(name, (0.0, 0.0))
            total[name] = (old[0] + value, old[1] + count)
    return total
