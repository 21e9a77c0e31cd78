"""A vLLM server on a node of a Ray cluster: the actor that starts it there, behind a token, and ends it.

What is asked of it is numbered and may be asked again: a call whose answer was lost may or may not have been carried
out. The server ends with the actor, however that ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...config import parse
from ...errors import ConfigError, TrewError
from ...utils import listening, ray_cluster
from . import launch
from .keeper import Keeper
from .proxy import Proxy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRequest:
    """What server ``number`` of a run is started with. ``config``: the run's, as a table; ``model`` and ``folder`` are
    folders that this node must see, of the model's files and for the log; ``host`` is the interface to listen on;
    ``cpus`` and ``gpus`` are what the actor was given."""

    number: int
    config: Mapping[str, Any]
    model: str
    folder: str
    host: str
    token: str
    cpus: int
    gpus: int


@dataclass(frozen=True, slots=True)
class ActorState:
    """What an actor says of its server: ``number`` is that of the last order, 0 before the first. ``address``: where
    it listens; ``backend``: how it receives weights; ``wrong``: that it never will, since something must be changed
    first."""

    number: int = 0
    state: Literal["none", "starting", "up", "lost"] = "none"
    why: str = ""
    address: str = ""
    backend: str = ""
    wrong: bool = False


class _Server:
    """A server that is being started, or was. ``close`` ends it."""

    def __init__(self, request: ServerRequest) -> None:
        self.why, self.wrong, self.address = "", False, ""
        self._keeper: Keeper | None = None
        self._closed = threading.Event()
        self._ending = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._run, args=(request,), name="trew-server", daemon=True)
        self._thread.start()

    def said(self, number: int) -> ActorState:
        if self.why:
            return ActorState(number, "lost", self.why, wrong=self.wrong)
        if self._keeper is None or self._thread.is_alive():
            return ActorState(number, "starting")
        (kept,) = self._keeper.kept
        state: Literal["up", "lost"] = "up" if kept.state == "up" else "lost"
        return ActorState(number, state, kept.why, self.address, self._keeper.servers.backend)

    def close(self) -> None:
        """Ends the server; one that is still being started fails then."""
        self._closed.set()
        if self._keeper is not None:
            self._keeper.close()
        self._thread.join()
        self._ending.close()

    def _run(self, request: ServerRequest) -> None:
        try:
            # tries=0: a server that ends is the run's to start again.
            keeper = Keeper(self._servers(request), tries=0, tell=_say)
            self._ending.callback(keeper.close)
            self._keeper = keeper
            # close() may have come before there was a keeper that it could close.
            if self._closed.is_set():
                return
            bound = self._ending.enter_context(listening.bound_on_node(request.host))
            proxy = listening.Guard(Proxy(keeper, {bound.getsockname()[1]: 0}), request.token, _say)
            self._ending.enter_context(listening.listening(proxy, [bound], None))
            self.address = listening.address_of(bound, host=request.host, encrypted=False)
            keeper.start()
        except TrewError as error:
            self.why, self.wrong = str(error), isinstance(error, ConfigError)
        except Exception as error:  # whatever it is, the run must hear of it
            self.why = f"{type(error).__name__}: {error}"

    @staticmethod
    def _servers(request: ServerRequest) -> Any:
        for place in (request.model, request.folder):
            if not Path(place).is_dir():
                raise ConfigError(
                    f"node {os.uname().nodename} does not see {place}; the model and the run folder must be on a file "
                    "system that all nodes share"
                )
        config = parse(dict(request.config))
        own = dataclasses.replace(config, cluster=dataclasses.replace(config.cluster, servers=1))
        # No learner is on this actor's GPUs.
        made = launch.servers(own, model=Path(request.model), device="cpu", folder=Path(request.folder))
        # Where servers get GPUs, ranks get others (config.places): weights go from one to the other.
        backend = launch.backend(own, gpus=request.gpus, device="cuda" if request.gpus else "cpu")
        for server in made.servers:
            if bool(server.options.gpus) != bool(request.gpus):
                build, has = ("CPUs", "GPUs") if request.gpus else ("GPUs", "none")
                raise ConfigError(f"cluster.python: is vLLM's build for {build}, and its node has {has}")
            server.options = dataclasses.replace(server.options, threads=request.cpus, backend=backend)
            server.name = f"server {request.number}"  # here it is the only one
        return made


def _say(line: str) -> None:
    print(line, flush=True)  # into the actor's log


class ServerActor:
    """Keeps one server. Orders have numbers that grow; one that was carried out already, or is older than the last,
    changes nothing."""

    def __init__(self, make: Callable[[ServerRequest], Any] = _Server) -> None:
        self._make, self._number = make, 0
        self._server: Any = None

    def start(self, number: int, request: dict[str, Any]) -> dict[str, Any]:
        """Starts the server, in place of the one of an older order; returns before it is up."""
        if number > self._number:
            self._end()
            self._number, self._server = number, self._make(ServerRequest(**request))
        return self.state()

    def stop(self, number: int) -> dict[str, Any]:
        """Ends the server of this order or an older one."""
        if number >= self._number:
            self._end()
            self._number = number
        return self.state()

    def state(self) -> dict[str, Any]:
        """Where it is: an :class:`ActorState` as a table."""
        found = ActorState(self._number) if self._server is None else self._server.said(self._number)
        return dataclasses.asdict(found)

    def host(self) -> str:
        """The address of its node, by which others reach it."""
        return ray_cluster.node_address()

    def _end(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
