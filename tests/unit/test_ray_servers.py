"""Servers on Ray, as far as no cluster is needed: numbered orders, and a cluster that answers as Ray may."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trew.config import parse
from trew.errors import ConfigError, EngineError, MissingResources
from trew.rollout.vllm import ray_actor, ray_servers
from trew.rollout.vllm.ray_actor import ActorState, ServerActor, ServerRequest
from trew.rollout.vllm.server import ServerOptions, ServerProcess

REQUEST = {"number": 0, "config": {}, "model": "m", "folder": "f", "host": "h", "token": "t", "cpus": 1, "gpus": 0}


class Played:
    """A server that is up once it was asked twice, unless ``why`` says why it never will be."""

    made: list[Played] = []  # noqa: RUF012

    def __init__(self, request: ServerRequest) -> None:
        self.request, self.open, self.asked, self.why, self.wrong = request, True, 0, "", False
        Played.made.append(self)

    def said(self, number: int) -> ActorState:
        self.asked += 1
        if self.why:
            return ActorState(number, "lost", self.why, wrong=self.wrong)
        return ActorState(number, "up" if self.asked > 1 else "starting", address=f"http://10.0.0.1:{len(Played.made)}")

    def close(self) -> None:
        self.open = False


@pytest.fixture(autouse=True)
def none_made() -> None:
    Played.made = []


def test_an_order_that_is_repeated_is_carried_out_once():
    actor = ServerActor(Played)
    assert actor.state() == asdict(ActorState())
    for _ in range(3):
        actor.start(1, REQUEST)
    assert len(Played.made) == 1
    assert actor.state()["state"] == "up"


def test_an_order_that_was_overtaken_changes_nothing():
    actor = ServerActor(Played)
    actor.start(2, REQUEST)
    assert actor.start(1, REQUEST)["number"] == 2
    assert actor.stop(1)["state"] != "none"
    assert [server.open for server in Played.made] == [True]
    assert actor.stop(3) == asdict(ActorState(3))
    assert actor.start(3, REQUEST)["state"] == "none", "the order to stop came later"
    assert [server.open for server in Played.made] == [False]


def test_a_new_order_ends_the_server_of_the_old_one():
    actor = ServerActor(Played)
    actor.start(1, REQUEST)
    actor.start(2, REQUEST)
    assert [server.open for server in Played.made] == [False, True]


def test_a_server_has_its_number_in_the_run_in_what_its_actor_says(tmp_path, monkeypatch):
    """Each actor has one, which it would call server 0."""
    options = ServerOptions(python=Path("/py"), model=tmp_path, dtype="float32", seed=0, max_length=64, sequences=1)
    alone = ServerProcess(options, 0, sockets=tmp_path, logs=tmp_path)
    monkeypatch.setattr(ray_actor.launch, "servers", lambda *_, **__: SimpleNamespace(servers=(alone,)))
    given = {"model": str(tmp_path), "folder": str(tmp_path), "config": {"model": "m", "out": "o"}, "number": 3}
    [made] = ray_actor._Server._servers(ServerRequest(**REQUEST | given)).servers
    assert str(made) == f"server 3 (log: {tmp_path}/0.log)"


@pytest.mark.parametrize(
    ("gpus", "sync", "backend"),
    [(1, "auto", "trew_stream"), (0, "auto", "trew_files"), (1, "files", "trew_files"), (0, "nccl", "trew_stream")],
)
def test_a_server_takes_weights_as_one_that_is_started_without_ray(tmp_path, monkeypatch, gpus, sync, backend):
    options = ServerOptions(
        python=Path("/py"), model=tmp_path, dtype="float32", seed=0, max_length=64, sequences=1, gpus=gpus
    )
    alone = ServerProcess(options, 0, sockets=tmp_path, logs=tmp_path)
    monkeypatch.setattr(ray_actor.launch, "servers", lambda *_, **__: SimpleNamespace(servers=(alone,)))
    config = {"model": "m", "out": "o", "cluster": {"rollout": "vllm", "servers": 1, "sync": sync}}
    given = {"model": str(tmp_path), "folder": str(tmp_path), "config": config, "gpus": gpus}
    [made] = ray_actor._Server._servers(ServerRequest(**REQUEST | given)).servers
    assert made.options.backend == backend


# -------------------------------------------------------------------------------------------------- a cluster, played


class ActorError(Exception):
    """As Ray's RayActorError: the actor is dead."""


class Unavailable(ActorError):
    """As Ray's ActorUnavailableError: a call may or may not have been carried out."""


class Timeout(Exception):
    """As Ray's GetTimeoutError."""


class Cluster:
    """What is used of the module ``ray``. ``faults`` are taken, one for each answer: lost (the call was carried out,
    its answer is gone), never (it was not), dead (the actor died); "" is none."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(
            RayActorError=ActorError, ActorUnavailableError=Unavailable, GetTimeoutError=Timeout
        )
        self.faults: list[str] = []
        self.room, self.groups, self.dead, self.actors = True, 0, set[int](), 0
        self.util = SimpleNamespace(
            placement_group=self.group, remove_placement_group=self.removed,
            scheduling_strategies=SimpleNamespace(PlacementGroupSchedulingStrategy=lambda group: group),
        )  # fmt: skip

    def group(self, bundles: Any) -> Any:
        self.groups += 1
        return SimpleNamespace(wait=lambda timeout_seconds: self.room)

    def removed(self, group: Any) -> None:
        self.groups -= 1

    def nodes(self) -> list[Any]:
        return [{"Alive": True, "Resources": {"CPU": 1.0}}]

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.actor))

    def actor(self) -> Any:
        self.actors += 1
        number, real = self.actors, ServerActor(Played)

        def method(name: str) -> Any:
            function = (lambda: "10.0.0.1") if name == "host" else getattr(real, name)
            return SimpleNamespace(remote=lambda *arguments: (number, function, arguments))

        return SimpleNamespace(number=number, **{name: method(name) for name in ("start", "stop", "state", "host")})

    def get(self, ref: Any, timeout: float) -> Any:
        number, function, arguments = ref
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "dead":
            self.dead.add(number)
        if number in self.dead:
            raise ActorError
        if fault == "never":
            raise Timeout
        found = function(*arguments)
        if fault == "lost":
            raise Unavailable
        return found

    def wait(self, refs: Any, **_: Any) -> None:
        for number, function, arguments in refs:
            if number not in self.dead:
                function(*arguments)

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.dead.add(actor.number)


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(ray_servers, "_LOOK_S", 0.001)
    return Cluster()


def servers(there: Cluster, folder: Path, told: list[str] | None = None, **cluster: Any) -> ray_servers.RayServers:
    table = {
        "model": "m", "steps": 1, "data": {"task": "arithmetic"}, "rewards": [{"name": "exact"}],
        "objective": {"preset": "grpo"}, "cluster": {"rollout": "vllm", "servers": 1, **cluster},
    }  # fmt: skip
    return ray_servers.RayServers(
        there, parse(table), bundle={"CPU": 1.0}, model=folder, folder=folder / "servers",
        tell=(told if told is not None else []).append,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "actors"),
    [
        ([], 1),
        (["", "lost", "lost"], 1),  # the order was carried out twice, or seemed to be
        (["", "never"], 1),
        (["", "", "lost"], 1),
        (["dead"], 2),
        (["", "dead"], 2),
        (["", "lost", "dead"], 2),
    ],
)
def test_a_start_is_carried_out_whatever_becomes_of_the_answers(there, tmp_path, faults, actors):
    there.faults = faults
    with servers(there, tmp_path) as made:
        made.start()
        assert [server.open for server in Played.made][-1]
        assert len(Played.made) <= actors, "never two on one actor"
        assert there.actors == actors
        assert there.groups == 1
        (endpoint,) = made.endpoints
        assert endpoint.token == Played.made[-1].request.token
    assert there.groups == 0
    assert not Played.made[-1].open


def test_a_server_that_is_restarted_elsewhere_has_another_address_and_token(there, tmp_path):
    with servers(there, tmp_path) as made:
        made.start()
        (before,) = made.endpoints
        there.dead.add(1)
        after = made.restart(0)
        assert made.endpoints == (after,)
        assert (before.url, before.token) != (after.url, after.token)


def test_a_server_that_was_stopped_can_be_started_again(there, tmp_path):
    with servers(there, tmp_path) as made:
        made.start()
        made.stop(0)
        assert not Played.made[0].open
        there.faults = ["dead"]
        made.stop(0)
        made.restart(0)
        assert Played.made[-1].open


def test_an_actor_that_dies_again_and_again_is_an_error(there, tmp_path):
    there.faults = ["", "dead"] * 3
    with pytest.raises(EngineError, match=r"server 0: its actor on Ray died 3 times"):
        servers(there, tmp_path).start()
    assert there.groups == 0


def test_without_a_place_it_says_what_is_missing(there, tmp_path):
    there.room, told = False, []
    with pytest.raises(MissingResources, match=r"no place for server 0 .* for 0.02 s: the nodes have room"):
        servers(there, tmp_path, told, resources_timeout_s=0.02).start()
    assert there.groups == 0


@pytest.mark.parametrize(("wrong", "kind"), [(True, ConfigError), (False, EngineError)])
def test_a_server_that_does_not_come_up_says_why(there, tmp_path, monkeypatch, wrong, kind):
    def failing(self: Played, number: int) -> ActorState:
        return ActorState(number, "lost", "vllm: is not installed", wrong=wrong)

    monkeypatch.setattr(Played, "said", failing)
    with pytest.raises(kind, match=r"server 0 on 10.0.0.1: vllm: is not installed"):
        servers(there, tmp_path).start()


def test_where_one_does_not_come_up_the_others_are_not_waited_for(there, tmp_path, monkeypatch):
    """Nor where the run is interrupted meanwhile: they may load for half an hour, or wait for a place for minutes."""

    def said(self: Played, number: int) -> ActorState:
        lost = self.request.number == 1
        return ActorState(number, "lost" if lost else "starting", "vllm: is not installed" if lost else "", wrong=lost)

    monkeypatch.setattr(Played, "said", said)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"server 1 on 10.0.0.1: vllm: is not installed"):
        servers(there, tmp_path, servers=3).start(seconds=20)
    assert time.monotonic() - began < 10
    assert there.groups == 0
    assert not any(server.open for server in Played.made)


def test_paths_of_the_recipe_mean_the_same_on_other_nodes(there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with servers(there, tmp_path, python="venv/bin/python") as made:
        made.start()
        assert Played.made[0].request.config["cluster"]["python"] == str(tmp_path / "venv" / "bin" / "python")
