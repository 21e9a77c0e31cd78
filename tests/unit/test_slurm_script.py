"""recipes/slurm.sh, with stand-ins for Slurm's commands: what it would run, and where it goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")


@pytest.fixture
def job(tmp_path):
    """Runs the script as a job of some nodes; returns the words of the command that srun gets."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"srun": 'printf "%s\\n" "$@"', "scontrol": "echo first; echo second"}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    def run(nodes: int, *words: str) -> list[str]:
        env = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": str(nodes),
               "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77", "SLURM_GPUS_ON_NODE": "8"}  # fmt: skip
        done = subprocess.run(
            ["bash", ROOT / "recipes" / "slurm.sh", *words], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def test_on_one_node_trew_starts_the_ranks(job):
    assert job(1, "r/gsm.toml", "steps=5") == [
        "--kill-on-bad-exit=1", "trew", "train", "r/gsm.toml", "--out", "runs/slurm-gsm", "--set", "steps=5",
    ]  # fmt: skip
    assert job(1, "r/gsm.toml")[-2:] == ["--out", "runs/slurm-gsm"]


def test_on_several_torchrun_does(job):
    words = job(2, "r/gsm.toml", "steps=5")
    assert words[:6] == ["--kill-on-bad-exit=1", "torchrun", "--nnodes", "2", "--nproc-per-node", "8"]
    assert words[words.index("--rdzv-endpoint") + 1] == "first:29400"
    assert words[-9:] == [
        "-m", "trew", "train", "r/gsm.toml", "--out", "runs/slurm-gsm", "--set", "cluster.learner=0", "steps=5",
    ]  # fmt: skip


def test_a_job_that_is_queued_again_goes_on(job, tmp_path):
    (tmp_path / "runs" / "slurm-gsm" / "checkpoints").mkdir(parents=True)
    assert "--resume" in job(1, "r/gsm.toml")
    assert "--resume" in job(2, "r/gsm.toml")


def test_its_options_are_those_of_the_commands(job):
    from trew.cli.train import train

    known = train.__kwdefaults__.keys()
    words = [word for word in job(2, "r/gsm.toml", "a=1") if word in ("--out", "--resume", "--set")]
    assert {word.removeprefix("--") for word in words} <= known
