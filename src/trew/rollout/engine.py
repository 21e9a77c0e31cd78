"""``Engine``: whatever generates turns, asked without waiting: requests go in, turns come out as they are finished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..types import Prompt, Sampling, Turn


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine promises. ``reproducible``: equal requests get equal turns from equal weights, up to rounding,
    whatever else is generated meanwhile. ``entropies``, ``untruncated_logprobs``: turns have ``entropies`` and
    ``policy_logprobs``. ``in_flight_updates``: the weights may change while requests are unfinished; their turns then
    have a span per version."""

    reproducible: bool
    entropies: bool
    untruncated_logprobs: bool
    in_flight_updates: bool


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to generate: sample number ``sample`` of ``prompt``. Draws depend on (sampling.seed, prompt.uid, sample,
    position); ``id`` is the caller's, and unlike those of all unfinished requests."""

    id: str
    prompt: Prompt
    sample: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Finished:
    """The turn that a request asked for; its ``finish_reason`` is never "abort"."""

    id: str
    turn: Turn


@dataclass(frozen=True, slots=True)
class Lost:
    """A request that will not be finished, through no fault of its own: it may be submitted again."""

    id: str
    reason: str


class Engine(Protocol):
    """Generates with the policy's weights, for one thread at a time. Reports every submitted request exactly once, in
    some :meth:`poll`, unless it is cancelled or poll raises."""

    capabilities: Capabilities

    @property
    def version(self) -> int:
        """Of the weights; turns record it."""
        ...

    @version.setter
    def version(self, version: int) -> None:
        """Without ``in_flight_updates``, raises EngineError for another version while requests are unfinished."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests, in this order, and returns without generating. Raises EngineError, and takes none of them,
        where one cannot be generated for or its id is that of an unfinished request."""
        ...

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        """What was finished or lost since the last call. Waits for something, at most ``timeout_s`` seconds (None = as
        long as it takes); returns [] at once where no request is unfinished. An embedded engine generates in here: at
        least one pass of the model. Raises NumericsError when the model's output is not finite. After any exception
        the engine is empty, and usable: all unfinished requests are gone."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Gives up requests: no later :meth:`poll` reports them, and their ids are free. Ignores ids of none."""
        ...

    def state(self) -> dict[str, Any]:
        """What later turns depend on beside the weights, ``version`` included and unfinished requests not, as JSON."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state` was taken."""
        ...
