"""The sides of the benchmarks beside TRL have the same work: the real GRPOTrainer learns as trew does.

The benchmarks are commands that are run by hand, these tests nightly."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ROOT / ".venv" / "bin" / "python"


@pytest.mark.nightly
@pytest.mark.skipif(not OURS.exists(), reason="trew's own environment .venv is not there: make test")
@pytest.mark.parametrize("setting", ["ragged-fp32", "kl-inner2-fp32"])
def test_gradient_norms_agree(setting, tmp_path):
    out = tmp_path / "step.json"
    command = [OURS, ROOT / "benchmarks" / "step.py", "--peer", "trl", "--models", "tiny", "--settings", setting,
               "--repeats", "1", "--steps", "1", "--threads", "1", "--json", out]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())["rows"]
    norm = row["same_completions"]["grad_norm"]
    assert norm["ours"] == pytest.approx(norm["peer"], rel=1e-4)
    assert row["ratio"] == pytest.approx(row["seconds"]["peer"] / row["seconds"]["ours"])
    phases = {"forward", "backward"} | ({"old", "ref"} if "kl" in setting else set())
    assert phases <= set(row["phases"]["peer"])


@pytest.mark.nightly
@pytest.mark.skipif(not OURS.exists(), reason="trew's own environment .venv is not there: make test")
def test_learning_beside_trl(tmp_path):
    """Both sides of benchmarks/learning.py: the same prompts and the same evaluation before training, or it stops."""
    import tiny

    tiny.save(tmp_path / "lm")
    out = tmp_path / "learning.json"
    command = [OURS, ROOT / "benchmarks" / "learning.py", "--peer", "trl", "--seeds", "0", "--steps", "2",
               "--prompts", "2", "--completions", "4", "--eval-size", "3", "--peer-rows", "2",
               "--runs", tmp_path / "runs", "--json", out,
               "--set", f"model={tmp_path / 'lm'}", "--set", "chat_template=plain"]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert [(row["side"], row["seed"]) for row in found["rows"]] == [("trew", 0), ("trl", 0)]
    for row in found["rows"]:
        assert [at["step"] for at in row["evaluations"]] == [0, 2]
        assert [at["rollouts"] for at in row["steps"]] == [8, 8]
    assert found["summary"]["pairs"]["pairs"] == 1
