"""Chooses the sandbox boundary: tries to break each design once per process, and refuses when none holds."""

from __future__ import annotations

import functools
import os
import secrets
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass

from ...errors import SandboxError
from ..isolation.pool import run_together
from .host.boxes import Design, designs
from .pool import Job, JobLimits, JobOutcome, SandboxPool, drop, pool

INSTALL = (
    "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap) and allow user namespaces to it (in a "
    "container: its seccomp profile), or use a Linux kernel with landlock (5.13 or newer)"
)


@dataclass(frozen=True, slots=True)
class Boundary:
    """The boundary between untrusted code and this machine. ``tried`` lists better designs that failed, and why."""

    design: Design
    tried: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        second = "landlock + seccomp: no processes, no files to write"
        return "bubblewrap + seccomp" if self.design.kind == "bubblewrap" else second

    def run(self, job: Job) -> JobOutcome:
        """Runs one job in a fresh sandbox; any thread may call it."""
        return pool(self.design).run(job)


_lock = threading.Lock()


def _fresh_lock() -> None:
    """Replaces the lock in a forked child: a thread that does not exist there may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_fresh_lock)


def boundary() -> Boundary:
    """Returns the first design that passes its self-test on this machine; tests once per process, unless none passes.

    Raises SandboxError with every reason if none passes: code is then not run at all.
    """
    with _lock:
        return _found(os.getpid())


@functools.lru_cache(maxsize=1)
def _found(process: int) -> Boundary:
    del process  # only a cache key: a forked child tests for itself
    if not sys.platform.startswith("linux"):
        raise SandboxError(f"untrusted code runs in a sandbox of Linux only, got {sys.platform}; use a Linux machine")
    tried: list[str] = []
    # Designs come best first. A bubblewrap that is installed may still not work (no user namespaces in a container), so
    # only a run in it counts.
    for design in designs():
        wrong = self_test(design)
        if not wrong:
            return Boundary(design, tuple(tried))
        tried.append(f"{_words(design)}: {wrong}")
    reasons = "; ".join(tried) or "neither bwrap nor landlock is available"
    raise SandboxError(f"there is no sandbox for untrusted code here ({reasons}); {INSTALL}")


def describe() -> tuple[str, str]:
    """Describes this machine's boundary for ``trew doctor``: its kind (empty if there is none), and a sentence."""
    try:
        found = boundary()
    except SandboxError as error:
        return "", str(error)
    user = "" if found.design.user is None else ", as an unprivileged user"
    tried = f" (not {'; '.join(found.tried)})" if found.tried else ""
    return found.design.kind, found.name + user + tried


def _words(design: Design) -> str:
    return (
        design.kind + ("" if design.user is None else " as nobody") + (" with its own mounts" if design.staged else "")
    )


# ---- the attacks of the self-test; each runs as a program in the sandbox and prints how far it got

_NETWORK = """
import socket
def reached():
    try:
        s = socket.socket(); s.settimeout(0.5); s.connect(("127.0.0.1", PORT)); return True
    except OSError:
        return False
"""
_CANARY = """
def reached():
    try:
        with open(PATH) as f: return f.read() != ""
    except OSError:
        pass
    try:
        with open(PATH, "w") as f: f.write("changed")  # its own file of that name is fine; the host looks too
    except OSError:
        pass
    return False
"""
_FORKS = """
import os, time
made = 0
try:
    while made < 2000:
        if os.fork() == 0: time.sleep(60); os._exit(0)
        made += 1
except OSError: pass
print("MADE", made, flush=True)
"""
_MEMORY = """
held = []
for _ in range(4000): held.append(bytearray(1 << 20))
print("HELD", flush=True)
"""


def self_test(design: Design) -> str:
    """Says what ``design`` lets through; empty if it holds.

    It must run a plain program, and block a socket of this machine, a file of this machine, more processes than
    allowed, and more memory than allowed.
    """
    trial = pool(design)
    try:
        wrong = _self_test(trial)
    except BaseException:
        drop(design)
        raise
    if wrong:
        drop(design)
    return wrong


def _self_test(trial: SandboxPool) -> str:
    limits = JobLimits(seconds=2.0, memory=128 << 20, processes=16)
    # First something that must work: a sandbox that runs nothing would block every attack below.
    if wrong := _plain_program(trial, limits):
        return wrong
    word = secrets.token_hex(8)
    with (
        tempfile.NamedTemporaryFile("w+", prefix="trew-canary-") as canary,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        canary.write(word)
        canary.flush()
        os.chmod(canary.name, 0o666)  # open to everybody, so that only the boundary can keep the program out
        port, show = server.getsockname()[1], "\nprint(reached())"
        attacks = (
            _NETWORK.replace("PORT", str(port)) + show,
            _CANARY.replace("PATH", repr(canary.name)) + show,
            _FORKS,
            _MEMORY,
        )
        jobs = [Job("script", (attack.encode(), b""), limits) for attack in attacks]
        network, file, forks, memory = run_together(trial.run, jobs, size=2)
        canary.seek(0)
        untouched = canary.read() == word
    if network.parts[:1] != (b"False\n",):
        return f"the network can be reached ({_said(network)})"
    if file.parts[:1] != (b"False\n",) or not untouched:
        return f"files of this machine can be reached ({_said(file)})"
    return _unlimited(forks, memory, limits)


def _plain_program(trial: SandboxPool, limits: JobLimits) -> str:
    """Says why a plain program does not run; empty if it does."""
    # The random word rules out output from anything but this very program.
    word = secrets.token_hex(8)
    outcome = trial.run(Job("script", (f"print(input()[::-1] + {word!r})".encode(), b"olleh"), limits))
    if outcome.ended == "exit" and outcome.status == 0 and outcome.parts[0].decode() == f"hello{word}\n":
        return ""
    said = outcome.parts[1].decode("utf-8", "replace").strip()[-200:] if len(outcome.parts) > 1 else ""
    return outcome.why or f"a plain program did not run (status {outcome.status}) {said}"


def _unlimited(forks: JobOutcome, memory: JobOutcome, limits: JobLimits) -> str:
    """Says which limit the two attacks on limits overcame; empty if none."""
    # Being ended at a limit counts as holding; a sandbox that failed to start ("failed") shows nothing.
    made = forks.parts[0].split()[1:2] if forks.parts else []
    if forks.ended == "failed" or (made and int(made[0]) > limits.processes):
        return f"processes are not limited ({_said(forks)})"
    if memory.ended == "failed" or b"HELD" in memory.parts[0]:
        return f"memory is not limited ({_said(memory)})"
    return ""


def _said(outcome: JobOutcome) -> str:
    said = b" ".join(outcome.parts).decode("utf-8", "replace").strip()[-200:]
    return outcome.why or said or f"status {outcome.status}"
