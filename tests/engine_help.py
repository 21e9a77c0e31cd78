"""An engine without a model, for tests of what engines promise and of those who use them."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trew.errors import EngineError
from trew.rollout.engine import Capabilities, Finished, Lost, Request
from trew.types import Span, Turn


class ScriptedEngine:
    """Answers by arithmetic. The text is the sample's number modulo 2 after ``#### ``, or what ``text_of`` says.

    In every pass each of the first ``batch`` requests gets a token, until it has as many as its seed, prompt and sample
    say. Requests that ``loses`` are lost when they would be finished; ``failure`` is raised by the next poll.
    """

    def __init__(
        self,
        *,
        batch: int = 4,
        in_flight_updates: bool = True,
        text_of: Callable[[Request], str] = lambda request: f"#### {request.sample % 2}",
        loses: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.capabilities = Capabilities(
            reproducible=True, entropies=False, untruncated_logprobs=False, in_flight_updates=in_flight_updates
        )
        self.batch, self.text_of, self.loses = batch, text_of, loses
        self.failure: BaseException | None = None
        self.submitted: list[Request] = []  # all of them, ever
        self._version = 0
        self._open: dict[str, tuple[Request, list[int]]] = {}  # by id, with the version of each token so far

    @property
    def version(self) -> int:
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        if version != self._version and self._open and not self.capabilities.in_flight_updates:
            raise EngineError(f"version: got {version} while requests are unfinished")
        self._version = version

    def submit(self, requests: Sequence[Request]) -> None:
        ids = [request.id for request in requests]
        for request in requests:
            if request.id in self._open or ids.count(request.id) > 1:
                raise EngineError(f"request {request.id!r}: another one with this id is unfinished")
            if request.sampling.max_tokens < 1:
                raise EngineError(f"prompt {request.prompt.uid!r}: max_tokens must be at least 1")
        self.submitted += requests
        self._open |= {request.id: (request, []) for request in requests}

    def poll(self, timeout_s: float | None = None) -> list[Finished | Lost]:
        if self.failure is not None:
            failure, self.failure, self._open = self.failure, None, {}
            raise failure
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        reports: list[Finished | Lost] = []
        while self._open and not reports:
            reports = self._advance()
            if time.monotonic() >= until:
                break
        return reports

    def cancel(self, ids: Sequence[str]) -> None:
        for each in ids:
            self._open.pop(each, None)

    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])

    def _advance(self) -> list[Finished | Lost]:
        reports: list[Finished | Lost] = []
        for request, versions in list(self._open.values())[: self.batch]:
            versions.append(self.version)
            if len(versions) == self._length(request):
                del self._open[request.id]
                lost = self.loses(request)
                reports.append(Lost(request.id, "its server died") if lost else self._finished(request, versions))
        return reports

    def _key(self, request: Request) -> int:
        return zlib.crc32(f"{request.sampling.seed} {request.sample} {request.prompt.uid}".encode())

    def _length(self, request: Request) -> int:
        most = request.sampling.max_tokens
        return min(1 + self._key(request) % (2 * most), most)

    def _finished(self, request: Request, versions: list[int]) -> Finished:
        count = len(versions)
        changes = [i for i in range(count) if not i or versions[i] != versions[i - 1]]
        spans = [Span(versions[a], a, b) for a, b in zip(changes, [*changes[1:], count], strict=True)]
        tokens = (self._key(request) + np.arange(count)) % 97
        turn = Turn(
            np.array([1, 2]), tokens, np.full(count, -1.0, np.float32), None, None, tuple(spans),
            self.text_of(request), "length" if count == request.sampling.max_tokens else "stop",
        )  # fmt: skip
        return Finished.of(request.id, turn)
