"""Keeps the servers of ``trew serve`` up: starts again what died, or what a run found to stand still."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ...errors import EngineError
from .server import START_S, Servers

LOOK_S = 0.2
PROVEN_S = 600.0
"""Seconds that a server must have been up for its earlier deaths to be forgotten."""


@dataclass(eq=False, slots=True)
class Kept:
    """A server that is kept up. ``life`` names the time since its last start, unlike any other, the ``lives``-th;
    ``fresh``: no run has given it weights in this life."""

    number: int
    life: str = ""
    state: Literal["starting", "up", "lost"] = "starting"
    why: str = "it is being started"  # it is not up
    fresh: bool = True
    lives: int = 0
    asked: threading.Event = field(default_factory=threading.Event)  # to start it again
    tries: int = 0
    since: float = 0.0

    def said(self) -> dict[str, Any]:
        """What runs are told about it, as JSON."""
        return {"server": self.number, "life": self.life, "state": self.state, "why": self.why}


class Keeper:
    """Starts servers, and starts each again when it ends, ``tries`` times in a row at most. ``tell`` receives one line
    for everything that happens."""

    def __init__(self, servers: Servers, *, tries: int, tell: Callable[[str], None]) -> None:
        self.servers, self.tries, self.tell = servers, tries, tell
        self.kept = tuple(Kept(server.index) for server in servers.servers)
        self._ending = threading.Event()

    def start(self, *, seconds: float = START_S) -> None:
        """Starts all servers and returns once they answer. Raises EngineError where one does not: what is wrong from
        the beginning is no accident, and not tried again."""
        self.servers.start(seconds=seconds)
        for kept in self.kept:
            self._is_up(kept)
            threading.Thread(target=self._keep, args=(kept,), name=f"trew-keeper-{kept.number}", daemon=True).start()

    def renew(self, number: int, life: str) -> None:
        """Has a server started again that does not get on, unless that has happened since the ``life`` that is meant:
        a run that asks twice, or several runs, cost it one start."""
        kept = self.kept[number]
        if kept.state == "up" and kept.life == life:
            kept.state, kept.why = "starting", "it made no progress, and is started again"
            kept.asked.set()

    def lost(self) -> str:
        """Why no server is left; empty while one is."""
        return "; ".join(kept.why for kept in self.kept) if all(k.state == "lost" for k in self.kept) else ""

    def why(self, number: int) -> str:
        """Why a server does not answer, as far as is known."""
        kept = self.kept[number]
        return self.servers.cause(number) or ("it closed the connection" if kept.state == "up" else kept.why)

    def close(self) -> None:
        """Ends all servers."""
        self._ending.set()
        self.servers.close()

    def _is_up(self, kept: Kept) -> None:
        # The state comes last: other threads take the rest for granted once it says up.
        kept.life, kept.since, kept.fresh = secrets.token_hex(8), time.monotonic(), True
        kept.lives += 1
        kept.why, kept.state = "", "up"

    def _keep(self, kept: Kept) -> None:
        server = self.servers.servers[kept.number]
        while kept.state != "lost" and not self._ending.is_set():
            # The wait is also the pause between two looks.
            if kept.asked.wait(LOOK_S) or server.died():
                self._again(kept)

    def _again(self, kept: Kept) -> None:
        """Starts a server again until it answers, or gives it up."""
        why = self.servers.cause(kept.number) or f"server {kept.number}: it made no progress"
        # A server that was up for long starts with all its tries again.
        if time.monotonic() - kept.since > PROVEN_S:
            kept.tries = 0
        kept.state, kept.why, kept.fresh = "starting", f"{why}; it is being started again", True
        kept.asked.clear()
        while kept.tries < self.tries and not self._ending.is_set():
            kept.tries += 1
            self.tell(f"{why}; it is started again ({kept.tries} of {self.tries} tries)")
            try:
                self.servers.restart(kept.number)
            except EngineError as error:
                why = str(error)
                continue
            except OSError as error:  # no room for its log, or for a process: runs would wait for it for nothing
                why = f"server {kept.number} cannot be started: {error}"
                continue
            self._is_up(kept)
            self.tell(f"server {kept.number}: is up again; runs give it their weights before they use it")
            return
        if not self._ending.is_set():
            kept.state, kept.why = "lost", f"{why}; it was started {kept.tries} times again, and is given up"
            self.tell(kept.why)
