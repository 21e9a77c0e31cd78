"""A Ray cluster of several nodes on this machine, and runs on it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import tiny

PAIR = ("--set", "cluster.learner=2", "threads=2")  # two CPUs each, so that each node has one
PATIENCE_S = 400.0
"""Ray's workers run at low priority: beside other work they may take minutes."""
STORE_BYTES = 80_000_000
REWARD = """
import os, time

def vowels(completions, completion_ids, **columns):
    return [round(sum(i % 2 for i in ids) / len(ids), 1) for ids in completion_ids]

def held(completions, completion_ids, out, **columns):
    # After the checkpoint of each step that the test names, waits for the test.
    open(out + ".pid", "w").write(str(os.getpid()))
    while any(os.path.exists(f"{out}/checkpoints/{n:06}/manifest.json") and os.path.exists(f"{out}.hold-{n}")
              for n in range(1, 4)):
        time.sleep(0.05)
    return vowels(completions, completion_ids)
"""
RECIPE = """
model = "lm"
chat_template = "plain"
steps = 4
seed = 1
kernels = "plain"
linear = "plain"
[data]
task = "arithmetic"
[[rewards]]
name = "reward.py:vowels"
[rollout]
prompts = 4
completions = 4
max_tokens = 8
[objective]
preset = "grpo"
[learner]
lr = 1e-3
inner_updates = 2
microbatch_tokens = 64
[eval]
size = 3
[checkpoint]
every = 1
[track]
samples_every = 0
regrade_every = 0
"""


def furnish(folder: Path) -> None:
    """Writes a model, a reward and a recipe."""
    tiny.model("llama", initializer_range=0.1).save_pretrained(folder / "lm")
    tiny.tokenizer(chat=False).save_pretrained(folder / "lm")
    (folder / "r.toml").write_text(RECIPE)
    (folder / "reward.py").write_text(REWARD)


def alone(folder: Path) -> Path:
    """Runs the recipe in one process, without Ray."""
    command = [sys.executable, "-m", "trew", "train", "r.toml", "--out", "alone", "--set", "threads=2"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, cwd=folder, env=env, check=True, timeout=PATIENCE_S, capture_output=True)
    return folder / "alone"


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "final" / "model.safetensors")


def metrics(run: Path) -> list[tuple[int, float, float]]:
    rows = Run(run.parent, "", run.name).rows()
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]


def holding(folder: Path, out: str, *steps: int) -> list[str]:
    """Settings with which a run stands after the checkpoints of these steps."""
    for step in steps:
        (folder / f"{out}.hold-{step}").touch()
    return ["--set", f"rewards=[{{name='reward.py:held', args={{out='{out}'}}}}]"]


@contextlib.contextmanager
def cluster(*cpus: int) -> Iterator[Any]:
    """Nodes with so many CPUs each: processes of their own, the first is the head."""
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus[0], "object_store_memory": STORE_BYTES, "include_dashboard": False},
    )
    try:
        for count in cpus[1:]:
            made.add_node(num_cpus=count, object_store_memory=STORE_BYTES)
        yield made
    finally:
        made.shutdown()


class Run:
    """``trew train r.toml`` on a cluster; use as a context."""

    def __init__(self, folder: Path, address: str, out: str, *arguments: str, **variables: str) -> None:
        self.folder, self.out, self.log = folder, folder / out, folder / f"{out}.log"
        self._command = [sys.executable, "-m", "trew", "train", "r.toml", "--out", out, *arguments]
        self._variables = {"RAY_ADDRESS": address, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}

    def __enter__(self) -> Run:
        self.before = self.boards()  # one of a run whose first process was killed may be there
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                self._command, cwd=self.folder, env=os.environ | self._variables, stdout=log, stderr=log
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def boards(self) -> set[Path]:
        """The folders through which runs speak to their ranks."""
        return {*self.folder.glob(".trew-ranks-*")}

    def text(self) -> str:
        return " ".join(self.log.read_text(errors="replace").split())

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def rows(self) -> list[dict[str, Any]]:
        path = self.out / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[int]:
        return [row["step"] for row in self.rows() if "loss" in row]

    def held(self, step: int = 1) -> Run:
        """Waits until the run, by :func:`holding`, stands after the checkpoint of a step, until :meth:`go`."""
        saved = self.out / "checkpoints" / f"{step:06}" / "manifest.json"
        wait_for(lambda: saved.exists() or self.process.poll() is not None, self.text)
        assert self.process.poll() is None, self.text()
        return self

    def go(self, step: int = 1) -> None:
        """Lets the run go on."""
        self.out.with_suffix(f".hold-{step}").unlink()

    def rank(self, number: int, *, other_than: int = 0) -> int:
        """The process of a rank."""
        found = [0]

        def there() -> bool:
            found[0] = max(
                (pid for pid in processes(self.folder, self.out.name) if _has(pid, f"RANK={number}")), default=0
            )
            return found[0] not in (0, other_than)

        wait_for(there, self.text)
        return found[0]


def ancestors(pid: int) -> list[int]:
    """The processes above one."""
    above = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        above.append(pid)
    return above


def processes(folder: Path, *words: str) -> list[int]:
    """Processes of runs in a folder whose command line has all of these words."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().decode(errors="replace").split("\0")
            if (entry.parent / "cwd").readlink() != folder.resolve() or "isolation/boot.py" in " ".join(line):
                continue
            if all(word in line for word in ("train", *words)):
                found.append(int(entry.parent.name))
    return found


def processes_with(word: str) -> list[int]:
    """Processes with a word in their command line that begins with it, without shells and guardians."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = entry.read_bytes().decode(errors="replace").split("\0")
            if any(each.startswith(word) for each in line) and "isolation/boot.py" not in " ".join(line):
                found.append(int(entry.parent.name))
    return found


def _has(pid: int, variable: str) -> bool:
    with contextlib.suppress(OSError):
        return f"\0{variable}\0" in "\0" + Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return False


def kill(pid: int, signum: int = signal.SIGKILL) -> None:
    os.kill(pid, signum)


def wait_for(condition: Callable[[], Any], what: Callable[[], Any], seconds: float = PATIENCE_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.1)
