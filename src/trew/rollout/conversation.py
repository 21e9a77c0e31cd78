"""``Conversation``: a chat with the embedded engine. What was sampled stays as it is, token by token.

A later question is put behind the tokens of the conversation by a bridge (:mod:`.bridge`), so the engine finds again
what it has computed for them, and computes only what is new.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..errors import ConfigError
from ..types import FinishReason, Message, Prompt, Sampling
from .bridge import Bridges
from .endings import Endings, facts_of
from .engine import Earlier, Finished, Request
from .torch_engine import TorchEngine

UID = "chat"
"""The uid of every conversation's prompt: with seed, conversation and position it determines every draw."""
PASS_S = 0.03
"""Seconds of generation between two looks at what was drawn. Each look has a price (autocast casts all weights anew),
and nobody sees text that appears faster."""
ROOM = 4096
"""Tokens that are planned for at first. A conversation that grows beyond gets twice as many, and is computed again."""

_HI = ({"role": "user", "content": "hi"},)


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer so far, or a whole one. ``reason`` is empty while it grows; "abort" means that it was stopped."""

    text: str
    tokens: int = 0
    reason: FinishReason | str = ""


class Conversation:
    """A conversation with the model of ``engine``, which has no other requests.

    ``number`` counts the conversations of one session: equal questions get other draws in the next one. ``system`` is
    the system message; empty for none. Raises ConfigError if the tokenizer cannot render a chat.
    """

    def __init__(self, engine: TorchEngine, *, system: str = "", number: int = 0) -> None:
        self.engine, self.system, self.number = engine, system, number
        self.bridges = Bridges(engine.renderer, ends=engine.stop_ids)
        self.messages: list[Message] = []  # all that was said, without the system message
        self.escaped = 0  # special tokens in what was said to the model, which were made plain text
        self.ids = np.zeros(0, np.int64)  # the whole conversation
        self._opening = 0  # tokens of ids that are the first prompt
        self._ended_by: int | None = None
        self._room = ROOM
        if not engine.renderer.tokenizer.chat_template:
            raise ConfigError(
                "the tokenizer has no chat template; give --chat-template plain (contents joined by newlines) or a "
                ".jinja file, or use an instruct model"
            )
        # Stripped: most templates trim contents.
        if system.strip() and system.strip() not in engine.renderer.apply([*self._system(), *_HI]):
            raise ConfigError("the chat template drops the system message; leave it out, or give another template")
        problems = self.bridges.check(_HI)
        self.note = "" if not problems else f"each turn is rendered anew: {problems[0].removeprefix('environment: ')}"

    def ask(self, question: str, sampling: Sampling) -> Iterator[Answer]:
        """Asks the model; yields the answer as it grows, and last the whole one. A caller that closes the iterator
        stops the answer: what was drawn until then is part of the conversation.

        Raises ConfigError, and changes nothing, if the question does not fit into the model any more.
        """
        # ---- what may raise comes first: a question that does not fit changes nothing
        safe = self.bridges.harmless([{"role": "user", "content": question}])
        context, opening = self._context(safe.messages[0])
        sampling = self._fitting(sampling, len(context))
        request = self._request(context, opening, sampling)
        # Put back if nothing is answered.
        before = self.ids, self._opening, self._ended_by
        # ---- the question is part of the conversation from here on, and taken back if nothing is answered
        self.messages.append(safe.messages[0])
        self.ids, self._opening, self._ended_by = context, opening, None
        self.escaped += safe.escaped
        drawn: list[int] = []
        done = None
        try:
            self.engine.submit([request])
            while done is None:
                done = next((r.turn for r in self.engine.poll(PASS_S) if isinstance(r, Finished)), None)
                drawn = done.token_ids.tolist() if done else self.engine.drawn(request.id) or drawn
                if done is None:
                    yield self._so_far(drawn, sampling)
            self._take(drawn, done.text)
            yield Answer(done.text, len(drawn), done.finish_reason)
        finally:
            if done is None:  # closed, or an error
                self.engine.cancel([request.id])
                if drawn:
                    self._take(drawn, self._so_far(drawn, sampling, whole=True).text)
                else:  # nothing was answered: the question may be asked again
                    self.messages.pop()
                    self.ids, self._opening, self._ended_by = before

    def close(self) -> None:
        """Frees what the engine holds for this conversation."""
        self.engine.cancel([self._id])

    @property
    def _id(self) -> str:
        return f"{UID}-{self.number}"

    def _request(self, context: np.ndarray, opening: int, sampling: Sampling) -> Request:
        # Doubled, so that the plan changes seldom: each change computes the conversation again.
        while len(context) + sampling.max_tokens > self._room:
            self._room *= 2
        # What a later turn may grow to, for which the engine plans room now.
        longest = min(self._room, facts_of(self.engine.model).positions or self._room) - sampling.max_tokens
        earlier = Earlier(context, max(0, len(context) - opening), longest)
        return Request(self._id, Prompt(UID, text=""), self.number, sampling, earlier)

    def _system(self) -> tuple[Message, ...]:
        if not self.system:
            return ()
        return self.bridges.harmless([{"role": "system", "content": self.system}]).messages

    def _context(self, question: Message) -> tuple[np.ndarray, int]:
        """The tokens that the answer follows, and how many of them are the first prompt."""
        if not self.messages or self.note:
            ids = self.bridges.opening([*self._system(), *self.messages, question])
            return np.asarray(ids, np.int64), self._opening or len(ids)
        ids = self.ids
        bridge = self.bridges.bridge([question], ended_by=self._ended_by)
        if bridge is None:  # it ended its answer with another token than the template does, which takes its place
            ids, bridge = ids[:-1], self.bridges.bridge([question], ended_by=None)
        return np.concatenate([ids, np.asarray(bridge, np.int64)]), self._opening

    def _fitting(self, sampling: Sampling, context: int) -> Sampling:
        """The sampling, with fewer tokens where the model has no positions for more."""
        positions = facts_of(self.engine.model).positions
        left = sampling.max_tokens if positions is None else positions - context
        if left < 1:
            raise ConfigError(
                f"the conversation with this question has {context} tokens, and the model {positions} positions; begin "
                "a new one, or ask something shorter"
            )
        return replace(sampling, max_tokens=min(sampling.max_tokens, left))

    def _endings(self, sampling: Sampling) -> Endings:
        return Endings.of(self.engine.renderer, sampling, ids=self.engine.stop_ids)

    def _so_far(self, drawn: list[int], sampling: Sampling, *, whole: bool = False) -> Answer:
        endings = self._endings(sampling)
        text, _ = endings.read(drawn, self.engine.renderer.decode)
        return Answer(text if whole else certain(text, endings.strings), len(drawn), "abort" if whole else "")

    def _take(self, drawn: list[int], text: str) -> None:
        """Makes an answer part of the conversation."""
        self.messages.append({"role": "assistant", "content": text})
        self.ids = np.concatenate([self.ids, np.asarray(drawn, np.int64)])
        # None: a stop string or the limit ended it, and the bridge adds the template's end token.
        self._ended_by = drawn[-1] if drawn[-1] in self.bridges.renderer.stop_ids | self.engine.stop_ids else None


class Voice:
    """One who answers: a model with its current conversation. ``name`` is its role (before, after), ``label`` says
    which model it is."""

    def __init__(self, name: str, label: str, engine: TorchEngine, *, system: str) -> None:
        self.name, self.label, self.engine = name, label, engine
        self.conversation = Conversation(engine, system=system)

    def begin(self, *, system: str) -> None:
        """Begins a new conversation. Raises ConfigError, and keeps the old one, if the template refuses ``system``."""
        new = Conversation(self.engine, system=system, number=self.conversation.number + 1)
        self.conversation.close()
        self.conversation = new


def certain(text: str, stop: tuple[str, ...]) -> str:
    r"""The part of an unfinished text that later tokens cannot change: without the bytes of an unfinished character,
    and without what may become a stop string.

    >>> certain("caf\ufffd", ()), certain("a\n", ("\n\n",))
    ('caf', 'a')
    """
    text = text.rstrip("\ufffd")
    begun = [n for s in stop for n in range(1, len(s)) if text.endswith(s[:n])]
    return text[: len(text) - max(begun, default=0)]
