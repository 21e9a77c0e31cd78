"""Servers behind ``trew serve`` on other machines, as a run sees them: up, on their way back, or lost.

``trew serve`` starts a server that died again by itself; a run waits for it. What only a run can see, that a server
makes no tokens, it says there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, EngineError
from .client import ServerGone, ServerRefused, call
from .endpoint import Endpoint
from .server import START_S

STATE = "/trew/server"
RENEW = "/trew/server/renew"
AWAY_S = 60.0
"""Seconds that ``trew serve`` itself may be out of reach before it is given up: a restart of it, or of the network."""
_ASK_S = 20.0
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class State:
    """What ``trew serve`` says of a server: ``state`` is starting, up or lost; ``life`` differs after each start."""

    life: str
    state: str
    why: str


def state_of(endpoint: Endpoint) -> State | None:
    """The state of a server; None where no ``trew serve`` is in front of it. Raises ServerGone, ServerRefused."""
    try:
        found: Any = call(endpoint, "GET", STATE, what="asking for its state", timeout_s=_ASK_S)
        return State(str(found["life"]), str(found["state"]), str(found["why"]))
    except ServerRefused as error:
        if error.status != 404:
            raise
    except (KeyError, TypeError):
        pass
    return None


def wait_for(endpoint: Endpoint, *, tell: Callable[[str], None], seconds: float = START_S) -> State | None:
    """Waits until a server that is being started is up; None where no ``trew serve`` is in front of it.

    Raises ConfigError where the token is not its own; ServerGone where it is lost, or not up after so many seconds."""
    until, told = time.monotonic() + seconds, False
    try:
        while (found := state_of(endpoint)) is not None and found.state != "up":
            if found.state == "lost":
                raise ServerGone(f"server {endpoint}: {found.why}")
            if time.monotonic() > until:
                raise ServerGone(f"server {endpoint}: was not up within {seconds:g} s: {found.why}")
            if not told:
                tell(f"server {endpoint}: {found.why}; waiting for it")
            told = True
            time.sleep(_LOOK_S)
    except ServerRefused as error:
        if error.status != 401:
            raise
        got = "another one" if endpoint.token else "none: TREW_SERVER_TOKEN is not set"
        raise ConfigError(
            f"server {endpoint}: needs its token, got {got}; set TREW_SERVER_TOKEN to that of the server (trew serve "
            "shows it at its first start, and keeps it in its folder)"
        ) from None
    return found


class Returns:
    """Waits for servers that a run has given up: an engine's ``restart``. ``lives`` are those that the run knows of, by
    number; None for servers without ``trew serve``."""

    def __init__(self, endpoints: Sequence[Endpoint], lives: Sequence[str | None]) -> None:
        self._endpoints, self._lives = endpoints, [*lives]

    def __call__(self, number: int, *, seconds: float = START_S) -> Endpoint:
        """Returns where a server listens, once it is up in another life. Raises EngineError where it is lost, or nobody
        starts it."""
        endpoint, known = self._endpoints[number], self._lives[number]
        if known is None:
            raise EngineError(f"server {endpoint}: is gone, and no trew serve starts it again; do so yourself")
        # heard: when trew serve last answered, whatever it said. Only a longer silence than AWAY_S gives it up.
        until, heard = time.monotonic() + seconds, time.monotonic()
        while time.monotonic() < until:
            try:
                found = self._look(endpoint, known)
                heard = time.monotonic()
            except ServerGone as error:
                if time.monotonic() > heard + AWAY_S:
                    raise EngineError(f"{error}; trew serve has not answered for {AWAY_S:g} s") from None
                found = None
            if found is not None and found.state == "up" and found.life != known:
                self._lives[number] = found.life
                return endpoint
            time.sleep(_LOOK_S)
        raise EngineError(f"server {endpoint}: was not up again within {seconds:g} s")

    @staticmethod
    def _look(endpoint: Endpoint, known: str) -> State:
        """The state of a server, which is to be started again where it is still up. Raises EngineError where it never
        will be."""
        found = state_of(endpoint)
        if found is None:
            raise EngineError(f"server {endpoint}: is gone, and no trew serve is in front of it any more")
        if found.state == "lost":
            raise EngineError(f"server {endpoint}: {found.why}")
        # It answers for a server that makes no progress: only the run has noticed.
        if found.state == "up" and found.life == known:
            params = {"life": known}
            call(endpoint, "POST", RENEW, what="having it started again", timeout_s=_ASK_S, params=params)
        return found
