"""Every number of a recipe, far too large or none at all: one clear message within seconds, or a run."""

from __future__ import annotations

import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any

import pytest

import tiny
from bad_files import FILES
from settings_help import keys
from tiers import some
from trew.config import Config, RewardConfig, apply_overrides, parse
from trew.errors import ConfigError, TrewError
from trew.iterate.settings import Iterate, load_recipe
from trew.reward_training.settings import RewardTraining, load_settings
from trew.training import planning
from trew.training.start import train
from trew.utils.console import Display

WHOLE = (10**9, -(10**9), 2**63, 10**400)
NUMBERS = (1e308, math.inf, -math.inf, math.nan, -1e308, 10**400)


def numbers(cls: type, where: str = "") -> list[tuple[str, Any]]:
    """Every key of a number with a value that is far off."""
    found = []
    for key in keys(cls):
        if key in ("data.name", "data.weight") and cls is Config:
            continue  # of several data sets: tests/unit/test_data_sets.py
        owner: Any = cls
        *parents, last = key.split(".")
        for part in parents:
            owner = typing.get_type_hints(owner)[part]
            owner = typing.get_args(owner)[0] if isinstance(owner, types.UnionType) else owner  # one table of several
        kind = typing.get_type_hints(owner)[last]
        values = WHOLE if kind is int else NUMBERS if kind is float else ()
        found += [(f"{where}{key}", value) for value in values]
    return found


def ids(cases: list[tuple[str, Any]]) -> list[str]:
    return [f"{key}={value if value != 10**400 else '10**400'}" for key, value in cases]


def recipe(*settings: tuple[str, Any]) -> dict[str, Any]:
    table = tomllib.loads(FILES["r.toml"].decode())
    # inf, nan and whole numbers are TOML as Python writes them
    apply_overrides(table, [f"{key}={value!r}" for key, value in settings])
    return table


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    for name in ("r.toml", "reward.py"):
        (folder / name).write_bytes(FILES[name])
    tiny.save(folder / "model")
    return folder


@pytest.fixture(autouse=True)
def there(place, monkeypatch) -> None:
    monkeypatch.chdir(place)


def refused(*settings: tuple[str, Any]) -> str:
    """The message about a recipe with these settings; empty where a run could start."""
    try:
        planning.plan(parse(recipe(*settings)))
    except ConfigError as error:
        return str(error)
    return ""


CASES = numbers(Config)
REWARDS = numbers(RewardConfig)


@pytest.mark.parametrize(("key", "value"), CASES, ids=ids(CASES))
def test_a_number_of_a_recipe_is_named_or_taken(key, value):
    said = refused((key, value))
    taken = value == 10**9 and not said
    assert taken or said.startswith((f"{key}: got", "data.args: the ranges give too few")), said


@pytest.mark.parametrize(("key", "value"), REWARDS, ids=ids(REWARDS))
def test_a_number_of_a_reward_is_named(key, value):
    with pytest.raises(ConfigError, match=rf"^rewards\[0\]\.{key}: got"):
        parse({**recipe(), "rewards": [{"name": "reward.py:f", key: value}]})


@pytest.mark.parametrize("value", [1e308, 10**400, 2**40], ids=["1e308", "10**400", "2**40"])
@pytest.mark.parametrize("key", ["largest", "size", "smallest"])
def test_a_number_of_a_task_is_named(key, value):
    with pytest.raises(ConfigError, match=rf"data\.args\.{key}: "):
        planning.plan(parse(recipe((f"data.args.{key}", value))))


TRAINING = numbers(RewardTraining)


@pytest.mark.parametrize(("key", "value"), TRAINING, ids=ids(TRAINING))
def test_a_number_of_a_reward_models_training_is_named_or_taken(key, value):
    from trew.reward_training.settings import problems

    try:
        found = problems(load_settings(None, [f"{key}={value!r}"], flags={"model": "model", "data.pairs": "p.jsonl"}))
    except ConfigError as error:
        found = list(error.problems)
    assert any(problem.startswith(f"{key}: got") for problem in found) or (value == 10**9 and not found), found


ROUNDS = numbers(Iterate, "iterate.")


@pytest.mark.parametrize(("key", "value"), ROUNDS, ids=ids(ROUNDS))
def test_a_number_of_rounds_is_named_or_taken(key, value, place):
    try:
        load_recipe(place / "r.toml", [f"{key}={value!r}"])
        said = ""
    except ConfigError as error:
        said = str(error)
    names = (key, key.replace("iterate.verifier", "rewards[0]"))  # it is read along with the other rewards
    assert any(f"{name}: got" in said for name in names) or (value == 10**9 and not said), said


def test_every_large_number_that_is_taken_runs(tmp_path):
    taken = [(key, value) for key, value in CASES if value == 10**9 and not refused((key, value))]
    assert len(taken) > 10
    summary = train(parse(recipe(*taken, ("out", str(tmp_path / "run")))), display=Display())
    assert summary["steps"] == 1


SMALLEST = [key for key, value in CASES if value == 1e308]


@pytest.mark.parametrize("key", some(SMALLEST, ["learner.adam_eps", "lora.alpha"]))
def test_the_smallest_number_is_named_or_runs(key, tmp_path):
    more = [("lora.rank", 2)] if key.startswith("lora") else []
    said = ""
    try:
        train(parse(recipe((key, 1e-308), *more, ("out", str(tmp_path / "run")))), display=Display())
    except TrewError as error:
        said = str(error)
    assert not said or said.startswith(f"{key}: got")


def test_a_seed_that_is_named_as_accepted_is():
    most = refused(("seed", -1)).rpartition(" to ")[2].replace(",", "")
    assert refused(("seed", int(most))) == ""
    assert refused(("seed", int(most) + 1)).endswith("accepts at most 2,147,483,647")
    from trew.reward_training.settings import problems

    found = problems(load_settings(None, ["model='m'", "seed=-1"]))
    assert "seed: got -1, accepts a whole number from 0 to 2,147,483,647" in found


def test_prompts_and_completions_have_a_product():
    said = refused(("rollout.prompts", 10_000), ("rollout.completions", 10_000))
    assert said.startswith(
        "rollout.prompts: got 10000 with rollout.completions = 10000, 100,000,000 completions per step"
    )


def test_weight_decay_that_turns_weights_around_is_refused():
    said = refused(("learner.lr", 0.1), ("learner.weight_decay", 11.0))
    assert "learner.weight_decay: got 11.0 with learner.lr = 0.1, accepts at most 1 / learner.lr = 10" in said
