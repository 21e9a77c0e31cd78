"""``Engine``: generates without blocking the caller: requests go in, rollouts come out as they finish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from .requests import Earlier, Finished, Lost, Request, context_ids

__all__ = ["Capabilities", "Earlier", "Engine", "Finished", "Lost", "Request", "context_ids"]


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
