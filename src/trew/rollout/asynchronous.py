"""Asynchronous rollouts: groups are generated and graded while the learner computes, within a bound on their age.

The :class:`.Ledger` decides what may be asked for and what a step takes; this drives an engine by it. A group is stored
as soon as it is complete, so that it survives the process; its scores are made again from it where a run is resumed.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from ..errors import CheckpointError, EngineError
from ..types import Group, Prompt, Rollout, ScoredGroup, Span
from . import codec
from .engine import Engine, Finished, Lost, Request
from .generate import TRIES
from .ledger import Account, Ledger, Stored, Ticket
from .shared import WithinSteps
from .source import StepRollouts
from .sync import SyncRollouts, has_both_outcomes, sampling

LOOK_S = 0.5
"""The longest wait for completions after which the thread that gathers them looks whether it should end."""
BATCH_S = 0.1
"""How long a complete group waits at most for others, to be stored with them: a sync of the disk costs as much CPU time
as several groups. A step that could go on with it does not wait."""


class LedgerStore(Protocol):
    """Keeps the ledger's entries and finished groups; :class:`~trew.runs.journal.Journal` keeps them in files."""

    def lines(self) -> Sequence[str | bytes]: ...

    def write(self, line: str) -> None: ...

    def flush(self) -> None: ...

    def put(self, groups: Sequence[bytes]) -> list[Stored]: ...

    def get(self, stored: Stored) -> bytes: ...

    def keep(self, needed: Collection[str]) -> None: ...


class AsyncRollouts(SyncRollouts):
    """Rollouts of weights that are at most ``cluster.staleness`` = S published versions old.

    Prompts, seeds and their order are those of :class:`.SyncRollouts`; with S = 0 and an engine that is reproducible,
    so are the rollouts. Under dynamic sampling, a group without signal is replaced by another that is finished, or by a
    fresh prompt, at most ``rollout.refills`` times per step.

    ``ahead`` is the engine of these groups, ``engine`` that of what is waited for (the greedy baseline): two views of
    one. ``keeper`` keeps the ledger and finished groups; ``covered`` gives the step of the newest complete checkpoint,
    which needs no groups of before, or -1; ``idle`` gives the seconds in which the engine had nothing to do. The engine
    is polled by :meth:`next` while it waits, or after :meth:`gather_in_background` by a thread until :meth:`close`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        ahead: Engine,
        keeper: LedgerStore,
        covered: Callable[[], int] = lambda: -1,
        idle: Callable[[], float] = lambda: 0.0,
        **settings: Any,
    ) -> None:
        super().__init__(engine, **settings)
        c = self.config
        self._ahead, self._keeper, self._covered, self._idle = ahead, keeper, covered, WithinSteps(idle)
        self.ledger = Ledger(
            prompts=c.rollout.prompts, staleness=c.cluster.staleness, steps=c.steps, journal=keeper.write
        )
        self.ledger.read(keeper.lines(), name="ledger.jsonl")
        self._mark: int | None = 0  # of the ledger, to go on from in the next step; None once it has
        self._changed = threading.Condition()  # of everything from here on, and of the ledger
        self._asked: dict[int, dict[int, Rollout]] = {}  # running tickets: the rollouts of their group that are there
        self._prompts: dict[int, Prompt] = {}  # of tickets that are open
        self._held: list[int] = []  # running tickets whose groups have tokens of weights that trained() will tell of
        self._complete: list[int] = []  # running tickets whose groups are there, and not stored yet
        self._since = 0.0  # when the first of these was complete
        self._missing: int | None = None  # finished tickets without which a step cannot go on; None while none waits
        self._ready: dict[int, Group] = {}  # finished tickets
        self._early: dict[int, Future[Any]] = {}  # the verdicts on them that need no other group
        self._losses: Counter[int] = Counter()
        self._uids: dict[int, set[str]] = {}  # of the tickets whose draws are those of a step
        self._taken: list[int] = []  # by the step that is being trained
        self._waited, self._passed_over = 0.0, 0  # in this step
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._grader = ThreadPoolExecutor(1, thread_name_prefix="trew-grading")

    # ---- the protocol

    def next(self, step: int) -> StepRollouts:
        # Only waiting and scoring may be interrupted: what the ledger says must be what is done.
        self._now = None
        self._idle.begin()
        self._begin(step)
        kept, sampled = self._collect(step)
        baselines = None
        if kept and "baselines" in self.objective.needs:
            with self.interruptible():
                # Not the groups' own: their uids may have got a number since (_with_own_uids).
                asked = [self._prompts[number] for number in self._taken]
                baselines = self._baselines(kept, asked, step)
        self._now = StepRollouts(tuple(kept), tuple(sampled), baselines, self._facts(step))
        return self._now

    def trained(self, step: int, version: int) -> None:
        """Enters what the step used up, and asks for what may be asked for with its weights."""
        self._idle.end()
        with self._changed:
            if self._mark is not None:  # next() failed before it had begun
                return
            self._learn()  # before more is asked for: the draws go by what is known
            taken, self._taken = self._taken, []
            # An unchanged version: the policy learned nothing from the step's groups, but a critic may have.
            unused = taken if version == self.ledger.version_at(self.ledger.published) else []
            for number in unused:
                self.ledger.drop(number, why=f"step {step} made no update of the policy", replaced=False)
            self.ledger.train(step, version=version, numbers=[n for n in taken if n not in unused])
            for number in taken:
                self._forget(number)
            # Their versions are known to the ledger from now on.
            held, self._held = self._held, []
            self._store(held)
            self._ask(step=step + 1)
            self._keeper.flush()
            self._keeper.keep(self.ledger.forget(self._covered()))
            self._uids = {s: uids for s, uids in self._uids.items() if s > step}

    def state(self) -> dict[str, Any]:
        with self._changed:
            self._keeper.flush()
            # Before this process has begun a step, the mark is still the one that it was given.
            mark = self.ledger.lines if self._mark is None else self._mark
            return super().state() | ({"ledger": mark} if mark >= 0 else {})

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on from a mark of the ledger in the next step. Raises CheckpointError where the ledger lacks it."""
        super().load_state(state)
        with self._changed:
            # A checkpoint of synchronous steps knows no ledger: what was entered by then is told by its step alone.
            mark = int(state.get("ledger", -1))
            if mark > self.ledger.lines:
                raise CheckpointError(
                    f"ledger.jsonl: has {self.ledger.lines} lines, but had {mark} when the checkpoint was saved; put a "
                    "backup of it there"
                )
            self._mark, self._taken = mark, []

    def gather_in_background(self) -> None:
        """Gathers completions in a thread from now on."""
        self._thread = threading.Thread(target=self._gather_all, name="trew-rollouts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the threads; what is unfinished is asked for again when the run is resumed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        # Stored although no step waits: a resumed run need not generate them again.
        if self._mark is None and self._error is None:
            self._store(self._complete)
        self._grader.shutdown(wait=False, cancel_futures=True)
        if self._mark is None:
            self._keeper.flush()
            self._keeper.keep(self.ledger.forget(self._covered()))

    # ---- a step

    def _collect(self, step: int) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
        dynamic = self.objective.dynamic_sampling
        kept: list[ScoredGroup] = []
        sampled: list[ScoredGroup] = []
        rounds = 1 + (self.config.rollout.refills if dynamic else 0)
        # Round 0 takes a step's groups, each further one replaces those without signal.
        for attempt in range(rounds):
            missing = self.config.rollout.prompts - len(kept)
            numbers = self._chosen(step, missing, attempt=attempt) if missing else []
            if not numbers:
                break
            found = _with_own_uids(self._scored(numbers, step), numbers, beside=sampled)
            sampled += found
            for number, group in zip(numbers, found, strict=True):
                if dynamic and not has_both_outcomes(group, self.correct):
                    # Nothing would replace a group of the last round in this step.
                    self._drop(number, replaced=attempt + 1 < rounds)
                else:
                    kept.append(group)
                    self._taken.append(number)
        return kept, sampled

    def _chosen(self, step: int, most: int, *, attempt: int) -> list[int]:
        """The tickets that the step takes, once they are finished."""
        self.note("generating")
        start = time.monotonic()
        with self._changed:
            self._ask(step=step, attempt=attempt)
            while (numbers := self.ledger.choose(step, most=most, taken=self._taken)) is None:
                # Tells the gathering thread how much the step lacks: with that it stores at once (_store_due).
                self._missing = most + len(self._taken) - self.ledger.count_finished()
                if not self._store_due():
                    self._wait()
            self._missing = None
            self._passed_over += self.ledger.passed_over(numbers)
        self._waited += time.monotonic() - start
        return numbers

    def _scored(self, numbers: Sequence[int], step: int) -> list[ScoredGroup]:
        self.note("scoring")
        groups = [self._ready[number] for number in numbers]
        with self.interruptible():
            early = [self._early[number].result() if number in self._early else None for number in numbers]
            return self.rewards.score(groups, step=step, known=early)

    def _drop(self, number: int, *, replaced: bool) -> None:
        with self._changed:
            self.ledger.drop(number, why="no signal", replaced=replaced)
            self._forget(number)

    def _facts(self, step: int) -> dict[str, float]:
        """The metrics of a step: how old its groups are in published versions, and what it waited for."""
        with self._changed:
            # In published versions: the engine's newest weights before this step are of step - 1.
            ages = [step - 1 - self.ledger.accounts[number].oldest for number in self._taken]
        idle = self._idle.take()
        facts: dict[str, float] = {"waited_s": self._waited, "idle_s": idle, "passed_over": self._passed_over}
        if ages:
            facts |= {"age_mean": sum(ages) / len(ages), "age_max": max(ages)}
            facts |= {f"age/{age}": ages.count(age) / len(ages) for age in range(self.ledger.staleness + 1)}
        with self._changed:
            return facts | self.waited(self._ahead) | self.drawing.facts()

    # ---- asking

    def _ask(self, *, step: int, attempt: int = 0) -> None:
        """Asks for as many groups as there is room for: unfinished ones of before, then fresh prompts."""
        asked: list[Ticket] = []
        while self.ledger.room > 0:
            number = self.ledger.dormant
            if number is None:
                # A refill draws with the seeds of its step and attempt; other tickets belong to the steps to come.
                asked.append(self._issue(step if attempt else self.ledger.next_step, attempt))
            elif self._prompt_of(self.ledger.accounts[number].ticket):
                asked.append(self.ledger.again(number, why=self.ledger.accounts[number].why))
            else:
                self.ledger.drop(number, why="its prompt is not in the data any more", replaced=True)
        self._submit(asked)

    def _issue(self, step: int, attempt: int) -> Ticket:
        # Before the draw, which moves the position on.
        place = self.position
        [drawn] = self._draw(1, self._uids.setdefault(step, set()), step)
        ticket = self.ledger.issue(uid=drawn.prompt.uid, place=place, step=step, attempt=attempt, turn=drawn.turn)
        self._prompts[ticket.number] = drawn.prompt
        return ticket

    def _busy(self, taken: Iterable[str]) -> Iterable[str]:
        return (*taken, *self.ledger.open_uids())

    def _prompt_of(self, ticket: Ticket) -> Prompt | None:
        """The prompt of a ticket, with its uid; None where the data has another one in its place."""
        if ticket.number not in self._prompts:
            prompt = self.drawing.prompt(ticket.uid, ticket.place)
            if prompt is None:
                return None
            if prompt.uid != ticket.uid:  # a prompt that one step drew twice
                prompt = dataclasses.replace(prompt, uid=ticket.uid)
            self._prompts[ticket.number] = self.seeded(prompt, ticket.step)
        return self._prompts[ticket.number]

    def _submit(self, tickets: Sequence[Ticket]) -> None:
        if not tickets:
            return
        # Entries are on disk before the engine acts on them: a resumed run knows all that was asked for.
        self._keeper.flush()
        requests = []
        for ticket in tickets:
            self._asked[ticket.number] = {}
            how = sampling(self.config, ticket.step, ticket.attempt)
            prompt = self._prompts[ticket.number]
            requests += [Request(each, prompt, i, how) for i, each in enumerate(self._ids(ticket.number))]
        self._ahead.submit(requests)
        self._changed.notify_all()

    def _ids(self, number: int) -> list[str]:
        return [f"{number}/{sample}" for sample in range(self.config.rollout.completions)]

    # ---- gathering

    def _wait(self) -> None:
        """Waits until something may have changed; without a thread that gathers completions, gathers some."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._gather(None)
        else:
            with self.interruptible():
                self._changed.wait()

    def _gather_all(self) -> None:
        while self._error is None:
            with self._changed:
                self._changed.wait_for(lambda: self._is_generating() or self._closed)
                if self._closed:
                    return
            # Soon, while complete groups wait for others; else only to look whether it should end.
            self._gather(BATCH_S if self._complete else LOOK_S)

    def _is_generating(self) -> bool:
        """Whether the engine has requests of groups that are not complete."""
        return len(self._asked) > len(self._held) + len(self._complete)

    def _gather(self, timeout_s: float | None) -> None:
        """Takes in what the engine has finished or lost."""
        try:
            reports = self._ahead.poll(timeout_s)
            with self._changed:
                self._take_in(reports)
                self._store_due()
        except BaseException as error:  # raised by whoever waits, in the thread that can act on it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take_in(self, reports: Sequence[Finished | Lost]) -> None:
        lost = {_number(report): report.reason for report in reports if isinstance(report, Lost)}
        for report in reports:
            number = _number(report)
            if isinstance(report, Finished) and number not in lost:
                rollouts = self._asked[number]
                rollouts[int(report.id.partition("/")[2])] = report.rollout
                if len(rollouts) == self.config.rollout.completions:
                    self._since = self._since if self._complete else time.monotonic()
                    self._complete.append(number)
        self._repeat(lost)

    def _store_due(self) -> bool:
        """Stores complete groups if a step may go on with them, or once they have waited for long enough; returns
        whether it did."""
        awaited = self._missing is not None and len(self._complete) >= self._missing
        # Without a thread nobody would come back to store them.
        late = self._thread is None or not self._is_generating() or time.monotonic() >= self._since + BATCH_S
        if not self._complete or not (awaited or late):
            return False
        complete, self._complete = self._complete, []
        self._store(complete)
        self._changed.notify_all()
        return True

    def _repeat(self, lost: Mapping[int, str]) -> None:
        """Asks for the whole groups again of which completions were lost. Raises EngineError after too many losses."""
        tickets = []
        for number, reason in lost.items():
            self._losses[number] += 1
            if self._losses[number] >= TRIES:
                uid = self._prompts[number].uid
                raise EngineError(f"the engine lost completions of prompt {uid!r} {TRIES} times: {reason}")
            # Its other requests may still run, and the whole group is asked for again.
            self._ahead.cancel(self._ids(number))
            tickets.append(self.ledger.again(number, why=reason))
        self._submit(tickets)

    def _store(self, numbers: Sequence[int]) -> None:
        """Stores complete groups and enters them in the ledger as finished."""
        # Servers have new weights before trained() tells the ledger of them.
        early = [n for n in numbers if not all(map(self.ledger.knows, _versions(self._asked[n].values())))]
        self._held += early
        numbers = [number for number in numbers if number not in early]
        if not numbers:
            return
        for number in numbers:
            found = self._asked.pop(number)
            # Completions finish in any order; a group lists them by sample number, so that it is reproducible.
            self._ready[number] = Group(self._prompts[number], tuple(found[sample] for sample in range(len(found))))
        stored = self._keeper.put([_encoded(self._ready[number]) for number in numbers])
        for number, where in zip(numbers, stored, strict=True):
            versions = _versions(self._ready[number].rollouts)
            self.ledger.finish(number, versions=versions, stored=where)
            if self.ledger.accounts[number].state == "finished":
                self._grade(number)
            else:  # older than the bound allows by now
                # Its ticket is dormant again.
                del self._ready[number]
        self._keeper.flush()
        if self.ledger.dormant is not None:
            self._ask(step=self.ledger.next_step)

    def _grade(self, number: int) -> None:
        if self.config.rollout.overlap:
            step, group = self.ledger.accounts[number].ticket.step, self._ready[number]
            self._early[number] = self._grader.submit(lambda: self.rewards.group_verdicts([group], step=step)[0])

    def _forget(self, number: int) -> None:
        self._ready.pop(number, None)
        self._early.pop(number, None)
        self._losses.pop(number, None)
        self._prompts.pop(number, None)

    # ---- going on where another process, or an interrupt, left off

    def _begin(self, step: int) -> None:
        with self._changed:
            self._taken, self._waited, self._passed_over, self._missing = [], 0.0, 0, None
            if self._mark is None:
                return
            # ---- what this process has asked for and not stored is given up
            self._ahead.cancel([each for number in self._asked for each in self._ids(number)])
            self._asked.clear()
            self._held.clear()
            self._complete.clear()
            mark = self.ledger.mark_after(step - 1) if self._mark < 0 else self._mark
            self.ledger.begin(step=step - 1, version=self._ahead.version, mark=mark)
            self._mark = None
            self.position = max(self.position, self.ledger.next_place)
            # The ledger's tickets may be ahead of the checkpoint: their prompts are drawn already.
            for account in self.ledger.accounts.values():
                # Draws of earlier processes count: no uid twice in a step, and a curriculum goes on behind them.
                self._uids.setdefault(account.ticket.step, set()).add(account.ticket.uid)
                self.drawing.drew(account.ticket.place, account.ticket.uid, account.ticket.turn)
            # ---- what is finished comes back from the store
            for account in self.ledger.finished():
                if account.ticket.number not in self._ready:
                    self._recover(account)
            self._keeper.flush()
            self._keeper.keep(self.ledger.forget(self._covered()))

    def _recover(self, account: Account) -> None:
        """Reads a finished group from the store; asks for it again if it cannot be read."""
        number, prompt = account.ticket.number, self._prompt_of(account.ticket)
        if prompt is None:
            self.ledger.drop(number, why="its prompt is not in the data any more", replaced=True)
            return
        try:
            assert account.stored is not None
            group = codec.decode(self._keeper.get(account.stored))
        except CheckpointError as error:
            self._submit([self.ledger.again(number, why=str(error))])
            return
        self._ready[number] = Group(prompt, tuple(self._renamed(account, group)))
        self._grade(number)

    def _renamed(self, account: Account, group: Group) -> Iterator[Rollout]:
        """The rollouts of a group, with other versions for weights that the run has left behind: their numbers are
        given a second time, to other weights."""
        now = self.ledger.version_at(self.ledger.published)
        names = {
            # Weights of an abandoned branch count as far behind the common step as they were ahead of it
            # (Account.oldest). That may be a step without an update, whose weights are those of now.
            version: version if made == common else min(self.ledger.version_at(2 * common - made), now - 1)
            for version, (made, common) in zip(account.versions, account.weights, strict=True)
        }
        for rollout in group.rollouts:
            turns = [
                dataclasses.replace(
                    turn, versions=tuple(Span(names[span.version], span.start, span.end) for span in turn.versions)
                )
                for turn in rollout.turns
            ]
            yield dataclasses.replace(rollout, turns=tuple(turns))


def _number(report: Finished | Lost) -> int:
    """The number of a report's ticket."""
    return int(report.id.partition("/")[0])


def _versions(rollouts: Iterable[Rollout]) -> set[int]:
    return {span.version for rollout in rollouts for turn in rollout.turns for span in turn.versions}


def _encoded(group: Group) -> bytes:
    """A group without the columns of its prompt, which are in the data."""
    return codec.encode(dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, columns={})))


def _with_own_uids(
    scored: Iterable[ScoredGroup], numbers: Iterable[int], *, beside: Iterable[ScoredGroup]
) -> list[ScoredGroup]:
    """The groups, with a number behind a uid that another group of the step has: uids identify groups in a step."""
    uids = {each.group.prompt.uid for each in beside}
    found = []
    for number, each in zip(numbers, scored, strict=True):
        prompt = each.group.prompt
        if prompt.uid in uids:
            prompt = dataclasses.replace(prompt, uid=f"{prompt.uid}~ticket{number}")
        uids.add(prompt.uid)
        found.append(ScoredGroup(dataclasses.replace(each.group, prompt=prompt), each.scores))
    return found
