"""Parses rows of preference pairs: a prompt with a better and a worse answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..types import Message
from .messages import parse_answer, parse_prompt, refuse_what_changes_the_text
from .rows import BadRow, show

COLUMNS = ("prompt", "chosen", "rejected")


def parse_pair(columns: Mapping[str, Any]) -> tuple[str | tuple[Message, ...], str, str]:
    """Prompt, chosen and rejected of a row. ``prompt`` is text or a list of messages, ``chosen`` and ``rejected`` are
    text, or the assistant's message in a list. Without ``prompt``, chosen and rejected are whole conversations that
    differ in the last turn only; beside such, ``prompt`` may repeat the question before that turn. Raises BadRow with
    what is wrong."""
    refuse_what_changes_the_text(columns)
    for name in COLUMNS[1:]:
        if columns.get(name) is None:
            have = ", ".join(columns) or "none"
            raise BadRow(f"has no {name!r}; a preference pair has prompt, chosen and rejected; columns: {have}")
    chosen, before = _answer(columns["chosen"], "chosen")
    rejected, also = _answer(columns["rejected"], "rejected")
    prompt = _shared_prompt(columns.get("prompt"), before, also)
    if chosen == rejected:
        raise BadRow(f"chosen and rejected are equal ({show(chosen)}); such a pair says nothing")
    return prompt, chosen, rejected


def _shared_prompt(given: Any, before: tuple[dict[str, Any], ...], also: tuple[dict[str, Any], ...]) -> Any:
    """The prompt of both answers: the column's, or the turns that both conversations begin with."""
    if given is not None:
        prompt = parse_prompt(given, "prompt")
        # The question as text beside whole conversations, as in UltraFeedback: the conversations say how it was asked.
        if isinstance(prompt, str) and before and before == also and _asks(before[-1], prompt):
            return parse_prompt(list(before), "chosen")
        asked = () if isinstance(prompt, str) else tuple(map(dict, prompt))
        if (before and before != asked) or (also and also != asked):
            raise BadRow("chosen or rejected holds another conversation than the prompt; give the answers alone")
        return prompt
    if before and before == also:
        return parse_prompt(list(before), "chosen")
    raise BadRow("has no 'prompt', and chosen and rejected are not conversations that differ in their last turn alone")


def _asks(turn: Mapping[str, Any], question: str) -> bool:
    content = turn.get("content")
    return turn.get("role") == "user" and isinstance(content, str) and content.strip() == question.strip()


def _answer(value: Any, name: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """The answer's text, and the turns before it if the value is a conversation."""
    if isinstance(value, str):
        return value, ()
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(turn, Mapping) for turn in value):
        raise BadRow(f"column {name!r} must be text or a list of messages, got {show(value)}")
    before = ({k: v for k, v in turn.items() if v is not None} for turn in value[:-1])
    return parse_answer(value[-1], f"{name}[{len(value) - 1}]"), tuple(before)
