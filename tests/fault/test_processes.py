"""Processes that end, folders that two want, disks that are full: through the command line, with real ones of each."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
from pathlib import Path

import pytest

import disk
import tiers
import tiny
from forks import gone, wait_for
from recipe_help import ODD, metrics, recipe
from trew.errors import ConfigError
from trew.runs import RunFolder
from trew.runs.files import PRIVATE, write_atomic
from trew.runs.lock import Lock
from trew.training.exporting import export_final

SETTINGS = {
    "data": {"task": "prompts", "train": "rows.jsonl", "args": {}},
    "rollout": {"prompts": 1, "max_tokens": 4}, "eval": {"size": 1},
    "checkpoint": {"every": 1, "background": False}, "track": {"regrade_every": 0},
}  # fmt: skip
KILLED = f"""
import os, signal
{ODD}
def killed(completions, completion_ids, **columns):
    if any(ids[0] % 2 for ids in completion_ids):
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory runs out
    return odd(completions, completion_ids)
"""
ROW = {"prompt": "p", "answer": "4", "asserts": ["assert f(1) == 2"], "entry_point": "f",
       "solution": "def f(x): return x + 1"}  # fmt: skip
LEARN = "trew.learner.step:Learner.accumulate"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    tiny.save(folder / "model", "llama")
    (folder / "reward.py").write_text(KILLED)
    (folder / "rows.jsonl").write_text("".join(json.dumps({**ROW, "prompt": f"question {i}"}) + "\n" for i in range(5)))
    (folder / "odd.toml").write_text(recipe(folder / "model", **SETTINGS))
    (folder / "killed.toml").write_text(recipe(folder / "model", **SETTINGS, reward="reward.py:killed"))
    names = [{"name": name} for name in ("reward.py:odd", "math", "code_func")]
    (folder / "all.toml").write_text(recipe(folder / "model", **SETTINGS, rewards=names))
    return folder


# --------------------------------------------------------------------------------------------------------- processes


def test_kill_9_leaves_no_process_and_no_lock(server, place):
    """With the process of a function, the workers of mathematics and the sandbox for code all there."""
    args = ("train", "all.toml", "--out", "killed", "--set", "steps=2", "track.regrade_every=0")
    command = server.start(*args, cwd=place, hold=f"{LEARN}:2").held()
    family = command.family()
    assert len(family) >= 4
    second = server.run("train", "odd.toml", "--out", "killed", "--resume", cwd=place, code=2)
    assert f"in use by another run (process {command.pid} on {socket.gethostname()})" in second
    assert command.kill(signal.SIGKILL).wait() == -signal.SIGKILL
    wait_for(lambda: gone(family), lambda: str(family))
    refused = server.run("train", "odd.toml", "--out", "killed", cwd=place, code=2)
    assert "--resume" in refused
    assert "--overwrite" in refused
    with RunFolder.open(place / "killed", resume=True) as run:
        assert (
            f"took over the lock of a run that ended without closing it (process {command.pid} on " in run.messages[0]
        )
        run.write_summary({})
    finished = server.run("train", "odd.toml", "--out", "killed", cwd=place, code=2)
    assert "already holds a finished run" in finished


def test_a_reward_process_that_is_killed_costs_its_completions(server, place):
    out = server.run("train", "killed.toml", "--out", "some", "--set", "steps=2", "track.max_failed=1.0", cwd=place)
    assert "was ended by signal 9 SIGKILL" in out
    assert "memory may have run out" in out
    steps = [row for row in metrics(place / "some") if "reward" in row]
    assert len(steps) == 2
    assert any(0 < row.get("reward/killed/sandbox_error", 0) <= 1 for row in steps)
    for row in steps:
        lost = round(3 * row.get("reward/none", 0))
        assert lost == round(3 * row.get("reward/killed/sandbox_error", 0))


def test_more_failures_than_allowed_end_the_run_with_the_cause(server, place):
    out = server.run("train", "killed.toml", "--out", "most", "--set", "steps=9", "track.max_failed=0.0",
                     "data.shuffle=false", cwd=place, code=1)  # fmt: skip
    assert "3 steps in a row in which" in out
    assert "sandbox_error" in out
    assert len([row for row in metrics(place / "most") if "reward" in row]) < 9


def test_a_process_that_makes_problems_and_is_killed_is_an_error(tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    from trew.data.tasks import puzzles
    from trew.errors import DataError

    real = puzzles.subprocess.Popen

    def killed(*args, **kwargs):
        child = real(*args, **kwargs)
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdin = open(os.devnull, "w")  # noqa: SIM115
        return child

    monkeypatch.setattr(puzzles.subprocess, "Popen", killed)
    task = puzzles.Puzzles(puzzle="chain_sum", size=5)
    with pytest.raises(DataError, match="the process that generates problems was ended by signal 9 after 0 of them"):
        task.generate(eval_size=2, seed=0)


# ------------------------------------------------------------------------------------------------------------- locks


def held_by(path: Path, **holder: object) -> None:
    path.write_text(json.dumps(holder))


def test_where_locks_are_not_seen_by_others_the_content_decides(tmp_path, monkeypatch):
    """A file system that many hosts see, and each locks for itself."""
    from trew.runs import lock

    monkeypatch.setattr(lock, "_of_this_host_only", lambda path: True)
    path = tmp_path / "run.lock"
    held_by(path, pid=1, host="elsewhere")
    with pytest.raises(ConfigError, match=r"process 1 on elsewhere.*If that run is certainly over, delete .*run\.lock"):
        Lock(path)
    held_by(path, pid=os.getpid(), host=socket.gethostname(), started="another boot:1")  # its number came round again
    taken = Lock(path)
    assert "took over" in (taken.stale or "")
    told = json.loads(path.read_text())
    assert (told["pid"], told["host"]) == (os.getpid(), socket.gethostname())
    taken.release()
    held_by(path, **told)
    with pytest.raises(ConfigError, match="in use"):
        Lock(path)


@pytest.mark.parametrize(
    ("mount", "local"),
    [
        ("server:/x {0} nfs4 rw,local_lock=none 0 0", False), ("server:/x {0} nfs rw,nolock,local_lock=all 0 0", True),
        ("mgs:/x {0} lustre rw,localflock 0 0", True), ("mgs:/x {0} lustre rw,flock 0 0", False),
        ("bucket {0} fuse.gcsfuse rw 0 0", True), ("overlay {0} fuse.fuse-overlayfs rw 0 0", False),
    ],
)  # fmt: skip
def test_which_file_systems_lock_for_one_host_alone(tmp_path, monkeypatch, mount, local):
    from trew.runs import lock

    real = Path.read_text
    lines = f"/dev/x / ext4 rw 0 0\n{mount.format(tmp_path)}\n"
    monkeypatch.setattr(
        Path, "read_text", lambda self, *a, **k: lines if str(self) == "/proc/self/mounts" else real(self, *a, **k)
    )
    assert lock._of_this_host_only(tmp_path / "run.lock") is local


# --------------------------------------------------------------------------------------------------- folders, links


@pytest.fixture
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o177], indirect=True, ids=oct)
def test_a_run_is_private_whatever_the_umask(tmp_path, umask):
    with RunFolder.open(tmp_path / "r") as run:
        run.log({"step": 1})
        run.write_config("a = 1\n")
        run.write_summary({"a": 1})
        run.event("something")
    for path in (tmp_path / "r", *(tmp_path / "r").iterdir()):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("umask", [0o022], indirect=True, ids=oct)
def test_an_exported_model_is_as_open_as_the_umask_says(tmp_path, umask):
    final = tmp_path / "run" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    final.chmod(PRIVATE)  # as a run leaves it
    export_final(tmp_path / "run", tmp_path / "out", extra_files=lambda folder: None)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o755


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts", "checkpoints", "config.toml", "events.log", "final"])
def test_a_planted_link_is_refused(tmp_path, name):
    with RunFolder.open(tmp_path / "r") as run:
        run.log({"step": 1})
    target = tmp_path / "target"
    target.mkdir() if name in ("rollouts", "checkpoints", "final") else target.write_text("keep")
    planted = tmp_path / "r" / name
    if planted.is_dir():
        planted.rmdir()
    else:
        planted.unlink(missing_ok=True)
    planted.symlink_to(target)
    with pytest.raises(ConfigError, match=f"{name} is a link"):
        RunFolder.open(tmp_path / "r", resume=True)
    RunFolder.open(tmp_path / "r", overwrite=True).close()  # removes the link, and not what it points to
    assert target.exists()


def test_links_that_appear_later_are_not_followed(tmp_path):
    target = tmp_path / "target"
    target.write_text("keep")
    with RunFolder.open(tmp_path / "r") as run:
        (tmp_path / "r" / ".summary.json.partial").symlink_to(target)
        run.write_summary({"a": 1})
        (tmp_path / "r" / "metrics.jsonl").symlink_to(target)
        with pytest.raises(Exception, match=r"metrics\.jsonl: cannot be written"):
            run.log({"step": 1})
    (tmp_path / ".out.html.partial").symlink_to(target)
    write_atomic(tmp_path / "out.html", lambda file: file.write(b"x"))
    assert target.read_text() == "keep"


# -------------------------------------------------------------------------------------------------------- full disks


WRITES = ["trew.runs.folder:RunFolder.log:3", "trew.runs.folder:RunFolder.write_rollouts:2"]


@pytest.mark.parametrize("where", tiers.some(WRITES, WRITES[1:]))
def test_a_disk_that_fills_up_while_logging(server, place, tmp_path, where):
    if "whole" not in os.listdir(place):
        server.run("train", "odd.toml", "--out", "whole", cwd=place)
    with disk.tmpfs(kilobytes=16 << 10) as mount:
        out = mount / "run"
        command = server.start("train", "odd.toml", "--out", out, cwd=place, hold=where).held()
        log = out / "metrics.jsonl"
        with log.open("a") as file:  # so that the next row needs room of its own
            file.write(json.dumps({"step": 1, "padding": "x" * (-log.stat().st_size % 4096 - 30)}) + "\n")
        ballast = disk.fill(mount, leave=0)
        assert command.go().wait() == 1
        said = command.text()
        assert said.count("cannot be written") == 1
        assert "No space left on device" in said
        assert "--resume" in said
        assert "Traceback" not in said
        assert log.read_bytes().endswith(b"\n")
        tables = {int(path.stem) for path in (out / "rollouts").glob("*.parquet")}
        assert {row["step"] for row in metrics(out) if "reward" in row} <= tables, "a row without its completions"
        ballast.unlink()
        server.run("train", "odd.toml", "--out", out, "--resume", cwd=place)
        assert [row["step"] for row in metrics(out) if "reward" in row] == [1, 2, 3, 4]
        weights = [(run / "final" / "model.safetensors").read_bytes() for run in (place / "whole", out)]
        assert weights[0] == weights[1]
