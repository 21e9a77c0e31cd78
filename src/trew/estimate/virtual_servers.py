"""Servers that generate under a virtual clock: no tokens, only the times at which groups finish or are lost.

A server decodes in iterations, as vLLM does: each gives one token to every sequence that has a slot, and an iteration
with b sequences takes (a + c b) seconds. Sequences wait for a slot in the order in which they came, and join at the
next iteration. A group goes to the server with the fewest unfinished groups.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

DOWN = 1e9
"""Added to the number of groups at a server that is down, so that all others are preferred."""
SAME = 1e-6
"""Tokens: two sequences that end closer to each other than this end in the same iteration."""


@dataclass(frozen=True, slots=True)
class ServerSpecs:
    """How many servers there are, how fast they decode, and how often they fail. Times are in seconds."""

    count: int
    slots: int  # sequences that one server decodes at a time
    token_s: float  # a: an iteration, however few sequences it has
    sequence_s: float = 0.0  # c: more for each sequence
    mtbf_s: float = math.inf  # mean time of one server between failures; a failure loses the groups that it has
    restart_s: float = 60.0
    slow_share: float = 0.0  # of the servers, which need ``slow_factor`` times as long
    slow_factor: float = 2.0


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group that finished, or was lost with its server. ``version``: of the weights of its oldest token."""

    group: int
    lost: bool
    version: int = -1


Kind = Literal["decoded", "failed", "restarted"]


@dataclass(slots=True)
class _VirtualServer:
    """Counts tokens as a clock does: a sequence ends once ``tokens`` has grown by the sequence's length."""

    pace: float  # factor of its times
    time: float = 0.0  # at which ``tokens`` was right; in the future while it stands still
    tokens: float = 0.0  # of a sequence that was decoded since the beginning
    running: list[tuple[float, int]] = field(default_factory=list)  # (tokens at its end, group), a heap
    waiting: deque[tuple[float, int]] = field(default_factory=deque)  # (length, group)
    stamp: int = 0  # of the newest event; older ones are void
    used: float = 0.0  # seconds times sequences
    busy: float = 0.0  # seconds with at least one sequence


@dataclass(slots=True)
class _Group:
    server: int
    left: int  # sequences that are not decoded yet
    version: int = -1  # -1 until the first of them has a slot


class VirtualServers:
    """Generates groups of prescribed lengths. The caller sets ``version``, that of the weights; ``now`` is the time."""

    def __init__(self, servers: ServerSpecs, rng: np.random.Generator) -> None:
        self.settings, self._rng = servers, rng
        self.now, self.version = 0.0, 0
        # Exactly this share of the servers is slow, at random places.
        slow = rng.permutation(servers.count) < servers.slow_share * servers.count
        self._servers = [_VirtualServer(servers.slow_factor if each else 1.0) for each in slow]
        self._open = np.zeros(servers.count)  # unfinished groups at each server
        self._groups: dict[int, _Group] = {}
        self._events: list[tuple[float, int, int, Kind]] = []  # (time, server, stamp, what), a heap
        if servers.mtbf_s < math.inf:
            for i, after in enumerate(rng.exponential(servers.mtbf_s, servers.count).tolist()):
                heapq.heappush(self._events, (after, i, 0, "failed"))

    def submit(self, group: int, lengths: np.ndarray) -> None:
        """Sends a group of completions of these lengths to a server."""
        i = int(self._open.argmin())
        self._groups[group] = _Group(i, len(lengths))
        self._open[i] += 1
        self._servers[i].waiting.extend((float(length), group) for length in lengths)
        # Before anything joins: the pace of what has passed is that of the sequences that ran.
        self._move(self._servers[i])
        self._admit(i)

    def cancel(self, group: int) -> None:
        """Takes an unfinished group off its server."""
        i = self._groups.pop(group).server
        server = self._servers[i]
        self._open[i] -= 1
        self._move(server)
        server.running = [each for each in server.running if each[1] != group]
        heapq.heapify(server.running)
        self._admit(i)

    def stand_still(self, until: float) -> None:
        """No server decodes before ``until``."""
        for i, server in enumerate(self._servers):
            self._move(server)
            # In the future until then: _move() does nothing before.
            server.time = max(server.time, until)
            if server.running:
                self._schedule(i)

    @property
    def next_event(self) -> float:
        """When something happens next; infinity if nothing will."""
        while self._events and self._is_void(self._events[0]):
            heapq.heappop(self._events)
        return self._events[0][0] if self._events else math.inf

    def advance(self) -> list[GroupReport]:
        """Moves the clock to the next event and returns what finished or was lost."""
        assert self.next_event < math.inf
        time, i, _, kind = heapq.heappop(self._events)
        self.now = max(self.now, time)  # a failure may have come while the caller moved the clock
        self._move(self._servers[i])
        if kind == "failed":
            return self._fail(i)
        if kind == "restarted":
            self._open[i] -= DOWN
            # The next failure is drawn only now: a server that is down does not fail.
            self._push(self.now + float(self._rng.exponential(self.settings.mtbf_s)), i, "failed")
            self._admit(i)
            return []
        return self._finish(i)

    def totals(self) -> tuple[float, float]:
        """Seconds until now in which slots decoded, and in which servers had a sequence; summed over both."""
        for server in self._servers:
            self._move(server)
        return sum(server.used for server in self._servers), sum(server.busy for server in self._servers)

    # ---- one server

    def _is_void(self, event: tuple[float, int, int, Kind]) -> bool:
        _, i, stamp, kind = event
        return kind == "decoded" and stamp != self._servers[i].stamp

    def _push(self, time: float, i: int, kind: Kind) -> None:
        heapq.heappush(self._events, (time, i, self._servers[i].stamp, kind))

    def _seconds(self, server: _VirtualServer) -> float:
        """Of an iteration."""
        return (self.settings.token_s + self.settings.sequence_s * len(server.running)) * server.pace

    def _move(self, server: _VirtualServer) -> None:
        """Brings a server's tokens up to now."""
        elapsed = self.now - server.time
        if elapsed <= 0:
            return
        if server.running:
            server.tokens += elapsed / self._seconds(server)
            server.used += elapsed * len(server.running)
            server.busy += elapsed
        server.time = self.now

    def _admit(self, i: int) -> None:
        """Gives free slots to waiting sequences."""
        server = self._servers[i]
        # Sequences start between iterations, and a server without sequences starts one at once.
        # SAME: a clock that is a rounding error past the end of an iteration still stands at it.
        start = math.ceil(server.tokens - SAME)
        if not server.running:
            server.tokens = start
        while server.waiting and len(server.running) < self.settings.slots and self._open[i] < DOWN:
            length, number = server.waiting.popleft()
            group = self._groups.get(number)
            if group is None or group.server != i:  # cancelled
                continue
            heapq.heappush(server.running, (start + length, number))
            if group.version < 0:
                group.version = self.version
        self._schedule(i)

    def _schedule(self, i: int) -> None:
        server = self._servers[i]
        server.stamp += 1
        if server.running:
            left = max(server.running[0][0] - server.tokens, 0.0)
            self._push(server.time + left * self._seconds(server), i, "decoded")

    def _finish(self, i: int) -> list[GroupReport]:
        server, found = self._servers[i], []
        # All that end in this iteration: rounding may place their ends a little apart (SAME).
        while server.running and server.running[0][0] <= server.tokens + SAME:
            number = heapq.heappop(server.running)[1]
            group = self._groups[number]
            group.left -= 1
            if not group.left:
                self._open[i] -= 1
                del self._groups[number]
                found.append(GroupReport(number, lost=False, version=group.version))
        self._admit(i)
        return found

    def _fail(self, i: int) -> list[GroupReport]:
        server = self._servers[i]
        lost = sorted(number for number, group in self._groups.items() if group.server == i)
        for number in lost:
            del self._groups[number]
        server.running = []
        server.waiting.clear()
        server.stamp += 1
        # What is sent to it while every server is down counts from DOWN on, and stays when that is taken off again.
        self._open[i] = DOWN
        self._push(self.now + self.settings.restart_s, i, "restarted")
        return [GroupReport(number, lost=True) for number in lost]
