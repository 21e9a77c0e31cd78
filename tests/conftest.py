"""Shapes written in the mathematics' annotations are checked in every test; tiers leave tests out (``tiers.py``)."""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from collections.abc import Generator, Iterator
from typing import Any

import pytest

import shapes
import tiers
import unestimated
from forks import Server

IDLE_S = 0.5

os.environ.pop("HF_HUB_OFFLINE", None)  # tests of what is said offline set it themselves

gc.disable()  # until everything is collected: it would look at millions of objects that stay
shapes.install()

try:  # the environments of TRL and verl do without hypothesis
    import hypothesis
except ImportError:
    pass
else:
    hypothesis.settings.register_profile("trew", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("trew")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts commands as real processes in milliseconds: what they import takes seconds, once."""
    with Server() as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def idle_at_the_end() -> Iterator[None]:
    """Fails where a thread still takes a processor when the tests of this process are over: one that a test leaves in
    an endless loop slows down all others, and nothing else shows it. On a busy machine it gets a part of one."""
    yield
    before = time.process_time()
    time.sleep(IDLE_S)
    if time.process_time() - before > 0.25 * IDLE_S:
        stacks = ["".join(traceback.format_stack(frame)[-3:]) for frame in sys._current_frames().values()]
        pytest.fail("a thread still takes a processor, one of these:\n" + "\n".join(stacks), pytrace=False)


def pytest_runtest_setup() -> None:
    shapes.begin()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file() -> Generator[None, Any, list[pytest.Collector]]:
    """Looks for examples in docstrings in src alone: below tests there are none, and looking takes seconds."""
    found = yield
    return [collector for collector in found if isinstance(collector, pytest.Module)]


def pytest_collection_finish() -> None:
    """What is imported and collected stays: no collection of garbage looks at it again, which takes a second each. Runs
    of tests leave out what none of them reads."""
    unestimated.leave_out()
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of this process estimate their memory, as they do outside of tests."""
    from trew.estimate.planned import planned

    monkeypatch.setattr("trew.training.build.planned", planned)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what the tier leaves out, and draws as many examples as it says."""
    if tiers.tier() == "nightly":
        return
    left = [item for item in items if item.get_closest_marker("nightly")]
    if left:
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
    try:  # the environments of TRL and verl do without it
        from hypothesis import is_hypothesis_test, settings
    except ImportError:
        return
    drawn = {id(item.obj): item.obj for item in items if isinstance(item, pytest.Function)}
    for test in drawn.values():
        if is_hypothesis_test(test):
            test = getattr(test, "__func__", test)
            own = getattr(test, "_hypothesis_internal_use_settings", None) or settings()
            test._hypothesis_internal_use_settings = settings(own, max_examples=tiers.examples(own.max_examples))
