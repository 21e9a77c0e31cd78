"""Several rewards over whole groups of completions: each scored on its own, then one value per completion."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..config import RewardConfig
from ..errors import RewardError
from ..types import Group, Metrics, Prompt, Score, ScoredGroup
from ..utils import ray_cluster, secrets
from . import gold_checks
from .builtin.kinds import KINDS, graded_together
from .combine import Reward, all_open, combined, one_by_one
from .gold_checks import Bar
from .grading import AT_ONCE, Grader, Grading, Verdicts, arguments, failure, grade_after, grade_groups, not_judged
from .isolation.pool import run_together
from .load import load_rewards
from .metrics import summary
from .remote.hosts import FunctionsOnHosts, RemoteHost, RewardHosts
from .remote.match import described
from .remote.ray_hosts import ON_RAY, RayRewardHosts
from .user.functions import Sample, UserFunction
from .user.process import Process
from .user.session import FunctionHost
from .user.verdicts import Ask, verdicts_of
from .verdict import NOT_PLAYED, Verdict

if TYPE_CHECKING:
    from .model.reward_model import ModelReward


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
    * An episode whose environment failed (``environment_error``) is judged by no reward.
    * Where no reward that counts gave a number there is no value.

    ``host`` runs users' functions: a separate process unless another host is given.
    """

    def __init__(self, rewards: Sequence[Reward], *, host: FunctionHost | None = None):
        self.rewards = tuple(rewards)
        self.host = host
        self._hosts: RewardHosts | None = None
        self._columns: frozenset[str] = frozenset()  # of the whole data set, once check_golds has seen it
        self._warnings: list[str] = []
        self._told: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards' names as they appear in ``Score.parts`` and in metrics, in the recipe's order."""
        return tuple(reward.name for reward in self.rewards)

    @property
    def judges(self) -> tuple[Reward, ...]:
        """The rewards, those first that say which completions are correct."""
        return tuple(sorted(self.rewards, key=lambda reward: reward.rank))  # stable: else in the recipe's order

    def lets_through(self, score: Score) -> bool:
        """Whether no gate is closed: behind one nothing is rewarded."""
        return all_open(self.rewards, [score.parts.get(name) for name in self.names])

    @classmethod
    def from_config(cls, rewards: Sequence[RewardConfig], *, host: FunctionHost | None = None) -> RewardSet:
        """Loads every function and checks every argument; raises ConfigError with all problems at once.

        >>> RewardSet.from_config([RewardConfig(name="gsm8k"), RewardConfig(name="format", weight=0.1)]).names
        ('gsm8k', 'format')
        >>> RewardSet.from_config([RewardConfig(name="gsm8k", args={"mood": "strict"})])
        Traceback (most recent call last):
            ...
        trew.errors.ConfigError: rewards[0] 'gsm8k': args.mood: unknown argument (did you mean 'mode'?);
        accepts mode, thinking
        """
        loaded, host = load_rewards(rewards, host)
        return cls(loaded, host=host)

    @property
    def code(self) -> list[str]:
        """The files whose code these rewards run, one line for each user's function."""
        return [f"reward {r.name!r} runs the code in {r.function.file}" for r in self.rewards if r.function is not None]

    def load(self, *, device: str = "", decode: Callable[[Sequence[int]], str] | None = None) -> None:
        """Loads the weights of reward models; raises ModelError. ``decode`` makes text of the policy's tokens."""
        for reward in self.rewards:
            if reward.model is not None:
                reward.model.load(device=device, decode=decode)

    def use_hosts(self, addresses: Sequence[str], specs: Sequence[RewardConfig]) -> None:
        """Has reward hosts grade from here on: built-ins that have workers, and functions. What they cannot be asked is
        graded here.

        ``addresses`` are the setting ``cluster.reward_hosts``: of hosts that run, with the token in the environment
        variable TREW_REWARDS_TOKEN; or "ray", for hosts that are started on each node of the Ray cluster with
        ``specs``, the settings of these rewards. Raises ConfigError where a host cannot be reached, or grades by other
        rules or files."""
        own = described(self.rewards)

        def tell(text: str) -> None:
            self.warn(text, text)

        if tuple(addresses) == ON_RAY:
            hosts: RewardHosts = RayRewardHosts(ray_cluster.connect(), specs, own=own, tell=tell)
        else:
            token = secrets.token("TREW_REWARDS_TOKEN")
            hosts = RewardHosts([RemoteHost(address, token) for address in addresses], own=own, tell=tell)
        hosts.connect()
        self._hosts = hosts
        if self.host is not None:
            self.host = FunctionsOnHosts(self.host, hosts)

    def close(self) -> None:
        """Ends the process of users' functions; a later call starts it again. Reward hosts are not asked any more."""
        if self._hosts is not None:
            self._hosts.close()
        if self.host is not None:
            self.host.close()

    def take_warnings(self) -> list[str]:
        """Returns the failures since the last call that did not end the run, one line each.

        A failure that repeats is reported the first, second, fourth, eighth … time.
        """
        with self._lock:
            taken, self._warnings = self._warnings, []
        return taken

    def state(self) -> dict[str, Any]:
        """The state that later warnings depend on, as plain values."""
        with self._lock:
            return {"told": dict(self._told), "waiting": list(self._warnings)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continues from what :meth:`state` returned."""
        with self._lock:
            self._told, self._warnings = Counter(state["told"]), list(state["waiting"])

    def warn(self, name: str, text: str) -> None:
        """Adds a failure to those that :meth:`take_warnings` returns; ``name`` is what repeats."""
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
        known: Sequence[Verdicts | None] = (),
        progress: Callable[[int], None] | None = None,
    ) -> list[ScoredGroup]:
        """Scores every completion of every group; calls ``progress`` with the number of newly scored completions.

        ``known`` has what :meth:`group_verdicts` returned for some groups already. Raises RewardError if a function
        fails, or needs columns that the data lack.
        """
        # Copies: more is added below, and ``known`` is the caller's.
        found: list[Verdicts] = [{**(known[g] or {})} if g < len(known) else {} for g in range(len(groups))]
        self._add_group_verdicts(groups, found, step, progress or (lambda _: None))
        self._add_step_verdicts(groups, found, step)
        # Of all groups at once, so that warnings do not depend on which of them were graded early.
        for reward in self.rewards:
            # Functions warn when they are called, and kinds that ask for correctness repeat another reward's failure.
            if reward.is_builtin and not _needs_correctness(reward):
                rows = [verdicts[reward.name] for verdicts in found]
                if told := failure(reward, groups, rows):
                    self.warn(f"reward {reward.name!r}", told)
        return [self._combined(group, verdicts) for group, verdicts in zip(groups, found, strict=True)]

    def _add_group_verdicts(
        self, groups: Sequence[Group], found: list[Verdicts], step: int, progress: Callable[[int], None]
    ) -> None:
        """Judges the groups without verdicts, in batches."""
        waiting = [g for g in range(len(groups)) if not found[g]]
        for group, verdicts in zip(groups, found, strict=True):
            if verdicts:
                progress(len(group.rollouts))
        for batch in _batches(waiting, groups):
            for g, verdicts in zip(batch, self.group_verdicts([groups[g] for g in batch], step=step), strict=True):
                found[g] = verdicts
                progress(len(groups[g].rollouts))

    def _combined(self, group: Group, verdicts: Verdicts) -> ScoredGroup:
        columns = [_of_played(group, verdicts[name]) for name in self.names]
        lengths = [len(rollout.token_ids) for rollout in group.rollouts]
        return ScoredGroup(group, combined(self.rewards, columns, lengths=lengths))

    def grading(self, *, step: int = 0) -> Grading:
        """Scores groups of a step while others are still generated: see :class:`Grading`."""
        return Grading(self, step=step)

    def group_verdicts(self, groups: Sequence[Group], *, step: int = 0) -> list[Verdicts]:
        """Verdicts that need no other group: those of built-ins, and of functions that are called once per group.

        Safe in any thread.
        """
        found: list[Verdicts] = [{} for _ in groups]
        for number, reward in enumerate(self.rewards):
            if reward.is_builtin and not _needs_correctness(reward):
                for g, verdicts in enumerate(grade_groups(reward, groups, self._grader(number))):
                    found[g][reward.name] = verdicts
        per_group = [r for r in self.rewards if r.function is not None and r.calls == "group"]
        # One group after the other here, where functions have one process; side by side on several hosts.
        size = len(self._hosts.hosts) if self._hosts else 1
        called = run_together(lambda group: self._called(per_group, [group], step), groups, size=size)
        for g, rows in enumerate(called):
            found[g] |= {name: of_groups[0] for name, of_groups in rows.items()}
        return found

    def _grader(self, number: int) -> Grader:
        """Who grades with a built-in: hosts, if there are any and it takes more than sending the text."""
        hosts, kind = self._hosts, self.rewards[number].kind
        if hosts is None or KINDS[kind].grade_many is None:
            return graded_together
        return lambda _, items: hosts.grade(number, kind, items)

    def _add_step_verdicts(self, groups: Sequence[Group], found: list[Verdicts], step: int) -> None:
        """Adds to ``found`` the verdicts that need all groups of the step, or other rewards' verdicts."""
        per_step = [r for r in self.rewards if r.function is not None and r.calls == "step"]
        rows = self._called(per_step, groups, step)
        for reward in self.rewards:
            if reward.model is not None:
                rows[reward.name] = _by_model(reward, reward.model, groups)
        for name, of_groups in rows.items():
            for g, verdicts in enumerate(of_groups):
                found[g][name] = verdicts
        # Last: these depend on the verdict of another reward, which may have come only now.
        judges = [reward for reward in self.judges if not _needs_correctness(reward)]
        for reward in self.rewards:
            if _needs_correctness(reward):
                for group, verdicts in zip(groups, found, strict=True):
                    judge = next(r.name for r in judges if r.serves(group.prompt))
                    verdicts[reward.name] = grade_after(reward, group, verdicts[judge])

    def _called(self, rewards: Sequence[Reward], groups: Sequence[Group], step: int) -> dict[str, list[list[Verdict]]]:
        """Verdicts of users' functions by name, group and completion; not applicable if a function was not called."""
        columns = self._columns | gold_checks.columns_of(group.prompt for group in groups)
        asks = {reward.name: self._ask(reward, groups, columns) for reward in rewards}
        judged = self._judged({name: ask for name, ask in asks.items() if ask.samples}, step)
        return {r.name: _by_group(r, groups, judged.get(r.name, ())) for r in rewards}

    def _ask(self, reward: Reward, groups: Sequence[Group], columns: frozenset[str]) -> Ask:
        """The call of a function: with the completions of the groups that it applies to.

        Raises RewardError if it applies to none, and ``columns`` show that it never could.
        """
        function = reward.function
        assert function is not None
        own = [group for group in groups if reward.serves(group.prompt)]
        served = [group for group in own if function.applies(group.prompt)]
        if own and not served:
            # The data set's columns decide once they are known: rows that it serves may come in another step. Until
            # then a step's groups must do; a single group says nothing, since the others may have the column.
            hopeless = _lacks(function, columns) if self._columns else reward.calls == "step"
            if hopeless:
                raise RewardError(f"{function.who} {function.missing(columns)}")
        samples = [
            Sample(g.prompt, c.text, c.token_ids, len(c.token_ids), c.conversation, len(c.turns[0].messages))
            for g in served
            for c in g.rollouts
        ]
        return Ask(function, samples, reward.timeout_s, reward.on_failure)

    def _judged(self, asks: Mapping[str, Ask], step: int) -> dict[str, list[Verdict]]:
        """Calls every function that has something to judge; verdicts by name, in the order of the samples."""
        if not asks:
            return {}
        assert self.host is not None
        rows = verdicts_of(
            self.host, list(asks.values()), step=step, warn=lambda function, text: self.warn(function.who, text)
        )
        return dict(zip(asks, rows, strict=True))

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
        # Alone, whatever batch it was judged in before.
        again = self.score([scored.group], step=step)[0].scores
        third = None
        problems = []
        for reward in self.rewards:
            if reward.model is not None:
                continue
            differ = _differing(reward.name, scored.scores, again, range(len(again)))
            if differ and reward.function is not None and reward.calls == "step":
                # Two calls with this group alone: if they agree, the batch made the difference and not chance.
                third = third or self.score([scored.group], step=step)[0].scores
                differ = _differing(reward.name, third, again, differ)
            if differ:
                i = differ[0]
                sample = Sample(scored.group.prompt, scored.group.rollouts[i].text, ())
                problems.append(
                    f"reward {reward.name!r} judges the same completion differently from call to call: "
                    f"{scored.scores[i].parts[reward.name]}, then {again[i].parts[reward.name]}, for {sample}. Groups "
                    "are compared by chance then; give it a fixed seed, no clock, and no set whose order matters"
                )
        return problems

    def check_golds(self, prompts: Iterable[Prompt], *, bar: Bar | None = None, sets: Sequence[str] = ()) -> list[str]:
        """Everything wrong with the data for these rewards, one line per row and reward; empty when all is well.

        Golds of built-in rewards must be readable and score 1 against themselves. A reward that applies to no row at
        all is reported too: it would train nothing, silently. Rows are counted from 1 in the order of ``prompts``.
        ``bar(name, total)`` shows progress where golds are run or parsed, which can take a minute. ``sets``: the names
        of several data sets; a reward must then apply to some row of each set that it is for.
        """
        prompts = list(prompts)
        self._columns = gold_checks.columns_of(prompts)
        problems = gold_checks.bad_golds(self.rewards, prompts, bar=bar)
        return problems + gold_checks.serving_problems(self.rewards, prompts, sets=sets)

    def column_notes(self, prompts: Sequence[Prompt]) -> list[str]:
        """One line about the prompts that no reward applies to, such as rows without a gold among rows with one (what
        needs no gold, like format and length, judges no answer and does not count), and one about columns that
        functions cannot see."""
        return gold_checks.unserved_notes(self.rewards, prompts) + gold_checks.hidden_notes(self.rewards, prompts)

    def thought_notes(self) -> list[str]:
        """For prompts that end inside a thought: one line about the built-ins that would take an unfinished thought for
        an answer, one about the layouts that ask for the thought to be begun again, and one about reward models."""
        return gold_checks.thought_notes(self.rewards)

    def column_problems(self, prompts: Sequence[Prompt]) -> list[str]:
        """Rewards that serve none of ``prompts``; their golds are not looked at. For rows that have completions."""
        self._columns = gold_checks.columns_of(prompts)
        return gold_checks.serving_problems(self.rewards, prompts)

    def summary(self, scored: Sequence[ScoredGroup]) -> Metrics:
        """Metrics of a step: see :func:`~trew.rewards.metrics.summary`."""
        return summary(self.names, scored)


def _of_played(group: Group, verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts on a group, none on an episode whose environment failed: what it said until then is no answer."""
    pairs = zip(group.rollouts, verdicts, strict=True)
    return [NOT_PLAYED if rollout.status == "failed" else verdict for rollout, verdict in pairs]


def _differing(name: str, one: Sequence[Score], other: Sequence[Score], where: Iterable[int]) -> list[int]:
    return [i for i in where if one[i].parts[name] != other[i].parts[name]]


def _needs_correctness(reward: Reward) -> bool:
    """Whether a built-in needs the verdict of another reward."""
    return reward.is_builtin and "correct" in KINDS[reward.kind].from_row


def _batches(waiting: Iterable[int], groups: Sequence[Group]) -> Iterator[list[int]]:
    """Groups, by their places, in batches of at least :data:`AT_ONCE` completions; the last one may have fewer."""
    batch: list[int] = []
    count = 0
    for g in waiting:
        batch.append(g)
        count += len(groups[g].rollouts)
        if count >= AT_ONCE:
            yield batch
            batch, count = [], 0
    if batch:
        yield batch


def _by_group(reward: Reward, groups: Sequence[Group], verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """A function's verdicts, dealt out to the completions of the groups that it applies to."""
    left = iter(verdicts)
    return [
        [next(left) for _ in group.rollouts] if gold_checks.applies(reward, group.prompt) else not_judged(reward, group)
        for group in groups
    ]


def _by_model(reward: Reward, model: ModelReward, groups: Sequence[Group]) -> list[list[Verdict]]:
    """A reward model's verdicts; it does not see groups of other data sets."""
    served = [group for group in groups if reward.serves(group.prompt)]
    scored = iter(model.score(served) if served else ())
    return [next(scored) if reward.serves(group.prompt) else not_judged(reward, group) for group in groups]


def _lacks(function: UserFunction, columns: Iterable[str]) -> bool:
    have = set(columns)
    return not function.verl and any(name not in have for name in function.required)
