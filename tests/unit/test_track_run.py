"""The run folder: what it refuses, what it keeps, and what a crash, a second run or a full disk does to it."""

import json
import math
import os
import signal
import stat
import subprocess
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from forks import gone
from rollouts_help import rollout
from trew.errors import ConfigError, StorageError
from trew.runs import RunFolder, problems
from trew.runs.folder import decode_row
from trew.types import Group, Prompt, Score, ScoredGroup


def rows(folder):
    return [decode_row(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scored(text="four", value=1.0, **columns):
    c = rollout([5, 6, 7], logprobs=-0.4, policy_logprobs=-0.5, entropies=0.25, text=text, version=2, prompt_ids=[1, 2])
    prompt = Prompt("p/1", messages=({"role": "user", "content": "2+2?"},), columns=columns)
    return ScoredGroup(Group(prompt, (c, c)), (Score(value, parts={"a": value}), Score(None, "timeout")))


def test_a_new_folder_is_private_and_complete(tmp_path):
    folder = tmp_path / "runs" / "first"
    with RunFolder.open(folder) as run:
        run.write_config('model = "m"\n')
        run.log({"step": 0, "eval_accuracy": 0.1})
        run.log({"step": 1, "reward": np.float32(0.5), "note": "x"})
        run.write_summary({"steps": 1, "accuracy_before": {"mean": float("nan")}})
        run.event("hello\nthere \x1b[31m")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert (folder / "config.toml").read_text() == 'model = "m"\n'
    assert rows(folder) == [{"step": 0, "eval_accuracy": 0.1}, {"step": 1, "reward": 0.5, "note": "x"}]
    assert json.loads((folder / "summary.json").read_text()) == {"steps": 1, "accuracy_before": {"mean": None}}
    (event,) = (folder / "events.log").read_text().splitlines()
    assert event.endswith("hello there [31m")


@pytest.mark.parametrize("name", ["~/first", "~"])
def test_a_folder_is_not_made_by_the_name_of_the_home_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    (line,) = problems(name)
    assert line == f"out: got {name!r}, in which ~ is not expanded; write {name.replace('~', '/home/ada')!r}"
    assert problems("~nobody-of-this-name") == []
    assert [*tmp_path.iterdir()] == []


def test_numbers_that_are_not_finite_stay_readable_json(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        run.log({"step": 1, "loss": math.nan, "kl": -math.inf, "lr": 0.5})
    line = json.loads((tmp_path / "r/metrics.jsonl").read_text())
    assert line["loss"] is None
    assert line["not_finite"] == {"loss": "nan", "kl": "-inf"}
    (row,) = rows(tmp_path / "r")
    assert math.isnan(row["loss"])
    assert (row["kl"], row["lr"]) == (-math.inf, 0.5)


@pytest.mark.parametrize("row", [{}, {"step": "1"}, {"step": 1.0}, {"step": True}])
def test_a_row_without_a_step_is_refused(tmp_path, row):
    with RunFolder.open(tmp_path / "r") as run, pytest.raises(ValueError, match="whole number 'step'"):
        run.log(row)


def test_rollouts_are_read_back_by_a_public_tool(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        path = run.write_rollouts(3, [scored(gold=4)], advantages=[[np.array([1.0, 2.0, 3.0]), None]])
        run.write_rollouts(4, [scored()], advantages=[[0.5, -0.5]])
    assert path.name == "000003.parquet"
    first, second = pq.read_table(path).to_pylist()
    assert first["prompt"] == "user: 2+2?"
    assert (first["uid"], first["sample"], second["sample"], first["step"]) == ("p/1", 0, 1, 3)
    assert first["token_ids"] == [5, 6, 7]
    assert first["logprobs"] == [-0.5] * 3
    assert first["advantages"] == [1, 2, 3]
    assert second["advantages"] is None
    assert json.loads(first["columns"]) == {"gold": 4}
    assert dict(first["parts"]) == {"a": 1.0}
    assert (first["score"], second["score"], second["status"]) == (1.0, None, "timeout")
    assert pq.read_table(tmp_path / "r/rollouts/000004.parquet").to_pylist()[1]["advantages"] == [-0.5] * 3


def test_advantages_of_the_wrong_length_are_refused(tmp_path):
    with RunFolder.open(tmp_path / "r") as run, pytest.raises(ValueError, match="3 tokens"):
        run.write_rollouts(3, [scored()], advantages=[[np.zeros(2), None]])


def test_a_lone_surrogate_does_not_stop_a_run(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        path = run.write_rollouts(1, [scored("bad \ud800 text")])
    assert pq.read_table(path).to_pylist()[0]["completion"] == "bad ? text"


# ------------------------------------------------------------------------------------------------ who may use a folder


def test_a_folder_with_a_run_is_refused_without_a_word(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        run.log({"step": 1})
    with pytest.raises(ConfigError, match=r"already holds a run; --resume .* --overwrite"):
        RunFolder.open(tmp_path / "r")
    with RunFolder.open(tmp_path / "r", resume=True) as run:
        assert run.resumed
        run.write_summary({})
    with pytest.raises(ConfigError, match="already holds a finished run"):
        RunFolder.open(tmp_path / "r")
    with pytest.raises(ConfigError, match="give one of them"):
        RunFolder.open(tmp_path / "r", resume=True, overwrite=True)
    assert rows(tmp_path / "r") == [{"step": 1}]


def test_overwriting_spares_what_the_run_reads(tmp_path):
    run = tmp_path / "r"
    with RunFolder.open(run) as made:
        made.log({"step": 1})
    (run / "final").mkdir()
    (run / "mine").mkdir()  # which overwriting leaves
    for settings in (
        {"model": f"{run}/final"}, {"teacher": {"model": f"{run}/final"}}, {"data": {"runs": ["none", str(run)]}},
        {"data": ({"train": "none"}, {"train": f"{run}/metrics.jsonl"})},
    ):  # fmt: skip
        [found] = problems(run, overwrite=True, settings=settings)
        assert "--overwrite" in found
        assert problems(run, resume=True, settings=settings) == []
    for settings in ({"model": f"{run}/mine"}, {"model": str(tmp_path)}, {"model": "x" * 9999}, {"task": str(run)}):
        assert problems(run, overwrite=True, settings=settings) == []


def test_a_run_that_computed_nothing_is_not_in_the_way(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        run.write_config("steps = 1\n")
    with RunFolder.open(tmp_path / "r") as run:
        assert not run.resumed


def test_resume_with_nothing_to_continue_starts(tmp_path):
    with RunFolder.open(tmp_path / "r", resume=True) as run:
        assert not run.resumed


def test_overwrite_deletes_the_run_and_nothing_else(tmp_path):
    folder = tmp_path / "r"
    with RunFolder.open(folder) as run:
        run.log({"step": 1})
        run.write_rollouts(1, [scored()])
    (folder / "notes.txt").write_text("mine")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (folder / "checkpoints").rmdir()
    (folder / "checkpoints").symlink_to(outside)
    with RunFolder.open(folder, overwrite=True) as run:
        assert not run.resumed
        assert not (folder / "metrics.jsonl").exists()
        assert list((folder / "rollouts").iterdir()) == []
    assert (folder / "notes.txt").read_text() == "mine"
    assert (outside / "precious").exists()


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_of_somebody_else_is_refused_and_kept(tmp_path, flags):
    (tmp_path / "config.toml").write_text("other = 1")
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match=r"not a run folder \(it holds config.toml, thesis.tex\)"):
        RunFolder.open(tmp_path, **flags)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.toml", "thesis.tex"]


def test_unusable_places_are_named_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("x")
    for folder, message in [
        (tmp_path / "file", "is a file"),
        (tmp_path / "file" / "run", "is a file"),
        (tmp_path / "missing" / "too" / "run", "does not exist; create it"),
        (tmp_path / "a\udcff", "is not UTF-8 text"),
    ]:
        (problem,) = problems(folder)
        assert message in problem
        with pytest.raises(ConfigError, match=message):
            RunFolder.open(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    try:
        for folder in (tmp_path, tmp_path / "run"):
            (problem,) = problems(folder)
            assert "writable" in problem
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses even root")
def test_a_place_that_refuses_even_root_is_named():
    with pytest.raises(ConfigError, match=r"out: /proc/trew-run"):
        RunFolder.open("/proc/trew-run")


CHILD = """
import os, sys, signal
from trew.runs import RunFolder
run = RunFolder.open(sys.argv[1])
run.log({"step": 1})
print("ready", flush=True)
signal.pause()
"""


def start_child(folder):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_second_run_is_refused_and_a_killed_one_is_not_in_the_way(tmp_path):
    folder = tmp_path / "r"
    child = start_child(folder)
    try:
        with pytest.raises(ConfigError, match=f"in use by another run \\(process {child.pid} on "):
            RunFolder.open(folder, resume=True)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    with RunFolder.open(folder, resume=True) as run:
        assert f"process {child.pid}" in run.messages[0]
        assert run.resumed
    with RunFolder.open(folder, resume=True) as run:  # closed in order: nothing stale
        assert run.messages == ()


def test_without_flock_the_content_of_the_lock_decides(tmp_path, monkeypatch):
    import fcntl
    import socket

    def no_flock(fd, how):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_flock)
    folder = tmp_path / "r"
    with RunFolder.open(folder) as run:
        run.log({"step": 1})
        with pytest.raises(ConfigError, match="in use"):
            RunFolder.open(folder, resume=True)
    lock = folder / "run.lock"
    lock.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    with pytest.raises(ConfigError, match="process 1 on elsewhere"):
        RunFolder.open(folder, resume=True)
    lock.write_text(json.dumps({"pid": 2**22 + 1, "host": socket.gethostname()}))  # no such process
    with RunFolder.open(folder, resume=True) as run:
        assert "took over" in run.messages[0]


def test_a_forked_helper_does_not_hold_the_lock(tmp_path):
    """The parent is gone, its helper lives on: the folder must be free."""
    script = """
import os, sys, time
from trew.runs import RunFolder
run = RunFolder.open(sys.argv[1])
run.log({"step": 1})
ready, tell = os.pipe()
helper = os.fork()
if helper == 0:
    os.write(tell, b"x")
    time.sleep(1000)
    os._exit(0)
os.read(ready, 1)
print(helper, flush=True)
os._exit(0)
"""
    out = subprocess.Popen([sys.executable, "-c", script, str(tmp_path / "r")], stdout=subprocess.PIPE, text=True)
    helper = int(out.stdout.readline())
    out.wait()
    try:
        RunFolder.open(tmp_path / "r", resume=True).close()
        assert not gone({helper})
    finally:
        os.kill(helper, signal.SIGKILL)
        out.stdout.close()


def test_a_planted_lock_link_is_not_followed(tmp_path):
    folder = tmp_path / "r"
    folder.mkdir()
    target = tmp_path / "target"
    target.write_text("keep")
    (folder / "run.lock").symlink_to(target)
    with pytest.raises(ConfigError, match="cannot be used"):
        RunFolder.open(folder)
    assert target.read_text() == "keep"


# ---------------------------------------------------------------------------------------------------- crash and resume


def test_rewind_leaves_no_trace_of_what_is_done_again(tmp_path):
    folder = tmp_path / "r"
    with RunFolder.open(folder) as run:
        for step in range(5):
            run.log({"step": step, "reward": step})
            run.write_rollouts(step, [scored()])
        run.write_eval(0, [scored()])
        run.write_eval(4, [scored()])
        run.write_summary({"steps": 4})
    (folder / "report.html").write_text("of the finished run")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "rew')  # killed here
    (folder / "rollouts" / ".000005.parquet.partial").write_bytes(b"PAR1")
    (folder / "rollouts" / "notes.parquet").write_bytes(b"mine")
    with RunFolder.open(folder, resume=True) as run:
        dropped = run.rewind(2)
        run.log({"step": 3, "reward": 30})
    assert [r["step"] for r in rows(folder)] == [0, 1, 2, 3]
    assert rows(folder)[-1]["reward"] == 30
    names = sorted(p.name for p in (folder / "rollouts").iterdir())
    assert names == ["000000.parquet", "000001.parquet", "000002.parquet", "notes.parquet"]
    assert [p.name for p in (folder / "evals").iterdir()] == ["000000.parquet"]
    assert not (folder / "summary.json").exists()
    assert not (folder / "report.html").exists()
    assert any("partial last line" in m for m in dropped)
    assert sum("row of step" in m for m in dropped) == 2


def test_an_evaluation_that_the_checkpoint_does_not_know_of_is_taken_out_too(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        for row in ({"step": 2, "reward": 1}, {"step": 2, "eval_accuracy": 0.5}, {"step": 0, "eval_accuracy": 0.1}):
            run.log(row)
        run.write_rollouts(2, [scored()])
        run.write_eval(2, [scored()])
        assert run.rewind(2) == []
        assert len(run.rewind(2, evaluated=False)) == 2
    assert [sorted(row) for row in rows(tmp_path / "r")] == [["reward", "step"], ["eval_accuracy", "step"]]
    assert list((tmp_path / "r" / "evals").iterdir()) == []
    assert [p.name for p in (tmp_path / "r" / "rollouts").iterdir()] == ["000002.parquet"]


def test_rewind_of_a_complete_run_changes_nothing(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        run.log({"step": 1})
        run.write_summary({"steps": 1})
        before = (tmp_path / "r/metrics.jsonl").stat()
        assert run.rewind(1) == []
    assert (tmp_path / "r/metrics.jsonl").stat().st_ino == before.st_ino
    assert (tmp_path / "r/summary.json").exists()


def test_rewind_to_the_start_and_rewind_of_nothing(tmp_path):
    with RunFolder.open(tmp_path / "r") as run:
        assert run.rewind(-1) == []
        run.log({"step": 0})
        assert len(run.rewind(-1)) == 1
    assert rows(tmp_path / "r") == []


def test_a_row_whose_clock_lies_is_as_good_as_any(tmp_path):
    """Only steps order rows: a timestamp from the future neither hides nor drops one."""
    with RunFolder.open(tmp_path / "r") as run:
        run.log({"step": 1, "seconds": 9e15})
        run.log({"step": 2, "seconds": -5.0})
        os.utime(tmp_path / "r/metrics.jsonl", (9e9, 9e9))
        assert run.rewind(2) == []
    assert [r["step"] for r in rows(tmp_path / "r")] == [1, 2]


FULL_DISK = """
import resource, sys
import numpy as np
from trew.errors import StorageError
from trew.runs import RunFolder
from trew.types import *
run = RunFolder.open(sys.argv[1])
n = 20_000
rng = np.random.default_rng(0)
x = rng.normal(size=n).astype(np.float32)
c = single_turn(np.arange(3), rng.integers(0, 9999, n), logprobs=x, policy_logprobs=x, entropies=x, version=0, text="t",
                finish_reason="length")
group = ScoredGroup(Group(Prompt("u", text="p"), (c,)), (Score(1.0),))
run.log({"step": 1, "note": "x" * 3000})
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))   # no file may grow past 4 KiB
for write in (lambda: run.log({"step": 2, "note": "y" * 3000}), lambda: run.write_rollouts(2, [group])):
    try:
        write()
    except StorageError as error:
        print(error)
run.event("z" * 9000)
run.write_summary({"ok": True})
"""


def test_a_full_disk_leaves_whole_files_and_one_clear_message(tmp_path):
    folder = tmp_path / "r"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert "metrics.jsonl: cannot be written" in first
    assert "--resume" in first
    assert "000002.parquet: cannot be written" in second
    assert [r["step"] for r in rows(folder)] == [1]
    assert list((folder / "rollouts").iterdir()) == []
    assert json.loads((folder / "summary.json").read_text()) == {"ok": True}


def test_a_failed_replacement_keeps_the_old_file(tmp_path, monkeypatch):
    with RunFolder.open(tmp_path / "r") as run:
        run.write_summary({"steps": 1})
        monkeypatch.setattr(os, "replace", lambda *a: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(StorageError, match="No space left on device"):
            run.write_summary({"steps": 2})
        monkeypatch.undo()
    assert json.loads((tmp_path / "r/summary.json").read_text()) == {"steps": 1}
    assert not list((tmp_path / "r").glob(".*"))


# ------------------------------------------------------------------------------------------------------------- secrets


def test_no_secret_reaches_the_folder(tmp_path, monkeypatch):
    canary = 'canary-"77"\\end'
    monkeypatch.setenv("MY_API_KEY", canary)
    monkeypatch.setenv("HF_TOKEN", "hf_other_canary")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    both = f"{canary} hf_other_canary"
    with RunFolder.open(tmp_path / "r") as run:
        run.write_config(f"key = {json.dumps(both)}\nshuffle = false\n")
        run.log({"step": 1, "note": both})
        run.write_rollouts(1, [scored(both, gold=both)], render=lambda p: both)
        run.write_summary({"a": [{"b": both}]})
        run.event(both)
    for path in (tmp_path / "r").rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix == ".parquet":
                content = json.dumps(pq.read_table(path).to_pylist()).encode()
            assert b"canary" not in content, path
    assert "shuffle = false" in (tmp_path / "r/config.toml").read_text()
    assert "[redacted] [redacted]" in (tmp_path / "r/metrics.jsonl").read_text()
