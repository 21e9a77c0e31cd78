"""Runs on real Ray clusters, which ``make test-ray`` starts: several nodes on this machine, each a set of processes.

Skipped where Ray is not installed; it has an environment of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_help

# Before Ray is imported: it reads them once. Its workers run at low priority otherwise, for minutes beside other work.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
os.environ.pop("RAY_ADDRESS", None)
HERE = importlib.util.find_spec("ray") is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests of this folder where there is no Ray."""
    for item in items if not HERE else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs Ray: make test-ray"))


@pytest.fixture(scope="session")
def nodes() -> Iterator[Any]:
    """A cluster for all tests: two nodes with room for one rank of :data:`ray_help.PAIR` each, and a head that has none
    for them, so that both may be lost."""
    with ray_help.cluster(1, 2, 2) as made:
        yield made


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a recipe."""
    place = tmp_path_factory.mktemp("ray")
    ray_help.furnish(place)
    return place


@pytest.fixture(scope="session")
def alone(folder: Path) -> Path:
    """The run of one process, without Ray."""
    return ray_help.alone(folder)


@pytest.fixture(autouse=True)
def nothing_left_behind(folder: Path) -> Iterator[None]:
    """Whatever a test does to a run, none of its processes stays."""
    yield
    ray_help.wait_for(lambda: not ray_help.processes(folder), lambda: ray_help.processes(folder), 60)
