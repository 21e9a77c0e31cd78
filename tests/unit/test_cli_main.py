"""The command line as a subprocess: help at once, clear refusals, exit codes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trew.cli.main import COMMANDS, expand_set


def trew(*args: str, code: int | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-m", "trew", *args], capture_output=True, text=True, timeout=120)
    if code is not None:
        assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


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
    out = trew("--help", code=0).stdout
    for name in COMMANDS:
        assert f"  {name} " in out


@pytest.mark.parametrize("name", [n for n, (_, target, _) in COMMANDS.items() if isinstance(target, str)])
def test_every_command_has_help(name):
    out = trew(name, "--help", code=0).stdout
    assert "usage" in out.lower()
    assert len(out) > 150


@pytest.mark.parametrize(
    ("name", "sub"), [(n, s) for n, (_, t, _) in COMMANDS.items() if isinstance(t, tuple) for s in t]
)
def test_every_subcommand_has_help(name, sub):
    assert sub in trew(name, "--help", code=0).stdout
    assert len(trew(name, sub, "--help", code=0).stdout) > 150


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
def test_refusals_have_one_clear_message_and_code_2(args, expected):
    done = trew(*args, code=2)
    assert expected in done.stderr + done.stdout


def test_explain_prints_and_plots(tmp_path):
    out = trew("explain", "dapo", "--plot", str(tmp_path / "w.svg"), code=0).stdout
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
    assert expand_set(args) == expanded
