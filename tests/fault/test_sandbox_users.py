"""Bubblewrap, Landlock and neither, as root and as another user: code is graded behind a boundary, or refused."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest

import boundaries
import other_user
from trew.rewards.sandbox.host import landlock, seccomp

USERS = ("root", "another user")

GRADED = """
import json, os, sys, threading
from trew.errors import SandboxError
from trew.rewards import grade
from trew.rewards.sandbox import Job, JobLimits, choose
from trew.rewards.sandbox.host import boxes

kind, tasks = sys.argv[1], int(sys.argv[2])
offered = boxes.designs
choose.designs = lambda: [design for design in offered() if design.kind == kind]
over = threading.Event()
own = [threading.Thread(target=over.wait) for _ in range(tasks)]
for thread in own:
    thread.start()

def graded(body):
    reply = f"```python\\n{body}\\ndef f(x):\\n    return x + 1\\n```"
    return grade("code_func", reply, None, entry_point="f", asserts=["assert f(1) == 2"]).score

THREADS = '''
import threading
over = threading.Event()
started = 0
try:
    for _ in range(COUNT):
        threading.Thread(target=over.wait, daemon=True).start()
        started += 1
except RuntimeError:
    pass
print(started, flush=True)
'''

def threads(count):
    job = Job("script", (THREADS.replace("COUNT", str(count)).encode(), b""), JobLimits(seconds=2.0, processes=16))
    outcome = found.run(job)
    return outcome.ended, outcome.parts[0].decode().strip()

told = {"user": os.geteuid()}
try:
    found = choose.boundary()
    told |= {
        "kind": found.design.kind, "tried": found.tried, "right": graded(""), "wrong": graded("raise SystemExit"),
        "few": threads(8), "many": threads(5000),
    }
except SandboxError as error:
    told["refused"] = str(error)
    try:
        told["score"] = graded("")
    except SandboxError:
        pass
over.set()
print(json.dumps(told))
"""


def graded_behind(kind: str, user: str, *, tasks: int = 0) -> dict[str, Any]:
    """What a process of that user says which finds only boundaries of that kind, and has so many tasks of its own."""
    if user == "root" and os.geteuid() != 0:
        pytest.skip("these tests are not run by root")
    as_who = other_user.run if user == "another user" else other_user.run_as_this
    done = as_who(["-c", GRADED, kind, str(tasks)], env={})
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("kind", boundaries.KINDS)
def test_code_is_graded_behind_it(kind, user):
    if kind == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    if kind == "landlock" and not landlock.version():
        pytest.skip("this kernel has no Landlock")
    if not seccomp.supported():
        pytest.skip("this kernel has no seccomp filters")
    told = graded_behind(kind, user, tasks=100)
    if kind == "bubblewrap" and "refused" in told:
        pytest.skip(told["refused"])  # user namespaces may be forbidden
    assert told.get("kind") == kind, told
    assert (told["user"] == 0) == (user == "root")
    assert (told["right"], told["wrong"]) == (1, 0)
    assert told["few"] == ["exit", "8"], "the user's own tasks are none of the program's"
    ended, started = told["many"]
    assert ended == "limit" or int(started) <= 200, told["many"]


@pytest.mark.parametrize("user", USERS)
def test_without_one_code_is_refused(user):
    told = graded_behind("none", user)
    assert "there is no sandbox for untrusted code here" in told["refused"]
    assert "score" not in told


if boundaries.asked() == list(boundaries.KINDS):

    def test_every_attack_fails_for_another_user_too():
        """The attacks, and the pool, as that user would test them; root's are in the files themselves."""
        if os.geteuid() != 0:
            pytest.skip("these tests are run by another user than root as they are")
        files = [f"tests/fault/test_sandbox_{name}.py" for name in ("attacks", "pool")]
        done = other_user.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *files], env={"TREW_BOUNDARIES": "all"})
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
