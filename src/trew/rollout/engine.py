"""``Engine``: generates without blocking the caller: requests go in, rollouts come out as they finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..types import Prompt, Rollout, Sampling, Turn
from .chat import Renderer


@dataclass(frozen=True, slots=True)
class Earlier:
    """What precedes a turn of an episode. ``ids``: the whole context, of which the last ``begin`` tokens follow the
    prompt. ``longest``: the most tokens that the context of a later turn may have; 0 if none follows. ``beside``:
    how many episodes are played at the same time."""

    ids: np.ndarray
    begin: int = 0
    longest: int = 0
    beside: int = 1


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
    """A rollout to generate: sample number ``sample`` of ``prompt``. Draws depend on (sampling.seed, prompt.uid,
    sample, position); the caller chooses ``id``, which must differ from the id of every unfinished request.

    With ``earlier``, a turn of an episode: its tokens are the context instead of the prompt's, and positions count from
    the first token behind the prompt. All turns of an episode have one id, by which an engine may find again what it
    has computed for the turn before; :meth:`Engine.cancel` frees that."""

    id: str
    prompt: Prompt
    sample: int
    sampling: Sampling
    earlier: Earlier | None = field(default=None, compare=False)


def context_ids(request: Request, renderer: Renderer) -> np.ndarray:
    """The tokens (C,) int64 that a request's answer follows."""
    if request.earlier is not None:
        return request.earlier.ids
    return np.asarray(renderer.encode(request.prompt), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Finished:
    """What was generated for a request: a rollout of a single turn, whose ``finish_reason`` is never "abort", or from
    :class:`~.episodes.Episodes` a whole episode."""

    id: str
    rollout: Rollout

    @staticmethod
    def of(id: str, turn: Turn) -> Finished:
        """A request that is answered by one turn."""
        return Finished(id, Rollout((turn,), status="truncated" if turn.finish_reason == "length" else "finished"))

    @property
    def turn(self) -> Turn:
        """The last turn."""
        return self.rollout.turns[-1]


@dataclass(frozen=True, slots=True)
class Lost:
    """A request that the engine could not finish (a crash, a timeout). The request is valid: submit it again."""

    id: str
    reason: str


class Engine(Protocol):
    """Generates with the policy's weights, for one thread at a time. Reports every submitted request exactly once, in
    some :meth:`poll`, unless it is cancelled or poll raises."""

    capabilities: Capabilities

    @property
    def version(self) -> int:
        """The version of the weights; turns record it."""
        ...

    @version.setter
    def version(self, version: int) -> None:
        """Sets it. Without ``in_flight_updates``, raises EngineError for a new one while requests are unfinished."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests, in this order, and returns without generating. Raises EngineError, and queues none of them,
        if one is invalid or its id belongs to an unfinished request."""
        ...

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        """Returns what finished or was lost since the last call. Waits for at least one report, up to ``timeout_s``
        seconds (None = no limit); returns [] at once if no request is unfinished. An embedded engine generates in
        here: at least one pass of the model. Raises NumericsError when the model's output is not finite. After any
        exception the engine is empty and usable: all unfinished requests are dropped."""
        ...

    def cancel(self, ids: Sequence[str]) -> None:
        """Drops requests: no later :meth:`poll` reports them, and their ids are free. Ignores unknown ids."""
        ...

    def state(self) -> dict[str, Any]:
        """What later turns depend on apart from the weights, as JSON: with ``version``, without unfinished requests."""
        ...

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned."""
        ...
