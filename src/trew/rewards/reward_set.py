"""Several rewards over whole groups of completions: each scored on its own, then one value per completion."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..config import FUNCTION_SECONDS, RewardConfig
from ..errors import ConfigError, RewardError
from ..types import Group, Metrics, Prompt, Score, ScoredGroup
from .builtin import KINDS, argument_problems, gold_problems, unknown_kind
from .combine import FAILED, Reward, combined, one_by_one
from .grading import NOT_APPLICABLE, Grading, Verdicts, arguments, grade_after, grade_groups
from .user import verdicts as judging
from .user.functions import Sample, UserFunction
from .user.loading import is_file_spec
from .user.process import Process
from .user.session import Runner, Spec
from .user.verdicts import Ask
from .verdict import Verdict

AT_ONCE = 256  # completions that built-ins grade between two reports of progress
Bar = Callable[[str, int], AbstractContextManager[Any]]
"""Shows progress under a name, of a total: what comes out of the block has ``advance(count)``."""


class RewardSet:
    """The rewards of a run, loaded and checked.

    Per completion, ``Score.parts`` has each reward's own number or None under its name (a user's function under the
    function's name; a second one of the same name is ``name_2``). ``Score.value`` is the weighted sum of the numbers:

    * Where a reward that is a gate gave 0 or less, the rewards that are no gates count 0.
    * A reward that applies to no completion of a group (a row of another task) is left out of the group's sums.
    * Where it gave numbers to some completions of a group and None to others, the others count with the mean of
      those numbers. Counting None as 0 would push them away from the rest of the group; the mean moves them nowhere.
    * A completion that a reward with non-zero weight, or a gate, *could not* judge (``bad_gold``, ``timeout``,
      ``sandbox_error``) has no value: what is missing is unknown, not neutral. Behind a closed gate it is known: 0.
    * Where no reward that counts gave a number there is no value.

    ``runner`` is where users' functions live: a process of their own unless another is given.
    """

    def __init__(self, rewards: Sequence[Reward], *, runner: Runner | None = None):
        self.rewards = tuple(rewards)
        self._runner = runner
        self._columns: frozenset[str] = frozenset()  # of the whole data set, once check_golds has seen it
        self._warnings: list[str] = []
        self._told: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names as they appear in ``Score.parts`` and in metrics, in the recipe's order."""
        return tuple(reward.name for reward in self.rewards)

    @classmethod
    def from_config(cls, rewards: Sequence[RewardConfig], *, runner: Runner | None = None) -> RewardSet:
        """Loads every function and checks every argument; raises ConfigError with all problems at once.

        >>> RewardSet.from_config([RewardConfig(name="gsm8k"), RewardConfig(name="format", weight=0.1)]).names
        ('gsm8k', 'format')
        >>> RewardSet.from_config([RewardConfig(name="gsm8k", args={"mood": "strict"})])
        Traceback (most recent call last):
            ...
        trew.errors.ConfigError: rewards[0] 'gsm8k': args.mood: unknown argument (did you mean 'mode'?);
        accepts mode, thinking
        """
        specs: list[Spec] = [(c.name, dict(c.args)) for c in rewards if not c.model and is_file_spec(c.name)]
        if specs and runner is None:
            runner = Process()
        functions = iter(runner.load(specs) if runner is not None else [])
        problems: list[str] = []
        loaded: list[Reward] = []
        taken: Counter[str] = Counter()
        for i, config in enumerate(rewards):
            function, model, found = None, None, _unused(config)
            if config.model:
                from .model.reward_model import ModelReward  # what it needs is not imported for nothing

                try:
                    model = ModelReward.open(config.model, config.args, name=config.name)
                except ConfigError as error:
                    found += error.problems
            elif is_file_spec(config.name):
                one = next(functions)
                function = one if isinstance(one, UserFunction) else None
                found += one if isinstance(one, tuple) else ()
            elif config.name in KINDS:
                found += argument_problems(config.name, config.args)
                if i == 0 and "correct" in KINDS[config.name].from_row:
                    found.append("asks whether the answer is right, so a reward that says so must come first")
            else:
                found.append(f"{unknown_kind(config.name)}; a function of your own is path/to/file.py:function")
            problems += [f"rewards[{i}] {config.name or config.model!r}: {problem}" for problem in found]
            name = function.name if function else model.name if model else config.name
            taken[name] += 1
            unique = name if taken[name] == 1 else f"{name}_{taken[name]}"
            loaded.append(
                Reward(
                    unique, config.name, config.weight, dict(config.args), function, model, config.gate,
                    config.verify_with, config.calls, config.timeout_s, config.on_failure,
                )
            )  # fmt: skip
        problems += _set_problems(rewards, loaded)
        if problems:
            if runner is not None:
                runner.close()
            raise ConfigError(problems)
        return cls(loaded, runner=runner)

    @property
    def code(self) -> list[str]:
        """Whose code is run for these rewards, one line for each function of a user's."""
        return [f"reward {r.name!r} runs the code in {r.function.file}" for r in self.rewards if r.function is not None]

    def load(self, *, device: str = "", decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """Loads the weights of reward models; raises ModelError. ``decode`` makes text of the policy's tokens."""
        for reward in self.rewards:
            if reward.model is not None:
                reward.model.load(device=device, decode=decode)

    def close(self) -> None:
        """Ends the process of users' functions; a later call starts it again."""
        if self._runner is not None:
            self._runner.close()

    def take_warnings(self) -> list[str]:
        """What went wrong since the last call without ending the run, one line each. What happens again and again is
        told the first, second, fourth, eighth … time."""
        with self._lock:
            taken, self._warnings = self._warnings, []
        return taken

    def state(self) -> dict[str, Any]:
        """What later warnings depend on, as JSON can hold it."""
        with self._lock:
            return {"told": dict(self._told), "waiting": list(self._warnings)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken."""
        with self._lock:
            self._told, self._warnings = Counter(state["told"]), list(state["waiting"])

    def _warn(self, name: str, text: str) -> None:
        with self._lock:
            self._told[name] += 1
            count = self._told[name]
            if count & (count - 1) == 0:
                again = f" (this happened {count} times)" if count > 1 else ""
                self._warnings.append(" ".join(text.split()) + again)

    # ---- scoring

    def score(
        self,
        groups: Sequence[Group],
        *,
        step: int = 0,
        early: Sequence[Verdicts | None] = (),
        progress: Callable[[int], None] | None = None,
    ) -> list[ScoredGroup]:
        """Scores every completion of every group; ``progress`` is told how many more completions are done.

        ``early`` is what :meth:`early` gave for some of the groups already. Raises RewardError when a user's function
        fails, or needs columns that the data lack.
        """
        found: list[Verdicts] = [{**(early[g] or {})} if g < len(early) else {} for g in range(len(groups))]
        waiting: list[int] = []
        for g, group in enumerate(groups):
            if not found[g]:
                waiting.append(g)
            elif progress is not None:
                progress(len(group.rollouts))
            if waiting and (g + 1 == len(groups) or sum(len(groups[w].rollouts) for w in waiting) >= AT_ONCE):
                for w, verdicts in zip(waiting, self.early([groups[w] for w in waiting], step=step), strict=True):
                    found[w] = verdicts
                    if progress is not None:
                        progress(len(groups[w].rollouts))
                waiting = []
        self._late(groups, found, step)
        return [
            ScoredGroup(
                group,
                combined(
                    self.rewards,
                    [verdicts[name] for name in self.names],
                    lengths=[len(rollout.token_ids) for rollout in group.rollouts],
                ),
            )
            for group, verdicts in zip(groups, found, strict=True)
        ]

    def grading(self, *, step: int = 0) -> Grading:
        """Scores groups of a step while others are still generated: see :class:`Grading`."""
        return Grading(self, step=step)

    def early(self, groups: Sequence[Group], *, step: int = 0) -> list[Verdicts]:
        """Verdicts that a group's own completions suffice for: those of built-ins, and of functions that are called
        once per group. Safe in any thread."""
        found: list[Verdicts] = [{} for _ in groups]
        for reward in self.rewards:
            if reward.function is None and reward.model is None and not _after(reward):
                for g, verdicts in enumerate(grade_groups(reward, groups)):
                    found[g][reward.name] = verdicts
        per_group = [r for r in self.rewards if r.function is not None and r.calls == "group"]
        for g, group in enumerate(groups):
            found[g] |= {name: rows[0] for name, rows in self._called(per_group, [group], step).items()}
        return found

    def _late(self, groups: Sequence[Group], found: list[Verdicts], step: int) -> None:
        """Adds to ``found`` the verdicts that need all groups of the step, or other rewards' verdicts."""
        per_step = [r for r in self.rewards if r.function is not None and r.calls == "step"]
        rows = self._called(per_step, groups, step)
        for reward in self.rewards:
            if reward.model is not None:
                rows[reward.name] = reward.model.score(groups)
        for name, of_groups in rows.items():
            for g, verdicts in enumerate(of_groups):
                found[g][name] = verdicts
        for reward in self.rewards:
            if _after(reward):
                for group, verdicts in zip(groups, found, strict=True):
                    verdicts[reward.name] = grade_after(reward, group, verdicts[self.names[0]])

    def _called(self, rewards: Sequence[Reward], groups: Sequence[Group], step: int) -> dict[str, list[list[Verdict]]]:
        """Verdicts of users' functions: by name, then group, then completion; not applicable where it was not asked."""
        columns = self._columns.union(*(group.prompt.columns for group in groups))
        asks = []
        for reward in rewards:
            function = reward.function
            assert function is not None
            served = [group for group in groups if function.applies(group.prompt)]
            whole_data = bool(self._columns) or reward.calls == "step"  # one group says nothing about the data
            if groups and not served and whole_data and (not self._columns or _lacks(function, columns)):
                raise RewardError(f"{function.who} {function.missing(columns)}")
            samples = [
                Sample(g.prompt, c.text, c.token_ids, len(c)) for g in served for c in g.rollouts
            ]  # fmt: skip
            asks.append((reward, Ask(function, samples, reward.timeout_s, reward.on_failure)))
        asked = [(reward, ask) for reward, ask in asks if ask.samples]
        judged = {}
        if asked:
            assert self._runner is not None
            rows = judging.judge(
                self._runner,
                [ask for _, ask in asked],
                step=step,
                warn=lambda function, text: self._warn(function.who, text),
            )
            judged = {reward.name: iter(verdicts) for (reward, _), verdicts in zip(asked, rows, strict=True)}
        return {
            reward.name: [
                [
                    next(judged[reward.name]) if ask.function.applies(group.prompt) else NOT_APPLICABLE
                    for _ in group.rollouts
                ]
                for group in groups
            ]
            for reward, ask in asks
        }

    def scores_in(self, process: Process, groups: Sequence[Group]) -> list[float | None]:
        """A built-in's numbers on groups, graded in another process; of the first reward, flat."""
        reward, values = self.rewards[0], []
        for group in groups:
            items = arguments(reward, group)
            values += (
                [score for score, _ in process.grade(reward.kind, items)] if items else [None] * len(group.rollouts)
            )
        return values

    def each(self, score: Score) -> tuple[float | None, ...]:
        """Every reward's number, gates applied and without weights, for objectives that normalise them one by one."""
        return one_by_one(self.rewards, score)

    def judged_alike(self, scored: ScoredGroup, *, step: int = 0) -> list[str]:
        """Judges a group's completions again: one line for each reward that judges a completion otherwise than before.

        A function whose values depend on the batch (it was called with more groups then) but not on the call is no
        case of this. Reward models are left out: how a batch is padded changes their last bits.
        """
        again = self.score([scored.group], step=step)[0].scores
        third = None
        problems = []
        for reward in self.rewards:
            if reward.model is not None:
                continue
            differ = [i for i, s in enumerate(again) if s.parts[reward.name] != scored.scores[i].parts[reward.name]]
            if differ and reward.function is not None and reward.calls == "step":
                third = third or self.score([scored.group], step=step)[0].scores
                differ = [i for i in differ if third[i].parts[reward.name] != again[i].parts[reward.name]]
            if differ:
                i = differ[0]
                sample = Sample(scored.group.prompt, scored.group.rollouts[i].text, ())
                problems.append(
                    f"reward {reward.name!r} judges the same completion differently from call to call: "
                    f"{scored.scores[i].parts[reward.name]}, then {again[i].parts[reward.name]}, for {sample}. Groups "
                    "are compared by chance then; give it a fixed seed, no clock, and no set whose order matters"
                )
        return problems

    def check_golds(self, prompts: Iterable[Prompt], *, bar: Bar | None = None) -> list[str]:
        """Everything wrong with the data for these rewards, one line per row and reward; empty when all is well.

        Golds of built-in rewards must be readable and score 1 against themselves. A reward that applies to no row at
        all is reported too: it would train nothing, silently. Rows are counted from 1 in the order of ``prompts``.
        ``bar(name, total)`` shows progress where golds are run or parsed, which can take a minute.
        """
        problems: list[str] = []
        served: Counter[str] = Counter()
        columns: set[str] = set()
        seen = list(prompts)
        slow = any(r.kind in KINDS and KINDS[r.kind].grade_many is not None for r in self.rewards)
        with bar("checking golds", len(seen)) if bar and slow and seen else nullcontext() as shown:
            for first in range(0, len(seen), AT_ONCE):
                part = seen[first : first + AT_ONCE]
                wrong: dict[str, list[str]] = {}
                for reward in self.rewards:
                    if reward.function is not None:
                        served[reward.name] += sum(map(reward.function.applies, part))
                    elif reward.model is None:
                        gold = KINDS[reward.kind].gold
                        served[reward.name] += sum(gold(prompt.columns) is not None for prompt in part)
                        wrong[reward.name] = gold_problems(
                            reward.kind, [prompt.columns for prompt in part], reward.args
                        )
                for at, prompt in enumerate(part):
                    columns.update(prompt.columns)
                    of_row = [(name, lines[at]) for name, lines in wrong.items() if lines[at]]
                    problems += [f"row {first + at + 1} ({prompt.uid}): reward {name!r}: {why}" for name, why in of_row]
                if shown is not None:
                    shown.advance(len(part))
        self._columns = frozenset(columns)
        return problems + self._serving_problems(seen, columns, served)

    def unserved_notes(self, prompts: Sequence[Prompt]) -> list[str]:
        """One line about the prompts that no reward applies to, such as rows without a gold among rows with one. What
        needs no gold (format, length) judges no answer, and does not count."""

        def applies(reward: Reward, prompt: Prompt) -> bool:
            if reward.function is not None:
                return reward.function.applies(prompt)
            return reward.model is not None or KINDS[reward.kind].gold(prompt.columns) is not None

        judges = [r for r in self.rewards if r.kind not in KINDS or KINDS[r.kind].looks_for]
        alone = [p for p in prompts if judges and not any(applies(reward, p) for reward in judges)]
        if not alone:
            return []
        names = ", ".join(p.place or p.uid for p in alone[:5]) + (", ..." if len(alone) > 5 else "")
        return [
            f"{len(alone)} of {len(prompts)} prompts have nothing that a reward looks for, so their answers are "
            f"not judged: {names}; give them a gold, or take them out"
        ]

    def column_problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Rewards that serve none of ``prompts``; their golds are not looked at. For rows that have completions."""
        served: Counter[str] = Counter()
        for prompt in prompts:
            for reward in self.rewards:
                if reward.function is not None:
                    served[reward.name] += reward.function.applies(prompt)
                elif reward.model is None:
                    served[reward.name] += KINDS[reward.kind].gold(prompt.columns) is not None
        self._columns = frozenset(name for prompt in prompts for name in prompt.columns)
        return self._serving_problems(prompts, self._columns, served)

    def _serving_problems(self, prompts: Sequence[Prompt], columns: Iterable[str], served: Counter[str]) -> list[str]:
        problems: list[str] = []
        total = len(prompts)
        for reward in self.rewards:
            if reward.model is not None:
                problems += reward.model.prompt_problems(prompts)
            elif total and not served[reward.name]:
                if reward.function is not None:
                    problems.append(f"{reward.function.who} {reward.function.missing(columns)}")
                else:
                    problems.append(
                        f"reward {reward.name!r} applies to none of the {total} rows: it looks for "
                        f"{KINDS[reward.kind].looks_for}; columns: {', '.join(sorted(columns)) or 'none'}"
                    )
        return problems

    def summary(self, scored: Sequence[ScoredGroup]) -> Metrics:
        """Metrics as (sum, count): ``reward`` over all values, ``reward/<name>`` over each reward's own numbers and
        ``reward/<name>/seconds`` per completion it was asked for, ``reward/no_answer`` as a share of all completions;
        and, where there were any, as shares of all completions too: ``reward/<name>/<status>`` for what was not scored,
        ``reward/<name>/none`` (no number), ``reward/none`` (no value) and ``reward/none/<status>``."""
        scores = [score for group in scored for score in group.scores]
        n = float(len(scores))
        values = [score.value for score in scores if score.value is not None]
        metrics = {"reward": (sum(values), float(len(values)))}
        for name in self.names:
            parts = [part for score in scores if (part := score.parts.get(name)) is not None]
            statuses = Counter(status for score in scores if (status := score.statuses.get(name)))
            asked = len(scores) - statuses["not_applicable"]
            metrics[f"reward/{name}"] = (sum(parts), float(len(parts)))
            seconds = sum(s.part_seconds.get(name, 0.0) for s in scores)
            metrics[f"reward/{name}/seconds"] = (seconds, float(asked))
            if len(parts) < n:
                metrics[f"reward/{name}/none"] = (n - len(parts), n)
            metrics |= {
                f"reward/{name}/{status}": (float(count), n)
                for status, count in sorted(statuses.items())
                if status in ("no_answer", *FAILED)
            }
        statuses = Counter(score.status for score in scores)
        metrics["reward/no_answer"] = (float(statuses["no_answer"]), n)
        if len(values) < n:
            metrics["reward/none"] = (n - len(values), n)
            lacking = Counter(score.status for score in scores if score.value is None)
            metrics |= {f"reward/none/{status}": (float(count), n) for status, count in sorted(lacking.items())}
        return metrics


def _unused(config: RewardConfig) -> list[str]:
    """Settings of functions that something else has been given."""
    if not config.model and is_file_spec(config.name):
        return []
    defaults = {"calls": "step", "timeout_s": FUNCTION_SECONDS, "on_failure": "abort"}
    what = "a reward model" if config.model else "a built-in kind, which has limits of its own"
    return [
        f"{key}: got {getattr(config, key)!r}, but it is for functions in files; this is {what}: leave it out"
        for key, default in defaults.items()
        if getattr(config, key) != default
    ]


def _set_problems(configs: Sequence[RewardConfig], loaded: Sequence[Reward]) -> list[str]:
    """What is wrong with the rewards together."""
    if not configs:
        return [f"rewards: none given; built in are {', '.join(KINDS)}, or path/to/file.py:function"]
    problems = []
    if all(config.weight == 0 for config in configs):
        problems.append("rewards: every weight is 0, so that nothing could be learned; give one a weight")
    if all(config.gate for config in configs) and len(configs) > 1:
        problems.append("rewards: every reward is a gate, so that there is nothing that they let through")
    names = [reward.name for reward in loaded]
    for i, reward in enumerate(loaded):
        others = [name for name in names if name != reward.name]
        if reward.verify_with and reward.verify_with not in others:
            problems.append(
                f"rewards[{i}].verify_with: got {reward.verify_with!r}, accepts another reward of this recipe: "
                f"{', '.join(others) or 'there is none; add one, with weight = 0 if it is only to be watched'}"
            )
    return problems


def _after(reward: Reward) -> bool:
    """Whether a built-in asks what another reward said."""
    return reward.function is None and reward.model is None and "correct" in KINDS[reward.kind].from_row


def _lacks(function: UserFunction, columns: Iterable[str]) -> bool:
    have = set(columns)
    return not function.verl and any(name not in have for name in function.required)
