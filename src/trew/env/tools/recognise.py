"""Recognises how a chat template writes calls, by having it write one. The model's name says nothing about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import ConfigError, DataError
from ...rewards.thinking import OPEN
from ...types import Message
from ..protocol import Call, Tool
from .arguments import is_too_deep
from .formats import READERS, Malformed, TemplateFormat, ToolFormat, identifier
from .plain import PlainFormat

_TEXT = {"type": "string", "description": "a text"}
_PROBE = Tool(
    "trewprobe",
    "A tool.",
    {
        "type": "object",
        "properties": {"text": _TEXT, "count": {"type": "integer", "description": "a number"}},
        "required": ["text"],
    },
)
_GIVEN = {"text": 'say "hi"', "count": 12}
_CALL = {"type": "function", "id": identifier(0), "function": {"name": _PROBE.name, "arguments": _GIVEN}}
_ASKED = {"role": "user", "content": "q"}
_REPLY = "trewreply"


class Render(Protocol):
    """A chat template: the text of messages, with the tools that it is given. Raises DataError if it refuses them."""

    def __call__(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), generation_prompt: bool = True
    ) -> str: ...


Response = Callable[..., Mapping[str, Any]]
"""``parse_response`` of a tokenizer that has a response template."""


def recognised(render: Render, *, response: Response | None = None, wanted: str = "auto") -> ToolFormat:
    """Finds the format of calls of a chat template.

    A format is recognised if it reads the very call that the template wrote. ``response`` is the tokenizer's own
    parser, if it has one. A template that shows no tools means the plain protocol, which ``wanted = "plain"`` asks for.
    Raises ConfigError if the template shows tools but writes calls in a way that nothing reads.
    """
    if wanted == "plain" or not _shows_tools(render):
        return PlainFormat(thinking=_opens_thought(render))
    asked = render([_ASKED], tools=[_PROBE.schema]).rstrip()
    written = _written(render)
    readers = dict(READERS)
    if response is not None:
        # What the template writes in front of a call's name, by which _ByTokenizer counts calls.
        mark = written.partition(_PROBE.name)[0].strip()
        readers["response template"] = _ByTokenizer(response, asked.removesuffix(OPEN), mark)
    for name, read in readers.items():
        one = TemplateFormat(name, read)
        # The round trip decides: only a reader that returns exactly what was rendered is taken.
        if one.parse(written, (_PROBE,)).calls == (Call(_PROBE.name, _GIVEN, identifier(0)),):
            # A prompt that ends inside a thought: what comes before its end is no call.
            return dataclasses.replace(one, thinking=asked.endswith(OPEN))
    shown = written if len(written) <= 400 else written[:400] + "..."
    raise ConfigError(
        f"environment.tools: the chat template writes a call in a format that is not known: {shown!r}; set "
        "environment.tools_format = 'plain', which describes tools in words, or use another chat_template"
    )


def _opens_thought(render: Render) -> bool:
    """Whether prompts end inside a thought: what comes before its end is no call."""
    try:
        return render([_ASKED]).rstrip().endswith(OPEN)
    except DataError:  # it refuses even this, which the check of openings reports
        return False


def _shows_tools(render: Render) -> bool:
    try:
        return _PROBE.name in render([_ASKED], tools=[_PROBE.schema])
    except DataError:  # it refuses tools
        return False


def _written(render: Render) -> str:
    """The call as the template writes it in a reply, without the reply's end."""
    tools = [_PROBE.schema]
    asked = render([_ASKED], tools=tools)
    try:
        text = render([_ASKED, _reply("", tool_calls=[_CALL])], tools=tools, generation_prompt=False)
        plain = render([_ASKED, _reply(_REPLY)], tools=tools, generation_prompt=False)
    except DataError as error:
        raise ConfigError(
            f"environment.tools: {error}; set environment.tools_format = 'plain', which describes tools in words"
        ) from None
    # What follows the content of a plain reply is the reply's end.
    end = plain.rpartition(_REPLY)[2]
    # The reply begins where the dialogue departs from the prompt that asks for it.
    begin = next((i for i, (one, other) in enumerate(zip(asked, text, strict=False)) if one != other), len(asked))
    # Templates may end a reply with calls without the white space of a plain one.
    return text[begin:].removesuffix(end).removesuffix(end.strip())


def _reply(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


@dataclass(frozen=True, slots=True)
class _ByTokenizer:
    """Reads calls with the tokenizer's own parser, in replies without their thoughts. ``before`` is a prompt, and
    ``mark`` what begins a call, by which a broken one is noticed."""

    response: Response
    before: str
    mark: str

    def __call__(self, text: str, tools: Mapping[str, Tool]) -> list[tuple[str, dict[str, Any]]]:
        try:
            message = self.response(text, prefix=self.before, tools=[tool.schema for tool in tools.values()])
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            found = [(one["name"], one["arguments"]) for one in functions]
        except Exception as error:  # regular expressions and JSON of a file that came with the model
            raise Malformed(f"a call cannot be read: {' '.join(str(error).split())[:200]}") from None
        if any(not isinstance(name, str) or not isinstance(given, dict) for name, given in found):
            raise Malformed("a call needs a name and an object of arguments")
        if any(is_too_deep(given) for _, given in found):
            raise Malformed("a call's arguments are nested too deeply")
        if self.mark and len(found) < text.count(self.mark):
            raise Malformed(f"{self.mark!r} begins a call that cannot be read")
        return found
