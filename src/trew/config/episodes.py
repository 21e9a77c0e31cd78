"""Checks that episodes read every setting of the data, and that every reward reads episodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from .schema import Config, EnvironmentConfig


def problems(c: Config) -> Iterator[str]:
    """What episodes would ignore of the settings of their data, and of their number; rewards that cannot read them."""
    # All of these are refused with demonstrations anyway.
    if not c.plays or c.demonstrates:
        return
    for i, one in enumerate(c.sets):
        where = f"data[{i}]" if isinstance(c.data, tuple) else "data"
        for name in changed(one):
            if why := _unread(c, name):
                usual = getattr(type(one)(), name)
                yield f"{where}.{name}: got {getattr(one, name)!r}, {why}, or leave it at {usual!r}"
    if not c.numbered and c.environment.episodes != EnvironmentConfig().episodes:
        yield (
            f"environment.episodes: got {c.environment.episodes}, but it counts the problems that an environment makes "
            f"without data, and every row of the data is played here; leave it at {EnvironmentConfig().episodes}"
        )
    if c.numbered and 0 < c.curriculum.share < 1:
        yield (
            f"curriculum.share: got {c.curriculum.share:g}, accepts 0 without data: whenever an episode of some number "
            "comes up it is another problem, so that its pass rate says nothing of the next; name data, or set it to 0"
        )
    for i, reward in enumerate(c.rewards):
        # It would score an episode as if its last reply were the answer to the row.
        if reward.model:
            yield (
                f"rewards[{i}].model: got {reward.model!r} with an environment, accepts none there: a reward model "
                "reads a prompt and one completion, not the turns of an episode; leave it out, or name a function in a "
                'file (name = "path/to/file.py:function"), whose completions are whole conversations there'
            )


def _unread(c: Config, name: str) -> str:
    """Why a key of a data set has no effect on episodes, and what to do instead; empty if it has one."""
    if c.numbered and name in ("eval", "prompt_column", "args"):
        return "but without data.train the environment makes all problems, held-out ones too; set data.train"
    # Servers that the run starts have room for prompts of data.max_prompt_tokens.
    if name == "overlong" or (name == "max_prompt_tokens" and not c.cluster.servers):
        return "but what episodes make of a row is not measured; limit it by environment.episode_tokens"
    return ""


def changed(section: Any) -> list[str]:
    """The keys of a section that differ from their defaults."""
    usual = type(section)()
    return [
        field.name
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != getattr(usual, field.name)
    ]
