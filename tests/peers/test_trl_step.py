"""The benchmark's two sides are of the same work: the real GRPOTrainer learns from trew's completions as trew does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ROOT / ".venv" / "bin" / "python"


@pytest.mark.skipif(not OURS.exists(), reason="trew's own environment .venv is not there: make test")
def test_gradient_norms_agree(tmp_path):
    out = tmp_path / "step.json"
    settings = "ragged-fp32,kl-inner2-fp32"
    command = [OURS, ROOT / "benchmarks" / "step.py", "--peer", "trl", "--models", "tiny", "--settings", settings,
               "--repeats", "1", "--steps", "1", "--threads", "1", "--json", out]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 2
    for row in rows:
        norm = row["same_completions"]["grad_norm"]
        assert norm["ours"] == pytest.approx(norm["peer"], rel=1e-4)
        assert row["ratio"] == pytest.approx(row["seconds"]["peer"] / row["seconds"]["ours"])
    assert {"old", "ref", "forward", "backward"} <= set(rows[1]["phases"]["peer"])
