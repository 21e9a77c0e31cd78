"""What rollouts say of their step: those that are generated when the loop asks for them, and those of before."""

from __future__ import annotations

import pytest

from async_help import asynchronous, configured, synchronous
from engine_help import ScriptedEngine
from trew.rollout import sync


class Waiting(ScriptedEngine):
    """Says that it has waited a second in each poll, as episodes wait for their environments."""

    waited_s = 0.0

    def poll(self, timeout_s=None):
        self.waited_s += 1.0
        return super().poll(timeout_s)


def test_what_evaluations_waited_for_environments_is_not_of_the_step_after_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync, "Episodes", Waiting)
    engine = Waiting()
    source = synchronous(configured(0), engine)
    for step in (1, 2):
        engine.waited_s += 1000.0  # in an evaluation
        before = engine.waited_s
        assert source.next(step).facts["seconds_waited"] == engine.waited_s - before > 0
        source.trained(step, step)


def test_asynchronous_rollouts_say_what_their_episodes_waited_for_environments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sync, "Episodes", Waiting)
    engine = Waiting()
    source = asynchronous(configured(1), engine)
    total = 0.0
    for step in (1, 2):
        total += source.next(step).facts["seconds_waited"]
        assert total == engine.waited_s > 0
        engine.version = step
        source.trained(step, step)
