"""A pool for work that may hang, crash or exhaust memory, with limits on every call.

A worker (``task_process``) is a fresh interpreter, not a fork of the training process. It loads a task file, warms it
up, and forks a runner that does the work. The kernel limits the runner's CPU time per call by a timer and its memory by
RLIMIT_AS. The runner is replaced after a number of calls, when it has grown, and whenever a limit kills it; that costs
milliseconds because the worker stays warm. Limits count CPU time, so a verdict does not depend on the machine's load; a
generous wall-clock limit stops what uses no CPU.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .frames import Late, WorkerLost
from .pool import Pool, workers
from .worker import START_S, Worker

Status = Literal["done", "cpu", "memory", "wall", "died"]
_KEPT = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH"}
)  # fmt: skip
_SLACK_S = 30.0  # on top of the wall-clock limit, which the worker keeps: it may be slow on a loaded machine


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """TaskLimits per call: ``cpu_s`` seconds of CPU time, ``memory_mb`` MiB beyond the warm task's, ``wall_s`` seconds.

    A runner is replaced after ``calls`` calls, or once it has grown by ``growth_mb`` MiB."""

    cpu_s: float = 3.0
    memory_mb: int = 512
    wall_s: float = 60.0
    calls: int = 500
    growth_mb: int = 128


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Result of one call by ``status``: ``done`` with the task's ``value``; ``cpu`` or ``memory``, where the work
    exceeded its limit; ``wall`` or ``died``, where the cause is unknown and a second try failed too."""

    status: Status
    value: Any = None
    detail: str = ""


class TaskPool(Pool[Any, TaskOutcome]):
    """Up to ``size`` workers for the file ``task``, which defines ``prepare()`` and ``run(payload)``. Payloads and
    answers must be JSON-serialisable."""

    def __init__(self, task: Path, *, limits: TaskLimits | None = None, size: int | None = None):
        super().__init__(size=size or workers())
        self.task = task
        self.limits = limits or TaskLimits()

    def start(self) -> Worker:
        # An allow-list: a process that parses a model's text must not see secrets in the environment.
        kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith("LC_")}
        return Worker(
            "trew_worker.isolation.task_process",
            {"task": str(self.task), "limits": asdict(self.limits)},
            flags=("-P", "-W", "ignore"),
            # A fixed hash seed, for verdicts that do not change between runs; one thread, because the CPU timer adds up
            # the time of all threads.
            environment={**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def greet(self, worker: Worker) -> None:
        worker.channel.receive(deadline=time.monotonic() + START_S)

    def ask(self, worker: Worker, request: Any) -> TaskOutcome:
        [answer] = worker.ask(json.dumps(request).encode(), limit=self.limits.wall_s + _SLACK_S)
        status, value = json.loads(answer)
        # Only these two raise, and are tried again: running past a CPU or memory limit is a result.
        if status in ("wall", "died"):
            raise Late(value) if status == "wall" else WorkerLost(value)
        return TaskOutcome("done", value) if status == "done" else TaskOutcome(status, None, str(value))

    def lost(self, error: WorkerLost) -> TaskOutcome:
        return TaskOutcome("wall" if isinstance(error, Late) else "died", None, str(error))
