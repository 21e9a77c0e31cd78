"""Simulates a run on many servers under a virtual clock. The :class:`.Ledger` of real runs decides what is asked for
and which groups a step takes, so that a change of its rules changes the forecast.

A server decodes its sequences in lock-step: one token of each of b sequences takes a + c b seconds. Groups go to the
server with the fewest, and their completions wait there for a free slot. The learner needs ``update_s`` per step;
publishing its weights stops it and the servers for ``sync_s``.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..rollout.ledger import Ledger

Draw = Callable[[np.random.Generator, int], np.ndarray]
"""Lengths in tokens of so many completions."""
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Servers:
    """What generates. Times are in seconds."""

    count: int
    slots: int  # sequences that one decodes at a time
    token_s: float  # a: of a token, however few sequences there are
    sequence_s: float = 0.0  # c: more for each sequence
    mtbf_s: float = math.inf  # mean time of a server between failures, after which its groups are asked for again
    restart_s: float = 60.0
    slow_share: float = 0.0  # of the servers, that need ``slow_factor`` times as long
    slow_factor: float = 2.0


@dataclass(frozen=True, slots=True)
class Work:
    """What is done with it."""

    prompts: int
    completions: int
    staleness: int
    update_s: float
    sync_s: float
    lengths: Draw
    steps: int = 20
    warm_up: int = 5  # steps that no figure counts


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of a simulated run after its warm-up."""

    seconds: float  # per step
    ages: dict[int, float]  # share of the groups by the age of their oldest token, in published versions
    learner_idle: float  # share of the time in which the learner waits for rollouts
    servers_idle: float  # share of the time in which a server has no sequence at all
    slots_used: float  # mean share of the slots that decode
    kept: tuple[float, ...]  # share of the groups that were trained on, by quarters of length
    entries: int  # of the ledger, per step
    losses: int  # groups that were asked for again


def log_normal(mean: float, sigma: float, most: int) -> Draw:
    """Lengths whose logarithm is normally distributed, with this mean before they are cut at ``most`` tokens."""
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, n: np.clip(np.exp(rng.normal(mu, sigma, n)), 1, most).round()


def wait_for_deadlines(run: _Run) -> list[int] | None:
    """The rule of real runs: nothing is left out for being slow."""
    return run.ledger.choose(run.step, most=run.work.prompts)


def drop_the_slow(run: _Run) -> list[int] | None:
    """For comparison, another rule: takes the groups that finish first, and drops those that are too old by then."""
    there = [account.ticket.number for account in run.ledger.finished()]
    if len(there) < run.work.prompts:
        return None
    for ticket in run.ledger.unfinished():
        if run.ledger.deadline(ticket.number) <= run.step:
            run.ledger.drop(ticket.number, why="slow", replaced=True)
            run.cancel(ticket.number)
    return there[: run.work.prompts]


def simulate(
    servers: Servers, work: Work, *, seed: int = 0, take: Callable[[_Run], list[int] | None] = wait_for_deadlines
) -> Forecast:
    """Runs all steps of ``work``. Equal arguments give equal figures."""
    run = _Run(servers, work, seed, take)
    while run.step <= work.steps:
        run.advance()
    return run.forecast()


@dataclass(slots=True)
class _Server:
    """A clock that counts tokens: a sequence ends when it has moved by the sequence's length."""

    pace: float  # of its times
    time: float = 0.0
    tokens: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)  # (tokens at the end, group), a heap
    waiting: deque[tuple[float, int]] = field(default_factory=deque)  # (length, group)
    stamp: int = 0  # of its newest event; older ones are void
    used: float = 0.0  # sequence-seconds
    busy: float = 0.0


@dataclass(slots=True)
class _Group:
    server: int
    lengths: np.ndarray
    left: int
    version: int = -1  # of its oldest token


class _Run:
    def __init__(self, servers: Servers, work: Work, seed: int, take: Callable[[_Run], list[int] | None]) -> None:
        self.servers, self.work, self._take = servers, work, take
        self._rng = np.random.default_rng(seed)
        slow = self._rng.permutation(servers.count) < servers.slow_share * servers.count
        self._servers = [_Server(servers.slow_factor if each else 1.0) for each in slow]
        self._open = np.zeros(servers.count)  # groups at each server; more than any count where it is down
        # With steps after those that count: a run's last steps ask for nothing more, and its servers run empty.
        self.ledger = Ledger(prompts=work.prompts, staleness=work.staleness, steps=work.steps + work.staleness + 1)
        self.ledger.begin(step=0, version=0, mark=0)
        self.step, self.now = 1, 0.0
        self._groups: dict[int, _Group] = {}
        self._events: list[tuple[float, int, int, int]] = []  # (time, 0: a sequence ends, 1: failure, 2: restart, …)
        self._taken: list[int] | None = None  # by the step that is being computed
        self._until = math.inf
        self._marks: list[tuple[float, float, int]] = []  # at the end of steps: time, waited so far, entries
        self._waiting_since, self._waited = 0.0, 0.0
        self._ages: Counter[int] = Counter()
        self._ends: list[tuple[int, float, bool]] = []  # step, length, and whether the group was trained on
        self._losses = 0
        self._before = (0.0, 0.0)  # used and busy at the end of the warm-up
        if servers.mtbf_s < math.inf:
            for i, after in enumerate(self._rng.exponential(servers.mtbf_s, servers.count).tolist()):
                heapq.heappush(self._events, (after, 1, i, 0))
        self._ask()

    def advance(self) -> None:
        """Goes on to the next event."""
        if self._taken is None and (found := self._take(self)) is not None:
            self._taken, self._until = found, self.now + self.work.update_s
            self._waited += self.now - self._waiting_since
        if self._until <= (self._events[0][0] if self._events else math.inf):
            self.now = self._until
            self._publish()
            return
        self.now, kind, i, stamp = heapq.heappop(self._events)
        if kind == 1:
            self._fail(i)
        elif kind == 2:
            self._restart(i)
        elif stamp == self._servers[i].stamp:
            self._move(self._servers[i])
            self._finish(i)

    # ---- the learner

    def _publish(self) -> None:
        numbers, work = self._taken or [], self.work
        for number in numbers:
            if self.step > work.warm_up:
                self._ages[self.step - 1 - self.ledger.accounts[number].oldest] += 1
            self._ended(number, trained=True)
        self.ledger.train(self.step, version=self.step, numbers=numbers)
        for i, server in enumerate(self._servers):
            if server.running or server.waiting:
                self._move(server)
                server.time = max(server.time, self.now + work.sync_s)
                self._schedule(i)
        self.now += work.sync_s
        self._marks.append((self.now, self._waited, self.ledger.lines))
        if self.step == work.warm_up:
            self._before = (sum(s.used for s in self._servers), sum(s.busy for s in self._servers))
        self.ledger.forget(self.step)
        self.step, self._taken, self._until, self._waiting_since = self.step + 1, None, math.inf, self.now
        self._ask()

    def _ask(self) -> None:
        while self.ledger.room > 0:
            step = self.ledger.next_step
            ticket = self.ledger.issue(uid="", place=self.ledger.issued, step=step, attempt=0)
            lengths = self.work.lengths(self._rng, self.work.completions)
            self._groups[ticket.number] = _Group(-1, lengths, 0)
            self._send(ticket.number)

    def _ended(self, number: int, *, trained: bool) -> None:
        self._ends.append((self.step, float(self._groups.pop(number).lengths.max()), trained))

    # ---- the servers

    def _send(self, number: int) -> None:
        group, i = self._groups[number], int(self._open.argmin())
        group.server, group.left, group.version = i, len(group.lengths), -1
        server = self._servers[i]
        self._open[i] += 1
        server.waiting.extend((float(length), number) for length in group.lengths)
        self._move(server)
        self._admit(i)

    def _move(self, server: _Server) -> None:
        """Brings a server's clock up to now."""
        elapsed = self.now - server.time
        if elapsed <= 0:
            return
        if server.running:
            server.tokens += elapsed / self._rate(server)
            server.used += elapsed * len(server.running)
            server.busy += elapsed
        server.time = self.now

    def _rate(self, server: _Server) -> float:
        return (self.servers.token_s + self.servers.sequence_s * len(server.running)) * server.pace

    def _admit(self, i: int) -> None:
        """Lets waiting completions take free slots."""
        server = self._servers[i]
        while server.waiting and len(server.running) < self.servers.slots and self._open[i] < _DOWN:
            length, number = server.waiting.popleft()
            if (group := self._groups.get(number)) is None or group.server != i:
                continue
            heapq.heappush(server.running, (server.tokens + length, number))
            if group.version < 0:
                group.version = self.ledger.published
        self._schedule(i)

    def _schedule(self, i: int) -> None:
        server = self._servers[i]
        server.stamp += 1
        if server.running:
            left = max(server.running[0][0] - server.tokens, 0.0)
            heapq.heappush(self._events, (server.time + left * self._rate(server), 0, i, server.stamp))

    def _finish(self, i: int) -> None:
        server = self._servers[i]
        while server.running and server.running[0][0] <= server.tokens + 1e-6:
            number = heapq.heappop(server.running)[1]
            group = self._groups[number]
            group.left -= 1
            if not group.left:
                self._open[i] -= 1
                self.ledger.finish(number, versions=[group.version])
        self._admit(i)

    def cancel(self, number: int) -> None:
        """Takes a group off its server."""
        group = self._groups[number]
        i, server = group.server, self._servers[group.server]
        self._ended(number, trained=False)
        self._open[i] -= 1
        self._move(server)
        server.running = [each for each in server.running if each[1] != number]
        heapq.heapify(server.running)
        self._admit(i)

    def _fail(self, i: int) -> None:
        server = self._servers[i]
        self._move(server)
        lost = sorted(number for number, group in self._groups.items() if group.server == i and group.left)
        server.running, server.stamp = [], server.stamp + 1
        server.waiting.clear()
        self._open[i] = _DOWN
        for number in lost:
            self._losses += 1
            self.ledger.again(number, why="its server failed")
            self._send(number)
        heapq.heappush(self._events, (self.now + self.servers.restart_s, 2, i, 0))

    def _restart(self, i: int) -> None:
        server = self._servers[i]
        self._open[i] -= _DOWN
        server.time = self.now
        self._admit(i)
        heapq.heappush(self._events, (self.now + float(self._rng.exponential(self.servers.mtbf_s)), 1, i, 0))

    # ---- the figures

    def forecast(self) -> Forecast:
        first, last = self._marks[self.work.warm_up - 1], self._marks[-1]
        elapsed, steps = last[0] - first[0], len(self._marks) - self.work.warm_up
        for server in self._servers:
            self._move(server)
        used = sum(server.used for server in self._servers) - self._before[0]
        busy = sum(server.busy for server in self._servers) - self._before[1]
        total = self._ages.total() or 1
        return Forecast(
            elapsed / steps, {age: self._ages[age] / total for age in sorted(self._ages)},
            (last[1] - first[1]) / elapsed, 1 - busy / (elapsed * self.servers.count),
            used / (elapsed * self.servers.count * self.servers.slots), self._kept(),
            round((last[2] - first[2]) / steps), self._losses,
        )  # fmt: skip

    def _kept(self) -> tuple[float, ...]:
        """By quarters of length: the share that was trained on of the groups that came to an end."""
        ends = [(length, trained) for step, length, trained in self._ends if step > self.work.warm_up]
        edges = np.quantile([length for length, _ in ends], np.arange(1, QUARTERS) / QUARTERS)
        place = np.searchsorted(edges, [length for length, _ in ends])
        kept = np.array([trained for _, trained in ends], float)
        return tuple(float(kept[place == q].mean()) if (place == q).any() else math.nan for q in range(QUARTERS))


_DOWN = 1e9
"""Added to the groups at a server that is down, so that others are preferred."""


def best_split(
    gpus: int,
    work: Work,
    servers: Servers,
    *,
    update_gpu_s: float,
    gpus_per_server: int = 1,
    shares: Sequence[float] = (),
) -> tuple[int, Forecast]:
    """The number of GPUs for the learner with the fewest seconds per step, and its forecast; the others are servers.

    ``update_gpu_s``: seconds of a step times the learner's GPUs, as if learning scaled perfectly. Tries every eighth of
    the GPUs, or ``shares`` of them.
    """
    tried: dict[int, Forecast] = {}
    for share in shares or [eighth / 8 for eighth in range(1, 8)]:
        learner = round(gpus * share)
        count = (gpus - learner) // gpus_per_server
        if learner and count and learner not in tried:
            own = replace(work, update_s=update_gpu_s / learner)
            tried[learner] = simulate(replace(servers, count=count), own)
    best = min(tried, key=lambda learner: tried[learner].seconds)
    return best, tried[best]
