"""Attacks on the sandbox: every program of ``sandbox_attacks``, behind every boundary, from two threads."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import threading
import time
from pathlib import Path

import pytest

import boundaries
import tiers
from fault.sandbox_attacks import CONTAINED, STOPPED
from sandbox_help import supervisors
from trew.rewards.isolation import tree
from trew.rewards.sandbox import Job, JobLimits, JobOutcome, pool
from trew.rewards.sandbox.host.boxes import Design

LIMITS = JobLimits(seconds=0.6, memory=160 << 20, processes=24, output=1 << 20)
# For programs that end by themselves: on a busy machine they may wait for a processor longer than 0.6 s.
PATIENT = dataclasses.replace(LIMITS, seconds=5.0)
BOMBS = ("thread-bomb", "file-bomb")


@pytest.fixture(scope="module", params=boundaries.asked())
def boxes(request) -> list[Design]:
    return boundaries.usable(request.param)


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """Things of the host that a program would reach if it got out."""
    folder = tmp_path_factory.mktemp("host")
    canary = folder / "canary"
    canary.write_text("canary")
    canary.chmod(0o666)
    os.environ["TREW_CANARY"] = "canary"
    abstract = "\0trew-" + secrets.token_hex(4)
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX) as hidden,
    ):
        unix.bind(str(folder / "socket"))
        unix.listen()
        hidden.bind(abstract)
        hidden.listen()
        for server in (tcp, unix, hidden):
            server.settimeout(0.0)
        yield {
            "home": [str(Path.home() / name) for name in (".ssh", ".bashrc", ".profile", ".cache", ".config")],
            "home_itself": str(Path.home()),
            "this": __file__,
            "repository": str(Path(__file__).parents[2]),
            "canary": str(canary),
            "pid": os.getpid(),
            "port": tcp.getsockname()[1],
            "unix": str(folder / "socket"),
            "abstract": abstract,
        }
        for server in (tcp, unix, hidden):
            with pytest.raises(BlockingIOError):
                server.accept()  # nobody came
    assert canary.read_text() == "canary"
    del os.environ["TREW_CANARY"]


def everywhere(boxes: list[Design], program: str, limits: JobLimits = LIMITS) -> list[tuple[Design, JobOutcome]]:
    """The program's outcome behind every boundary: from the main thread, and from another one."""
    job = Job("script", (program.encode("utf-8", "surrogatepass"), b"input\n"), limits)
    got: list[tuple[Design, JobOutcome]] = []
    others = [threading.Thread(target=lambda d=d: got.append((d, pool(d).run(job)))) for d in boxes]
    for thread in others:
        thread.start()
    got += [(design, pool(design).run(job)) for design in boxes]
    for thread in others:
        thread.join()
    assert len(got) == 2 * len(boxes)
    return got


def nothing_is_left() -> None:
    """The supervisors have no children."""
    for child in supervisors():
        until = time.monotonic() + 60
        while tree.children(child) and time.monotonic() < until:
            time.sleep(0.01)
        assert tree.children(child) == []


@pytest.mark.parametrize("name", CONTAINED)
def test_what_it_tries_fails(name, boxes, host):
    program = f"HOST = {host!r}\n{CONTAINED[name]}\n"
    for design, outcome in everywhere(boxes, program, LIMITS if name in BOMBS else PATIENT):
        said = b" ".join(outcome.parts).decode("utf-8", "replace")
        assert "ESCAPED" not in said, (design, said)
        assert "Traceback" not in said, (design, said)
        assert outcome.ended == "exit" or name in BOMBS, (design, outcome)
        assert outcome.status == 0 or outcome.ended == "limit", (design, outcome)
    nothing_is_left()


STOPPED_ALWAYS = ("spin-deaf", "fork-bomb", "recursion", "sleep", "close-everything")
"""The others are stopped in the same ways: they run in ``make test-sandbox``, behind every boundary."""


@pytest.mark.parametrize("name", tiers.some(STOPPED, STOPPED_ALWAYS))
def test_it_is_stopped_and_nothing_is_left(name, boxes, host):
    program, reasons = STOPPED[name]
    if name not in ("sleep", "stop-itself", "wait-for-ever"):
        reasons = (*reasons, "ran")  # on a busy machine processor time may be the first limit that is reached
    for design, outcome in everywhere(boxes, program):
        if "fork" in program and design.kind == "landlock":
            reasons = (*reasons, "status", "ran", "slept")  # no process can be made there: they end otherwise
        assert outcome.ended in ("exit", "limit"), (design, outcome)
        assert outcome.status != 0, (design, outcome)
        assert not outcome.clock, (design, outcome)
        reason = outcome.why or f"status {outcome.status}"
        assert any(word in reason for word in reasons), (design, outcome)
        assert sum(map(len, outcome.parts)) < 2 << 20
    nothing_is_left()


def test_a_source_of_ten_megabytes_runs(boxes):
    program = "x = [" + "1," * (5 << 20) + "]\nprint('end')"
    for _, outcome in everywhere(boxes, program):
        assert outcome.ended in ("exit", "limit")
        assert outcome.parts[0] in (b"end\n", b"")


def test_what_a_good_program_needs_works(boxes):
    program = """
import asyncio, bisect, collections, dataclasses, decimal, hashlib, heapq, itertools, json, random, re, sqlite3, sys
import concurrent.futures, tempfile, time, uuid, zlib, lzma, ssl, datetime, typing, statistics, fractions, threading
sys.setrecursionlimit(20000)
def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
with concurrent.futures.ThreadPoolExecutor(4) as threads:
    print(sum(threads.map(lambda x: x * x, range(10))))
print(deep(10000), asyncio.run(asyncio.sleep(0, 7)), hashlib.sha256(b'x').hexdigest()[:8], input())
print(open(0).read() == '', 'über ✓', __name__, sys.argv)
"""
    for design, outcome in everywhere(boxes, program, PATIENT):
        assert outcome.parts[0].decode() == "285\n10000 7 2d711642 input\nTrue über ✓ __main__ ['main.py']\n", (
            design,
            outcome,
        )
        assert outcome.status == 0
