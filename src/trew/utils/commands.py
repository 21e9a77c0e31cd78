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
    >>> trial({"rewards": [{"name": "gsm8k"}]})
    'trew rewards test'
    """
    own = recipe.get("environment")
    if not isinstance(own, Mapping) or not own.get("name"):
        return "trew rewards test"
    words = [own["name"], "--check"]
    if args := own.get("args"):
        words += ["--set", *(f"{key}={toml_value(value)}" for key, value in args.items())]
    for tool in own.get("tools") or ():  # the option takes one, and is repeated
        words += ["--tools", tool]
    data = recipe.get("data")
    # Of several sets, the first shows how rows look.
    first = data[0] if isinstance(data, list | tuple) and data else data
    if isinstance(first, Mapping):
        named = {"--task": first.get("task", "prompts"), "--data": first.get("train", "")}
        words += [word for name, value in named.items() if value and value != "prompts" for word in (name, value)]
    return shlex.join(["trew", "env", *map(str, words)])
