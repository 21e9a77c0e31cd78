"""What is said of a rank that died too often, when a rank counts as hanging, and what the agent hears of terminals."""

from __future__ import annotations

import os
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from trew.config import parse
from trew.distributed import launch
from trew.distributed.pulse import Watch


def test_the_last_start_is_quoted_however_many_there_were(tmp_path):
    for attempt in (0, 1, 9, 10):
        folder = tmp_path / "id" / f"attempt_{attempt}" / "1"
        folder.mkdir(parents=True)
        (folder / "stderr.log").write_text(f"start {attempt}\n")
    death = ChildFailedError("trew", {1: ProcessFailure(local_rank=1, pid=1, exitcode=3, error_file="/none")})
    text = launch._death(death, tmp_path, parse({"model": "m", "out": "o", "cluster": {"learner": 2}}))
    assert text.startswith("rank 1 on ")
    assert text.endswith("Its last lines:\n  start 10")


def test_the_time_in_which_a_machine_was_suspended_is_no_time_without_progress(tmp_path):
    """Nor is that by which a clock was set: the sign of life of a rank is hours old then, and the rank is well."""
    pulse = tmp_path / "pulse-0"
    pulse.write_text(str(os.getpid()))
    watch = Watch(tmp_path, 10.0, print)
    assert watch.stale(100.0) == []
    os.utime(pulse, (time.time() - 7200,) * 2)
    assert watch.stale(101.0) == []
    assert watch.stale(109.0) == []  # this process stood still for a while, and the rank with it
    assert watch.stale(7309.0) == []
    found = [watch.stale(7309.0 + second) for second in range(1, 12)]
    assert found[5] == []
    assert found[-1] == [pulse]  # for more than 10 seconds it has not moved
    os.utime(pulse)
    assert watch.stale(7321.0) == []


@pytest.mark.parametrize("first", ["SIGHUP", "SIGTERM"])
def test_a_terminal_that_is_closed_asks_the_agent_once(first):
    """Kernel and shell both send SIGHUP; to the agent a second signal means to stop without saving."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests were started by nohup
    later = []
    with launch._terminal_closed(SignalException):
        try:
            if first == "SIGTERM":
                raise SignalException("as the agent's own handler", sigval=signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)
            time.sleep(1)
        except SignalException as error:
            later.append(error.sigval)
            for _ in range(2):  # while the agent waits for its ranks
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(0.01)
            later.append("still there")
    assert later == [signal.Signals[first], "still there"]
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_DFL


def test_a_terminal_that_nohup_has_left_is_not_heard_of():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with launch._terminal_closed(SignalException):
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
