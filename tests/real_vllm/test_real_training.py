"""Whole trainings through the command line on a server that the run starts: killed and continued; in turns with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm_models import save

from recipe_help import ODD, recipe, training_rows
from trew.rewards.isolation import tree


def trew(*args: str, cwd: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trew", "train", "recipe.toml", *args]
    out = (cwd / "out.txt").open("a")
    return subprocess.Popen(
        command, cwd=cwd, stdout=out, stderr=out, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )


def steps(folder: Path) -> list[dict[str, Any]]:
    run = folder / "run"
    return training_rows(run) if (run / "metrics.jsonl").exists() else []


def within(seconds: float, condition: Any) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.1)
    return bool(condition())


def written(folder: Path, **settings: Any) -> None:
    """Writes a recipe with a server, and what it needs, into ``folder``."""
    model = save(folder / "model", tie_word_embeddings=True)
    (folder / "reward.py").write_text(ODD)
    cluster = {
        "rollout": "vllm", "servers": 1, "python": os.environ["TREW_VLLM_PYTHON"], "server_args": {"max-num-seqs": 16},
    }  # fmt: skip
    common = {"rollout": {"completions": 4, "max_tokens": 8}, "eval": {"size": 8}}
    (folder / "recipe.toml").write_text(recipe(model, out="run", **common, cluster=cluster, **settings))


def test_a_run_trains_on_its_own_server_and_goes_on_after_it_was_killed(tmp_path, record):
    written(tmp_path, steps=12, checkpoint={"every": 2})
    first = trew(cwd=tmp_path)
    assert within(600, lambda: len(steps(tmp_path)) >= 5 or first.poll() is not None)
    below = tree.descendants(first.pid)
    first.kill()
    first.wait()
    said = (tmp_path / "out.txt").read_text()
    assert len(steps(tmp_path)) >= 5, said
    assert within(15, lambda: not [pid for pid in below if Path(f"/proc/{pid}").exists()])
    second = trew("--resume", cwd=tmp_path)
    assert second.wait(900) == 0, (tmp_path / "out.txt").read_text()
    rows = steps(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert max(row["canary_gap"] for row in rows) < 1e-5
    assert all(row["staleness"] == 0 for row in rows)
    assert (tmp_path / "run" / "servers" / "0.log").read_text().count("==== trew starts:") == 2
    assert not list((tmp_path / "run" / "weights").glob("*"))
    record("training_canary_gap_max_nats", float(f"{max(row['canary_gap'] for row in rows):.2g}"))


def test_a_run_in_turns_with_its_server_equals_the_run_without(tmp_path, record):
    """The build for CPUs has the routes that take turns need, and keeps its memory: only the order differs."""
    written(tmp_path, steps=4)
    for out, colocate in (("apart", "false"), ("turns", "true")):
        done = trew("--set", f"out={out}", f"cluster.colocate={colocate}", cwd=tmp_path)
        assert done.wait(900) == 0, (tmp_path / "out.txt").read_text()
    apart, turns = (training_rows(tmp_path / out) for out in ("apart", "turns"))
    assert [row["step"] for row in turns] == [1, 2, 3, 4]
    assert [[row[key] for key in ("loss", "reward", "grad_norm")] for row in turns] == [
        [row[key] for key in ("loss", "reward", "grad_norm")] for row in apart
    ]
    first, second = (load_file(tmp_path / out / "final" / "model.safetensors") for out in ("apart", "turns"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    log = (tmp_path / "turns" / "servers" / "0.log").read_text()
    assert log.count("==== trew starts:") == 1, "the server was restarted instead of woken up"
    assert "sleep mode is not supported on CPU" in log
    record("colocated_canary_gap_max_nats", float(f"{max(row['canary_gap'] for row in turns):.2g}"))
