"""Ranks on Ray, as far as no cluster is needed: who starts what, what is asked of a cluster, and what is said."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trew.config import Config, parse
from trew.config.places import bundles
from trew.distributed import launch, ray_launch, ray_rank
from trew.distributed.pulse import FOLDER
from trew.distributed.ranks import Place, check_nodes
from trew.distributed.ray_board import Board, Death
from trew.errors import ConfigError, MissingResources
from trew.objective import preset
from trew.training import compatibility
from trew.utils import ray_cluster

RANK = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "h",
    "MASTER_PORT": "1",
}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*RANK, ray_cluster.ADDRESS, ray_cluster.INSIDE):
        monkeypatch.delenv(name, raising=False)


def config(**cluster: object) -> Config:
    if cluster.get("servers"):
        cluster["rollout"] = "vllm"
    table = {
        "model": "m", "steps": 1, "data": {"task": "arithmetic"}, "rewards": [{"name": "exact"}],
        "objective": {"preset": "grpo"}, "cluster": cluster,
    }  # fmt: skip
    return parse(table)


@pytest.mark.parametrize(
    ("cluster", "address", "started_by"),
    [
        ({}, "", ""),
        ({}, "10.0.0.1:6379", ""),  # nothing to start
        ({"learner": 2}, "", "torchrun"),
        ({"learner": 2}, "10.0.0.1:6379", "ray"),
        ({"servers": 1}, "10.0.0.1:6379", "ray"),
        ({"servers": 1}, "", ""),  # this process starts them
        ({"servers": 1, "colocate": True}, "10.0.0.1:6379", ""),
        ({"learner": 2, "launcher": "torchrun"}, "10.0.0.1:6379", "torchrun"),
        ({"launcher": "torchrun"}, "", ""),
        ({"launcher": "ray"}, "", "ray"),
        ({"learner": 0}, "10.0.0.1:6379", "ray"),
    ],
)
def test_who_starts_the_ranks(monkeypatch, cluster, address, started_by):
    monkeypatch.setenv(ray_cluster.ADDRESS, address)
    assert launch.launcher(config(**cluster)) == started_by


def test_a_rank_that_torchrun_started_is_none_of_rays(monkeypatch):
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert launch.launcher(config(learner=2)) == ""
    with pytest.raises(ConfigError, match=r"cluster.launcher: got 'ray', but RANK and WORLD_SIZE are set"):
        launch.launcher(config(learner=2, launcher="ray"))
    with pytest.raises(ConfigError, match=r"cluster.launcher: got 'ray', but RANK and WORLD_SIZE are set"):
        launch.place_for(config(learner=2, launcher="ray"))  # as each of several ranks asks
    monkeypatch.setenv(ray_cluster.INSIDE, "10.0.0.1:6379")
    assert launch.launcher(config(learner=2, launcher="ray")) == ""


@pytest.mark.parametrize(
    ("variables", "cluster", "told"),
    [
        ({}, {}, False),
        ({}, {"hang_s": 60.0, "restarts": 9}, True),  # a single process
        ({}, {"hang_s": 60.0, "restarts": 9, "learner": 2}, False),  # this process starts ranks
        ({}, {"hang_s": 60.0, "restarts": 9, "launcher": "ray"}, False),
        (RANK, {"hang_s": 60.0, "restarts": 9, "learner": 2}, True),  # torchrun, or Slurm
        (RANK | {FOLDER: "/ranks"}, {"hang_s": 60.0, "restarts": 9, "learner": 2}, False),
        (RANK | {ray_cluster.INSIDE: "10.0.0.1:6379"}, {"hang_s": 60.0, "restarts": 9, "learner": 2}, False),
    ],
)
def test_limits_of_ranks_that_nobody_watches_are_told(monkeypatch, variables, cluster, told):
    for name in (*RANK, FOLDER, ray_cluster.INSIDE, ray_cluster.ADDRESS):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    made = config(**cluster)
    notes = [note for note in compatibility.notes(preset("grpo"), made) if note.startswith("cluster.")]
    assert [note.partition(":")[0] for note in notes] == (["cluster.restarts", "cluster.hang_s"] if told else [])


def test_a_program_that_calls_train_is_told_who_starts_ranks_on_ray():
    with pytest.raises(ConfigError, match="this process was not started on Ray; run the recipe with trew train"):
        launch.place_for(config(launcher="ray"))


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"launcher": "slurm"}, "cluster.launcher: got 'slurm'"),
        (
            {"launcher": "ray", "servers": 1, "colocate": True},
            "cluster.colocate: got true with cluster.launcher = 'ray'",
        ),
        ({"resources_timeout_s": 0.0}, "cluster.resources_timeout_s: got 0.0, accepts a number of seconds above 0"),
        ({"launcher": "torchrun", "resources_timeout_s": 9.0}, "cluster.resources_timeout_s: got 9 with"),
    ],
)
def test_settings_that_ray_cannot_honour_are_refused(cluster, said):
    with pytest.raises(ConfigError, match=said):
        config(**cluster)


def test_what_is_asked_of_the_cluster():
    many = config(learner=2, servers=1, server_gpus=4)
    assert bundles(many, gpus=True) == [{"CPU": 1.0, "GPU": 1.0}] * 2 + [{"CPU": 1.0, "GPU": 4.0}]
    assert bundles(many, gpus=False) == [{"CPU": 1.0}] * 3


def test_what_lacks_is_said_by_kind():
    wanted = bundles(config(learner=2, servers=1, server_gpus=4), gpus=True)
    assert ray_cluster.lacking(wanted, [{"CPU": 64.0, "GPU": 8.0}]) == ""
    said = ray_cluster.lacking(wanted, [{"CPU": 64.0, "GPU": 3.0}, {"CPU": 64.0, "GPU": 3.0}, {"CPU": 8.0}])
    assert said == "no room for 1 process with 1 CPU and 4 GPU each; 2 nodes: 64 CPU and 3 GPU; 1 node: 8 CPU"
    assert ray_cluster.lacking(wanted[:1], []).endswith("no node is alive")
    assert MissingResources.exit_code == os.EX_TEMPFAIL


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://127.0.0.1:8265", "that of a job server"),
        ("ray://10.0.0.1:10001", "that of Ray Client"),
        ("head", "accepts HOST:PORT"),
        ("127.0.0.1:9", "where nobody answers"),
    ],
)
def test_an_address_that_is_none_is_refused_at_once(address, said):
    with pytest.raises(ConfigError, match=f"RAY_ADDRESS: got '{address}'.*{said}"):
        ray_cluster.checked_address(address)


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_extra_is_named():
    with pytest.raises(ConfigError, match=r"pip install 'ray\[train\]>=.* on every node"):
        ray_launch.launch(config(launcher="ray"), [], print)


# ---------------------------------------------------------------------------------------------------------- the board


def test_a_board_is_beside_the_run_and_vanishes(tmp_path):
    board = Board.make(tmp_path / "runs" / "r")
    assert board.folder.parent == tmp_path / "runs"
    assert board.seen(seconds=0)
    assert not Board(board.folder, "another run's").seen(seconds=0)
    assert not (tmp_path / "runs" / "r").exists(), "a new run's folder must not be there"
    board.remove()
    assert not board.seen(seconds=0)


def test_a_board_knows_whether_the_folder_of_the_run_is_open(tmp_path):
    """Of the rank's own folder, which goes with the start; ranks that are started again then go on with the run."""
    board, work = Board.make(tmp_path / "r"), tmp_path / "work"
    work.mkdir()
    ray_rank._note_opened(board, work)
    assert not board.opened
    (work / launch.OPENED).touch()
    ray_rank._note_opened(board, work)
    assert board.opened


def test_a_board_knows_whether_ranks_run(tmp_path):
    board = Board.make(tmp_path / "r")
    assert board.waiting
    assert board.begin() == 0
    assert not board.waiting
    board.failed()
    assert board.waiting
    assert board.begin() == 1
    assert not board.waiting


def test_the_first_death_has_the_cause(tmp_path):
    board = Board.make(tmp_path / "r")
    board.begin()
    board.died(0, Death(1, "n1", "killed by SIGKILL", ("last",)))
    board.died(0, Death(0, "n0", "exit code 1", ("the connection to another rank broke",)))
    assert board.death() == Death(1, "n1", "killed by SIGKILL", ("last",))
    board.begin()
    assert board.death() is not None, "the last start that a rank died in"


def test_what_rank_0_prints_is_shown_once_over_several_starts(tmp_path, capsys):
    board = Board.make(tmp_path / "r")
    shown = ray_launch._Shown(board)
    shown.copy()
    board.log(0, 0).write_text("one\n")
    shown.copy()
    board.log(0, 0).write_text("one\ntwo\n")
    board.log(1, 0).write_text("three\n")
    shown.copy()
    shown.copy()
    assert capsys.readouterr().out == "one\ntwo\nthree\n"


def test_a_character_that_comes_in_two_parts_is_shown_whole(tmp_path, capsys):
    board = Board.make(tmp_path / "r")
    shown = ray_launch._Shown(board)
    whole = "\u00fc \u2713 \U0001f600\n".encode()
    for end in range(len(whole) + 1):
        board.log(0, 0).write_bytes(whole[:end])
        shown.copy()
    # A start that died within a character does not spoil the next.
    board.log(0, 0).write_bytes(whole + whole[:1])
    shown.copy()
    board.log(1, 0).write_bytes(b"next\n")
    shown.copy()
    assert capsys.readouterr().out == whole.decode() + "next\n"


def test_every_node_is_asked_what_it_sees_also_where_two_share_a_host(tmp_path):
    class Ray:
        """What is used of the module ``ray``; a task runs where it was put, and node ``away`` sees another disk."""

        util = SimpleNamespace(
            scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda node, soft: node)
        )

        def __init__(self, *ids: str) -> None:
            self.ids = ids

        def nodes(self) -> list[dict[str, object]]:
            return [
                {"NodeID": one, "NodeManagerHostname": "host", "Alive": True, "Resources": {"CPU": 2.0}}
                for one in self.ids
            ]

        def remote(self, task: Callable[..., list[str]]) -> Any:
            def options(*, num_cpus: int, scheduling_strategy: str) -> Any:
                def call(folder: str, mark: str, here: str) -> Callable[[], list[str]]:
                    return lambda: task(folder, mark, "/nowhere" if scheduling_strategy == "away" else here)

                return SimpleNamespace(remote=call)

            return SimpleNamespace(options=options)

        def get(self, answer: Callable[[], list[str]], timeout: float) -> list[str]:
            return answer()

    board = Board.make(tmp_path / "r")
    ray_launch._check_shared(Ray("one", "two"), board, config(learner=2))
    for ids in (("away", "one"), ("one", "away"), ("away", "away")):
        with pytest.raises(ConfigError) as error:
            ray_launch._check_shared(Ray(*ids), board, config(learner=2))
        assert error.value.problems == (f"node host does not see /nowhere: {ray_rank.NOT_SHARED}",)


def test_logs_are_kept_in_the_run(tmp_path):
    board, run = Board.make(tmp_path / "r"), tmp_path / "r"
    board.log(0, 1).write_text("words")
    board.keep_logs(run)
    assert not run.exists(), "there was no run"
    run.mkdir()
    board.keep_logs(run)
    (kept,) = (run / "ranks").iterdir()
    assert kept.name.endswith("start-0-rank-1.log")


# ------------------------------------------------------------------------------------------------------------- a rank


def test_a_rank_gets_what_torchruns_agent_would_set(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    order = ray_rank.Order(
        arguments=("train",), folder="f", board="b", mark="m", variables={"TREW_CACHE": "/c"}, address="10.0.0.1:6379",
        threads=3, hang_s=1.0, grace_s=1.0, shard="auto",
    )  # fmt: skip
    found = ray_rank.environment(order, Place(1, 2, 0, 1), 2, tmp_path)
    assert "RAY_JOB_ID" not in found
    wanted = {
        "RAY_AUTH_MODE": "token", "RANK": "1", "TREW_CACHE": "/c", "RAY_ADDRESS": "10.0.0.1:6379",
        "OMP_NUM_THREADS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2",
        "TREW_RANKS": str(tmp_path), "TREW_RAY": "10.0.0.1:6379",
    }  # fmt: skip
    assert found.items() >= wanted.items()


def test_ranks_that_lie_unevenly_on_nodes_shard_over_all_of_them_only():
    check_nodes([2, 2], "hsdp", how="Ray placed")
    with pytest.raises(ConfigError, match=r"cluster.shard: got 'auto'.* \[3, 1\] ranks on different nodes"):
        check_nodes([3, 3, 3, 1], "auto", how="Ray placed")


def test_a_node_that_does_not_see_the_folders_names_them(tmp_path):
    board = Board.make(tmp_path / "r")
    assert ray_launch._sees(str(board.folder), board.mark, str(tmp_path)) == []
    missing = Path(tmp_path / "elsewhere")
    assert ray_launch._sees(str(board.folder), board.mark, str(missing)) == [str(missing)]
