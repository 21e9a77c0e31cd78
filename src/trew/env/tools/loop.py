"""The tool loop: runs the calls of replies, until a reply comes without any."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ...types import Message
from ..protocol import Environment, Reply, Say, Tool
from . import arguments, calling


class ToolLoop:
    """Tools, by themselves or with an environment.

    Calls are run here and their results are what the policy reads next; the environment sees no reply with calls. Its
    own tools join the others. A tool without a function is the environment's affair: a reply that calls one is given to
    it. Without an environment, the first reply without a call ends the episode, and the task's rewards read it.

    ``seconds`` limits the calls of one reply together.
    """

    def __init__(self, tools: Sequence[Tool], environment: Environment | None = None, *, seconds: float) -> None:
        self.environment, self.seconds = environment, seconds
        self._given = tuple(tools)
        self._tools = _by_name(self._given)

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        opening = Say(_asked(row)) if self.environment is None else Say.of(self.environment.reset(row, seed))
        # The environment's tools are known from its opening on.
        self._tools = _by_name((*self._given, *opening.tools))
        return dataclasses.replace(opening, tools=tuple(self._tools.values()))

    def step(self, reply: Reply) -> Say:
        if reply.malformed is not None:
            message = {"role": "tool", "name": "error", "content": f"error: the call cannot be read: {reply.malformed}"}
            return Say((message,), metrics={"malformed": 1.0})
        if not reply.calls or any(self._is_the_environments(call.name) for call in reply.calls):
            return Say(done=True) if self.environment is None else Say.of(self.environment.step(reply))
        results = calling.run(reply.calls, self._tools, seconds=self.seconds)
        said = tuple(
            {"role": "tool", "name": one.call.name, "tool_call_id": one.call.id, "content": one.text} for one in results
        )
        failed = sum(one.failed for one in results)
        return Say(said, metrics={"tool_calls": float(len(results)), "tool_errors": float(failed)})

    def stopped(self) -> float | None:
        """What the environment says of an episode that a budget has ended; only asked of those that judge these."""
        return getattr(self.environment, "stopped")()  # noqa: B009 (it is of another protocol)

    def close(self) -> None:
        # A class of a user's may have nothing to free.
        if (close := getattr(self.environment, "close", None)) is not None:
            close()

    def _is_the_environments(self, name: str) -> bool:
        tool = self._tools.get(name)
        return tool is not None and tool.function is None


def _asked(row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The prompt of a row, as the opening of an episode without an environment."""
    prompt = row["prompt"]
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else tuple(prompt)


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    """Tools by name. Raises ConfigError if two share one, or a schema asks for checks that do not exist here."""
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            raise ConfigError(
                f"two tools have the name {tool.name!r}: one of environment.tools, one of the environment"
            )
        unknown = [] if tool.function is None else arguments.unknown_keywords(tool.parameters)
        if unknown:
            raise ConfigError(f"tool {tool.name}: its schema uses {unknown[0]!r}, which is not checked; leave it out")
        found[tool.name] = tool
    return found
