"""The servers of a run on a Ray cluster: each is an actor with a place of its own, asked for again when it is lost."""

from __future__ import annotations

import dataclasses
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...config import Config, to_table
from ...config.places import server_bundle, uses_gpus
from ...errors import ConfigError, EngineError, MissingResources
from ...utils import ray_cluster
from ...utils.ray_cluster import Bundle, lacking, nodes
from .endpoint import Endpoint
from .ray_actor import ActorState, ServerActor, ServerRequest
from .server import GRACE_S, START_S

ASK_S = 30.0
"""Seconds for the answer of an actor that is there; then it is asked again."""
DEATHS = 3
"""Actors of one server that may die while it is started, before that counts as a failure."""
_LOOK_S = 0.5
_END_S = GRACE_S + 10.0


class _Gone(Exception):
    """An actor that does not exist any more."""


class _Held:
    """One server, number ``index``: its place, its actor, and the number of the last order."""

    def __init__(self, index: int) -> None:
        self.index, self.number = index, 0
        self.group: Any = None
        self.actor: Any = None
        self.host = ""
        self.endpoint: Endpoint | None = None
        self.lock = threading.Lock()  # one order at a time

    def __str__(self) -> str:
        return f"server {self.index}"


class RayServers:
    """Servers on a Ray cluster, of the same use as :class:`.server.Servers`. A context manager: all of them have ended
    when it is left. ``bundle`` is what each asks of Ray; ``folder`` is for logs, ``tell`` receives what a run waits
    for."""

    def __init__(
        self, module: Any, config: Config, *, bundle: Bundle, model: Path, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self._ray, self._config, self._bundle, self._tell = module, _absolute(config), bundle, tell
        self._model, self._folder = model.absolute(), folder.absolute()
        self._held = tuple(_Held(index) for index in range(config.cluster.servers))
        self._closed = threading.Event()
        self.backend = ""  # how the servers receive weights; they say so once they are up

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Where the servers listen, by number."""
        return tuple(held.endpoint for held in self._held if held.endpoint is not None)

    def start(self, *, seconds: float = START_S) -> None:
        """Starts all servers and returns once they answer. Raises with all of them ended where one does not."""
        try:
            with ThreadPoolExecutor(len(self._held), thread_name_prefix="trew-ray-servers") as threads:
                try:
                    for started in as_completed([threads.submit(self._start, held, seconds) for held in self._held]):
                        started.result()
                except BaseException:
                    # Leaving the block waits for the others, which give up now: a server may load for half an hour.
                    self._closed.set()
                    raise
        except BaseException:
            self.close()
            raise

    def restart(self, index: int, *, seconds: float = START_S) -> Endpoint:
        """Ends what is left of a server and starts it again, on another node if need be, with the weights that its
        model's files have; returns where it listens now."""
        return self._start(self._held[index], seconds)

    def stop(self, index: int) -> None:
        """Ends a server, which may be started again."""
        held = self._held[index]
        with held.lock:
            held.number += 1
            try:
                if held.actor is not None:
                    self._ask(held, "stop", held.number)
            except _Gone:
                self._give_up(held)

    def close(self) -> None:
        """Ends all servers; none can be started again."""
        self._closed.set()
        # Asked first, so that vLLM cleans up: Ray's kill does not wait for what an actor has started.
        refs = [held.actor.stop.remote(held.number + 1) for held in self._held if held.actor is not None]
        if refs:
            self._ray.wait(refs, num_returns=len(refs), timeout=_END_S)
        for held in self._held:
            self._give_up(held)

    def __enter__(self) -> RayServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one server

    def _start(self, held: _Held, seconds: float) -> Endpoint:
        with held.lock:
            held.number += 1
            for _ in range(DEATHS):
                # A new actor knows of no order and is asked with the same number.
                try:
                    return self._until_up(held, seconds)
                except _Gone:
                    self._give_up(held)
            raise EngineError(f"{held}: its actor on Ray died {DEATHS} times while the server was started")

    def _until_up(self, held: _Held, seconds: float) -> Endpoint:
        """Orders a start and waits for it; the actor is asked again for what it does not know of. Raises _Gone."""
        if held.actor is None:
            self._place(held)
        token, until = secrets.token_urlsafe(32), time.monotonic() + seconds
        folder = self._folder / str(held.index)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        request = asdict(ServerRequest(
            number=held.index, config=to_table(self._config), model=str(self._model), folder=str(folder),
            host=held.host, token=token, cpus=int(self._bundle.get("CPU", 1)), gpus=int(self._bundle.get("GPU", 0)),
        ))  # fmt: skip
        said = self._ask(held, "start", held.number, request)
        # An older number: the actor has not taken this order yet.
        while said.state == "starting" or said.number < held.number:
            if self._closed.is_set():
                raise EngineError(f"{held} is not started: the run has ended")
            if time.monotonic() > until:
                raise EngineError(f"{held} on {held.host} did not answer within {seconds:g} s; its log is in {folder}")
            time.sleep(_LOOK_S)
            said = self._ask(held, "state")
        if said.state != "up":
            raise (ConfigError if said.wrong else EngineError)(f"{held} on {held.host}: {said.why}")
        held.endpoint, self.backend = Endpoint(said.address, None, token), said.backend
        return held.endpoint

    def _ask(self, held: _Held, what: str, *arguments: Any) -> ActorState:
        """What an actor answers. A call without an answer may or may not have been carried out: it is made again, and
        its number keeps it from counting twice. Raises _Gone where the actor is dead."""
        errors, until = self._ray.exceptions, time.monotonic() + self._config.cluster.resources_timeout_s
        while True:
            try:
                ref = getattr(held.actor, what).remote(*arguments)
                return ActorState(**self._ray.get(ref, timeout=ASK_S))
            except (errors.ActorUnavailableError, errors.GetTimeoutError) as error:
                if time.monotonic() > until or self._closed.is_set():
                    raise _Gone(str(error)) from None
                time.sleep(_LOOK_S)
            except errors.RayActorError as error:
                raise _Gone(str(error)) from None

    def _place(self, held: _Held) -> None:
        """Gets a place on the cluster and an actor there. Raises MissingResources where there is none in time."""
        util, limit = self._ray.util, self._config.cluster.resources_timeout_s
        held.group, began, told = util.placement_group([dict(self._bundle)]), time.monotonic(), False
        while not held.group.wait(timeout_seconds=1):
            if self._closed.is_set():
                raise EngineError(f"{held} is not started: the run has ended")
            missing = lacking([self._bundle], nodes(self._ray)) or "the nodes have room, and other work takes it"
            if time.monotonic() - began > limit:
                self._give_up(held)
                raise MissingResources(
                    f"cluster.resources_timeout_s: no place for {held} on the Ray cluster for {limit:g} s: {missing}"
                )
            if not told and time.monotonic() - began > min(3.0, limit / 2):
                told = True
                self._tell(f"{held}: waiting for a place on the Ray cluster: {missing}")
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy(held.group)
        # It is not restarted by Ray: a new one would know of nothing, and may need another place.
        make = self._ray.remote(ServerActor).options(
            num_cpus=self._bundle.get("CPU", 1), num_gpus=self._bundle.get("GPU", 0), max_restarts=0,
            max_task_retries=0, scheduling_strategy=strategy,
            runtime_env={"env_vars": ray_cluster.passed_openly(os.environ)},
        )  # fmt: skip
        held.actor = make.remote()
        held.host = self._host(held)

    def _host(self, held: _Held) -> str:
        errors = self._ray.exceptions
        try:
            return str(self._ray.get(held.actor.host.remote(), timeout=self._config.cluster.resources_timeout_s))
        except (errors.RayActorError, errors.GetTimeoutError) as error:
            raise _Gone(str(error)) from None

    def _give_up(self, held: _Held) -> None:
        """Ends an actor and frees its place."""
        if held.actor is not None:
            self._ray.kill(held.actor, no_restart=True)
        if held.group is not None:
            self._ray.util.remove_placement_group(held.group)
        held.actor = held.group = None


def _absolute(config: Config) -> Config:
    """The configuration with paths that mean the same in another working directory."""
    tokenizer, python = config.tokenizer, config.cluster.python
    if tokenizer and Path(tokenizer).is_dir():
        tokenizer = str(Path(tokenizer).absolute())
    python = str(Path(os.path.expanduser(python)).absolute()) if python else ""
    return dataclasses.replace(
        config, tokenizer=tokenizer, cluster=dataclasses.replace(config.cluster, python=python)
    )  # fmt: skip


def servers(config: Config, *, model: Path, folder: Path, tell: Callable[[str], None]) -> RayServers:
    """The servers of a run on Ray, not yet started, with logs in ``folder``."""
    module = ray_cluster.connect()
    gpus = uses_gpus(config, nodes(module))
    return RayServers(module, config, bundle=server_bundle(config, gpus=gpus), model=model, folder=folder, tell=tell)
