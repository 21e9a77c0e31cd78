"""Servers that are restarted: in the background, brought to the newest weights, proven, and only then used."""

from __future__ import annotations

import threading
import time

import pytest

from fake_vllm import Refusal
from forks import wait_for
from trew.errors import EngineError
from trew.rollout.engine import Finished, Lost, Request
from trew.rollout.shared import SharedEngine
from trew.rollout.vllm.engine import VllmEngine
from vllm_help import PROMPTS, SAMPLING, House, made, only


def test_a_server_that_can_be_restarted_is_not_the_end(two):
    """Restarted, brought up to date, proven by the canary, and then asked for what was lost."""
    started: list[int] = []

    def restart(number: int) -> None:
        started.append(number)
        fake = two.fakes[number]
        fake.faults.dies_after, fake.dead, fake.version = -1, False, "default"
        for p in fake.model.parameters():
            p.data.zero_()  # the weights that it was trained from are not the policy's

    engine = only(two, 0, restart=restart)
    expected = made(engine)
    two.fakes[0].faults.dies_after = 3
    assert made(engine) == expected
    assert started == [0]


class Restarts:
    """Restarts stand-ins when the test allows it, with weights that are not the policy's."""

    def __init__(self, house: House) -> None:
        self.house, self.allowed, self.asked = house, threading.Event(), list[int]()
        self.fails = ""

    def __call__(self, number: int) -> None:
        self.asked.append(number)
        assert self.allowed.wait(30)
        if self.fails:
            raise EngineError(self.fails)
        fake = self.house.fakes[number]
        fake.faults.dies_after, fake.faults.hangs, fake.version = -1, False, "default"
        for p in fake.model.parameters():
            p.data.zero_()
        fake.dead = False


def back(engine: VllmEngine, house: House, number: int = 0) -> None:
    """Waits until a server has come back; the engine notices when it next has something to do."""
    until = time.monotonic() + 30
    while engine.servers[number].version is None and time.monotonic() < until:
        made(engine)
    assert engine.servers[number].version == engine.version


def test_a_server_that_died_comes_back_while_the_others_go_on(two):
    """Restarted in the background, brought to the newest weights, proven by the canary, then used."""
    restart = Restarts(two)
    engine = two.engine(restart=restart)
    expected = made(engine)
    two.fakes[0].faults.dies_after = 3
    for _ in range(3):
        assert made(engine) == expected, "the other server does it all"
    assert restart.asked == [0], "once, however long it takes"
    restart.allowed.set()
    back(engine, two)
    before = two.fakes[0].tokens
    assert made(engine) == expected
    assert two.fakes[0].tokens > before
    assert "is back, and has the weights of version 0" in two.told[-1]
    assert engine.counts["refused"] == 0


def test_a_server_that_comes_back_after_an_update_has_the_newer_weights(two):
    restart = Restarts(two)
    engine = two.engine(restart=restart)
    two.fakes[0].faults.dies_after = 0
    made(engine)
    two.change()
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [None, 1], "no update waits for it"
    expected = made(engine)
    restart.allowed.set()
    back(engine, two)
    assert made(engine) == expected
    assert restart.asked == [0]


def test_a_server_that_is_gone_at_an_update_is_restarted_while_the_others_go_on(two):
    restart = Restarts(two)
    engine = two.engine(restart=restart)
    two.fakes[1].dead = True
    two.change()
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, None]
    expected = made(engine)
    restart.allowed.set()
    back(engine, two, 1)
    assert made(engine) == expected
    assert restart.asked == [1]


def test_a_server_whose_engine_dies_in_an_update_is_restarted(two):
    """vLLM answers 500 then, to everything, before it ends."""
    faults = two.fakes[0].faults
    engine = only(two, 0, restart=lambda number: two.fakes[0].faults.failing.clear())

    def die(loaded: int) -> None:
        faults.in_update, faults.failing = None, {"/pause": 99, "/health": 99}
        raise Refusal(500, "EngineCore encountered an issue.", "EngineDeadError")

    faults.in_update = die
    two.change()
    two.publish(engine, 1)
    assert engine.servers[0].version == 1
    assert "its engine has died" in two.told[0]
    assert "is back, and has the weights of version 1" in two.told[-1]


def test_what_a_server_answers_after_it_was_given_up_says_nothing_about_the_next(two):
    """One request is answered by 500, which ends the server; the other's answer comes when it has been restarted."""
    engine = only(two, 0, restart=lambda number: setattr(two.fakes[0].faults, "status", 0))
    two.fakes[0].faults.hangs = True
    two.fakes[0].begun = 0
    engine.submit([Request("slow", PROMPTS[0], 0, SAMPLING)])
    wait_for(lambda: two.fakes[0].begun)
    two.fakes[0].faults.status = 500
    engine.submit([Request("refused", PROMPTS[1], 0, SAMPLING)])
    assert [report.id for report in engine.poll()] == ["refused"]
    engine.submit([Request("next", PROMPTS[2], 0, SAMPLING)])
    wait_for(lambda: engine.poll(0.01) == [] and engine.servers[0].version == 0)  # it has been restarted
    two.fakes[0].faults.hangs = False
    late, following = sorted(engine.poll() + engine.poll(), key=lambda report: report.id == "next")
    assert isinstance(following, Finished)
    assert isinstance(late, Lost)
    assert (engine.servers[0].bad, engine.servers[0].version) == (0, 0)
    assert engine.counts == {"lost": 2}


def test_a_restart_in_the_background_that_fails_is_tried_again_at_the_next_update(two):
    restart = Restarts(two)
    restart.fails = "server 0 ended: exit code 1; its log: no such device"
    restart.allowed.set()
    engine = two.engine(restart=restart)
    expected = made(engine)
    two.fakes[0].faults.dies_after = 0
    until = time.monotonic() + 30
    while "no such device" not in " ".join(two.told) and time.monotonic() < until:
        assert made(engine) == expected
    assert "no such device; the server is not used until an update succeeds" in " ".join(two.told)
    restart.fails = ""
    two.publish(engine, 1)
    back(engine, two)
    assert restart.asked == [0, 0]


def test_while_all_servers_are_restarted_a_poll_with_a_limit_returns_in_time_and_the_run_can_end(two):
    """As in an asynchronous run, whose end must not wait for servers that take half an hour to load."""
    restart = Restarts(two)
    shared = SharedEngine(two.engine(restart=restart))
    engine = shared.view("ahead")
    for fake in two.fakes:
        fake.faults.dies_after = 3
    engine.submit([Request("one", PROMPTS[0], 0, SAMPLING)])
    until = time.monotonic() + 60
    while {*restart.asked} != {0, 1} and time.monotonic() < until:
        for lost in engine.poll(0.2):
            engine.submit([Request(lost.id, PROMPTS[0], 0, SAMPLING)])
    assert {*restart.asked} == {0, 1}
    closing = threading.Thread(target=shared.close, daemon=True)
    closing.start()
    closing.join(15)  # restarts would be waited for for twice as long
    assert not closing.is_alive()
    restart.allowed.set()


def test_requests_wait_for_servers_that_come_back(two):
    restart = Restarts(two)
    engine = two.engine(restart=restart)
    expected = made(engine)
    for fake in two.fakes:
        fake.faults.dies_after = 3
    threading.Timer(0.5, restart.allowed.set).start()
    assert made(engine) == expected
    assert restart.asked in ([0, 1], [1, 0])


def test_a_restart_that_fails_is_told_with_its_cause(two):
    def restart(number: int) -> None:
        raise EngineError(f"server {number} ended: exit code 1; its log: out of memory")

    engine = only(two, 0, restart=restart)
    two.fakes[0].faults.dies_after = 3
    with pytest.raises(EngineError, match=r"no server is left.*its log: out of memory"):
        made(engine)
    assert sum("out of memory" in line for line in two.told) == 2, "it was tried twice"
