"""Bridges: the tokens between two replies of an episode, taken from one dummy exchange instead of the history.

Rendering a conversation again would tokenise the policy's own words differently, and many templates rewrite earlier
turns. So what was sampled stays as it is, and only what an environment says is rendered: behind a stand-in reply.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..env.protocol import Say
from ..env.tools import ToolFormat
from ..errors import DataError
from ..types import Message
from .chat import REPLY, Renderer

MARK = " ... [{} characters cut] ... "
"""Stands in an observation for what was cut out of its middle."""
_ASKED = {"role": "user", "content": "q"}
_OBSERVED = "trewobservation"
# With the stand-in among its arguments: templates such as Llama 3's write a call in the place of the content.
_CALL = {"type": "function", "id": "trewcall1", "function": {"name": "f", "arguments": {"x": REPLY}}}
_FIX = "set chat_template to a file that only appends, or use another instruct model"


@dataclass(frozen=True, slots=True)
class Cleaned:
    """Messages that are safe to render. ``escaped`` counts the special tokens that were made plain text, ``cut`` the
    messages that were too long."""

    messages: tuple[Message, ...]
    escaped: int = 0
    cut: int = 0


class Bridges:
    """Makes tokens of what an environment says. ``most``: tokens of an observation, 0 = without a limit. ``ends``: the
    model's own end tokens, in addition to the renderer's."""

    def __init__(self, renderer: Renderer, *, most: int = 0, ends: Iterable[int] = ()) -> None:
        self.renderer, self.most = renderer, most
        self._ends = renderer.stop_ids.union(ends)
        self._added: dict[str, int] = renderer.tokenizer.get_added_vocab()
        # The longest first, so that a token is not found inside another one. Whitespace forges nothing. The stand-in
        # for a reply is found again by its text.
        forgeable = sorted({REPLY, *(t for t in self._added if len(t) > 1 and t.strip())}, key=len, reverse=True)
        self._forged = re.compile("|".join(map(re.escape, forgeable)))

    # ---- tokens

    def opening(self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """The prompt of an episode: the messages with the generation prompt, and the tools that the template shows."""
        return self.renderer.tokens(self.renderer.apply(messages, tools=tools))

    def bridge(self, messages: Sequence[Message], *, ended_by: int | None) -> list[int] | None:
        """The tokens from a reply to the next one: the rest of the reply's end, the messages, the generation prompt.

        ``ended_by`` is the end token that the policy sampled last, which is not repeated; None if a stop string ended
        the reply, whose end token is then added unsampled. Returns None if the template ends a reply with another
        special token than the policy did: the next turn would follow tokens that no template writes.
        """
        text = self._behind_reply(messages)
        ids = self.between(text)
        if ended_by is None:
            return ids
        # Templates may write a line break before the end token, which this reply did without.
        behind = self.between(text.lstrip())
        if not behind or behind[0] not in self._ends:  # the template ends replies without an end token
            return ids
        return behind[1:] if behind[0] == ended_by else None

    def _behind_reply(self, messages: Sequence[Message]) -> str:
        """The text that the template writes between a reply and the next one."""
        if not any(message["role"] == "tool" for message in messages):
            return self._rendered({"role": "assistant", "content": REPLY}, messages)
        # Some templates want a call before its result, others refuse one. The call itself was sampled: only what
        # follows the end of its message is wanted.
        try:
            text = self._rendered({"role": "assistant", "content": REPLY, "tool_calls": [_CALL]}, messages)
        except DataError:
            return self._rendered({"role": "assistant", "content": REPLY}, messages)
        end = self.renderer.end_of_turn
        return text[text.index(end) :] if end and end in text else text

    def _rendered(self, reply: Message, messages: Sequence[Message], *, before: Sequence[Message] = (_ASKED,)) -> str:
        text = self.renderer.apply((*before, reply, *messages))
        # The last one: the stand-in reply comes last.
        return text[text.rindex(REPLY) + len(REPLY) :] if REPLY in text else text

    def between(self, text: str) -> list[int]:
        """Tokenises what stands between two replies, as it is tokenised behind a reply: at the beginning of a text,
        some tokenizers add a space."""
        encoded = self.renderer.tokenizer(REPLY + text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        first = next((i for i, (start, _) in enumerate(offsets) if start >= len(REPLY)), len(ids))
        if first and offsets[first - 1][1] > len(REPLY):  # a token across the border: the border is ours
            return self.renderer.tokens(text)
        return list(ids[first:])

    # ---- text

    def harmless(self, messages: Sequence[Message]) -> Cleaned:
        """Makes messages safe to render: text that would become a special token gets a space behind its first
        character. So do a tool's name and other texts: templates write them, and the policy says what it calls."""
        counted: list[int] = []
        found = [
            {key: value if key == "role" else self._harmless(value, counted) for key, value in message.items()}
            for message in messages
        ]
        return Cleaned(tuple(found), sum(counted))

    def cleaned(self, messages: Sequence[Message]) -> Cleaned:
        """Makes an observation safe to render, and cuts what is longer than it may be in the middle."""
        safe = self.harmless(messages)
        # All messages of an observation share its limit: the shortest take what they need, the others the rest alike.
        texts = {at: message["content"] for at, message in enumerate(safe.messages)}
        left, cut = self.most, 0
        for done, at in enumerate(sorted(texts, key=lambda at: len(texts[at]))):
            texts[at], was_cut = self._shortened(texts[at], left // (len(texts) - done))
            left -= self._count(texts[at]) if self.most else 0
            cut += was_cut
        found = tuple({**message, "content": texts[at]} for at, message in enumerate(safe.messages))
        return Cleaned(found, safe.escaped, cut)

    def _harmless(self, value: Any, counted: list[int]) -> Any:
        """A text, or all texts in lists and dictionaries; adds to ``counted`` how often there was something."""
        if isinstance(value, Mapping):
            return {key: self._harmless(one, counted) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._harmless(one, counted) for one in value]
        if not isinstance(value, str):
            return value
        # A lone surrogate is no character of any text, and tokenizers refuse it.
        sound = value.encode("utf-8", "replace").decode("utf-8")
        text, times = self._forged.subn(lambda match: f"{match[0][0]} {match[0][1:]}", sound)
        counted.append(times)
        return text

    def _shortened(self, text: str, most: int) -> tuple[str, bool]:
        """Cuts the middle out of a text of more than ``most`` tokens."""
        # No token is longer than 16 characters on average over a long text; a long text is not tokenised whole.
        room = 16 * most
        if not self.most or (len(text) <= room and self._count(text) <= most):
            return text, False
        keep = min(len(text), room)
        while True:
            head, tail = text[: keep - keep // 2], text[len(text) - keep // 2 :]
            short = head + MARK.format(len(text) - keep) + tail
            count = self._count(short)
            # In proportion, and by at least one character, so that it ends.
            if count <= most or not keep:
                return short, True
            keep = min(keep - 1, keep * most // count)

    def _count(self, text: str) -> int:
        return len(self.renderer.tokens(text))

    # ---- checks

    def check(self, opening: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = ()) -> list[str]:
        """Finds why this template cannot carry an episode that begins with ``opening``; one line per problem."""
        if not self.renderer.tokenizer.chat_template:
            return [
                "environment: an episode is a chat, but the tokenizer has no chat template; set chat_template = "
                "'plain' (contents joined by newlines) or a .jinja file, or use an instruct model"
            ]
        try:
            return [*self._bridge_problems(), *self._tool_problems(opening, tools)]
        except DataError as error:
            return [f"environment: an episode needs several turns: {error}; {_FIX}"]

    def _bridge_problems(self) -> list[str]:
        # One observation behind three histories: what follows a reply must not depend on what came before it.
        says: list[Message] = [{"role": "user", "content": _OBSERVED}]
        reply = {"role": "assistant", "content": REPLY}
        after_one = self._rendered(reply, says)
        longer = (_ASKED, {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"})
        thought = {"role": "assistant", "content": f"<think>\nt\n</think>\n\n{REPLY}"}
        if after_one != self._rendered(reply, says, before=longer):
            return [
                "environment: the chat template writes what follows a reply differently in longer conversations, so "
                f"that no tokens between two turns are right; {_FIX}"
            ]
        problems = []
        if _OBSERVED not in after_one:
            problems.append(f"environment: the chat template does not show what follows a reply; {_FIX}")
        if after_one != self._rendered(thought, says):
            problems.append(
                f"environment: the chat template writes what follows a reply differently after <think>; {_FIX}"
            )
        return problems

    def _tool_problems(self, opening: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[str]:
        """Whether the template shows tools and their results."""
        if not tools:
            return []
        text = self.renderer.apply(opening, tools=tools)
        plain = "; set environment.tools_format = 'plain', which describes tools in words"
        if text == self.renderer.apply(opening) or not all(tool["function"]["name"] in text for tool in tools):
            return [f"environment.tools: the chat template ignores tools{plain}"]
        result = {"role": "tool", "name": "f", "tool_call_id": _CALL["id"], "content": _OBSERVED}
        try:
            shown = _OBSERVED in self._behind_reply([result])
        except DataError:
            shown = False
        return [] if shown else [f"environment.tools: the chat template does not show the results of tools{plain}"]


def as_shown(opening: Say, format: ToolFormat | None) -> tuple[Sequence[Message], list[Mapping[str, Any]]]:
    """The messages of an opening, and the schemas of its tools that the template shows; tools that it does not show are
    described in the messages. ``format``: None where an episode has no tools."""
    if format is None:
        return opening.messages, [tool.schema for tool in opening.tools]
    return format.opening(opening.messages, opening.tools), [t.schema for t in opening.tools if format.shown]
