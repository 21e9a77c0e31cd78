"""The teacher of on-policy distillation: whether it fits the run, before anything is loaded; and the teacher itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..config import Config
from ..errors import ConfigError, TrewError
from ..models import loading
from ..objective import Objective

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN = 3
"""Tokens that a message about two vocabularies names."""


def problems(config: Config, objective: Objective | None) -> list[str]:
    """Why the teacher's files, or a missing teacher, do not fit the run."""
    found = _damaged(config) if config.teacher.model else []
    if objective is None:
        return found
    reads, name = objective.distillation, config.objective.preset
    if reads and not config.taught:
        found.append(
            f"teacher.model: is empty, but {name} with objective.distill = {reads:g} learns from a teacher; give a "
            "folder or hub id of a model with the policy's tokens"
        )
    if config.taught and not reads:
        found.append(
            f"teacher.model: got {config.teacher.model!r}, but {name} does not learn from a teacher; set "
            "objective.distill above 0, or choose opd as objective.preset"
        )
    return found


def _damaged(config: Config) -> list[str]:
    return [f"teacher.{problem.removeprefix('teacher.')}" for problem in loading.check(config.teacher.model)]


def vocabulary_problems(config: Config, tokenizer: PreTrainedTokenizerBase | None) -> list[str]:
    """Why the teacher would read other texts than the policy writes: its tokenizer gives some ids another meaning."""
    if tokenizer is None or not config.teacher.model or not loading.is_here(config.teacher.model):
        return []
    try:
        other = loading.load_tokenizer(config.teacher.model)
    except TrewError as error:
        return [f"teacher.model: {error}"]
    own, its = tokenizer.get_vocab(), other.get_vocab()
    return [f"teacher.model: {problem}"] if (problem := mismatch(own, its, config.teacher.model)) else []


def mismatch(own: Mapping[str, int], its: Mapping[str, int], name: str) -> str:
    """Says which tokens of the policy the teacher ``name`` knows by another id, or not at all; empty if none. Tokens
    that only the teacher has do no harm: the policy does not sample them.

    >>> mismatch({"a": 0, "b": 1}, {"a": 0, "b": 1, "<pad>": 2}, "t")
    ''
    >>> mismatch({"a": 0, "b": 1}, {"a": 1, "b": 0}, "t").partition(";")[0]
    "t has another vocabulary than the policy: 2 of 2 tokens differ ('a' is 0 for the policy, 1 for the teacher, ...)"
    """
    differ = [token for token, number in own.items() if its.get(token) != number]
    if not differ:
        return ""
    first = min(differ, key=lambda token: own[token])
    there = its.get(first, "none")
    return (
        f"{name} has another vocabulary than the policy: {len(differ)} of {len(own)} tokens differ ({first!r} is "
        f"{own[first]} for the policy, {there} for the teacher{', ...' if len(differ) > 1 else ''}); a teacher reads "
        "the ids that the policy samples: give one whose tokenizer is the policy's"
    )


def refuse_short(config: Config, most: int) -> None:
    """Raises ConfigError if prompts with completions, of up to ``most`` tokens, exceed the teacher's positions."""
    limit = loading.positions(config.teacher.model) if config.teacher.model else None
    if limit is not None and most > limit:
        raise ConfigError(
            f"teacher.model: {config.teacher.model} has {limit} positions, and prompts with their completions take up "
            f"to {most}; lower rollout.max_tokens, data.max_prompt_tokens or environment.episode_tokens"
        )
