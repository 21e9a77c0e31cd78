"""Whole runs through the command line whose completions come from servers: stand-ins for vLLM in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import tiers
import tiny
from fake_vllm import FakeVllm, serving
from forks import wait_for
from recipe_help import ODD, assert_equal_weights, training_rows
from recipe_help import recipe as recipe_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")  # with a tied head


@pytest.fixture
def fakes(model: Path, tmp_path: Path) -> Iterator[list[FakeVllm]]:
    made = [FakeVllm(model, token="secret") for _ in range(2)]
    with serving(made[0], tmp_path / "0.sock"), serving(made[1], tmp_path / "1.sock"):
        yield made


def recipe(folder: Path, model: Path, *, servers: int = 1, preset: str = "grpo", more: str = "") -> Path:
    """Writes a recipe; without ``servers`` the run has the embedded engine."""
    (folder / "reward.py").write_text(ODD)
    endpoints = [f"unix:{folder}/{i}.sock" for i in range(servers)]
    cluster = {"rollout": "vllm", "endpoints": endpoints} if servers else {}
    path = folder / f"servers-{servers}.toml"
    own = recipe_of(model, objective={"preset": preset}, checkpoint={"every": 2}, cluster=cluster)
    path.write_text(own + more)
    return path


@pytest.fixture
def cli(server: Any, tmp_path: Path) -> Any:
    return partial(server.run, cwd=tmp_path, TREW_SERVER_TOKEN="secret")


def rollouts(run: Path, *columns: str) -> list[Any]:
    paths = sorted((run / "rollouts").glob("*.parquet"))
    return [pq.read_table(path, columns=list(columns)).to_pylist() for path in paths]


@pytest.fixture(scope="module")
def whole(model: Path, server: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, Any]]]:
    """The folder of an undisturbed run on one server, and what that was asked."""
    folder = tmp_path_factory.mktemp("whole")
    fake = FakeVllm(model, token="secret")
    with serving(fake, folder / "0.sock"):
        server.run("train", recipe(folder, model), cwd=folder, TREW_SERVER_TOKEN="secret")
    return folder / "runs" / "servers-1", fake.calls


PLACES = ("trew.training.loop:update:4", "trew.weights.files:PublishedFiles.publish:4")


def test_a_run_on_servers_is_the_run_it_would_be_without(whole, model, tmp_path, cli):
    """The same prompts in the same order; the servers have the learner's weights at every step."""
    there, calls = whole
    cli("train", recipe(tmp_path, model, servers=0))
    here = tmp_path / "runs" / "servers-0"
    assert rollouts(there, "uid", "sample", "prompt_ids") == rollouts(here, "uid", "sample", "prompt_ids")
    assert [row["policy_version"] for row in training_rows(there)] == [1, 2, 3, 4]
    assert max(row["canary_gap"] for row in training_rows(there)) < 1e-5
    assert all(row["staleness"] == 0 for row in training_rows(there))
    for row in training_rows(there):
        assert 0 < row["entropy"] < 6, "measured by the learner"
    published = [body["weight_version"] for path, body in calls if path == "POST /finish_weight_update"]
    assert [label.rpartition(".")[2] for label in published] == ["0", "1", "2", "3", "4"]
    # Nothing is generated before the server has proven its weights: not the first evaluation either.
    first = next(body for path, body in calls if "generate" in path)
    assert first["sampling_params"].get("prompt_logprobs") == 0
    assert not list((there / "weights").glob("*")), "versions end with the run"


@pytest.mark.parametrize("place", tiers.some(PLACES, PLACES[1:]))
def test_a_killed_run_resumes_and_trains_every_step_once(whole, fakes, model, tmp_path, server, cli, place):
    """kill -9 in the third step, when checkpoint 2 is there; the servers still have other weights."""
    path, run = recipe(tmp_path, model), tmp_path / "runs" / "servers-1"
    command = server.start("train", path, cwd=tmp_path, hold=place, TREW_SERVER_TOKEN="secret").held()
    wait_for(lambda: (run / "checkpoints" / "000002" / "manifest.json").exists())
    command.kill(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL
    assert "continuing after step 2" in cli("train", path, "--resume")
    assert [row["step"] for row in training_rows(run)] == [1, 2, 3, 4]
    assert max(row["canary_gap"] for row in training_rows(run)) < 1e-5
    undisturbed, _ = whole
    assert rollouts(run, "uid", "sample", "token_ids") == rollouts(undisturbed, "uid", "sample", "token_ids")
    assert_equal_weights(run, undisturbed)


ROUTES = [("nccl", "trew_stream", "offer"), ("ipc", "trew_memory", "memory")]


@pytest.mark.parametrize(("sync", "backend", "key"), tiers.some(ROUTES, ROUTES[:1], name=tuple))
def test_the_route_of_the_weights_changes_nothing(whole, model, tmp_path, cli, sync, backend, key):
    """``cluster.sync``: the run equals the one that publishes files, and leaves nothing behind."""
    there, _ = whole
    fake = FakeVllm(model, token="secret", backend=backend)
    with serving(fake, tmp_path / "0.sock"):
        cli("train", recipe(tmp_path, model), "--set", f"cluster.sync={sync}")
    run = tmp_path / "runs" / "servers-1"
    assert rollouts(run, "uid", "sample", "token_ids") == rollouts(there, "uid", "sample", "token_ids")
    assert_equal_weights(run, there)
    offers = [body["update_info"][key] for path, body in fake.calls if path == "POST /update_weights"]
    assert [offer["version"] for offer in offers] == [0, 1, 2, 3, 4]
    assert not (run / "weights").exists()
    told = [body["init_info"] for path, body in fake.calls if path == "POST /init_weight_transfer_engine"]
    assert not [info["root"] for info in told if Path(info.get("root", "/nowhere")).exists()]


def test_a_server_that_cannot_take_a_stream_is_refused(fakes, model, tmp_path, cli):
    said = cli("train", recipe(tmp_path, model), "--set", "cluster.sync=nccl", code=2)
    assert "has the weight transfer backend 'trew_files', needs 'trew_stream'; start it with" in said


@pytest.mark.parametrize("preset", tiers.some(["entropy-advantage", "remax"], ["remax"]))
def test_objectives_get_what_servers_do_not_say(fakes, model, tmp_path, cli, preset):
    """Entropies from the learner, baselines from greedy answers of the current weights."""
    cli("train", recipe(tmp_path, model, servers=2, preset=preset))
    run = tmp_path / "runs" / "servers-2"
    assert len(training_rows(run)) == 4
    assert all(abs(row["loss"]) < 100 for row in training_rows(run))
    assert all(fake.tokens for fake in fakes), "both servers had work"


def test_adapters_reach_the_servers_as_part_of_the_weights(fakes, model, tmp_path, cli):
    cli("train", recipe(tmp_path, model, more="\n[lora]\nrank = 2\n"))
    found = training_rows(tmp_path / "runs" / "servers-1")
    assert max(row["canary_gap"] for row in found) < 1e-5
    assert max(row["kl"] for row in found) > 1e-3, "the adapters have changed the policy"


def test_a_server_that_dies_costs_no_step_while_another_lives(fakes, model, tmp_path, cli):
    fakes[0].faults.dies_after = 4
    out = cli("train", recipe(tmp_path, model, servers=2))
    assert "the server is not used any more, 1 of 2 are left" in out
    run = tmp_path / "runs" / "servers-2"
    assert [row["step"] for row in training_rows(run)] == [1, 2, 3, 4]
    assert "1 of 2 are left" in (run / "events.log").read_text()


def test_without_servers_a_run_ends_resumable_and_says_why(fakes, model, tmp_path, server, cli):
    """The message names server and cause; nothing of the step is lost or doubled afterwards."""
    path, run = recipe(tmp_path, model), tmp_path / "runs" / "servers-1"
    fakes[0].faults.spoil = lambda answer: answer["choices"].pop()
    command = server.start("train", path, cwd=tmp_path, hold="trew.training.loop:update:3", TREW_SERVER_TOKEN="secret")
    command.held()
    fakes[0].faults.bad_answers = 10**6
    assert command.go().wait() == 1
    assert "2 completions where 3 were asked for" in " ".join(command.text().split())
    fakes[0].faults.bad_answers = 0
    assert "continuing after step 2" in cli("train", path, "--resume")
    assert [row["step"] for row in training_rows(run)] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "torch.bfloat16"}, "computes in bfloat16, the learner in float32"),
        ({"max_model_len": 9}, "has max_model_len = 9"),
        ({"logprobs_mode": "raw_logprobs"}, "has logprobs_mode = 'raw_logprobs', needs 'processed_logprobs'"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_with_both_values(fakes, model, tmp_path, cli, settings, said):
    fakes[0].settings |= settings
    assert said in " ".join(cli("train", recipe(tmp_path, model), code=2).split())
    assert not any("generate" in path for path, _ in fakes[0].calls)
