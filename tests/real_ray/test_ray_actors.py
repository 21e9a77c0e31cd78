"""Servers and reward hosts as actors on a Ray cluster: started, killed and restarted there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ray_help import Run, ancestors, holding, kill, metrics, processes_with, wait_for, weights

import serve_help
import tiny


@pytest.fixture(scope="module")
def served(folder: Path) -> list[str]:
    """Settings for one server: a stand-in for vLLM."""
    tiny.save(folder / "smollm", "smollm")
    python = serve_help.python_with_vllm(folder)
    return ["--set", "model=smollm", "cluster.rollout=vllm", "cluster.servers=1", f"cluster.python={python}"]


def test_a_server_that_dies_is_started_again_and_ends_with_its_actor(
    folder: Path, nodes: Any, served: list[str]
) -> None:
    """First its actor is killed, then the server itself."""
    program = str(folder / "serve.py")
    with Run(folder, nodes.address, "served", *served, *holding(folder, "served", 1, 2)) as run:
        run.held(1)
        (server,) = processes_with(program)
        (actor,) = processes_with("ray::ServerActor")
        kill(actor)
        wait_for(lambda: server not in processes_with(program), run.text, 60)
        run.go(1)
        run.held(2)
        (server,) = processes_with(program)
        kill(server)
        wait_for(lambda: server not in processes_with(program), run.text, 60)
        run.go(2)
        assert run.wait() == 0, run.text()
    assert run.steps() == [1, 2, 3, 4]
    assert max(row["canary_gap"] for row in run.rows() if "loss" in row) < 1e-5
    assert run.text().count("is back, and has the weights of version") == 2
    wait_for(lambda: not processes_with(program), run.text, 60)


def test_reward_hosts_on_every_node_give_the_scores_of_the_run_itself(alone: Path, folder: Path, nodes: Any) -> None:
    """A single rank on Ray is the process that it would be without, to the bit, also when a host is killed at work."""
    settings = ("--set", "cluster.launcher=ray", "threads=2", "cluster.reward_hosts=['ray']")
    with Run(folder, nodes.address, "graded", *settings, *holding(folder, "graded", 1)) as run:
        run.held()
        hosts = {*processes_with("ray::RewardActor")}
        assert len(hosts) == 3, "one on each node"
        (used,) = hosts & {*ancestors(int((folder / "graded.pid").read_text()))}
        kill(used)
        run.go()
        assert run.wait() == 0, run.text()
    said = run.text() + " ".join((run.out / "events.log").read_text().split())
    assert "its work is done by 2 other hosts" in said
    assert metrics(run.out) == metrics(alone)
    assert all(torch.equal(weights(run.out)[name], tensor) for name, tensor in weights(alone).items())
    wait_for(lambda: not processes_with("ray::RewardActor"), run.text, 60)
