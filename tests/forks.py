"""Commands of trew as real processes that start in milliseconds: one process imports everything, and forks for each.

A command may be held at a place: ``hold="trew.training.loop:measure:2"`` stops the second call of that function, in
the middle of the run, until :meth:`Command.go`; :meth:`Command.held` waits until it is there. So signals arrive where
a test wants them, and no test depends on how fast the machine is.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from multiprocessing import util as mp_util
from pathlib import Path
from typing import Any

import unestimated

PATIENCE = 180.0  # seconds until something that must happen counts as never


class Command:
    """One started command: ``trew`` with arguments, its output in files."""

    def __init__(self, server: Server, pid: int, folder: Path):
        self.pid, self.folder, self._server = pid, folder, server
        self.code: int | None = None

    def held(self) -> Command:
        """Waits until it is where it was to be held."""
        wait_for(lambda: (self.folder / "held").exists() or self.ended(), self.text)
        assert (self.folder / "held").exists(), self.text()
        return self

    def go(self, *, full: bool = False) -> Command:
        """Lets it go on; ``full``: after it has taken all the memory that it may have, but for small pieces."""
        if full:
            (self.folder / "full").touch()
        (self.folder / "go").touch()
        return self

    def kill(self, signum: int) -> Command:
        os.kill(self.pid, signum)
        return self

    def says(self, text: str) -> Command:
        """Waits until it has printed ``text``."""
        wait_for(lambda: text in self.text() or self.ended(), self.text)
        assert text in self.text(), self.text()
        return self

    def ended(self) -> bool:
        with contextlib.suppress(OSError):
            return fields_of(self.pid)[:1] == ["Z"]
        return True

    def wait(self) -> int:
        """The exit code, of a signal its negative number."""
        if self.code is None:
            wait_for(self.ended, self.text)
            self.code = self._server.ask({"wait": self.pid})
            self._server.forget(self.pid)
        return self.code

    def text(self) -> str:
        """What it printed so far."""
        return "".join(
            (self.folder / n).read_text(errors="replace") for n in ("out", "err") if (self.folder / n).exists()
        )

    def family(self) -> set[int]:
        """It and all processes below it."""
        return {self.pid, *below(self.pid)}


class Server:
    """Forks commands; use as a context. Whatever it started is ended with it."""

    def __enter__(self) -> Server:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen([sys.executable, __file__], env=env, text=True, **pipes)
        self._count = 0
        self._started: list[int] = []
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self._started:
            for one in (*below(pid), pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def ask(self, order: dict[str, Any]) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.poll() is None, f"the server of forks has ended: {self.process.returncode}"
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        assert select.select([self.process.stdout], [], [], PATIENCE)[0], order
        return int(self.process.stdout.readline())

    def forget(self, pid: int) -> None:
        """It has been waited for: its number may be another process's from here on."""
        self._started.remove(pid)

    def start(
        self, *args: str | Path, cwd: Path, hold: str = "", terminal: str = "", stdin: str = os.devnull,
        estimated: bool = False, **env: str,
    ) -> Command:  # fmt: skip
        """Starts ``trew ARGS`` in ``cwd``; ``terminal`` is the path of one that it is to own, ``stdin`` that of what it
        reads; ``estimated``: a run estimates its memory."""
        self._count += 1
        folder = cwd / f"command-{self._count}"
        folder.mkdir()
        order = {"args": [*map(str, args)], "cwd": str(cwd), "folder": str(folder), "hold": hold, "env": env}
        pid = self.ask({**order, "terminal": terminal, "stdin": stdin, "estimated": estimated})
        self._started.append(pid)
        return Command(self, pid, folder)

    def run(self, *args: str | Path, cwd: Path, code: int = 0, **options: Any) -> str:
        """Runs a command to its end, which must have ``code``; what it printed. ``options`` are for :meth:`start`."""
        command = self.start(*args, cwd=cwd, **options)
        assert command.wait() == code, command.text()
        assert "Traceback" not in command.text()
        return command.text()


def wait_for(condition: Any, what: Any = lambda: "") -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.005)


def fields_of(pid: int) -> list[str]:
    """A process's state, parent and so on; nothing for a moment while it ends."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def below(pid: int) -> set[int]:
    """All processes below one, by /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            children.setdefault(int(fields_of(int(folder.name))[1]), []).append(int(folder.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        new = [c for c in children.get(todo.pop(), []) if c not in found]
        found.update(new)
        todo += new
    return found


def gone(pids: set[int]) -> bool:
    """Whether none of these processes runs any more."""
    for pid in pids:
        with contextlib.suppress(OSError):
            if fields_of(pid)[:1] != ["Z"]:
                return False
    return True


# --------------------------------------------------------------------------------------------------------------------
# The process that forks


IMPORTED = (
    "trew.cli.main", "trew.cli.train", "trew.cli.eval", "trew.cli.iterate", "trew.cli.train_reward",
    "trew.training.start", "trew.training.continuing", "trew.iterate", "trew.rewards.reward_checks",
    "trew.rewards.model.scorer", "pyarrow.parquet", "typeguard", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto", "transformers.convert_slow_tokenizer", "trew.learner.sharded_runner",
    "peft", "bitsandbytes", "trew.cli.chat", "trew.cli.talk", "trew.estimate.times", "pyarrow.compute",
    "rich._emoji_codes",
)  # fmt: skip


def serve() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # an installation without backends
        importlib.import_module("trew.backends.cpu.backend")
    look_at_a_model()
    make_room()
    if dynamo := sys.modules.get("torch._dynamo.utils"):  # logs how long this process compiled; a child without memory
        atexit.unregister(dynamo.dump_compile_times)  # fails at it, in sight
    gc.collect()
    gc.freeze()  # what is imported stays: no collection of a child looks at it, and so none copies its pages
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            print(os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1]), flush=True)
        elif pid := os.fork():
            print(pid, flush=True)
        else:
            child(**order)


def look_at_a_model() -> None:
    """What transformers prepares for the first model of a process, a fifth of a short command's time."""
    import tiny
    from trew.models import loading

    with tempfile.TemporaryDirectory() as folder, loading.quiet():
        assert loading.check(str(tiny.save(folder))) == []


def make_room() -> None:
    """What the kernels' arena does to the heap once in a process, before its first use."""
    with contextlib.suppress(ImportError):
        importlib.import_module("trew.backends.cpu.arena")._room_for_small()


def fork_the_fork_server() -> None:
    """A study's fork server is forked from here too, where it would import everything anew for five seconds."""
    spawn = mp_util.spawnv_passfds

    def forked(path: Any, args: Any, passed: Any) -> int:
        if "multiprocessing.forkserver" not in str(args[-1]):
            return spawn(path, args, passed)
        sys.stdout.flush()
        sys.stderr.flush()
        if pid := os.fork():
            return pid
        try:  # as after an exec: no other descriptors, no handlers
            for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *passed}:
                with contextlib.suppress(OSError):
                    os.close(fd)
            for signum in signal.valid_signals():
                if callable(signal.getsignal(signum)):
                    signal.signal(signum, signal.SIG_DFL)
            exec(args[-1], {})  # noqa: S102 (what the interpreter would have been given)
        finally:
            os._exit(0)

    mp_util.spawnv_passfds = forked


def child(
    args: list[str], cwd: str, folder: str, hold: str, env: dict[str, str], terminal: str, stdin: str, estimated: bool
) -> None:
    os.setsid()
    if "TREW_REAL_FORK_SERVER" not in env:
        fork_the_fork_server()
    if not estimated:
        unestimated.leave_out()
    place = Path(folder)
    if terminal:
        out = err = os.open(terminal, os.O_RDWR)  # the first terminal that a session opens is its own
    else:
        out, err = (os.open(place / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
    for here, there in ((os.open(stdin, os.O_RDONLY), 0), (out, 1), (err, 2)):
        os.dup2(here, there)
    os.environ.update(env)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN if env.get("NOHUP") else signal.SIG_DFL)
    if hold:
        hold_at(hold, place)
    if env.get("TREW_CLOCK") == "jumps":
        jumps = itertools.cycle((0.0, 4e9, -1e9, 2e9))
        time.time = lambda now=time.time: now() + next(jumps)  # type: ignore[assignment]
    if control := env.get("TREW_WATCH"):
        importlib.import_module("crashing").watch(Path(control))
    warnings.simplefilter("ignore", DeprecationWarning)
    from trew.cli.main import main

    sys.argv = ["trew", *args]
    try:
        main()
    except SystemExit as end:
        leave(end)


def leave(end: SystemExit) -> None:
    """As the interpreter leaves, without its last step: taking apart what was imported copies every page of it, which
    costs each command a second of processor time."""
    threading._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def hold_at(where: str, place: Path) -> None:
    """``module:name:n``: the n-th call of a function, or of a method ``Class.name``, waits before it begins."""
    module, name, at = where.split(":")
    *owner, last = name.split(".")
    target = importlib.import_module(module)
    for part in owner:
        target = getattr(target, part)
    real, calls = getattr(target, last), [0]

    def held(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == int(at):
            (place / "held").touch()
            while not (place / "go").exists():
                time.sleep(0.005)
            if (place / "full").exists():
                take_memory()
        return real(*args, **kwargs)

    setattr(target, last, held)


def take_memory(piece: int = 1 << 18) -> None:
    """Until only smaller pieces are left: what was freed stays with the process, so that a limit is not enough."""
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    while malloc(piece):
        pass


if __name__ == "__main__":
    serve()
