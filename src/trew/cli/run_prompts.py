"""How the prompts of a run were given to its model, which ``trew chat`` imitates or says that it does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import Config
from ..runs.record import step_files

_ROWS = 256
_SHOWN = 3


@dataclass(frozen=True, slots=True)
class RunPrompts:
    """``systems``: the system messages of some prompts, "" for those without one; empty if none is recorded.
    ``plain``: they were text, not messages. ``episodes``: what answered the policy, in words."""

    systems: frozenset[str] = frozenset()
    plain: bool = False
    episodes: str = ""

    @property
    def system(self) -> str:
        """The system message that all of them have; empty where they differ or have none."""
        return next(iter(self.systems)) if len(self.systems) == 1 else ""

    def notes(self, *, template: str, has_system: bool) -> list[str]:
        """What a conversation does otherwise than the run. ``template`` is the chat template's name;
        with ``has_system`` it has a system message, chosen or the recipe's."""
        found = []
        if self.plain and template != "plain":
            found.append(
                "the run's prompts were plain text; here questions go through the chat template, which the model was "
                "not trained with (--chat-template plain leaves it out)"
            )
        if len(self.systems) > 1 and not has_system:
            found.append(
                f"the run's prompts had at least {len(self.systems)} system messages, and none is used here; --system "
                "gives one"
            )
        if self.episodes:
            found.append(f"the run was trained in episodes with {self.episodes}, which is not there in a conversation")
        return found


def prompts_of(run: Path, config: Config) -> RunPrompts:
    """What the newest readable table of a run's rollouts says of its prompts, and its recipe of its episodes."""
    prompts = _recorded(run)
    systems = frozenset(_system(messages) for messages in prompts if messages is not None)
    return RunPrompts(systems, bool(prompts) and all(m is None for m in prompts), _episodes(config))


def _episodes(config: Config) -> str:
    own = config.environment
    parts = [f"the environment {own.name}"] if own.name else []
    if own.tools:
        names = ", ".join(own.tools[:_SHOWN]) + ", …" * (len(own.tools) > _SHOWN)
        parts.append(f"the tools {names}" if len(own.tools) > 1 else f"the tool {names}")
    return " and ".join(parts)


def _recorded(run: Path) -> list[Sequence[Any] | None]:
    """The messages of some prompts, None for each that is plain text; empty without a table that can be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for _, path in sorted(step_files(run), reverse=True):
        if path.suffix != ".parquet" or path.parent.name != "rollouts":
            continue
        try:
            texts = pq.read_table(path, columns=["messages"])["messages"].slice(0, _ROWS).to_pylist()
            return [None if text is None else json.loads(text) for text in texts]
        except (OSError, ValueError, KeyError, pa.ArrowException):  # of another version, or damaged
            continue
    return []


def _system(messages: Sequence[Any]) -> str:
    """
    >>> _system([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    'Be brief.'
    """
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") != "system":
        return ""
    return str(first.get("content", ""))
