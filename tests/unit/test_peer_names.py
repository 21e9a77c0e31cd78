"""What settings of TRL and verl are called here: the names that messages give exist, and are no keys of recipes."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing

import pytest

from trew.config import Config, DataConfig
from trew.config.recipe import parse
from trew.errors import ConfigError
from trew.objective.options import Options
from trew.objective.presets import PRESETS, preset
from trew.utils import peer_names

HINTS = typing.get_type_hints(Config)
KINDS = {name: kind for name, kind in HINTS.items() if dataclasses.is_dataclass(kind)} | {"data": DataConfig}
SECTIONS = {name: {f.name for f in dataclasses.fields(kind)} for name, kind in KINDS.items()}
SECTIONS["objective"] |= {name for make in PRESETS.values() for name in inspect.signature(make).parameters}
SECTIONS["objective"] |= {f.name for f in dataclasses.fields(Options)}


@pytest.mark.parametrize(("theirs", "ours"), peer_names.NAMES.items())
def test_the_setting_that_takes_its_place_exists_and_has_another_name(theirs, ours):
    keys = re.findall(r"\b([a-z]+)\.([a-z_]+)\b", ours)
    assert all(name in SECTIONS[section] for section, name in keys), ours
    assert keys or ours.split(",")[0] in {*HINTS, "[lora]", "[[rewards]]", "the weight of each of [[rewards]]"}
    # Where the name is a setting of ours too, the message is never read.
    assert not any(theirs in names for names in [*SECTIONS.values(), HINTS])


def test_presets_of_another_name_exist():
    assert set(peer_names.PRESETS.values()) <= set(PRESETS)
    assert not set(peer_names.PRESETS) & set(PRESETS)


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"rollout": {"num_generations": 8}}, r"rollout.num_generations: unknown key \(in trew: rollout.completions\)"),
        ({"learning_rate": 1e-5}, r"learning_rate: unknown key \(in trew: learner.lr\)"),
        ({"learner": {"warmup_ratio": 0.1}}, r"\(in trew: learner.warmup_steps, in optimizer steps\)"),
        ({"lora": {"r": 8, "lora_alpha": 16}}, r"\(in trew: lora.alpha\)"),
        ({"rollout": {"temprature": 1}}, r"did you mean 'temperature'"),
    ],
)
def test_a_recipe_with_a_key_of_theirs_is_told_ours(table, says):
    with pytest.raises(ConfigError, match=says):
        parse({"model": "m", **table})


def test_an_objective_with_a_setting_or_a_name_of_theirs_is_told_ours():
    with pytest.raises(ConfigError, match=r'no such setting \(in trew: objective.preset: "dr-grpo" for none'):
        preset("dapo", scale_rewards="none")
    with pytest.raises(ConfigError, match=r"got 'bnpo' \(in trew: token-mean-local\)"):
        preset("bnpo")
    with pytest.raises(ConfigError, match=r"did you mean 'dr-grpo'"):
        preset("dr_grpo")
