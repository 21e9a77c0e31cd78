"""Ranks on the nodes of a Ray cluster: the run of one process, and what happens when ranks or nodes die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_help import PATIENCE_S, Run, cluster, holding, kill, wait_for
from safetensors.torch import load_file

PAIR = ("--set", "cluster.learner=2", "threads=2")  # two CPUs each, so that each node has one


@pytest.fixture(scope="module")
def alone(folder: Path) -> Path:
    """The run of one process, without Ray."""
    command = [sys.executable, "-m", "trew", "train", "r.toml", "--out", "alone", "--set", "threads=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=PATIENCE_S, capture_output=True)
    return folder / "alone"


@pytest.fixture(scope="module")
def pair(folder: Path, two_nodes: Any) -> Path:
    """The run of two ranks on two nodes."""
    with Run(folder, two_nodes.address, "pair", *PAIR) as run:
        assert run.wait() == 0, run.text()
    assert "training: 4" in run.text(), "what rank 0 prints is shown"
    return run.out


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def metrics(run: Path) -> list[tuple[int, float, float]]:
    rows = Run(run.parent, "", run.name).rows()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def test_ranks_on_two_nodes_are_one_process(alone: Path, pair: Path) -> None:
    for a, b in zip(metrics(alone), metrics(pair), strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-5)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(pair)[name], tensor, rtol=0, atol=1e-5, msg=name)
    parts = {path.name for path in (pair / "checkpoints" / "000004").iterdir()}
    assert "model.part-2-of-2.safetensors" in parts, "both ranks wrote"


def test_a_single_rank_is_the_process_that_it_would_be(alone: Path, folder: Path, two_nodes: Any) -> None:
    with Run(folder, two_nodes.address, "single", "--set", "cluster.launcher=ray", "threads=2") as run:
        assert run.wait() == 0, run.text()
    assert metrics(run.out) == metrics(alone)
    assert all(torch.equal(weights(run.out)[name], tensor) for name, tensor in weights(alone).items())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_goes_on_from_the_checkpoint(pair: Path, folder: Path, two_nodes: Any, rank: int) -> None:
    out = f"killed-{rank}"
    with Run(folder, two_nodes.address, out, *PAIR, *holding(out)) as run:
        kill(run.held().rank(rank))
        run.go()
        assert run.wait() == 0, run.text()
    assert "continuing after step 1" in run.text()
    assert run.steps() == [1, 2, 3, 4]
    assert metrics(run.out) == metrics(pair), "to the bit"


def test_a_rank_that_dies_too_often_is_named(folder: Path, two_nodes: Any) -> None:
    with Run(folder, two_nodes.address, "often", *PAIR, *holding("often"), "--set", "cluster.restarts=0") as run:
        kill(run.held().rank(1))
        assert run.wait() == 1
    assert "rank 1 on " in run.text()
    assert "killed by SIGKILL (out of memory, or by hand); it died after 0 restarts" in run.text()
    assert "Traceback" not in run.text()
    assert "continue with --resume; what ranks printed is in often/ranks" in run.text()


def test_a_signal_saves_and_ends_all_ranks(pair: Path, folder: Path, two_nodes: Any) -> None:
    with Run(folder, two_nodes.address, "stopped", *PAIR, *holding("stopped")) as run:
        run.held().process.send_signal(signal.SIGTERM)
        wait_for(lambda: "asking the ranks to end this step" in run.text(), run.text)
        wait_for(lambda: "stopping after this step" in printed_by_rank_0(folder), run.text)
        run.go()
        assert run.wait() == 143, run.text()
    assert "continue with --resume" in run.text()
    assert len(run.steps()) < 4
    with Run(folder, two_nodes.address, "stopped", *PAIR, *holding("stopped"), "--resume") as again:
        assert again.wait() == 0, again.text()
    assert metrics(again.out) == metrics(pair), "to the bit"


def test_nothing_is_left_where_the_process_that_started_the_run_is_killed(folder: Path, two_nodes: Any) -> None:
    """The fixture sees whether anything is left."""
    with Run(folder, two_nodes.address, "orphans", *PAIR, *holding("orphans")) as run:
        kill(run.held().process.pid)
        assert run.wait() == -signal.SIGKILL


def test_a_bad_recipe_is_refused_once(folder: Path, two_nodes: Any) -> None:
    with Run(folder, two_nodes.address, "bad", *PAIR, "--set", "rollout.prompts=0") as run:
        assert run.wait() == 2
    assert run.text().count("rollout.prompts: got 0") == 1


def test_without_places_the_run_says_what_is_missing_and_ends(folder: Path, two_nodes: Any) -> None:
    few = ("--set", "cluster.learner=5", "cluster.resources_timeout_s=5.0")
    with Run(folder, two_nodes.address, "many", *few) as run:
        assert run.wait() == 75
    assert "waiting for places on the Ray cluster: no room for 1 process with 1 CPU each; 2 nodes: 2 CPU" in run.text()
    assert "no place for the ranks on the Ray cluster for 5 s" in run.text()
    assert not run.out.exists()


def test_a_node_that_is_lost_costs_no_step(pair: Path, folder: Path) -> None:
    """The run goes on with the node that is left; when there is none any more, it ends for another try."""
    with cluster(1, 2, 2, 2) as nodes:
        lost = ("--set", "cluster.resources_timeout_s=60.0")
        with Run(folder, nodes.address, "lost", *PAIR, *holding("lost"), *lost) as run:
            nodes.remove_node(node_of(nodes, run.held().rank(1)), allow_graceful=False)
            run.go()
            assert run.wait() == 0, run.text()
        assert "continuing after step 1" in run.text()
        assert metrics(run.out) == metrics(pair), "to the bit"
        soon = ("--set", "cluster.resources_timeout_s=15.0")
        with Run(folder, nodes.address, "gone", *PAIR, *holding("gone"), *soon) as run:
            nodes.remove_node(node_of(nodes, run.held().rank(1)), allow_graceful=False)
            assert run.wait() == 75, run.text()
        assert "no room for 1 process with 2 CPU each; 1 node: 1 CPU; 1 node: 2 CPU" in run.text()


def printed_by_rank_0(folder: Path) -> str:
    (log,) = folder.glob(".trew-ranks-*/start-0-rank-0.log")
    return log.read_text()


def node_of(nodes: Any, pid: int) -> Any:
    """The node whose raylet is an ancestor of a process."""
    above = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        above.append(pid)
    for node in nodes.list_all_nodes():
        started = [info.process.pid for infos in node.all_processes.values() for info in infos]
        if set(started) & set(above):
            return node
    raise AssertionError(above)


def test_a_cluster_that_does_not_answer_is_refused(folder: Path) -> None:
    with Run(folder, "127.0.0.1:9", "nobody", *PAIR) as run:
        assert run.wait() == 2
    assert "RAY_ADDRESS: got '127.0.0.1:9', where nobody answers" in run.text()
    wait_for(lambda: not run.out.exists(), run.text, 1)
