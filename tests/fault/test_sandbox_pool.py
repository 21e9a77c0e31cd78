"""The pool of the sandbox: no leak over hundreds of runs, no orphan when somebody dies, the same verdict under load."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from pathlib import Path

import pytest

import tiers
from sandbox_help import supervisors
from trew.errors import SandboxError
from trew.rewards import KINDS, grade
from trew.rewards.isolation import tree
from trew.rewards.sandbox import Job, JobLimits, boundary, choose, close_pools
from trew.rewards.sandbox.host.boxes import Design
from trew.rewards.sandbox.pool import SandboxPool

RIGHT = "```python\ndef f(x):\n    return x + 1\n```"
WRONG = "```python\nimport os\ndef f(x):\n    os.fork()\n    os.fork()\n    return x\n```"
DAEMON = (
    "```python\nimport os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\ndef f(x): return x + 1\n```"
)
ASSERTS = {"entry_point": "f", "asserts": ["assert f(1) == 2"]}


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    try:
        boundary()
    except SandboxError as error:
        pytest.skip(str(error))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def living(pids: list[int]) -> list[int]:
    """Those of ``pids`` that still run (a zombie does not)."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


def kill_supervisors() -> None:
    for supervisor in supervisors():
        with contextlib.suppress(ProcessLookupError):  # it ended since it was found
            os.kill(supervisor, signal.SIGKILL)


def gone(pids: list[int], seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while living(pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not living(pids)


@pytest.mark.nightly  # runs in make test-sandbox
def test_hundreds_of_runs_leave_no_process_no_descriptor_and_no_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    together, many = KINDS["code_func"].grade_many, tiers.examples(16)
    assert together is not None
    items = [(text, None, ASSERTS) for text in (RIGHT, WRONG, DAEMON, RIGHT)] * many
    close_pools()
    others = set(supervisors())  # of other rewards, which other tests may have left waiting
    together(items[:8])
    pipes = descriptors() - 2 * len(supervisors())  # two to each; how many there are depends on what came together
    for _ in range(3):
        verdicts = together(items)
        assert [v.score for v in verdicts][::4] == [1.0] * many
        assert [v.score for v in verdicts][1::4] == [0.0] * many
    assert descriptors() - 2 * len(supervisors()) == pipes
    assert len(set(supervisors()) - others) <= len(os.sched_getaffinity(0))
    assert os.listdir(tmp_path) == []
    ours = set(supervisors()) - others
    assert ours
    for supervisor in ours:
        assert tree.children(supervisor) == []
        assert len(os.listdir(f"/proc/{supervisor}/fd")) < 20
    close_pools()
    assert set(supervisors()) <= others


def test_the_same_verdicts_from_many_threads_at_once():
    got: dict[int, list[float | None]] = {}

    def work(number: int) -> None:
        got[number] = [grade("code_func", text, None, **ASSERTS).score for text in (RIGHT, WRONG) * 2]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(got.values()) == [[1.0, 0.0, 1.0, 0.0]] * 6


def test_a_limit_is_of_cpu_and_not_of_the_clock():
    """Four programs of 0.4 s on one processor take longer than their limit by the clock, and none of them is wrong."""
    program = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\nprint('end')"
    design = boundary().design
    job = Job("script", (program.encode(), b""), JobLimits(seconds=1.2))
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})  # what is started from here on inherits it
    own = SandboxPool(design, size=4)
    try:
        start = time.monotonic()
        outcomes = own.run_many([job] * 4)
        assert time.monotonic() - start > 1.2
    finally:
        os.sched_setaffinity(0, processors)
        own.close()
    assert [outcome.parts[0] for outcome in outcomes] == [b"end\n"] * 4


def test_a_supervisor_that_dies_is_replaced_and_its_job_done_again():
    assert grade("code_func", RIGHT, None, **ASSERTS).score == 1
    kill_supervisors()
    assert grade("code_func", RIGHT, None, **ASSERTS).score == 1
    slow = "```python\nimport time\ndef f(x):\n    time.sleep(1.0)\n    return x + 1\n```"

    def kill_soon() -> None:
        until = time.monotonic() + 60
        while not any(tree.children(one) for one in supervisors()) and time.monotonic() < until:
            time.sleep(0.01)
        kill_supervisors()

    killer = threading.Thread(target=kill_soon)
    killer.start()
    assert grade("code_func", slow, None, **ASSERTS).score == 1
    killer.join()


def test_two_deaths_are_a_fault_of_the_sandbox_and_no_score():
    sleeper = "```python\nimport time\ndef f(x): time.sleep(20)\n```"
    stop = threading.Event()

    def kill_all() -> None:
        while not stop.wait(0.1):
            kill_supervisors()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        verdict = grade("code_func", sleeper, None, **ASSERTS)
    finally:
        stop.set()
        killer.join()
    assert (verdict.score, verdict.status) == (None, "sandbox_error")
    assert "died twice" in verdict.detail


SLEEPING = """
    import os, threading, time
    from trew.rewards import grade
    from trew.rewards.sandbox import boundary
    from trew.rewards.isolation import tree
    boundary()  # its self-test starts and ends processes of its own
    reply = "```python\\nimport time\\ndef f(x): time.sleep(100)\\n```"
    go = lambda: grade("code_func", reply, None, entry_point="f", asserts=["assert f(1) == 2"], timeout_s=60)
    threading.Thread(target=go, daemon=True).start()
    before, now = None, []
    while now != before or not any(tree.children(pid) for pid in tree.children(os.getpid())):
        time.sleep(1.0)
        before, now = now, tree.descendants(os.getpid())
    print(*now, flush=True)
    time.sleep(1000)
"""


def test_nothing_outlives_a_process_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLEEPING)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) >= 2  # a supervisor and what it runs
    assert living(pids) == pids
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert gone(pids)


@pytest.mark.nightly  # runs in make test-sandbox
def test_nothing_outlives_a_supervisor_that_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SLEEPING)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    before = [pid for pid in pids if pid not in tree.children(parent.pid)]
    assert before
    for supervisor in tree.children(parent.pid):
        os.kill(supervisor, signal.SIGKILL)
    try:
        assert gone(before)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_a_forked_process_grades_for_itself():
    assert grade("code_func", RIGHT, None, **ASSERTS).score == 1
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            verdicts = [grade("code_func", text, None, **ASSERTS).score for text in (RIGHT, WRONG)]
            code = 0 if verdicts == [1.0, 0.0] else 2
        finally:
            close_pools()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert grade("code_func", RIGHT, None, **ASSERTS).score == 1


@pytest.fixture
def _asked_anew():
    choose._found.cache_clear()
    yield
    choose._found.cache_clear()


@pytest.mark.usefixtures("_asked_anew")
def test_without_a_boundary_nothing_runs(monkeypatch, tmp_path):
    monkeypatch.setattr(choose, "designs", lambda: [Design("landlock", user=None)])
    monkeypatch.setattr(choose, "self_test", lambda design: "the network can be reached")
    canary = tmp_path / "canary"
    reply = f"```python\nopen({str(canary)!r}, 'w').write('ran')\n```"
    with pytest.raises(SandboxError, match=r"(?s)network can be reached.*install bubblewrap"):
        grade("code_stdin", reply, None, tests=[{"input": "", "output": ""}])
    with pytest.raises(SandboxError):
        grade("code_func", RIGHT, None, **ASSERTS)
    assert not canary.exists()


LEAKS = {
    "network": (
        "import socket",
        "class socket:\n    def socket(*a): return socket()\n    settimeout = connect = lambda *a: None",
    ),
    "files": ("with open(PATH) as f: return f.read() != \"\"", "return True"),
    "processes": ("while made < 2000:", "made = 2000\n    while made < 2000:"),
    "memory": ("for _ in range(4000)", "for _ in range(4)"),
}  # fmt: skip


@pytest.mark.parametrize("what", tiers.some(LEAKS, ("processes",)))
def test_the_self_test_notices_every_leak(what, monkeypatch):
    """Each of its programs is changed into one that reports success, as it would behind a boundary with that hole."""
    old, new = LEAKS[what]
    name = {"network": "_NETWORK", "files": "_CANARY", "processes": "_FORKS", "memory": "_MEMORY"}[what]
    assert old in getattr(choose, name)
    design = boundary().design
    monkeypatch.setattr(choose, name, getattr(choose, name).replace(old, new))
    assert what in choose.self_test(design)
    monkeypatch.undo()
    assert choose.self_test(design) == ""


SPIN = "import os\nos.sched_setaffinity(0, {cpu})\n{more}\nprint(flush=True)\nwhile True: pass"


def test_a_long_wait_for_a_processor_is_no_sleep():
    cpu = {min(os.sched_getaffinity(0))}
    # The kernel adds a wait up when it ends. Of the lowest class, which a spinning neighbour keeps from running.
    patient = SPIN.format(cpu=cpu, more="os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))")
    with contextlib.ExitStack() as stack:
        started = []
        for program in (patient, SPIN.format(cpu=cpu, more="")):
            one = stack.enter_context(subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE))
            stack.callback(one.kill)
            assert one.stdout is not None
            one.stdout.readline()
            started.append(one)
        watch, end = tree.UsageWatch(started[0].pid), time.monotonic() + 1.5
        while time.monotonic() < end:
            time.sleep(0.02)
            usage = watch.look()
    assert usage.cpu < 1.2, "it did not wait"
    assert usage.idle < 0.1
