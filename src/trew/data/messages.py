"""Parses the prompts of rows: a string, a list of chat messages, or such a list as a JSON string."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..types import Message
from .rows import BadRow, show

_OF_TOOLS = frozenset({"tool_calls"})
_CHANGES_TEXT = ("tools", "chat_template_kwargs")  # TRL's trainers hand them to the chat template
ROLES = ("system", "developer", "user", "assistant", "tool")


def user_turn(text: str, *, system: str = "") -> tuple[Message, ...]:
    """One user message, preceded by a system message if one is given."""
    head = ({"role": "system", "content": system},) if system else ()
    return (*head, {"role": "user", "content": text})


def parse_prompt(value: Any, name: str) -> str | tuple[Message, ...]:
    """Parses a prompt column's value into text or messages; raises BadRow with what is wrong."""
    if isinstance(value, str):
        if not value.strip():
            raise BadRow(f"column {name!r} is empty")
        nested = nested_messages(value)
        return value if nested is None else parse_messages(nested, name)
    if isinstance(value, (list, tuple)):
        return parse_messages(value, name)
    raise BadRow(f"column {name!r} must be a string or a list of messages, got {show(value)}")


def parse_messages(value: Any, name: str) -> tuple[Message, ...]:
    """Checks a chat: known roles, string contents, and a last turn that is not the assistant's."""
    if not value:
        raise BadRow(f"column {name!r} is an empty list of messages")
    messages = tuple(_message(turn, f"{name}[{i}]") for i, turn in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"column {name!r} ends with an assistant message; the completion is the assistant's next turn")
    if not any(message["content"].strip() for message in messages):
        raise BadRow(f"column {name!r} has only empty messages")
    return messages


def parse_conversation(value: Any, name: str) -> tuple[Message, ...]:
    """Checks a chat with answers: known roles, string contents, and a last turn that is the assistant's. Answers are
    not empty."""
    if not isinstance(value, (list, tuple)) or not value:
        raise BadRow(f"column {name!r} must be a list of messages, got {show(value)}")
    messages = tuple(_message(turn, f"{name}[{i}]") for i, turn in enumerate(value))
    if messages[-1]["role"] != "assistant":
        raise BadRow(f"column {name!r} ends with a {messages[-1]['role']} message; a demonstration ends with an answer")
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadRow(f"{name}[{i}].content is empty; there is nothing to learn from an empty answer")
    return messages


def parse_answer(turn: Any, where: str) -> str:
    """The text of an assistant's message that has nothing but a text."""
    message = _message(turn, where)
    if message["role"] != "assistant":
        raise BadRow(f"{where} must be a message of the assistant, got {show(message)}")
    if more := sorted(message.keys() - {"role", "content"}):
        raise BadRow(
            f"{where} has {', '.join(map(repr, more))}, accepts role and content alone: answers are compared as texts; "
            "write what the model has to write into 'content', or remove the key"
        )
    return message["content"]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRow(f"{where} must be a message with role and content, got {show(turn)}")
    # Parquet gives every struct of a column the keys of all of them; a null key means that it is absent.
    fields = {key: value for key, value in turn.items() if value is not None and not (key in _OF_TOOLS and not value)}
    for key in _OF_TOOLS & fields.keys():
        raise BadRow(
            f"{where} has {key!r}, accepts messages of texts: write what the model has to write into 'content', or "
            "leave such rows out"
        )
    for key in ("role", "content"):
        if key not in fields:
            raise BadRow(f"{where} has no {key!r}; a message has role and content")
    if fields["role"] not in ROLES:
        raise BadRow(f"{where}.role must be one of {', '.join(ROLES)}, got {show(fields['role'])}")
    for key, value in fields.items():
        if not isinstance(value, str):
            raise BadRow(f"{where}.{key} must be a string, got {show(value)}")
    return fields


def refuse_what_changes_the_text(columns: Mapping[str, Any]) -> None:
    """Raises BadRow for a column with which a chat template would write other texts."""
    for key in _CHANGES_TEXT:
        if _given(columns.get(key)):
            raise BadRow(
                f"has {key!r}, with which the chat template would write other texts; rows with answers are rendered "
                f"without: put them into the messages, or remove the column {key!r}"
            )


def _given(value: Any) -> bool:
    """Whether a column says anything; TRL reads its value from JSON, too."""
    if isinstance(value, str):
        try:
            return bool(json.loads(value))
        except (ValueError, RecursionError):
            pass
    return bool(value)


def nested_messages(text: str) -> list[Any] | None:
    """Returns the list of messages in a JSON string; None for ordinary text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    # A question may begin with a bracket, or be a list of numbers: that is text.
    looks_like_chat = (
        isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "role" in v for v in value)
    )
    return value if looks_like_chat else None
