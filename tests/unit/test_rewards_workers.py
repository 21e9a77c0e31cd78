"""The pool of grading processes: limits, replacement, threads, death of the parent, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiers
from trew.rewards.isolation.tasks import TaskLimits, TaskOutcome, TaskPool

TASK = """
import os, sys, time

def prepare():
    pass

def run(payload):
    what = payload["do"]
    if what == "echo":
        return payload["text"]
    if what == "pid":
        return os.getpid()
    if what == "spin":
        while True:
            pass
    if what == "power":
        return len(str(9 ** 9 ** 9))  # one call into C: no Python code could stop it
    if what == "sleep":
        time.sleep(payload["seconds"])
        return "slept"
    if what == "eat":
        return len([bytes(2**20) for _ in range(10**6)])
    if what == "grow":
        global kept
        kept = b'x' * (48 * 2**20)
        return os.getpid()
    if what == "crash":
        os.abort()
    if what == "crash once":
        if not os.path.exists(payload["mark"]):
            os.mkdir(payload["mark"])
            os.abort()
        return "second time"
    if what == "print":
        print("noise"); sys.stderr.write("noise"); sys.stdout.flush()
        return "quiet"
    if what == "raise":
        raise ValueError("no")
    if what == "deep":
        def down(n):
            return down(n + 1)
        return down(0)
    if what == "write":
        with open(payload["path"], "w") as file:
            file.write("x" * 10)
    if what == "hash":
        return [hash("x"), "torch" in sys.modules, "trew" in sys.modules]
"""
LIMITS = TaskLimits(cpu_s=0.4, memory_mb=128, wall_s=1.5, calls=5, growth_mb=32)


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("task") / "task.py"
    path.write_text(TASK)
    return path


@pytest.fixture
def pool(task: Path) -> Iterator[TaskPool]:
    made = TaskPool(task, limits=LIMITS, size=1)
    yield made
    made.close()


def children() -> set[int]:
    """The workers of this process that there are, dead ones that nobody waited for included."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.add(int(folder.name))
    return found


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(holds, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.05)
    return holds()


def test_it_answers_and_keeps_its_runner_for_as_many_calls_as_allowed(pool: TaskPool) -> None:
    assert pool.run({"do": "echo", "text": "\ud800 \x00 é" * 1000}) == TaskOutcome("done", "\ud800 \x00 é" * 1000)
    pids = [pool.run({"do": "pid"}).value for _ in range(6)]
    assert len(set(pids[:4])) == 1  # the echo was the first of five calls
    assert len({pids[3], pids[4]}) == 2
    assert pids[4] == pids[5]
    assert not any(alive(pid) for pid in pids[:4])


def test_what_runs_past_its_cpu_time_is_ended_and_the_next_call_does_not_notice(task: Path) -> None:
    pool = TaskPool(task, limits=TaskLimits(cpu_s=0.4, wall_s=60), size=1)
    pool.run({"do": "pid"})
    [worker] = pool._idle
    for work in ("spin", "power"):
        assert pool.run({"do": work}).status == "cpu"
        assert pool.run({"do": "echo", "text": "x"}).value == "x"
        assert pool._idle == [worker]  # with a forked runner, not a new interpreter
    pool.close()


def test_sleeping_costs_no_cpu_time_but_is_ended_by_the_wall_clock_after_two_tries(pool: TaskPool) -> None:
    assert pool.run({"do": "sleep", "seconds": 0.7}).value == "slept"
    outcome = pool.run({"do": "sleep", "seconds": 60})
    assert outcome.status == "wall"
    assert pool.run({"do": "echo", "text": "x"}).value == "x"


def test_memory_is_limited(pool: TaskPool) -> None:
    assert pool.run({"do": "eat"}).status in ("memory", "cpu")
    assert pool.run({"do": "echo", "text": "x"}).value == "x"


def test_a_runner_that_has_grown_is_replaced(pool: TaskPool) -> None:
    grown = pool.run({"do": "grow"}).value
    assert pool.run({"do": "pid"}).value != grown


def test_a_crash_is_tried_once_more(pool: TaskPool, tmp_path: Path) -> None:
    assert pool.run({"do": "crash once", "mark": str(tmp_path / "mark")}).value == "second time"
    assert pool.run({"do": "crash"}).status == "died"
    assert pool.run({"do": "echo", "text": "x"}).value == "x"


def test_errors_recursion_noise_and_files(pool: TaskPool, tmp_path: Path) -> None:
    assert pool.run({"do": "raise"}).value == {"error": "ValueError: no"}
    assert pool.run({"do": "deep"}).value == {"error": "nested too deeply"}
    assert pool.run({"do": "print"}).value == "quiet"
    pool.run({"do": "write", "path": str(tmp_path / "x")})
    assert not (tmp_path / "x").exists() or not (tmp_path / "x").read_text()


def test_the_process_has_fixed_hashes_and_neither_torch_nor_trew(pool: TaskPool) -> None:
    seed, torch, trew = pool.run({"do": "hash"}).value
    again = TaskPool(pool.task, limits=LIMITS, size=1)
    try:
        assert again.run({"do": "hash"}).value[0] == seed
    finally:
        again.close()
    assert not torch
    assert not trew


def test_neighbours_of_a_hostile_call_are_not_slowed(task: Path) -> None:
    pool = TaskPool(task, limits=TaskLimits(cpu_s=2.0, wall_s=60), size=2)
    try:
        pool.run_many([{"do": "pid"}, {"do": "pid"}])
        hostile = threading.Thread(target=pool.run, args=({"do": "spin"},))
        hostile.start()
        start = time.monotonic()
        assert all(pool.run({"do": "echo", "text": "x"}).value == "x" for _ in range(20))
        assert time.monotonic() - start < 2
        assert hostile.is_alive()
        hostile.join()
    finally:
        pool.close()


def test_many_calls_from_many_threads_get_their_own_answers_and_leave_nothing(task: Path) -> None:
    before = children()
    pool = TaskPool(task, limits=TaskLimits(calls=100), size=2)
    pool.run_many([{"do": "pid"}] * 4)
    fds = len(os.listdir("/proc/self/fd"))
    wrong: list[str] = []

    def ask(name: str) -> None:
        for i in range(150):
            text = f"{name} {i}"
            if pool.run({"do": "echo", "text": text}).value != text:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(f"t{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.run_many([{"do": "echo", "text": str(i)} for i in range(50)]) == [
        TaskOutcome("done", str(i)) for i in range(50)
    ]
    assert wrong == []
    assert len(os.listdir("/proc/self/fd")) == fds
    assert len(children() - before) == 2
    pool.close()
    assert children() == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.run({"do": "pid"})


@pytest.mark.slow
def test_ten_thousand_calls_leak_nothing(task: Path) -> None:
    pool = TaskPool(task, limits=TaskLimits(calls=50), size=2)
    pool.run_many([{"do": "pid"}] * 4)
    fds = len(os.listdir("/proc/self/fd"))
    assert all(o.status == "done" for o in pool.run_many([{"do": "echo", "text": "x"}] * 10_000))
    assert len(os.listdir("/proc/self/fd")) == fds
    pool.close()


PARENT = """
import json, os, signal, sys, threading, time
from pathlib import Path
from trew.rewards.isolation.tasks import TaskLimits, TaskPool
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
pool = TaskPool(Path(sys.argv[1]), limits=TaskLimits(cpu_s=60), size=1)
found = []
thread = threading.Thread(target=lambda: found.append(pool.run({"do": "pid"})))  # started in a thread that ends
thread.start(); thread.join(); time.sleep(0.3)
runner = pool.run({"do": "pid"}).value
assert runner == found[0].value
worker = pool._idle[0].process.pid
print(json.dumps([worker, runner]), flush=True)
how = sys.argv[2]
if how == "fork":
    pid = os.fork()
    if pid == 0:
        ok = pool.run({"do": "echo", "text": "child"}).value == "child"
        os._exit(0 if ok and pool._idle[0].process.pid != worker else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert pool.run({"do": "pid"}).value == runner
if how == "spinning":
    threading.Thread(target=pool.run, args=({"do": "spin"},), daemon=True).start()
    time.sleep(0.3)
if how in ("kill", "spinning"):
    os.kill(os.getpid(), signal.SIGKILL)
if how == "interrupt":
    def later():
        time.sleep(0.5); os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=later, daemon=True).start()
    try:
        pool.run({"do": "sleep", "seconds": 30})
    except KeyboardInterrupt:
        assert pool.run({"do": "echo", "text": "still"}).value == "still"
        print("interrupted", flush=True)
"""


@pytest.mark.parametrize(
    "how", tiers.some(["exit", "kill", "spinning", "fork", "interrupt"], ["kill", "spinning", "interrupt"])
)
def test_workers_end_with_their_parent_however_it_ends(task: Path, tmp_path: Path, how: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    done = subprocess.run(
        [sys.executable, str(script), str(task), how],
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert done.returncode == (-signal.SIGKILL if how in ("kill", "spinning") else 0), done.stderr
    first, *rest = done.stdout.splitlines()
    pids = [int(part) for part in first.strip("[]").split(",")]
    assert rest == (["interrupted"] if how == "interrupt" else [])
    assert wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.parametrize(("cores", "size"), [(1, 1), (2, 2), (3, 2), (4, 2), (8, 6), (96, 94)])
def test_a_pool_has_all_cores_but_two(tmp_path, monkeypatch, cores, size):
    """The run itself needs two; no constant keeps a large machine from grading with the others."""
    monkeypatch.setattr("trew.rewards.isolation.pool.processors", lambda: cores)
    assert TaskPool(tmp_path / "task.py").size == size
