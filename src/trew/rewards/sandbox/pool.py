"""Jobs for the sandbox, and the pool of small processes that run them, one job at a time each."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..isolation.frames import Lost
from ..isolation.pool import Pool, processors
from ..isolation.worker import START_S, Worker
from .host.boxes import Design


@dataclass(frozen=True, slots=True)
class Limits:
    """What one program may use. ``seconds`` are of CPU, of all its processes together, and of sleep; ``memory`` is in
    bytes (address space of each process, resident memory of all of them); the rest is counted in bytes too.

    A clock of the wall stands behind them, generous because a loaded machine must not make a program wrong.
    """

    seconds: float = 5.0
    memory: int = 512 << 20
    processes: int = 64
    file: int = 16 << 20
    output: int = 4 << 20
    answers: int = 8 << 20

    @property
    def wall(self) -> float:
        return 15.0 + 6 * self.seconds


@dataclass(frozen=True, slots=True)
class Job:
    """``script`` runs a program with an input; ``calls`` imports it and makes the given calls of ``entry``; ``tests``
    has the calls made by asserts that run in a box of their own. ``parts`` are what ``host.supervisor`` expects."""

    mode: Literal["script", "calls", "tests"]
    parts: tuple[bytes, ...]
    limits: Limits = Limits()
    entry: str = "-"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: ``exit`` with a status, ``limit`` of its own that it ran into, or ``failed`` (ours; ``why``).

    ``clock`` says that the limit was the clock of the wall; ``parts`` are the bytes that came back, ``judge`` how the
    box with the asserts ended.
    """

    ended: Literal["exit", "limit", "running", "failed"]
    why: str
    status: int | None = None
    parts: tuple[bytes, ...] = ()
    cpu: float = 0.0
    peak: int = 0
    seconds: float = 0.0
    judge: dict[str, Any] | None = None

    @property
    def clock(self) -> bool:
        return self.why.startswith("clock: ")


class _NotReady(Exception):
    """The boundary cannot be set up here; another try would end alike."""


class SandboxPool(Pool[Job, Outcome]):
    """Supervisors for one boundary; as many as there are processors.

    Every job is run in a fresh sandbox. A job whose supervisor dies twice has the outcome ``failed``.
    """

    def __init__(self, design: Design, *, size: int | None = None):
        super().__init__(size=size or processors())
        self.design = design

    def start(self) -> Worker:
        # -I and -S: what runs beside untrusted programs takes nothing from the environment or from site-packages.
        design = {"design": asdict(self.design)}
        return Worker("trew_worker.sandbox.host.supervisor", design, flags=("-I", "-S"), folder="/")

    def greet(self, worker: Worker) -> None:
        [said] = worker.channel.receive(deadline=time.monotonic() + START_S)
        ready = json.loads(said)
        if not ready["ready"]:
            raise _NotReady(ready["why"])

    def ask(self, worker: Worker, request: Job) -> Outcome:
        limits = request.limits
        message = {"mode": request.mode, "entry": request.entry, **asdict(limits), "wall": limits.wall,
                   "cpu": math.ceil(limits.seconds) + 1}  # fmt: skip
        reply, *parts = worker.ask(json.dumps(message).encode(), *request.parts, limit=limits.wall + START_S)
        return Outcome(parts=tuple(parts), **json.loads(reply))

    def lost(self, error: Lost) -> Outcome:
        return Outcome("failed", "the process that runs the sandbox died twice")

    def run(self, request: Job) -> Outcome:
        try:
            return super().run(request)
        except _NotReady as why:
            return Outcome("failed", str(why))


_pools: dict[Design, SandboxPool] = {}


def pool(design: Design) -> SandboxPool:
    """The process's pool for ``design``."""
    return _pools.get(design) or _pools.setdefault(design, SandboxPool(design))


def drop(design: Design) -> None:
    """Ends the pool for ``design``."""
    if (there := _pools.pop(design, None)) is not None:
        there.close()


def close_pools() -> None:
    """Ends every supervisor that this process started."""
    for design in [*_pools]:
        drop(design)
