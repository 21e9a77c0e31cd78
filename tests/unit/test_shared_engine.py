"""One engine for several threads: each gets what it asked for, and nothing else."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_engines import (  # noqa: F401
    PROMPTS,
    Kind,
    asked,
    drained,
    requests,
    test_a_poll_with_time_reports_something,
    test_an_id_is_unique_among_unfinished_requests,
    test_equal_requests_get_equal_turns,
    test_every_request_is_reported_once,
    test_nothing_is_left_when_all_are_cancelled,
    test_requests_may_come_while_others_are_running,
    test_state_goes_to_another_engine,
    test_what_cannot_be_generated_is_refused_whole,
    test_what_is_cancelled_is_never_reported,
    turns,
)  # fmt: skip

from async_help import Memory, configured, parts
from engine_help import ScriptedEngine
from trew.errors import EngineError
from trew.rollout import asynchronous
from trew.rollout.asynchronous import AsyncRollouts
from trew.rollout.generate import generate
from trew.rollout.requests import Earlier, Finished, Request
from trew.rollout.shared import SharedEngine, View, WithinSteps
from trew.types import Rollout, Sampling


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two polls the lock is free for a moment: a shorter one will do for an engine that computes nothing."""
    monkeypatch.setattr("trew.rollout.shared.PAUSE_S", 0.001)


@pytest.fixture
def kind() -> Iterator[Kind]:
    with contextlib.ExitStack() as ending:

        def make() -> View:
            shared = SharedEngine(ScriptedEngine())
            ending.callback(shared.close)
            return shared.view("one")

        yield Kind(make, lambda engine: contextlib.nullcontext())


@pytest.fixture
def engine(kind: Kind) -> Any:
    return kind.make()


@pytest.fixture
def shared() -> Iterator[SharedEngine[ScriptedEngine]]:
    made = SharedEngine(ScriptedEngine())
    yield made
    made.close()


def test_requests_say_whether_somebody_waits_for_them(shared, monkeypatch):
    seen: dict[str, bool] = {}
    submit = shared.engine.submit

    def noted(requests: Any) -> None:
        seen.update({request.id: request.first for request in requests})
        submit(requests)

    monkeypatch.setattr(shared.engine, "submit", noted)
    for view in (shared.view("ahead"), shared.view("beside", first=True)):
        asked(view, requests()[:1])
    assert set(seen.values()) == {False, True}
    assert all(first == name.startswith("beside:") for name, first in seen.items())


def test_each_caller_gets_its_own_completions(shared):
    """The ids of their requests may be the same."""
    alone = asked(ScriptedEngine(), requests())
    views = [shared.view(str(i)) for i in range(3)]
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda i=i, view=view: found.update({i: asked(view, requests())}))
        for i, view in enumerate(views)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(3), alone)


def test_a_failure_reaches_all_who_wait_and_nobody_else(shared):
    waiting, other, idle = (shared.view(name) for name in ("waiting", "other", "idle"))
    with shared.alone() as engine:  # nothing is generated meanwhile
        waiting.submit(requests())
        other.submit(requests())
        engine.failure = EngineError("no server is left")
    for view in (waiting, other):
        with pytest.raises(EngineError, match="no server is left"):
            drained(view)
    assert idle.poll() == []
    for view in (waiting, other):
        assert turns(drained(view)) == {}
        assert asked(view, requests()) == asked(ScriptedEngine(), requests())


def test_whoever_has_the_engine_alone_may_change_its_weights(shared):
    view = shared.view("one")
    view.submit(requests())
    with shared.alone() as engine:
        before = [list(versions) for _, versions in engine._open.values()]
        engine.version = 4
    made = turns(drained(view))
    assert before
    assert {span.version for turn in made.values() for span in turn.versions} <= {0, 4}
    assert any(4 in {span.version for span in turn.versions} for turn in made.values())


def test_two_callers_have_two_names(shared):
    shared.view("a")
    with pytest.raises(ValueError, match="there is a view 'a' already"):
        shared.view("a")


def test_idle_time_is_that_without_requests(shared):
    view, sampling = shared.view("one"), Sampling(max_tokens=3)
    before = shared.idle_s
    assert shared.idle_s >= before
    with shared.alone():
        view.submit(requests(sampling=sampling))
        busy = shared.idle_s
        assert shared.idle_s == busy
    drained(view)
    assert shared.idle_s >= busy


def test_evaluations_run_while_rollouts_are_in_flight():
    shared = SharedEngine(ScriptedEngine(batch=7))
    config = configured(2, steps=8)
    beside, keeper = shared.view("beside"), Memory()
    source = AsyncRollouts(beside, ahead=shared.view("ahead"), keeper=keeper, **parts(config))
    source.gather_in_background()
    expected = generate(ScriptedEngine(), PROMPTS, n=2, sampling=Sampling(max_tokens=9))
    for step in range(1, 9):
        found = source.next(step)
        assert len(found.trained_on) == 3
        with shared.alone() as own:
            own.version = step
        source.trained(step, step)
        groups = generate(beside, PROMPTS, n=2, sampling=Sampling(max_tokens=9))
        assert [g.rollouts[1].text for g in groups] == [g.rollouts[1].text for g in expected]
    source.close()
    shared.close()
    assert not source._asked


def test_an_error_in_the_background_ends_the_run():
    shared = SharedEngine(ScriptedEngine())
    source = AsyncRollouts(shared.view("b"), ahead=shared.view("a"), keeper=Memory(), **parts(configured(1)))
    source.gather_in_background()
    with shared.alone() as own:
        own.failure = EngineError("no server is left")
    with pytest.raises(EngineError, match="no server is left"):
        source.next(1)
    source.close()
    shared.close()


class EndlessEngine(ScriptedEngine):
    """Never finishes the last sample of ticket 5."""

    def _length(self, request: Request) -> int:
        return 10**9 if request.id == "ahead:5/3" else super()._length(request)


def test_groups_wait_to_be_stored_with_others_unless_a_step_or_the_end_needs_them(monkeypatch):
    monkeypatch.setattr(asynchronous, "BATCH_S", 1e6)
    shared, keeper = SharedEngine(EndlessEngine()), Memory()
    source = AsyncRollouts(shared.view("other"), ahead=shared.view("ahead"), keeper=keeper, **parts(configured(1)))
    source.gather_in_background()
    step = threading.Thread(target=source.next, args=(1,), daemon=True)
    step.start()
    step.join(60)
    assert not step.is_alive(), "a step that needs three groups waits although they are there"
    while len(source._complete) < 2:  # of six groups three are taken, and one never ends
        time.sleep(0.001)
    stored = sum('"finished"' in line for line in keeper.written)
    source.close()
    shared.close()
    assert (stored, sum('"finished"' in line for line in keeper.written)) == (3, 5)


def test_requests_and_reports_pass_whole():
    """Whatever fields they have: an episode's turn carries its context."""
    inner = ScriptedEngine()
    shared = SharedEngine(inner)
    asked = dataclasses.replace(requests()[0], earlier=Earlier(np.array([7, 8, 9])))
    view = shared.view("one")
    view.submit([asked])
    [report] = drained(view)
    shared.close()
    assert inner.submitted[0].earlier is asked.earlier
    assert isinstance(report, Finished)
    assert isinstance(report.rollout, Rollout)


def test_idle_seconds_between_steps_are_of_no_step():
    clock = [0.0]
    within = WithinSteps(lambda: clock[0])

    def passes(seconds: float) -> None:
        clock[0] += seconds

    passes(100)  # before the first step
    within.begin()
    passes(2)  # while it samples
    assert within.take() == 2
    passes(3)  # while it is learned from
    within.end()
    passes(1000)  # an evaluation
    assert within.take() == 3
    within.begin()
    passes(4)
    within.end()
    passes(1000)
    within.begin()
    passes(5)
    assert within.take() == 4 + 5
    passes(50)
    within.begin()  # the step failed, and is begun anew
    passes(1)
    assert within.take() == 1
