"""Rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
OURS = [*SOURCES, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.skipif(not (ROOT / "src" / "trew" / "backends").exists(), reason="the rules name the backends")
def test_imports_go_one_way():
    done = subprocess.run([Path(sys.executable).parent / "lint-imports"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_sizes_that_keep_it_readable():
    assert [f"{path.relative_to(ROOT)}: {found}" for path in OURS for found in oversized(path.read_text())] == []


def test_a_size_that_is_too_large_is_found():
    long = "def f():\n" + "    pass\n" * 100
    assert [*oversized(long)] == ["f has more than 100 lines"]
    assert [*oversized("x = 1\n" * 501)] == ["501 lines are more than 500"]
    assert [*oversized("x = 1\n" * 500)] == []


def oversized(text):
    if (lines := text.count("\n")) > 500:
        yield f"{lines} lines are more than 500"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (node.end_lineno or 0) - node.lineno >= 100:
            yield f"{node.name} has more than 100 lines"


def test_every_pinned_version_satisfies_its_floor():
    floors = dict(re.findall(r'"([A-Za-z0-9_.-]+)>=([0-9.]+)"', (ROOT / "pyproject.toml").read_text()))
    pins = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([0-9.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    normal = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}

    def parts(version: str) -> list[int]:
        return [int(p) for p in version.split(".")]

    core = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[0]
    for name in re.findall(r'^    "([A-Za-z0-9_.-]+)>=', core, re.M):
        assert name.lower() in normal, f"{name} is not pinned in constraints.txt"
        assert parts(normal[name.lower()]) >= parts(floors[name]), name
