"""Commands in a place where nothing can run: one message that says what to do, before anything heavy is imported."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile

import pytest

from trew.cli import doctor
from trew.cli.main import main
from trew.utils import installing


def ended(capsys, *args: str) -> tuple[object, list[str]]:
    with pytest.raises(SystemExit) as end:
        main(args)
    return end.value.code, capsys.readouterr().err.splitlines()


@pytest.fixture
def deleted(tmp_path, monkeypatch):
    """The current folder, which is no more."""
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()


@pytest.mark.usefixtures("deleted")
@pytest.mark.parametrize("args", [("data", "prepare", "gsm8k"), ("view", "runs/r"), ("train", "r.toml"), ("schema",)])
def test_a_folder_that_was_deleted_is_told(args, capsys):
    assert ended(capsys, *args) == (2, ["trew: the current folder no longer exists; cd into another one"])


@pytest.mark.usefixtures("deleted")
def test_help_and_hints_need_no_folder(capsys):
    assert ended(capsys, "train", "--help") == (0, [])
    assert shlex.split(installing.install_packages("x"))[0] == sys.executable
    assert installing.install_packages("x", python="bin/python") == "bin/python -m pip install x"


@pytest.fixture
def without_temporary(tmp_path, monkeypatch):
    """No folder that temporary files could be written to."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    return tmp_path / "none"


@pytest.mark.parametrize(
    "args",
    [
        ("train", "r.toml"),
        ("eval", "lm"),
        ("chat", "lm", "hello"),
        ("plan", "r.toml"),
        ("rewards", "test", "gsm8k"),
        ("env", "guess", "--check", "--tools", "python"),
        ("schema",),
    ],
    ids=" ".join,
)
def test_a_machine_without_a_temporary_folder_is_told_of_tmpdir(args, without_temporary, capsys):
    code, said = ended(capsys, *args)
    assert code == 2
    assert said == [
        f"trew: temporary folder: no usable temporary directory found in ['{without_temporary}']; set TMPDIR to a "
        "folder that can be written to"
    ]


@pytest.mark.usefixtures("without_temporary")
@pytest.mark.parametrize("args", [("--help",), ("train", "--help"), ("env",), ("data", "show", "--task", "arithmetic")])
def test_what_needs_none_runs(args, capsys):
    assert ended(capsys, *args) == (0, [])


@pytest.mark.usefixtures("without_temporary")
def test_doctor_says_so_too():
    first = next(doctor._disk())
    assert (first.mark, first.what) == ("bad", "temporary folder")
    assert first.says.startswith("no usable temporary directory found in [")
    assert first.todo == "set TMPDIR to a folder that can be written to"


@pytest.mark.parametrize("args", [("env",), ("completion", "bash"), ("train", "r.toml")], ids=" ".join)
def test_python_without_docstrings_is_refused(args):
    done = subprocess.run([sys.executable, "-OO", "-m", "trew", *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("trew: Python leaves out docstrings (PYTHONOPTIMIZE is 2 or more, or -OO), ")
    assert done.stderr.endswith("unset PYTHONOPTIMIZE, or set it to 1\n")
    assert done.stderr.count("\n") == 1


def test_its_help_is_shown_all_the_same():
    subprocess.run([sys.executable, "-OO", "-m", "trew", "--help"], capture_output=True, check=True, timeout=60)
