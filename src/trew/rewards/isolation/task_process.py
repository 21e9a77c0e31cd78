"""The worker process behind ``tasks.TaskPool``; imports nothing from trew outside ``isolation``.

Each message in is answered by ``[status, value]``. The task file defines ``prepare()``, called once, and
``run(payload)``, called in a forked runner under the limits. The worker itself never computes, so it always notices
when its parent is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import signal
import time
from typing import Any

from .forked import Forked
from .frames import Channel, Closed, Late
from .guardian import REQUESTS


class Runner:
    """A forked process that runs the task, with its channel. Once ``spent``, it must not take another call."""

    def __init__(self, task: Any, limits: dict[str, Any], ours: Channel):
        # The warm worker's resident bytes: a runner begins as its copy, and its growth counts from there.
        self._limits, self._base = limits, bytes_used(1)
        self.calls, self.spent = 0, False
        # The channel also closes when the run has ended, so that no result is computed that nothing reads.
        self._forked = Forked(
            lambda channel: _work(task, limits, channel), inherited=(ours.source, ours.target), parent=ours.parent
        )
        self._channel = self._forked.channel

    def ask(self, payload: bytes) -> list[Any]:
        """Makes one call; returns [status, value]."""
        self.calls += 1
        deadline = time.monotonic() + self._limits["wall_s"]
        try:
            self._channel.send(payload, deadline=deadline)
            [answer] = self._channel.receive(deadline=deadline)
        except Late:
            self.spent = True
            return ["wall", f"no answer in {self._limits['wall_s']:g} s"]
        except Closed:
            self.spent = True
            # Closed because the run is gone, not the runner: the runner may still compute, and a wait would block.
            is_alone = os.getppid() != self._channel.parent
            return _reason(self._forked.collect(kill=is_alone), self._limits)
        # memory: the runner's own count of its resident bytes, after the call.
        status, value, memory = json.loads(answer)
        grown = memory - self._base > self._limits["growth_mb"] * 2**20
        self.spent = status == "memory" or self.calls >= self._limits["calls"] or grown
        return [status, value]

    def end(self) -> None:
        """Kills the runner if it still runs, and closes the pipes."""
        self._forked.end()


def bytes_used(field: int) -> int:
    """Returns this process's memory in bytes, by field of /proc/self/statm: 0 is virtual, 1 resident. 0 without /proc.

    Not ru_maxrss: it is a peak, and starts from the parent's memory."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


def _work(task: Any, limits: dict[str, Any], channel: Channel) -> None:
    """Main loop of the runner: payload in, task under a CPU timer, answer out."""
    # SIGPROF with its default action kills the process in the kernel: C code that never returns to the interpreter is
    # stopped too, and no ``except`` of the task can catch it.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # RLIMIT_AS counts everything that the warm task has mapped already, so the limit is set on top of that.
    if used := bytes_used(0):
        most = used + limits["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    while True:
        [request] = channel.receive()
        payload = json.loads(request)
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        try:
            answer = ["done", task.run(payload)]
        except MemoryError:
            answer = ["memory", f"more than {limits['memory_mb']} MiB"]
        # What the task raises is a verdict about the text ("done"), not a fault of the process: trying it again on
        # another worker would end alike.
        except RecursionError:
            answer = ["done", {"error": "nested too deeply"}]
        except Exception as error:
            answer = ["done", {"error": f"{type(error).__name__}: {error!s:.200}"}]
        signal.setitimer(signal.ITIMER_PROF, 0)  # disarmed: sending must not count against the task
        channel.send(json.dumps([*answer, bytes_used(1)]).encode())


def _reason(status: int, limits: dict[str, Any]) -> list[Any]:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return ["cpu", f"more than {limits['cpu_s']:g} s of CPU time"]
    return ["died", f"wait status {status}"]


def _loaded(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("task", path)
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    return task


def main(source: int, target: int, *, parent: int, task: str, limits: dict[str, Any]) -> None:
    """Answers requests until the channel closes."""
    for request in REQUESTS:
        signal.signal(request, signal.SIG_IGN)  # stop signals are for the run, which ends this process when it is done
    channel = Channel(source, target, parent=parent)
    loaded = _loaded(task)
    loaded.prepare()
    runner: Runner | None = None
    with contextlib.suppress(Closed):
        channel.send(b"ready")
        while True:
            [request] = channel.receive()
            runner = runner or Runner(loaded, limits, channel)
            answer = runner.ask(request)
            if runner.spent:
                runner.end()
                runner = None
            channel.send(json.dumps(answer).encode())
    if runner is not None:
        runner.end()
