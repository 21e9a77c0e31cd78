"""Settings that a run's folder has from an earlier version of trew, which did not know all of today's."""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from typing import Any

from ..utils.toml import flatten
from .recipe import dumps
from .schema import Config, RewardConfig, SetConfig

_NUMBERED = {"rewards": RewardConfig, "data": SetConfig}
_PLANNED = ("model", "out", "steps")  # have no default, or one that says nothing: epochs stand in for steps


def completed(stored: Mapping[str, Any]) -> dict[str, Any]:
    """A run's flat settings, with the defaults of those that it lacks: the default of a new setting does what was done
    before there was one. Settings of other kinds than a training's are returned as they are.

    >>> old = {"objective.preset": "grpo", "learner.lr": 0.5, "rewards.0.name": "gsm8k"}
    >>> new = completed(old)
    >>> new["learner.lr"], new["learner.schedule"], new["rewards.0.weight"], "rewards" in new, completed({"a": 1})
    (0.5, 'constant', 1.0, False, {'a': 1})
    """
    if "objective.preset" not in stored:
        return dict(stored)
    found = dict(_defaults())
    for name, numbers in ((name, _numbers(stored, name)) for name in _NUMBERED):
        if numbers:  # tables of a list: their defaults are other ones
            found = {key: value for key, value in found.items() if key.partition(".")[0] != name}
            usual = _of(_NUMBERED[name])
            found |= {f"{name}.{number}.{key}": value for number in numbers for key, value in usual.items()}
    return found | dict(stored)


def _numbers(stored: Mapping[str, Any], name: str) -> set[str]:
    """The numbers in keys such as ``rewards.0.name``."""
    parts = (key.split(".") for key in stored)
    return {key[1] for key in parts if key[0] == name and len(key) > 2 and key[1].isdecimal()}


@functools.cache
def _defaults() -> Mapping[str, Any]:
    table = flatten(tomllib.loads(dumps(Config(model=""))))
    return {key: value for key, value in table.items() if key not in _PLANNED}


@functools.cache
def _of(kind: type) -> Mapping[str, Any]:
    """The defaults of a table of a list, as TOML has them."""
    own = {f.name: f.default for f in dataclasses.fields(kind) if f.default not in (dataclasses.MISSING, None)}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in own.items()}
