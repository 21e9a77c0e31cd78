"""Reward hosts that Ray starts, with the real actor in this process and a Ray that answers as a cluster may."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiers
from forks import wait_for
from trew.config import RewardConfig
from trew.errors import ConfigError
from trew.rewards import RewardSet
from trew.rewards.remote import hosts, ray_hosts
from trew.rewards.reward_checks import text_group
from trew.types import Prompt
from trew.utils import ray_cluster

FILE = """
def longest(completions, **columns):
    return [float(len(text)) for text in completions]
"""
CONFIGS = [RewardConfig(name="math"), RewardConfig(name="f.py:longest", weight=0.1)]


class RayError(Exception):
    """As Ray's."""


class Cluster:
    """What is used of the module ``ray``. A node in ``down`` does not answer; ``options`` are those of each actor."""

    def __init__(self, nodes: int = 2) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError)
        self.util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: (node, soft))
        )
        self.names = [f"node{i}" for i in range(nodes)]
        self.down: set[str] = set()
        self.options: list[dict[str, Any]] = []
        self.actors: dict[str, ray_hosts.RewardActor] = {}
        self.killed: list[str] = []

    def nodes(self) -> list[dict[str, Any]]:
        rows = [{"NodeID": n, "NodeManagerHostname": n, "Alive": True, "Resources": {"CPU": 2.0}} for n in self.names]
        return [*rows, {"Alive": False, "Resources": {"CPU": 2.0}}, {"Alive": True, "Resources": {}}]

    def remote(self, kind: type[ray_hosts.RewardActor]) -> Any:
        def options(**known: Any) -> Any:
            self.options.append(known)
            node = known["scheduling_strategy"][0]

            def made(*arguments: Any) -> Any:
                actor = self.actors[node] = kind(*arguments)
                return SimpleNamespace(node=node, start=SimpleNamespace(remote=lambda: (node, actor.start)))

            return SimpleNamespace(remote=made)

        return SimpleNamespace(options=options)

    def get(self, ref: Any, timeout: float) -> Any:
        node, call = ref
        if node in self.down:
            raise RayError(f"the actor died because its node, {node}, has died")
        return call()

    def is_initialized(self) -> bool:
        return True

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor.node)
        self.actors.pop(actor.node)._ending.close()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "f.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    played = Cluster()
    monkeypatch.setattr(ray_cluster, "connect", lambda: played)
    monkeypatch.setattr(ray_cluster, "node_address", lambda: "127.0.0.1")
    monkeypatch.setattr(hosts, "RETRY_S", 0.05)
    yield played
    for actor in played.actors.values():
        actor._ending.close()


@contextlib.contextmanager
def run() -> Iterator[RewardSet]:
    with contextlib.closing(RewardSet.from_config(CONFIGS)) as rewards:
        rewards.use_hosts(ray_hosts.ON_RAY, CONFIGS)
        yield rewards


def scored(rewards: RewardSet) -> list[float | None]:
    group = text_group(Prompt("p", text="1 + 1?", columns={"answer": "2"}), ["\\boxed{2}", "three"])
    return [score.value for score in rewards.score([group], step=1)[0].scores]


def test_every_node_with_processors_gets_one_host_that_takes_none_of_them(cluster, monkeypatch):
    monkeypatch.setenv("TREW_KEPT", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnopqrstuvwxyz0123456789")
    with run() as rewards:
        assert scored(rewards) == pytest.approx([1.9, 0.5])
        assert sorted(cluster.actors) == ["node0", "node1"]
        for known in cluster.options:
            assert (known["num_cpus"], known["max_restarts"]) == (0, 0)
            assert known["scheduling_strategy"][1] is False, "on that node or not at all"
            variables = known["runtime_env"]["env_vars"]
            assert variables["TREW_KEPT"] == "1"
            assert "HF_TOKEN" not in variables, "the dashboard shows them"
    assert sorted(cluster.killed) == ["node0", "node1"]


@pytest.mark.parametrize("actors_die", tiers.some([True, False], ["True"]))
def test_a_host_that_is_lost_costs_no_score_and_comes_back(cluster, actors_die):
    """With its node; or its server alone, in an actor that lives."""
    told: list[str] = []

    def heard_of_both(what: str) -> bool:
        told.extend(rewards.take_warnings())
        return len({line.partition(" (")[0] for line in told if what in line}) == 2

    with run() as rewards:
        want = scored(rewards)
        for actor in [*cluster.actors.values()]:
            actor._ending.close()
        if actors_die:
            cluster.down.update(cluster.names)
        assert scored(rewards) == want
        wait_for(lambda: heard_of_both("its work is done by"), lambda: str(told))
        if actors_die:
            wait_for(lambda: {*cluster.killed} == {*cluster.names}, lambda: str(cluster.killed))
        cluster.down.clear()
        wait_for(lambda: heard_of_both("is back"), lambda: str(told))
        assert scored(rewards) == want


def test_what_an_actor_cannot_load_is_told_before_the_run_begins(cluster, monkeypatch):
    monkeypatch.setattr(ray_hosts.Path, "is_dir", lambda path: False)
    said = r"cluster.reward_hosts: node .*: does not see .*file system that all nodes"
    with pytest.raises(ConfigError, match=said), run():
        pass


def test_a_cluster_without_processors_is_refused(cluster):
    cluster.names = []
    with pytest.raises(ConfigError, match="no node of the Ray cluster has CPUs"), run():
        pass
