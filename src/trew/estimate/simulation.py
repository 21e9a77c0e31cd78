"""Simulates a run on many servers under a virtual clock. The :class:`.Ledger` of real runs decides which groups are
asked for and which of them a step takes, so that a change of its rules changes the forecast.

The learner needs ``update_s`` per step. Publishing its weights takes ``sync_s``, during which it and the servers stand
still.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..rollout.ledger import Ledger
from .virtual_servers import ServerSpecs, VirtualServers

LengthDraw = Callable[[np.random.Generator, int], np.ndarray]
"""Draws the lengths in tokens of the completions of one group; called once for each group, in the order of tickets."""
QUARTERS = 4


@dataclass(frozen=True, slots=True)
class Work:
    """A run: what it asks servers for, and what the learner needs."""

    prompts: int
    completions: int
    staleness: int
    update_s: float
    sync_s: float
    lengths: LengthDraw
    steps: int = 20
    warm_up: int = 5  # steps that no figure counts


@dataclass(frozen=True, slots=True)
class Forecast:
    """Figures of a simulated run after its warm-up."""

    seconds: float  # per step
    ages: dict[int, float]  # share of the groups by the age of their oldest token, in published versions
    learner_idle: float  # share of the time in which the learner waits for rollouts
    servers_idle: float  # mean share of the time in which a server has no sequence at all
    slots_used: float  # mean share of the slots that decode
    kept: tuple[float, ...]  # share of the groups that were trained on, by quarters of length
    entries: int  # of the ledger, per step
    losses: int  # groups that were asked for again


def log_normal(mean: float, sigma: float, most: int) -> LengthDraw:
    """Lengths whose logarithm is normally distributed, with this mean before they are cut at ``most`` tokens."""
    # The mean of a log-normal is exp(mu + sigma^2 / 2).
    mu = math.log(mean) - sigma**2 / 2
    return lambda rng, n: np.clip(np.exp(rng.normal(mu, sigma, n)), 1, most).round()


def wait_for_deadlines(run: Simulation) -> list[int] | None:
    """The rule of real runs: no group is left out for being slow."""
    return run.ledger.choose(run.step, most=run.work.prompts)


def drop_the_slow(run: Simulation) -> list[int] | None:
    """For comparison, another rule: takes the groups that finish first, and drops those that are too old by then."""
    there = [account.ticket.number for account in run.ledger.finished()]
    # Nothing is dropped while the step could not go on anyway.
    if len(there) < run.work.prompts:
        return None
    for ticket in run.ledger.unfinished():
        if run.ledger.deadline(ticket.number) <= run.step:
            run.drop(ticket.number)
    return there[: run.work.prompts]


Rule = Callable[["Simulation"], list[int] | None]
"""The tickets that a step takes; None while it waits."""


def simulate(servers: ServerSpecs, work: Work, *, seed: int = 0, take: Rule = wait_for_deadlines) -> Forecast:
    """Runs all steps of ``work``. Equal arguments give equal figures."""
    # With steps after those that count: a run's last steps ask for nothing more, and its servers run empty.
    run = Simulation(servers, work, steps=work.steps + work.staleness + 1, seed=seed, take=take)
    while run.step <= work.steps:
        run.advance()
    return run.forecast()


class Simulation:
    """A run of ``steps`` steps on virtual servers. ``journal`` receives the ledger's entries, as in a real run."""

    def __init__(
        self,
        servers: ServerSpecs,
        work: Work,
        *,
        steps: int,
        seed: int = 0,
        take: Rule = wait_for_deadlines,
        journal: Callable[[str], None] | None = None,
    ) -> None:
        self.work, self._take = work, take
        self._rng = np.random.default_rng(seed)
        self.servers = VirtualServers(servers, self._rng)
        self.ledger = Ledger(prompts=work.prompts, staleness=work.staleness, steps=steps, journal=journal)
        self.ledger.begin(step=0, version=0, mark=0)
        self.step = 1
        self._lengths: dict[int, np.ndarray] = {}  # of the tickets that have not ended
        self._taken: list[int] | None = None  # by the step that the learner computes; None while it waits
        self._until = math.inf  # the learner is done
        self._waiting_since, self._waited = 0.0, 0.0
        self._marks = [_Mark()]
        self._ages: Counter[int] = Counter()
        self._ends: list[tuple[int, float, bool]] = []  # step, length, and whether the group was trained on
        self._losses = 0
        self._ask()

    def advance(self) -> None:
        """Goes on to the next event."""
        servers = self.servers
        if self._taken is None and (taken := self._take(self)) is not None:
            self._taken, self._until = taken, servers.now + self.work.update_s
            self._waited += servers.now - self._waiting_since
        # The earlier of two events: the learner is done, or something happens at a server.
        if self._until <= servers.next_event:
            servers.now = self._until
            self._publish(self._taken or [])
            return
        for report in servers.advance():
            if report.lost:
                self._losses += 1
                self.ledger.again(report.group, why="its server failed")
                servers.submit(report.group, self._lengths[report.group])
            else:
                self.ledger.finish(report.group, versions=[report.version])

    def drop(self, number: int) -> None:
        """Gives up a running group; another one takes its place."""
        self.ledger.drop(number, why="slow", replaced=True)
        self.servers.cancel(number)
        self._end(number, trained=False)

    def _publish(self, numbers: Sequence[int]) -> None:
        servers, counted = self.servers, self.step > self.work.warm_up
        for number in numbers:
            # Adds 0 in the warm-up.
            self._ages[self.step - 1 - self.ledger.accounts[number].oldest] += counted
            self._end(number, trained=True)
        servers.stand_still(servers.now + self.work.sync_s)
        servers.now += self.work.sync_s
        servers.version = self.step
        # Only now: room for new groups opens once the servers have the weights.
        self.ledger.train(self.step, version=self.step, numbers=numbers)
        self._marks.append(_Mark(servers.now, self._waited, self.ledger.lines, *servers.totals()))
        self.step, self._taken, self._until, self._waiting_since = self.step + 1, None, math.inf, servers.now
        self._ask()
        self.ledger.forget(self.ledger.published)

    def _ask(self) -> None:
        while self.ledger.room > 0:
            ticket = self.ledger.issue(uid="", place=self.ledger.issued, step=self.ledger.next_step, attempt=0)
            self._lengths[ticket.number] = self.work.lengths(self._rng, self.work.completions)
            self.servers.submit(ticket.number, self._lengths[ticket.number])

    def _end(self, number: int, *, trained: bool) -> None:
        self._ends.append((self.step, float(self._lengths.pop(number).max()), trained))

    # ---- the figures

    def forecast(self) -> Forecast:
        """The figures of all steps so far but those of the warm-up."""
        # _marks[0] is the beginning, and _marks[i] the end of step i.
        first, last = self._marks[self.work.warm_up], self._marks[-1]
        elapsed, steps = last.time - first.time, len(self._marks) - 1 - self.work.warm_up
        of_servers = elapsed * self.servers.settings.count
        total = self._ages.total() or 1
        return Forecast(
            seconds=elapsed / steps,
            ages={age: count / total for age, count in sorted(self._ages.items()) if count},
            learner_idle=(last.waited - first.waited) / elapsed,
            servers_idle=1 - (last.busy - first.busy) / of_servers,
            slots_used=(last.used - first.used) / (of_servers * self.servers.settings.slots),
            kept=self._kept(),
            entries=round((last.entries - first.entries) / steps),
            losses=self._losses,
        )

    def _kept(self) -> tuple[float, ...]:
        """By quarters of length: the share that was trained on of the groups that ended."""
        ends = [(length, trained) for step, length, trained in self._ends if step > self.work.warm_up]
        edges = np.quantile([length for length, _ in ends], np.arange(1, QUARTERS) / QUARTERS)
        place = np.searchsorted(edges, [length for length, _ in ends])
        kept = np.array([trained for _, trained in ends], float)
        return tuple(float(kept[place == q].mean()) if (place == q).any() else math.nan for q in range(QUARTERS))


@dataclass(frozen=True, slots=True)
class _Mark:
    """The state at the end of a step; figures are differences of two."""

    time: float = 0.0
    waited: float = 0.0
    entries: int = 0
    used: float = 0.0
    busy: float = 0.0


def best_split(
    gpus: int,
    work: Work,
    servers: ServerSpecs,
    *,
    update_gpu_s: float,
    gpus_per_server: int = 1,
    shares: Sequence[float] = (),
) -> tuple[int, Forecast]:
    """Returns the number of GPUs for the learner with the fewest seconds per step, and its forecast; servers get the
    other GPUs.

    ``update_gpu_s``: seconds of a step times the learner's GPUs, as if learning scaled perfectly. Tries every eighth of
    the GPUs, or ``shares`` of them.
    """
    tried: dict[int, Forecast] = {}
    for share in shares or [eighth / 8 for eighth in range(1, 8)]:
        learner = round(gpus * share)
        # GPUs that are too few for another server stay idle.
        count = (gpus - learner) // gpus_per_server
        if learner and count and learner not in tried:
            own = replace(work, update_s=update_gpu_s / learner)
            tried[learner] = simulate(replace(servers, count=count), own)
    best = min(tried, key=lambda learner: tried[learner].seconds)
    return best, tried[best]
