"""Settings of runs that an earlier version of trew has left, which lack what came later."""

from __future__ import annotations

import tomllib

import pytest

from trew.config import Config, RewardConfig, SetConfig, dumps
from trew.config.stored import completed
from trew.runs import changes
from trew.utils.toml import flatten

CONFIGS = {
    "one set": Config(model="m"),
    "rewards": Config(model="m", rewards=(RewardConfig(name="gsm8k"), RewardConfig(name="math", weight=0.5))),
    "sets": Config(model="m", data=(SetConfig(name="a", task="gsm8k"), SetConfig(name="b", task="math"))),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_complete_stays_and_what_lacks_is_at_its_default(name):
    whole = flatten(tomllib.loads(dumps(CONFIGS[name])))
    # "rewards" and "data" may be lists of tables or none: nothing of the other form may be added.
    assert completed(whole) == whole
    for key in whole.keys() - {"model", "out", "steps", "objective.preset"}:
        if key.endswith((".name", ".task")) or (key.startswith("rewards") and whole[key] == 0.5):
            continue
        fewer = {k: v for k, v in whole.items() if k != key}
        found = completed(fewer)
        assert found.get(key, whole[key]) == whole[key], key
        if key not in ("rewards",):
            assert key in found or whole[key] in ({}, []), key


def test_settings_of_other_kinds_get_nothing():
    assert completed({"learner.lr": 1e-5}) == {"learner.lr": 1e-5}


def test_a_new_version_s_settings_are_no_change_of_a_run():
    now = dumps(Config(model="m"))
    before = "".join(line for line in now.splitlines(keepends=True) if "clip" not in line and "floor" not in line)
    assert before != now
    assert changes.add([], 3, before=before, now=now, free=()) == []
    [change] = changes.add([], 3, before=before, now=now.replace("\nclip = 0.5", "\nclip = 0.25"), free=())
    assert change.settings == ("critic.clip was 0.5, is 0.25",)
