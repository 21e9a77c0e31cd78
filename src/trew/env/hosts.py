"""Plays episodes in other processes: sends what the policy said, and receives what environments answer.

Nothing here waits for an environment: answers are collected by a thread per host, and :meth:`Hosts.poll` returns those
that are there.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, EpisodeError
from ..rewards.isolation.frames import Closed, WorkerLost
from ..rewards.isolation.pool import processors
from ..rewards.isolation.worker import GUARDED_S, Worker
from ..rewards.user.wire import decode, encode
from ..utils import children
from .load import Spec
from .protocol import Reply, Say
from .wire import from_reply, to_say

LOAD_S = 600.0  # for what an environment's file imports
FailureKind = Literal["raised", "hung", "died"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the episode ``key`` said, or how it failed: ``kind``, and ``error`` for its author."""

    key: str
    say: Say | None
    kind: FailureKind | None = None
    error: str = ""


class _Host:
    """A host process, with the thread that receives its answers into ``answers``."""

    def __init__(self, spec: Spec, *, timeout_s: float, answers: queue.SimpleQueue[tuple[_Host, Any]]) -> None:
        # The whole environment: unlike graders, users' code may need API keys and the like.
        environment = children.environment(PYTHONHASHSEED="0")
        self.worker = Worker(
            "trew.env.serving", {}, path=sys.path, environment=environment, stderr=None, guarded=True
        )  # fmt: skip
        # What serving.main() reads first.
        self.worker.channel.send(encode([spec.name, dict(spec.args), list(spec.tools), timeout_s]))
        self.keys: set[str] = set()
        self._answers = answers
        self._thread = threading.Thread(target=self._receive, name="trew-episodes", daemon=True)

    def load(self) -> dict[str, Any]:
        """Waits until the environment is loaded; receives answers from then on."""
        [found] = self.worker.channel.receive(deadline=time.monotonic() + LOAD_S)
        self._thread.start()
        return decode(found)

    def send(self, key: str, *message: Any) -> None:
        self.worker.channel.send(encode([key, *message]))

    def end(self) -> None:
        self.worker.kill()
        # Its thread ends with the pipe. Closed under it, the pipe's number could be that of the next host's by the time
        # it reads again, and it would take that one's answer.
        if self._thread.is_alive():
            self._thread.join(GUARDED_S)
        self.worker.end()

    def _receive(self) -> None:
        try:
            while True:
                key, answer = self.worker.channel.receive()
                self._answers.put((self, (key.decode(), answer)))
        except (WorkerLost, OSError, ValueError):  # its pipe is closed, there or here
            # With its host, so that poll() knows whose death a None is.
            self._answers.put((self, None))


class Hosts:
    """Episodes of one environment, in up to ``size`` host processes; see :mod:`.serving`. ``timeout_s`` limits the time
    of each answer. One thread may begin and end episodes while another one polls.

    An episode that fails is over. After the death of a host all of its episodes have failed, and the next episode
    starts another one."""

    def __init__(self, spec: Spec, *, size: int = 0, timeout_s: float = 20.0) -> None:
        self.spec, self.timeout_s = spec, timeout_s
        self._size = size or processors()
        self._answers: queue.SimpleQueue[tuple[_Host, Any]] = queue.SimpleQueue()
        self._hosts: list[_Host | None] = [None] * self._size
        self._host_of: dict[str, _Host] = {}
        self._numbers = itertools.count()
        self._sources: Mapping[str, str] | None = None
        self.judges_stopped = False  # once loaded: whether stopped() may be called
        self._lock = threading.RLock()  # of everything but the queue
        _alive.add(self)

    def load(self) -> None:
        """Starts a host, so that problems show. Raises ConfigError with what is wrong with the environment."""
        self._host(0)

    def begin(self, row: Mapping[str, Any], seed: int) -> str:
        """Begins an episode; returns its key, under which answers will come."""
        with self._lock:
            number = next(self._numbers)
            # In turn over the places; a place whose host has died gets a new one here.
            key, host = str(number), self._host(number % self._size)
            host.keys.add(key)
            self._host_of[key] = host
            self._send(host, key, "begin", dict(row), seed)
            return key

    def reply(self, key: str, reply: Reply) -> None:
        """Passes on what the policy said."""
        with self._lock:
            self._send(self._host_of[key], key, "reply", from_reply(reply))

    def stopped(self, key: str) -> None:
        """Asks an environment that judges these what an episode has earned that a budget has ended."""
        with self._lock:
            self._send(self._host_of[key], key, "stopped")

    def end(self, key: str) -> None:
        """Ends an episode, whose answers are dropped from now on. Ignores unknown keys."""
        with self._lock:
            host = self._host_of.pop(key, None)
            if host is not None:
                host.keys.discard(key)
                self._send(host, key, "end")

    def poll(self, timeout_s: float | None = 0.0) -> list[Answer]:
        """Returns the answers that are there; waits up to ``timeout_s`` for the first one, None = without a limit.
        Returns [] at once where no episode is being played."""
        found: list[Answer] = []
        while self._host_of:
            try:
                # Waits for the first answer only, then takes what else is there.
                host, message = self._answers.get(timeout=0 if found else timeout_s)
            except queue.Empty:
                break
            with self._lock:
                found += self._lost(host) if message is None else self._read(*message)
        return found

    def close(self) -> None:
        """Ends all hosts and episodes."""
        # Emptied before the hosts end: each one's thread then puts a None, which wakes a waiting poll(), and that finds
        # no episode left to wait for.
        self._host_of.clear()
        ended: list[_Host | None] = [None] * self._size
        ended, self._hosts = self._hosts, ended
        for host in ended:
            if host is not None:
                host.end()

    def _send(self, host: _Host, *message: Any) -> None:
        with contextlib.suppress(Closed):  # its thread reports it
            host.send(*message)

    def _host(self, place: int) -> _Host:
        host = self._hosts[place]
        if host is not None:
            return host
        host = _Host(self.spec, timeout_s=self.timeout_s, answers=self._answers)
        try:
            found = host.load()
        except WorkerLost as error:
            # Closed: the process has ended, and how says why. Otherwise it was too slow.
            how = host.worker.how_it_ended() if isinstance(error, Closed) else f"not imported within {LOAD_S:g} s"
            host.end()
            raise ConfigError(f"environment.name: {self.spec.name}: cannot be loaded: {how}") from None
        if problems := found.get("problems"):
            host.end()
            raise ConfigError(problems)
        if self._sources not in (None, found["sources"]):
            host.end()
            raise EpisodeError(
                f"environment {self.spec.name}: its file was changed since the run began, and its process had to be "
                "started again; put the file back as it was, or start a new run"
            )
        self._sources, self.judges_stopped = found["sources"], found["judges_stopped"]
        self._hosts[place] = host
        return host

    def _read(self, key: str, answer: bytes) -> list[Answer]:
        if key not in self._host_of:  # ended meanwhile
            return []
        what, *given = decode(answer)
        if what == "said":
            return [Answer(key, to_say(given[0]))]
        # A failure ends the episode: no further answer has its key.
        self._host_of.pop(key).keys.discard(key)
        return [Answer(key, None, *given)]

    def _lost(self, host: _Host) -> list[Answer]:
        """Fails the episodes of a host that has died."""
        if host not in self._hosts:  # closed here
            return []
        how = host.worker.how_it_ended()
        # The next episode of this place starts another host.
        self._hosts[self._hosts.index(host)] = None
        host.end()
        for key in host.keys:
            self._host_of.pop(key, None)
        # keys is a set of numbers written as text.
        return [Answer(key, None, "died", f"the host of the episode: {how}") for key in sorted(host.keys, key=int)]

    def _forget(self) -> None:
        for host in self._hosts:
            if host is not None:
                host.worker.forget()
        self._hosts = [None] * self._size
        self._host_of = {}


_alive: weakref.WeakSet[Hosts] = weakref.WeakSet()


def _forget_all() -> None:
    for hosts in [*_alive]:
        hosts._forget()


# A fork of the run must neither end the hosts when it exits, nor read their answers.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
