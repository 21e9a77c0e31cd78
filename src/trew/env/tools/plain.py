"""The plain protocol, for templates without tools and for small models: a call is a line ``name: text``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from ...rewards.thinking import after_thinking
from ...types import Message
from ..protocol import Call, Tool
from .arguments import from_text, read_json
from .formats import Parsed, identifier

_TAUGHT = """You have tools. To use one, reply with one line and nothing else; its result comes back.
{}"""


class PlainFormat:
    """Calls as lines ``name: text``. A tool with one argument takes the text; others take a JSON object. ``thinking``
    says that the prompt ends inside a thought."""

    name = "plain"
    shown = False

    def __init__(self, *, thinking: bool = False) -> None:
        self.thinking = thinking

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
        """Describes the tools in the system message, or in front of the first message where there is none."""
        if not tools:
            return tuple(messages)
        taught = _TAUGHT.format("\n".join(map(_described, tools)))
        at = next((i for i, message in enumerate(messages) if message["role"] == "system"), 0)
        first = messages[at]
        parts = (first["content"], taught) if first["role"] == "system" else (taught, first["content"])
        return (*messages[:at], {**first, "content": "\n\n".join(parts)}, *messages[at + 1 :])

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """Takes each line that begins with the name of a tool and a colon; everything else is text."""
        known = {tool.name: tool for tool in tools}
        # What is only thought about is no call; None where the thought never ended.
        said = after_thinking(text, thinking=self.thinking)
        if not known or said is None:
            return Parsed()
        names = "|".join(re.escape(name) for name in known)
        calls: list[Call] = []
        for line in re.finditer(rf"^[ \t]*({names}):(.*)$", said, re.MULTILINE):
            try:
                given = _arguments(line[2].strip(), known[line[1]])
            except ValueError as error:
                return Parsed(malformed=f"{line[1]}: {error}; it takes a JSON object: {_usage(known[line[1]])}")
            calls.append(Call(line[1], given, identifier(len(calls))))
        return Parsed(tuple(calls))

    def observation(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Makes one user message of the results of a reply's calls."""
        found: list[Message] = []
        for of_tools, group in itertools.groupby(messages, key=lambda message: message["role"] == "tool"):
            some = list(group)
            if not of_tools:
                found += some
                continue
            # One result needs no name: short observations are what small models learn from.
            texts = [message["content"] if len(some) == 1 else f"{message.get('name', '')}: {message['content']}"
                     for message in some]  # fmt: skip
            found.append({"role": "user", "content": "\n".join(texts)})
        return tuple(found)


def _arguments(text: str, tool: Tool) -> dict[str, Any]:
    properties = tool.parameters.get("properties", {})
    if len(properties) == 1:
        [(name, schema)] = properties.items()
        return {name: from_text(text, schema)} if text else {}
    if not properties and not text:
        return {}
    value = read_json(text)
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _usage(tool: Tool) -> str:
    """How a call of a tool is written.

    >>> _usage(Tool("add", "", {"properties": {"a": {}, "b": {}}}))
    'add: {"a": ..., "b": ...}'
    """
    properties = tool.parameters.get("properties", {})
    if len(properties) == 1:
        return f"{tool.name}: {next(iter(properties)).upper()}"
    inside = ", ".join(f'"{name}": ...' for name in properties)
    return f"{tool.name}: {{{inside}}}" if properties else f"{tool.name}:"


def _described(tool: Tool) -> str:
    lines = [f"{_usage(tool)}", f"  {' '.join(tool.description.split())}"]
    for name, schema in tool.parameters.get("properties", {}).items():
        if schema.get("description"):
            shown = name.upper() if len(tool.parameters["properties"]) == 1 else name
            lines.append(f"  {shown}: {schema['description']}")
    return "\n".join(lines)
