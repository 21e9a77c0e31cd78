"""docs/metrics.md: its pictures are those of the results, and every branch of its path ends in a command."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()


@pytest.fixture(scope="module")
def sick_runs() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("sick_runs", ROOT / "benchmarks" / "sick_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sick_runs"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(ROOT / "benchmarks"))


def test_pictures_are_those_of_the_results(sick_runs):
    """Otherwise: python benchmarks/sick_runs.py --draw"""
    for path, svg in sick_runs.files().items():
        assert path.read_text(encoding="utf-8") == svg, path.name
        assert f"images/metrics/{path.name}" in PAGE


def test_the_runs_show_what_the_page_says(sick_runs):
    runs = json.loads(sick_runs.RESULTS.read_text(encoding="utf-8"))["runs"]
    healthy, collapse, equal, length, ratio, hacking = (runs[name] for name in sick_runs.CASES)
    assert healthy["reward"][-1] > healthy["reward"][0] + 0.3
    assert healthy["entropy"][-1] > 0.7 * healthy["entropy"][0]
    assert collapse["entropy"][-1] < 0.1 * collapse["entropy"][0]
    assert set(equal["zero_signal_share"]) == {1.0}
    assert set(equal["grad_norm"]) == {0.0}
    assert length["truncated_share"][0] < 0.2 < 0.9 < length["truncated_share"][-1]
    assert max(ratio["ratio_q99"]) > 5
    assert sum(ratio["ess"]) / len(ratio["ess"]) < 0.5
    assert hacking["reward/odd"][-1] > 0.95
    assert max(hacking["reward/varied"]) > hacking["reward/varied"][-1] + 0.2


def test_every_branch_of_the_path_ends_in_a_command():
    path = PAGE.partition("## My reward does not rise")[2]
    branches = re.split(r"^\*\*", path, flags=re.M)[1:]
    assert len(branches) == 11
    for branch in branches:
        assert branch.rstrip().endswith("```"), branch[:60]
        assert re.search(r"^trew \w", branch, re.M), branch[:60]
