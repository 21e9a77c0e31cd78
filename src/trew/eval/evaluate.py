"""Measures accuracy on held-out prompts: generates, scores, and counts, with confidence intervals over prompts."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ConfigError, DataError, EngineError
from ..types import Group, Prompt, Rollout, Sampling, Score, ScoredGroup
from ..utils.secrets import redact_names
from .statistics import Interval, cluster_interval, pass_at_k

Progress = Callable[[int], None]
"""Called with the number of completions finished since the last call."""

Correct = Callable[[Score], "bool | None"]
"""Whether a score counts as correct; None = no reward could judge it, so it is left out."""

_REASONS = 3  # that a message names


class Generate(Protocol):
    """``trew.rollout.generate.generate`` with an engine: ``n`` completions for each prompt, in their order."""

    def __call__(
        self, prompts: Sequence[Prompt], *, n: int, sampling: Sampling, progress: Progress | None = None
    ) -> list[Group]: ...


class Scores(Protocol):
    """The part of a reward set that evaluation needs."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def score(self, groups: list[Group], *, step: int = 0) -> list[ScoredGroup]: ...


@dataclass(frozen=True, slots=True)
class SetResult:
    """The accuracy on one of several data sets: over its ``n`` prompts."""

    accuracy: Interval
    n: int

    def to_json(self) -> dict[str, Any]:
        return {"accuracy": _interval_json(self.accuracy), "n": self.n}


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The result of an evaluation: ``n`` prompts with ``samples`` completions each.

    ``accuracy`` is avg@k: the mean over prompts of the share of correct completions, with its 95 % confidence interval
    over prompts. ``pass_at[k]`` is the unbiased estimate that at least one of k completions is correct, over the
    ``pass_at_n[k]`` prompts with at least k verdicts. ``rewards`` holds each reward's mean over the completions it
    scored. Lengths are in tokens.
    """

    accuracy: Interval
    n: int  # prompts counted
    samples: int  # completions requested per prompt
    left_out: int  # prompts without a single judged completion
    left_out_samples: int  # completions without a verdict, including those of left-out prompts
    pass_at: dict[int, float]
    pass_at_intervals: dict[int, Interval]
    mean_length: float
    truncated_share: float
    rewards: dict[str, float]
    seconds: float
    tokens_per_second: float
    prompt_accuracy: dict[str, float]  # by uid, for paired comparison
    groups: tuple[ScoredGroup, ...]
    sets: dict[str, SetResult] = field(default_factory=dict)  # of each of several data sets
    why_left_out: dict[str, int] = field(default_factory=dict)  # completions without a verdict, by reason
    pass_at_n: dict[int, int] = field(default_factory=dict)  # fewer than n where some completions have no verdict

    @property
    def omission(self) -> str:
        """One line about the completions without a verdict, with the most frequent reasons; empty if there are none."""
        if not self.left_out_samples:
            return ""
        some = sorted(self.why_left_out.items(), key=lambda pair: -pair[1])
        named = "; ".join(f"{count} x {reason}" for reason, count in some[:_REASONS])
        more = f"; and {len(some) - _REASONS} other reasons" if len(some) > _REASONS else ""
        completions, prompts = _counted(self.left_out_samples, "completion"), _counted(self.left_out, "prompt")
        of = f", and {prompts} without any" if self.left_out else ""
        return f"left out {completions} without a verdict{of}: {named}{more}"

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the completions as plain values; nan becomes None."""
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
            # Not among the keys of a run with one data set.
            **({"sets": {name: found.to_json() for name, found in self.sets.items()}} if self.sets else {}),
        }


def correct_by(*names: str, at: float = 1.0) -> Correct:
    """Counts a completion as correct where the first of ``names`` that is a reward of its data set is at least ``at``;
    None stays None.

    >>> correct_by("gsm8k")(Score(1.5, parts={"gsm8k": 1.0, "format": 0.5}))
    True
    >>> other = Score(0.0, parts={"gsm8k": None, "math": 0.0}, statuses={"gsm8k": "other_set", "math": "scored"})
    >>> correct_by("gsm8k", "math")(other)
    False
    """

    def correct(score: Score) -> bool | None:
        # The first reward that belongs to the completion's data set; rewards of other sets have the status other_set.
        name = next((name for name in names if score.statuses.get(name) != "other_set"), names[0])
        if name not in score.parts:
            raise ConfigError(f"eval.correct_reward: got {name!r}, accepts {', '.join(score.parts)}")
        value = score.parts[name]
        return None if value is None else value >= at

    return correct


def evaluate(
    generate: Generate,
    prompts: Sequence[Prompt],
    rewards: Scores,
    *,
    samples: int,
    sampling: Sampling,
    correct: Correct,
    progress: Progress | None = None,
    sets: Sequence[str] = (),
) -> EvalResult:
    """Generates ``samples`` completions per prompt, scores them, and counts the correct ones.

    Leaves out completions without a verdict (``correct`` returns None) and prompts without any verdict, and reports
    how many: they never count as wrong. ``sets``: the names of several data sets, each of which gets an accuracy of its
    own. Computes pass@k for k = 1, 2, 4, … and ``samples``, each over the prompts with
    at least k verdicts.

    Raises ConfigError for settings that cannot be evaluated, DataError without prompts, and EngineError if the
    engine returns other groups than requested.
    """
    if not prompts:
        raise DataError("evaluation: got no prompts; give a held-out set (data.eval) or raise eval.size")
    if samples < 1:
        raise ConfigError(f"eval.samples: got {samples}, accepts a whole number of at least 1")
    if samples > 1 and sampling.temperature == 0:
        raise ConfigError(
            f"eval.samples: got {samples} at temperature 0, where all samples of a prompt are identical; "
            "set samples to 1, or a temperature above 0"
        )
    start = time.perf_counter()
    groups = generate(prompts, n=samples, sampling=sampling, progress=progress)
    seconds = time.perf_counter() - start
    # Before the rewards run: groups of other prompts would be scored without an error.
    _check(groups, prompts, samples)
    scored = rewards.score(groups)
    verdicts = [[correct(s) for s in group.scores] for group in scored]
    return _count(scored, verdicts, names=rewards.names, samples=samples, seconds=seconds, sets=sets)


def _count(
    scored: list[ScoredGroup],
    verdicts: list[list[bool | None]],
    *,
    names: Sequence[str],
    samples: int,
    seconds: float,
    sets: Sequence[str] = (),
) -> EvalResult:
    # None: no reward could judge the completion. Counting it as wrong would blame the model for the grader.
    judged = [[v for v in row if v is not None] for row in verdicts]
    # Pairs, not a dict: two prompts of equal text have one uid and still count as two.
    counted = [(g.group.prompt, row) for g, row in zip(scored, judged, strict=True) if row]
    pass_at = _pass_at(judged, samples)
    completions = [c for g in scored for c in g.group.rollouts]
    # By the last reply: an episode that is out of turns was not cut off at the limit.
    tokens, truncated = sum(map(len, completions)), sum(c.finish_reason == "length" for c in completions)
    return EvalResult(
        accuracy=_accuracy([row for _, row in counted]),
        n=len(counted),
        samples=samples,
        left_out=len(judged) - len(counted),
        left_out_samples=sum(row.count(None) for row in verdicts),
        pass_at={k: v.mean for k, v in pass_at.items()},
        pass_at_intervals=pass_at,
        mean_length=tokens / len(completions),
        truncated_share=truncated / len(completions),
        rewards={name: _mean_reward(scored, name) for name in names},
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        prompt_accuracy={prompt.uid: _share(row) for prompt, row in counted},
        groups=tuple(scored),
        sets={name: _of_set(name, counted) for name in sets},
        why_left_out=_why_left_out(scored, verdicts),
        pass_at_n={k: sum(len(row) >= k for row in judged) for k in pass_at},
    )


def _why_left_out(scored: Sequence[ScoredGroup], verdicts: Sequence[Sequence[bool | None]]) -> dict[str, int]:
    """Counts the completions without a verdict by what kept it from being judged."""
    reasons: Counter[str] = Counter()
    for group, row in zip(scored, verdicts, strict=True):
        for rollout, score, verdict in zip(group.group.rollouts, group.scores, row, strict=True):
            if verdict is None:
                reasons[_why_unjudged(rollout, score)] += 1
    return dict(reasons)


def _why_unjudged(rollout: Rollout, score: Score) -> str:
    if rollout.status == "failed":
        kind, last = rollout.failure
        return f"the environment {kind} ({last})" if last else f"the environment {kind}"
    missing = {name: status for name, status in score.statuses.items() if score.parts.get(name) is None}
    own = [f"{name}: {status}" for name, status in missing.items() if status != "other_set"]
    return f"reward {', '.join(own)}" if own else score.status


def _share(verdicts: Sequence[bool]) -> float:
    return sum(verdicts) / len(verdicts)


def _accuracy(judged: Sequence[Sequence[bool]]) -> Interval:
    """The mean share of correct completions of prompts that each have a verdict."""
    return _over_prompts([_share(row) for row in judged], judged)


def _over_prompts(values: Sequence[float], judged: Sequence[Sequence[bool]]) -> Interval:
    """The mean of one value for each prompt, which came from its verdicts in ``judged``."""
    # Verdicts, not the completions that were asked for: what nothing has judged makes no estimate more certain.
    return cluster_interval(values, samples=sum(map(len, judged)) / len(judged) if judged else 1)


def _of_set(name: str, counted: Sequence[tuple[Prompt, list[bool]]]) -> SetResult:
    own = [row for prompt, row in counted if prompt.data_set == name]
    return SetResult(_accuracy(own), len(own))


def _pass_at(judged: list[list[bool]], samples: int) -> dict[int, Interval]:
    """pass@k over the prompts with at least k verdicts; no entry if there is no such prompt."""
    found = {}
    for k in _ks(samples):
        if enough := [row for row in judged if len(row) >= k]:
            found[k] = _over_prompts([pass_at_k(len(row), sum(row), k) for row in enough], enough)
    return found


def _ks(samples: int) -> list[int]:
    """The powers of two below ``samples``, and ``samples``."""
    ks = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*ks, samples]


def _check(groups: list[Group], prompts: Sequence[Prompt], samples: int) -> None:
    """Raises EngineError if the engine lost, swapped or shortened a group: an accuracy would hide it."""
    if [g.prompt.uid for g in groups] != [p.uid for p in prompts]:
        raise EngineError(
            f"evaluation: the engine returned {len(groups)} groups, which are not those of the {len(prompts)} prompts"
        )
    for g in groups:
        if len(g.rollouts) != samples:
            raise EngineError(f"evaluation: prompt {g.prompt.uid!r} has {len(g.rollouts)} completions, not {samples}")


def _mean_reward(scored: list[ScoredGroup], name: str) -> float:
    """The mean of one reward over the completions it scored; nan if it scored none."""
    parts = (score.parts.get(name) for group in scored for score in group.scores)
    known = [v for v in parts if v is not None]
    return sum(known) / len(known) if known else math.nan


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _known(x: float) -> float | None:
    return x if math.isfinite(x) else None


def _interval_json(interval: Interval) -> dict[str, float | None]:
    return {k: _known(v) for k, v in interval._asdict().items()}
