"""Two processes that share a generation batch learn what one does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_compare import TOLERANCE, WRONG, apart
from trl_processes import CASES, SHOWN

WORKER = str(Path(__file__).parent / "trl_processes.py")
SECONDS = 240  # after which processes that wait for each other are ended


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def learned(world: int, folder: Path) -> dict[str, Any]:
    """What :mod:`trl_processes` found in ``world`` processes."""
    out, port, running = folder / f"{world}.pt", free_port(), []
    try:
        for rank in range(world):
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            if world > 1:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
            with (folder / f"{world}-{rank}.log").open("w") as log:
                command = [sys.executable, "-W", "ignore", WORKER, str(out)]
                running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
        for rank, process in enumerate(running):
            assert process.wait(SECONDS) == 0, (folder / f"{world}-{rank}.log").read_text()[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return torch.load(out)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("processes")
    return [learned(world, folder) for world in (1, 2)]


@pytest.mark.parametrize("number", range(len(CASES)), ids=[name for name, _ in CASES])
def test_what_is_learned_does_not_depend_on_processes(found, number):
    one, two = (each["cases"][number] for each in found)
    for mine, theirs in zip(two["gradients"], one["gradients"], strict=True):
        assert apart(mine, theirs) <= TOLERANCE
    assert set(one["logged"]) == set(SHOWN)
    assert two["logged"] == pytest.approx(one["logged"], rel=1e-5, abs=1e-6)


def test_weights_after_training(found):
    assert apart(found[1]["weights"], found[0]["weights"]) <= 10 * TOLERANCE  # four steps, from float32


def test_steps_and_objectives_do_differ(found):
    one, two = (each["cases"] for each in found)
    assert apart(two[0]["gradients"][1], one[0]["gradients"][0]) >= WRONG
    assert apart(two[0]["gradients"][0], one[1]["gradients"][0]) >= WRONG
