"""No process of a user's function outlives the run, however either of them ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rewards_help import alive, functions_of, gone, group, pid_of, verdicts_of, write
from trew.rewards.isolation.tree import children

HELP = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
"""Where rewards_help and what it needs lie."""
SCORES = [sys.executable, "-c", """
import sys; sys.path[:0] = sys.argv[2:]; from rewards_help import group
from trew.config import RewardConfig; from trew.rewards import RewardSet
RewardSet.from_config([RewardConfig(name=sys.argv[1])]).score([group('a')])
"""]  # fmt: skip


def test_closing_ends_the_process_and_all_that_it_started(tmp_path: Path) -> None:
    source = """
        import subprocess, sys

        def f(completions, **kwargs):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            return [float(child.pid)]
    """
    rewards = functions_of(tmp_path, source)
    [(grandchild, _)] = verdicts_of(rewards.score([group("a")]))
    pid = pid_of(rewards)
    rewards.close()
    assert gone(pid)
    assert gone(int(grandchild or 0))


@pytest.mark.parametrize("hang", ["time.sleep(1000)", "9 ** 9 ** 9 ** 9"])
def test_a_killed_run_leaves_no_process(tmp_path: Path, hang: str) -> None:
    source = f"import os, time\ndef f(completions, **kwargs):\n    open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n    {hang}\n"  # noqa: E501
    path = write(tmp_path, source)
    run = subprocess.Popen([*SCORES, f"{path}:f", *HELP])
    end = time.monotonic() + 60
    while time.monotonic() < end and not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    assert alive(pid)
    run.kill()
    run.wait()
    assert gone(pid)


STARTS = """
    import os, subprocess, sys, time

    def f(completions, **kwargs):
        deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(999)"
        sleep = [sys.executable, "-c", deaf]
        pids = [subprocess.Popen(sleep).pid, subprocess.Popen(sleep, start_new_session=True).pid]
        if os.fork() == 0:  # a daemon: its parent is gone before anybody looks
            os.setsid()
            if os.fork() == 0:
                os.execv(sleep[0], sleep)
            os._exit(0)
        with open({pids!r}, "w") as file:
            file.write(" ".join(map(str, [os.getpid(), *pids])) + "\\n")
        {then}
"""


def below(pid: int) -> set[int]:
    """``pid`` and all its descendants, with those that their guardian inherited."""
    found = {pid}
    for _ in range(6):
        found |= {child for one in found for child in children(one)}
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="the guardian is of Linux")
@pytest.mark.parametrize("then", ["time.sleep(1000)", "9 ** 9 ** 9 ** 9", "os.killpg(0, 9)"])
def test_what_a_function_started_ends_with_a_killed_run(tmp_path: Path, then: str) -> None:
    path = write(tmp_path, STARTS.format(pids=str(tmp_path / "pids"), then=then))
    run = subprocess.Popen([*SCORES, f"{path}:f", *HELP])
    end = time.monotonic() + 60
    while time.monotonic() < end and not ((tmp_path / "pids").exists() and "\n" in (tmp_path / "pids").read_text()):
        time.sleep(0.02)
    family = {*map(int, (tmp_path / "pids").read_text().split()), *below(run.pid)} - {run.pid}
    assert len(family) >= 3  # more where the function still lives, and its guardian with it
    for pid in children(run.pid):
        os.kill(pid, signal.SIGTERM)  # a cluster manager asks every process to stop; the guardian has to stay
    run.kill()
    run.wait()
    assert [pid for pid in family if not gone(pid)] == []


def test_closing_ends_processes_with_sessions_of_their_own(tmp_path: Path) -> None:
    rewards = functions_of(tmp_path, STARTS.format(pids=str(tmp_path / "pids"), then="return [1.0]"))
    assert verdicts_of(rewards.score([group("a")])) == [(1.0, "scored")]
    family: set[int] = set()
    end = time.monotonic() + 60
    while len(family) < 5 and time.monotonic() < end:  # on a busy machine they start after the answer
        family = {*map(int, (tmp_path / "pids").read_text().split()), *below(pid_of(rewards))}
        family = {pid for pid in family if alive(pid)}  # the daemon's first fork has ended
    assert len(family) >= 5
    rewards.close()
    assert [pid for pid in family if not gone(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the guardian is of Linux")
def test_the_guardian_holds_nothing_open_and_ends_its_worker_when_it_is_killed(tmp_path: Path) -> None:
    rewards = functions_of(tmp_path, "def f(completions, **kwargs):\n    return [1.0]\n")
    rewards.score([group("a")])
    guardian = pid_of(rewards)
    open_now = [os.readlink(entry) for entry in Path(f"/proc/{guardian}/fd").iterdir()]
    assert sum(place.startswith("pipe:") for place in open_now) == 3  # from the run, and both ends of its wake-up
    assert set(open_now) - {place for place in open_now if place.startswith("pipe:")} == {"/dev/null"}
    worker = set(children(guardian))
    assert len(worker) == 1
    os.kill(guardian, signal.SIGKILL)
    assert all(map(gone, worker))
    rewards.close()


def test_a_forked_process_has_functions_of_its_own_and_leaves_those_of_its_parent(tmp_path: Path) -> None:
    rewards = functions_of(
        tmp_path, "import os\ndef f(completions):\n    return [float(os.getpid())] * len(completions)\n"
    )
    [(before, _)] = verdicts_of(rewards.score([group("a")]))
    if (child := os.fork()) == 0:
        code = 1
        try:
            [(own, _)] = verdicts_of(rewards.score([group("a")]))
            rewards.close()
            code = 0 if own != before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert verdicts_of(rewards.score([group("a")])) == [(before, "scored")]
    rewards.close()


def test_ctrl_c_ends_a_call(tmp_path: Path) -> None:
    # Started in the background, this process would ignore the signal from the beginning.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ctrl_c_ends_a_call(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)


def ctrl_c_ends_a_call(tmp_path: Path) -> None:
    begun, done = tmp_path / "begun", tmp_path / "done"
    source = f"import time\ndef f(completions):\n    open({str(begun)!r}, 'w')\n    time.sleep(100)\n"
    rewards = functions_of(tmp_path, f"{source}    open({str(done)!r}, 'w')\n")
    pid = pid_of(rewards)

    def interrupt() -> None:
        while not begun.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        rewards.score([group("a")])
    assert gone(pid)
    assert not done.exists()
