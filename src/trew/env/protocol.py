"""What an environment is: the types that its author writes and reads.

An environment is a Python generator, or a class with ``reset``, ``step`` and ``close``. Both talk to the policy in
text; tokens are the matter of :mod:`trew.rollout`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from ..types import FinishReason, Message

Reward: TypeAlias = "float | Mapping[str, float | None] | None"
"""What an episode returns, as the reward of its last reply: a number, None for none, or numbers by name, of which
``reward`` is the reward and the others are metrics. An episode in which no reply earned anything is not judged."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the policy may call. ``parameters`` is the JSON schema of its arguments, an object; ``returns``
    that of its result, where it has one."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] | None = field(default=None, compare=False, repr=False)
    returns: Mapping[str, Any] | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates expect it.

        >>> Tool("now", "The time.", {"type": "object", "properties": {}}).schema["function"]["name"]
        'now'
        """
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        if self.returns is not None:
            function["return"] = dict(self.returns)
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call in a reply. ``id`` tells apart the calls of one reply."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply of the policy, as text: special tokens and the stop string removed.

    ``calls`` are the tool calls in it, in their order. ``malformed`` says what is wrong with a call that cannot be
    read. ``turn`` counts the episode's replies from 0. A reply that was cut off (``length``) never reaches an
    environment: its episode ends.
    """

    text: str
    calls: tuple[Call, ...] = ()
    malformed: str | None = None
    turn: int = 0
    finish_reason: FinishReason = "stop"


@dataclass(frozen=True, slots=True)
class Say:
    """What an environment says: the ``messages`` that the policy reads next, and what its last reply earned.

    ``reward`` is of the last reply; None where it earned nothing by itself. ``done`` ends the episode. ``metrics`` are
    numbers to log. ``tools`` may come with the opening alone. ``state`` names the situation that the policy is in:
    objectives that compare replies in equal situations (GiGPO) read it; without it they take the observation's text.
    """

    messages: tuple[Message, ...] = ()
    reward: float | None = None
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    state: str | None = None

    @classmethod
    def of(cls, said: Observation) -> Say:
        """Returns what a generator yielded as a Say: text is one user message.

        >>> Say.of("higher").messages
        ({'role': 'user', 'content': 'higher'},)
        """
        if isinstance(said, Say):
            return said
        if isinstance(said, str):
            return cls(({"role": "user", "content": said},))
        if isinstance(said, Mapping):
            return cls((dict(said),))
        if not isinstance(said, list | tuple):
            raise TypeError(f"it said {said!r:.100}, which is no text, no message, no list of messages and no Say")
        return cls(tuple(dict(message) for message in said))


Observation: TypeAlias = "str | Message | list[Message] | tuple[Message, ...] | Say"
"""What a generator may yield."""

Episode: TypeAlias = Generator[Observation, Reply, Reward]
"""A generator environment: yields what the policy reads, receives its replies, and returns the last reply's reward."""


class Environment(Protocol):
    """An environment with state of its own. One instance plays one episode at a time."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Say:
        """Begins an episode on a row of the data. Equal rows and seeds give equal openings."""
        ...

    def step(self, reply: Reply) -> Say:
        """Takes a reply; a :class:`Say` that is ``done`` ends the episode."""
        ...

    def close(self) -> None:
        """Frees what the episode held. Called once, however the episode ended."""
        ...


class JudgesStopped(Environment, Protocol):
    """An environment that judges episodes which a budget has ended too: a reply that was cut off, turns, tokens."""

    def stopped(self) -> float | None:
        """What the episode earns on top of its turns' rewards. Nothing is said after that."""
        ...
