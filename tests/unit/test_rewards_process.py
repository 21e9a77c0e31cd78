"""Users' functions in a process of their own: hangs, exits, crashes, limits, what is skipped and what ends the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import tiers
from rewards_help import functions_of, gone, group, pid_of, verdicts_of, write
from trew.config import RewardConfig
from trew.errors import ConfigError, RewardError
from trew.rewards import RewardSet
from trew.rewards.user.process import Process
from trew.types import Group

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


@pytest.mark.parametrize("module", ["trew.rewards.user.serving", "trew.env.serving"])
def test_a_process_starts_without_graders_and_adapters(module: str) -> None:
    """They take half a second of a processor, for each process of each run."""
    heavy = [
        "trew.rewards.builtin.kinds",
        "trew.rewards.maths.grade",
        "trew.data",
        "trew.env.adapters.verifiers",
        "torch",
    ]
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("hang", tiers.some(HANGS, ("in C, holding the interpreter", "deaf to exceptions")))
def test_a_function_that_hangs_costs_its_completions_alone(tmp_path: Path, hang: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("trew.rewards.user.process.GRACE_SECONDS", 0.5)
    define = "async def" if "event" in hang else "def"
    rewards = functions_of(tmp_path, SLOW.format(define=define, hang=HANGS[hang]), timeout_s=0.5)
    first = pid_of(rewards)
    assert verdicts_of(rewards.score(FIVE)) == [
        (1, "scored"),
        (None, "timeout"),
        (3, "scored"),
        (4, "scored"),
        (2, "scored"),
    ]
    assert gone(first)
    [warning] = rewards.take_warnings()
    assert "reward 'f' (" in warning
    assert "did not return within" in warning
    assert "for prompt 'p', completion 'hang'. 1 of 5 completions have no value for it; raise its timeout_s" in warning
    assert rewards.take_warnings() == []
    assert verdicts_of(rewards.score([group("abc")])) == [(3, "scored")]  # and it goes on
    rewards.close()


def test_entries_of_the_search_path_that_are_no_text_are_ignored(tmp_path: Path, monkeypatch: Any) -> None:
    """As Python does it: notebooks append paths."""
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    rewards = functions_of(tmp_path, "def f(completions, **kwargs):\n    return [1.0 for _ in completions]\n")
    assert verdicts_of(rewards.score([group("a")])) == [(1, "scored")]
    rewards.close()


def test_functions_may_judge_by_assert_whatever_the_environment_says(tmp_path: Path, monkeypatch: Any) -> None:
    """Where Python is told to optimize, it skips the line, and every completion is right."""
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    source = """
        def f(completions, **kwargs):
            def right(text):
                try:
                    assert text == "right"
                except AssertionError:
                    return 0.0
                return 1.0
            return [right(text) for text in completions]
    """
    rewards = functions_of(tmp_path, source)
    assert verdicts_of(rewards.score([group("right", "wrong")])) == [(1, "scored"), (0, "scored")]
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
    rewards = functions_of(tmp_path, source, "f", "g", "compute_score", timeout_s=0.5)
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
    rewards = functions_of(tmp_path, source, "compute_score", timeout_s=1.0)
    texts = ["hang", *"abcdefgh"]  # 8 x 0.15 s are more than the limit of one call
    assert [v for v, _ in verdicts_of(rewards.score([group(*texts, answer="1")]))] == [None] + [1.0] * 8


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


ENDS_ALWAYS = ("os._exit(3)", "sys.exit(0)", "raise asyncio.CancelledError", "bytearray(10 ** 15)")


@pytest.mark.parametrize("end", tiers.some(ENDS, ENDS_ALWAYS))
def test_whatever_ends_a_function_is_its_failure(tmp_path: Path, end: str) -> None:
    rows = group("a", "bad", "ccc")
    rewards = functions_of(tmp_path, ENDING.format(end=end))
    with pytest.raises(RewardError) as error:
        rewards.score([rows])
    assert ENDS[end] in str(error.value)
    assert str(error.value).endswith("; for prompt 'q1', completion 'bad'")
    assert [row["completion"] for row in error.value.evidence["completions"]] == ["bad"]
    rewards.close()
    rewards = functions_of(tmp_path, ENDING.format(end=end), on_failure="skip")
    assert verdicts_of(rewards.score([rows])) == [(1, "scored"), (None, "sandbox_error"), (3, "scored")]
    [warning] = rewards.take_warnings()
    assert ENDS[end] in warning
    assert "1 of 3 completions have no value" in warning
    rewards.close()


def test_a_process_that_the_system_kills_costs_its_completions_alone(tmp_path: Path) -> None:
    rewards = functions_of(tmp_path, ENDING.format(end="os.kill(os.getpid(), 9)"))
    assert verdicts_of(rewards.score([group("a", "bad", "c")])) == [
        (1, "scored"),
        (None, "sandbox_error"),
        (1, "scored"),
    ]
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
    rewards = functions_of(tmp_path, source, "nan", on_failure="skip")
    assert verdicts_of(rewards.score([rows])) == [(1, "scored"), (None, "sandbox_error")]
    with pytest.raises(RewardError, match="1 values for 2 completions"):
        functions_of(tmp_path, source, "short", on_failure="skip").score([rows])


def test_what_happens_again_and_again_is_told_less_and_less_often(tmp_path: Path) -> None:
    rewards = functions_of(tmp_path, ENDING.format(end="raise ValueError('no')"), on_failure="skip")
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
    rewards = functions_of(tmp_path, source)
    results = []
    thread = threading.Thread(target=lambda: results.append(verdicts_of(rewards.score([group(str(os.getpid()))]))))
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
    first, second = (functions_of(tmp_path, source).score([group("a", "b")]) for _ in range(2))
    assert verdicts_of(first) == verdicts_of(second)
    path = write(tmp_path, source)
    others = set()
    for seed in (1, 2, 3):
        runner = Process(hash_seed=seed)
        rewards = RewardSet.from_config([RewardConfig(name=f"{path}:f")], host=runner)
        others.add(rewards.score([group("a", "b")])[0].scores[0].value)
        rewards.close()
    assert len(others) > 1


def test_a_file_that_changed_is_not_mixed_into_a_run(tmp_path: Path) -> None:
    rewards = functions_of(tmp_path, "def f(completions):\n    return [1.0] * len(completions)\n")
    rewards.close()
    assert verdicts_of(rewards.score([group("a")])) == [(1.0, "scored")]
    write(tmp_path, "def f(completions):\n    return [2.0] * len(completions)\n")
    assert verdicts_of(rewards.score([group("a")])) == [(1.0, "scored")]  # the process has the file it began with
    rewards.close()
    with pytest.raises(RewardError, match="was changed since it was loaded"):
        rewards.score([group("a")])


def test_a_module_that_a_reward_imports_is_not_mixed_into_a_run_either(tmp_path: Path) -> None:
    write(tmp_path, "VALUE = 1.0\n", name="its_helper.py")
    source = "import its_helper\ndef f(completions):\n    return [its_helper.VALUE] * len(completions)\n"
    rewards = functions_of(tmp_path, source)
    assert verdicts_of(rewards.score([group("a")])) == [(1.0, "scored")]
    write(tmp_path, "VALUE = 2.25\n", name="its_helper.py")
    rewards.close()
    with pytest.raises(RewardError, match=r"its_helper\.py: was changed since it was loaded"):
        rewards.score([group("a")])


def test_a_file_that_ends_its_process_while_it_is_loaded(tmp_path: Path) -> None:
    bad = write(tmp_path, "import os\nos._exit(7)\n", name="bad.py")
    good = write(tmp_path, "def f(completions):\n    return [1.0] * len(completions)\n")
    with pytest.raises(ConfigError, match=r"bad\.py:f: .*exited with code 7") as error:
        RewardSet.from_config([RewardConfig(name=f"{p}:f") for p in (good, bad, good)])
    assert len(error.value.problems) == 1


def test_columns_that_do_not_travel_are_refused(tmp_path: Path) -> None:
    rewards = functions_of(tmp_path, "def f(completions, thing):\n    return [1.0] * len(completions)\n")
    with pytest.raises(RewardError, match="type object"):
        rewards.score([group("a", thing=object())])
    assert verdicts_of(rewards.score([group("a", thing=b"\x00")])) == [(1.0, "scored")]


def test_step_scores_of_a_function(tmp_path: Path) -> None:
    source = """
        def f(completions, completion_ids):
            return [[(2, 0.5), (len(ids), 1.0)] if len(ids) > 2 else [] for ids in completion_ids]
    """
    [scored] = functions_of(tmp_path, source).score([group("abcd", "a")])
    assert [(s.value, s.steps) for s in scored.scores] == [(0.75, ((2, 0.5), (4, 1.0))), (None, ())]


def test_groups_are_called_alone_where_that_was_asked_for(tmp_path: Path) -> None:
    source = "def f(completions, **kwargs):\n    return [float(len(completions))] * len(completions)\n"
    groups: tuple[Group, ...] = FIVE
    assert [v for v, _ in verdicts_of(functions_of(tmp_path, source).score(groups))] == [5.0] * 5
    assert [v for v, _ in verdicts_of(functions_of(tmp_path, source, calls="group").score(groups))] == [3, 3, 3, 2, 2]


def test_each_completion_of_an_async_verl_function_that_blocks_has_the_whole_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Together they exceed the limit of one, since none lets the others run; each alone is well within it.
    monkeypatch.setattr("trew.rewards.user.process.GRACE_SECONDS", 0.0)
    monkeypatch.setattr("trew.rewards.user.verdicts.SHARE_SECONDS", 0.0)
    code = """
        import time

        async def compute_score(data_source, solution_str, ground_truth):
            time.sleep(0.5)
            return float(solution_str == ground_truth)
    """
    path = write(tmp_path, code)
    rewards = RewardSet.from_config([RewardConfig(name=f"{path}:compute_score", timeout_s=1.8)])
    try:
        [scored] = rewards.score([group("7", "8", "7", "9", answer="7")])
        assert [score.value for score in scored.scores] == [1.0, 0.0, 1.0, 0.0]
    finally:
        rewards.close()
