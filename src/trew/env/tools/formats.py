"""The formats in which replies contain calls: parsers that take time linear in the reply and never guess.

A parser gets a whole reply, special tokens included but for the end token. A reply that was cut off never reaches one.
If any call of a reply cannot be read, none is taken: the policy is told what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...rewards.thinking import after_thinking
from ...types import Message
from ..protocol import Call, Tool
from .arguments import from_text, read_json_at

# Possessive (*+): a long run of white space must not be tried in parts.
_BARE = re.compile(r'\s*+(?:<\|python_tag\|>\s*+)?(?=\{\s*+"(?:name|parameters)")')
_BETWEEN = re.compile(r"[\s;]*")
_SPACE = re.compile(r"\s*")
_FUNCTION = re.compile(r"\s*<function=([^<>\s]{1,100})>\s*")
_PARAMETER = re.compile(r"<parameter=([^<>\s]{1,100})>\n?")
_VALUE_ENDS = re.compile(r"</parameter>\s*(?=<parameter=|</function>)")


@dataclass(frozen=True, slots=True)
class Parsed:
    """The calls in a reply. ``malformed`` says why they cannot be read; there are none then."""

    calls: tuple[Call, ...] = ()
    malformed: str | None = None


class ToolFormat(Protocol):
    """How the policy calls tools, and how it reads of them. ``shown`` says that the chat template describes them."""

    @property
    def name(self) -> str: ...

    @property
    def shown(self) -> bool: ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
        """The opening, with what the template does not say about tools."""
        ...

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        """The calls in a whole reply."""
        ...

    def observation(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """What an environment said, with the results of tools as this format shows them."""
        ...


class Malformed(ValueError):
    """A call that cannot be read."""


Reader = Callable[[str, Mapping[str, Tool]], list[tuple[str, dict[str, Any]]]]
"""Finds the calls in a text, as (name, arguments). Raises Malformed."""


def identifier(number: int) -> str:
    """The id of the call ``number`` of a reply: nine letters and digits, which some templates insist on."""
    return f"trewcall{number + 1}"


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A format that the chat template writes. ``thinking`` says that the prompt ends inside a thought."""

    name: str
    read: Reader
    thinking: bool = False
    shown: bool = True

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[Message, ...]:
        return tuple(messages)

    def parse(self, text: str, tools: Sequence[Tool]) -> Parsed:
        # A call that is only thought about is none, and a thought that never ended has no answer behind it.
        said = after_thinking(text, thinking=self.thinking)
        if said is None:
            return Parsed()
        try:
            found = self.read(said, {tool.name: tool for tool in tools})
        except Malformed as error:
            return Parsed(malformed=str(error))
        return Parsed(tuple(Call(name, given, identifier(i)) for i, (name, given) in enumerate(found)))

    def observation(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple(messages)


# ---- <tool_call>{"name": ..., "arguments": {...}}</tool_call>


def read_tagged_json(text: str, tools: Mapping[str, Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Reads the calls of Qwen 2.5 and 3 and of Hermes.

    >>> read_tagged_json('So: <tool_call>\\n{"name": "f", "arguments": {"x": "</tool_call>"}}\\n</tool_call>', {})
    [('f', {'x': '</tool_call>'})]
    """
    found, at = [], 0
    while (begin := text.find("<tool_call>", at)) >= 0:
        inside = _SPACE.match(text, begin + len("<tool_call>"))
        assert inside is not None
        # The JSON says where it ends: an end tag inside one of its strings is text.
        value, at = _json(text, inside.end())
        found.append(_name_and(value, "arguments"))
        at = _closed(text, at, "</tool_call>")
    if "</tool_call>" in text[at:]:
        raise Malformed("</tool_call> without <tool_call>")
    return found


# ---- {"name": ..., "parameters": {...}}


def read_bare_json(text: str, tools: Mapping[str, Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Reads the calls of Llama 3: the reply is nothing but JSON objects with ``name`` and ``parameters``.

    >>> read_bare_json('{"name": "f", "parameters": {"x": 1}}', {}), read_bare_json('{"answer": 5}', {})
    ([('f', {'x': 1})], [])
    """
    found = []
    begin = _BARE.match(text)
    while begin is not None:
        value, at = _json(text, begin.end())
        # A first object that is no call makes the reply plain text: an answer may be JSON.
        if not found and not (isinstance(value, dict) and {"name", "parameters"} & value.keys()):
            return []
        found.append(_name_and(value, "parameters"))
        between = _BETWEEN.match(text, at)
        assert between is not None
        if between.end() == len(text):
            break
        begin = _BARE.match(text, between.end())
        if begin is None:
            raise Malformed("text behind a call; a call stands alone")
    return found


# ---- <tool_call><function=name><parameter=x>...</parameter></function></tool_call>


def read_tagged_parameters(text: str, tools: Mapping[str, Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Reads the calls of Qwen 3.5 and of the coder models. Values are text, whose type the tool's schema knows.

    >>> text = "<tool_call>\\n<function=f>\\n<parameter=x>\\n12\\n</parameter>\\n</function>\\n</tool_call>"
    >>> read_tagged_parameters(text, {})
    [('f', {'x': '12'})]
    """
    found, at = [], 0
    while (begin := text.find("<tool_call>", at)) >= 0:
        function = _FUNCTION.match(text, begin + len("<tool_call>"))
        if function is None:
            raise Malformed("<tool_call> is not followed by <function=NAME>")
        name = function[1]
        given, at = _parameters(text, function.end(), tools.get(name))
        at = _closed(text, _closed(text, at, "</function>"), "</tool_call>")
        found.append((name, given))
    if "<function=" in text[at:]:
        raise Malformed("<function=...> outside <tool_call>")
    return found


def _parameters(text: str, at: int, tool: Tool | None) -> tuple[dict[str, Any], int]:
    # Without a schema (an unknown tool) every value stays text; the call is refused later, by its name.
    schemas = tool.parameters.get("properties", {}) if tool else {}
    given: dict[str, Any] = {}
    while begin := _PARAMETER.match(text, at):
        name = begin[1]
        if name in given:
            raise Malformed(f"the parameter {name[:40]!r} is there twice")
        # A value may contain the end tag: the real one is followed by the next parameter or the function's end.
        ends = _VALUE_ENDS.search(text, begin.end())
        if ends is None:
            raise Malformed(f"<parameter={name[:40]}> is not closed")
        value = text[begin.end() : ends.start()].removesuffix("\n")
        given[name] = from_text(value, schemas.get(name, {"type": "string"}))
        at = ends.end()
    return given, at


# ---- shared


def _json(text: str, at: int) -> tuple[Any, int]:
    try:
        return read_json_at(text, at)
    except ValueError as error:
        raise Malformed(str(error)) from None


def _closed(text: str, at: int, tag: str) -> int:
    """The place behind the end tag, which must come next."""
    space = _SPACE.match(text, at)
    assert space is not None
    if not text.startswith(tag, space.end()):
        raise Malformed(f"{tag} is missing behind a call")
    return space.end() + len(tag)


def _name_and(value: Any, arguments: str) -> tuple[str, dict[str, Any]]:
    """The name and arguments in a call's JSON."""
    if not isinstance(value, dict):
        raise Malformed(f"a call is an object with name and {arguments}")
    name, given = value.get("name"), value.get(arguments)
    if not isinstance(name, str):
        raise Malformed("a call's name must be text")
    if not isinstance(given, dict):
        raise Malformed(f"a call's {arguments} must be an object")
    if extra := [key for key in value if key not in ("name", arguments)]:
        raise Malformed(f"a call has name and {arguments}, not {extra[0][:40]!r}")
    return name, given


READERS: Mapping[str, Reader] = {
    "tool_call json": read_tagged_json,
    "tool_call parameters": read_tagged_parameters,
    "bare json": read_bare_json,
}
"""The formats that are recognised in templates, by name."""
