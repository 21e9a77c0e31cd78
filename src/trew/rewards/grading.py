"""Grades groups in two parts: what can be graded as soon as a group is finished, and what needs the whole step."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..types import Group, Rollout, ScoredGroup
from .builtin.kinds import KINDS, Kind, graded, graded_together
from .combine import FAILED, Reward
from .user.functions import Sample
from .verdict import Verdict

if TYPE_CHECKING:
    from .reward_set import RewardSet

NOT_APPLICABLE = Verdict(None, "not_applicable")
OTHER_SET = Verdict(None, "other_set")
Verdicts = dict[str, list[Verdict]]
"""The verdicts on one group: by reward name, one per completion."""
Grader = Callable[[Kind, Sequence[tuple[str, Any, Mapping[str, Any]]]], list[Verdict]]
"""Grades (completion, gold, arguments) with a built-in kind."""
AT_ONCE = 256
"""Completions that are graded in one call at most, where so many wait."""


def arguments(reward: Reward, group: Group) -> list[tuple[str, Any, Mapping[str, Any]]]:
    """Returns (completion, gold, arguments) for each rollout; empty if the built-in does not apply to the row."""
    kind = KINDS[reward.kind]
    found = kind.gold(group.prompt.columns) if reward.serves(group.prompt) else None
    if found is None:
        return []
    gold, row = found
    # The row's arguments win over the recipe's, the rollout's over both.
    return [(c.text, gold, {**reward.args, **row, **_own(kind.from_row, c)}) for c in group.rollouts]


def grade_groups(reward: Reward, groups: Sequence[Group], grader: Grader = graded_together) -> list[list[Verdict]]:
    """Grades groups with a built-in, all in one call, so that a kind with workers can grade them side by side."""
    kind = KINDS[reward.kind]
    rows = [arguments(reward, group) for group in groups]
    items = [item for row in rows for item in row]
    left = iter(grader(kind, items))
    return [
        [next(left) for _ in row] if row else not_judged(reward, group) for group, row in zip(groups, rows, strict=True)
    ]


def not_judged(reward: Reward, group: Group) -> list[Verdict]:
    """The verdicts on a group that a reward does not apply to."""
    return [NOT_APPLICABLE if reward.serves(group.prompt) else OTHER_SET] * len(group.rollouts)


def failure(reward: Reward, groups: Sequence[Group], rows: Sequence[Sequence[Verdict]]) -> str:
    """Describes the first failure among a reward's verdicts, and counts them; empty if there is none.

    A score keeps a verdict's status alone, which does not tell what to repair. An episode that failed is no failure of
    a reward.
    """
    judged = [
        (group.prompt, rollout, verdict)
        for group, row in zip(groups, rows, strict=True)
        for rollout, verdict in zip(group.rollouts, row, strict=True)
        if verdict.status not in ("not_applicable", "other_set")
    ]
    failed = [each for each in judged if each[2].status in FAILED and each[2].status != "environment_error"]
    if not failed:
        return ""
    prompt, rollout, first = failed[0]
    counted = f"{len(failed)} of {len(judged)} completions have no value for it"
    return (
        f"reward {reward.name!r}: {first.status}: {first.detail or 'no reason is known'}; for "
        f"{Sample(prompt, rollout.text, ())}. {counted}"
    )


def _own(names: Sequence[str], rollout: Rollout) -> dict[str, Any]:
    """Returns the arguments that come from the rollout itself."""
    known: dict[str, Callable[[], Any]] = {
        "length": lambda: len(rollout),
        "token_ids": lambda: rollout.token_ids[rollout.sampled],  # not what an environment said
        "turn_lengths": lambda: [len(turn.token_ids) for turn in rollout.turns],
        "episode": lambda: rollout,
    }
    return {name: known[name]() for name in names if name in known}


def grade_after(reward: Reward, group: Group, judged: Sequence[Verdict]) -> list[Verdict]:
    """Grades with a kind that takes ``correct``: whether the reward of the prompt's data set that says what is correct
    gave 1 or more in ``judged``.

    A completion that it did not score gets no score here either, with the same status.
    """
    if not reward.serves(group.prompt):
        return not_judged(reward, group)
    kind = KINDS[reward.kind]
    verdicts = []
    for completion, verdict in zip(group.rollouts, judged, strict=True):
        if verdict.score is None:
            verdicts.append(Verdict(None, verdict.status, detail=verdict.detail))
        else:
            own = {**_own(kind.from_row, completion), "correct": verdict.score >= 1}
            verdicts.append(graded(kind, completion.text, None, {**reward.args, **own}))
    return verdicts


class Grading:
    """Grades the groups of one step in a thread as they finish, while generation continues.

    ``add`` takes a group by its number. ``finish`` grades the groups that were not added, runs the rewards that need
    the whole step, and returns all scores in the groups' order; it also raises an error of the thread. Verdicts do not
    depend on when they are made, so the scores equal ``RewardSet.score``'s. Leaving the ``with`` block drops the rest.
    """

    def __init__(self, rewards: RewardSet, *, step: int = 0) -> None:
        self._rewards, self._step = rewards, step
        self._todo: queue.SimpleQueue[tuple[int, Group] | None] = queue.SimpleQueue()
        self._done: dict[int, tuple[Group, Verdicts]] = {}
        self._error: BaseException | None = None
        self._stopped = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Grading:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # Before the wait: what is still in the queue is not graded.
        self._stopped = True
        if kind is None:
            self._wait()
        else:
            self._todo.put(None)  # no join: an error or interrupt must not wait for a call in progress

    def add(self, number: int, group: Group) -> None:
        """Takes group ``number`` of the step; returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trew-grading", daemon=True)
            self._thread.start()
        self._todo.put((number, group))

    def finish(self, groups: Sequence[Group], *, progress: Callable[[int], None] | None = None) -> list[ScoredGroup]:
        """Returns the scores of all groups of the step."""
        self._wait()
        if self._error is not None:
            raise self._error
        known: list[Verdicts | None] = [None] * len(groups)
        for number, (group, verdicts) in self._done.items():
            # Compared by identity: the verdicts fit this very group, not another one under the same number.
            if group is groups[number]:
                known[number] = verdicts
        return self._rewards.score(groups, step=self._step, known=known, progress=progress)

    def _run(self) -> None:
        while (item := self._todo.get()) is not None:
            if self._stopped or self._error is not None:  # keeps draining up to the final None, without grading
                continue
            try:
                taken = self._taken(item)
                verdicts = self._rewards.group_verdicts([group for _, group in taken], step=self._step)
                for (number, group), found in zip(taken, verdicts, strict=True):
                    self._done[number] = (group, found)
            except BaseException as error:  # raised by finish, in the thread that can act on it
                self._error = error

    def _taken(self, first: tuple[int, Group]) -> list[tuple[int, Group]]:
        """A group and those that wait behind it, so that all workers have something to do."""
        taken = [first]
        while sum(len(group.rollouts) for _, group in taken) < AT_ONCE:
            try:
                item = self._todo.get_nowait()
            except queue.Empty:
                break
            if item is None:  # the end is for the loop
                self._todo.put(None)
                break
            taken.append(item)
        return taken

    def _wait(self) -> None:
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join()
            self._thread = None
