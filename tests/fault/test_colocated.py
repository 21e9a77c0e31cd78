"""Servers that take turns with the learner on the same GPUs: one order, kept after every failure.

The stand-in refuses what a GPU would punish: generating or loading weights while asleep, a cache before the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import learner_help
import tiers
from fake_vllm import FakeVllm
from ranks_work import Moves
from trew.errors import EngineError
from trew.learner.placement import Placement
from trew.rollout import StepRollouts
from trew.rollout.vllm.engine import VllmEngine
from trew.rollout.vllm.sleep import wake
from trew.rollout.vllm.update import update
from trew.training.turns import TurnsOfSource, TurnsOfWeights
from vllm_help import House, as_at_first, house, made

KEPT: Any = ("a group",)
CYCLE = [
    "POST /sleep", "GET /is_sleeping", "met", "learner on the GPU", "learner away", "met",
    "POST /wake_up weights", "POST /pause", "POST /init_weight_transfer_engine", "POST /start_weight_update",
    "POST /update_weights", "POST /finish_weight_update", "GET /weight_info", "POST /wake_up kv_cache", "POST /resume",
    "POST /inference/v1/generate", "POST /inference/v1/generate", "POST /inference/v1/generate",
]  # fmt: skip


class Source:
    """Generates, and keeps what the test wants."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.trained_on = engine, KEPT

    def next(self, step: int) -> StepRollouts:
        made(self.engine)
        return StepRollouts(self.trained_on, self.trained_on)


class Turns:
    """A policy and a server that take turns, and what happened, in order."""

    def __init__(self, house: House) -> None:
        self.house, self.fake = house, house.fakes[0]
        self.events: list[str] = []
        self.alive = True
        house.policy = learner_help.learner(house.net)
        self.placement = Placement(house.policy, move=Moves())
        self._watch()
        self.placement.leave()
        self.engine = house.engine(publish=False, restart=self.restart, stop=self.stop)
        self.inner = Source(self.engine)
        self.source: Any = TurnsOfSource(self.inner, self.placement, self.engine)  # type: ignore[arg-type]
        self.weights = TurnsOfWeights(house.weights, self.placement, lambda: self.events.append("met"))
        self.publish()

    def _watch(self) -> None:
        enter, leave, calls = self.placement.enter, self.placement.leave, self.fake.calls

        def entering() -> None:
            if self.placement.away:
                self.events.append("learner on the GPU")
                assert self.fake.asleep == {"weights", "kv_cache"} or not self.alive
            enter()

        def leaving() -> None:
            if not self.placement.away:
                self.events.append("learner away")
            leave()

        events, placement = self.events, self.placement

        class Recorded(list[Any]):
            def append(self, item: tuple[str, Any]) -> None:
                tag = (item[1] or {}).get("tags", [""])[0] if "wake" in item[0] else ""
                events.append(f"{item[0]} {tag}".strip())
                assert "wake_up" not in item[0] or placement.away, "a server wakes up beside the learner"
                super().append(item)

        self.placement.enter, self.placement.leave = entering, leaving  # type: ignore[method-assign]
        self.fake.calls = Recorded(calls)

    def restart(self, number: int) -> None:
        self.events.append("restart")
        self.fake.dead, self.fake.asleep, self.fake.paused, self.alive = False, set(), False, True
        self.fake.started = False

    def stop(self, number: int) -> None:
        self.events.append("stop")
        self.fake.dead, self.alive = True, False

    def publish(self) -> None:
        self.weights.publish(self.house.policy, self.engine)

    def step(self, *, learn: bool = True) -> None:
        """A step of the loop: rollouts, an update if they are any good, and the weights for the next ones."""
        rollouts = self.source.next(1)
        if rollouts.trained_on and learn:
            assert not self.placement.away
            self.house.change()
        self.publish()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with house(tmp_path_factory.mktemp("house")) as one:
        yield one


@pytest.fixture
def turns(alone: House) -> Iterator[Turns]:
    with as_at_first(alone):
        calls = alone.fakes[0].calls
        yield Turns(alone)
        alone.fakes[0].calls = list(calls)


def test_a_step_has_the_one_right_order(turns):
    made(turns.engine)
    turns.events.clear()
    turns.step()
    steps = [event for event in turns.events if event != "GET /metrics"]
    generated = steps.index("POST /sleep")
    assert set(steps[:generated]) == {"POST /inference/v1/generate"}
    assert steps[generated:] == ["POST /sleep", "GET /is_sleeping", "learner on the GPU", "met", *CYCLE[4:]]
    assert turns.engine.servers[0].version == 1
    assert made(turns.engine)


def test_the_first_weights_are_written_while_the_servers_that_have_just_started_sleep(turns):
    assert turns.events == ["learner away", *CYCLE]
    made(turns.engine)


def test_a_step_that_was_not_applied_is_followed_by_the_servers_turn(turns):
    """Numbers that are not finite: the weights stay, and the servers have lost theirs."""
    expected = made(turns.engine)
    turns.step(learn=False)
    assert turns.placement.away
    assert turns.fake.asleep == set()
    assert made(turns.engine) == expected


def test_without_anything_to_learn_nobody_moves(turns):
    turns.inner.trained_on = ()
    turns.events.clear()
    turns.step()
    assert set(turns.events) - {"GET /metrics"} == {"POST /inference/v1/generate", "met"}


def test_the_learner_s_steps_are_those_of_one_that_never_left(turns):
    items = learner_help.samples()
    still = learner_help.learner(copy.deepcopy(turns.house.net))
    data = learner_help.prepared(copy.deepcopy(turns.house.net), still.objective, items, seed=3)
    losses: list[list[float]] = []
    for learner in (turns.house.policy, still):
        losses.append([])
        for _ in range(2):
            if learner is turns.house.policy:
                turns.source.next(1)
            losses[-1].append(learner.step(items, data).loss)
            if learner is turns.house.policy:
                turns.publish()
    assert losses[0] == losses[1]
    for a, b in zip(turns.house.policy.model.parameters(), still.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_server_that_does_not_fall_asleep_is_ended_before_the_learner_comes(turns):
    turns.fake.faults.sleepless = True
    turns.events.clear()
    rollouts = turns.source.next(1)
    steps = [event for event in turns.events if "generate" not in event and "metrics" not in event]
    assert steps == ["POST /sleep", "GET /is_sleeping", "stop", "learner on the GPU"]
    assert "answers {'is_sleeping': False} when asked whether it does; the server is ended" in turns.house.told[-1]
    turns.fake.faults.sleepless = False
    assert rollouts.trained_on
    turns.house.change()
    turns.publish()
    assert "restart" in turns.events
    assert turns.engine.servers[0].version == turns.house.policy.version
    turns.step()


ROUTES = ("/wake_up", "/start_weight_update", "/finish_weight_update", "/resume")


@pytest.mark.parametrize("route", tiers.some(ROUTES, ("/wake_up", "/finish_weight_update")))
def test_a_server_that_fails_while_it_wakes_up_is_restarted_and_sleeps_again_in_time(turns, route):
    """Half awake, it would take no order to sleep, and keep the memory that the learner needs."""
    turns.source.next(1)
    turns.house.change()
    turns.fake.faults.failing = {route: 2}
    turns.events.clear()
    turns.publish()
    assert "restart" in turns.events
    assert turns.engine.servers[0].version == turns.house.policy.version
    turns.step()
    turns.step()


def test_a_server_that_dies_while_it_generates_comes_back_before_it_sleeps(turns):
    turns.fake.faults.dies_after = 3

    def restart(number: int) -> None:
        turns.fake.faults.dies_after = -1
        turns.restart(number)

    turns.engine._restart = restart
    turns.step()
    assert turns.engine.servers[0].version == turns.house.policy.version


def test_while_the_learner_has_the_gpus_nothing_can_be_asked(turns):
    turns.source.next(1)
    with pytest.raises(EngineError, match="is asleep until the next update"):
        made(turns.engine)


def wrong_orders(fake: FakeVllm, house: House) -> Iterator[tuple[str, Any]]:
    endpoint, newest = house.endpoints[0], house.weights.newest
    assert newest is not None
    yield "asleep", lambda: update(endpoint, newest, timeout_s=5)
    yield "the KV cache would take", lambda: wake(endpoint, "kv_cache", timeout_s=5)


def test_the_stand_in_refuses_wrong_orders(turns):
    """Weights while they have no room; the cache before the weights."""
    turns.source.next(1)
    turns.placement.leave()
    for said, act in wrong_orders(turns.fake, turns.house):
        with pytest.raises(EngineError, match=said):
            act()
    turns.publish()
    made(turns.engine)
