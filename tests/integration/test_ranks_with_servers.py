"""Several ranks whose completions come from a server: a stand-in for vLLM in this process."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli_servers import recipe, rollouts

import tiny
from fake_vllm import FakeVllm, serving
from forks import Command
from ranks_help import free_port, variables
from recipe_help import assert_equal_weights, final_weights, training_rows

PLAIN = ("kernels=plain", "linear=plain")  # what ranks compute with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")  # with a tied head


@pytest.fixture
def fake(model: Path, tmp_path: Path) -> Iterator[FakeVllm]:
    made = FakeVllm(model, token="secret")
    with serving(made, tmp_path / "0.sock"):
        yield made


def start(server: Any, path: Path, *args: str, settings: tuple[str, ...] = (), hold: str = "") -> list[Command]:
    """Two ranks of a run; ``hold`` is where rank 1 waits."""
    port = free_port()
    return [
        server.start(
            "train", path, *args, "--set", *PLAIN, "cluster.learner=2", *settings, cwd=path.parent,
            hold=hold if rank else "", TREW_SERVER_TOKEN="secret", **variables(rank, 2, port),
        )
        for rank in range(2)
    ]  # fmt: skip


def finish(ranks: list[Command]) -> str:
    """What rank 0 printed, once all have ended well."""
    codes = [rank.wait() for rank in ranks]
    assert codes == [0, 0], "\n".join(rank.text() for rank in ranks)
    return ranks[0].text()


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        pytest.param((), "", id="sharded"),
        pytest.param(("cluster.shard=none",), "", id="replicas", marks=pytest.mark.nightly),
        pytest.param((), "\n[lora]\nrank = 2\n", id="adapters", marks=pytest.mark.nightly),
    ],
)
def test_ranks_on_a_server_are_one_process_on_a_server(server, fake, model, tmp_path, settings, more):
    """All ranks gather the weights, rank 0 publishes them; the server has the learner's at every step."""
    path = recipe(tmp_path, model, preset="entropy-advantage", more=more)
    server.run("train", path, "--out", "alone", "--set", *PLAIN, cwd=tmp_path, TREW_SERVER_TOKEN="secret")
    finish(start(server, path, "--out", "ranks", settings=settings))
    alone, ranks = tmp_path / "alone", tmp_path / "ranks"
    assert rollouts(alone, "uid", "sample", "token_ids") == rollouts(ranks, "uid", "sample", "token_ids")
    assert max(row["canary_gap"] for row in training_rows(ranks)) < 1e-5
    for a, b in zip(training_rows(alone), training_rows(ranks), strict=True):
        for key in ("loss", "grad_norm", "entropy"):
            assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-6), key
    torch.testing.assert_close(final_weights(ranks), final_weights(alone), rtol=0, atol=1e-5)


@pytest.mark.nightly  # as in test_ranks_cli.py, with completions of a server
def test_a_rank_that_is_killed_costs_nothing(server, fake, model, tmp_path):
    path = recipe(tmp_path, model)
    finish(start(server, path, "--out", "whole"))
    ranks = start(server, path, "--out", "killed", hold="trew.training.loop:update:3")
    ranks[1].held().kill(signal.SIGKILL)
    assert ranks[0].wait() == 1
    assert "the connection to another rank broke" in ranks[0].text()
    said = finish(start(server, path, "--out", "killed", "--resume"))
    assert "continuing after step 2" in said
    assert [row["step"] for row in training_rows(tmp_path / "killed")] == [1, 2, 3, 4]
    assert_equal_weights(tmp_path / "whole", tmp_path / "killed")


def test_without_a_server_all_ranks_end_and_say_why(server, fake, model, tmp_path):
    path = recipe(tmp_path, model)
    fake.faults.spoil = lambda answer: answer["choices"].pop()
    fake.faults.bad_answers = 10**6
    ranks = start(server, path)
    assert [rank.wait() for rank in ranks] == [1, 0], ranks[1].text()
    assert re.search(r"\d completions where \d were asked for", " ".join(ranks[0].text().split()))
    assert "Traceback" not in ranks[0].text() + ranks[1].text()
