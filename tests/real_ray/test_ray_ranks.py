"""Ranks on the nodes of a Ray cluster: the run of one process, and what happens when ranks or nodes die."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ray_help import PAIR, STORE_BYTES, Run, ancestors, holding, kill, metrics, wait_for, weights


@pytest.fixture(scope="module")
def pair(folder: Path, nodes: Any) -> Path:
    """The run of two ranks on two nodes."""
    with Run(folder, nodes.address, "pair", *PAIR) as run:
        assert run.wait() == 0, run.text()
    assert "training: 4" in run.text(), "what rank 0 prints is shown"
    return run.out


def test_ranks_on_two_nodes_are_one_process(alone: Path, pair: Path) -> None:
    for a, b in zip(metrics(alone), metrics(pair), strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-5)
    for name, tensor in weights(alone).items():
        torch.testing.assert_close(weights(pair)[name], tensor, rtol=0, atol=1e-5, msg=name)
    parts = {path.name for path in (pair / "checkpoints" / "000004").iterdir()}
    assert "model.part-2-of-2.safetensors" in parts, "both ranks wrote"


def test_ranks_that_are_killed_go_on_from_the_checkpoint(pair: Path, folder: Path, nodes: Any) -> None:
    """First rank 0, which drives the run, then the other."""
    with Run(folder, nodes.address, "killed", *PAIR, *holding(folder, "killed", 1, 2)) as run:
        first = run.held(1).rank(1)
        kill(run.rank(0))
        run.go(1)
        kill(run.held(2).rank(1, other_than=first))
        run.go(2)
        assert run.wait() == 0, run.text()
    assert "continuing after step 1" in run.text()
    assert "continuing after step 2" in run.text()
    assert run.steps() == [1, 2, 3, 4]
    assert metrics(run.out) == metrics(pair), "to the bit"


def test_a_rank_that_dies_too_often_is_named(folder: Path, nodes: Any) -> None:
    held = holding(folder, "often", 1)
    with Run(folder, nodes.address, "often", *PAIR, *held, "--set", "cluster.restarts=0") as run:
        kill(run.held().rank(1))
        assert run.wait() == 1
    assert "rank 1 on " in run.text()
    assert "killed by SIGKILL (out of memory, or by hand); it died after 0 restarts" in run.text()
    assert "Traceback" not in run.text()
    assert "continue with --resume; what ranks printed is in often/ranks" in run.text()


def test_a_signal_saves_and_ends_all_ranks(pair: Path, folder: Path, nodes: Any) -> None:
    with Run(folder, nodes.address, "stopped", *PAIR, *holding(folder, "stopped", 1)) as run:
        run.held().process.send_signal(signal.SIGTERM)
        wait_for(lambda: "asking the ranks to end this step" in run.text(), run.text)
        wait_for(lambda: "stopping after this step" in printed_by_rank_0(folder), run.text)
        run.go()
        assert run.wait() == 143, run.text()
    assert "continue with --resume" in run.text()
    assert len(run.steps()) < 4
    with Run(folder, nodes.address, "stopped", *PAIR, *holding(folder, "stopped"), "--resume") as again:
        assert again.wait() == 0, again.text()
    assert metrics(again.out) == metrics(pair), "to the bit"


def test_nothing_is_left_where_the_process_that_started_the_run_is_killed(folder: Path, nodes: Any) -> None:
    """The fixture sees whether anything is left."""
    with Run(folder, nodes.address, "orphans", *PAIR, *holding(folder, "orphans", 1)) as run:
        kill(run.held().process.pid)
        assert run.wait() == -signal.SIGKILL


def test_a_node_that_is_lost_costs_no_step(pair: Path, folder: Path, nodes: Any) -> None:
    """The run goes on with the nodes that are left; when there are too few, it ends for another try."""
    lost, soon = (("--set", f"cluster.resources_timeout_s={seconds}") for seconds in (60.0, 40.0))
    with one_more_node(nodes):
        with Run(folder, nodes.address, "lost", *PAIR, *holding(folder, "lost", 1), *lost) as run:
            nodes.remove_node(node_of(nodes, run.held().rank(1)), allow_graceful=False)
            run.go()
            assert run.wait() == 0, run.text()
        assert "continuing after step 1" in run.text()
        assert metrics(run.out) == metrics(pair), "to the bit"
        with Run(folder, nodes.address, "gone", *PAIR, *holding(folder, "gone", 1), *soon) as run:
            nodes.remove_node(node_of(nodes, run.held().rank(1)), allow_graceful=False)
            assert run.wait() == 75, run.text()
        assert "no room for 1 process with 2 CPU each; 1 node: 1 CPU; 1 node: 2 CPU" in run.text()
        assert "Traceback" not in run.text()


@contextlib.contextmanager
def one_more_node(nodes: Any) -> Iterator[None]:
    """A cluster with a third node for ranks; two afterwards, whatever became of them."""
    count = len(nodes.list_all_nodes())
    nodes.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    try:
        yield
    finally:
        while len(nodes.list_all_nodes()) > count:
            nodes.remove_node(next(iter(nodes.worker_nodes)))
        while len(nodes.list_all_nodes()) < count:
            nodes.add_node(num_cpus=2, object_store_memory=STORE_BYTES)


def printed_by_rank_0(folder: Path) -> str:
    (log,) = folder.glob(".trew-ranks-*/start-0-rank-0.log")
    return log.read_text()


def node_of(nodes: Any, pid: int) -> Any:
    """The node whose raylet is an ancestor of a process."""
    above = {*ancestors(pid)}
    for node in nodes.list_all_nodes():
        if above & {info.process.pid for infos in node.all_processes.values() for info in infos}:
            return node
    raise AssertionError(above)


# ---- what cannot run says so once, and leaves nothing


def refused(run: Run, code: int, said: str) -> None:
    assert run.wait() == code, run.text()
    assert run.text().count(said) == 1, run.text()
    assert "Traceback" not in run.text()
    assert not run.out.exists()
    assert not run.boards() - run.before


def test_a_bad_recipe_is_refused_once(folder: Path, nodes: Any) -> None:
    with Run(folder, nodes.address, "bad", *PAIR, "--set", "rollout.prompts=0") as run:
        refused(run, 2, "rollout.prompts: got 0")


def test_what_only_ranks_can_see_is_refused_once(folder: Path, nodes: Any) -> None:
    with Run(folder, nodes.address, "worse", *PAIR, "--set", "rewards=[{name='reward.py:missing'}]") as run:
        refused(run, 2, "'missing'")


def test_without_places_the_run_says_what_is_missing_and_ends(folder: Path, nodes: Any) -> None:
    """Exit code 75: nodes may come, and the same command may be tried again."""
    few = ("--set", "cluster.learner=6", "cluster.resources_timeout_s=5.0")
    with Run(folder, nodes.address, "many", *few) as run:
        refused(run, 75, "no place for the ranks on the Ray cluster for 5 s")
    has = "no room for 1 process with 1 CPU each; 1 node: 1 CPU; 2 nodes: 2 CPU"
    assert f"waiting for places on the Ray cluster: {has}" in run.text()


def test_without_gpus_every_gpu_is_refused(folder: Path, nodes: Any) -> None:
    with Run(folder, nodes.address, "gpus", "--set", "cluster.learner=0", "cluster.launcher=ray") as run:
        refused(run, 2, "no node of the Ray cluster has one: set the number of ranks")


@contextlib.contextmanager
def somebody_else() -> Iterator[str]:
    """The address of a server that accepts connections and says nothing, as one that is no cluster's may."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"127.0.0.1:{silent.getsockname()[1]}"


def test_an_address_without_a_cluster_is_refused(folder: Path) -> None:
    with Run(folder, "127.0.0.1:9", "nobody", *PAIR) as run:
        refused(run, 2, "RAY_ADDRESS: got '127.0.0.1:9', where nobody answers")
    with somebody_else() as address, Run(folder, address, "somebody", *PAIR) as run:
        refused(run, 2, f"RAY_ADDRESS: got '{address}', which accepts connections but does not answer")
