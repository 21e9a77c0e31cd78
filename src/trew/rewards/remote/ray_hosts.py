"""Reward hosts on a Ray cluster: one actor on each node grades in the pools of that node, and ends with the run.

Ray starts and ends them; completions and verdicts travel as between any run and its reward hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...config import RewardConfig
from ...errors import ConfigError, TrewError
from ...utils import listening, ray_cluster
from .hosts import HostError, RemoteHost, RewardHosts

ON_RAY = ("ray",)
"""The value of ``cluster.reward_hosts`` that asks for a host on each node."""
START_S = 300.0
"""Seconds until an actor has loaded the rewards and listens: nodes may have to read Python's packages first."""


class RewardActor:
    """A reward host on a node. ``start`` may be asked again: it returns where the host listens that is there."""

    def __init__(self, specs: Sequence[Mapping[str, Any]], folder: str, token: str) -> None:
        self._specs, self._folder, self._token = specs, folder, token
        self._ending = contextlib.ExitStack()
        self._address = ""
        self._listens: Callable[[], bool] = lambda: False

    def start(self) -> dict[str, str]:
        """Where it listens, as ``address``; or ``problem``, which somebody must mend first."""
        try:
            return {"address": self._address if self._listens() else self._start()}
        except TrewError as error:
            return {"problem": f"node {os.uname().nodename}: {error}"}

    def _start(self) -> str:
        from ..reward_set import RewardSet
        from .host import RewardHost, check_machine

        self._ending.close()  # what is left of a server that failed
        if not Path(self._folder).is_dir():
            raise ConfigError(
                f"does not see {self._folder}; start the run in a folder on a file system that all nodes share"
            )
        os.chdir(self._folder)  # recipes name reward files by relative paths
        rewards = RewardSet.from_config([RewardConfig(**spec) for spec in self._specs])
        self._ending.callback(rewards.close)
        check_machine(rewards)
        host = ray_cluster.node_address()
        bound = self._ending.enter_context(listening.bound_on_node(host))
        guarded = listening.Guard(RewardHost(rewards), self._token, lambda line: print(line, flush=True))
        self._listens = self._ending.enter_context(listening.listening(guarded, [bound], None))
        self._address = listening.address_of(bound, host=host, encrypted=False)
        return self._address


class ActorHost(RemoteHost):
    """The host on a node, which is started where it does not run."""

    def __init__(self, module: Any, node: Mapping[str, Any], make: Callable[[Any], Any], token: str) -> None:
        super().__init__("", token)
        self._ray, self._node, self._make = module, node, make
        self._actor: Any = None
        self._started: Any = None

    def __str__(self) -> str:
        return f"reward host on node {self._node['NodeManagerHostname']} ({self.address or 'not started'})"

    def order(self) -> None:
        """Asks for its start without waiting for it."""
        if self._actor is None:
            self._actor = self._make(self._node["NodeID"])
        self._started = self._actor.start.remote()

    def begin(self) -> None:
        if self._started is None:
            self.order()
        # Each start is waited for once; the next begin() asks again.
        started, self._started = self._started, None
        try:
            found = self._ray.get(started, timeout=START_S)
        except self._ray.exceptions.RayError as error:  # the actor or its node is gone, or it does not come up
            self.end()
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise HostError(f"{self}: could not be started: {why}") from None
        if "problem" in found:
            raise ConfigError(f"cluster.reward_hosts: {found['problem']}")
        if found["address"] != self.address:
            self.close()  # connections to where it was before
            self.address = found["address"]

    def end(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None and self._ray.is_initialized():  # else it has ended with this process's connection
            self._ray.kill(actor, no_restart=True)


class RayRewardHosts(RewardHosts):
    """A host on each node of the cluster that has CPUs. They take none of those that Ray counts: ranks and servers get
    their places as without hosts, and share the processors with them."""

    def __init__(
        self, module: Any, specs: Sequence[RewardConfig], *, own: Mapping[str, Any], tell: Callable[[str], None]
    ) -> None:
        token, strategies = secrets.token_urlsafe(32), module.util.scheduling_strategies
        arguments = ([asdict(spec) for spec in specs], str(Path.cwd()), token)

        def make(node: str) -> Any:
            there = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            actor = module.remote(RewardActor).options(
                num_cpus=0, max_restarts=0, max_task_retries=0, scheduling_strategy=there,
                runtime_env={"env_vars": ray_cluster.passed_openly(os.environ)},
            )  # fmt: skip
            return actor.remote(*arguments)

        nodes = [node for node in module.nodes() if node["Alive"] and node["Resources"].get("CPU")]
        if not nodes:
            raise ConfigError("cluster.reward_hosts: got 'ray', but no node of the Ray cluster has CPUs")
        self._actors = [ActorHost(module, node, make, token) for node in nodes]
        super().__init__(self._actors, own=own, tell=tell)

    def connect(self) -> None:
        for host in self._actors:
            host.order()  # side by side
        super().connect()

    def close(self) -> None:
        super().close()
        for host in self._actors:
            host.end()
