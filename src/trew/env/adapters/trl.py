"""``trl:path/to/file.py:Class``: an environment class as TRL's ``environment_factory`` takes it; TRL is not needed.

Public methods are tools. ``reset(**row)`` returns text for the end of the last user message, or None. ``get_reward()``
is called once, after the first reply without a call or when a budget ends the episode. One thing differs from TRL 1.16:
a call with wrong arguments is answered by our own message.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import ConfigError
from ...types import Message
from ...utils.user_files import load_named, sources_of
from ..protocol import Environment, Reply, Say, Tool
from ..tools.builtin import ToolError
from ..tools.schema import tool_of


def adapt(name: str, args: Mapping[str, Any]) -> tuple[Callable[[], Environment], Mapping[str, str]]:
    """Loads the class, or the function that makes its objects, with ``args``. Raises ConfigError."""
    found, path, _ = load_named(name)
    try:
        inspect.signature(found).bind(**args)
    except TypeError as error:
        raise ConfigError(f"environment.args: {name}: {error}; it takes {inspect.signature(found)}") from None
    # TRL, too, makes one object to see what it can do.
    kind = found if inspect.isclass(found) else type(found(**args))
    methods = _methods(kind)
    if "reset" not in methods:
        raise ConfigError(f"environment.name: trl:{name}: has no method reset, which TRL calls with the row's columns")
    # Tried now: a method of which no tool can be made is an error of the recipe.
    for method in _tools(methods):
        tool_of(_plain(methods[method]))
    return lambda: TrlEnvironment(found(**args)), sources_of(path)


class TrlEnvironment:
    """One episode of an object of TRL's kind."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._loop: asyncio.AbstractEventLoop | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        observation = self._run(self.inner.reset, **row)
        messages = _opening(row.get("prompt") or "")
        if observation is not None:
            if not isinstance(observation, str):
                raise TypeError(f"reset returned {type(observation).__name__}; text and None are taken, images are not")
            # A new dict: the message belongs to the row, which every episode on it shares.
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + observation}
        return Say(tuple(messages), tools=tuple(map(self._tool, _tools(_methods(type(self.inner))))))

    def step(self, reply: Reply) -> Say:
        # The tool loop answers replies with calls, so that what arrives here is the first reply without one.
        return Say(reward=self.stopped(), done=True)

    def stopped(self) -> float | None:
        return self._run(self.inner.get_reward) if hasattr(self.inner, "get_reward") else None

    def close(self) -> None:
        if self._loop is not None:
            self._loop.close()

    def _tool(self, name: str) -> Tool:
        method = getattr(self.inner, name)

        def call(**arguments: Any) -> str:
            try:
                return _text(self._run(method, **arguments))
            except Exception as error:
                # The very words of TRL, so that the policy reads the same in both trainers.
                raise ToolError(str(error), whole=str({"error": str(error)})) from error

        made = tool_of(_plain(method))
        return Tool(name, made.description, made.parameters, call, made.returns)

    def _run(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Calls a function; waits for it if it is async, in one event loop for the episode."""
        result = function(**arguments)
        if not inspect.isawaitable(result):
            return result
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(result)


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """All methods of a class, as TRL finds them: by name, in alphabetical order."""
    return dict(inspect.getmembers(kind, predicate=inspect.isfunction))


def _tools(methods: Mapping[str, Any]) -> list[str]:
    return [name for name in methods if name not in ("reset", "get_reward") and not name.startswith("_")]


def _plain(method: Callable[..., Any]) -> Callable[..., Any]:
    """An async method as a plain one of the same signature, of which a schema can be made."""
    if not inspect.iscoroutinefunction(method):
        return method

    @functools.wraps(method)
    def plain(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    return plain


def _opening(prompt: Any) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def _text(value: Any) -> str:
    """What a tool returned, as TRL writes it."""
    if isinstance(value, list) and any(isinstance(part, dict) and part.get("type") == "image" for part in value):
        raise ToolError("the tool returned an image, which cannot be shown")
    return str(value)
