"""Real vLLM servers for the tests in this folder, which ``make test-vllm`` runs. They are skipped where
``TREW_VLLM_PYTHON`` does not name the Python of vLLM's environment. What they measure goes to the file
``TREW_VLLM_JSON``."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_models import save

from trew.rollout.vllm import environment
from trew.rollout.vllm.server import ServerOptions, Servers

PYTHON = os.environ.get("TREW_VLLM_PYTHON", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips all tests of this folder where there is no vLLM."""
    for item in items if not PYTHON else ():
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))


Record = Callable[[str, Any], None]


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """Keeps measured values for the JSON file."""
    found: dict[str, Any] = {}
    yield found.__setitem__
    if path := os.environ.get("TREW_VLLM_JSON"):
        Path(path).write_text(json.dumps(found, indent=1) + "\n")


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory, record: Record) -> Iterator[Callable[..., Servers]]:
    """Starts one server for a model; all of them end with the session."""
    found = environment.probe(environment.find(PYTHON))
    record("versions", {"python": found.python_version, **{k: v for k, v in found.versions.items() if v}})
    with contextlib.ExitStack() as stack:

        def made(model: Path, **options: Any) -> Servers:
            folder = tmp_path_factory.mktemp("servers")
            known = {"dtype": "float32", "seed": 0, "max_length": 512, "sequences": 64}
            servers = Servers(
                ServerOptions(python=found.python, model=model, **{**known, **options}), count=1, folder=folder
            )
            stack.enter_context(servers)
            began = time.monotonic()
            servers.start(seconds=600)
            record("start_s", round(time.monotonic() - began, 1))
            return servers

        yield made


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is its embedding."""
    return save(tmp_path_factory.mktemp("tied") / "model", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def shared(start: Callable[..., Servers], tied: Path) -> Servers:
    """A server of the tied model, for tests that leave it in order."""
    return start(tied, more={"max-num-seqs": 48})


@pytest.fixture(scope="session")
def sharing(start: Callable[..., Servers], tied: Path) -> Servers:
    """A server of the tied model that reads its weights out of shared memory."""
    return start(tied, backend="trew_memory")


@pytest.fixture(scope="session")
def streaming(start: Callable[..., Servers], tied: Path) -> Servers:
    """A server of the tied model that is sent its weights as streams."""
    return start(tied, backend="trew_stream")
