"""The data of a training step: one frozen type per stage, with the standard library and numpy only.

    Prompt -> Group of Rollouts, each of Turns -> ScoredGroup
           -> TrainingSamples (with objective.TokenBatch) -> StepOutput

Instances are complete when made, and no field changes its meaning. Position t of an array always describes token t of
``token_ids``. Log-probabilities and entropies are in nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Message = Mapping[str, Any]
"""One chat message, ``{"role": ..., "content": ...}``; with tools also ``tool_calls`` or ``name``."""

FinishReason = Literal["stop", "length", "tool_call", "abort"]
"""Why a turn ended. ``stop``: the policy ended it (end token or stop string). ``length``: it was cut off.
``tool_call``: it called a tool. ``abort``: the engine gave up."""

RolloutStatus = Literal["finished", "truncated", "failed"]
"""How an attempt ended: normally, at a limit, or by a failure (``Rollout.error`` says which)."""

ScoreStatus = Literal[
    "scored", "no_answer", "bad_gold", "timeout", "sandbox_error", "environment_error", "not_applicable", "other_set"
]
"""Why a score is what it is; ``None`` scores come with the last six (see ``rewards``)."""

Ending = Literal["", "done", "turns", "tokens", "length", "wrong_end", "failed"]
"""Why an episode ended: the environment ended it (``done``) or ``failed``; replies (``turns``) or ``tokens`` were used
up, a reply was cut off (``length``), or it ended with a token behind which the template has no next turn
(``wrong_end``). Empty outside environments."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. Exactly one of ``text`` (used verbatim) and ``messages`` (rendered by a chat template) is set.

    ``columns`` holds the rest of the data row (gold answers, for example); rewards receive it. ``place`` names the row
    in messages to the user (``train.jsonl line 3``) and is empty for a prompt without a file.
    """

    uid: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    place: str = field(default="", compare=False, repr=False)
    seed: int = 0  # of its environment, together with the uid

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError(f"prompt {self.uid!r}: set exactly one of text and messages")

    @property
    def data_set(self) -> str:
        """The name of its data set where the run has several: what its uid has before the first slash."""
        return self.uid.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How completions are drawn. The sampling distribution is the policy at ``temperature``, then cut by ``top_k``,
    ``min_p`` and ``top_p`` in this order and renormalised. ``temperature = 0`` is greedy decoding.

    ``seed``, prompt uid, sample number and position together determine every draw, independently of the other rows in
    the batch.
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
class Span:
    """Tokens ``start`` to ``end`` (exclusive) were sampled from the weights of policy version ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Turn:
    """The tokens added to the policy's context since its last turn, and the T tokens of its answer.

    ``logprobs`` are under the distribution that each token was actually drawn from (0 for greedy decoding);
    ``policy_logprobs`` and ``entropies`` are the policy's at temperature 1, untruncated, and None if the engine
    does not report them. ``versions`` covers all T tokens in order, without gaps. ``state`` names the situation in
    which an environment let the policy answer: turns of one group with equal states are answers to the same situation.
    None outside environments, as are all fields behind it: ``messages`` is what the context says, ``calls`` are the
    tool calls in the answer, ``reward`` and ``metrics`` are what the environment gave for it.
    """

    context_ids: np.ndarray  # (C,) int64: the prompt, tool output; never carries loss
    token_ids: np.ndarray  # (T,) int64: sampled, the end token included where the policy chose one
    logprobs: np.ndarray  # (T,) float32
    policy_logprobs: np.ndarray | None  # (T,) float32
    entropies: np.ndarray | None  # (T,) float32
    versions: tuple[Span, ...]
    text: str  # what rewards read: special tokens and the stop string removed
    finish_reason: FinishReason
    state: str | None = None
    messages: tuple[Message, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()
    reward: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        for name in ("logprobs", "policy_logprobs", "entropies"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                raise ValueError(f"turn: {len(values)} {name} for {count} tokens")
        # Each span begins where the one before it ends: the first at 0, the last ends at T.
        bounds = [0, *(span.end for span in self.versions)]
        if [span.start for span in self.versions] != bounds[:-1] or bounds[-1] != count:
            raise ValueError(f"turn: versions {self.versions} do not cover its {count} tokens in order")


@dataclass(frozen=True, slots=True)
class Rollout:
    """One attempt at a prompt: at least one turn. A failed attempt is data, not an exception.

    ``prompt_ids`` is the first turn's context; ``token_ids`` is everything after it, including later contexts, and
    ``sampled`` marks which of these N tokens the policy chose. Per-token values are 0 at the others.
    The length of a rollout is the number of sampled tokens.

    >>> def turn(context, answer, version):
    ...     zeros = np.zeros(len(answer), np.float32)
    ...     spans = (Span(version, 0, len(answer)),)
    ...     return Turn(np.array(context), np.array(answer), zeros, None, zeros, spans, "", "stop")
    >>> two = Rollout((turn([1, 2], [3], 0), turn([4], [5, 6], 1)))
    >>> two.prompt_ids.tolist(), two.token_ids.tolist(), two.sampled.tolist(), len(two)
    ([1, 2], [3, 4, 5, 6], [True, False, True, True], 3)
    >>> two.versions
    (Span(version=0, start=0, end=1), Span(version=1, start=2, end=4))
    """

    turns: tuple[Turn, ...]
    status: RolloutStatus = "finished"
    error: str = ""
    ending: Ending = ""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("a rollout needs at least one turn")

    def __len__(self) -> int:
        return sum(len(turn.token_ids) for turn in self.turns)

    @property
    def failure(self) -> tuple[str, str]:
        """How an environment failed (``raised``, ``hung`` or ``died``), and the last line of what it said.

        >>> turn = Turn(np.array([1]), np.array([2]), np.zeros(1), None, None, (Span(0, 0, 1),), "", "stop")
        >>> Rollout((turn,), "failed", "raised: Traceback:\\n  ...\\nKeyError: 'map'\\n").failure
        ('raised', "KeyError: 'map'")
        """
        kind, _, text = self.error.partition(": ")
        return kind, (text.strip().splitlines() or [""])[-1][:300]

    @property
    def prompt_ids(self) -> np.ndarray:
        """(P,) int64."""
        return self.turns[0].context_ids

    @property
    def token_ids(self) -> np.ndarray:
        """(N,) int64: all tokens after the prompt."""
        return self._join([(turn.context_ids, turn.token_ids) for turn in self.turns])

    @property
    def sampled(self) -> np.ndarray:
        """(N,) bool: which of ``token_ids`` the policy chose; only these carry loss."""
        return self._join([(np.zeros(len(t.context_ids), bool), np.ones(len(t.token_ids), bool)) for t in self.turns])

    @property
    def logprobs(self) -> np.ndarray:
        """(N,) float32, under the distribution that was drawn from."""
        return self._join([(_zeros(turn), turn.logprobs) for turn in self.turns])

    @property
    def policy_logprobs(self) -> np.ndarray | None:
        """(N,) float32, at temperature 1 and untruncated; None if a turn lacks them."""
        return self._known([(_zeros(turn), turn.policy_logprobs) for turn in self.turns])

    @property
    def entropies(self) -> np.ndarray | None:
        """(N,) float32; None if a turn lacks them."""
        return self._known([(_zeros(turn), turn.entropies) for turn in self.turns])

    @property
    def versions(self) -> tuple[Span, ...]:
        """Which weights sampled which of ``token_ids``."""
        # Spans count from the start of their turn's answer. ``at`` starts below 0, because token_ids lacks the prompt.
        spans: list[Span] = []
        at = -len(self.prompt_ids)
        for turn in self.turns:
            at += len(turn.context_ids)
            spans += [Span(span.version, at + span.start, at + span.end) for span in turn.versions]
            at += len(turn.token_ids)
        return tuple(spans)

    @property
    def oldest_version(self) -> int | None:
        """The version of the weights that sampled the oldest token; None if nothing was sampled."""
        return min((span.version for turn in self.turns for span in turn.versions), default=None)

    @property
    def text(self) -> str:
        """The last turn's text, which rewards read."""
        return self.turns[-1].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the last turn ended."""
        return self.turns[-1].finish_reason

    @property
    def conversation(self) -> tuple[Message, ...]:
        """What was said in an episode, by the environment and the policy; empty outside environments."""
        if not self.ending:
            return ()
        return tuple(message for turn in self.turns for message in (*turn.messages, _answer(turn)))

    @property
    def turn_ends(self) -> tuple[int, ...]:
        """For each turn, the number of ``token_ids`` up to and including its last one."""
        # The first context is the prompt, which ``token_ids`` lacks.
        lengths = [len(turn.context_ids) + len(turn.token_ids) for turn in self.turns]
        return tuple(np.cumsum([lengths[0] - len(self.prompt_ids), *lengths[1:]]).tolist())

    def _join(self, parts: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
        """Concatenates the (context, answer) arrays of all turns, without the first context."""
        # Most rollouts have one turn: its own array, without a copy.
        if len(parts) == 1:
            return parts[0][1]
        return np.concatenate([array for pair in parts for array in pair][1:])

    def _known(self, parts: list[tuple[np.ndarray, np.ndarray | None]]) -> np.ndarray | None:
        known = [(context, answer) for context, answer in parts if answer is not None]
        return self._join(known) if len(known) == len(parts) else None


def _answer(turn: Turn) -> Message:
    calls = {"tool_calls": list(turn.calls)} if turn.calls else {}
    return {"role": "assistant", "content": turn.text, **calls}


def _zeros(turn: Turn) -> np.ndarray:
    return np.zeros(len(turn.context_ids), np.float32)


def single_turn(
    prompt_ids: np.ndarray,
    token_ids: np.ndarray,
    *,
    logprobs: np.ndarray,
    policy_logprobs: np.ndarray | None,
    entropies: np.ndarray | None,
    version: int,
    text: str,
    finish_reason: FinishReason,
) -> Rollout:
    """A rollout with a single answer, sampled from the weights of ``version`` throughout."""
    # No span without a token: an empty one would give a rollout in which nothing was sampled a version.
    spans = (Span(version, 0, len(token_ids)),) if len(token_ids) else ()
    turn = Turn(prompt_ids, token_ids, logprobs, policy_logprobs, entropies, spans, text, finish_reason)
    return Rollout((turn,), status="truncated" if finish_reason == "length" else "finished")


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and its G rollouts."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The combined result of all rewards for one rollout.

    ``value`` is None when no reward applied or none could judge; statistics leave None out and never read it as 0.
    ``parts`` has each reward's value by name, before weights. ``steps`` are weighted rewards of the rollout's steps as
    (end, value), with ``end`` the number of tokens up to and including the step's last one; empty if no reward
    scores steps. ``statuses`` explains each part's value, ``part_seconds`` is the time it took.
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
    """A group with one score per rollout, in the same order."""

    group: Group
    scores: tuple[Score, ...]

    def __post_init__(self) -> None:
        if len(self.scores) != len(self.group.rollouts):
            raise ValueError(f"{len(self.scores)} scores for {len(self.group.rollouts)} rollouts")


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A rollout as the learner reads it: tokens only, without scores.

    ``token_ids`` are all tokens after the prompt, including later contexts; the mask of the accompanying batch says
    which of them carry loss. Samples of one ``group`` with equal prompts may share the prompt's computation. Where
    ``sampled`` is False, the token is only read by later ones, and the learner computes no log-prob of it.
    """

    prompt_ids: np.ndarray  # (P,) int64, P >= 1
    token_ids: np.ndarray  # (N,) int64, N >= 0
    group: int
    sampled: np.ndarray | None = None  # (N,) bool; None: all

    @property
    def predicted(self) -> np.ndarray:
        """Positions (n,) of the tokens whose log-probs are computed."""
        return np.arange(len(self.token_ids)) if self.sampled is None else np.flatnonzero(self.sampled)

    def first(self, count: int | None) -> TrainingSample:
        """The sample with at most ``count`` tokens after the prompt; None: all."""
        sampled = None if self.sampled is None else self.sampled[:count]
        return TrainingSample(self.prompt_ids, self.token_ids[:count], self.group, sampled)


Metrics = Mapping[str, tuple[float, float]]
"""Name -> (sum, count), added over micro-batches and ranks and divided once at the end: the value is sum / count."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The result of one optimizer step."""

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
