"""Which settings let a replay learn something else than the run that it replays."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trew.cli.train import _replayed
from trew.config import Config, CriticConfig, LoraConfig, RewardConfig, TeacherConfig, to_table
from trew.rewards import RewardSet
from trew.rollout.source import StepRollouts
from trew.training.replaying import Replay, _departures, _settings, reward_problems
from trew.types import Group, Prompt, Score, ScoredGroup
from trew.utils.secrets import MASK

ROUNDING = {"teacher.dtype", "teacher.wait_s"}
KEYS = [
    f"{section}.{field.name}"
    for section, of in (("critic", CriticConfig), ("teacher", TeacherConfig), ("lora", LoraConfig))
    for field in dataclasses.fields(of)
]


def departures(key: str, *, config: Config | None = None) -> tuple[str, ...]:
    config = config or Config(model="m")
    table = _settings(to_table(config))
    return _departures(table, {**table, key: "another"}, config, None)


@pytest.mark.parametrize("key", [*KEYS, "objective.preset", "learner.lr", "environment.turns", "eval.correct_at"])
def test_every_setting_of_what_is_learned_departs(key):
    assert departures(key) == (() if key in ROUNDING else (key,))


@pytest.mark.parametrize(
    "key", ["environment.workers", "checkpoint.every", "track.to", "eval.size", "out", "seed", "steps"]
)
def test_what_changes_no_weight_does_not(key):
    assert departures(key) == ()


@pytest.mark.parametrize("drawn", [{"critic": CriticConfig(head_std=0.1)}, {"lora": LoraConfig(rank=2)}])
def test_the_seed_departs_where_it_draws_weights(drawn: dict[str, Any]):
    assert departures("seed", config=Config(model="m", **drawn)) == ("seed",)


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({}, {}, ""),
        ({"weight": 2}, {"weight": 2.0}, ""),
        ({}, {"weight": 2.0}, "gsm8k: got weight = 2.0, but the scores in run were given with 1.0"),
        ({"gate": True}, {}, "gsm8k: got gate = False"),
        ({"args": {"mode": "strict"}}, {"args": {"mode": "flexible"}}, "gsm8k: got args = {'mode': 'flexible'}"),
        ({"args": {"mode": MASK}}, {"args": {"mode": "flexible"}}, ""),  # a secret: it may be the same
    ],
)
def test_a_replay_refuses_settings_of_rewards_that_its_scores_do_not_have(then, now, said):
    """They were ignored: the run's config.toml said one weight, and the scores had another."""
    prompt = Prompt("a", text="?")
    scores = (Score(1.0, parts={"gsm8k": 1.0, "format": 1.0}),)
    first = StepRollouts((), (ScoredGroup(Group(prompt, (None,)), scores),))
    replay = Replay(SimpleNamespace(folder="run"), None, first, (), ({"name": "gsm8k", **then}, {"name": "format"}))
    rewards = RewardSet.from_config([RewardConfig(name="gsm8k", **now), RewardConfig(name="format")])
    found = reward_problems(replay, rewards)
    assert [said in line for line in found] == [True] * bool(said)
    alone = reward_problems(replay, rewards, one_by_one=True)
    assert alone == (found if "args" in said else [])


@pytest.mark.parametrize(("given", "found"), [("run", "run-replay"), (".", "run-replay"), ("..", "run-replay")])
def test_a_replay_is_written_beside_the_run_however_that_is_named(tmp_path, monkeypatch, given, found):
    run = tmp_path / "run"
    (run / "inner").mkdir(parents=True)
    monkeypatch.chdir({"run": tmp_path, ".": run, "..": run / "inner"}[given])
    recipe, out = _replayed(Path(given), None, None, resume=False)
    assert recipe.resolve() == run / "config.toml"
    assert out is not None
    assert out.resolve() == tmp_path / found
