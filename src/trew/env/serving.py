"""The host of episodes: loads an environment once, and plays each episode in a fork of itself.

A fork costs milliseconds and shares what was loaded. An episode that hangs, exits or exhausts its memory ends alone,
and episodes that wait for something do not wait for each other. The host itself never runs an episode's code.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time

from ..errors import ConfigError, SandboxError
from ..rewards.isolation.forked import Forked
from ..rewards.isolation.frames import LOOK_S, Channel, Closed, Late
from ..rewards.isolation.worker import DEATH_S
from ..rewards.user.serving import channel_of_life, survive_requests
from ..rewards.user.wire import decode, encode
from .load import Loaded, Spec, load
from .playing import play


def main(source: int, target: int, *, parent: int, life: int | None) -> None:
    """Loads what the first message names, reports it, and serves until the channel closes. ``life`` is the pipe to the
    run ``parent`` if no guardian holds it."""
    channel = channel_of_life(source, target, parent=parent, life=life)
    with contextlib.suppress(Closed):
        name, args, tools, limit_s = decode(channel.receive()[0])
        try:
            loaded = load(Spec(name, args, tuple(tools)), timeout_s=limit_s)
        except (ConfigError, SandboxError) as error:
            channel.send(encode({"problems": str(error).split("\n")}))
            return
        channel.send(encode({"sources": dict(loaded.sources), "judges_stopped": loaded.judges_stopped}))
        gc.collect()
        gc.freeze()  # a collection in a fork would copy the memory that it shares
        Host(channel, loaded, limit_s=limit_s).serve()
    os._exit(0)  # not sys.exit, which would wait for threads that the environment's module has started


class Host:
    """Passes messages between the run and episodes; ends an episode that does not answer within ``limit_s``.

    Messages are a key and what :func:`.playing.play` takes; answers are the key and what it answers, or a failure of
    kind ``hung`` or ``died``."""

    def __init__(self, channel: Channel, loaded: Loaded, *, limit_s: float) -> None:
        self.channel, self.loaded, self.limit_s = channel, loaded, limit_s
        self._episodes: dict[str, Forked] = {}
        self._late: dict[str, float] = {}  # when an episode that has to answer is late
        self._leaving: dict[Forked, float] = {}  # episodes that free what they hold, and when they are killed

    def serve(self) -> None:
        """Serves until the channel closes."""
        while True:
            ready = self._ready()
            # Only episodes that owe an answer are watched. One that dies in between is noticed with its next message.
            for key in [key for key in self._late if self._episodes[key].channel.source in ready]:
                self._take(key)
            if self.channel.source in ready:
                self._give(self.channel.receive()[0])
            now = time.monotonic()
            for key in [key for key, late in self._late.items() if now >= late]:
                self._failed(key, "hung", f"no answer within environment.timeout_s = {self.limit_s:g} s")
            # An episode that leaves answers nothing more: readable means that its end of the pipe is closed.
            for episode in [e for e, late in self._leaving.items() if now >= late or e.channel.source in ready]:
                del self._leaving[episode]
                _kill(episode)

    def _ready(self) -> set[int]:
        """Waits until something can be read, or an episode is late."""
        watched = [self.channel, *(self._episodes[key].channel for key in self._late)]
        watched += [episode.channel for episode in self._leaving]
        poll = select.poll()
        for channel in watched:
            poll.register(channel.source, select.POLLIN)
        left = min([*self._late.values(), *self._leaving.values()], default=float("inf")) - time.monotonic()
        # At most LOOK_S: the death of the parent does not always close the pipe, and is asked for below.
        found = poll.poll(max(0.0, min(left, LOOK_S)) * 1000)  # milliseconds
        if self.channel.parent is not None and os.getppid() != self.channel.parent:
            raise Closed("the run is gone")
        return {descriptor for descriptor, _ in found}

    def _give(self, message: bytes) -> None:
        """Passes a message on to its episode."""
        key, what, *given = decode(message)
        if what == "end":
            self._end(key)
            return
        if what == "begin":
            # The fork closes the pipes of all others: a copy that it kept would hide their ends.
            self._episodes[key] = Forked(self._play, inherited=self._pipes(), parent=self.channel.parent)
        elif key not in self._episodes:  # it has failed, which the run will read
            return
        # One limit for reading the message and for answering it.
        self._late[key] = time.monotonic() + self.limit_s
        try:
            self._episodes[key].channel.send(encode([what, *given]), deadline=self._late[key])
        except Late:
            self._failed(key, "hung", "it did not read its message")
        except Closed:
            # Its process is dead already; the message only noticed it.
            self._failed(key, "died", _death(self._episodes[key]))

    def _play(self, channel: Channel) -> None:
        os.setpgid(0, 0)  # it is ended as a group, with the processes that it has started
        survive_requests()
        play(self.loaded, channel)
        os._exit(0)

    def _pipes(self) -> list[int]:
        channels = (self.channel, *(e.channel for e in (*self._episodes.values(), *self._leaving)))
        return [descriptor for channel in channels for descriptor in (channel.source, channel.target)]

    def _take(self, key: str) -> None:
        """Passes an episode's answer on."""
        try:
            [answer] = self._episodes[key].channel.receive(deadline=self._late[key])
        except Late:
            self._failed(key, "hung", f"no whole answer within environment.timeout_s = {self.limit_s:g} s")
        except Closed:
            self._failed(key, "died", _death(self._episodes[key]))
        else:
            del self._late[key]
            self.channel.send(key.encode(), answer)

    def _failed(self, key: str, kind: str, why: str) -> None:
        del self._late[key]
        _kill(self._episodes.pop(key))
        self.channel.send(key.encode(), encode(["failed", kind, why]))

    def _end(self, key: str) -> None:
        """Lets an episode free what it holds, and kills one that is not done with a message."""
        episode = self._episodes.pop(key, None)
        if episode is None:
            return
        # One that owes no answer reads the message and frees what it holds; one that still works is killed.
        if self._late.pop(key, None) is None:
            with contextlib.suppress(Closed, Late):
                episode.channel.send(encode(["end"]), deadline=time.monotonic() + self.limit_s)
            self._leaving[episode] = time.monotonic() + self.limit_s
        else:
            _kill(episode)


def _kill(episode: Forked) -> None:
    """Ends an episode and the processes that it has started."""
    if episode.pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no group of its own yet
            os.killpg(episode.pid, signal.SIGKILL)
    episode.end()


def _death(episode: Forked) -> str:
    """How the process of an episode ended whose channel has closed."""
    until, found = time.monotonic() + DEATH_S, None
    while found is None and time.monotonic() < until:
        # WNOWAIT leaves its number to it, so that the kill of its group hits no other one.
        found = os.waitid(os.P_PID, episode.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        time.sleep(0.001)
    if found is None:
        return "its process closed its channel"
    if found.si_code == os.CLD_EXITED:
        return f"its process exited with code {found.si_status}"
    known = found.si_status in set(signal.Signals)
    return f"its process was ended by {signal.Signals(found.si_status).name if known else found.si_status}"
