"""TorchEngine: generates completions with any Hugging Face causal language model, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...errors import EngineError
from ...models.backend import Backend
from ...models.decodable import refusal, undecodable
from ...models.verified import say
from ...types import Sampling, Span, Turn
from ..chat import Renderer
from ..endings import Endings, facts_of
from ..engine import Capabilities, Finished, Lost, Request, context_ids
from .choice import choose
from .decode import Completion, Schedule
from .decoder import Decoding

MORE_PASSES = 8
"""Passes of the model in one poll after the first completions have ended. Each poll has a price of its own: under
autocast all weights are cast anew, a fifth of the time where every poll ends with the first completion. The caller
scores completions while others are decoded, so it must not wait for long either."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Queued:
    """A request waiting for a schedule; consecutive requests of one prompt share the array (P,) of its tokens."""

    request: Request
    prompt_ids: np.ndarray

    @property
    def longest(self) -> int:
        """The most tokens before an answer, of this turn or of a later one."""
        return max(len(self.prompt_ids), self.request.earlier.longest if self.request.earlier else 0)


class TorchEngine:
    """Generates with ``model`` in place: without a second copy of the weights, so updates take effect at once.

    ``batch``: maximum number of completions decoded at once (it affects memory and speed, and results only by float
    rounding). ``autocast``: the type to compute in, such as bfloat16; None = the type of the weights. Log-probabilities
    are always float32. ``backend``: may decode instead of the model's own forward pass. It is compared with that pass
    whenever decoding begins; after the first mismatch it is ``refused`` for good. ``messages`` collects warnings.

    A completion ends with the first stop token, which it includes, with the token that completes a stop string, or at
    ``sampling.max_tokens``. Consecutive requests of one prompt share its prefill. New requests join running ones if
    their sampling settings agree and their prompts fit; otherwise they, and all requests behind them, wait until the
    running ones finish. The weights must not change meanwhile: a backend packs them when decoding begins.
    """

    capabilities = Capabilities(reproducible=True, entropies=True, untruncated_logprobs=True, in_flight_updates=False)

    def __init__(
        self,
        model: Any,
        renderer: Renderer,
        *,
        batch: int = 128,
        autocast: torch.dtype | None = None,
        backend: Backend | None = None,
    ) -> None:
        if batch < 1:
            raise EngineError(f"batch: got {batch}, accepts a whole number of at least 1")
        if why := undecodable(type(model), model.config):
            raise EngineError(refusal(type(model).__name__, why))
        self.model = model
        self.renderer = renderer
        self.batch = batch
        self.autocast = autocast
        self.backend = backend
        self.refused = False
        self.messages: list[str] = []
        self._version = 0
        self._unfinished: set[str] = set()
        self._queue: list[_Queued] = []
        self._schedule: Schedule | None = None
        self._longest = 0  # longest prompt, in tokens, that the schedule's decoder has room for
        self._endings = Endings(frozenset(), ())  # of the schedule's rows
        self._held = contextlib.ExitStack()  # what the schedule's decoder holds: packed weights, leased memory

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version and self._unfinished:
            raise EngineError(
                f"version: got {version} while {len(self._unfinished)} requests of version {self._version} are "
                "unfinished, whose tokens would be of both; poll until they are finished, or cancel them"
            )
        if version != self._version:
            self._end()  # what it holds for later turns was computed with the weights of before
        self._version = version

    def state(self) -> dict[str, Any]:
        return {"refused": self.refused, "version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores what :meth:`state` returned. A refused backend stays refused: if a resumed run tried it again, its
        tokens could differ from those of an uninterrupted run."""
        self.version = int(state["version"])
        self.refused = bool(state.get("refused", False))  # not of an engine of another kind

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def stop_ids(self) -> frozenset[int]:
        """The renderer's end tokens and those of the model's own generation configuration."""
        return self.renderer.stop_ids | facts_of(self.model).ends

    # ---- the protocol

    def submit(self, requests: Sequence[Request]) -> None:
        taken: set[str] = set()
        for request in requests:
            if request.id in self._unfinished or request.id in taken:
                raise EngineError(f"request {request.id!r}: another one with this id is unfinished; ids must differ")
            taken.add(request.id)
        # Everything is checked before the engine's state changes: a refused call must leave nothing behind.
        queued: list[_Queued] = []
        facts = facts_of(self.model)
        for _, side_by_side in itertools.groupby(requests, key=_context_of):
            same = list(side_by_side)
            array = context_ids(same[0], self.renderer)
            most = max(request.sampling.max_tokens for request in same)
            facts.check(same[0].prompt, array, most, in_episode=same[0].earlier is not None)
            queued += [_Queued(request, array) for request in same]
        self._queue += queued
        self._unfinished |= taken

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        if not self._unfinished:
            return []
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            # Around all passes of the poll: autocast casts the weights once while it lasts.
            with _generating(self.model, self.autocast):
                schedule = self._filled()
                with schedule.decoder.active():
                    ended = schedule.advance()  # one pass in any case, so that poll(0) makes progress
                    # Counts passes after the first completion that has ended.
                    more = MORE_PASSES
                    while schedule.unfinished and (more or not ended) and time.monotonic() < until:
                        more -= bool(ended)
                        ended += schedule.advance()
                reports = [Finished.of(done.request.id, self._turn(done)) for done in ended]
            self._unfinished -= {report.id for report in reports}
            self._end_idle()
        except BaseException:  # an interrupt too: a schedule cut off within a pass is not consistent
            self._queue, self._unfinished = [], set()
            self._end()
            raise
        return list(reports)

    def cancel(self, ids: Sequence[str]) -> None:
        gone = set(ids)
        self._unfinished -= gone
        self._queue = [queued for queued in self._queue if queued.request.id not in gone]
        if self._schedule is not None:
            self._schedule.cancel(gone)
            self._end_idle()

    def drawn(self, id: str) -> list[int]:
        """The tokens of an unfinished request so far, for those who want to see them before it is finished."""
        return [] if self._schedule is None else self._schedule.drawn(id)

    # ---- the schedule

    def _filled(self) -> Schedule:
        """Returns the schedule, or a new one, after adding all requests from the queue that may join it."""
        # What is unfinished and not in the schedule is in the queue, which therefore has a first request.
        if self._schedule is not None and not self._schedule.unfinished and not self._fits(self._queue[0]):
            self._end()  # it only holds what was computed for other episodes
        schedule = self._schedule or self._begin()
        # A schedule with few slots takes only as many as it has slots for: the rest decode faster together, in the next
        # schedule, which gets more slots.
        room = len(self._queue) if schedule.slots == self.batch else schedule.slots - schedule.unfinished
        # takewhile, not filter: requests never overtake each other, so none can starve.
        joining = list(itertools.takewhile(self._fits, self._queue[:room]))
        del self._queue[: len(joining)]
        if joining:
            schedule.add(list(_by_prompt(joining)))
        return schedule

    def _fits(self, queued: _Queued) -> bool:
        assert self._schedule is not None
        alike = _drawn_alike(queued.request.sampling, self._schedule.sampling)
        return alike and queued.longest <= self._longest

    def _begin(self) -> Schedule:
        """Makes an empty schedule for the requests at the queue's front that share sampling settings."""
        sampling = self._queue[0].request.sampling
        first = list(itertools.takewhile(lambda queued: _drawn_alike(queued.request.sampling, sampling), self._queue))
        longest = max((queued.prompt_ids for queued in first), key=len)
        self._endings = Endings.of(self.renderer, sampling, ids=self.stop_ids)
        self._longest = max(queued.longest for queued in first)
        # Other episodes will join: their environments only have not answered yet.
        beside = max(queued.request.earlier.beside if queued.request.earlier else 0 for queued in first)
        work = Decoding(
            slots=min(self.batch, max(len(first), beside)), longest_prompt=self._longest,
            max_tokens=sampling.max_tokens, autocast=self.autocast, tell=lambda text: say(self.messages, text),
        )  # fmt: skip
        # Packed weights and memory live in _held until _end().
        decoder, refused = choose(
            self._held, self.model, None if self.refused else self.backend, work, probe=longest.tolist(),
            messages=self.messages,
        )  # fmt: skip
        self.refused |= refused
        self._schedule = Schedule(
            decoder, sampling=sampling, slots=work.slots, stop_ids=self._endings.ids,
            stop_strings=self._endings.strings, decode=self.renderer.decode, device=self.device,
        )  # fmt: skip
        return self._schedule

    def _end_idle(self) -> None:
        """Ends a schedule that generates nothing, and holds nothing for later turns."""
        if self._schedule is not None and not self._schedule.unfinished and not self._schedule.held:
            self._end()

    def _end(self) -> None:
        """Frees the schedule and its decoder's memory, which the learner needs."""
        self._schedule = None
        self._held.close()

    def _turn(self, done: Completion) -> Turn:
        ids = done.token_ids.tolist()
        text, reason = self._endings.read(ids, self.renderer.decode)
        return Turn(
            context_ids=done.prompt_ids,
            token_ids=done.token_ids,
            logprobs=done.logprobs,
            policy_logprobs=done.policy_logprobs,
            entropies=done.entropies,
            versions=(Span(self.version, 0, len(ids)),),
            text=text,
            finish_reason=reason,
        )


def _context_of(request: Request) -> tuple[int, int]:
    """Equal for requests that certainly have the same context."""
    return id(request.prompt), id(request.earlier)


def _drawn_alike(a: Sampling, b: Sampling) -> bool:
    """Whether rows of both can be drawn in one pass. Each row has its own key, so seeds may differ."""
    return a is b or dataclasses.replace(a, seed=0) == dataclasses.replace(b, seed=0)


def _by_prompt(queue: Iterable[_Queued]) -> Iterator[tuple[np.ndarray, list[Request]]]:
    """Groups consecutive requests of one prompt; yields the prompt's tokens with each group."""
    # By identity of the array: submit() gave consecutive requests of one prompt the same one.
    for _, side_by_side in itertools.groupby(queue, key=lambda queued: id(queued.prompt_ids)):
        same = list(side_by_side)
        yield same[0].prompt_ids, [queued.request for queued in same]


@contextlib.contextmanager
def _generating(model: Any, autocast: torch.dtype | None) -> Iterator[None]:
    """Disables gradients, sets eval mode and precision; restores every module's own mode afterwards.

    Uses no_grad, not inference_mode: models that cache tensors in a forward pass (rotary tables that grow with the
    longest input) would cache inference tensors, which fail in the next training pass.
    """
    training = [module for module in model.modules() if module.training]
    device = next(model.parameters()).device
    cast = torch.autocast(device.type, dtype=autocast) if autocast is not None else contextlib.nullcontext()
    try:
        for module in training:  # not model.eval(), which would write to every module in every poll
            module.training = False
        with torch.no_grad(), cast:
            yield
    finally:
        for module in training:
            module.training = True
