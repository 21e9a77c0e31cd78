"""Simulated runs and real sources of rollouts, driven by the same clock: their ledgers have the same entries."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_help import Memory, asynchronous, configured
from trew.estimate.simulation import Simulation, Work, log_normal, simulate
from trew.estimate.virtual_servers import ServerSpecs, VirtualServers
from trew.rollout.engine import Capabilities, Finished, Lost, Request
from trew.types import Span, Turn

PROMPTS, GROUP, STEPS = 3, 4, 7
SERVERS = ServerSpecs(count=2, slots=5, token_s=0.02, sequence_s=0.003)
UPDATE_S, SYNC_S = 0.5, 0.03


def lengths_of(ticket: int) -> np.ndarray:
    """Heavy-tailed."""
    return np.minimum(80, 5 * np.random.default_rng(ticket).pareto(1.1, GROUP) + 1).round()


class VirtualEngine:
    """Generates on virtual servers: a poll without a limit moves the clock to the next report."""

    capabilities = Capabilities(reproducible=True, entropies=False, untruncated_logprobs=False, in_flight_updates=True)

    def __init__(self, servers: ServerSpecs) -> None:
        self.servers = VirtualServers(servers, np.random.default_rng(0))
        self.until = math.inf  # no poll moves the clock beyond it

    @property
    def version(self) -> int:
        return self.servers.version

    @version.setter
    def version(self, version: int) -> None:
        self.servers.version = version

    def submit(self, requests: Sequence[Request]) -> None:
        for ticket in dict.fromkeys(int(request.id.partition("/")[0]) for request in requests):
            self.servers.submit(ticket, lengths_of(ticket))

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        while self.servers.next_event < self.until:
            if reports := self.servers.advance():
                return [each for report in reports for each in self._parts(report)]
        return []

    def _parts(self, report: Any) -> list[Finished | Lost]:
        ids = [f"{report.group}/{sample}" for sample in range(GROUP)]
        if report.lost:
            return [Lost(each, "its server failed") for each in ids]
        return [Finished.of(each, turn_of(report.version)) for each in ids]

    def cancel(self, ids: Sequence[str]) -> None:
        """Only lost groups are cancelled here, which servers do not have any more."""


def turn_of(version: int) -> Turn:
    one = np.zeros(1, np.float32)
    return Turn(np.array([1]), np.array([5]), one, None, None, (Span(version, 0, 1),), "#### 1", "stop")


def real_entries(servers: ServerSpecs, staleness: int) -> list[dict[str, Any]]:
    """The ledger of the source that runs train on, with a learner that takes ``UPDATE_S``."""
    engine, keeper = VirtualEngine(servers), Memory()
    source = asynchronous(configured(staleness, prompts=PROMPTS, completions=GROUP, steps=STEPS), engine, keeper)
    virtual = engine.servers
    for step in range(1, STEPS + 1):
        engine.until = math.inf
        source.next(step)
        engine.until = virtual.now + UPDATE_S
        while virtual.next_event < engine.until:
            source._gather(0.0)
        virtual.now = engine.until
        virtual.stand_still(virtual.now + SYNC_S)
        virtual.now += SYNC_S
        engine.version = step
        source.trained(step, step)
    source.close()
    return [json.loads(line) for line in keeper.written]


def simulated_entries(servers: ServerSpecs, staleness: int) -> list[dict[str, Any]]:
    tickets = iter(range(10**6))
    work = Work(PROMPTS, GROUP, staleness, UPDATE_S, SYNC_S, lambda rng, n: lengths_of(next(tickets)))
    lines: list[str] = []
    run = Simulation(servers, work, steps=STEPS, journal=lines.append)
    while run.step <= STEPS:
        run.advance()
    return [json.loads(line) for line in lines]


def plain(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a simulation does not have: prompts' uids, and files of groups."""
    return [{k: v for k, v in entry.items() if k not in ("uid", "file", "at", "size", "sha256")} for entry in entries]


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_a_simulation_enters_what_a_run_enters(staleness):
    entries = plain(simulated_entries(SERVERS, staleness))
    assert entries == plain(real_entries(SERVERS, staleness))
    assert Counter(next(iter(entry)) for entry in entries)["trained"] == STEPS


def test_a_simulation_enters_what_a_run_enters_when_servers_fail():
    failing = dataclasses.replace(SERVERS, mtbf_s=6.0, restart_s=0.7)
    entries = plain(simulated_entries(failing, 1))
    assert Counter(next(iter(entry)) for entry in entries)["again"] > 0
    assert entries == plain(real_entries(failing, 1))


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=4), min_size=1, max_size=12),
    slots=st.integers(1, 5),
    count=st.integers(1, 3),
)
def test_servers_finish_groups_when_counting_their_iterations_says_so(lengths, slots, count):
    """All groups come at once; iterations are counted one by one, as a server would."""
    a, c = 0.5, 0.25
    servers = VirtualServers(ServerSpecs(count, slots, token_s=a, sequence_s=c), np.random.default_rng(0))
    sent: list[list[int]] = [[] for _ in range(count)]
    for group, of in enumerate(lengths):
        servers.submit(group, np.array(of))
        sent[min(range(count), key=lambda i: len(sent[i]))].append(group)
    found = {}
    while servers.next_event < math.inf:
        found |= {report.group: servers.now for report in servers.advance()}
    expected = {}
    for groups in sent:
        waiting = deque((group, length) for group in groups for length in lengths[group])
        running: list[list[int]] = []
        now = 0.0
        while waiting or running:
            while waiting and len(running) < slots:
                running.append(list(waiting.popleft()))
            now += a + c * len(running)
            running = [[group, left - 1] for group, left in running]
            expected |= {group: now for group, left in running if not left}
            running = [each for each in running if each[1]]
    assert found == pytest.approx(expected)
    used, busy = servers.totals()
    assert used >= busy > 0


LONG = Work(
    prompts=16, completions=2, staleness=0, update_s=1.0, sync_s=0.1, lengths=log_normal(60, 1.2, 2000), steps=60
)  # fmt: skip
MANY = ServerSpecs(count=4, slots=16, token_s=0.02, sequence_s=0.001)


def test_a_larger_bound_takes_no_longer():
    seconds = [simulate(MANY, dataclasses.replace(LONG, staleness=s), seed=1).seconds for s in (0, 1, 2, 4, 8)]
    assert all(later <= earlier * 1.01 for earlier, later in itertools.pairwise(seconds))
    assert seconds[-1] < 0.6 * seconds[0]


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_time_and_work_are_conserved(staleness):
    """Every token takes its time in a slot, and a step lasts as long as learning, publishing and waiting together."""
    fixed = dataclasses.replace(LONG, staleness=staleness, lengths=lambda rng, n: np.full(n, 50.0))
    servers = dataclasses.replace(MANY, sequence_s=0.0)
    found = simulate(servers, fixed)
    slot_seconds = found.slots_used * found.seconds * servers.count * servers.slots
    assert slot_seconds == pytest.approx(16 * 2 * 50 * 0.02, rel=0.03)
    assert found.seconds * (1 - found.learner_idle) == pytest.approx(1.1)


def test_no_number_of_servers_beats_the_longest_completions():
    """Within S + 1 steps the longest completion of a step ends, and the learner computes (docs/scale.md)."""
    longest = dataclasses.replace(LONG, staleness=1, lengths=lambda rng, n: np.full(n, 400.0))
    found = simulate(ServerSpecs(count=100, slots=100, token_s=0.02), longest)
    assert found.seconds == pytest.approx((400 * 0.02 + 1.0 + 0.1) / 2, rel=0.01)
