"""What goes into an engine and what comes out of it: requests, and the reports on them."""

from __future__ import annotations

from dataclasses import dataclass, field

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
class Request:
    """A rollout to generate: sample number ``sample`` of ``prompt``. Draws depend on (sampling.seed, prompt.uid,
    sample, position); the caller chooses ``id``, which must differ from the id of every unfinished request.

    With ``earlier``, a turn of an episode: its tokens are the context instead of the prompt's, and positions count from
    the first token behind the prompt. All turns of an episode have one id, by which an engine may find again what it
    has computed for the turn before; :meth:`.Engine.cancel` frees that.

    ``first``: somebody waits for it, so that it goes before what else waits in an engine's queue."""

    id: str
    prompt: Prompt
    sample: int
    sampling: Sampling
    earlier: Earlier | None = field(default=None, compare=False)
    first: bool = field(default=False, compare=False)


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
