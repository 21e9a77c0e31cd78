"""An episode as the report shows it: who said what, which tools were called, what each reply earned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .text import number, shorten

_MOST = 40
"""Messages of an episode that are shown; the middle of a longer one is left out."""


@dataclass(frozen=True, slots=True)
class Said:
    """One message. ``who`` is a role, or ``policy`` for a reply; ``facts`` are what a reply earned and called."""

    who: str
    text: str
    facts: tuple[tuple[str, str], ...] = ()


def conversation(row: Mapping[str, Any]) -> tuple[Said, ...]:
    """Returns what was said in the episode of a row of rollouts; nothing where a completion is no episode."""
    turns = row.get("turns")
    if not turns or not row.get("ending"):
        return ()
    said = [each for turn in turns for each in (*_before(turn), _reply(turn))]
    if row.get("rollout_error"):
        said.append(Said("failed", shorten(row["rollout_error"])))
    if len(said) <= _MOST:
        return tuple(said)
    half = _MOST // 2
    return (*said[:half], Said("…", f"{len(said) - 2 * half} more messages"), *said[-half:])


def _before(turn: Mapping[str, Any]) -> list[Said]:
    """What the policy read before its reply."""
    return [Said(*_message(message)) for message in _parsed(turn["messages"])]


def _reply(turn: Mapping[str, Any]) -> Said:
    facts = [("call", shorten(_call(call), 200)) for call in _parsed(turn["calls"])]
    if turn["reward"] is not None:
        facts.append(("reward", number(turn["reward"])))
    facts += [(name, number(value)) for name, value in turn["metrics"] or ()]
    if turn["finish_reason"] != "stop":
        facts.append(("ended by", str(turn["finish_reason"])))
    return Said("policy", shorten(turn["text"] or ""), tuple(facts))


def _parsed(text: Any) -> list[Mapping[str, Any]]:
    """The messages or calls in a cell; nothing where it cannot be read, since the file may come from anywhere."""
    try:
        found = json.loads(text or "[]")
    except (TypeError, ValueError, RecursionError):
        return []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _message(message: Mapping[str, Any]) -> tuple[str, str]:
    who = str(message.get("name") or message.get("role", ""))
    content = message.get("content", "")
    return shorten(who, 40), shorten(content if isinstance(content, str) else json.dumps(content))


def _call(call: Mapping[str, Any]) -> str:
    """A tool call as code: ``search(query="x")``."""
    inner = call.get("function")
    call = inner if isinstance(inner, Mapping) else call  # as chat messages have it
    arguments = call.get("arguments")
    given = arguments.items() if isinstance(arguments, Mapping) else ()
    return f"{call.get('name', '')}({', '.join(f'{key}={value!r}' for key, value in given)})"
