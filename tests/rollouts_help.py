"""Rollouts of one turn for tests, made of what a test cares about."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trew.types import FinishReason, Group, Prompt, Rollout, single_turn

PROMPT_IDS = np.array([1])


def rollout(
    ids: Sequence[int] | np.ndarray | int,
    *,
    logprobs: np.ndarray | float = 0.0,
    policy_logprobs: np.ndarray | float | None = 0.0,
    entropies: np.ndarray | float | None = 0.0,
    text: str = "",
    finish: FinishReason = "stop",
    version: int = 0,
    prompt_ids: Sequence[int] | np.ndarray = PROMPT_IDS,
) -> Rollout:
    """One answer of these tokens, or of so many tokens 0, 1, …; a number stands for one per token."""
    tokens = np.arange(ids) if isinstance(ids, int) else np.asarray(ids, np.int64)

    def values(value: np.ndarray | float | None) -> np.ndarray | None:
        return None if value is None else np.broadcast_to(np.asarray(value, np.float32), tokens.shape).copy()

    drawn = values(logprobs)
    assert drawn is not None
    return single_turn(
        np.asarray(prompt_ids, np.int64), tokens, logprobs=drawn, policy_logprobs=values(policy_logprobs),
        entropies=values(entropies), version=version, text=text, finish_reason=finish,
    )  # fmt: skip


def answers(prompt: Prompt, *texts: str, tokens: int | None = None) -> Group:
    """A group of one rollout per text, as many tokens long as it has characters, or ``tokens``."""
    return Group(prompt, tuple(rollout(len(t) if tokens is None else tokens, text=t) for t in texts))
