"""Accuracy of a policy on held-out prompts: generate, score, count, with an interval that is honest about prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import ConfigError, DataError, EngineError
from ..types import Group, Prompt, Sampling, Score, ScoredGroup
from ..utils.secrets import redact_names
from .statistics import Interval, cluster_interval, pass_at_k

Progress = Callable[[int], None]
"""Called with the number of completions that were finished since the last call."""

Correct = Callable[[Score], "bool | None"]
"""Whether a score counts as correct; None = nobody could judge it, leave it out."""


class Generates(Protocol):
    """The part of an engine that evaluation needs."""

    def generate(
        self, prompts: Sequence[Prompt], *, n: int, sampling: Sampling, progress: Progress | None = None
    ) -> list[Group]: ...


class Scores(Protocol):
    """The part of a reward set that evaluation needs."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def score(self, groups: list[Group], *, step: int = 0) -> list[ScoredGroup]: ...


@dataclass(frozen=True, slots=True)
class EvalResult:
    """What a policy did on ``n`` prompts with ``samples`` completions each.

    ``accuracy`` is avg@k: the mean over prompts of the share of correct completions, with its 95 % interval over
    prompts. ``pass_at[k]`` is the unbiased estimate of one correct among k. ``rewards`` are means over the
    completions that got the reward. Lengths are in tokens.
    """

    accuracy: Interval
    n: int  # prompts counted
    samples: int  # completions per prompt that were asked for
    left_out: int  # prompts with no completion that anything could judge
    left_out_samples: int  # completions without a verdict, those of left-out prompts included
    pass_at: dict[int, float]
    pass_at_intervals: dict[int, Interval]
    mean_length: float
    truncated_share: float
    rewards: dict[str, float]
    seconds: float
    tokens_per_second: float
    prompt_accuracy: dict[str, float]  # by uid, for paired comparison
    groups: tuple[ScoredGroup, ...]

    def to_json(self) -> dict[str, Any]:
        """Everything but the completions as plain values; what is unknown (nan) is None."""
        return {
            "accuracy": _interval_json(self.accuracy),
            "n": self.n,
            "samples": self.samples,
            "left_out": self.left_out,
            "left_out_samples": self.left_out_samples,
            "pass_at": {str(k): _interval_json(v) for k, v in self.pass_at_intervals.items()},
            "mean_length": _known(self.mean_length),
            "truncated_share": _known(self.truncated_share),
            "rewards": {k: _known(v) for k, v in self.rewards.items()},
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "prompt_accuracy": redact_names(self.prompt_accuracy),
        }


def correct_by(name: str, *, at: float = 1.0) -> Correct:
    """Correct = the reward called ``name`` is at least ``at``; a reward that is None stays None.

    >>> correct_by("gsm8k")(Score(1.5, parts={"gsm8k": 1.0, "format": 0.5}))
    True
    """

    def correct(score: Score) -> bool | None:
        if name not in score.parts:
            raise ConfigError(f"eval.correct_reward: no reward is called {name!r}; accepts {', '.join(score.parts)}")
        value = score.parts[name]
        return None if value is None else value >= at

    return correct


def evaluate(
    engine: Generates,
    prompts: Sequence[Prompt],
    rewards: Scores,
    *,
    samples: int,
    sampling: Sampling,
    correct: Correct,
    progress: Progress | None = None,
) -> EvalResult:
    """Generates ``samples`` completions per prompt, scores them, and counts.

    A completion without a verdict (``correct`` says None) is left out, a prompt without any is left out, and both are
    counted: they are never read as wrong. pass@k is given for k = 1, 2, 4, … and ``samples``, each over the prompts
    that have at least k verdicts.
    """
    if not prompts:
        raise DataError("evaluation: there are no prompts; give a held-out set (data.eval) or raise eval.size")
    if samples < 1:
        raise ConfigError(f"eval.samples: got {samples}, accepts a whole number of at least 1")
    if samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"eval.samples: got {samples} at temperature 0, where all samples are the same; "
            "set samples to 1, or a temperature above 0"
        )
    start = time.perf_counter()
    groups = engine.generate(prompts, n=samples, sampling=sampling, progress=progress)
    seconds = time.perf_counter() - start
    _check(groups, prompts, samples)
    scored = rewards.score(groups)
    verdicts = [[correct(s) for s in group.scores] for group in scored]
    return _count(scored, verdicts, names=rewards.names, samples=samples, seconds=seconds)


def _count(
    scored: list[ScoredGroup],
    verdicts: list[list[bool | None]],
    *,
    names: Sequence[str],
    samples: int,
    seconds: float,
) -> EvalResult:
    judged = [[v for v in row if v is not None] for row in verdicts]
    counted = {g.group.prompt.uid: sum(v) / len(v) for g, v in zip(scored, judged, strict=True) if v}
    pass_at = {}
    for k in _ks(samples):
        chances = [pass_at_k(len(v), sum(v), k) for v in judged if len(v) >= k]
        if chances:
            pass_at[k] = cluster_interval(chances, samples=samples)
    completions = [c for g in scored for c in g.group.rollouts]
    lengths = [len(c) for c in completions]
    return EvalResult(
        accuracy=cluster_interval([sum(v) / len(v) for v in judged if v], samples=samples),
        n=sum(bool(v) for v in judged),
        samples=samples,
        left_out=sum(not v for v in judged),
        left_out_samples=sum(v is None for row in verdicts for v in row),
        pass_at={k: v.mean for k, v in pass_at.items()},
        pass_at_intervals=pass_at,
        mean_length=sum(lengths) / len(lengths),
        truncated_share=sum(c.finish_reason == "length" for c in completions) / len(completions),
        rewards={name: _mean([s.parts.get(name) for g in scored for s in g.scores]) for name in names},
        seconds=seconds,
        tokens_per_second=sum(lengths) / seconds if seconds > 0 else 0.0,
        prompt_accuracy=counted,
        groups=tuple(scored),
    )


def _ks(samples: int) -> list[int]:
    """1, 2, 4, … below ``samples``, and ``samples``."""
    ks = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*ks, samples]


def _check(groups: list[Group], prompts: Sequence[Prompt], samples: int) -> None:
    """An engine that lost, swapped or shortened a group must not become an accuracy."""
    if [g.prompt.uid for g in groups] != [p.uid for p in prompts]:
        raise EngineError(
            f"evaluation: the engine returned {len(groups)} groups that are not the {len(prompts)} asked for"
        )
    for g in groups:
        if len(g.rollouts) != samples:
            raise EngineError(f"evaluation: prompt {g.prompt.uid!r} has {len(g.rollouts)} completions, not {samples}")


def _mean(values: Sequence[float | None]) -> float:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else math.nan


def _known(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _interval_json(interval: Interval) -> dict[str, float | None]:
    return {k: _known(v) for k, v in interval._asdict().items()}
