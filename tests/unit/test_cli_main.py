"""The command line: help at once, clear refusals, exit codes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial

import pytest

from trew.cli.main import COMMANDS, expand_pairs


@pytest.fixture
def trew(server, tmp_path) -> Callable[..., str]:
    """The command line in a process of its own, and what it printed."""
    return partial(server.run, cwd=tmp_path)


@pytest.mark.parametrize("args", [(), ("--help",), ("-h",), ("--version",)])
def test_help_imports_nothing_heavy(args):
    code = (
        "import sys; from trew.cli.main import run; assert run(sys.argv[1:]) == 0; "
        "heavy = {'torch', 'transformers', 'numpy', 'tyro', 'rich', 'pyarrow'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_help_names_every_command():
    out = subprocess.run([sys.executable, "-m", "trew", "--help"], capture_output=True, text=True, check=True).stdout
    for name in COMMANDS:
        assert f"  {name} " in out


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_process_that_is_started_without_streams_has_some(closed):
    """As a daemon may be. Nothing that it opens, and no process that it starts, gets the number of standard output."""
    code = (
        "import os, subprocess, sys; from trew.cli import main; "
        "main.run = lambda args: os.fstat(1).st_rdev != os.stat(os.devnull).st_rdev "
        "or subprocess.run(['sh', '-c', 'echo said']).returncode or print('said'); main.main([])"
    )
    shell = f'exec "$0" -c "$1" {closed}'
    assert subprocess.run(["sh", "-c", shell, sys.executable, code], timeout=60).returncode == 0


@pytest.mark.parametrize("name", [n for n, (_, target, _) in COMMANDS.items() if isinstance(target, str)])
def test_every_command_has_help(name, trew):
    out = trew(name, "--help")
    assert "usage" in out.lower()
    assert len(out) > 150


@pytest.mark.parametrize(
    ("name", "sub"), [(n, s) for n, (_, t, _) in COMMANDS.items() if isinstance(t, tuple) for s in t]
)
def test_every_subcommand_has_help(name, sub, trew):
    assert sub in trew(name, "--help")
    assert len(trew(name, sub, "--help")) > 150


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("trian",), "did you mean 'train'"),
        (("data", "prepar"), "did you mean 'prepare'"),
        (("train", "missing.toml"), "missing.toml: no such recipe"),
        (("train", "missing.toml", "--dry-rum"), "--dry-rum"),
        (("explain", "dapoo"), "did you mean 'dapo'"),
        (("demo", "--seed", "x"), "seed"),
    ],
)
def test_refusals_have_one_clear_message_and_code_2(args, expected, trew):
    assert expected in trew(*args, code=2)


def test_explain_prints_and_plots(tmp_path, trew):
    out = trew("explain", "dapo", "--plot", tmp_path / "w.svg")
    assert "2503.14476" in out
    assert "eps_high = 0.28" in out
    assert (tmp_path / "w.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("args", "expanded"),
    [
        (["--set", "a=1", "b=2", "r.toml"], ["--set", "a=1", "--set", "b=2", "r.toml"]),
        (["--set", "a=1", "--set", "b=2"], ["--set", "a=1", "--set", "b=2"]),
        (["r.toml", "--set"], ["r.toml", "--set"]),
        (["--set", "--resume"], ["--set", "--resume"]),
        (["--set", "novalue", "--resume"], ["--set", "novalue", "--resume"]),
        (["r.toml"], ["r.toml"]),
    ],
)
def test_one_set_takes_many(args, expanded):
    assert expand_pairs(args) == expanded
