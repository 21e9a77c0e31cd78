"""Reports at the end of a run that it learned nothing, however short it was, and why.

The rules of :mod:`.health` need several rows before they warn; this module reads all rows of a run that has ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import EvalConfig
from ..utils.commands import trial
from ..utils.metric_rows import is_evaluation
from .health import Row, finite

READ = ("grad_norm", "truncated_share", "reward", "zero_signal_share", "groups_trained", "environment/failed")
"""The columns that findings are made of."""

RIGHT = (
    "Right is what the reward that judges answers (eval.correct_reward) gives at least eval.correct_at = {:g}: set it "
    "to the value from which a completion counts as right"
)
"""What decides which groups dynamic sampling keeps; ``format`` takes eval.correct_at."""


def outcome(rows: Sequence[Row], table: Mapping[str, Any]) -> list[str]:
    """The final findings about a run; none if any step had a gradient, or if there was no step.

    ``rows`` are the run's rows of metrics, ``table`` its configuration as nested plain values.

    >>> row = {"step": 1, "grad_norm": 0.0, "reward": 0.0, "zero_signal_share": 1.0, "truncated_share": 0.25}
    >>> print(outcome([row], {})[0][:95])
    Nothing was learned: the only step had no gradient, so the weights are as they were. All comple
    """
    steps = [row for row in rows if not is_evaluation(row)]
    # A norm that is nan is read as None, which is not 0; rows without one made no update.
    if not steps or any(finite(row.get("grad_norm")) != 0 for row in steps if "grad_norm" in row):
        return []
    what = "the only step had no gradient" if len(steps) == 1 else f"none of the {len(steps)} steps had a gradient"
    return [f"Nothing was learned: {what}, so the weights are as they were. {' '.join(_causes(steps, table))}"]


def _causes(steps: Sequence[Row], table: Mapping[str, Any]) -> list[str]:
    """Yields every cause that the rows show, with advice."""
    alone = trial(table)
    found = [
        _cut_off(steps, table),
        _failed(steps),
        _constant(steps, alone),
        _unjudged(steps, alone),
        _dropped(steps, table),
    ]
    return [text for text in found if text] or [
        "Rewards differed, but the objective made no gradient of them. Look at advantage_share and clip_share in the "
        "metrics, and at what the objective keeps (trew explain)."
    ]


def _cut_off(steps: Sequence[Row], table: Mapping[str, Any]) -> str:
    if not _throughout(steps, "truncated_share", 1.0):
        return ""
    rollout = table.get("rollout")
    limit = finite(rollout.get("max_tokens")) if isinstance(rollout, Mapping) else None
    at = "" if limit is None else f" of rollout.max_tokens = {limit:.0f}"
    return (
        f"Every completion was cut off at the limit{at}, before it could give an answer: raise rollout.max_tokens, and "
        "check that the model knows its end token."
    )


def _failed(steps: Sequence[Row]) -> str:
    shares = [finite(row.get("environment/failed")) or 0.0 for row in steps]
    if not any(shares):
        return ""
    return (
        f"{statistics.fmean(shares):.0%} of the episodes failed in their environment and were not judged: look at the "
        "warnings of the environment."
    )


def _constant(steps: Sequence[Row], alone: str) -> str:
    rewards = {value for row in steps if (value := finite(row.get("reward"))) is not None}
    if not rewards or not _throughout(steps, "zero_signal_share", 1.0):
        return ""
    value = f" ({rewards.pop():g})" if len(rewards) == 1 else ""
    return (
        f"All completions of a prompt got the same reward{value}, so there was nothing to prefer: check the reward "
        f"({alone}), or try easier prompts, more completions per prompt or a higher temperature."
    )


def _unjudged(steps: Sequence[Row], alone: str) -> str:
    if any(row.get("reward") is not None for row in steps):
        return ""
    return f"No completion got a reward: look at the warnings of the rewards, and try them alone ({alone})."


def _dropped(steps: Sequence[Row], table: Mapping[str, Any]) -> str:
    # Where all rewards are equal, that is the cause, and told already.
    if not _throughout(steps, "groups_trained", 0) or _throughout(steps, "zero_signal_share", 1.0):
        return ""
    judged = table.get("eval")
    at = finite(judged.get("correct_at")) if isinstance(judged, Mapping) else None
    return (
        "Rewards differed, but dynamic sampling kept no group: it keeps those with right and wrong completions. "
        f"{RIGHT.format(EvalConfig().correct_at if at is None else at)}, or take an objective without dynamic sampling."
    )


def _throughout(steps: Sequence[Row], name: str, value: float) -> bool:
    return all(row.get(name) == value for row in steps)
