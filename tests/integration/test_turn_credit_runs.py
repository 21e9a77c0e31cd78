"""Rewards of turns go through a whole run into the gradient: environment, score, table, advantage, and resume."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

import tiers
import trew
from run_help import configured, rows, save_models
from trew.config import Config
from trew.errors import ConfigError
from trew.rollout import Renderer
from trew.utils.console import Silent

ROOMS = '''
from trew.env import Say

def rooms(row, seed, *, turns=3):
    """Each reply opens one of two doors, by its last character; what it earns depends on door and turn."""
    room = "hall"
    for turn in range(turns):
        reply = yield Say(({"role": "user", "content": f"{room} {turn}"},), reward=earned if turn else None, state=room)
        number = ord(reply.text[-1]) if reply.text else 0
        room, earned = f"room {number % 2}", (number % 5) / 4
        if number % 11 == 0:
            break
    return earned
'''
STOPS = list(string.ascii_lowercase)  # so that a random model's replies end before their limit, at different lengths


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_models(tmp_path_factory.mktemp("models"))["native"]


def run(folder: Path, model: Path, preset: str, **sections: Any) -> Config:
    (folder / "rooms.py").write_text(ROOMS)
    objective = {"preset": preset, "beta": 0.0}
    config = configured(
        folder, model, steps=2, rewards=[], objective=objective,
        **({"environment": {"name": f"{folder}/rooms.py:rooms", "turns": 3},
            "rollout": {"prompts": 2, "completions": 4, "max_tokens": 24, "stop": STOPS}} | sections),
    )  # fmt: skip
    trew.train(config, display=Silent())
    return config


def turns_of(row: dict[str, Any]) -> list[tuple[slice, float, str]]:
    """Where each turn's reply is, what it earned, and its state."""
    found, at = [], -len(row["prompt_ids"])
    steps = dict(zip(row["step_ends"] or (), row["step_scores"] or (), strict=True))
    for turn in row["turns"]:
        start = at + turn["context"]
        at = start + turn["sampled"]
        found.append((slice(start, at), steps.get(at, 0.0), turn["state"]))
    return found


@pytest.mark.parametrize("preset", tiers.some(["gigpo", "mt-grpo", "turn-returns", "grpo-process", "grpo"], ("gigpo",)))
def test_rewards_of_turns_reach_the_advantages_of_their_tokens(preset, model, tmp_path):
    config = run(tmp_path, model, preset)
    several, nonzero = 0, 0
    for step in (1, 2):
        table = pq.read_table(Path(config.out) / "rollouts" / f"{step:06d}.parquet").to_pylist()
        assert len(table) == 8
        judged = [row for row in table if row["score"] is not None]
        for row in judged:
            turns = turns_of(row)
            several += len(turns) > 1
            assert sum(earned for _, earned, _ in turns) == pytest.approx(row["score"])
            assert turns[0][2] == "hall"
            for where, _, _ in turns:
                own = set(row["advantages"][where])
                assert len(own) <= 1, "a turn has one advantage"
                nonzero += any(own)
            outside = np.array(row["advantages"])[~np.array(row["sampled"])]
            assert not outside.any()
        _check_the_episodes_part(preset, judged)
    assert several >= 4
    assert nonzero
    last = rows(config)[2]
    assert ("shared_state_share" in last) == (preset in ("gigpo", "mt-grpo", "turn-returns"))
    assert 0 < last.get("shared_state_share", 1.0) <= 1


def _check_the_episodes_part(preset: str, judged: list[dict[str, Any]]) -> None:
    """The last turn of an episode has the z-score of what it earned (MT-GRPO), or all have the episode's (GRPO)."""
    for group in {row["group"] for row in judged}:
        mine = [row for row in judged if row["group"] == group]
        number = {"mt-grpo": lambda row: turns_of(row)[-1][1], "grpo": lambda row: row["score"]}.get(preset)
        if number is None:
            continue
        values = np.array([number(row) for row in mine])
        spread = values.std(ddof=1) if len(values) > 1 else 0.0
        wanted = (values - values.mean()) / spread if spread > 1e-9 else np.zeros(len(values))
        for row, z in zip(mine, wanted, strict=True):
            where = turns_of(row)[-1][0]
            assert row["advantages"][where] == pytest.approx([z] * (where.stop - where.start), abs=1e-5)


@pytest.mark.nightly  # as in test_replay.py, with credit for turns
def test_a_replay_gives_the_same_credit(model, tmp_path, monkeypatch):
    first = run(tmp_path, model, "gigpo")
    how = {"prompts": 2, "completions": 4, "max_tokens": 24, "stop": STOPS, "replay": first.out}
    second = run(tmp_path, model, "gigpo", out=str(tmp_path / "again"), rollout=how)
    for step in (1, 2):
        one, other = (pq.read_table(Path(c.out) / "rollouts" / f"{step:06d}.parquet").to_pylist()
                      for c in (first, second))  # fmt: skip
        assert [row["advantages"] for row in one] == [row["advantages"] for row in other]
        assert [row["turns"] for row in one] == [row["turns"] for row in other]
    monkeypatch.setattr(Renderer, "decode", lambda self, ids: "other")
    with pytest.raises(ConfigError, match="than this tokenizer makes of their tokens"):
        run(tmp_path, model, "gigpo", out=str(tmp_path / "other"), rollout=how)


def test_without_an_environment_there_are_no_turns_to_credit(model, tmp_path):
    with pytest.raises(ConfigError, match=r"objective\.preset: got 'gigpo', which gives credit to the turns"):
        trew.train(configured(tmp_path, model, objective={"preset": "gigpo"}), display=Silent())
