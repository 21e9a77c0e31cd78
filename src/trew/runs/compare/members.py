"""One run of a comparison: its settings, its seed, and what its evaluations measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...config.stored import completed
from ...errors import DataError
from ...rewards.names import judge_rank, names_of
from ...utils.metric_rows import is_evaluation
from ...utils.toml import flatten
from ..report import RunData, load_run
from ..report.read import load_samples
from ..report.safe_files import read_text

_MOST_EVALUATED = 1_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """A run as a comparison sees it."""

    data: RunData
    seed: int
    settings: Mapping[str, Any]  # flat: {"learner.lr": 1e-6, ...}, without seed and out
    evals: tuple[tuple[int, float], ...]  # (step, accuracy) of every evaluation, in order; none where it is left out

    @property
    def name(self) -> str:
        return str(self.data.folder)

    @property
    def finished(self) -> bool:
        return bool(self.data.summary)

    @property
    def last_step(self) -> int:
        """The last step in its rows; 0 where it has none yet."""
        return max((row["step"] for row in self.data.rows), default=0)

    @property
    def version(self) -> str:
        """The version of trew that trained it; empty if it is not known."""
        return str(_table(self.data.summary, "versions").get("trew", ""))

    @property
    def arithmetic(self) -> str:
        """:attr:`RunData.arithmetic`."""
        return self.data.arithmetic

    @property
    def prompts(self) -> frozenset[str]:
        """The uids of the held-out prompts that its last evaluation judged."""
        if known := _table(self.data.summary, "after", "prompt_accuracy"):
            return frozenset(known)
        return frozenset(row["uid"] for row in load_samples(self.data.folder, kind="evals", most=_MOST_EVALUATED))

    @property
    def prompt_accuracy(self) -> Mapping[str, float]:
        """The accuracy of its last evaluation by prompt; empty while it is not finished."""
        return _table(self.data.summary, "after", "prompt_accuracy")

    @property
    def unjudged(self) -> int:
        """How many prompts of its last evaluation no reward could judge."""
        count = _table(self.data.summary, "after").get("left_out", 0)
        return count if isinstance(count, int) else 0

    @property
    def completions(self) -> int:
        """How many completions it sampled for training."""
        groups = sum(row.get("groups_sampled") or 0 for row in self.data.rows)
        return int(groups) * int(self.settings.get("rollout.completions", 1))

    def lost_rows(self, since: int = 1) -> str:
        """:func:`_lost_rows` of its steps from ``since`` on."""
        return _lost_rows(self.data, since)

    def evaluation(self) -> dict[str, Any]:
        """The settings that decide what an evaluation measures, besides the data: how completions are sampled, and what
        counts as correct."""
        s = self.settings
        found = {k: v for k, v in s.items() if k.startswith("eval.") and k != "eval.every"}
        # 0 stands for the length in training, so that training with other lengths is evaluated with other lengths.
        found["eval.max_tokens"] = s.get("eval.max_tokens") or s.get("rollout.max_tokens")
        for key in ("rollout.stop", "chat_template", "tokenizer"):
            found[key] = s.get(key)
        found |= {k: v for k, v in s.items() if k.startswith("environment.") and k not in (*_EPISODES, *_NO_MATTER)}
        judges = _judges(self.data.config, str(s.get("eval.correct_reward", "")))
        return {**found, **{f"rewards.{k}": v for k, v in flatten(judges).items()}}

    def task(self) -> dict[str, Any]:
        """The settings that decide which prompts are trained on and held out."""
        return {k: v for k, v in self.settings.items() if k.startswith(("data.", *_EPISODES))}


_EPISODES = ("environment.name", "environment.args")
"""What is played: the prompts of a run with an environment, whose names are numbers in every one."""
_NO_MATTER = ("environment.workers", "environment.timeout_s", "environment.episodes", "environment.on_failure")


def load_member(folder: Path, *, leave_out: bool = False) -> Member:
    """Reads the run in ``folder``. Raises DataError if it is none, or is not one that can be compared.

    With ``leave_out``, a run that has not finished will not be counted, so that it needs no evaluation: it may have
    only begun.
    """
    data = load_run(folder)
    table = flatten(dict(data.config))
    seed = table.get("seed")
    if not isinstance(seed, int) or isinstance(seed, bool):
        why = next((note for note in data.notes if note.startswith("config.toml")), "it has no seed")
        raise DataError(f"{folder}: config.toml does not tell its settings ({why}); put a backup of it there")
    if "objective.preset" not in table:
        raise DataError(f"{folder}: is not a run of trew train (its config.toml has no objective); leave it out")
    settings = {k: v for k, v in completed(table).items() if k not in ("seed", "out")}
    if settings.get("teacher.endpoint"):
        settings["teacher.model"] = _served(folder)
    if lost := _lost_rows(data):
        data = replace(data, notes=(*data.notes, f"{lost}: what is counted over its steps is not exact"))
    evals = () if leave_out and not data.summary else _evaluations(folder, data)
    return Member(data, seed, settings, evals)


def _last_step(data: RunData) -> int | None:
    """The step that a finished run ended with, after which it was evaluated; None where that is not known."""
    steps = data.summary.get("steps")
    return steps if isinstance(steps, int) and not isinstance(steps, bool) else None


def _lost_rows(data: RunData, since: int = 1) -> str:
    """What a finished run's metrics.jsonl lacks, or has twice, of the rows of its steps from ``since`` on: each step
    writes one. Empty if nothing."""
    last = _last_step(data)
    if last is None:
        return ""
    count = Counter(row["step"] for row in data.rows if since <= row["step"] <= last and not is_evaluation(row))
    # As ranges: a damaged summary may tell of any number of steps.
    gaps = [(one + 1, other - 1) for one, other in pairwise([since - 1, *sorted(count), last + 1]) if other > one + 1]
    twice = [(step, step) for step, times in sorted(count.items()) if times > 1]
    told = [f"{verb} the {_steps(at)}" for verb, at in (("lacks", gaps), ("repeats", twice)) if at]
    return f"metrics.jsonl {' and '.join(told)}" if told else ""


def _steps(ranges: Sequence[tuple[int, int]], most: int = 3) -> str:
    """
    >>> _steps([(3, 3)]), _steps([(3, 5), (7, 7)])
    ('row of step 3', 'rows of steps 3 to 5, 7')
    """
    shown = ", ".join(str(one) if one == last else f"{one} to {last}" for one, last in ranges[:most])
    more = f" and {len(ranges) - most} more places" if len(ranges) > most else ""
    several = len(ranges) > 1 or ranges[0][0] != ranges[0][1]
    return f"{'rows of steps' if several else 'row of step'} {shown}{more}"


def _served(folder: Path) -> str:
    """The name of the model that taught a run from a server: its address says nothing of what was learned from. Empty
    if that is not known."""
    try:
        known = json.loads(read_text(folder, "teacher.json"))
    except (OSError, ValueError, RecursionError):
        return ""
    return str(known.get("model", "")) if isinstance(known, dict) else ""


def _evaluations(folder: Path, data: RunData) -> tuple[tuple[int, float], ...]:
    """(step, accuracy) of each evaluation. Raises DataError where they are missing or judged nothing."""
    rows = data.rows
    # By step: a resumed run may have repeated an evaluation, and the later one counts.
    found = {row["step"]: row["eval_accuracy"] for row in rows if "eval_accuracy" in row}
    evals = {step: accuracy for step, accuracy in found.items() if accuracy is not None}
    # Left out, an earlier evaluation would stand for one of these, and its weights for the later ones.
    if lost := [step for step in found if step and step not in evals]:
        raise DataError(
            f"{folder}: nothing was judged in its evaluation after step {lost[0]}, so that its accuracy there is not "
            "known; repeat the run, or leave it out"
        )
    if not evals and any("eval_loss" in row for row in rows):
        raise DataError(
            f"{folder}: was evaluated by the loss of its data (trew sft), and runs are compared by an accuracy; leave "
            "it out, or measure its model by trew eval"
        )
    if not evals:
        raise DataError(f"{folder}: has no evaluation in metrics.jsonl; let it run, or leave it out")
    # Every run is evaluated after its last step, whatever eval.every is.
    if (last := _last_step(data)) is not None and last not in evals:
        raise DataError(
            f"{folder}: metrics.jsonl lacks the evaluation after step {last}, the last one, and has one after step "
            f"{max(evals)}, whose accuracy would stand for it; put a backup of the file there, or leave the run out"
        )
    return tuple(sorted(evals.items()))


def _judges(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The reward that decides what is correct, as training chooses it: the one called ``name``, or else the first of
    those that say so (``judge_rank``). Of several data sets, that of each by its name."""
    rewards = [reward for reward in config.get("rewards") or () if isinstance(reward, Mapping)]
    called = [reward for reward, own in zip(rewards, names_of(rewards), strict=True) if name and name == own]
    ordered = called or sorted(rewards, key=_rank)
    data = config.get("data")
    if not isinstance(data, list):
        return _judge(ordered)
    sets = [one.get("name") for one in data if isinstance(one, Mapping)]
    return {str(one): _judge([r for r in ordered if one in (r.get("sets") or [one])]) for one in sets}


def _rank(reward: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    return judge_rank(
        name=str(reward.get("name")), model=bool(reward.get("model")), gate=bool(reward.get("gate")),
        weight=reward.get("weight", 1.0),
    )  # fmt: skip


def _judge(rewards: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """What the first of these rewards is."""
    return {key: value for key, value in (rewards or [{}])[0].items() if key in ("name", "model", "args")}


def _table(table: Mapping[str, Any], *path: str) -> Mapping[str, Any]:
    """The table at ``path`` below; empty if a part is missing or is not a table."""
    for part in path:
        inner = table.get(part)
        table = inner if isinstance(inner, Mapping) else {}
    return table
