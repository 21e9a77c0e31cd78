"""A run that is ended in the middle of its episodes goes on as if it had not been."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import recipe_help
import tiers
import tiny
from forks import Command, Server, wait_for

TALK = """
import os, time
from trew.env import Say
def talk(row, seed):
    open(os.environ["TREW_TEST_BEGUN"], "a").write("x")
    reply = yield str(seed % 100)
    for turn in range(3):
        time.sleep(float(os.environ.get("TREW_TEST_SLOW", 0)))
        reply = yield Say(({"role": "user", "content": str(len(reply.text))},), reward=len(reply.text) / 8)
    return 1.0
"""
STOP = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"]


def start(server: Server, folder: Path, out: str, *more: str, slow: str = "0") -> Command:
    environment = {"TREW_TEST_SLOW": slow, "TREW_TEST_BEGUN": str(folder / f"begun-{out}")}
    return server.start("train", "recipe.toml", *more, "--set", f"out={out}", cwd=folder, **environment)


def rows(folder: Path, out: str) -> list[dict]:
    found = recipe_help.metrics(folder / out)
    return [{k: v for k, v in row.items() if not any(clock in k for clock in ("second", "memory"))} for row in found]


@pytest.mark.parametrize("how", tiers.some([signal.SIGKILL, signal.SIGTERM], [str(signal.SIGKILL)]))
def test_a_run_that_is_ended_in_mid_episode_goes_on_as_if_it_had_not_been(server, tmp_path, how):
    tiny.save(tmp_path / "lm")
    (tmp_path / "talk.py").write_text(TALK)
    (tmp_path / "recipe.toml").write_text(
        f'model = "lm"\nsteps = 3\nthreads = 1\n[environment]\nname = "talk.py:talk"\n[rollout]\nprompts = 2\n'
        f"completions = 3\nmax_tokens = 8\nstop = {STOP}\n[eval]\nsize = 2\n[learner]\nlr = 1e-2\n"
        "[objective]\nbeta = 0.0\n[checkpoint]\nevery = 1\n[stop]\ngrace_s = 0.1\n"
    )
    whole = start(server, tmp_path, "whole")
    assert whole.wait() == 0, whole.text()
    run = start(server, tmp_path, "cut", slow="0.3")
    wait_for(lambda: list(tmp_path.glob("cut/checkpoints/000001*")) or run.ended(), run.text)
    begun = (tmp_path / "begun-cut").stat().st_size
    # until episodes of another step are played
    wait_for(lambda: (tmp_path / "begun-cut").stat().st_size > begun or run.ended(), run.text)
    assert run.kill(how).wait() != 0
    resumed = start(server, tmp_path, "cut", "--resume")
    assert resumed.wait() == 0, resumed.text()
    for cut, whole_row in zip(rows(tmp_path, "cut"), rows(tmp_path, "whole"), strict=True):
        assert cut.keys() == whole_row.keys()
        assert cut == whole_row  # to the bit, although the environments of the first part were slower
