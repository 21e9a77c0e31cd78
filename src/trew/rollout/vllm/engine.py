"""VllmEngine: generates completions on vLLM servers, with token ids in and out."""

from __future__ import annotations

import hashlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty
from typing import Any

import numpy as np

from ...config.schema import InFlight
from ...errors import EngineError, MissingResources
from ...types import Sampling
from ..chat import Renderer
from ..endings import Endings, ModelFacts
from ..engine import Capabilities, Finished, Lost, Request, context_ids
from .answers import Asked, BadAnswer, body, read
from .client import ServerGone, ServerRefused
from .endpoint import Endpoint
from .revival import Restart, Revival
from .sleep import sleep
from .traffic import Traffic
from .update import Published, Unproven, update

BAD_ANSWERS = 3
"""A server is no longer used after this many consecutive answers that cannot be right."""
_LOOK_S = 0.2  # between two looks at servers that are on their way back
MOST_OPEN = 256
"""Groups that one server works on at a time. Others wait here and go to the first server that is free."""


@dataclass(eq=False, slots=True)
class Server:
    """The engine's state of a server. ``version``: of the weights that it has been proven to have; None while it must
    not be used, for the reason ``why``."""

    endpoint: Endpoint
    number: int
    version: int | None = None
    why: str = "it has got no weights yet"
    open: int = 0  # completions that it was asked for and has not answered
    groups: int = 0  # the requests that they are in
    bad: int = 0  # answers in a row that could not be right
    lives: int = 0  # how often it was given up: answers to what was asked in an earlier one are not used
    asleep: bool = False  # so that others may use its GPUs
    gap: float = 0.0  # mean difference of the canary in nats, at the last update
    missing: bool = False  # a cluster has no place to start it again


@dataclass(eq=False, slots=True)
class _Flight:
    """Requests of one prompt with consecutive sample numbers, which one HTTP request asks for."""

    requests: list[Request]
    prompt_ids: np.ndarray
    endings: Endings
    server: Server | None = None
    since: int = 0  # the version when it was sent
    life: int = 0  # of the server, then

    @property
    def sampling(self) -> Sampling:
        return self.requests[0].sampling

    @property
    def first(self) -> bool:
        return self.requests[0].first


class VllmEngine:
    """Generates on vLLM servers. They sample from the weights that :meth:`update` last brought them; until the first
    update there are none, and nothing can be submitted.

    Requests of one prompt that are submitted side by side are one request to a server, which computes their prompt
    once. A request's draws come from a seed that is a hash of (sampling.seed, prompt.uid), plus its sample number.
    Requests go to the server with the least to do. ``facts``: of the model that is trained. ``request_timeout_s``:
    without a new token, a server is given up. ``sync_timeout_s`` limits each step of an update. ``in_flight``: whether
    requests that are running at an update go on with the new weights, or are finished before. ``restart`` starts the
    server of that number again and returns where it listens, None for where it did before; it raises where it cannot.
    ``stop`` ends it, whatever it does. ``tell`` receives warnings about servers; ``counts`` has lost and refused
    completions.

    A server that fails is not used before an update has succeeded again: its requests are Lost. With ``restart``, one
    that died or hung is restarted and updated in the background, while the others go on. While no server is left,
    requests wait for these; when they have failed, all servers are restarted once more. EngineError where that fails,
    or without ``restart``.
    """

    capabilities = Capabilities(reproducible=False, entropies=False, untruncated_logprobs=False, in_flight_updates=True)

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        renderer: Renderer,
        *,
        facts: ModelFacts,
        request_timeout_s: float = 120.0,
        sync_timeout_s: float = 300.0,
        in_flight: InFlight = "keep",
        restart: Callable[[int], Endpoint | None] | None = None,
        stop: Callable[[int], None] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.servers = [Server(endpoint, number) for number, endpoint in enumerate(endpoints)]
        self._restart, self._stop = restart, stop
        self._in_flight = in_flight
        self._newest: Published | None = None
        self._revivals: dict[Server, Revival] = {}  # servers that are on their way back
        self._retried = False  # all servers, since the last one was lost
        self.renderer, self.facts = renderer, facts
        self.request_timeout_s, self.sync_timeout_s, self.tell = request_timeout_s, sync_timeout_s, tell
        self.counts: Counter[str] = Counter()
        self._version = 0
        self._labels: dict[str, int] = {}  # of all versions that servers may have, by what they call them
        self._unfinished: set[str] = set()
        self._waiting: deque[_Flight] = deque()
        self._flights: set[_Flight] = set()
        self._reports: list[Finished | Lost] = []  # that no poll has returned yet
        self._traffic = Traffic(hang_s=request_timeout_s)

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version:
            raise EngineError(
                f"version: got {version}, but the servers have the weights of version {self._version}; publish others"
            )

    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the version; servers that have another one are not used before the next update."""
        self._version = int(state["version"])

    # ---- the protocol

    def submit(self, requests: Sequence[Request]) -> None:
        taken: set[str] = set()
        for request in requests:
            if request.id in self._unfinished or request.id in taken:
                raise EngineError(f"request {request.id!r}: another one with this id is unfinished; ids must differ")
            taken.add(request.id)
        # Everything is checked before the engine's state changes: a refused call must leave nothing behind.
        flights = list(self._grouped(requests))
        # Does not wait: raises where no server is left and none can come back.
        self._await_a_server(time.monotonic())
        # sorted keeps the order of equals.
        self._waiting = deque(sorted([*self._waiting, *flights], key=lambda flight: not flight.first))
        self._unfinished |= taken
        self._dispatch()

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while self._unfinished and not self._reports:
                self._await_a_server(until)
                self._dispatch()  # what waits for a server that has just come back
                wait = None if until is None else max(0.0, until - time.monotonic())
                for flight, found in self._answers(wait):
                    self._reports += self._land(flight, found)
                self._dispatch()
                if wait == 0:
                    break
            self._rest()
        except BaseException:  # an interrupt too
            self._clear()
            self._reports = []
            raise
        reports, self._reports = self._reports, []
        return reports

    def cancel(self, ids: Sequence[str]) -> None:
        self._unfinished.difference_update(ids)
        dropped = set(ids)
        self._reports = [report for report in self._reports if report.id not in dropped]
        for flight in [f for f in (*self._waiting, *self._flights) if not self._wanted(f)]:
            if flight.server is None:
                self._waiting.remove(flight)
            else:
                self._traffic.drop(flight)
                self._left(flight)
        self._rest()

    # ---- requests

    def _grouped(self, requests: Sequence[Request]) -> Iterator[_Flight]:
        """Requests of one prompt and sampling whose sample numbers follow one another, as one flight each."""
        for _, side_by_side in itertools.groupby(requests, key=lambda r: (id(r.prompt), id(r.earlier), r.sampling)):
            same = list(side_by_side)
            prompt, sampling = same[0].prompt, same[0].sampling
            array = context_ids(same[0], self.renderer)
            self.facts.check(prompt, array, sampling.max_tokens, in_episode=same[0].earlier is not None)
            endings = Endings.of(self.renderer, sampling, ids=self.renderer.stop_ids | self.facts.ends)
            # Sample i has the draws of seed + i, on which a gap between the numbers must have no influence.
            # Equal for consecutive samples: sample minus place changes at every gap.
            runs = itertools.groupby(enumerate(same), key=lambda pair: pair[1].sample - pair[0])
            for _, run in runs:
                yield _Flight([request for _, request in run], array, endings)

    def _dispatch(self) -> None:
        """Sends waiting flights to the servers with the fewest open completions."""
        self._welcome()
        while self._waiting:
            free = [s for s in self._usable() if s.groups < MOST_OPEN or self._waiting[0].first]
            if not free:
                return
            server, flight = min(free, key=lambda s: s.open), self._waiting.popleft()
            # By the version and the life at this moment its answer is judged.
            flight.server, flight.since, flight.life = server, self._version, server.lives
            server.groups += 1
            server.open += len(flight.requests)
            self._flights.add(flight)
            request = flight.requests[0]
            begin = request.earlier.begin if request.earlier else 0
            seed = seed_of(flight.sampling.seed, request.prompt.uid, begin) + request.sample
            self._traffic.send(flight, server.endpoint, body(self._asked(flight), seed=seed, first=flight.first))

    def _asked(self, flight: _Flight) -> Asked:
        # Weights that came while it was answered are right, those from before it was sent are not.
        versions = {label: version for label, version in self._labels.items() if version >= flight.since}
        return Asked(
            flight.prompt_ids, len(flight.requests), flight.sampling, flight.endings, self.facts.vocabulary, versions
        )

    def _answers(self, wait: float | None) -> Iterator[tuple[_Flight, Any]]:
        """Yields the available answers; waits for the first of them."""
        while True:
            try:
                flight, found = self._traffic.answers.get(timeout=wait)
            except Empty:
                return
            self._traffic.taken(flight)
            if flight in self._flights:  # not one that was cancelled when it was answered already
                yield flight, found
            wait = 0.0

    def _land(self, flight: _Flight, found: Any) -> list[Finished | Lost]:
        """Reports an answered flight and updates the state of its server."""
        server = flight.server
        assert server is not None
        self._left(flight)
        try:
            if isinstance(found, Exception):
                raise found
            if server.version is None or server.lives != flight.life:  # given up while it answered
                raise BadAnswer(f"an answer that is not used: {server.why}")
            turns = read(found, self._asked(flight), decode=self.renderer.decode)
        except (ServerGone, ServerRefused, BadAnswer) as error:
            return self._lost(flight, server, error)
        server.bad = 0
        wanted = [(r, t) for r, t in zip(flight.requests, turns, strict=True) if r.id in self._unfinished]
        self._unfinished.difference_update(request.id for request, _ in wanted)
        return [Finished.of(request.id, turn) for request, turn in wanted]

    def _lost(self, flight: _Flight, server: Server, error: EngineError) -> list[Finished | Lost]:
        """Reports a flight without a usable answer. Raises EngineError if no server is left to ask again."""
        reason = str(error)
        if isinstance(error, BadAnswer):
            reason = f"server {server.endpoint}: gave {reason}"
        self.counts["lost"] += len(flight.requests)
        if server.lives == flight.life:  # else the server that failed is gone, and this may be another
            self._blame(server, error, reason, len(flight.requests))
        lost = [request.id for request in flight.requests if request.id in self._unfinished]
        self._unfinished.difference_update(lost)
        # Raises where nobody is left to ask again.
        self._await_a_server(time.monotonic())
        return [Lost(each, reason) for each in lost]

    def _blame(self, server: Server, error: EngineError, reason: str, completions: int) -> None:
        """Stops using a server that is dead, or that has given too many bad answers."""
        # A 500 of vLLM means that its engine is dead; other errors are about this request, or the answer to it.
        if isinstance(error, ServerGone) or (isinstance(error, ServerRefused) and error.status >= 500):
            self._give_up(server, reason)
            self._revive(server)
            return
        self.counts["refused"] += completions
        server.bad += 1
        self.tell(f"{reason}; its {completions} completions are asked for again")
        # Not restarted: it lives, and the next update proves its weights anew.
        if server.bad >= BAD_ANSWERS:
            self._give_up(server, f"{server.bad} answers in a row could not be used, the last: {reason}")

    # ---- servers

    def _usable(self) -> list[Server]:
        return [server for server in self.servers if server.version == self._version]

    def _require_a_server(self) -> None:
        if not self._usable():
            # missing: a cluster may have room again later, so that the run can be resumed.
            kind = MissingResources if any(server.missing for server in self.servers) else EngineError
            raise kind(f"no server is left that has the weights of version {self._version}: {self._complaints()}")

    def _complaints(self) -> str:
        return "; ".join(server.why for server in self.servers if server.version != self._version)

    def _give_up(self, server: Server, why: str) -> None:
        """Stops using a server. Its other requests fail or are answered."""
        if server.version is None:
            return
        server.version, server.why = None, why
        server.lives += 1
        others = len(self._usable())
        self.tell(f"{why}; the server is not used any more, {others} of {len(self.servers)} are left")

    def _revive(self, server: Server) -> None:
        """Starts to restart a server that is not used, unless a restart is under way."""
        restart = self._restart
        if restart is not None and self._newest is not None and server not in self._revivals:
            self._begin_revival(server, lambda: restart(server.number))

    def _begin_revival(self, server: Server, restart: Restart) -> None:
        def newest() -> Published:
            assert self._newest is not None
            return self._newest

        self._revivals[server] = Revival(
            server.endpoint, restart=restart, newest=newest, timeout_s=self.sync_timeout_s
        )  # fmt: skip

    def _welcome(self) -> None:
        """Uses the servers that have been restarted and updated."""
        for server, revival in [(s, r) for s, r in self._revivals.items() if r.over]:
            del self._revivals[server]
            server.endpoint, server.missing = revival.endpoint, revival.missing
            if revival.error:
                server.why = revival.error
                self.tell(f"{server.why}; the server is not used until an update succeeds")
            elif revival.published is None or revival.published is not self._newest:  # others came meanwhile
                # Only updated: it runs already.
                self._begin_revival(server, lambda: None)
            else:
                server.version, server.bad, server.gap = revival.published.version, 0, revival.gap
                self.tell(f"server {server.endpoint}: is back, and has the weights of version {server.version}")

    def _await_a_server(self, until: float | None) -> None:
        """Where no server is left, waits until that time for those on their way back; when these have failed, restarts
        all once more. Raises EngineError where no server can come back any more."""
        while not self._usable():
            if self._revivals:
                left = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
                if left <= 0:
                    return
                self._await_a_revival(left)
            elif self._retried or self._restart is None or any(server.asleep for server in self.servers):
                self._retried = False
                self._require_a_server()
            else:
                # All at once, and only once before some server is usable again.
                self._retried = True
                for server in self.servers:
                    self._revive(server)
        self._retried = False

    def _await_a_revival(self, seconds: float = _LOOK_S) -> None:
        """Waits for one of the servers on their way back, and uses those that have come back."""
        next(iter(self._revivals.values())).wait(seconds)
        self._welcome()

    def update(self, published: Published) -> None:
        """Updates all servers to these weights, including those that have failed before, and uses those that have them.
        Servers that are being restarted get them at the end of that.

        Running requests continue with the new weights or are finished before; waiting requests get the new ones. Raises
        EngineError if no server has the weights.
        """
        if self._in_flight == "finish":
            self._finish()
        self._welcome()
        behind = [server for server in self.servers if server.version != published.version]
        # A label that no server has had means new weights, whatever their number is.
        if published.label not in self._labels:
            behind = self.servers
        self._labels[published.label] = published.version
        self._newest = published
        self._bring_up(published, [server for server in behind if server not in self._revivals])
        self._version = published.version
        while not self._usable() and self._revivals:
            self._await_a_revival()
        # Answers carry no label from before their request was sent: what is older than all of them is forgotten.
        oldest = min((flight.since for flight in self._flights), default=self._version)
        self._labels = {label: version for label, version in self._labels.items() if version >= oldest}
        self._require_a_server()

    def _finish(self) -> None:
        """Waits for the requests that servers work on; those that wait here stay. A server that hangs loses its own."""
        while self._flights:
            for flight, found in self._answers(None):
                self._reports += self._land(flight, found)

    def sleep(self) -> None:
        """Has all servers give up their memory, so that others may use their GPUs until the next :meth:`update`; one
        that keeps it is ended. Raises EngineError where a server cannot be ended."""
        while self._revivals:  # they take memory too, and would be nowhere if they were ended each time
            self._await_a_revival()
        awake = [server for server in self.servers if not server.asleep]
        if awake:
            with ThreadPoolExecutor(len(awake), thread_name_prefix="trew-sleep") as threads:
                list(threads.map(self._sleep, awake))

    def _sleep(self, server: Server) -> None:
        # Nothing is sent to it from here on.
        before, server.version = server.version, None
        try:
            sleep(server.endpoint, timeout_s=self.sync_timeout_s)
        except EngineError as error:
            if self._stop is None:
                raise
            self._stop(server.number)
            server.why, server.lives = str(error), server.lives + 1
            if before is not None:  # else this was told when it failed
                self.tell(f"{error}; the server is ended, and started again at the next update")
        else:
            server.asleep, server.why = True, f"server {server.endpoint}: is asleep until the next update"

    def _bring_up(self, published: Published, servers: Sequence[Server]) -> None:
        """Updates servers in parallel; one that fails is not used and keeps the reason. Dead servers are restarted."""
        for server in servers:
            server.version, server.why = None, f"server {server.endpoint}: its weights are being updated"
        # While they are updated servers make no tokens, which must not look as if they hung.
        self._traffic.paused = {server.endpoint for server in servers}
        gone: list[bool] = []
        try:
            if servers:
                with ThreadPoolExecutor(len(servers), thread_name_prefix="trew-weights") as threads:
                    gone = list(threads.map(lambda server: self._update(server, published), servers))
        finally:
            self._traffic.paused = set()
        for server, lost in zip(servers, gone, strict=True):
            if server.version is None:
                self.tell(f"{server.why}; the server is not used until an update succeeds")
            # Answers of this life are not used any more.
            if lost:
                server.lives += 1
                self._revive(server)

    def _update(self, server: Server, published: Published) -> bool:
        """Updates a server to these weights; returns whether it is gone."""
        asleep, server.asleep = server.asleep, False
        try:
            updated = update(server.endpoint, published, timeout_s=self.sync_timeout_s, asleep=asleep)
        except EngineError as error:
            server.why = str(error)
            # What it makes until the next update is of wrong weights, under a label that stays known.
            if isinstance(error, Unproven):
                server.lives += 1
            # One that is half awake would take no order to sleep.
            return asleep or isinstance(error, ServerGone)
        if updated.wrong_before:  # what it has made since then may be of any weights
            server.why, server.lives = f"server {server.endpoint}: had other weights before", server.lives + 1
        server.version, server.bad, server.gap = published.version, 0, updated.gap
        return False

    # ---- what is left behind

    def _wanted(self, flight: _Flight) -> bool:
        return any(request.id in self._unfinished for request in flight.requests)

    def _left(self, flight: _Flight) -> None:
        """Takes a flight off its server."""
        assert flight.server is not None
        self._flights.discard(flight)
        flight.server.groups -= 1
        flight.server.open -= len(flight.requests)

    def _rest(self) -> None:
        """Ends the thread that sends requests once there are none: between two steps no thread can leak."""
        if not self._unfinished:
            self._clear()

    def _clear(self) -> None:
        self._traffic.stop()
        for flight in list(self._flights):
            self._left(flight)
        self._waiting.clear()
        self._unfinished = set()


def seed_of(seed: int, uid: str, begin: int = 0) -> int:
    """The seed of a prompt's sample 0; sample i has this plus i. ``begin``: tokens between the prompt and the answer.

    Hashed: seeds of neighbouring prompts or steps that were counted up would give them the same draws.

    >>> seed_of(1, "a") != seed_of(1, "b") != seed_of(2, "a"), seed_of(1, "a") < 2**56
    (True, True)
    """
    turn = f"{begin}:" if begin else ""
    return int.from_bytes(hashlib.blake2b(f"{turn}{seed}:{uid}".encode(), digest_size=7).digest(), "big")
