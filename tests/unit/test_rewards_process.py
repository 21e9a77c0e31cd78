"""Users' functions in a process of their own: hangs, exits, crashes, limits, what is skipped and what ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards_help import group, write
from trew.config import RewardConfig
from trew.errors import ConfigError, RewardError
from trew.rewards import RewardSet
from trew.rewards.isolation.tree import children
from trew.rewards.user.process import Process
from trew.rewards.user.wire import decode, encode
from trew.types import Group, ScoredGroup


def of(tmp_path: Path, source: str, *names: str, **settings: object) -> RewardSet:
    path = write(tmp_path, source)
    configs = [RewardConfig(name=f"{path}:{name}", **settings) for name in names or ("f",)]  # type: ignore[arg-type]
    return RewardSet.from_config(configs)


def seen(scored: list[ScoredGroup]) -> list[tuple[float | None, str]]:
    return [(score.value, score.status) for one in scored for score in one.scores]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


def pid_of(rewards: RewardSet) -> int:
    runner = rewards.host
    assert isinstance(runner, Process)
    return runner._pool._idle[0].process.pid


FIVE = (group("a", "hang", "ccc", uid="p"), group("dddd", "ee", uid="q"))

HANGS = {
    "asleep": "time.sleep(1000)",
    "in C, holding the interpreter": "9 ** 9 ** 9 ** 9",
    "deaf to exceptions": "deaf()",
    "a loop in the event loop": "9 ** 9 ** 9",
}
SLOW = """
    import asyncio, os, time

    def deaf():
        while True:
            try:
                time.sleep(1)
            except BaseException:
                pass

    {define} f(completions, **kwargs):
        if "hang" in completions:
            {hang}
        return [float(len(c)) for c in completions]
"""


HELP = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
"""Where rewards_help and what it needs lie."""
SCORES = [sys.executable, "-c", """
import sys; sys.path[:0] = sys.argv[2:]; from rewards_help import group
from trew.config import RewardConfig; from trew.rewards import RewardSet
RewardSet.from_config([RewardConfig(name=sys.argv[1])]).score([group('a')])
"""]  # fmt: skip


@pytest.mark.parametrize("hang", HANGS)
def test_a_function_that_hangs_costs_its_completions_alone(tmp_path: Path, hang: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("trew.rewards.user.process.GRACE_SECONDS", 0.5)
    define = "async def" if "event" in hang else "def"
    rewards = of(tmp_path, SLOW.format(define=define, hang=HANGS[hang]), timeout_s=0.5)
    first = pid_of(rewards)
    assert seen(rewards.score(FIVE)) == [(1, "scored"), (None, "timeout"), (3, "scored"), (4, "scored"), (2, "scored")]
    assert gone(first)
    [warning] = rewards.take_warnings()
    assert "reward 'f' (" in warning
    assert "did not return within" in warning
    assert "for prompt 'p', completion 'hang'. 1 of 5 completions have no value for it; raise its timeout_s" in warning
    assert rewards.take_warnings() == []
    assert seen(rewards.score([group("abc")])) == [(3, "scored")]  # and it goes on
    rewards.close()


def test_async_functions_have_limits_of_their_own(tmp_path: Path) -> None:
    source = """
        import asyncio

        async def f(completions, **kwargs):
            if "hang" in completions:
                await asyncio.sleep(1000)
            return [float(len(c)) for c in completions]

        async def g(completions, **kwargs):
            return [10.0] * len(completions)

        async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            if solution_str == "hang":
                await asyncio.sleep(1000)
            return 100.0
    """
    rewards = of(tmp_path, source, "f", "g", "compute_score", timeout_s=0.5)
    rows = group("a", "hang", "ccc", answer="1")
    [scored] = rewards.score([rows])
    assert [s.value for s in scored.scores] == [111, None, 113]
    assert [s.parts["g"] for s in scored.scores] == [10, 10, 10]
    assert [s.statuses["compute_score"] for s in scored.scores] == ["scored", "timeout", "scored"]
    assert {k: v for k, v in rewards.summary([scored]).items() if "timeout" in k} == {
        "reward/f/timeout": (1, 3),
        "reward/compute_score/timeout": (1, 3),
        "reward/none/timeout": (1, 3),
    }
    assert len(rewards.take_warnings()) == 2


def test_verls_form_has_the_limit_per_completion(tmp_path: Path) -> None:
    source = """
        import time

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            time.sleep(0.15 if solution_str != "hang" else 1000)
            return 1.0
    """
    rewards = of(tmp_path, source, "compute_score", timeout_s=1.0)
    texts = ["hang", *"abcdefgh"]  # 8 x 0.15 s are more than the limit of one call
    assert [v for v, _ in seen(rewards.score([group(*texts, answer="1")]))] == [None] + [1.0] * 8


ENDS = {
    "os._exit(3)": "its process exited with code 3 during the call",
    "os.kill(os.getpid(), 11)": "its process was ended by signal 11 SIGSEGV during the call",
    "sys.exit(0)": "raised SystemExit: 0",
    "raise KeyboardInterrupt": "raised KeyboardInterrupt",
    "raise GeneratorExit": "raised GeneratorExit",
    "raise asyncio.CancelledError": "raised CancelledError",
    "raise TimeoutError('mine')": "raised TimeoutError: mine",
    "(lambda x: x(x))(lambda x: x(x))": "raised RecursionError",
    "bytearray(10 ** 15)": "raised MemoryError",
}
ENDING = """
    import asyncio, os, sys

    def f(completions, **kwargs):
        if "bad" in completions:
            {end}
        return [float(len(c)) for c in completions]
"""


@pytest.mark.parametrize("end", ENDS)
def test_whatever_ends_a_function_is_its_failure(tmp_path: Path, end: str) -> None:
    rows = group("a", "bad", "ccc")
    rewards = of(tmp_path, ENDING.format(end=end))
    with pytest.raises(RewardError) as error:
        rewards.score([rows])
    assert ENDS[end] in str(error.value)
    assert str(error.value).endswith("; for prompt 'q1', completion 'bad'")
    assert [row["completion"] for row in error.value.evidence["completions"]] == ["bad"]
    rewards.close()
    rewards = of(tmp_path, ENDING.format(end=end), on_failure="skip")
    assert seen(rewards.score([rows])) == [(1, "scored"), (None, "sandbox_error"), (3, "scored")]
    [warning] = rewards.take_warnings()
    assert ENDS[end] in warning
    assert "1 of 3 completions have no value" in warning
    rewards.close()


def test_a_process_that_the_system_kills_costs_its_completions_alone(tmp_path: Path) -> None:
    rewards = of(tmp_path, ENDING.format(end="os.kill(os.getpid(), 9)"))
    assert seen(rewards.score([group("a", "bad", "c")])) == [(1, "scored"), (None, "sandbox_error"), (1, "scored")]
    [warning] = rewards.take_warnings()
    assert "ended by signal 9 SIGKILL during the call; memory may have run out; for prompt 'q1'" in warning
    rewards.close()


def test_skip_covers_values_but_not_lists_of_another_length(tmp_path: Path) -> None:
    source = """
        def nan(completions, **kwargs):
            return [float("nan") if c == "bad" else 1.0 for c in completions]

        def short(completions, **kwargs):
            return [1.0]
    """
    rows = group("a", "bad")
    rewards = of(tmp_path, source, "nan", on_failure="skip")
    assert seen(rewards.score([rows])) == [(1, "scored"), (None, "sandbox_error")]
    with pytest.raises(RewardError, match="1 values for 2 completions"):
        of(tmp_path, source, "short", on_failure="skip").score([rows])


def test_what_happens_again_and_again_is_told_less_and_less_often(tmp_path: Path) -> None:
    rewards = of(tmp_path, ENDING.format(end="raise ValueError('no')"), on_failure="skip")
    told = []
    for _ in range(9):
        rewards.score([group("bad")])
        told.append(len(rewards.take_warnings()))
    assert told == [1, 1, 0, 1, 0, 0, 0, 1, 0]


# --------------------------------------------------------------------------------------------- what is kept apart


def test_the_process_around_is_out_of_reach(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = """
        import os, random, signal, sys, threading

        def f(completions, **kwargs):
            print("words of the function")
            os.chdir("/"); os.environ["TREW_TEST_LEAK"] = "1"; random.seed(0)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            sys.path.clear()
            assert threading.current_thread() is threading.main_thread()  # signal-based limits work
            signal.alarm(0)
            return [float(os.getpid() != int(c)) for c in completions]
    """
    before = Path.cwd(), signal.getsignal(signal.SIGINT), list(sys.path)
    rewards = of(tmp_path, source)
    results = []
    thread = threading.Thread(target=lambda: results.append(seen(rewards.score([group(str(os.getpid()))]))))
    thread.start(), thread.join()
    assert results == [[(1.0, "scored")]]
    assert (Path.cwd(), signal.getsignal(signal.SIGINT), list(sys.path)) == before
    assert "TREW_TEST_LEAK" not in os.environ
    out, err = capfd.readouterr()
    assert "words of the function" in err
    assert out == ""  # a command's own output stays clean


def test_what_a_function_draws_is_the_same_in_every_process(tmp_path: Path) -> None:
    source = """
        import random
        import numpy as np

        def f(completions, **kwargs):
            order = list({"alpha", "beta", "gamma", "delta", "epsilon"})
            return [random.random() + np.random.rand() + order.index("beta") for _ in completions]
    """
    first, second = (of(tmp_path, source).score([group("a", "b")]) for _ in range(2))
    assert seen(first) == seen(second)
    path = write(tmp_path, source)
    others = set()
    for seed in (1, 2, 3):
        runner = Process(hash_seed=seed)
        rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f")], host=runner)
        others.add(rewards.score([group("a", "b")])[0].scores[0].value)
        rewards.close()
    assert len(others) > 1


def test_a_file_that_changed_is_not_mixed_into_a_run(tmp_path: Path) -> None:
    rewards = of(tmp_path, "def f(completions):\n    return [1.0] * len(completions)\n")
    rewards.close()
    assert seen(rewards.score([group("a")])) == [(1.0, "scored")]
    write(tmp_path, "def f(completions):\n    return [2.0] * len(completions)\n")
    assert seen(rewards.score([group("a")])) == [(1.0, "scored")]  # the process has the file it began with
    rewards.close()
    with pytest.raises(RewardError, match="was changed since it was loaded"):
        rewards.score([group("a")])


def test_a_file_that_ends_its_process_while_it_is_loaded(tmp_path: Path) -> None:
    bad = write(tmp_path, "import os\nos._exit(7)\n", name="bad.py")
    good = write(tmp_path, "def f(completions):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=r"bad\.py:f: .*exited with code 7") as error:
        RewardSet.from_config([RewardConfig(name=f"{p}:f") for p in (good, bad, good)])
    assert len(error.value.problems) == 1


def test_columns_that_do_not_travel_are_refused(tmp_path: Path) -> None:
    rewards = of(tmp_path, "def f(completions, thing):\n    return [1.0] * len(completions)\n")
    with pytest.raises(RewardError, match="type object"):
        rewards.score([group("a", thing=object())])
    assert seen(rewards.score([group("a", thing=b"\x00")])) == [(1.0, "scored")]


def test_step_scores_of_a_function(tmp_path: Path) -> None:
    source = """
        def f(completions, completion_ids):
            return [[(2, 0.5), (len(ids), 1.0)] if len(ids) > 2 else [] for ids in completion_ids]
    """
    [scored] = of(tmp_path, source).score([group("abcd", "a")])
    assert [(s.value, s.steps) for s in scored.scores] == [(0.75, ((2, 0.5), (4, 1.0))), (None, ())]


# ------------------------------------------------------------------------------------------ no process is left over


def test_closing_ends_the_process_and_all_that_it_started(tmp_path: Path) -> None:
    source = """
        import subprocess, sys

        def f(completions, **kwargs):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
            return [float(child.pid)]
    """
    rewards = of(tmp_path, source)
    [(grandchild, _)] = seen(rewards.score([group("a")]))
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
    rewards = of(tmp_path, STARTS.format(pids=str(tmp_path / "pids"), then="return [1.0]"))
    assert seen(rewards.score([group("a")])) == [(1.0, "scored")]
    family = {*map(int, (tmp_path / "pids").read_text().split()), *below(pid_of(rewards))}
    family = {pid for pid in family if alive(pid)}  # the daemon's first fork has ended
    assert len(family) >= 5
    rewards.close()
    assert [pid for pid in family if not gone(pid)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the guardian is of Linux")
def test_the_guardian_holds_nothing_open_and_ends_its_worker_when_it_is_killed(tmp_path: Path) -> None:
    rewards = of(tmp_path, "def f(completions, **kwargs):\n    return [1.0]\n")
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
    rewards = of(tmp_path, "import os\ndef f(completions):\n    return [float(os.getpid())] * len(completions)\n")
    [(before, _)] = seen(rewards.score([group("a")]))
    if (child := os.fork()) == 0:
        code = 1
        try:
            [(own, _)] = seen(rewards.score([group("a")]))
            rewards.close()
            code = 0 if own != before else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert seen(rewards.score([group("a")])) == [(before, "scored")]
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
    rewards = of(tmp_path, f"{source}    open({str(done)!r}, 'w')\n")
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


# --------------------------------------------------------------------------------------------------- what travels

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.datetimes(), st.dates(),
    st.times(), st.timedeltas(), st.decimals(allow_nan=False), st.fractions(),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.dictionaries(st.one_of(st.text(), st.integers()), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_values_arrive_as_they_were_sent(value: object) -> None:
    assert repr(decode(encode(value))) == repr(value)


def test_types_arrive_as_they_were_sent() -> None:
    sent = [
        float("nan"), -0.0, "\ud800", "\0", {"\0": 1}, {1: {2: 3}}, {("a", 1): 2}, {"x"}, frozenset({1}),
        datetime(2026, 1, 1, tzinfo=UTC), date(2026, 1, 1), clock(1, 2), timedelta(1, 2, 3), Decimal("1.10"),
        Fraction(1, 3), np.float32(0.5), np.int64(3), np.bool_(True), np.str_("x"),
    ]  # fmt: skip
    for value in sent:
        back = decode(encode(value))
        assert repr(back) == repr(set(value) if isinstance(value, frozenset) else value)
    assert decode(encode({"x", "y"})) == {"x", "y"}  # in no order that repr could show
    array = decode(encode(np.arange(6, dtype=np.int16).reshape(2, 3)))
    assert (array.dtype, array.tolist()) == (np.int16, [[0, 1, 2], [3, 4, 5]])
    assert decode(encode(type("Price", (Decimal,), {})("1.10"))) == Decimal("1.10")  # its class is not known there
    with pytest.raises(RewardError, match="type object"):
        encode([object()])


def test_groups_are_called_alone_where_that_was_asked_for(tmp_path: Path) -> None:
    source = "def f(completions, **kwargs):\n    return [float(len(completions))] * len(completions)\n"
    groups: tuple[Group, ...] = FIVE
    assert [v for v, _ in seen(of(tmp_path, source).score(groups))] == [5.0] * 5
    assert [v for v, _ in seen(of(tmp_path, source, calls="group").score(groups))] == [3, 3, 3, 2, 2]
