"""Jobs for the sandbox, and the pool of supervisor processes that run them, one job at a time each."""

from __future__ import annotations

import json
import math
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..isolation.frames import WorkerLost
from ..isolation.pool import Pool, workers
from ..isolation.worker import START_S, Worker
from .host.boxes import Design


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What one program may use.

    ``seconds`` limits CPU time of all its processes plus idle time. ``memory`` limits the address space of each
    process and the resident memory of all, in bytes. ``file``, ``output`` and ``answers`` are in bytes too. ``wall`` is
    a generous wall-clock limit behind them: a loaded machine must not make a program wrong.
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
    """One job. ``script`` runs a program with an input. ``calls`` imports it and makes the given calls of ``entry``.
    ``tests`` imports it too, and asserts that run in a second box make the calls. ``parts`` are the arguments of the
    mode in ``host.supervisor``."""

    mode: Literal["script", "calls", "tests"]
    parts: tuple[bytes, ...]
    limits: JobLimits = JobLimits()
    entry: str = "-"


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How a job ended: ``exit`` with a status, ``limit`` if it exceeded one, ``failed`` if the sandbox itself did.

    ``clock`` says that the limit was the wall clock. ``parts`` are the bytes that came back; ``judge`` says how the box
    with the asserts ended.
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
    """The boundary cannot be set up here. No WorkerLost, so that the pool does not try again: that would fail too."""


class SandboxPool(Pool[Job, JobOutcome]):
    """Supervisors for one boundary.

    Every job runs in a fresh sandbox. A job whose supervisor dies twice has the outcome ``failed``.
    """

    def __init__(self, design: Design, *, size: int | None = None):
        super().__init__(size=size or workers())
        self.design = design

    def start(self) -> Worker:
        # -I and -S: a process that starts untrusted programs takes nothing from the environment or site-packages.
        design = {"design": asdict(self.design)}
        return Worker("trew_worker.sandbox.host.supervisor", design, flags=("-I", "-S"), folder="/")

    def greet(self, worker: Worker) -> None:
        [said] = worker.channel.receive(deadline=time.monotonic() + START_S)
        ready = json.loads(said)
        if not ready["ready"]:
            raise _NotReady(ready["why"])

    def ask(self, worker: Worker, request: Job) -> JobOutcome:
        limits = request.limits
        # RLIMIT_CPU takes whole seconds. One more than the limit makes it the second line: the supervisor, which counts
        # all processes and can name the limit, comes first.
        message = {"mode": request.mode, "entry": request.entry, **asdict(limits), "wall": limits.wall,
                   "cpu": math.ceil(limits.seconds) + 1}  # fmt: skip
        reply, *parts = worker.ask(json.dumps(message).encode(), *request.parts, limit=limits.wall + START_S)
        return JobOutcome(parts=tuple(parts), **json.loads(reply))

    def lost(self, error: WorkerLost) -> JobOutcome:
        return JobOutcome("failed", "the process that runs the sandbox died twice")

    def run(self, request: Job) -> JobOutcome:
        try:
            return super().run(request)
        except _NotReady as why:
            return JobOutcome("failed", str(why))


_pools: dict[Design, SandboxPool] = {}


def pool(design: Design) -> SandboxPool:
    """Returns this process's pool for ``design``."""
    # setdefault, so that two threads that get here together still share one pool.
    return _pools.get(design) or _pools.setdefault(design, SandboxPool(design))


def drop(design: Design) -> None:
    """Ends the pool for ``design``."""
    if (there := _pools.pop(design, None)) is not None:
        there.close()


def close_pools() -> None:
    """Ends every supervisor that this process started."""
    for design in [*_pools]:
        drop(design)
