"""Runs jobs one after the other for its parent: starts boxes, serves their pipes, enforces limits, kills what is left.

It has one thread and no other children, so "no child left" after a job means that nothing of the job is left. When its
parent is gone it kills whatever runs, and exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import py_compile
import selectors
import signal
import tempfile
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ...isolation import tree
from ...isolation.frames import Channel, Closed
from ...isolation.guardian import REQUESTS
from .boxes import Boxes, Design, sealed

FIRST_LOOK, BETWEEN = (
    0.05,
    0.02,
)  # seconds before the first and between later checks; most programs end before the first
STDERR_KEPT = 4096  # bytes, the last ones
_EXTRA = 64 << 20  # bytes of address space that an idle interpreter reserves
_INTERNAL = 6  # processes and threads that do not belong to the program: bwrap's two, and slack

Reply = dict[str, Any]
# Loads the bytecode of inside.py from a descriptor. It is compiled once, outside: compiling it for every job would cost
# half as much as starting Python.
_BOOT = """
import os, sys
class Loader(sys.modules["_frozen_importlib_external"].SourcelessFileLoader):
    def get_data(self, path):
        data = os.read(descriptor, 1 << 24)
        os.close(descriptor)
        return data
descriptor = int(sys.argv.pop(1))
Loader("__main__", "inside.pyc").exec_module(type(sys)("__main__"))
"""


@dataclass(slots=True)
class Box:
    """One running box: what it wrote, what is still to be sent to it, and why it was stopped."""

    pid: int
    outputs: dict[int, str]  # open descriptors to read from, by name of the stream
    watch: tree.UsageWatch
    request: int
    death: int  # a descriptor that becomes readable when the box ends; -1 if the kernel has none
    unsent: bytearray = field(default_factory=bytearray)
    read: dict[str, bytearray] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    usage: tree.Usage = field(default_factory=tree.Usage)
    stopped: str = ""  # the limit that it exceeded
    status: int | None = None  # its exit code, once it has ended

    @property
    def started(self) -> bool:
        return self.counts.get("line", 0) > 0


class Supervisor:
    """Runs one job per call of ``run``; see ``pool.Job`` for the fields."""

    def __init__(self, boxes: Boxes, inside: dict[str, bytes], *, parent: int):
        self.boxes, self.parent = boxes, parent
        self.inside = {mode: sealed(code) for mode, code in inside.items()}

    def run(self, job: Reply, parts: list[bytes]) -> tuple[Reply, list[bytes]]:
        """Returns the job's outcome and output bytes; no process of the job is left by then."""
        self.job, self.boxed = job, list[Box]()
        self.selector = selectors.DefaultSelector()
        self.idle = 0.0  # seconds in which no box ran or waited for a processor
        start = time.monotonic()
        self.until = start + job["wall"]
        try:
            if job["mode"] == "script":
                outcome = self._script(*parts)
            else:
                outcome = self._answers(*parts)
        finally:
            clean = tree.end_children()
            for box in self.boxed:
                for descriptor in (*box.outputs, box.request, *([box.death] if box.death >= 0 else [])):
                    os.close(descriptor)
            self.selector.close()
        # A process that survived could disturb the next job, so this one counts as the sandbox's failure.
        if not clean:
            outcome[0].update(ended="failed", why="processes of the sandbox could not be ended")
        outcome[0]["seconds"] = time.monotonic() - start
        return outcome

    # ------------------------------------------------------------------------------------------------------- starting

    def _start(self, mode: str, program: bytes, setup: bytes, stdin: bytes | None) -> Box:
        job = self.job
        # Programs and input travel in sealed files rather than pipes: nothing has to be fed while the box starts, and
        # arguments would be limited in length.
        held = [sealed(program), sealed(setup)]
        stdin_at = os.open("/dev/null", os.O_RDONLY) if stdin is None else sealed(stdin)
        reply_read, reply_write = os.pipe()
        request_read, request_write = os.pipe()
        pipes = {"line": (reply_read, reply_write)}
        sink = os.open("/dev/null", os.O_WRONLY)
        if mode == "script":
            pipes |= {"stdout": os.pipe(), "stderr": os.pipe()}
        else:  # standard output is discarded: values travel over ``line``
            pipes["stderr"] = os.pipe()
        # Standard output of a function is not looked at, but it needs a place.
        out, err = pipes["stdout"][1] if mode == "script" else sink, pipes["stderr"][1]
        limits = (job["cpu"], job["memory"] + _EXTRA, self.boxes.task_limit(job["processes"]), job["file"])
        # Reopened, because a duplicate would share its file offset with the boxes before.
        held.append(os.open(f"/proc/self/fd/{self.inside[mode]}", os.O_RDONLY))
        arguments = ["-c", _BOOT, str(held[2]), mode, job.get("entry", "-")]
        # In the order in which inside.main reads them.
        arguments += [str(n) for n in (*held[:2], request_read, reply_write, *limits)]
        try:
            pid = self.boxes.start(arguments, stdin=stdin_at, stdout=out, stderr=err,
                                   keep=[*held, request_read, reply_write])  # fmt: skip
        finally:
            # The box has its own copies. A write end left open here would hide the end of a stream.
            for descriptor in (*held, stdin_at, sink, request_read, *(pair[1] for pair in pipes.values())):
                os.close(descriptor)
        outputs = {pair[0]: name for name, pair in pipes.items()}
        box = Box(pid, outputs, tree.UsageWatch(pid), request_write, _death_of(pid))
        box.read = {name: bytearray() for name in pipes}
        for descriptor in box.outputs:
            os.set_blocking(descriptor, False)
            self.selector.register(descriptor, selectors.EVENT_READ, box)
        if box.death >= 0:
            self.selector.register(box.death, selectors.EVENT_READ, box)
        os.set_blocking(request_write, False)
        self.boxed.append(box)
        return box

    # ------------------------------------------------------------------------------------------------------- the jobs

    def _script(self, program: bytes, stdin: bytes) -> tuple[Reply, list[bytes]]:
        box = self._start("script", program, b"", stdin)
        self._attend(lambda: box.status is not None)
        return self._outcome(box), [bytes(box.read["stdout"]), bytes(box.read["stderr"])]

    def _answers(self, program: bytes, setup: bytes, tests: bytes) -> tuple[Reply, list[bytes]]:
        """Has the program's function called: with given calls, or with those that asserts in a second box make."""
        box = self._start("calls", program, setup, None)
        if self.job["mode"] == "calls":
            lines = self._given_calls(box, tests)
            return self._outcome(box), [b"\n".join(lines), bytes(box.read["stderr"])]
        # ---- two boxes, and this process passes lines between them: a call from the judge, its answer from the program
        judge = self._start("tests", tests, setup, None)
        answered = done = b""
        ready = self._line(box, judge)
        while ready is not None:
            answered = ready  # the program's last line: how its import, or its last call, went
            # The judge's next call, or its last line, which says whether all asserts held.
            line = self._line(judge, box)
            if line is None or not line.startswith(b'["call",'):
                done = line or b""
                break
            self._send(box, line)
            ready = self._line(box, judge)
            if ready is not None:
                self._send(judge, ready)
        outcome = self._outcome(box)
        outcome["judge"] = self._outcome(judge)
        return outcome, [answered, done, bytes(box.read["stderr"]), bytes(judge.read["stderr"])]

    def _given_calls(self, box: Box, calls: bytes) -> list[bytes]:
        lines: list[bytes] = []
        # The empty entry stands for the import, which is answered without being asked for.
        for call in [b"", *calls.split(b"\n")]:
            if call:
                self._send(box, call)
            line = self._line(box)
            if line is None:
                break
            lines.append(line)
            if not call and not line.startswith(b'["r",'):  # the import failed
                break
        return lines

    def _outcome(self, box: Box) -> Reply:
        ended = "limit" if box.stopped else "exit" if box.status is not None else "running"
        # A box that never wrote "started" did not reach the program: the sandbox's failure, not a wrong answer.
        if not box.started and ended != "running":
            said = box.read["stderr"].decode("utf-8", "replace").strip()
            ended, box.stopped = "failed", box.stopped or f"the sandbox did not start: {said[-300:] or box.status}"
        return {"ended": ended, "why": box.stopped, "status": box.status,
                "cpu": box.usage.cpu, "peak": box.counts.get("peak", 0)}  # fmt: skip

    # ------------------------------------------------------------------------------------------------ reading, limits

    def _send(self, box: Box, line: bytes) -> None:
        box.unsent += line + b"\n"

    def _line(self, box: Box, *others: Box) -> bytes | None:
        """Returns the next line that ``box`` writes; None if it ended, or any box exceeded a limit, before that."""
        heard = box.read["line"]

        def there() -> bool:
            if heard[:8] == b"started\n":  # its first line, written before the program is loaded
                del heard[:8]
            return b"\n" in heard or box.status is not None or any(b.stopped for b in (box, *others))

        self._attend(there)
        end = heard.find(b"\n")
        if end < 0 or any(b.stopped for b in (box, *others)):
            return None
        line = bytes(heard[:end])
        del heard[: end + 1]
        return line

    def _attend(self, there: Any) -> None:
        """Reads, writes and enforces limits until ``there()``, or until every box has ended or one was stopped."""
        look = time.monotonic() + FIRST_LOOK
        while not there():
            self._exchange(look)
            self._reap()
            if all(box.status is not None for box in self.boxed):
                return
            if time.monotonic() >= look:
                self._check(late=time.monotonic() > self.until)
                look = time.monotonic() + BETWEEN
                if os.getppid() != self.parent:  # the run has ended: no process is left to read the answer
                    tree.end_children()
                    os._exit(1)
            # A limit of one box ends the job: the other would wait for it.
            if any(box.stopped for box in self.boxed):
                tree.end_children()
                return

    def _exchange(self, until: float) -> None:
        """Sends what the boxes take, and reads what they have written, waiting up to the time ``until``."""
        for box in self.boxed:
            self._write(box)
        # The selector waits for output and deaths. Unsent input, and deaths without a descriptor, need polling.
        often = any(box.unsent or box.death < 0 for box in self.boxed)
        for key, _ in self.selector.select(0.002 if often else max(until - time.monotonic(), 0.0)):
            if key.fd != key.data.death:
                self._read(key.data, key.fd)

    def _reap(self) -> None:
        for box in self.boxed:
            if box.status is None:
                pid, status, used = os.wait4(box.pid, os.WNOHANG)
                if pid:
                    box.status = os.waitstatus_to_exitcode(status)
                    if box.death >= 0:
                        self.selector.unregister(box.death)
                    # A program that ends before the first check was never sampled: wait4 still knows its CPU time.
                    box.usage = replace(box.usage, cpu=max(box.usage.cpu, used.ru_utime + used.ru_stime))
                    for descriptor in list(box.outputs):  # drains the pipes
                        self._read(box, descriptor, all_of_it=True)

    def _write(self, box: Box) -> None:
        while box.unsent:
            try:
                del box.unsent[: os.write(box.request, box.unsent[: 1 << 16])]
            except BlockingIOError:
                return
            except BrokenPipeError:
                # It reads no more: its end is noticed when it is reaped.
                box.unsent.clear()

    def _read(self, box: Box, descriptor: int, *, all_of_it: bool = False) -> None:
        stream = box.outputs[descriptor]
        most = {"stdout": self.job["output"], "stderr": self.job["output"], "line": self.job["answers"]}[stream]
        while True:
            try:
                part = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return
            if not part:
                self.selector.unregister(descriptor)
                os.close(descriptor)
                del box.outputs[descriptor]
                return
            box.counts[stream] = box.counts.get(stream, 0) + len(part)
            box.read[stream] += part
            # Counted in full against the limit, but only the end is kept: that is where a traceback names the error.
            if stream == "stderr" and len(box.read[stream]) > STDERR_KEPT:
                del box.read[stream][:-STDERR_KEPT]
            if box.counts[stream] > most:
                box.stopped = f"wrote more than {most:,} bytes to {stream}".replace("line", "its results")
                return
            if not all_of_it:  # one piece per wake-up, so that a flood of output cannot hold up the limits
                return

    def _check(self, *, late: bool) -> None:
        idle = []
        for box in self.boxed:
            if box.status is None:
                before, box.usage = box.usage.idle, box.watch.look()
                idle.append(box.usage.idle - before)
        # With two boxes one always waits for the other. Only time in which both idle is sleep, and it is charged to the
        # program (the first box).
        self.idle += min(idle, default=0.0)
        for box in self.boxed:
            if box.status is None and not box.stopped:
                box.counts["peak"] = max(box.counts.get("peak", 0), box.usage.resident)
                box.stopped = self._exceeded(box, late=late)

    def _exceeded(self, box: Box, *, late: bool) -> str:
        """Names the limit that a box has exceeded; empty if none."""
        job, usage = self.job, box.usage
        slept = self.idle if box is self.boxed[0] else 0.0
        if usage.cpu + slept > job["seconds"]:
            verb = "ran" if usage.cpu > 9 * slept else "slept" if slept > 9 * usage.cpu else "ran and slept"
            return f"{verb} for more than {job['seconds']:g} s"
        if usage.resident > job["memory"] + _EXTRA:
            return f"used more than {job['memory'] >> 20} MiB of memory"
        if usage.tasks > job["processes"] + _INTERNAL:
            return f"had more than {job['processes']} processes and threads"
        return f"clock: was not done after {job['wall']:g} s on this machine" if late else ""


def inside_of_boxes() -> dict[str, bytes]:
    """Compiles ``inside.py`` for every mode, with only the sections that the mode needs."""
    with open(os.path.join(os.path.dirname(__file__), "..", "inside.py"), encoding="utf-8") as file:
        # Sections of inside.py begin with this mark and their name.
        first, *rest = file.read().split("# ==== ")
    sections = [("all", first), *(part.split("\n", 1) for part in rest)]
    wanted = {"script": (), "calls": ("values", "calls"), "tests": ("values", "tests")}
    made = {}
    with tempfile.TemporaryDirectory(prefix="trew-sandbox-") as folder:
        source, compiled = os.path.join(folder, "inside.py"), os.path.join(folder, "inside.pyc")
        for mode, names in wanted.items():
            with open(source, "w", encoding="utf-8") as file:
                file.write("".join(code for name, code in sections if name in ("all", *names)))
            # optimize: of this file alone. Programs and asserts are compiled in the box, where asserts must stay.
            py_compile.compile(source, compiled, dfile="inside.py", doraise=True, optimize=2)
            with open(compiled, "rb") as file:
                made[mode] = file.read()
    return made


def _death_of(pid: int) -> int:
    # A pidfd is readable once its process has ended, so one select waits for output and deaths alike.
    try:
        return os.pidfd_open(pid)
    except (OSError, AttributeError):
        return -1


def main(source: int, target: int, *, parent: int, design: dict[str, Any]) -> None:
    """Serves jobs until the other side hangs up. A message is a JSON object and the byte strings that go with it."""
    for request in REQUESTS:
        signal.signal(request, lambda *_: None)  # a handler, not SIG_IGN, which the boxes would inherit
    channel = Channel(source, target, parent=parent)
    try:
        inside = inside_of_boxes()  # before Boxes: a stage may cover the folders that this reads and writes
        supervisor = Supervisor(Boxes(Design(**design)), inside, parent=parent)
    except (OSError, py_compile.PyCompileError) as error:
        channel.send(json.dumps({"ready": False, "why": str(error)}).encode())
        return
    with contextlib.suppress(Closed):
        channel.send(json.dumps({"ready": True}).encode())
        while True:
            job, *parts = channel.receive()
            try:
                reply, made = supervisor.run(json.loads(job), parts)
            except OSError as error:
                reply, made = {"ended": "failed", "why": f"{type(error).__name__}: {error}"}, []
            channel.send(json.dumps(reply).encode(), *made)
