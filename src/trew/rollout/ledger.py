"""The ledger of asynchronous rollouts: records which groups were asked for, finished and trained on, and decides which
come next.

Pure bookkeeping: no clock, no engine, no file. Every entry goes to a journal, and a ledger that reads the same entries
is in the same state: no counter exists beside them.

    issued    a ticket: one prompt whose group was asked for
    finished  its group is complete: where it is stored, and the versions of the weights that sampled it
    trained   a step: the tickets that it used up, and the version that its weights got
    again     the whole group was asked for again, with the same seed
    dropped   the group is never trained on; "replaced" says whether another ticket may take its place
    begun     a process goes on after a step: entries "trained" and "dropped" from line ``mark`` on are undone

Time is counted in published steps: p = 3 means that the engine has the weights of step 3. With P groups per step and
the bound S, at most P (p + 1 + S) tickets are asked for. What is asked for at p has tokens of p at the oldest, and is
trained on in step p + 1 + S at the latest, its deadline. A step waits for the groups whose deadline it is, and takes
the finished groups of the earliest deadlines; so the bound holds and nothing is left out for being slow.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import CheckpointError

State = Literal["dormant", "running", "finished", "trained", "dropped"]
"""``dormant``: it has to be asked for again, once there is room."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A group that was asked for. Its draws depend on the uid and on (step, attempt), which it has for good, whatever
    step trains on it. ``place`` is the prompt's in the stream, ``turn`` that of :class:`.Drawn`."""

    number: int
    uid: str
    place: int
    step: int
    attempt: int
    turn: int = -1


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a finished group is: ``size`` bytes from ``at`` on in a file, with their SHA-256."""

    file: str
    at: int
    size: int
    sha256: str


@dataclass(slots=True)
class Account:
    """The state of a ticket. ``asked``: the published step when it was last asked for. ``weights``: for each
    version of its tokens, the step that published it and the last step that this version and the present weights have
    in common, which is an earlier one once a run went on from a checkpoint before it."""

    ticket: Ticket
    asked: int
    state: State = "running"
    stored: Stored | None = None
    weights: tuple[tuple[int, int], ...] = ()
    versions: tuple[int, ...] = ()
    why: str = ""  # it has to be asked for again, or was dropped
    line: int = -1  # at which it was trained on or dropped
    step: int = -1  # that ended it
    replaced: bool = False  # dropped, and another ticket may take its place

    @property
    def oldest(self) -> int:
        """The published step of its oldest token, or that it can have at the oldest. Weights that a run left behind
        count as far back from the step where it went on as they were ahead of it."""
        # common - (step - common): as far behind the fork as those weights were ahead of it.
        return min((2 * common - step for step, common in self.weights), default=self.asked)

    def oldest_after(self, step: int) -> int:
        """:attr:`oldest` for a run that goes on after ``step``."""
        return min((2 * min(common, step) - made for made, common in self.weights), default=step)


class Ledger:
    """The bookkeeping of a run of ``steps`` steps of ``prompts`` groups with the bound ``staleness``.

    ``journal`` receives every entry as a line of JSON. Tickets are named by their numbers.
    """

    def __init__(
        self, *, prompts: int, staleness: int, steps: int, journal: Callable[[str], None] | None = None
    ) -> None:
        self.prompts, self.staleness, self.steps, self.journal = prompts, staleness, steps, journal
        self.published = 0  # the step whose weights the engine has
        self.lines = 0  # entries so far
        self.issued = 0  # tickets so far
        self.accounts: dict[int, Account] = {}  # all that are open, and those that ended lately
        self._first = 0  # the step after which the ledger began
        self._regular = 0  # tickets that replace no other
        self._since = self._ended = 0  # the step after which a process last went on, and the tickets that had ended
        self._replaced = 0  # dropped tickets since then whose place another may take
        self._dormant: set[int] = set()
        self._dormant_order: list[int] = []  # a heap of them; behind its first, of some that are dormant no more
        # The open tickets by their deadlines, which are few: a step that waits asks again and again.
        self._by: dict[State, dict[int, set[int]]] = {"running": {}, "finished": {}}
        self._step_of: dict[int, int] = {0: 0}  # version -> the last step with these weights

    # ---- entries

    def begin(self, *, step: int, version: int, mark: int) -> None:
        """Enters that a process goes on after ``step``, whose weights are of ``version``. Undoes what was trained and
        dropped after the first ``mark`` entries. Everything unfinished has to be asked for again."""
        self._enter({"begun": step, "version": version, "mark": mark})

    def mark_after(self, step: int) -> int:
        """The ``mark`` of a checkpoint of ``step`` that has none: before all that later steps have used up."""
        return min((a.line for a in self.accounts.values() if a.line >= 0 and a.step > step), default=self.lines)

    def issue(self, *, uid: str, place: int, step: int, attempt: int, turn: int = -1) -> Ticket:
        """Enters a new ticket, which is asked for now."""
        number = self.issued
        entry: dict[str, Any] = {
            "issued": number, "uid": uid, "place": place, "step": step, "attempt": attempt, "published": self.published,
        }  # fmt: skip
        self._enter(entry | ({"turn": turn} if turn >= 0 else {}))
        return self.accounts[number].ticket

    def finish(self, number: int, *, versions: Iterable[int], stored: Stored | None = None) -> None:
        """Enters that a ticket's group is complete. ``versions``: of the weights that its tokens are from. Raises
        ValueError for a version that is not of this run."""
        versions = sorted(set(versions))
        if unknown := [v for v in versions if v not in self._step_of]:
            raise ValueError(f"ticket {number}: tokens of version {unknown[0]}, which was not published in this run")
        entry: dict[str, Any] = {"finished": number}
        if stored is not None:
            entry |= {"file": stored.file, "at": stored.at, "size": stored.size, "sha256": stored.sha256}
        self._enter({**entry, "versions": versions})

    def train(self, step: int, *, version: int, numbers: Sequence[int]) -> None:
        """Enters that ``step`` has used up these tickets, and that the engine has its weights, of ``version``. Raises
        ValueError, and enters nothing, if a ticket was used up before or is older than the bound allows."""
        for number in numbers:
            account = self.accounts.get(number)
            if account is None or account.state != "finished":
                raise ValueError(f"ticket {number}: cannot be trained on, it is {account and account.state}")
            if (age := step - 1 - account.oldest) > self.staleness:
                raise ValueError(f"ticket {number}: its oldest token is {age} versions old, accepted {self.staleness}")
        if step <= self.published:
            raise ValueError(f"step {step}: was published before, {self.published} is the newest")
        self._enter({"trained": step, "version": version, "tickets": list(numbers)})

    def again(self, number: int, *, why: str) -> Ticket:
        """Enters that the whole group is asked for again now; its earlier completions are not used."""
        self._enter({"again": number, "why": why, "published": self.published})
        return self.accounts[number].ticket

    def drop(self, number: int, *, why: str, replaced: bool) -> None:
        """Enters that the group is never trained on."""
        self._enter({"dropped": number, "why": why, "replaced": replaced})

    # ---- what may come next

    @property
    def room(self) -> int:
        """How many tickets may be asked for now: dormant ones first. P (p + 1 + S), and one for each that was dropped
        and replaced, less those that were asked for; nothing beyond the last step."""
        # Counted from where this process goes on: before, P may have been another.
        ahead = min(self.published + 1 + self.staleness, self.steps) - self._since
        # Dormant tickets were issued, and have to be asked for again.
        return self.prompts * ahead + self._replaced - (self.issued - self._ended - len(self._dormant))

    @property
    def dormant(self) -> int | None:
        """The first ticket that has to be asked for again; None if there is none."""
        return self._dormant_order[0] if self._dormant_order else None

    @property
    def next_step(self) -> int:
        """The step of the next ticket that replaces no other: its draws are those of a synchronous run's step."""
        return self._first + self._regular // self.prompts + 1

    def deadline(self, number: int) -> int:
        """The last step that may train on this group."""
        return self.accounts[number].oldest + 1 + self.staleness

    def choose(self, step: int, *, most: int, taken: Collection[int] = ()) -> list[int] | None:
        """Chooses up to ``most`` finished tickets for ``step`` besides those ``taken``; None while it must wait.

        It waits for the groups whose deadline it is, and for those without which a later step would have more of them
        than it can train on; then it takes the earliest deadlines first, whichever groups are still running.
        """
        finished, running = self._by["finished"], self._by["running"]
        # By deadline: finished tickets that this step has not taken yet.
        there = {d: len(numbers) - sum(n in numbers for n in taken) for d, numbers in finished.items()}
        # Too few are finished for a whole step, and others are still running.
        if any(running.values()) and sum(there.values()) < most:
            return None
        # Counted first: a step that waits asks again whenever a group finishes, and must not sort all groups each time.
        counts: dict[int, int] = {}
        missing = most
        left = 0  # open tickets with this deadline or an earlier one that this step does not take
        behind = False  # whether one of them is running
        waiting = False  # whether a later step would have too many, and one that runs may still be taken now
        for deadline in sorted({*finished, *running}):
            available, unfinished = there.get(deadline, 0), len(running.get(deadline, ()))
            if waiting and available and missing:
                return None  # this step would take what has more time instead
            counts[deadline] = min(available, missing)
            missing -= counts[deadline]
            left += available - counts[deadline] + unfinished
            behind = behind or unfinished > 0
            # The steps from the next one to the deadline can take P (deadline - step) tickets. Where more are left,
            # this step waits for the running ones among them instead of taking what has more time.
            waiting = waiting or (behind and left > self.prompts * (deadline - step))
        return [
            number
            for deadline, count in counts.items()
            if count
            for number in sorted(finished[deadline].difference(taken))[:count]
        ]

    def passed_over(self, numbers: Iterable[int]) -> int:
        """How many running tickets have an earlier deadline, or the same and a lower number, than the last of these."""
        last = max(((self.deadline(n), n) for n in numbers), default=(-1, -1))
        return sum((deadline, n) < last for deadline, all_of in self._by["running"].items() for n in all_of)

    def unfinished(self) -> list[Ticket]:
        """The tickets that are running, in order."""
        return [account.ticket for account in self._all("running")]

    def count_finished(self) -> int:
        """The number of finished tickets that are not used up."""
        return sum(map(len, self._by["finished"].values()))

    def finished(self) -> list[Account]:
        """The accounts of finished tickets that are not used up, in order."""
        return self._all("finished")

    def knows(self, version: int) -> bool:
        """Whether weights of this version were published, as far as was entered."""
        return version in self._step_of

    def version_at(self, step: int) -> int:
        """The version of the weights that ``step`` published, or else a number below all versions, in the same order:
        weights that were left behind may count as older than the first."""
        # known: published step -> version.
        known = {published: version for version, published in self._step_of.items()}
        later = [known[s] for s in sorted(known) if s >= step]
        return later[0] if step >= 0 and later else min(step, 0)

    def open_uids(self) -> Iterator[str]:
        """The uids of tickets that were neither used up nor dropped."""
        return (a.ticket.uid for a in self.accounts.values() if a.state not in ("trained", "dropped"))

    @property
    def next_place(self) -> int:
        """The place in the stream after those of all tickets; 0 where there are none."""
        return max((account.ticket.place + 1 for account in self.accounts.values()), default=0)

    def forget(self, covered: int) -> set[str]:
        """Forgets tickets that have ended, unless a run that goes on after step ``covered``, that of a checkpoint or
        -1, could train on them again. Returns the files that are still of use."""
        covered = max(covered, self._first)
        for number, account in list(self.accounts.items()):
            # A ticket that ended after the checkpoint is open again for a run that goes on there.
            again = account.step > covered and covered - account.oldest_after(covered) <= self.staleness
            # step is -1 while a ticket is open.
            if 0 <= account.step <= self.published and not again:
                del self.accounts[number]
        return {account.stored.file for account in self.accounts.values() if account.stored is not None}

    # ---- reading

    def read(self, lines: Iterable[str | bytes], *, name: str = "ledger") -> None:
        """Enters the lines of another ledger's journal. Raises CheckpointError if no ledger can have written them."""
        for number, line in enumerate(lines, start=self.lines + 1):
            try:
                self._apply(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
                raise CheckpointError(
                    f"{name}: line {number} does not follow from those before it ({type(error).__name__}: {error}); "
                    "put a backup of the run's folder there, or begin anew with --overwrite"
                ) from None

    def _enter(self, entry: dict[str, Any]) -> None:
        self._apply(entry)
        if self.journal is not None:
            self.journal(json.dumps(entry))

    def _apply(self, entry: Mapping[str, Any]) -> None:
        self._kinds[next(iter(entry), "")](self, entry)
        self.lines += 1

    def _begun(self, entry: Mapping[str, Any]) -> None:
        step, mark = entry["begun"], entry["mark"]
        if not self.lines:
            self._first = step
        self.published = step
        # Later versions belong to the branch that is left: their numbers will be given again.
        self._step_of = {v: s for v, s in self._step_of.items() if s <= step} | {entry["version"]: step}
        self._by = {"running": {}, "finished": {}}
        for account in self.accounts.values():
            # Ended behind the mark, which the checkpoint does not know of: undone.
            if account.line >= mark:
                account.line, account.step, account.replaced = -1, -1, False
                account.state = "finished" if account.weights else "running"
            # This step is the last that older weights and those of the new branch have in common.
            account.weights = tuple((made, min(common, step)) for made, common in account.weights)
            if account.state == "running":
                self._sleep(account, "the run was resumed")
            elif account.state == "finished":
                self._join(account)
        # Open tickets are in no danger of being forgotten: all others have ended.
        still_open = sum(account.state not in ("trained", "dropped") for account in self.accounts.values())
        self._since, self._ended, self._replaced = step, self.issued - still_open, 0
        self._expire()

    def _expire(self) -> None:
        """Finished groups that the next step cannot train on any more have to be asked for again."""
        # The next step is published + 1.
        for deadline in [d for d in self._by["finished"] if d <= self.published]:
            for number in sorted(self._by["finished"][deadline]):
                age = self.published - self.accounts[number].oldest
                self._sleep(self.accounts[number], f"its oldest token is {age} versions old")

    def _issued(self, entry: Mapping[str, Any]) -> None:
        ticket = Ticket(
            entry["issued"], entry["uid"], entry["place"], entry["step"], entry["attempt"], entry.get("turn", -1)
        )
        if ticket.number != self.issued:
            raise ValueError(f"ticket {ticket.number} was issued after {self.issued} others")
        account = self.accounts[ticket.number] = Account(ticket, entry["published"])
        self.issued += 1
        # attempt > 0 replaces a ticket of the step.
        self._regular += ticket.attempt == 0
        self._join(account)

    def _finished(self, entry: Mapping[str, Any]) -> None:
        account = self._leave(entry["finished"], "running")
        account.versions = tuple(entry["versions"])
        # (published by, in common up to): equal until a run goes on from an earlier step.
        account.weights = tuple((self._step_of[v], self._step_of[v]) for v in account.versions)
        if "file" in entry:
            account.stored = Stored(entry["file"], entry["at"], entry["size"], entry["sha256"])
        account.state = "finished"
        self._join(account)
        self._expire()

    def _trained(self, entry: Mapping[str, Any]) -> None:
        step = entry["trained"]
        for number in entry["tickets"]:
            account = self._leave(number, "finished")
            account.state, account.line, account.step = "trained", self.lines, step
        self.published = step
        self._step_of[entry["version"]] = step
        self._expire()

    def _again(self, entry: Mapping[str, Any]) -> None:
        account = self._leave(entry["again"], "dormant", "running", "finished")
        account.state, account.asked, account.why, account.stored = "running", entry["published"], "", None
        account.weights = account.versions = ()
        self._join(account)

    def _dropped(self, entry: Mapping[str, Any]) -> None:
        account = self._leave(entry["dropped"], "dormant", "running", "finished")
        account.state, account.why, account.replaced = "dropped", entry["why"], entry["replaced"]
        # The step that is under way ends it.
        account.line, account.step = self.lines, self.published + 1
        self._replaced += account.replaced

    _kinds = {  # noqa: RUF012
        "begun": _begun, "issued": _issued, "finished": _finished, "trained": _trained, "again": _again,
        "dropped": _dropped,
    }  # fmt: skip

    # ---- open tickets

    def _join(self, account: Account) -> None:
        """Enters an open ticket under its deadline; what changes that comes between :meth:`_leave` and this."""
        number = account.ticket.number
        self._by[account.state].setdefault(self.deadline(number), set()).add(number)

    def _leave(self, number: int, *states: State) -> Account:
        """The account of a ticket in one of these states, which it is about to leave."""
        account = self.accounts[number]
        if account.state not in states:
            raise ValueError(f"ticket {number} is {account.state}, not {' or '.join(states)}")
        self._dormant.discard(number)
        # The heap may name tickets that are dormant no more; its first one must be.
        while self._dormant_order and self._dormant_order[0] not in self._dormant:
            heapq.heappop(self._dormant_order)
        if account.state in self._by:
            deadline = self.deadline(number)
            same = self._by[account.state][deadline]
            same.discard(number)
            if not same:
                del self._by[account.state][deadline]
        return account

    def _sleep(self, account: Account, why: str) -> None:
        number = account.ticket.number
        # In _begun() tickets are in no set yet.
        if number in self._by[account.state].get(self.deadline(number), ()):
            self._leave(number, account.state)
        account.state, account.why, account.stored = "dormant", why, None
        account.weights = account.versions = ()
        self._dormant.add(number)
        heapq.heappush(self._dormant_order, number)

    def _all(self, state: State) -> list[Account]:
        return [self.accounts[n] for n in sorted(n for numbers in self._by[state].values() for n in numbers)]
