"""A pool for work that may hang, crash or eat memory: each answer has limits, none slows the next.

A worker (``task_process``) is a fresh interpreter, no fork of the training process, that loads a task file, gets it
warm, and forks a runner. The runner does the work: its CPU time per call is limited by a timer that the kernel
enforces, its memory by RLIMIT_AS; it is replaced after a number of calls, when it has grown, and whenever a limit ends
it, which costs milliseconds because the worker stays warm. Limits are in CPU time, so that a verdict does not depend on
what else the machine does; a generous wall clock is there for what uses no CPU at all.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from .frames import Late, Lost
from .pool import Pool, processors
from .worker import START_S, Worker

Status = Literal["done", "cpu", "memory", "wall", "died"]
_KEPT = frozenset(
    {"PATH", "HOME", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH"}
)  # fmt: skip
_SLACK_S = 30.0  # for the worker itself to notice the wall clock, on a loaded machine


@dataclass(frozen=True, slots=True)
class Limits:
    """Per call: ``cpu_s`` seconds of CPU time, ``memory_mb`` MiB beyond what the warm task has, ``wall_s`` seconds.
    A runner is replaced after ``calls`` calls, or when it has grown by ``growth_mb`` MiB."""

    cpu_s: float = 3.0
    memory_mb: int = 512
    wall_s: float = 60.0
    calls: int = 500
    growth_mb: int = 128


@dataclass(frozen=True, slots=True)
class Outcome:
    """``status`` done with the task's ``value``; cpu or memory: the work ran past its own limit; wall or died: no fault
    of the work that we know of, and it was tried twice."""

    status: Status
    value: Any = None
    detail: str = ""


class TaskPool(Pool[Any, Outcome]):
    """Up to ``size`` workers for the file ``task``, which has ``prepare()`` and ``run(payload)``; payloads and answers
    are what JSON can hold."""

    def __init__(self, task: Path, *, limits: Limits | None = None, size: int | None = None):
        super().__init__(size=size or min(8, processors()))
        self.task = task
        self.limits = limits or Limits()

    def start(self) -> Worker:
        # What reads a model's text has no use for secrets, nor for settings of Python that are not about its files.
        kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith("LC_")}
        return Worker(
            "trew_worker.isolation.task_process",
            {"task": str(self.task), "limits": asdict(self.limits)},
            flags=("-P", "-W", "ignore"),
            environment={**kept, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def greet(self, worker: Worker) -> None:
        worker.channel.receive(deadline=time.monotonic() + START_S)

    def ask(self, worker: Worker, request: Any) -> Outcome:
        [answer] = worker.ask(json.dumps(request).encode(), limit=self.limits.wall_s + _SLACK_S)
        status, value = json.loads(answer)
        if status in ("wall", "died"):
            raise Late(value) if status == "wall" else Lost(value)
        return Outcome("done", value) if status == "done" else Outcome(status, None, str(value))

    def lost(self, error: Lost) -> Outcome:
        return Outcome("wall" if isinstance(error, Late) else "died", None, str(error))
