"""Signals: the first is remembered, the second ends the process even in the middle of one long C call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from trew.utils.signals import Interrupted, Interrupts

LONG = """
import sys, time
from trew.utils.signals import Interrupts
import hashlib
with Interrupts() as i:
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 500_000_000)  # minutes in C, without the interpreter lock
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_the_first_is_remembered_and_handlers_are_put_back(signum):
    before = signal.getsignal(signum)
    with Interrupts() as interrupts:
        interrupts.stop_if_asked("nothing asked yet")
        os.kill(os.getpid(), signum)
        time.sleep(0.01)
        assert interrupts.asked == signum
        with pytest.raises(Interrupted, match="interrupted: here") as stopped:
            interrupts.stop_if_asked("here")
        assert stopped.value.exit_code == 128 + signum
    assert signal.getsignal(signum) is before


@pytest.mark.parametrize("place", ["anywhere", "after_grace"])
def test_a_request_waits_for_the_end_of_a_block_that_it_is_kept_out_of(place):
    done = []

    def work(interrupts):
        with getattr(interrupts, place)("here"):
            with interrupts.kept_out():
                with interrupts.kept_out():
                    signal.raise_signal(signal.SIGTERM)
                    done.append("inner")
                done.append("outer")
            done.append("behind")

    with Interrupts(grace_s=0.0) as interrupts, pytest.raises(Interrupted, match="interrupted: here"):
        work(interrupts)
    assert done == ["inner", "outer"]


def test_a_request_that_was_met_is_not_met_again_by_what_cleans_up():
    done = []

    def work(interrupts):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            with interrupts.kept_out():
                done.append("inside")
            done.append("behind")

    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.anywhere():
        work(interrupts)
    assert done == ["inside", "behind"]


def test_where_no_request_is_met_none_is_met_behind_the_block():
    with Interrupts() as interrupts:
        with interrupts.kept_out():
            signal.raise_signal(signal.SIGTERM)
        with interrupts.after_grace("too early"), interrupts.kept_out():
            pass
        assert interrupts.asked == signal.SIGTERM


def test_the_second_ends_the_process_inside_a_long_call():
    process = subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    for closed in (signal.SIGHUP, signal.SIGHUP):  # a terminal that is closed then asks for nothing new
        time.sleep(0.5)
        assert process.poll() is None
        process.send_signal(closed)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "once more stops now" in err
