"""Hints that say how to install something: right for this Python, wherever trew came from, and from one place."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

from trew.utils import installing

SOURCE = Path(installing.__file__).parents[1]


def test_no_hint_is_written_elsewhere():
    """An extra's name in a hint would send people to a package index that may not have trew, or have another one."""
    for path in SOURCE.rglob("*.py"):
        if path.name == "installing.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert "pip install" not in node.value, f"{path}: use trew.utils.installing"
                assert "trew[" not in node.value, f"{path}:{node.lineno}: use trew.utils.installing.install_extra"


def test_a_hint_is_a_command_of_this_python(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    command = shlex.split(installing.install_packages("peft>=0.20", "a[b]<2"))
    assert command == [sys.executable, "-m", "pip", "install", "peft>=0.20", "a[b]<2"]
    said = subprocess.run([*command[:3], "--version"], capture_output=True, text=True, check=True).stdout
    assert said.startswith("pip ")


def test_a_hint_is_short_next_to_the_environment(monkeypatch):
    environment = Path(sys.prefix)
    monkeypatch.chdir(environment.parent)
    monkeypatch.setattr(sys, "executable", str(environment / "bin" / "python"))
    assert installing.install_packages("x") == f"{environment.name}/bin/python -m pip install x"
    assert os.path.exists(installing.install_packages("x").split()[0])


def test_an_environment_without_pip_is_told_of_uv(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "distributions", lambda **_: [])
    assert installing.install_packages("x>1") == f"uv pip install --python {sys.executable} 'x>1'"
    assert installing.install_packages("x", python="/other/python") == "/other/python -m pip install x"


def test_a_hint_leaves_torch_compile_its_distutils():
    """setuptools gives up its own where somebody looks for pip as a module."""
    code = "import sys; from trew.utils import installing; installing.install_packages('x'); " \
        "import setuptools, distutils; print('setuptools' in distutils.__file__)"  # fmt: skip
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_extras_are_those_of_the_checkout():
    assert installing.checkout() == SOURCE.parents[1]
    assert installing.install_extra("lora").endswith("-m pip install 'peft>=0.20'")
    assert shlex.split(installing.install_trew())[-2:] == ["-e", str(SOURCE.parents[1])]


def test_without_a_checkout_the_installed_metadata_is_read(monkeypatch):
    lines = [
        "torch>=2.10",
        'peft>=0.20; extra == "lora"',
        "ray[train]>=2.52; extra == 'ray'",
        'x<2,>=1; extra == "ray"',
    ]
    monkeypatch.setattr(installing, "checkout", lambda: None)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    wanted = {"": ["torch>=2.10"], "lora": ["peft>=0.20"], "ray": ["ray[train]>=2.52", "x<2,>=1"]}
    assert installing.requirements() == wanted
    assert "docs/install.md" in installing.install_trew()
