"""One server of forks for all tests of faults: what it imports takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forks import Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as started:
        yield started
