"""Episodes on stand-ins for vLLM: in step, and while the learner computes."""

from __future__ import annotations

import string
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import tiers
import tiny
from fake_vllm import FakeVllm, Refusal, serving
from recipe_help import recipe, training_rows

TALK = """
from trew.env import Say

def talk(row, seed):
    reply = yield str(seed % 100)
    for turn in range(2):
        reply = yield Say(({"role": "user", "content": str(len(reply.text))},), reward=len(reply.text) / 8)
    return 1.0

def long(row, seed):
    yield "x" * (1 if row["episode"] < 8 else 300)
    return 1.0
"""
STEPS, PROMPTS, COMPLETIONS = 4, 3, 3


class Small(FakeVllm):
    """Refuses prompts that it has no room for, as vLLM does."""

    def generate(self, body: Any) -> Any:
        if len(body["token_ids"]) >= (most := self.settings["max_model_len"]):
            raise Refusal(400, f"This model's maximum context length is {most} tokens.", "BadRequestError")
        return super().generate(body)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model"), "smollm")


@pytest.fixture
def cli(server: Any, tmp_path: Path) -> Any:
    return partial(server.run, cwd=tmp_path, TREW_SERVER_TOKEN="secret")


def written(folder: Path, model: Path, **cluster: Any) -> Path:
    (folder / "talk.py").write_text(TALK)
    (folder / "reward.py").write_text("def odd(completions, **columns): return [0.0 for _ in completions]\n")
    path = folder / "run.toml"
    path.write_text(
        recipe(
            model, steps=STEPS, objective={"preset": "grpo", "correction": "tis", "beta": 0.0}, eval={"size": 2},
            environment={"name": "talk.py:talk", "turns": 3, "observation_tokens": 64},
            data={"task": "prompts", "args": {}}, rewards=[],
            rollout={"prompts": PROMPTS, "completions": COMPLETIONS, "max_tokens": 8, "stop": [*string.ascii_letters]},
            cluster={"rollout": "vllm", "endpoints": [f"unix:{folder}/0.sock"], **cluster},
        )
    )  # fmt: skip
    return path


@pytest.mark.parametrize("staleness", tiers.some([0, 1], ["1"]))
def test_a_run_plays_its_episodes_on_servers(staleness, model, tmp_path, cli):
    fake = FakeVllm(model, token="secret")
    with serving(fake, tmp_path / "0.sock"):
        cli("train", written(tmp_path, model, staleness=staleness))
    run = tmp_path / "runs" / "run"
    rows = training_rows(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert max(row["turns"] for row in rows) > 1
    gaps = [row["canary_gap"] for row in rows if row["canary_gap"] is not None]  # None: no token is of these weights
    assert max(gaps) < 1e-3
    for path in sorted((run / "rollouts").glob("*.parquet")):
        found = pq.read_table(path).to_pylist()
        assert len(found) >= PROMPTS * COMPLETIONS
        for row in found:
            sampled = np.array(row["sampled"])
            assert sampled.sum() == sum(turn["sampled"] for turn in row["turns"])
            assert not np.array(row["sampling_logprobs"])[~sampled].any()
            assert row["ending"] in ("done", "length", "turns")
        assert any(len(row["turns"]) > 1 for row in found)
        assert all(row["policy_version"] >= int(path.stem) - 1 - staleness for row in found)


@pytest.mark.parametrize("staleness", tiers.some([0, 1], ["1"]))
def test_an_episode_that_servers_have_no_room_for_costs_itself_alone(staleness, model, tmp_path, cli):
    """A server refuses what is longer than its max_model_len, each time that it is asked: the run was lost. Only the
    first openings are measured beforehand."""
    fake = Small(model, token="secret")
    fake.settings["max_model_len"] = 300
    path = written(tmp_path, model, staleness=staleness)
    table = path.read_text().replace("talk.py:talk", "talk.py:long").replace("turns = 3", "turns = 1\nepisodes = 16")
    path.write_text(table)
    with serving(fake, tmp_path / "0.sock"):
        said = cli("train", path)
    rows = training_rows(tmp_path / "runs" / "run")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert any(0 < row.get("environment/failed", 0) < 1 for row in rows)
    assert "of an episode" in " ".join(said.split())
