"""The routes of the weights to the real vLLM: the contract that otherwise runs on stand-ins, and what it takes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trew.rewards.isolation.tree import descendants
from trew.rollout.vllm import handshake
from vllm_help import House

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("fixture", "routes"), [("sharing", "files,ipc"), ("streaming", "files,nccl")])
def test_the_contract_of_routes_holds_on_a_real_server(fixture, routes, tied, record, request):
    endpoint = request.getfixturevalue(fixture).endpoints[0]
    settings = {
        "TREW_VLLM_ENDPOINT": str(endpoint), "TREW_VLLM_MODEL": str(tied), "TREW_SERVER_TOKEN": endpoint.token,
        "TREW_VLLM_ROUTES": routes,
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rA", str(ROOT / "tests/contract/test_weight_routes.py")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    record(f"route_tests_passed_{routes.replace(',', '_')}", passed)
    assert passed >= 12


@pytest.fixture
def house(sharing, tied, tmp_path) -> Iterator[House]:
    """A policy beside the server that reads its memory."""
    made = House(tied, tmp_path, list(sharing.endpoints), [], sync="ipc")
    with contextlib.closing(made.weights):
        yield made


def test_a_server_of_shared_memory_fits_a_run_and_maps_nothing_for_longer_than_an_update(sharing, house, record):
    fits = handshake.Expected(
        dtype="float32", vocabulary=house.facts.vocabulary, length=512, backend="trew_memory"
    )  # fmt: skip
    handshake.check(sharing.endpoints[0], fits, root=Path("/dev/shm"))
    engine, seconds = house.engine(), []
    for seed in (1, 2, 3):
        house.change(seed=seed, scale=0.3)
        began = time.monotonic()
        house.publish(engine, house.policy.version)
        seconds.append(time.monotonic() - began)
    record("memory_publish_and_update_s", [round(s, 2) for s in seconds])
    folder = house.weights.newest.route.root.parent.name
    servers = descendants(os.getpid())
    assert servers
    for pid in servers:
        with contextlib.suppress(OSError):
            assert folder not in Path(f"/proc/{pid}/maps").read_text()
