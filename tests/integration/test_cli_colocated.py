"""Whole runs through the command line with servers that the run starts, and takes turns with: stand-ins, started as
vLLM's build for CPUs would be."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from test_cli_servers import recipe, rollouts
from test_ranks_with_servers import PLAIN

import tiny
from forks import wait_for
from ranks_help import free_port, variables
from recipe_help import assert_equal_weights, training_rows
from serve_help import left_over, python_with_vllm

WAKE = [
    "POST /wake_up weights", "POST /pause", "POST /init_weight_transfer_engine", "POST /start_weight_update",
    "POST /update_weights", "POST /finish_weight_update", "GET /weight_info", "POST /wake_up kv_cache", "POST /resume",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")  # with a tied head


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return python_with_vllm(tmp_path_factory.mktemp("python"))


@pytest.fixture
def written(model: Path, python: Path, tmp_path: Path) -> Path:
    return write(tmp_path, model, python)


def write(folder: Path, model: Path, python: Path) -> Path:
    path = recipe(folder, model)
    text = path.read_text().replace("[cluster]", f'[cluster]\npython = "{python}"\nservers = 1')
    path.write_text("\n".join(line for line in text.splitlines() if not line.startswith("endpoints")) + "\n")
    return path


def calls(run: Path) -> list[str]:
    """What the server was asked, apart from questions about its health; the tag of a call to wake up."""
    found = []
    for line in (run / "servers" / "0.log").read_text().splitlines():
        if line.startswith("called ") and not any(p in line for p in ("/health", "/metrics")):
            _, method, path, body = line.split(" ", 3)
            tag = (json.loads(body) or {}).get("tags", [""])[0] if path == "/wake_up" else ""
            found.append(f"{method} {path} {tag}".strip())
    return found


def same(a: Path, b: Path) -> None:
    """The same tokens were trained on, and the weights are the same to the bit."""
    assert rollouts(a, "uid", "sample", "token_ids") == rollouts(b, "uid", "sample", "token_ids")
    assert_equal_weights(a, b)


@pytest.fixture(scope="module")
def apart(server: Any, model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run whose server does not sleep."""
    folder = tmp_path_factory.mktemp("apart")
    server.run("train", write(folder, model, python), "--out", "apart", "--set", *PLAIN, cwd=folder)
    return folder / "apart"


def test_servers_that_take_turns_change_nothing_but_the_order(server, written, apart, tmp_path, python):
    """Evaluations and baselines find them awake; each step has the one right order; nothing is left behind."""
    server.run("train", written, "--out", "turns", "--set", *PLAIN, "cluster.colocate=true", cwd=tmp_path)
    same(apart, tmp_path / "turns")
    asked = calls(tmp_path / "turns")
    assert not any("sleep" in call for call in calls(apart))
    nights = [i for i, call in enumerate(asked) if call == "POST /sleep"]
    assert len(nights) == 5, "once for the first weights, and once for each step"
    for night in nights:
        assert asked[night + 1 : night + 2 + len(WAKE)] == ["GET /is_sleeping", *WAKE]
    assert asked[-1] == "POST /inference/v1/generate", "the last evaluation"
    assert left_over(python) == []


@pytest.mark.nightly  # fault/test_colocated.py wakes servers after failures, test_cli_servers.py resumes a killed run
def test_a_run_that_was_killed_while_its_servers_slept_goes_on(server, written, apart, tmp_path, python):
    """kill -9 in the third step, which the learner was taking: the next run starts servers that are awake."""
    command = server.start(
        "train", written, "--out", "killed", "--set", *PLAIN, "cluster.colocate=true", cwd=tmp_path,
        hold="trew.training.loop:update:3",
    )  # fmt: skip
    command.held()
    wait_for(lambda: (tmp_path / "killed" / "checkpoints" / "000002" / "manifest.json").exists())
    command.kill(signal.SIGKILL)
    command.wait()
    wait_for(lambda: not left_over(python))
    assert "continuing after step 2" in server.run("train", written, "--out", "killed", "--resume", cwd=tmp_path)
    assert [row["step"] for row in training_rows(tmp_path / "killed")] == [1, 2, 3, 4]
    same(apart, tmp_path / "killed")


@pytest.mark.nightly
def test_ranks_leave_and_enter_together(server, written, tmp_path):
    """Two ranks and a server on what would be the same GPUs."""

    def started(out: str, *more: str) -> Path:
        port = free_port()
        ranks = [
            server.start(
                "train", written, "--out", out, "--set", *PLAIN, "cluster.learner=2", *more, cwd=tmp_path,
                **variables(rank, 2, port),
            )
            for rank in range(2)
        ]  # fmt: skip
        codes = [rank.wait() for rank in ranks]
        assert codes == [0, 0], "\n".join(rank.text() for rank in ranks)
        return tmp_path / out

    same(started("ranks"), started("ranks-in-turns", "cluster.colocate=true"))
    assert calls(tmp_path / "ranks-in-turns").count("POST /sleep") == 5
