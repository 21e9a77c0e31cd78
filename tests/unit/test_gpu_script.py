"""`make gpu` and what it carries: parts that fail cost only themselves, packages that are there are left alone."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement

from forks import wait_for
from test_benchmarks import ROOT, module  # noqa: F401


def forked(command: list[str], env: dict[str, str], out: Any, limit_s: float) -> int:
    """:func:`gpu.ended` by a fork of this process, which has imported what takes longest."""
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            os.environ.update(env)
            sys.argv = ["trew", *command[3:]]
            runpy.run_module(command[2], run_name="__main__")
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_run_in_small(module, monkeypatch, capsys, tmp_path):  # noqa: F811
    """One part, in a process of its own; the table and the file tell what came out."""
    gpu, prepared = module("gpu"), module("gpu_prepare")

    def prepare(env: dict[str, str], tiny: Path | None) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["gpu_prepare.py", str(tiny)])
        prepared.main()
        return json.loads(capsys.readouterr().out)

    monkeypatch.setattr(gpu, "prepare", prepare)
    monkeypatch.setattr(gpu, "ended", forked)
    here = ["--work", str(tmp_path), "--carried", str(tmp_path / "nothing")]
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry", "--only", "run", *here])
    with pytest.raises(SystemExit) as left:
        gpu.main()
    found = json.loads((tmp_path / "dry.json").read_text())
    row = found["parts"]["run"]
    assert left.value.code == 0, row
    assert found["dry"] is True
    assert found["gpu"] is None or found["gpu"]["name"]
    assert found["versions"]["torch"] == torch.__version__
    assert row["outcome"] == "passed"
    assert row["found"]["steps"] == 2
    assert "after 2 steps (8 problems)" in capsys.readouterr().out


@pytest.mark.nightly
def test_every_part_in_small(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--dry", "--work", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "dry.json").read_text())["parts"]
    assert {name: row["outcome"] for name, row in found.items()} == dict.fromkeys(
        ("tests", "run", "decode", "memory", "learner", "step"), "passed"
    )
    assert found["tests"]["found"]["failed"] == 0
    assert found["memory"]["found"]["rows"]
    assert found["step"]["found"]["rows"]


def test_without_a_gpu_it_says_so(module, capsys):  # noqa: F811
    gpu = module("gpu")
    gpu.refuse_without_gpu({"gpu": {"name": "x"}, "versions": {"torch": "2.13.0"}})
    with pytest.raises(SystemExit, match="2"):
        gpu.refuse_without_gpu({"gpu": None, "versions": {"torch": "2.13.0"}})
    assert capsys.readouterr().err == (
        "no CUDA device: torch 2.13.0 sees none; run it on a machine with one, or with --dry (make gpu DRY=1) on a "
        "CPU\n"
    )


def test_parts_of_an_earlier_call_stay_on_request(module, capsys, tmp_path):  # noqa: F811
    gpu, here, file = module("gpu"), {"gpu": {"name": "x"}, "versions": {"torch": "2.13.0"}}, tmp_path / "gpu.json"
    assert gpu.kept(file, here) == {}
    file.write_text(
        json.dumps({**here, "gpu": {"name": "x", "free_bytes": 7}, "parts": {"run": {"outcome": "passed"}}})
    )
    assert gpu.kept(file, here) == {"run": {"outcome": "passed"}}
    for other in (here | {"gpu": {"name": "y"}}, here | {"versions": {"torch": "2.14.0"}}):
        with pytest.raises(SystemExit, match="2"):
            gpu.kept(file, other)
        assert "has parts of another GPU or other versions; leave --keep out" in capsys.readouterr().err


# ---- parts


def part(module, tmp_path, program: str, *, limit_s: float = 60.0):  # noqa: F811
    result = tmp_path / "found.json"
    code = f"import json, pathlib, sys, time\nout = pathlib.Path({str(result)!r})\n{program}"
    gpu = module("gpu")
    return gpu.Part(limit_s=limit_s, command=["-c", code], result=result, read=gpu.read_json, told=str)


def test_a_part_that_fails_keeps_its_figures_and_its_last_words(module, tmp_path):  # noqa: F811
    made = part(module, tmp_path, "out.write_text('[1]'); sys.exit('no kernel image')")
    row = module("gpu").run(made, dict(os.environ), tmp_path / "log", 60.0)
    assert (row["outcome"], row["found"]) == ("failed", [1])
    assert row["says"] == "no kernel image"


def test_figures_of_an_earlier_run_are_not_taken_for_this_one_s(module, tmp_path):  # noqa: F811
    made = part(module, tmp_path, "pass")
    made.result.write_text("[1]")
    row = module("gpu").run(made, dict(os.environ), tmp_path / "log", 60.0)
    assert row["outcome"] == "failed"
    assert "found" not in row


def test_a_part_that_hangs_is_ended_with_what_it_started(module, tmp_path, monkeypatch):  # noqa: F811
    real, log = subprocess.Popen.wait, tmp_path / "log"

    def wait(process: Any, timeout: float | None = None) -> int:
        """However slow the machine is, the limit ends a part that has begun; and it ends it soon."""
        if timeout is not None:
            wait_for(lambda: "begun" in log.read_text())
        return real(process, timeout and timeout / 100)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    child = "import subprocess; p = subprocess.Popen(['sleep', '600']); out.write_text(str(p.pid)); print('begun')"
    made = part(module, tmp_path, f"{child}\nsys.stdout.flush(); time.sleep(600)", limit_s=8.0)
    row = module("gpu").run(made, dict(os.environ), log, 600.0)
    assert (row["outcome"], row["limit_s"], row["says"]) == ("too late", 8.0, "begun")
    stat = Path(f"/proc/{row['found']}/stat")
    wait_for(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", stat.read_text)


def test_no_part_is_begun_without_time_for_it(module, tmp_path):  # noqa: F811
    row = module("gpu").run(part(module, tmp_path, "1 / 0"), dict(os.environ), tmp_path / "log", 1.0)
    assert row == {"outcome": "not started", "seconds": 0.0, "says": "1 s were left of --limit"}


# ---- what is carried


def wheel(folder: Path, name: str, version: str, *requires: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    with zipfile.ZipFile(path, "w") as archive:
        text = "\n".join([*lines, *(f"Requires-Dist: {one}" for one in requires)])
        archive.writestr(f"{name}-{version}.dist-info/METADATA", text + "\n")
    return path


def test_only_what_is_missing_or_too_old_is_installed_with_what_it_needs(module, tmp_path):  # noqa: F811
    a = wheel(tmp_path, "a", "2.0", "b>=1", "c>=1", "d; extra == 'x'")
    b, c = wheel(tmp_path, "b", "1.0"), wheel(tmp_path, "c", "1.0", "b>=1")
    there = {"a": "1.0", "c": "1.5", "e": "3"}
    wanted = [Requirement("a>=2"), Requirement("e>=2"), Requirement("f")]
    found = module("carried").missing(wanted, [a, b, c], there.get)
    assert found.wheels == [a, b]  # c is there, and recent enough
    assert found.lacking == ["f (there: none)"]


def test_what_is_to_be_carried_is_all_that_trew_needs_but_torch(module):  # noqa: F811
    needs = {"a": ["torch>=2", "b; extra == 'x'", "c"], "b": [], "c": ["a"], "torch": ["d"]}
    closure = module("carried").closure
    assert closure([Requirement("a")], needs.__getitem__) == ["a", "c"]
    assert closure([Requirement("a[x]")], needs.__getitem__) == ["a", "b", "c"]
    names = {requirement.name for requirement in module("carried").roots()}
    assert {"pyarrow", "tyro", "pytest"} <= names
    assert not names & {"torch", "transformers"}


def test_parts_of_a_file_are_put_together_again(module, tmp_path):  # noqa: F811
    carried, whole = module("carried"), wheel(tmp_path, "large", "1.0")
    content = whole.read_bytes()
    carried.split(whole, 40)
    assert not whole.exists()
    assert len(list(tmp_path.glob("large-*.part*"))) == -(-len(content) // 40)
    carried.join(tmp_path, tmp_path / "joined")
    assert (tmp_path / "joined" / whole.name).read_bytes() == content


def test_parts_that_were_left_behind_are_told(module, tmp_path):  # noqa: F811
    carried, whole = module("carried"), wheel(tmp_path, "large", "1.0")
    carried.split(whole, 40)
    next(tmp_path.glob("*.part02of*")).unlink()
    with pytest.raises(SystemExit, match=r"^large-1.0-py3-none-any.whl.part02of\d\d: not in .*; carry all parts of"):
        carried.join(tmp_path, tmp_path / "joined")


def test_the_model_that_is_carried_is_the_one_that_is_unpacked(module):  # noqa: F811
    from trew.models import default

    assert module("carried").MODEL == default._WHEEL
