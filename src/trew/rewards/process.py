"""Users' functions in a process of their own, which can be ended: a function that hangs, exits or crashes costs its
completions, not the run, and what it changes (working folder, environment, generators, threads) stays there."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ..errors import RewardError
from ..types import Prompt
from ..utils.secrets import redact
from .builtin import KINDS, graded
from .functions import Sample, UserFunction
from .session import Call, Fault, FaultKind, Outcome, Session, Spec, took_too_long
from .wire import receive, send

START_SECONDS = 600.0  # for what the files import: a reward model may be loaded
GRACE_SECONDS = 5.0  # on top of a limit that the functions' own event loop keeps
END_SECONDS = 10.0  # for the guardian to end everything; it takes milliseconds
GUARDIAN = Path(__file__).with_name("guardian.py")
# The guardian is forked before trew is imported: it stays small, and nothing that it does waits for an import.
COMMAND = """
import sys, json
from importlib.util import module_from_spec, spec_from_file_location
sys.path[:] = json.loads(sys.argv[1])
spec = spec_from_file_location("guardian", sys.argv[2])
guardian = module_from_spec(spec)
spec.loader.exec_module(guardian)
channel, life = int(sys.argv[3]), int(sys.argv[4])
guarded = guardian.stand_guard(life)
from trew.rewards.process import serve
serve(channel, None if guarded else life)
"""


class Process:
    """A Runner whose functions live in a child process, started when first needed and again after it was ended.

    The functions' own state (module variables, caches) lives as long as the process. ``hash_seed`` is the seed of
    Python's hashes in it: the order of a set of strings depends on it, and it is the same for every start. Standard
    output of the functions goes to standard error. Safe to use from several threads, one call at a time.
    """

    def __init__(self, *, hash_seed: int = 0) -> None:
        self._hash_seed = hash_seed
        self._specs: list[Spec] = []
        self._files: dict[Path, str] = {}  # what was loaded, by content
        self._lock = threading.RLock()
        self._child: _Child | None = None
        self._closing = False

    def load(self, specs: Sequence[Spec]) -> list[UserFunction | tuple[str, ...]]:
        """As Runner.load; a file that hangs or ends its process while it is run is one of the problems."""
        with self._lock:
            loaded: list[UserFunction | tuple[str, ...]] = []
            for spec in specs:
                if self._child is None:
                    self._load_again()
                try:
                    [found] = self._ask("load", [spec], limit=START_SECONDS)
                except (TimeoutError, _Died) as error:
                    why = error if isinstance(error, _Died) else f"was not imported within {START_SECONDS:g} s"
                    loaded.append((f"{spec[0]}: {why}",))
                    continue
                if "problems" in found:
                    loaded.append(tuple(found["problems"]))
                    continue
                function = _function(found)
                self._specs.append(spec)
                self._files[function.file] = _content(function.file)
                loaded.append(function)
            return loaded

    def call(self, calls: Sequence[Call], *, step: int = 0) -> list[Outcome]:
        """As Runner.call; a limit ends any function."""
        with self._lock:
            outcomes: dict[int, Outcome] = {}
            together = [i for i, call in enumerate(calls) if call.function.is_async]
            for i, call in enumerate(calls):
                if i in together:
                    continue
                outcomes[i] = self._one_by_one(call, step) if call.function.verl else self._call([call], step)[0]
            if together:
                outcomes |= zip(together, self._call([calls[i] for i in together], step), strict=True)
            return [outcomes[i] for i in range(len(calls))]

    def grade(self, kind: str, items: Sequence[tuple[str, Any, Mapping[str, Any]]]) -> list[tuple[float | None, str]]:
        """Scores and statuses of (completion, gold, arguments) by a built-in, in that other process."""
        with self._lock:
            return [(score, status) for score, status in self._ask("grade", kind, list(items), limit=START_SECONDS)]

    def close(self) -> None:
        """Ends the process, and with it a call of another thread; the next call starts another."""
        self._closing = True
        if (child := self._child) is not None:
            child.kill()  # before the lock: a call that is under way may have minutes left
        with self._lock:
            self._closing = False
            if self._child is not None:
                self._child.end()
                self._child = None

    def _one_by_one(self, call: Call, step: int) -> Outcome:
        """verl's form: a call per completion, each with the limit to itself."""
        values: list[float | None] = []
        faults: dict[int, Fault] = {}
        steps = {}
        seconds = 0.0
        for i, sample in enumerate(call.samples):
            [one] = self._call([dataclasses.replace(call, samples=[sample])], step)
            seconds += one.seconds
            values.append(one.values[0] if one.values else None)
            fault = one.whole or one.faults.get(0)
            if fault:
                faults[i] = fault
            if 0 in one.steps:
                steps[i] = one.steps[0]
        return Outcome(values, faults, seconds=seconds, steps=steps)

    def _call(self, calls: Sequence[Call], step: int) -> list[Outcome]:
        start = time.perf_counter()
        limits = [call.limit for call in calls]
        grace = GRACE_SECONDS if calls[0].function.is_async else 0.0
        limit = None if None in limits else max(limits) + grace  # type: ignore[type-var]
        try:
            if self._child is None:
                self._load_again()
            answers = self._ask("call", *_packed(calls), step, limit=limit)
        except TimeoutError:
            fault = [Fault("hung", took_too_long(call.function, call.limit), blocked=True) for call in calls]
        except _Died as error:
            kind: FaultKind = "killed" if error.by_kill else "died"
            fault = [Fault(kind, f"{call.function.who}: {error}") for call in calls]
        else:
            return [_outcome(answer) for answer in answers]
        return [Outcome([], whole=each, seconds=time.perf_counter() - start) for each in fault]

    def _load_again(self) -> None:
        """Loads all functions into a new process; the files must be those that the run began with."""
        for file, content in self._files.items():
            if _content(file) != content:
                raise RewardError(
                    f"{file}: was changed since it was loaded, and its process had to be started again; put the file "
                    "back as it was, or start a new run"
                )
        for spec in self._specs:
            try:
                [found] = self._ask("load", [spec], limit=START_SECONDS)
            except (TimeoutError, _Died) as error:
                raise RewardError(f"{spec[0]}: could be loaded once, but not again: {error}") from None
            if "problems" in found:
                raise RewardError(f"{spec[0]}: could be loaded once, but not again: {'; '.join(found['problems'])}")

    def _ask(self, *message: Any, limit: float | None) -> Any:
        """The child's answer. Whatever keeps it from coming ends the child: nothing follows half a message."""
        if self._closing:
            raise RewardError("the process of reward functions is being ended")
        if self._child is None:
            self._child = _Child(self._hash_seed)
        child = self._child
        try:
            return child.ask(message, limit)
        except RewardError:  # nothing was sent
            raise
        except (EOFError, OSError) as error:
            self._child = None
            status = child.end()
            if isinstance(error, TimeoutError):
                raise
            raise _Died(status, by_kill="SIGKILL" in status) from None
        except BaseException:
            self._child = None
            child.end()
            raise


class _Died(Exception):
    def __init__(self, status: str, *, by_kill: bool) -> None:
        super().__init__(status)
        self.by_kill = by_kill


class _Child:
    """A started process (on Linux the functions' guardian), the channel to the functions, and a pipe that tells when we
    are gone."""

    def __init__(self, hash_seed: int) -> None:
        ours, theirs = socket.socketpair()
        life, self._life = os.pipe()
        places = [json.dumps(sys.path), str(GUARDIAN), str(theirs.fileno()), str(life)]
        command = [sys.executable, "-c", COMMAND, *places]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(), life),
            start_new_session=True,  # Ctrl-C at a terminal is for the run, which finishes its step
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        )
        theirs.close()
        os.close(life)
        self.channel = ours
        self._finalizer = weakref.finalize(self, _end, self.process, ours, self._life)

    def ask(self, message: Sequence[Any], limit: float | None) -> Any:
        deadline = None if limit is None else time.monotonic() + limit
        self.channel.settimeout(limit)
        send(self.channel, message)
        return receive(self.channel, deadline=deadline)

    def kill(self) -> None:
        """Ends it with all its own children, and leaves it to ``end`` to see how it went."""
        if self._finalizer.alive:
            _request_end(self.process, self._life)

    def end(self) -> str:
        """Ends it with all its own children; how it ended, in words."""
        # Looked at but not collected, so that its number cannot become that of another process group before the kill.
        end, ended = time.monotonic() + 0.2, None
        while ended is None and time.monotonic() < end:  # one that is ending already tells why
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            time.sleep(0.002)
        self._finalizer()
        if ended is None:
            return "its process was ended"
        code = self.process.returncode
        name = signal.Signals(-code).name if code < 0 and -code in set(signal.Signals) else ""
        how = f"was ended by signal {-code} {name}".rstrip() if code < 0 else f"exited with code {code}"
        return f"its process {how} during the call" + ("; memory may have run out" if code == -signal.SIGKILL else "")


def _end(process: subprocess.Popen[bytes], channel: socket.socket, life: int) -> None:
    _request_end(process, life)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        _kill_group(process)  # the functions' process is killed with its guardian
        process.wait()
    channel.close()
    os.close(life)


def _request_end(process: subprocess.Popen[bytes], life: int) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # it is gone already
            os.write(life, b"x")
    else:
        _kill_group(process)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _content(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return "absent"


# --------------------------------------------------------------------------------------------------------------------
# What travels


def _packed(calls: Sequence[Call]) -> tuple[list[Any], list[Any]]:
    """Prompts, each once, and calls that refer to them by number."""
    numbers: dict[int, int] = {}
    prompts, packed = [], []
    for call in calls:
        rows = []
        for sample in call.samples:
            if id(sample.prompt) not in numbers:
                numbers[id(sample.prompt)] = len(prompts)
                p = sample.prompt
                prompts.append([p.uid, p.text, p.messages, dict(p.columns)])
            ids = [int(t) for t in sample.token_ids] if call.function.reads_tokens else []
            rows.append([numbers[id(sample.prompt)], sample.text, ids, sample.length])
        packed.append([call.function.index, rows, call.limit])
    return prompts, packed


def _function(found: Mapping[str, Any]) -> UserFunction:
    return UserFunction(**{**found, "file": Path(found["file"]), "accepts": _set(found["accepts"])})


def _set(names: Any) -> frozenset[str] | None:
    return None if names is None else frozenset(names)


def _outcome(answer: Mapping[str, Any]) -> Outcome:
    faults = {i: Fault(*fault) for i, fault in answer["faults"]}
    whole = Fault(*answer["whole"]) if answer["whole"] else None
    return Outcome(answer["values"], faults, whole, answer["seconds"], answer["steps"])


# --------------------------------------------------------------------------------------------------------------------
# In the child


def serve(descriptor: int, life: int | None) -> None:
    """The child's whole life: answers until nobody asks any more. ``life`` is the pipe to the run where no guardian
    has it."""
    channel = socket.socket(fileno=descriptor)
    sys.argv = [sys.argv[0]]
    os.set_inheritable(descriptor, False)
    if life is not None:
        os.set_inheritable(life, False)
        _end_with_parent(life)
    _survive_requests()
    sys.stdout = sys.stderr = _Shown(open(2, "wb", buffering=0, closefd=False))  # noqa: SIM115 (for the whole life)
    random.seed(0)  # what functions draw depends on the call alone, not on when the process was started
    np.random.seed(0)
    session, loaded = Session(), []
    while True:
        try:
            what, *given = receive(channel)
        except (EOFError, OSError):
            os._exit(0)
        if what == "load":
            [found] = session.load([(spec, args) for spec, args in given[0]])
            if isinstance(found, UserFunction):
                loaded.append(found)
                send(channel, [{**dataclasses.asdict(found), "file": str(found.file)}])
            else:
                send(channel, [{"problems": list(found)}])
        elif what == "grade":
            verdicts = [graded(KINDS[given[0]], text, gold, args) for text, gold, args in given[1]]
            send(channel, [(v.score, v.status) for v in verdicts])
        else:
            send(channel, _answers(session, loaded, *given))


def _answers(session: Session, loaded: list[UserFunction], prompts: Any, calls: Any, step: int) -> list[Any]:
    rows = [Prompt(uid, text=text, messages=messages, columns=columns) for uid, text, messages, columns in prompts]
    made = [
        Call(loaded[index], [Sample(rows[p], *rest) for p, *rest in samples], limit) for index, samples, limit in calls
    ]
    return [
        {
            "values": outcome.values,
            "faults": [(i, dataclasses.astuple(fault)) for i, fault in outcome.faults.items()],
            "whole": None if outcome.whole is None else dataclasses.astuple(outcome.whole),
            "seconds": outcome.seconds,
            "steps": outcome.steps,
        }
        for outcome in session.call(made, step=step)
    ]


class _Shown(io.TextIOWrapper):
    """What functions print: often a model's text, which must not act on the terminal, and never worth a failure."""

    def __init__(self, raw: io.RawIOBase) -> None:
        super().__init__(cast(BinaryIO, raw), encoding="utf-8", errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):  # a terminal that is gone
            super().write("".join(c if c.isprintable() or c in "\n\t\r" else ascii(c)[1:-1] for c in redact(text)))
        return len(text)


def _survive_requests() -> None:
    """Requests to stop are for the run, which still needs this process to finish its step: cluster managers send them
    to every process. What functions start is not protected: ignoring would be inherited, a handler is not, and a copy
    of this process (multiprocessing) does as it is told."""
    own = os.getpid()

    def only_here(signum: int, frame: object) -> None:
        if os.getpid() != own:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(signum, only_here)


def _end_with_parent(life: int) -> None:
    """Ends this process when the other end of the pipe is gone, even while a function never yields to Python: the
    kernel sends a signal that ends it. Where it does not (macOS), a thread watches."""
    with contextlib.suppress(AttributeError, OSError):
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)

    def watch() -> None:
        os.read(life, 1)  # never written to: returns when it is closed
        os._exit(0)

    threading.Thread(target=watch, daemon=True, name="trew-parent").start()
