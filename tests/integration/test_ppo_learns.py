"""A run with a critic, on a tiny model: the critic's loss falls, and the policy learns from what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
import trew
from ranks_help import free_port, variables
from scorer_help import save_scorer
from trew.config import parse
from trew.errors import ConfigError, ModelError
from trew.learner.value_runner import with_score_as_value
from trew.models import loading
from trew.training import planning
from trew.utils.console import Silent
from trew.utils.toml import dump_table

REWARD = """
def odd(completion_ids, **_):
    return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]
"""


def test_the_critic_s_loss_falls_and_the_reward_rises(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    table = {
        "model": str(tiny.save(tmp_path / "model")), "steps": 24, "out": str(tmp_path / "run"),
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
        "rewards": [{"name": f"{tmp_path}/reward.py:odd"}],
        "rollout": {"prompts": 8, "completions": 2, "max_tokens": 6},
        "objective": {"preset": "ppo"}, "learner": {"lr": 3e-3}, "critic": {"lr": 3e-3, "warmup_steps": 4},
        "eval": {"size": 2}, "checkpoint": {"every": 0},
    }  # fmt: skip
    trew.train(parse(table), display=Silent())
    rows = [json.loads(line) for line in (Path(table["out"]) / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "value_loss" in row]
    assert [row["policy_version"] for row in rows[:5]] == [0, 0, 0, 0, 1]  # the critic learns alone at first

    def mean(name: str, part: slice) -> float:
        values = [row[name] for row in rows[part]]
        return sum(values) / len(values)

    first, last = slice(0, 4), slice(-4, None)
    assert rows[0]["value"] == 0.0
    assert mean("value_loss", last) < 0.5 * rows[0]["value_loss"]
    assert abs(mean("value", last) - mean("return", last)) < 0.2
    assert mean("reward", last) > mean("reward", first) + 0.1
    assert not (Path(table["out"]) / "final" / "critic.safetensors").exists()


def from_scorer(place: Path, scorer: Path, **critic: float) -> dict:
    (place / "reward.py").write_text(REWARD)
    return {
        "model": str(tiny.save(place / "model")), "steps": 2, "out": str(place / "run"),
        "data": {"task": "arithmetic", "args": {"ops": ["+"], "smallest": 1, "largest": 4}},
        "rewards": [{"name": f"{place}/reward.py:odd"}],
        "rollout": {"prompts": 4, "completions": 2, "max_tokens": 6}, "objective": {"preset": "ppo"},
        "critic": {"model": str(scorer), "lr": 1e-3, **critic}, "eval": {"size": 2}, "checkpoint": {"every": 1},
    }  # fmt: skip


def test_a_critic_begins_with_the_scores_of_a_reward_model(tmp_path):
    scorer = save_scorer(tmp_path / "scorer")
    plan = planning.plan(parse(from_scorer(tmp_path, scorer)))
    critic, model = planning.load_critic(plan), loading.load_scorer(str(scorer))
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # The score of a sequence is read at its last token, which is the state after it.
        scores = [model(input_ids=ids[:, :end]).logits.item() for end in range(1, 13)]
        hidden = critic.base_model(input_ids=ids).last_hidden_state[0]
        values = hidden @ critic.get_output_embeddings().weight[0]
    assert values.std() > 1e-3
    torch.testing.assert_close(values, torch.tensor(scores), rtol=1e-4, atol=1e-6)
    assert all(p.device.type == "cpu" for p in critic.parameters())


@pytest.mark.nightly
def test_a_run_with_such_a_critic_continues_to_the_bit(tmp_path):
    scorer = save_scorer(tmp_path / "scorer")
    table = from_scorer(tmp_path, scorer)
    trew.train(parse({**table, "steps": 1}), display=Silent())
    trew.train(parse(table), resume=True, display=Silent())
    trew.train(parse({**table, "out": str(tmp_path / "whole")}), display=Silent())

    def rows(name: str) -> list[dict]:
        lines = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        return [
            {k: row[k] for k in ("value", "value_loss", "critic_grad_norm", "loss")} for row in lines if "loss" in row
        ]

    assert rows("run") == rows("whole")
    assert rows("run")[0]["value"] != 0.0
    assert rows("run")[1]["value"] != rows("run")[0]["value"]


def test_what_is_no_critic_is_refused(tmp_path):
    table = from_scorer(tmp_path, save_scorer(tmp_path / "scorer"), head_std=0.1)
    with pytest.raises(ConfigError, match=r"critic.head_std: got 0.1, but .*scorer is a reward model"):
        planning.plan(parse(table))
    table = from_scorer(tmp_path, save_scorer(tmp_path / "two", labels=2))
    with pytest.raises(ConfigError, match=r"critic.model: .* with 2 labels, which is not a score"):
        planning.plan(parse(table))
    table = from_scorer(tmp_path, save_scorer(tmp_path / "tokens", head="token"))
    with pytest.raises(
        ConfigError, match=r"critic.model: .* scores tokens .*; accepts a causal language model or a rew"
    ):
        planning.plan(parse(table))
    biased = loading.load_scorer(str(tmp_path / "scorer"))
    biased.score = torch.nn.Linear(32, 1)
    with pytest.raises(ModelError, match="its score is not one product with the hidden state"):
        with_score_as_value(biased)


@pytest.mark.nightly
def test_two_ranks_train_a_critic_as_one_does(tmp_path, server):
    table = from_scorer(tmp_path, save_scorer(tmp_path / "scorer")) | {"learner": {"minibatch_prompts": 2}}
    trew.train(parse(table), display=Silent())
    pair = table | {"out": str(tmp_path / "pair"), "cluster": {"learner": 2, "shard": "none"}}
    (tmp_path / "r.toml").write_text(dump_table(pair))
    port = free_port()
    ranks = [server.start("train", "r.toml", cwd=tmp_path, **variables(rank, 2, port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], "\n".join(rank.text() for rank in ranks)
    rows = [
        [row for row in map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
        for name in ("run", "pair")
    ]
    assert len(rows[0]) == len(rows[1]) == 2
    for one, other in zip(*rows, strict=True):
        for key in ("value", "return", "value_loss", "critic_grad_norm", "loss", "grad_norm", "reward"):
            assert other[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key
