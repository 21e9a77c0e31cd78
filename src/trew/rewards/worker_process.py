"""The process behind ``workers.Worker``: run as a script, imports nothing of trew.

    python -P worker_process.py TASK.py LIMITS_AS_JSON PARENT_PID

One JSON value per line comes in, one ``[status, value]`` per line goes out. ``TASK.py`` has ``prepare()``, called once,
and ``run(payload)``, called in a forked runner under the limits. This process itself never computes, so that it always
notices when its parent goes away.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

PR_SET_PDEATHSIG = 1


class Runner:
    """A forked process that runs the task, and the pipes to it."""

    def __init__(self, task: Any, limits: dict[str, Any], libc: Any):
        down_read, self.down = os.pipe()
        self.up, up_write = os.pipe()
        supervisor = os.getpid()
        self.calls = 0
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if libc is not None:
                    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != supervisor:
                    os._exit(1)
                os.close(self.down)
                os.close(self.up)
                os.dup2(os.open(os.devnull, os.O_RDWR), 0)
                os.dup2(0, 1)
                _work(task, limits, down_read, up_write)
            finally:
                os._exit(1)
        os.close(down_read)
        os.close(up_write)

    def end(self) -> int:
        """Kills it if it still runs; its wait status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return self.close()

    def close(self) -> int:
        os.close(self.down)
        os.close(self.up)
        return os.waitpid(self.pid, 0)[1]


def bytes_used(field: int) -> int:
    """Bytes of this process: 0 all addresses, 1 what is resident; 0 where there is no /proc. (ru_maxrss would count
    the parent's before exec.)"""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[field]) * resource.getpagesize()


def _work(task: Any, limits: dict[str, Any], down: int, up: int) -> None:
    """The runner's life: a payload, a CPU timer, the task, an answer. The timer kills: nothing can catch it."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    if used := bytes_used(0):
        most = used + limits["memory_mb"] * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    source = os.fdopen(down, "rb")
    for line in source:
        payload = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, limits["cpu_s"])
        try:
            answer = ["done", task.run(payload)]
        except MemoryError:
            answer = ["memory", f"more than {limits['memory_mb']} MiB"]
        except RecursionError:
            answer = ["done", {"error": "nested too deeply"}]
        except Exception as error:
            answer = ["done", {"error": f"{type(error).__name__}: {error!s:.200}"}]
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = json.dumps([*answer, bytes_used(1)]).encode() + b"\n"
        while data:
            data = data[os.write(up, data) :]


def _ask(runner: Runner, line: bytes, limits: dict[str, Any], alive: Any) -> list[Any]:
    """The runner's answer, or what ended it: [status, value, memory]."""
    deadline = time.monotonic() + limits["wall_s"]
    got, sent = b"", 0
    os.set_blocking(runner.down, False)
    while not got.endswith(b"\n"):
        if time.monotonic() > deadline:
            return ["wall", f"no answer in {limits['wall_s']:g} s", 0]
        if not alive():
            runner.end()
            os._exit(0)
        wants = [runner.down] if sent < len(line) else []
        readable, writable, _ = select.select([runner.up], wants, [], 1.0)
        if writable:
            with contextlib.suppress(BrokenPipeError, BlockingIOError):
                sent += os.write(runner.down, line[sent:])
        if readable:
            piece = os.read(runner.up, 65536)
            if not piece:
                return ["", "", 0]
            got += piece
    return json.loads(got)


def _reason(status: int, limits: dict[str, Any]) -> list[Any]:
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return ["cpu", f"more than {limits['cpu_s']:g} s of CPU time"]
    return ["died", f"wait status {status}"]


def main() -> None:
    path, limits, parent = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    for request in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(request, signal.SIG_IGN)  # they are for the run, which ends this process when it is done
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    out = os.dup(1)
    os.dup2(2, 1)  # nothing that a library prints may get between the answers
    spec = importlib.util.spec_from_file_location("task", path)
    assert spec is not None
    assert spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    task.prepare()
    os.write(out, b'"ready"\n')
    base = bytes_used(1)
    runner: Runner | None = None
    pending = b""

    def alive() -> bool:
        return os.getppid() == parent

    while True:
        while b"\n" not in pending:
            readable, _, _ = select.select([0], [], [], 2.0)
            piece = os.read(0, 1 << 20) if readable else b""
            if (readable and not piece) or not alive():
                if runner is not None:
                    runner.end()
                return
            pending += piece
        line, _, pending = pending.partition(b"\n")
        if runner is None:
            runner = Runner(task, limits, libc)
        status, value, memory = _ask(runner, line + b"\n", limits, alive)
        runner.calls += 1
        answer = [status, value]
        if status == "":
            answer, runner = _reason(runner.close(), limits), None
        elif (
            status in ("wall", "memory")
            or runner.calls >= limits["calls"]
            or memory - base > limits["growth_mb"] * 2**20
        ):
            runner.end()
            runner = None
        data = json.dumps(answer).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]


if __name__ == "__main__":
    main()
