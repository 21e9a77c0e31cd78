"""Files that are announced: servers verify them while they generate, and do without where that fails."""

from __future__ import annotations

import threading
from typing import Any

from trew_vllm import published

from fake_vllm import FakeVllm


def before_the_pause(fake: FakeVllm) -> list[tuple[str, Any]]:
    """The calls that a server got before it was paused for the newest version."""
    paused = max(i for i, (path, _) in enumerate(fake.calls) if path == "POST /pause")
    return [(path, body) for path, body in fake.calls[:paused] if path != "GET /metrics"]


def test_servers_verify_a_version_before_they_are_paused(two, monkeypatch):
    readers, read = [], published.read

    def reading(*given: Any) -> Any:
        readers.append(threading.current_thread().name)
        return read(*given)

    monkeypatch.setattr(published, "read", reading)
    engine = two.engine()
    readers.clear()
    for fake in two.fakes:
        fake.calls.clear()
    two.change()
    two.publish(engine, 1)
    for fake in two.fakes:
        ((path, body),) = before_the_pause(fake)
        assert path == "POST /init_weight_transfer_engine"
        assert body["init_info"]["folder"] == "000001"
    assert readers == ["trew-verify"] * 2
    assert [server.version for server in engine.servers] == [1, 1]


def test_a_server_that_takes_no_announcement_verifies_during_its_update(two):
    engine = two.engine()
    two.change()
    two.fakes[0].faults.failing = {"/init_weight_transfer_engine": 1}
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [1, 1]


def test_nothing_is_announced_to_a_server_that_is_not_used(two):
    engine = two.engine()
    two.change()
    two.fakes[0].faults.failing = {"/update_weights": 2}
    two.publish(engine, 1)
    assert [server.version for server in engine.servers] == [None, 1]
    for fake in two.fakes:
        fake.calls.clear()
    two.change()
    two.publish(engine, 2)
    assert [len(before_the_pause(fake)) for fake in two.fakes] == [0, 1]
    assert [server.version for server in engine.servers] == [2, 2]
