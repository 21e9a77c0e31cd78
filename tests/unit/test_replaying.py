"""Which settings let a replay learn something else than the run that it replays."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trew.config import Config, CriticConfig, LoraConfig, TeacherConfig, to_table
from trew.training.replaying import _departures, _settings

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
