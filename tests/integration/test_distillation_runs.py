"""Runs that learn from a teacher: the student approaches it, its log-probs are recorded, and what does not fit is
refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import tiers
import tiny
import trew
from learner_help import plain_logprobs
from ranks_help import free_port, variables
from recipe_help import ODD, merged, recipe
from trew.config import Config, parse
from trew.errors import ConfigError
from trew.training import loop, planning
from trew.types import TrainingSample
from trew.utils.console import Silent

OPD = {"objective": {"preset": "opd"}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``lm`` and its equal ``same``; ``other``, another architecture with the same tokens; ``shuffled``, whose tokens
    have other ids; ``short``, with 16 positions."""
    place = tmp_path_factory.mktemp("models")
    for name, kind, seed, more in (
        ("lm", "llama", 0, {}), ("same", "llama", 0, {}), ("other", "qwen3", 3, {}), ("shuffled", "llama", 1, {}),
        ("short", "llama", 2, {"max_position_embeddings": 16}),
    ):  # fmt: skip
        tiny.model(kind, seed=seed, initializer_range=0.1, **more).save_pretrained(place / name)
        tiny.tokenizer(chat=False).save_pretrained(place / name)
    file = place / "shuffled" / "tokenizer.json"
    table = json.loads(file.read_text())
    vocab = table["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(table))
    (place / "reward.py").write_text(ODD)
    return place


def configured(models: Path, out: Path, named: str, **sections: Any) -> Config:
    """A run whose teacher is the model ``named``; none if that is empty."""
    table = {"chat_template": "plain", "out": str(out), "teacher": {"model": str(models / named)} if named else {}}
    text = recipe(models / "lm", reward=f"{models}/reward.py:odd", **merged(OPD | table, sections))
    return parse(tomllib.loads(text))


def train(config: Config, **how: Any) -> list[dict[str, Any]]:
    """Rows of the steps of a run."""
    trew.train(config, display=Silent(), **how)
    lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def weights(config: Config) -> dict[str, torch.Tensor]:
    return load_file(Path(config.out) / "final" / "model.safetensors")


def test_the_student_approaches_its_teacher(models, tmp_path):
    config = configured(
        models, tmp_path / "run", "other", steps=25, learner={"lr": 1e-2}, eval={"size": 2},
        rollout={"prompts": 8, "completions": 8, "max_tokens": 8}, checkpoint={"every": 0},
    )  # fmt: skip
    found = [row["kl_teacher"] for row in train(config)]
    assert np.mean(found[-5:]) < 0.5 * np.mean(found[:3]), found


def test_a_teacher_that_is_the_student_leaves_it_as_it_is(models, tmp_path):
    """To the bit: a rounding error for an advantage would be all that Adam sees, and a step of full length."""
    config = configured(models, tmp_path / "run", "same", steps=2, learner={"minibatch_prompts": 2})
    for row in train(config):
        assert row["skipped_steps"] == 1
        assert row["silent_share"] == 1
        assert row["policy_version"] == 0
    start = load_file(models / "lm" / "model.safetensors")
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights(config).items() if name in start)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="all", marks=pytest.mark.nightly),
        pytest.param({"lora": {"rank": 2}, "rollout": {"temperature": 0.7}}, id="adapters"),
    ],
)
def test_the_teachers_log_probs_are_those_of_the_tokens(models, tmp_path, more):
    """In the tables, by the teacher's own forward pass in float64; and the advantage is the difference."""
    objective = {"preset": "grpo", "beta": 0.0, "distill": 0.25}
    config = configured(models, tmp_path / "run", "other", steps=1, objective=objective, **more)
    train(config)
    teacher = tiny.model("qwen3", seed=3, initializer_range=0.1).double()
    temperature = config.rollout.temperature
    table = pq.read_table(Path(config.out) / "rollouts" / "000001.parquet").to_pylist()
    assert len(table) == 12
    scores = {row["group"]: [r["score"] for r in table if r["group"] == row["group"]] for row in table}
    for row in table:
        sample = TrainingSample(np.array(row["prompt_ids"]), np.array(row["token_ids"]), 0, np.array(row["sampled"]))
        want = plain_logprobs(teacher, sample, temperature=temperature).detach().numpy()
        np.testing.assert_allclose(row["teacher_logprobs"], want, atol=2e-5)
        own, group = np.array(row["sampling_logprobs"]), np.array(scores[row["group"]])
        z = (row["score"] - group.mean()) / group.std(ddof=1) if group.std() else 0.0
        np.testing.assert_allclose(row["advantages"], z + 0.25 * (want - own), atol=1e-3)


def test_no_reward_is_needed(models, tmp_path):
    (tmp_path / "silent.py").write_text("def silent(completions, **_):\n    return [None] * len(completions)\n")
    config = configured(models, tmp_path / "run", "other", rewards=[{"name": f"{tmp_path}/silent.py:silent"}])
    found = train(config)
    assert found[-1]["policy_version"] == 4
    assert all(row["silent_share"] == 0 for row in found)


class Killed(Exception):
    pass


@pytest.mark.nightly  # as in test_every_objective_trains.py, with a teacher
def test_a_killed_run_continues_to_the_bit(models, tmp_path, monkeypatch):
    settings = {"checkpoint": {"every": 1}, "learner": {"inner_updates": 2}, "teacher": {"dtype": "bfloat16"}}
    whole = configured(models, tmp_path / "whole", "other", **settings)
    train(whole)
    cut, real, calls = configured(models, tmp_path / "cut", "other", **settings), loop.update, [0]

    def dies(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(loop, "update", dies)
    with pytest.raises(Killed):
        train(cut)
    monkeypatch.undo()
    train(cut, resume=True)
    assert all(torch.equal(tensor, weights(cut)[name]) for name, tensor in weights(whole).items())


@pytest.mark.parametrize("shard", tiers.some(["none", "fsdp"], ["none"]))
def test_two_ranks_are_one_process(server, models, tmp_path, shard):
    """Sharded or whole, the teacher's log-probs are the same numbers on every rank."""
    sections = {"kernels": "plain", "linear": "plain", "steps": 2, "learner": {"microbatch_tokens": 64}}
    alone = configured(models, tmp_path / "alone", "other", **sections)
    rows = train(alone)
    text = recipe(
        models / "lm", reward=f"{models}/reward.py:odd", chat_template="plain", **OPD, out=str(tmp_path / "pair"),
        teacher={"model": str(models / "other")}, cluster={"shard": shard, "learner": 2}, **sections,
    )  # fmt: skip
    (tmp_path / "r.toml").write_text(text)
    port = free_port()
    ranks = [server.start("train", "r.toml", cwd=tmp_path, **variables(rank, 2, port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
    lines = map(json.loads, (tmp_path / "pair" / "metrics.jsonl").read_text().splitlines())
    pair = [row for row in lines if "loss" in row]
    for one, other in zip(rows, pair, strict=True):
        for key in ("kl_teacher", "loss", "grad_norm", "reward"):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-5), key


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {}, r"teacher.model: is empty, but opd with objective.distill = 1 learns from a teacher"),
    ("other", {"objective": {"preset": "grpo"}}, r"teacher.model: got '.*other', but grpo does not learn from a teach"),
    ("shuffled", {}, r"teacher.model: .*shuffled has another vocabulary than the policy: 2 of 260 tokens differ \('a'"),
    ("short", {}, r"teacher.model: .*short has 16 positions, and prompts with their completions take up to"),
    ("none", {}, r"teacher.model: no such folder: .*none"),
    ("", {"teacher": {"dtype": "bfloat16"}}, r"teacher.dtype: got 'bfloat16' without teacher.model"),
]  # fmt: skip


@pytest.mark.parametrize(("teacher", "sections", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_refused_before_anything_is_loaded(models, tmp_path, teacher, sections, message):
    with pytest.raises(ConfigError, match=message):
        planning.plan(configured(models, tmp_path / "run", teacher, **sections))


@pytest.mark.parametrize(
    ("critic", "message"),
    [
        ("shuffled", r"critic.model: .*shuffled has another vocabulary than the policy: 2 of 260 tokens differ \('a'"),
        ("short", r"critic.model: .*short has 16 positions, and prompts with their completions take up to"),
        ("none", r"critic.model: no such folder: .*none"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused_as_a_teacher_is(models, tmp_path, critic, message):
    sections = {"objective": {"preset": "ppo"}, "critic": {"model": str(models / critic)}}
    with pytest.raises(ConfigError, match=message):
        planning.plan(configured(models, tmp_path / "run", "", **sections))
