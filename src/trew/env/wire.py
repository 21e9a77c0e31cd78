"""What passes between a run and its environments, as plain values that JSON can hold; checked where it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .protocol import Call, Reply, Say, Tool

ROLES = ("system", "developer", "user", "assistant", "tool")


def from_say(say: Any, *, opening: bool) -> dict[str, Any]:
    """What an environment said. Raises TypeError or ValueError with what is wrong, for its author."""
    if not isinstance(say, Say):
        raise TypeError(f"it said {say!r:.100}, which is no Say")
    if opening and say.done:
        raise ValueError("the opening is done already, so there is nothing to reply to")
    if opening and say.reward is not None:
        raise ValueError("the opening has a reward, although there was no reply yet that could have earned it")
    if not say.done and not say.messages:
        raise ValueError("it said nothing although it is not done")
    if say.tools and not opening:
        raise ValueError("tools may come with the opening alone")
    return {
        "messages": [_message(message) for message in say.messages],
        "reward": None if say.reward is None else _number(say.reward, "the reward"),
        "done": bool(say.done),
        "metrics": {str(name): _number(value, f"metric {name!r}") for name, value in say.metrics.items()},
        "tools": [
            {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
                "returns": None if tool.returns is None else dict(tool.returns),
            }
            for tool in say.tools
        ],
        "state": None if say.state is None else str(say.state),
    }


def to_say(table: Mapping[str, Any]) -> Say:
    """Restores the result of :func:`from_say`; functions of tools stay where they are."""
    tools = tuple(Tool(**tool) for tool in table["tools"])
    # The functions stay with the episode's process: this side only needs to show tools and to read calls.
    return Say(
        tuple(table["messages"]), table["reward"], table["done"], table["metrics"], tools, table["state"]
    )  # fmt: skip


def from_reply(reply: Reply) -> dict[str, Any]:
    """A reply of the policy."""
    calls = [{"name": call.name, "arguments": dict(call.arguments), "id": call.id} for call in reply.calls]
    return {
        "text": reply.text, "calls": calls, "malformed": reply.malformed, "turn": reply.turn,
        "finish_reason": reply.finish_reason,
    }  # fmt: skip


def to_reply(table: Mapping[str, Any]) -> Reply:
    """Restores the result of :func:`from_reply`."""
    found: dict[str, Any] = {**table, "calls": tuple(Call(**call) for call in table["calls"])}
    return Reply(**found)


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise TypeError(f"it said {message!r:.100}, which is no message with role and content")
    if message.get("role") not in ROLES:
        raise ValueError(f"a message has the role {message.get('role')!r:.100}; roles are {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str):
        raise TypeError(f"a message has the content {message.get('content')!r:.100}, which is no text")
    return dict(message)


def _number(value: Any, what: str) -> float:
    if hasattr(value, "item"):  # numpy's numbers
        value = value.item()
    if not isinstance(value, int | float):
        raise TypeError(f"{what} is {value!r:.100}, which is no number")
    if not math.isfinite(value):
        raise ValueError(f"{what} is {value}, which is not finite")
    return float(value)
