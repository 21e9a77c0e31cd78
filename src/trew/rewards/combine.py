"""Several rewards over whole groups of completions: each scored on its own, then one weighted sum per completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..config import RewardConfig
from ..errors import ConfigError, RewardError
from ..types import Group, Metrics, Prompt, Score, ScoredGroup, ScoreStatus
from . import functions
from .builtin import KINDS, argument_problems, gold_problem, graded, unknown_kind
from .functions import Returned, Sample, UserFunction
from .loading import is_file_spec
from .verdict import Verdict

NOT_APPLICABLE = Verdict(None, "not_applicable")
_FAILED: tuple[ScoreStatus, ...] = ("bad_gold", "timeout", "sandbox_error")


@dataclass(frozen=True, slots=True)
class Reward:
    """One entry of a recipe's ``rewards``: ``function`` is None for a built-in of kind ``kind``."""

    name: str
    kind: str
    weight: float
    args: dict[str, Any]
    function: UserFunction | None = None


class RewardSet:
    """The rewards of a run, loaded and checked.

    Per completion, ``Score.parts`` has each reward's own number or None under its name (a user's function under the
    function's name; a second one of the same name is ``name_2``). ``Score.value`` is the weighted sum of the numbers:

    * A reward that applies to no completion of a group (a row of another task) is left out of the group's sums.
    * Where it gave numbers to some completions of a group and None to others, the others count with the mean of
      those numbers. Counting None as 0 would push them away from the rest of the group; the mean moves them nowhere.
    * A completion that a reward with non-zero weight *could not* judge (``bad_gold``, ``timeout``,
      ``sandbox_error``) has no value: what is missing is unknown, not neutral.
    * Where no reward gave a number there is no value.
    """

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = tuple(rewards)
        self._columns: frozenset[str] = frozenset()  # of the whole data set, once check_golds has seen it

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names as they appear in ``Score.parts`` and in metrics, in the recipe's order."""
        return tuple(reward.name for reward in self.rewards)

    @classmethod
    def from_config(cls, rewards: Sequence[RewardConfig]) -> RewardSet:
        """Loads every function and checks every argument; raises ConfigError with all problems at once.

        >>> RewardSet.from_config([RewardConfig(name="gsm8k"), RewardConfig(name="format", weight=0.1)]).names
        ('gsm8k', 'format')
        >>> RewardSet.from_config([RewardConfig(name="gsm8k", args={"mood": "strict"})])
        Traceback (most recent call last):
            ...
        trew.errors.ConfigError: rewards[0] 'gsm8k': args.mood: unknown argument (did you mean 'mode'?);
        accepts mode, thinking
        """
        problems: list[str] = []
        loaded: list[Reward] = []
        modules: dict[Path, ModuleType] = {}
        taken: Counter[str] = Counter()
        for i, config in enumerate(rewards):
            function, found = None, []
            if is_file_spec(config.name):
                try:
                    function = functions.load(config.name, config.args, modules)
                except ConfigError as error:
                    found = list(error.problems)
            elif config.name in KINDS:
                found = argument_problems(config.name, config.args)
            else:
                found = [f"{unknown_kind(config.name)}; a function of your own is path/to/file.py:function"]
            problems += [f"rewards[{i}] {config.name!r}: {problem}" for problem in found]
            name = function.name if function else config.name
            taken[name] += 1
            unique = name if taken[name] == 1 else f"{name}_{taken[name]}"
            loaded.append(Reward(unique, config.name, config.weight, dict(config.args), function))
        if not rewards:
            problems.append(f"rewards: none given; built in are {', '.join(KINDS)}, or path/to/file.py:function")
        elif all(config.weight == 0 for config in rewards):
            problems.append("rewards: every weight is 0, so that nothing could be learned; give one a weight")
        if problems:
            raise ConfigError(problems)
        return cls(loaded)

    def score(
        self, groups: Sequence[Group], *, step: int = 0, progress: Callable[[int], None] | None = None
    ) -> list[ScoredGroup]:
        """Scores every completion of every group; ``progress`` is told how many more completions are done.

        Raises RewardError when a user's function fails, or needs columns that the data lack.
        """
        by_function = self._call_functions(groups, step)
        scored = []
        for g, group in enumerate(groups):
            verdicts = [
                by_function[reward.name][g] if reward.function else _grade_group(reward, group)
                for reward in self.rewards
            ]
            scored.append(ScoredGroup(group, _combined(self.rewards, verdicts, len(group.completions))))
            if progress is not None:
                progress(len(group.completions))
        return scored

    def _call_functions(self, groups: Sequence[Group], step: int) -> dict[str, list[list[Verdict]]]:
        """Verdicts of the user's functions: by name, then group, then completion."""
        users = [(reward.name, reward.function) for reward in self.rewards if reward.function is not None]
        columns = self._columns.union(*(group.prompt.columns for group in groups))
        calls = []
        for _, function in users:
            served = [group for group in groups if function.applies(group.prompt)]
            if groups and not served and (self._columns == frozenset() or _lacks(function, columns)):
                raise RewardError(f"{function.who} {function.missing(columns)}")
            calls.append((function, [Sample(g.prompt, c.text, c.token_ids) for g in served for c in g.completions]))
        returned = functions.call_all(calls, step=step)
        return {
            name: _spread(function, groups, result)
            for (name, function), result in zip(users, returned, strict=True)
        }  # fmt: skip

    def check_golds(self, prompts: Iterable[Prompt]) -> list[str]:
        """Everything wrong with the data for these rewards, one line per row and reward; empty when all is well.

        Golds of built-in rewards must be readable and score 1 against themselves. A reward that applies to no row at
        all is reported too: it would train nothing, silently. Rows are counted from 1 in the order of ``prompts``.
        """
        problems: list[str] = []
        served: Counter[str] = Counter()
        columns: set[str] = set()
        total = 0
        for total, prompt in enumerate(prompts, start=1):
            columns.update(prompt.columns)
            for reward in self.rewards:
                if reward.function is not None:
                    served[reward.name] += reward.function.applies(prompt)
                    continue
                if KINDS[reward.kind].gold(prompt.columns) is None:
                    continue
                served[reward.name] += 1
                if wrong := gold_problem(reward.kind, prompt.columns, reward.args):
                    problems.append(f"row {total} ({prompt.uid}): reward {reward.name!r}: {wrong}")
        self._columns = frozenset(columns)
        for reward in self.rewards:
            if total and not served[reward.name]:
                if reward.function is not None:
                    problems.append(f"{reward.function.who} {reward.function.missing(columns)}")
                else:
                    problems.append(
                        f"reward {reward.name!r} applies to none of the {total} rows: it looks for "
                        f"{KINDS[reward.kind].looks_for}; columns: {', '.join(sorted(columns)) or 'none'}"
                    )
        return problems

    def summary(self, scored: Sequence[ScoredGroup]) -> Metrics:
        """Metrics as (sum, count): ``reward`` over all values, ``reward/<name>`` over each reward's own numbers,
        ``reward/no_answer`` as a share of all completions, and, where there were any, ``reward/none`` (completions
        without a value), ``reward/none/<status>`` and ``reward/<name>/none`` as shares too."""
        scores = [score for group in scored for score in group.scores]
        n = float(len(scores))
        values = [score.value for score in scores if score.value is not None]
        metrics = {"reward": (sum(values), float(len(values)))}
        for name in self.names:
            parts = [part for score in scores if (part := score.parts.get(name)) is not None]
            metrics[f"reward/{name}"] = (sum(parts), float(len(parts)))
            if len(parts) < n:
                metrics[f"reward/{name}/none"] = (n - len(parts), n)
        statuses = Counter(score.status for score in scores)
        metrics["reward/no_answer"] = (float(statuses["no_answer"]), n)
        if len(values) < n:
            metrics["reward/none"] = (n - len(values), n)
            lacking = Counter(score.status for score in scores if score.value is None)
            metrics |= {f"reward/none/{status}": (float(count), n) for status, count in sorted(lacking.items())}
        return metrics


def _lacks(function: UserFunction, columns: Iterable[str]) -> bool:
    have = set(columns)
    return not function.verl and any(name not in have for name in function.required)


def _grade_group(reward: Reward, group: Group) -> list[Verdict]:
    """A built-in's verdicts on one group."""
    kind = KINDS[reward.kind]
    found = kind.gold(group.prompt.columns)
    if found is None:
        return [NOT_APPLICABLE] * len(group.completions)
    gold, row = found
    verdicts = []
    for completion in group.completions:
        from_completion = {"length": len(completion)} if "length" in kind.from_row else {}
        verdicts.append(graded(kind, completion.text, gold, {**reward.args, **row, **from_completion}))
    return verdicts


def _spread(function: UserFunction, groups: Sequence[Group], returned: Returned) -> list[list[Verdict]]:
    """A function's flat values back in groups; rows that it was not called for are not applicable."""
    values = iter(returned.values)
    each = returned.seconds / max(len(returned.values), 1)
    return [
        [
            NOT_APPLICABLE if not served or (value := next(values)) is None else Verdict(value, seconds=each)
            for _ in group.completions
        ]
        for group in groups
        for served in [function.applies(group.prompt)]
    ]


def _combined(rewards: Sequence[Reward], verdicts: Sequence[Sequence[Verdict]], count: int) -> tuple[Score, ...]:
    """One Score per completion from ``verdicts[reward][completion]``; the rule is in ``RewardSet``."""
    means: list[float | None] = []
    for row in verdicts:
        numbers = [verdict.score for verdict in row if verdict.score is not None]
        means.append(sum(numbers) / len(numbers) if numbers else None)
    scores = []
    for i in range(count):
        column = [row[i] for row in verdicts]
        failed = [v for v, r in zip(column, rewards, strict=True) if v.status in _FAILED and r.weight != 0]
        terms = [
            reward.weight * (verdict.score if verdict.score is not None else mean)
            for reward, verdict, mean in zip(rewards, column, means, strict=True)
            if mean is not None
        ]
        judged = [verdict for verdict in column if verdict.score is not None]
        status = failed[0].status if failed else judged[0].status if judged else column[0].status
        scores.append(
            Score(
                value=sum(terms) if judged and not failed else None,
                status=status,
                parts={reward.name: verdict.score for reward, verdict in zip(rewards, column, strict=True)},
                extracted=next((v.extracted for v in column if v.extracted is not None), None),
                seconds=sum(v.seconds for v in column),
            )
        )
    return tuple(scores)
