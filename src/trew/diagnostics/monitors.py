"""Monitors rewards during training for signs of hacking, or of a broken reward.

Each monitor is a pure function from the scored groups of a step to sums and counts. Over the last ``WINDOW`` steps its
figure is compared with a limit; a warning gives the figure and what to do. Monitors never change the training.
"""

from __future__ import annotations

import math
import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from ..rewards.builtin import code_block
from ..rewards.combine import Reward
from ..rewards.thinking import after_thinking
from ..types import Metrics, ScoredGroup, reduce_metrics

WINDOW = 20  # steps that a figure is taken over, and that "at first" means
LEAST = 128  # completions (or groups, for orders: a quarter of it) before the first warning
QUIET = 50  # steps until the same warning is repeated
LONG = 32  # tokens from which two equal completions are no coincidence
LARGEST = 1e100  # rewards count as at most this: their squares, and sums of those over a run, are finite numbers

ORDER_Z = 5.0  # standard errors
ORDER_SHARE = 0.1  # of the rewards' standard deviation within a group
# Several answers: warns at the share SEVERAL, or at SEVERAL_RISEN after a rise by SEVERAL_RISE.
SEVERAL, SEVERAL_RISE = 0.5, 0.15
SEVERAL_RISEN = 0.2
IDENTICAL = 0.5
EXITS = 0.1
DISAGREE = 0.1
# A gap of the groups' mean length, and lengths that many times, or one part in so many, as at first.
LENGTH_GAP, LENGTH_RATIO = 0.3, 1.5

# What states an answer, and in programs what ends them.
_MARKS = ("\\boxed{", "####", "<answer>")
_EXIT = re.compile(r"\b(?:sys\.exit|os\._exit|os\.abort|os\.kill|exit|quit)[ \t]*\(|\braise[ \t]+SystemExit\b")

ADVICE = {
    "order": (
        "completions of a prompt are drawn alike, so that their order cannot matter: the reward depends on the order "
        "it is called in. Look for state that it keeps between completions, a cache, a rate limit or a time limit"
    ),
    "rows": (
        "prompts are shuffled, so that their order within a step cannot matter: the reward depends on the order it is "
        "called in. Look for a rate limit, a time limit for the whole call, or a cache that fills up"
    ),
    "several_answers": (
        "a policy that gets credit for one of several answers learns to list them. Look at such completions in "
        "rollouts/; make the reward read one answer (built-in kinds read the last)"
    ),
    "identical": (
        "a group of equal completions has nothing to compare. Raise rollout.temperature, or stop earlier: the policy "
        "may have collapsed onto one text that the reward likes"
    ),
    "exits": (
        "a program that ends before its tests can pass a grader that looks at the exit status alone. Look at such "
        "completions in rollouts/; code_stdin and code_func compare what was computed"
    ),
    "length_gap": (
        "rewarded completions differ in length from the others, and completions drift that way: the reward may be "
        "paying for length. Look at the longest and shortest in rollouts/; cosine or soft_overlong hold lengths"
    ),
}


# --------------------------------------------------------------------------------------------------------------------
# Figures of one step


def bounded(value: float | None) -> float | None:
    """A reward limited to ±``LARGEST`` for sums; None if it is NaN or missing.

    A reward may be any number of Python: 1e300, whose square is none, an infinity, or an integer of 400 digits.

    >>> bounded(0.5), bounded(10**400), bounded(float("-inf")), bounded(float("nan"))
    (0.5, 1e+100, -1e+100, None)
    """
    if value is None or value != value:
        return None
    return float(max(-LARGEST, min(value, LARGEST)))


def _values(scored: ScoredGroup) -> list[float]:
    return [value for score in scored.scores if (value := bounded(score.value)) is not None]


def order(scored: Sequence[ScoredGroup]) -> Metrics:
    """How much better the first half of each group's completions scored than the second: ``order`` in reward, with its
    variance if the order did not matter (that of a random split, S²(1/n₁ + 1/n₂)) and the groups' deviations S.

    >>> from ..rewards.reward_checks import scored_texts
    >>> figures = order([scored_texts("abcd", [1.0, 1.0, 0.0, 0.0])])
    >>> figures["order"], round(figures["order_variance"][0], 4)
    ((1.0, 1.0), 0.3333)
    """
    return _halves("order", [_values(g) for g in scored])


def rows(scored: Sequence[ScoredGroup]) -> Metrics:
    """The same as :func:`order`, for the groups' mean rewards in the order of the step."""
    known = [_values(g) for g in scored]
    return _halves("rows", [[sum(v) / len(v) for v in known if v]])


def _halves(name: str, lists: Sequence[Sequence[float]]) -> Metrics:
    difference = variance = deviation = 0.0
    count = 0
    for values in lists:
        # Fewer than two values have no halves. Of an odd number the second half is the larger.
        n, half = len(values), len(values) // 2
        if not half:
            continue
        mean = sum(values) / n
        # S² of the group, and S² (1/n₁ + 1/n₂), the variance of the difference if the split is random.
        square = sum((v - mean) ** 2 for v in values) / (n - 1)
        difference += sum(values[:half]) / half - sum(values[half:]) / (n - half)
        variance += square * (1 / half + 1 / (n - half))
        deviation += math.sqrt(square)
        count += 1
    return {
        name: (difference, float(count)),
        f"{name}_variance": (variance, float(count)),
        f"{name}_deviation": (deviation, float(count)),
    }


def several_answers(scored: Sequence[ScoredGroup]) -> Metrics:
    """The share of completions with more than one answer behind their thought: boxes, ``####`` or ``<answer>`` tags."""
    texts = [c.text for g in scored for c in g.group.rollouts]
    return {"several_answers": (float(sum(answers_in(text) > 1 for text in texts)), float(len(texts)))}


def answers_in(text: str) -> int:
    """
    >>> answers_in("so \\\\boxed{7} or \\\\boxed{8}"), answers_in("#### 7"), answers_in("<think>#### 1</think>#### 2")
    (2, 1, 1)
    """
    answer = after_thinking(text) or ""
    return max(answer.count(mark) for mark in _MARKS)


def identical(scored: Sequence[ScoredGroup]) -> Metrics:
    """The share of completions of at least ``LONG`` tokens whose text occurs twice in their group; of episodes, the
    texts of all replies."""
    again = count = 0
    for g in scored:
        # All of them: episodes that took different ways may well end with the same words.
        texts = Counter(tuple(turn.text for turn in c.turns) for c in g.group.rollouts if len(c) >= LONG)
        count += texts.total()
        again += sum(n for n in texts.values() if n > 1)
    return {"identical": (float(again), float(count))}


def exits(scored: Sequence[ScoredGroup]) -> Metrics:
    """The share of programs (last ```` ```python ```` block, as the graders find it) that end themselves, as by
    ``os._exit``."""
    answers = [after_thinking(c.text) for g in scored for c in g.group.rollouts]
    programs = [
        program for text in answers if text and "```" in text and (program := code_block.extract(text)) is not None
    ]
    return {"exits": (float(sum(bool(_EXIT.search(p)) for p in programs)), float(len(programs)))}


def disagreement(scored: Sequence[ScoredGroup], rewards: Sequence[Reward]) -> Metrics:
    """Per reward with ``verify_with``: the share of completions that one of the two calls right (0.5 or more) and the
    other wrong, and (``…/credit``) those that the reward calls right and its verifier wrong."""
    figures: dict[str, tuple[float, float]] = {}
    for reward in rewards:
        if not reward.verify_with:
            continue
        pairs = [
            (a >= 0.5, b >= 0.5)
            for g in scored
            for s in g.scores
            if (a := s.parts.get(reward.name)) is not None and (b := s.parts.get(reward.verify_with)) is not None
        ]
        figures[f"disagree/{reward.name}"] = (float(sum(a != b for a, b in pairs)), float(len(pairs)))
        figures[f"disagree/{reward.name}/credit"] = (float(sum(a and not b for a, b in pairs)), float(len(pairs)))
    return figures


def lengths(scored: Sequence[ScoredGroup]) -> Metrics:
    """Mean length in tokens, and ``length_gap``: how much longer completions above their group's mean reward are than
    those below it, as a share of the group's mean length."""
    gap, groups, tokens, count = 0.0, 0, 0, 0
    for g in scored:
        pairs = [
            (value, len(completion))
            for score, completion in zip(g.scores, g.group.rollouts, strict=True)
            if (value := bounded(score.value)) is not None
        ]
        tokens, count = tokens + sum(n for _, n in pairs), count + len(pairs)
        found = _gap_in(pairs)
        if found is not None:
            gap += found
            groups += 1
    return {"length": (float(tokens), float(count)), "length_gap": (gap, float(groups))}


def _gap_in(pairs: Sequence[tuple[float, int]]) -> float | None:
    """A group's gap from its (reward, length) pairs; None if the rewards are all equal, or no completion has tokens."""
    mean = sum(v for v, _ in pairs) / max(len(pairs), 1)
    above, below = [n for v, n in pairs if v > mean], [n for v, n in pairs if v < mean]
    # Lengths relative to the group's mean: groups of short and of long completions count alike.
    size = sum(n for _, n in pairs) / max(len(pairs), 1)
    if not above or not below or not size:
        return None
    return (sum(above) / len(above) - sum(below) / len(below)) / size


# --------------------------------------------------------------------------------------------------------------------
# Over the steps of a run


class Monitors:
    """All monitors over the steps of a run. ``shuffled``: whether prompts come in a random order.

    Metrics do not depend on the windows, but warnings do, so that the windows are part of :meth:`state`.
    """

    def __init__(self, rewards: Sequence[Reward] = (), *, shuffled: bool = True) -> None:
        self._rewards, self._shuffled = tuple(rewards), shuffled
        self._last: deque[Metrics] = deque(maxlen=WINDOW)
        self._first: list[Metrics] = []
        self._told: dict[str, int] = {}

    def observe(self, scored: Sequence[ScoredGroup], *, step: int) -> tuple[dict[str, float], list[str]]:
        """Returns a step's figures for its metrics row, and the warnings that are due."""
        figures = self.figures(scored)
        self._last.append(figures)
        if len(self._first) < WINDOW:
            self._first.append(figures)
        # Variances and deviations are inputs of the tests alone, and the length is in the row already.
        shown = {
            f"monitor/{name}": total / count
            for name, (total, count) in figures.items()
            if count and name != "length" and not name.endswith(("_variance", "_deviation"))
        }
        warnings = []
        for name, text in self.suspicions().items():
            # -QUIET: what was never told is due at once.
            if step - self._told.get(name, -QUIET) >= QUIET:
                self._told[name] = step
                warnings.append(f"{text}. {self._advice(name)}")
        return shown, warnings

    def state(self) -> dict[str, Any]:
        """The state that later warnings depend on, as plain values."""
        return {"last": list(self._last), "first": list(self._first), "told": dict(self._told)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        # A checkpoint has lists where the figures are pairs.
        kept: dict[str, list[Metrics]] = {
            part: [{name: (v[0], v[1]) for name, v in step.items()} for step in state[part]]
            for part in ("last", "first")
        }
        self._last, self._first = deque(kept["last"], maxlen=WINDOW), kept["first"]
        self._told = dict(state["told"])

    def figures(self, scored: Sequence[ScoredGroup]) -> Metrics:
        """Sums and counts of all monitors for one step."""
        parts: list[Metrics] = [
            order(scored), several_answers(scored), identical(scored), exits(scored), lengths(scored),
            disagreement(scored, self._rewards),
        ]  # fmt: skip
        # Where prompts come in an order of their own, such as that of difficulty, its effect says nothing about the
        # reward.
        return reduce_metrics([*parts, rows(scored)] if self._shuffled else parts)

    def suspicions(self) -> dict[str, str]:
        """Describes what looks wrong in the last steps, by monitor."""
        now, first = reduce_metrics(list(self._last)), reduce_metrics(self._first)
        found = {
            "order": _order_effect(now, "order", "half of each group"),
            "rows": _order_effect(now, "rows", "half of each step's prompts"),
            "several_answers": _several_answers(now, first),
            "identical": _share_above(
                now, "identical", IDENTICAL, f"of completions of {LONG} tokens or more have a twin in their group"
            ),
            "exits": _share_above(
                now, "exits", EXITS, "of programs end themselves (exit, os._exit, ...)", least=LEAST // 4
            ),
            **{f"disagree/{r.name}": _disagreement(now, r) for r in self._rewards if r.verify_with},
            "length_gap": _length_gap(now, first),
        }
        return {name: text for name, text in found.items() if text}

    def _advice(self, name: str) -> str:
        if not name.startswith("disagree/"):
            return ADVICE[name]
        return (
            "One of the two is being fooled, or too strict: look at completions in rollouts/ whose parts differ, and "
            "put those that are wrong into a test of the reward"
        )


def _order_effect(now: Mapping[str, tuple[float, float]], name: str, what: str) -> str:
    """Describes the effect of the order where it is not due to chance; empty otherwise."""
    difference, count = now.get(name, (0.0, 0.0))
    variance, deviation = now.get(f"{name}_variance", (0.0, 0.0))[0], now.get(f"{name}_deviation", (0.0, 0.0))[0]
    # Counted in groups for ``order``, in steps for ``rows``: a step is one split of its prompts.
    if count < (LEAST // 4 if name == "order" else WINDOW // 2) or variance <= 0:
        return ""
    # Sums over independent splits: z = Σ d / √(Σ var d).
    z = difference / math.sqrt(variance)
    # Significant and large: over thousands of groups a tiny effect is significant too.
    if abs(z) < ORDER_Z or abs(difference) < ORDER_SHARE * deviation:
        return ""
    return f"the first {what} scores {difference / count:+.3f} against the second ({abs(z):.0f} standard errors)"


def _several_answers(now: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    share, before = _mean(now, "several_answers"), _mean(first, "several_answers")
    # Below SEVERAL only a rise counts: the model may have listed answers from the start.
    risen = share >= SEVERAL_RISEN and share - before >= SEVERAL_RISE
    if share < SEVERAL and not risen:
        return ""
    return f"{share:.0%} of completions give several answers ({before:.0%} at first)"


def _share_above(now: Mapping[str, Any], name: str, limit: float, what: str, *, least: float = LEAST) -> str:
    share = _mean(now, name, least=least)
    return f"{share:.0%} {what}" if share >= limit else ""


def _disagreement(now: Mapping[str, Any], reward: Reward) -> str:
    share, credit = _mean(now, f"disagree/{reward.name}"), _mean(now, f"disagree/{reward.name}/credit")
    if share < DISAGREE:
        return ""
    return (
        f"rewards {reward.name!r} and {reward.verify_with!r} disagree on {share:.0%} of completions; on {credit:.0%} "
        f"{reward.name!r} gives credit that {reward.verify_with!r} does not"
    )


def _length_gap(now: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    gap, ratio = _mean(now, "length_gap", least=LEAST // 4), _ratio(now, first)
    # How far lengths have moved in the direction that the reward prefers.
    drift = ratio if gap > 0 else 1 / ratio if ratio else math.inf
    if abs(gap) < LENGTH_GAP or drift < LENGTH_RATIO:
        return ""
    return (
        f"rewarded completions are {abs(gap):.0%} {'longer' if gap > 0 else 'shorter'} than others of their group, and "
        f"completions have become {ratio:.2g} times as long as at first"
    )


def _mean(figures: Mapping[str, Any], name: str, *, least: float = LEAST) -> float:
    total, count = figures.get(name, (0.0, 0.0))
    # Too few to say anything counts as 0, which is below every limit.
    return total / count if count >= least else 0.0


def _ratio(now: Mapping[str, Any], first: Mapping[str, Any]) -> float:
    before = _mean(first, "length")
    # A length that is not known yet, or is 0, has not moved.
    return _mean(now, "length") / before if before else 1.0
