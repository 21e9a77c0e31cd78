"""Tries one reward on data: known answers, repeats, dependence on the batch, time (``trew rewards test``)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..types import Completion, Group, Prompt, ScoredGroup
from .builtin import first_column
from .combine import RewardSet
from .probes import Probe, probes
from .returned import short

REPEATS = 3
ALONE = 20  # prompts that are scored by themselves as well, to see whether the others matter


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at: whether it holds, in numbers, and examples where it does not."""

    what: str
    holds: bool
    numbers: str
    examples: tuple[str, ...] = ()


def try_reward(rewards: RewardSet, prompts: Sequence[Prompt], *, limit: int = 200) -> list[Check]:
    """All checks of a set of one reward; golds are checked in all ``prompts``, answers made for the first ``limit``.

    A built-in must give known answers their known score. Of a user's function nobody but its author knows the right
    values; they must differ between answers, repeat, and not depend on which prompts share the batch.
    """
    bad = rewards.check_golds(prompts)
    golds = Check(
        "golds are readable and score 1", not bad, _count(bad, "problem", of=f"{len(prompts)} rows"), tuple(bad)
    )
    if bad:
        return [golds]
    trial = _try_function if rewards.rewards[0].function else _try_builtin
    return [golds, *trial(rewards, prompts[:limit])]


def text_group(prompt: Prompt, texts: Sequence[str], *, lengths: Sequence[int] | None = None) -> Group:
    """A group of completions that no model sampled: they have text and, where given, a length in tokens; no more."""
    made = []
    for text, n in zip(texts, lengths or [0] * len(texts), strict=True):
        none = np.zeros(n, np.float32)
        made.append(Completion(np.zeros(n, np.int64), np.zeros(n, bool), none, none, none, text, "stop", 0))
    return Group(prompt, np.zeros(0, np.int64), tuple(made))


def _try_builtin(rewards: RewardSet, prompts: Sequence[Prompt]) -> list[Check]:
    [spec] = rewards.rewards
    made: list[tuple[Prompt, Probe]] = [(p, x) for p in prompts for x in probes(spec.kind, p.columns, spec.args)]
    groups = [text_group(prompt, [probe.text], lengths=[probe.tokens]) for prompt, probe in made]
    got, seconds = _repeat(rewards, groups)
    wrong = [
        f"{prompt.uid}: {probe.what} ({short(probe.text)}) must score {probe.score:g}, got {values[0]}"
        for (prompt, probe), values in zip(made, got, strict=True)
        if any(value != probe.score for value in values)
    ]
    right = sum(probe.score == 1 for _, probe in made)
    numbers = f"{right} right and {len(made) - right} other answers"
    return [
        Check("known answers get their known score", bool(made) and not wrong, numbers, tuple(wrong)),
        _same(got, [f"{prompt.uid}: {probe.what}" for prompt, probe in made]),
        _time(seconds),
    ]


def _try_function(rewards: RewardSet, prompts: Sequence[Prompt]) -> list[Check]:
    groups = [text_group(prompt, _answers(prompt)) for prompt in prompts]
    got, seconds = _repeat(rewards, groups)
    labels = [f"{g.prompt.uid}: {short(c.text)}" for g in groups for c in g.completions]
    differs, at = [], 0
    for group in groups[:ALONE]:
        alone = values_of(rewards.score([group]))
        together = [values[0] for values in got[at : at + len(alone)]]
        at += len(alone)
        if alone != together:
            differs.append(f"{group.prompt.uid}: {alone} alone, {together} with the other prompts")
    seen = sorted({values[0] for values in got if values[0] is not None})
    spread = f"{len(seen)} different, from {seen[0]:g} to {seen[-1]:g}" if seen else "no numbers"
    tried = f"{min(len(groups), ALONE)} prompts"
    return [
        Check("values differ between answers", len(seen) > 1, spread),
        _same(got, labels),
        Check(
            "values do not depend on the batch", not differs, _count(differs, "difference", of=tried), tuple(differs)
        ),
        _time(seconds),
    ]


def _answers(prompt: Prompt) -> list[str]:
    """What a function of unknown taste is tried with: nothing, words, a layout, and the gold in usual wrappings."""
    gold = first_column(prompt.columns)
    about = [] if gold is None else [f"{gold}", f"#### {gold}", f"\\boxed{{{gold}}}", f"<answer>{gold}</answer>"]
    return ["", "I do not know.", "<think>so</think>\n<answer>1</answer>", *about]


def _repeat(rewards: RewardSet, groups: Sequence[Group]) -> tuple[list[list[float | None]], list[float]]:
    """Per completion its values in every repeat; and the seconds of every completion in every repeat."""
    runs = [rewards.score(groups) for _ in range(REPEATS)]
    seconds = [score.seconds for run in runs for group in run for score in group.scores]
    return [list(values) for values in zip(*map(values_of, runs), strict=True)], seconds


def values_of(scored: Sequence[ScoredGroup]) -> list[float | None]:
    """Every completion's value, flat."""
    return [score.value for group in scored for score in group.scores]


def _same(got: Sequence[Sequence[float | None]], labels: Sequence[str]) -> Check:
    differ = [f"{label}: {list(values)}" for values, label in zip(got, labels, strict=True) if len(set(values)) > 1]
    numbers = _count(differ, "difference", of=f"{len(got)} answers")
    return Check(f"{REPEATS} repeats give the same", not differ, numbers, tuple(differ))


def _time(seconds: Sequence[float]) -> Check:
    if len(seconds) < 2:
        return Check("time per completion", True, "too few to say")
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return Check("time per completion", True, f"p50 {cuts[49] * 1e3:.3f} ms, p99 {cuts[98] * 1e3:.3f} ms")


def _count(found: Sequence[str], noun: str, *, of: str) -> str:
    return f"{len(found) or 'no'} {noun}{'' if len(found) == 1 else 's'} in {of}"
