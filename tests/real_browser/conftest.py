"""A real Chromium on the real server of ``trew view``, by ``make test-view`` only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = os.environ.get("TREW_CHROMIUM", "")
if CHROMIUM:
    from browser_help import Visit
else:
    collect_ignore_glob = ["*.py"]  # no browser was given, and its driver may not be installed

# Chromium itself also asks for nothing then.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Visit]:
    """A window on the server of the module's runs, from the fixture ``address``."""
    window = Visit(chromium, address)
    yield window
    window.close()


@pytest.fixture
def pictures() -> Path | None:
    """Where pictures are wanted, if they are: make test-view PICTURES=DIR."""
    place = os.environ.get("TREW_PICTURES")
    if place:
        Path(place).mkdir(parents=True, exist_ok=True)
    return Path(place) if place else None
