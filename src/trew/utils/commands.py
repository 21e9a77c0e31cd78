"""Commands of trew that messages advise, as a shell reads them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from .toml import toml_value


def trial(recipe: Mapping[str, Any]) -> str:
    """The command that tries by itself what gives the rewards of a run with this recipe: the environment with its
    arguments, tools and rows, or the reward.

    >>> trial({"environment": {"name": "grid", "args": {"size": 6}, "tools": ["calculator", "python"]}})
    'trew env grid --check --set size=6 --tools calculator --tools python'
    >>> trial({"rewards": [{"name": "my/reward.py:f"}], "data": {"train": "my rows.jsonl"}})
    "trew rewards test my/reward.py:f --data 'my rows.jsonl'"
    """
    own = recipe.get("environment")
    if isinstance(own, Mapping) and own.get("name"):
        words = ["env", own["name"], "--check", *_settings(own)]
        for tool in own.get("tools") or ():  # the option takes one, and is repeated
            words += ["--tools", tool]
    else:
        rewards = [reward for reward in recipe.get("rewards") or () if isinstance(reward, Mapping)]
        first = rewards[0] if rewards else {}
        words = ["rewards", "test", first.get("model") or first.get("name") or "NAME", *_settings(first)]
    return shlex.join(["trew", *map(str, [*words, *_rows(recipe.get("data"))])])


def _settings(table: Mapping[str, Any]) -> list[str]:
    args = table.get("args")
    return ["--set", *(f"{key}={toml_value(value)}" for key, value in args.items())] if args else []


def _rows(data: Any) -> list[str]:
    """The options that name the rows of a recipe."""
    # Of several sets, the first shows how rows look.
    first = data[0] if isinstance(data, list | tuple) and data else data
    if not isinstance(first, Mapping):
        return []
    named = {"--task": first.get("task", "prompts"), "--data": first.get("train", "")}
    return [word for name, value in named.items() if value and value != "prompts" for word in (name, value)]
